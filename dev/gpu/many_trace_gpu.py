"""Where the cycles of many rows' kernels go: project_many and weight gradients with clocks in their warps.

PYTHONPATH=src:dev/gpu OUT=out python dev/gpu/many_trace_gpu.py SECONDS [gpt2-c256-512] [fast-c256-512]     (15 s each)
                                                              ... build                                (no card: compiles)

Every kernel is captured and repeated by itself. Cycles per tile (project_many) or per chunk of 64 rows (weight gradients),
of one warp of each warpgroup and of the lanes that start copies; "filled" is the time from a copy's start until a warp
that waited for it goes on.
"""

import json
import os
import shutil
import sys
import time
from pathlib import Path

import torch

from ridgeline.ops import _cuda as cuda
from ridgeline.ops.linear import wgrad
from ridgeline.ops.mlp import many

OUT = os.environ.get("OUT", "/tmp")
FOLDER = Path("/tmp/many_trace/ops")
ACTORS, COUNTERS = 5, 16  # lanes of the producers' warps 0 to 2, a lane of each consumer warpgroup
SIZE = 132 * ACTORS * COUNTERS
CLOCK = """
// A warp's clock: where its time goes, added up by one lane.
struct Clock {
  u32 last;
  RL_D static u32 area() {
    __shared__ u32 words[5 * 16 + 16];
    return smem_address(words);
  }
  RL_D static int actor() { return threadIdx.x < 128 ? threadIdx.x / 32 : 2 + threadIdx.x / 128; }
  RL_D static bool chosen() { return threadIdx.x < 96 ? threadIdx.x % 32 == 0 : threadIdx.x % 128 == 0 && threadIdx.x > 96; }
  RL_D static u32 now() { u32 t; asm volatile("mov.u32 %0, %clock;" : "=r"(t) :: "memory"); return t; }
  RL_D static void clear() {
    for (int i = threadIdx.x; i < 96; i += blockDim.x) asm volatile("st.shared.u32 [%0], 0;" ::"r"(area() + 4 * i) : "memory");
  }
  RL_D static void add(int what, u32 value) {
    if (chosen()) asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(area() + (actor() * 16 + what) * 4), "r"(value) : "memory");
  }
  RL_D void start() { last = now(); }
  RL_D void mark(int what) {
    const u32 t = now();
    add(what, t - last);
    last = t;
  }
  RL_D static void issued(int slot) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(area() + (80 + slot) * 4), "r"(now()) : "memory"); }
  // A warp has a slot at last: what it waited, as `what`, and since when the copy had been under way (13, 12: how many).
  RL_D void mark_filled(int what, int slot) {
    const u32 t = now();
    add(what, t - last);
    if (t - last > 100) {
      u32 from;
      asm volatile("ld.shared.u32 %0, [%1];" : "=r"(from) : "r"(area() + (80 + slot) * 4) : "memory");
      add(13, t - from), add(12, 1);
    }
    last = t;
  }
  RL_D static void dump() {
    if (!chosen()) return;
    u32* out = reinterpret_cast<u32*>(TRACE) + (blockIdx.x * 5 + actor()) * 16;
    for (int i = 0; i < 16; ++i) asm volatile("ld.shared.u32 %0, [%1];" : "=r"(out[i]) : "r"(area() + (actor() * 16 + i) * 4) : "memory");
  }
};
"""


def put(text, old, new, count=1):
    """`text` with `old`, which is there so many times, replaced."""
    assert text.count(old) == count, (text.count(old), old)
    return text.replace(old, new)


def edit(path, *changes):
    """Changes a file in place."""
    text = path.read_text()
    for change in changes:
        text = put(text, *change)
    path.write_text(text)


