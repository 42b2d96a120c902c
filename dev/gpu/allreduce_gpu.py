"""What the all-reduce of a captured step costs on two cards, and which way hides it; one JSON a case.

PYTHONPATH=src OUT=$OUT python dev/gpu/allreduce_gpu.py [SECONDS] [PRESET BATCH …]      (two cards, both alone)

NVLink multicast stays off.

Ways, all of the same captured step of `best`; the slower card's own pace is the base of every figure:

    none      no exchange: each card at its own pace
    token     one number: what waiting for each other costs
    after     NCCL after the backward pass
    under     NCCL under it, in buckets of 16 MiB
    few       the same with at most four of NCCL's thread blocks
    ahead     the same on a stream of high priority
    copies    under it, by the copy engines: each card fetches the other's bucket and adds it
"""

import gc
import json
import os
import sys
import time
from pathlib import Path

OUT = Path(os.environ.get("OUT", "/tmp"))
CASES = {  # windows a card, ways
    "hal-20m 512": ("none", "token", "after", "under", "copies"),
    "gpt2-c256 32": ("none", "token", "after", "under", "copies"),
    "gpt2-c256 512": ("none", "token", "after", "under", "few", "ahead", "copies"),
}
TRACED = ("after", "under", "copies")


def inside(limit, cases):
    """One of the two processes."""
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric

    import ridgeline.engine.gradients as gradients
    import ridgeline.engine.step as engine_step
    from ridgeline.bench.contenders import OPTIMIZER
    from ridgeline.bench.workloads import random_batch, workload
    from ridgeline.engine import Replicas, TrainStep
    from ridgeline.engine.distributed import together
    from ridgeline.engine.reduction import Reduction
    from ridgeline.models import build

    began = time.time()

    class Alone(Replicas):
        """A single process in spite of the group."""

        def __init__(self):
            super().__init__()
            self.rank, self.world = 0, 1

    class Token(Replicas):
        """Sums one number in the gradient's place."""

        def start(self, flat):
            return super().start(flat[:1]) if flat.is_cuda else super().start(flat)

    class First(Reduction):
        """On a stream of high priority."""

        def __init__(self, replicas, flat):
            super().__init__(replicas, flat)
            self._stream = torch.cuda.Stream(flat.device, priority=-1)

    class Copies(Reduction):
        """Each process fetches the other's bucket by its copy engine; two barriers guard what is read."""

        def __init__(self, replicas, flat):
            super().__init__(replicas, flat)
            buffer = self.lane.buffer
            self.handle = symmetric.rendezvous(buffer, dist.group.WORLD)
            self.theirs = self.handle.get_buffer(1 - dist.get_rank(), buffer.shape, buffer.dtype)
            self.fetched = torch.empty_like(buffer)
            self.channel = 1

        def begin(self):
            super().begin()
            self.channel = 1

        def _send(self, bucket):
            bucket.sent = True
            for stream in bucket.streams:
                self._stream.wait_stream(stream)
            with torch.cuda.stream(self._stream):
                self.handle.barrier(channel=self.channel % 8)
                self.channel += 1
                self.fetched[bucket.start : bucket.end].copy_(self.theirs[bucket.start : bucket.end])

        def finish(self):
            super().finish()
            self.handle.barrier(channel=0)  # the other has fetched all of this one's
            n = len(self.lane.carried)
            self.lane.buffer[:n].add_(self.fetched[:n])

    class Shared:
        """The torch module whose zeros lie in memory that the other card can read."""

        def __getattr__(self, name):
            return getattr(torch, name)

        def zeros(self, size, device):
            return symmetric.empty(size, dtype=torch.float32, device=device).zero_()

    with together("cuda") as replicas:
        rank, device = replicas.rank, torch.device("cuda", torch.cuda.current_device())
        few = dist.ProcessGroupNCCL.Options()
        few.config.max_ctas = 4
        few.config.min_ctas = 1
        groups = {"few": dist.new_group(backend="nccl", pg_options=few)}

        def left():
            return limit - replicas.exchange(False, time.time() - began)[1]

        def say(*words):
            if rank == 0:
                print(*words, flush=True)

        def step_of(case, way):
            torch.manual_seed(0)
            model = build(case.model, impl="fused", seed=0).to(device).train()
            kinds = {"none": Alone, "token": Token, "after": Replicas}
            who = kinds[way]() if way in kinds else Replicas(groups.get(way), overlap=True)
            engine_step.Reduction = {"ahead": First, "copies": Copies}.get(way, Reduction)
            gradients.torch = Shared() if way == "copies" else torch
            try:
                step = TrainStep(model, optimizer=OPTIMIZER, precision="bf16", replicas=who, seed=3)
                step(random_batch(case, device, seed=rank))
                torch.cuda.synchronize()
                return step
            finally:
                engine_step.Reduction, gradients.torch = Reduction, torch

        def timed(call, count):
            count = max(8, int(count))
            a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range(3):
                call()
            torch.cuda.synchronize()
            replicas.exchange(False, 0.0)
            a.record()
            for _ in range(count):
                call()
            b.record()
            b.synchronize()
            return a.elapsed_time(b) / count

        def trace(step, batch, way, name):
            """A step's kernels on this card: its NCCL kernels or copies with what ran beside them."""
            from torch.profiler import ProfilerActivity, profile

            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                for _ in range(4):
                    step(batch)
                torch.cuda.synchronize()
            marks = ("nccl", "PtoP", "barrier", *(("Memcpy",) if way == "copies" else ()))
            events = sorted(
                (e.time_range.start, e.time_range.end, e.name[:40])
                for e in seen.events()
                if str(e.device_type).endswith("CUDA")
            )
            moves = [e for e in events if any(part in e[2] for part in marks)]
            others = [e for e in events if not any(part in e[2] for part in marks)]
            spent = sum(b - a for a, b, _ in moves)
            hidden = 0.0
            for a, b, _ in moves:
                reach = a
                for c, d, _ in others:
                    low, high = max(reach, c), min(b, d)
                    if high > low:
                        hidden, reach = hidden + high - low, high
            first = events[len(events) // 4 * 2][0]  # the third step's kernels, in microseconds from its start
            rows = [[round(a - first, 1), round(b - a, 1), n] for a, b, n in events if a >= first]
            path = OUT / f"allreduce_{name.replace(' ', '_')}_{way}_{rank}.json"
            path.write_text(json.dumps(rows[: len(events) // 4 + 8]))
            longest = sorted((round(b - a, 1) for a, b, _ in moves), reverse=True)[:6]
            return {"us": round(spent / 4, 1), "beside others": round(hidden / max(spent, 1e-9), 3), "longest": longest}

        def measure(name, ways):
            preset, size = name.split()
            case = workload(preset, batch=int(size))
            batch, steps, errors = random_batch(case, device, seed=rank), {}, {}
            for way in ways:
                if left() < 6:
                    break
                try:
                    steps[way] = step_of(case, way)
                except Exception as error:
                    errors[way] = f"{type(error).__name__}: {error}"[:300]
            begun = [torch.tensor([float(way in steps)]) for way in ways]
            together_ways = [w for w, flag in zip(ways, begun, strict=True) if replicas.sum(flag).item() == 2]
            for way in together_ways:  # the same five steps further for all
                for _ in range(5):
                    steps[way](batch)
            torch.cuda.synchronize()
            row = {"errors": errors}
            if {"after", "copies"} <= set(together_ways):
                row["copies equal NCCL"] = torch.equal(steps["after"].flat.masters, steps["copies"].flat.masters)
            found = {way: [] for way in together_ways}
            pace = timed(lambda: steps[together_ways[0]](batch), 0)
            count = replicas.exchange(False, 200.0 / pace)[1]
            for turn in range(3):
                if left() < 5 and turn >= 1:
                    break
                for way in together_ways[:: 1 if turn % 2 else -1]:
                    found[way].append(timed(lambda way=way: steps[way](batch), count))
            ms = {}
            for way, times in found.items():
                both = torch.zeros(2, dtype=torch.float64)
                both[rank] = sorted(times)[len(times) // 2]
                ms[way] = [round(x, 4) for x in replicas.sum(both).tolist()]
            row["ms of each card"] = ms
            slower = {way: max(pair) for way, pair in ms.items()}
            if {"token", "after"} <= slower.keys():
                cost = slower["after"] - slower["token"]
                row["waiting"] = round(slower["token"] - slower["none"], 4)
                row["all-reduce"] = round(cost, 4)
                for way in slower:
                    if way not in ("none", "token", "after") and cost > 0:
                        row[f"hidden {way}"] = round(1 - (slower[way] - slower["token"]) / cost, 3)
                row["scaling"] = {w: round(2 * slower["none"] / t, 4) for w, t in slower.items() if w != "none"}
            say(name, json.dumps(row))
            for way in TRACED:
                if way in together_ways and left() > 4:
                    try:
                        row[f"trace {way}"] = trace(steps[way], batch, way, name)
                    except Exception as error:
                        row[f"trace {way}"] = f"{type(error).__name__}: {error}"[:200]
                    replicas.exchange(False, 0.0)
            say(name, "traces", json.dumps({k: v for k, v in row.items() if k.startswith("trace")}))
            (OUT / f"allreduce_{name.replace(' ', '_')}_{rank}.json").write_text(json.dumps(row, indent=1))
            steps.clear()
            gc.collect()
            torch.cuda.empty_cache()

        for name in cases:
            if left() > 12:
                measure(name, CASES[name])
        say("done in", round(time.time() - began, 1), "s")
        replicas.exchange(False, 0.0)
        os._exit(0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["inside"]:
        inside(float(sys.argv[2]), sys.argv[3:])
    import subprocess

    seconds = float(sys.argv[1]) if sys.argv[1:] else 60.0
    chosen = [f"{a} {b}" for a, b in zip(sys.argv[2::2], sys.argv[3::2], strict=True)] or list(CASES)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    try:
        subprocess.run([*command, "inside", str(seconds - 5), *chosen], timeout=seconds)
    except subprocess.TimeoutExpired:
        print("out of time", flush=True)
