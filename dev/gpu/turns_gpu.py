"""Whole steps of several checkouts in turns on one card: a process each, all captured before the first turn.

python3 dev/gpu/turns_gpu.py SECONDS CHECKOUT... [-- WORKLOAD...]        (20 s cold, 1 s a turn and workload)
python3 dev/gpu/turns_gpu.py compile CHECKOUT...                         (no card: whole-row kernels into the cache)

A workload "gpt2-c256-512+mlp" takes the MLP's whole rows whatever the choices say; "1:gpt2-c256" is for the second
checkout alone.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

OUT = Path(os.environ.get("OUT", "/tmp"))
TURNS = 5


def worker(names):
    """Build every workload's step, then answer each line on stdin with its time in ms."""
    import fused_gpu as fused
    import torch

    from ridgeline.engine import TrainStep
    from ridgeline.models import LanguageConfig, LanguageModel

    steps, scope = {}, contextlib.ExitStack()
    for name in names:
        scope.close()
        workload, _, rows = name.partition("+")
        config, B, T = fused.WORKLOADS[workload]
        if rows:
            scope.enter_context(fused.chosen(B * T <= 65536, {"rows": frozenset(rows.split(","))}))
        V, tied = (50257, True) if config.width == 768 else (65, False)
        m = LanguageModel(LanguageConfig(vocabulary=V, decoder=config, tied=tied), impl="fused", seed=0).cuda()
        train = TrainStep(m, precision="bf16")
        generator = torch.Generator().manual_seed(2)
        tokens = torch.randint(V, (B, T + 1), generator=generator).cuda()
        batch = {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
        for _ in range(20):
            train(batch)
        torch.cuda.synchronize()
        steps[name] = train, batch, 6 if B * T > 65536 else 20
    print("ready", flush=True)
    for line in sys.stdin:
        train, batch, repeats = steps[line.strip()]
        times = fused.turns(train, batch, repeats, 6)[1:]
        print(statistics.median(times), flush=True)


def compile_only():
    """Cubins of ops/mlp as gpt2-c256 and fast-c256 ask for them: 8,192 rows, and the MLP's with many."""
    import torch

    from ridgeline.ops import _cuda as cuda
    from ridgeline.ops.mlp import kernels

    for gpt2 in (True, False):
        for part in kernels._PARTS:
            for config in (kernels.ABREAST, kernels.WHOLE) if part.startswith("mlp") else (kernels.ABREAST,):
                forward, F = part.endswith("forward"), 1024 if gpt2 else 512
                fitted = kernels.fitted(part, 256, config, F, sums=1 + gpt2, up_bias=gpt2 and forward)
                macros = kernels.tile_macros(256, torch.bfloat16, fitted) | {
                    "RMS": int(not gpt2), "DROPOUT": 0, "RESIDUAL": 1, "NORM_BIAS": int(gpt2),
                    "BRANCH_BIAS": int(gpt2 and forward),
                }  # fmt: skip
                if part.startswith("mlp"):
                    macros |= {"GELU_TANH": 1} if forward else {}
                    macros |= {"UP_BIAS": int(gpt2 and forward)}
                else:
                    macros |= {"BACKWARD": int(not forward)}
                cuda.build(kernels.FOLDER / kernels.source(part), macros, "sm_90a")


def main(seconds, checkouts, names):
    """Turns of every checkout and workload until `seconds` have passed."""
    end, here = time.time() + seconds, str(Path(__file__).resolve().parent)
    workers, mine = {}, {c: [] for c in checkouts}
    for name in names:
        index, _, workload = name.rpartition(":")
        for checkout in [checkouts[int(index)]] if index else checkouts:
            mine[checkout].append(workload)
    names = list(dict.fromkeys(name.rpartition(":")[2] for name in names))
    for checkout in checkouts:
        path = os.pathsep.join([str(Path(checkout).resolve() / "src"), here, os.environ.get("PYTHONPATH", "")])
        workers[checkout] = subprocess.Popen(
            [sys.executable, __file__, "--worker", *mine[checkout]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
        )
    times = {name: {checkout: [] for checkout in checkouts} for name in names}
    try:
        for checkout, process in workers.items():
            while (line := process.stdout.readline()).strip() != "ready":
                if not line:
                    print(f"{checkout} ended before it was ready", flush=True)
                    mine[checkout].clear()
                    break
        for turn in range(TURNS):
            for name in names:
                for checkout in list(checkouts) if turn % 2 else list(checkouts)[::-1]:
                    if time.time() > end:
                        return
                    if name not in mine[checkout]:
                        continue
                    process = workers[checkout]
                    process.stdin.write(name + "\n")
                    process.stdin.flush()
                    if line := process.stdout.readline():
                        times[name][checkout].append(float(line))
                    else:
                        mine[checkout].clear()
            for name in names:
                print(
                    f"turn {turn} {name}: " + ", ".join(f"{c} {t[-1]:.4f}" for c, t in times[name].items() if t),
                    flush=True,
                )
    finally:
        (OUT / "turns.json").write_text(json.dumps(times))
        for name in names:
            for checkout, t in times[name].items():
                if t:
                    spread = f"{min(t):.4f} to {max(t):.4f} in {len(t)} turns"
                    print(f"{name:16s} {checkout:24s} median {statistics.median(t):.4f} ms, {spread}", flush=True)
        for process in workers.values():
            process.kill()


if __name__ == "__main__":
    if sys.argv[1] == "--worker":
        worker(sys.argv[2:])
    elif sys.argv[1:] == ["compile"]:
        compile_only()
    elif sys.argv[1] == "compile":
        here = [
            subprocess.Popen([sys.executable, __file__, "compile"], env=os.environ | {"PYTHONPATH": f"{c}/src"})
            for c in sys.argv[2:]
        ]
        sys.exit(max(p.wait() for p in here))
    else:
        arguments, names = sys.argv[2:], ["gpt2-c256", "fast-c256"]
        if "--" in arguments:
            cut = arguments.index("--")
            arguments, names = arguments[:cut], arguments[cut + 1 :]
        main(float(sys.argv[1]), arguments, names)