def edit_shared(folder):
    """What both of the MLP's kernels for many rows have."""
    edit(
        folder / "many.cuh",
        ("struct Place {\n", CLOCK + "struct Place {\n  mutable Clock clock;\n"),
        ("    return {warp_uniform(thread / 128)", "    return {Clock{Clock::now()}, warp_uniform(thread / 128)"),
        ("  u32 peer;\n  int slot = 0;", "  u32 peer;\n  Clock clock;\n  int slot = 0;"),
    )


def edit_many(folder):
    """Clocks for project_many."""
    edit_shared(folder)
    edit(
        folder / "project_many.cuh",
        ("Chunk chunk, Beside beside) {\n", "Chunk chunk, Beside beside) {\n  ring.clock.start();\n"),
        ("      ring.begin();\n", "      ring.begin();\n      ring.clock.mark(0);\n", 2),
        (
            "      if (elected()) chunk(ring, k, tiles.row());\n",
            "      if (elected()) chunk(ring, k, tiles.row());\n      ring.clock.mark(1);\n",
        ),
        (
            "      if (elected()) beside(ring, tiles.row() + 64 * group);\n",
            "      if (elected()) beside(ring, tiles.row() + 64 * group);\n      ring.clock.mark(1);\n",
        ),
        ("    r.announce(SLOT_BYTES);\n", "    r.announce(SLOT_BYTES);\n    Clock::issued(r.slot);\n"),
    )
    edit(
        folder / "project_many.cu",
        (
            "    ring.wait();\n    const u64 a",
            "    ring.wait();\n    me.clock.mark_filled(chunk ? 1 : 2, ring.slot);\n    const u64 a",
        ),
        ("      wgmma_wait<1>();\n", "      wgmma_wait<1>();\n      me.clock.mark(3);\n"),
        ("      wgmma_wait<0>();\n      if", "      wgmma_wait<0>();\n      me.clock.mark(3);\n      if"),
        (
            "    if (chunk == 0 && round > 0 && me.lane == 0) release_held(ring.bar, me);\n",
            "    me.clock.mark(3);\n    if (chunk == 0 && round > 0 && me.lane == 0) release_held(ring.bar, me);\n    me.clock.mark(5);\n",
        ),
        ("  wgmma_wait<0>();\n  wgmma_touch(acc);\n", "  wgmma_wait<0>();\n  wgmma_touch(acc);\n  me.clock.mark(4);\n"),
        (
            "  barrier_wait(bar.held_full(me.group), round & 1);\n",
            "  barrier_wait(bar.held_full(me.group), round & 1);\n  me.clock.mark(6);\n",
            2,
        ),
        (
            "  if (me.lane == 0) store_wait_read<0>();  // r has left\n  sync_warp();\n",
            "  me.clock.mark(7);\n  if (me.lane == 0) store_wait_read<0>();  // r has left\n  sync_warp();\n  me.clock.mark(8);\n",
        ),
        (
            "  const Ring own = own_slot(ring, me);\n",
            "  me.clock.mark(7);\n  const Ring own = own_slot(ring, me);\n  me.clock.mark(8);\n",
        ),
        ("  const Place me = Place::here();\n", "  Clock::clear();\n  const Place me = Place::here();\n"),
        ("  wait_for_previous();\n", "  me.clock.mark(0);\n  wait_for_previous();\n  me.clock.mark(10);\n"),
        (
            "#if BACKWARD\n      Statistics",
            "      me.clock.mark(9), Clock::add(15, 1);\n#if BACKWARD\n      Statistics",
        ),
        ("      multiply(acc, chunks,", "      me.clock.mark(14);\n      multiply(acc, chunks,", 2),
        ("#if BACKWARD\n    write_sums(", "    me.clock.mark(9);\n#if BACKWARD\n    write_sums("),
        (
            "    if (me.lane == 0) store_wait<0>();\n",
            "    if (me.lane == 0) store_wait<0>();\n    me.clock.mark(11);\n",
        ),
        ("  sync_warp();\n  cluster_leave();", "  sync_warp();\n  Clock::dump();\n  cluster_leave();"),
    )


