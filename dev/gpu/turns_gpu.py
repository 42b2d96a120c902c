"""Whole steps of several checkouts in turns on one card: a process each, all captured before the first turn.

python3 dev/gpu/turns_gpu.py SECONDS CHECKOUT... [-- WORKLOAD...]        (20 s cold, 1 s a turn and workload)
"""

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

    steps = {}
    for name in names:
        config, B, T = fused.WORKLOADS[name]
        m = LanguageModel(LanguageConfig(vocabulary=65, decoder=config), impl="fused", seed=0).cuda()
        train = TrainStep(m, precision="bf16")
        generator = torch.Generator().manual_seed(2)
        tokens = torch.randint(65, (B, T + 1), generator=generator).cuda()
        batch = {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
        for _ in range(20):
            train(batch)
        torch.cuda.synchronize()
        steps[name] = train, batch, 6 if B * T > 65536 else 20
    print("ready", flush=True)
    for line in sys.stdin:
        train, batch, repeats = steps[line.strip()]
        times = []
        for turn in range(6):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            for _ in range(repeats):
                train(batch)
            b.record()
            torch.cuda.synchronize()
            times += [a.elapsed_time(b) / repeats] * (turn > 0)
        print(statistics.median(times), flush=True)


def main(seconds, checkouts, names):
    """Turns of every checkout and workload until `seconds` have passed."""
    end, here = time.time() + seconds, str(Path(__file__).resolve().parent)
    workers = {}
    for checkout in checkouts:
        path = os.pathsep.join([str(Path(checkout).resolve() / "src"), here, os.environ.get("PYTHONPATH", "")])
        workers[checkout] = subprocess.Popen(
            [sys.executable, __file__, "--worker", *names],
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
                    sys.exit(f"{checkout} ended before it was ready")
        for turn in range(TURNS):
            for name in names:
                for checkout in list(checkouts) if turn % 2 else list(checkouts)[::-1]:
                    if time.time() > end:
                        return
                    process = workers[checkout]
                    process.stdin.write(name + "\n")
                    process.stdin.flush()
                    times[name][checkout].append(float(process.stdout.readline()))
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
    else:
        arguments, names = sys.argv[2:], ["gpt2-c256", "fast-c256"]
        if "--" in arguments:
            cut = arguments.index("--")
            arguments, names = arguments[:cut], arguments[cut + 1 :]
        main(float(sys.argv[1]), arguments, names)
