"""A policy's two ends in several checkouts, in turns on one card: each against fp64, then µs of the heads' op and each head's
kernel, of the input layer, its tables' gradients and its vector.

python3 dev/gpu/heads_turns_gpu.py SECONDS CHECKOUT...          (40 s cold, 1 s a turn; a checkout that is wrong gets no time)
"""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

OUT = Path(os.environ.get("OUT", "/tmp"))
TURNS = 7


def input_op():
    """Both passes of hal-20m's input layer, to be called."""
    import heads_gpu as H
    import torch

    from ridgeline.ops.sink import ATTRIBUTE

    layer, flat, dy = H.input_problem(H.N)
    H.sinks_on(flat)

    def step():
        for w in flat:
            getattr(w, ATTRIBUTE).begin(add=False)
        torch.autograd.grad(layer(flat, "triton"), flat, dy, allow_unused=True)

    return step


def worker():
    """Check, then answer each line on stdin with the times."""
    import heads_gpu as H
    import torch
    from fused_gpu import captured
    from heads_trace_gpu import each_head, op, profiled

    import ridgeline

    H.IMPLS = ("cuda",)
    heads, inputs = H.check_heads()["cuda"], H.check_input()
    losses, _ = heads["table"].pop("losses")
    ratios = [
        mine / max(torchs, 1e-12) for table in (heads["table"], inputs["table"]) for mine, torchs in table.values()
    ]
    right = max(ratios) < 1.5 and losses < 2e-4 and heads["same"] and inputs["same"]
    found = f"losses {losses:.1e}, worst error {max(ratios):.2f} of torch's, same bits {heads['same'], inputs['same']}"
    graphs = [captured(op()), captured(input_op())] if right else []
    print(ridgeline.__file__, found + (": ready" if right else ": WRONG"), flush=True)
    for _ in sys.stdin if right else ():
        times = []
        for graph in graphs:
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            graph.replay()
            a.record()
            for _ in range(20):
                graph.replay()
            b.record()
            torch.cuda.synchronize()
            times.append(a.elapsed_time(b) * 50)
        times[1:1] = each_head(graphs[0])
        found = profiled(graphs[1], ("tables", "input_vector_kernel"))
        times += [
            statistics.median(us for _, us, name in found if name == wanted)
            for wanted in ("tables", "input_vector_kernel")
        ]
        print(json.dumps(times), flush=True)


def main(seconds, checkouts):
    end, here, workers, times = time.time() + seconds, str(Path(__file__).resolve().parent), {}, {}
    for checkout in checkouts:
        path = os.pathsep.join([str(Path(checkout).resolve() / "src"), here, os.environ.get("PYTHONPATH", "")])
        workers[checkout] = subprocess.Popen(
            [sys.executable, __file__, "--worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path},
        )  # fmt: skip
    try:
        for checkout, process in workers.items():
            while line := process.stdout.readline():
                print(checkout, line.strip()[:600], flush=True)
                if line.strip().endswith(": ready"):
                    times[checkout] = []
                    break
        for turn in range(TURNS):
            for checkout in list(times) if turn % 2 else list(times)[::-1]:
                if time.time() > end:
                    return
                workers[checkout].stdin.write("\n")
                workers[checkout].stdin.flush()
                times[checkout].append(json.loads(workers[checkout].stdout.readline()))
    finally:
        (OUT / "heads_turns.json").write_text(json.dumps(times))
        for checkout, rows in times.items():
            if rows:
                columns = [f"{statistics.median(c):.1f} ({min(c):.1f} to {max(c):.1f})" for c in zip(*rows)]
                names = ("heads", "first", "second", "third", "input", "tables", "vector")
                print(
                    f"{checkout}, {len(rows)} turns, us: " + ", ".join(map(" ".join, zip(names, columns))), flush=True
                )
        for process in workers.values():
            process.kill()


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        worker()
    else:
        main(float(sys.argv[1]), sys.argv[2:])