def edit_gradients(folder):
    """Clocks for weight gradients."""
    edit(
        folder / "wgrad_sm90.cu",
        ("struct Ring {\n", CLOCK + "struct Ring {\n  Clock clock;\n"),
        (
            "    barrier_wait(ring.empty + 8 * ring.slot, ring.phase ^ 1);\n",
            "    barrier_wait(ring.empty + 8 * ring.slot, ring.phase ^ 1);\n    ring.clock.mark(0);\n",
        ),
        (
            "    barrier_expect(barrier, SLOT_BYTES);\n",
            "    barrier_expect(barrier, SLOT_BYTES);\n    Clock::issued(ring.slot);\n",
        ),
        (
            "      else copy_2d(place, b, column, chunk * CHUNK, barrier);\n    }\n",
            "      else copy_2d(place, b, column, chunk * CHUNK, barrier);\n    }\n    ring.clock.mark(1);\n",
        ),
        (
            "    barrier_wait(ring.full + 8 * ring.slot, ring.phase);\n",
            "    barrier_wait(ring.full + 8 * ring.slot, ring.phase);\n    ring.clock.mark_filled(chunk ? 1 : 2, ring.slot);\n",
        ),
        ("      wgmma_wait<1>();\n", "      wgmma_wait<1>();\n      ring.clock.mark(3);\n"),
        (
            "  wgmma_wait<0>();\n  wgmma_touch(acc);\n",
            "  wgmma_wait<0>();\n  wgmma_touch(acc);\n  ring.clock.mark(4);\n",
        ),
        (
            "  if (threadIdx.x == 0) {\n    for (int i = 0; i < STAGES",
            "  Clock clock{Clock::now()};\n  Clock::clear();\n  if (threadIdx.x == 0) {\n    for (int i = 0; i < STAGES",
        ),
        ("  wait_for_previous();\n", "  clock.mark(0);\n  wait_for_previous();\n  clock.mark(10);\n"),
        ("  Ring ring{smem,", "  Ring ring{clock, smem,"),
        (
            "      const Share share = shares[i];\n",
            "      const Share share = shares[i];\n      Clock::add(15, share.count);\n",
        ),
        ("    if (squares) {  // eight", "    ring.clock.mark(9);\n    if (squares) {  // eight"),
        (
            "  __syncwarp();\n  if (PAIRED) cluster_leave();",
            "  __syncwarp();\n  Clock::dump();\n  if (PAIRED) cluster_leave();",
        ),
    )


def sources():
    """Copies of the kernels with clocks."""
    root = Path(many.__file__).parents[1]
    shutil.rmtree(FOLDER, ignore_errors=True)
    for name in ("mlp", "linear"):
        shutil.copytree(root / name, FOLDER / name)
    edit_many(FOLDER / "mlp")
    edit_gradients(FOLDER / "linear")


CONSUMER = {
    0: "set-up",
    10: "kernel before",
    2: "first slot",
    1: "slots",
    3: "products",
    5: "results left",
    4: "last product",
    6: "held",
    7: "pass 1",
    8: "beside/r left",
    9: "pass 2/delivery",
    11: "sums, stores",
    14: "statistics",
}
PRODUCER = {0: "wait for a free slot", 1: "copies", 2: "ahead", 3: "next tile's"}
WHO = ("weights/x", "held/dy", "rows/sums", "group 0", "group 1")


