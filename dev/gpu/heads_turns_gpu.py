"""The policy heads of several checkouts in turns on one card: each against fp64, then each head's kernel and the whole op, µs.

python3 dev/gpu/heads_turns_gpu.py SECONDS CHECKOUT...          (30 s cold, 1 s a turn; a checkout that is wrong gets no time)
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


def worker():
    """Check, then answer each line on stdin with [µs of the whole op, of each head's kernel]."""
    import heads_gpu as H
    import torch
    from heads_trace_gpu import captured, each_head, op

    H.IMPLS = ("cuda",)
    found = H.check_heads()["cuda"]
    import ridgeline

    losses, _ = found["table"].pop("losses")
    worst = max(mine / max(torchs, 1e-12) for mine, torchs in found["table"].values())
    step, graph = op(), None
    if worst < 1.5 and losses < 2e-4 and found["same"]:
        graph = captured(step)
    print(
        ridgeline.__file__,
        f"losses {losses:.1e}, worst error {worst:.2f} of torch's, same bits {found['same']}"
        + (": ready" if graph else ": WRONG"),
        flush=True,
    )
    for _ in sys.stdin if graph else ():
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()
        a.record()
        for _ in range(20):
            graph.replay()
        b.record()
        torch.cuda.synchronize()
        print(json.dumps([a.elapsed_time(b) * 50, *each_head(graph)]), flush=True)


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
                print(
                    f"{checkout}: the op {columns[0]}; heads " + ", ".join(columns[1:]),
                    f"us, {len(rows)} turns",
                    flush=True,
                )
        for process in workers.values():
            process.kill()


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        worker()
    else:
        main(float(sys.argv[1]), sys.argv[2:])