def told(title, trace, us, per, consumer=CONSUMER):
    """Prints where each warp's cycles went, over all blocks, per tile or chunk."""
    x = trace.view(132, ACTORS, COUNTERS).double().cpu()
    print(f"{title}: {us:.1f} us with clocks", flush=True)
    lines = {}
    for actor, who in enumerate(WHO):
        names = consumer if actor > 2 else PRODUCER
        count = x[:, 3 if actor < 3 else actor, 15].mean().item()
        sums = x[:, actor].mean(0)
        if not sums.any() or not count:
            continue
        text = ", ".join(f"{name} {sums[k] / count:.0f}" for k, name in names.items() if sums[k] > 0)
        filled = f"; filled after {sums[13] / sums[12]:.0f}, {sums[12] / count:.2f} times" if sums[12] > 0 else ""
        spread = x[:, actor, [*range(12), 14]].sum(1)
        print(
            f"   {who}, a {per} of {count:.1f}: {text}{filled}; all {spread.mean():.0f} ({spread.min():.0f} to {spread.max():.0f})",
            flush=True,
        )
        lines[who] = sums.tolist()
    return lines


def loads():
    """Makes kernels of the copies take a trace of their own; returns the traces by file and macros."""
    traces, real = {}, cuda.load

    def load(path, macros):
        if FOLDER not in Path(path).parents:
            return real(path, macros)
        key = (Path(path).stem, tuple(sorted(macros.items())))
        if key not in traces:
            traces[key] = torch.zeros(SIZE, dtype=torch.int32, device="cuda")
        return real(path, {**macros, "TRACE": f"{traces[key].data_ptr()}ull"})

    cuda.load = load
    many.SOURCE, wgrad.SOURCE = FOLDER / "mlp/project_many.cu", FOLDER / "linear/wgrad_sm90.cu"
    return traces


def main(names, end):
    """All kernels of these workloads."""
    import many_kernels as m
    from fused_gpu import WORKLOADS

    sources()
    traces, out, title = loads(), {}, [""]

    def traced(right, same, together, before):
        report(title[0] + ("" if right else " WRONG"), together, "tile")

    def report(name, run, per):
        graph = m.captured(run)
        us = m.interleaved({"": graph}, 3, 20)[""]
        for trace in traces.values():
            trace.zero_()
        graph.replay()
        torch.cuda.synchronize()
        out[name] = [told(name, trace, us, per) for trace in traces.values() if trace.any()]
        with open(f"{OUT}/many_trace.json", "w") as file:
            json.dump(out, file)

    m.report = traced
    for name in names:
        config = WORKLOADS[name][0]
        F, Q, rms = config.hidden, config.qkv_width, config.norm == "rmsnorm"
        shapes = [(256, F), (F, 256), (256, 256), (Q, 256)]
        gradients = [
            m.Gradient(
                m.normal(m.N, M),
                m.normal(m.N, K),
                torch.empty(M, K, device="cuda"),
                torch.empty(M, device="cuda") if config.bias else None,
            )
            for M, K in shapes
        ]
        report(f"{name} weight gradients", lambda: m.weight_gradients_raw(gradients), "chunk")
        trials = (
            ("up's gradient", m.backward, F),
            ("down", m.forward, F),
            ("qkv's gradient", m.backward, Q),
            ("out", m.forward, 256),
        )
        for what, trial, K in trials:
            if time.time() < end - 3:
                title[0] = f"{name} {what}"
                trial(title[0], K, rms)
            torch.cuda.empty_cache()


def build():
    """Compiles the copies, for what registers they need."""
    sources()
    for back in (False, True):
        for rms in (False, True):
            macros = many.macros(
                torch.bfloat16, backward=back, rms=rms, norm_bias=not rms, branch_bias=not rms and not back
            )
            print(
                back,
                rms,
                cuda.build(
                    FOLDER / "mlp/project_many.cu", {**macros, "TRACE": "140000000100ull"}, "sm_90a"
                ).resources(),
            )
    macros = wgrad.macros(wgrad.Plan([], True, 0, []), 256, torch.bfloat16)
    path = FOLDER / "linear/wgrad_sm90.cu"
    print(cuda.build(path, {**macros, "TRACE": "140000000100ull"}, "sm_90a").resources())


if __name__ == "__main__":
    if sys.argv[1] == "build":
        build()
    else:
        main(sys.argv[2:] or ["gpt2-c256-512", "fast-c256-512"], time.time() + float(sys.argv[1]))
