"""Where the cycles of the MLP's forward kernel for many rows go: a copy of it with clocks in its warps.

PYTHONPATH=src:dev/gpu python dev/gpu/forward_many_trace.py SECONDS [gpt2-c256-512] [fast-c256-512]     (8 s each)
                                                              ... build                               (no card: compiles)

Cycles per tile of 128 rows, of one warp of each warpgroup and of the four warps that copy, over all blocks.
"""

import sys

import torch
from fused_gpu import captured, interleaved
from forward_many_gpu import Trial, ends_in, sources

from ridgeline.ops import _cuda as cuda
from ridgeline.ops.mlp import forward_many

ACTORS, COUNTERS = 8, 16
CLOCK = """
struct Clock {
  mutable u32 last = 0;
  RL_D static u32 area() {
    __shared__ u32 words[8 * 16];
    return smem_address(words);
  }
  RL_D static int actor() { return threadIdx.x < 128 ? threadIdx.x / 32 : 3 + threadIdx.x / 128; }
  RL_D static bool chosen() { return threadIdx.x % 32 == 0 && (threadIdx.x < 128 || threadIdx.x % 128 == 0); }
  RL_D static u32 now() { u32 t; asm volatile("mov.u32 %0, %clock;" : "=r"(t) :: "memory"); return t; }
  RL_D static void clear() {
    if (threadIdx.x < 128) asm volatile("st.shared.u32 [%0], 0;" ::"r"(area() + 4 * threadIdx.x) : "memory");
  }
  RL_D static void add(int what, u32 value) {
    if (chosen()) asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(area() + (actor() * 16 + what) * 4), "r"(value) : "memory");
  }
  RL_D void start() const { last = now(); }
  RL_D void mark(int what) const {
    const u32 t = now();
    add(what, t - last);
    last = t;
  }
  RL_D static void dump() {
    if (!chosen()) return;
    u32* out = reinterpret_cast<u32*>(TRACE) + (blockIdx.x * 8 + actor()) * 16;
    for (int i = 0; i < 16; ++i) asm volatile("ld.shared.u32 %0, [%1];" : "=r"(out[i]) : "r"(area() + (actor() * 16 + i) * 4) : "memory");
  }
};
"""
PLACE, LAYOUT, UP, MAIN = "many_place.cuh", "forward_many.cuh", "forward_many_up.cuh", "forward_many.cu"
CHANGES = [
    (PLACE, "struct Place {\n", CLOCK + "struct Place {\n"),
    (PLACE, "  u32 rank;               // in the cluster\n", "  u32 rank;\n  Clock clock{};\n"),
    (LAYOUT, "Ring<PIECES> ring, u32 rank, Copy copy) {\n", "Ring<PIECES> ring, u32 rank, Copy copy) {\n  Clock clock;\n  clock.start();\n"),
    (
        LAYOUT,
        "      barrier_wait(ring.empty(ring.slot), ring.phase ^ 1);\n",
        "      clock.mark(1);\n      barrier_wait(ring.empty(ring.slot), ring.phase ^ 1);\n      clock.mark(0);\n",
    ),
    (LAYOUT, "  int sent = 0;\n", "  int sent = 0;\n  Clock clock;\n  clock.start();\n"),
    (
        LAYOUT,
        "        barrier_wait(bar.hidden_full(slot, half), sent >> 1 & 1);\n",
        "        clock.mark(1);\n        barrier_wait(bar.hidden_full(slot, half), sent >> 1 & 1);\n        clock.mark(0);\n",
    ),
    (UP, "    ring.wait();\n", "    me.clock.mark(0);\n    ring.wait();\n    me.clock.mark(1);\n"),
    (UP, "    const u64 a =", "    me.clock.mark(2);\n    const u64 a ="),
    (UP, "    wgmma_commit();\n", "    wgmma_commit();\n    me.clock.mark(3);\n"),
    (
        UP,
        "(made >> 1 & 1) ^ 1);\n",
        "(made >> 1 & 1) ^ 1);\n    me.clock.mark(4);\n",
    ),
    (UP, "    fence_async();\n", "    me.clock.mark(5);\n    fence_async();\n    me.clock.mark(6);\n"),
    (UP, "    wgmma_wait<0>();\n", "    me.clock.mark(7);\n    wgmma_wait<0>();\n    me.clock.mark(8);\n"),
    (UP, "    float acc[32];\n", "    float acc[32];\n    me.clock.start();\n"),
    (MAIN, "        if (!ready) {", "        me.clock.mark(0);\n        if (!ready) {"),
    (
        MAIN,
        "        ring.wait();\n        if (piece == 0) barrier_wait(bar.hidden_full(taken & 1, me.group - 2), taken >> 1 & 1);\n",
        "        me.clock.mark(3);\n        ring.wait();\n        me.clock.mark(1);\n"
        "        if (piece == 0) barrier_wait(bar.hidden_full(taken & 1, me.group - 2), taken >> 1 & 1);\n        me.clock.mark(2);\n",
    ),
    (MAIN, "          wgmma_wait<1>();\n", "          wgmma_wait<1>();\n          me.clock.mark(3);\n"),
    (MAIN, "    wgmma_wait<0>();\n    wgmma_touch(acc);\n", "    me.clock.mark(0);\n    wgmma_wait<0>();\n    wgmma_touch(acc);\n    me.clock.mark(4);\n"),
    (
        MAIN,
        "    barrier_wait(bar.stream_full(panel % 2), panel / 2);\n",
        "    me.clock.mark(0);\n    barrier_wait(bar.stream_full(panel % 2), panel / 2);\n    me.clock.mark(6);\n",
    ),
    (MAIN, "    if (panel >= 2) return;  // results leave from there\n", "    me.clock.mark(7);\n    if (panel >= 2) return;\n"),
    (MAIN, "    if (me.lane == 0) store_wait_read<1>();\n    sync_warp();\n", "    me.clock.mark(5);\n    if (me.lane == 0) store_wait_read<1>();\n    sync_warp();\n    me.clock.mark(8);\n"),
    (MAIN, "    float mean[2] = {}, scale[2];\n", "    float mean[2] = {}, scale[2];\n    me.clock.mark(0), Clock::add(15, 1);\n"),
    (MAIN, "    centre(acc,", "    me.clock.mark(5);\n    centre(acc,"),
    (MAIN, "row, rows, me.lane);\n", "row, rows, me.lane);\n    me.clock.mark(10);\n"),
    (MAIN, "    float acc[WIDTH / 2];\n", "    float acc[WIDTH / 2];\n    me.clock.start();\n"),
    (MAIN, "  sync_warp();\n  cluster_leave();", "  sync_warp();\n  Clock::dump();\n  cluster_leave();"),
    (MAIN, "  if (me.group == 2) copy_vectors", "  Clock::clear();\n  if (me.group == 2) copy_vectors"),
]  # fmt: skip
UPWARD = {0: "rest", 1: "slots", 2: "h", 3: "begun", 4: "place for a", 5: "GELU", 6: "fence", 7: "codes", 8: "products"}
DOWNWARD = {
    0: "rest", 1: "slots", 2: "a", 3: "products", 4: "last product", 5: "passes", 6: "residual waited for", 7: "added",
    8: "results left", 10: "statistics",
}  # fmt: skip
COPIES = {0: "waits", 1: "copies"}
WHO = {0: ("up's weights", COPIES), 1: ("down's weights", COPIES), 3: ("a", COPIES), 4: ("up 0", UPWARD), 5: ("up 1", UPWARD), 6: ("down 0", DOWNWARD), 7: ("down 1", DOWNWARD)}  # fmt: skip


def main(names):
    """Each workload's kernel by itself, again and again."""
    trace = torch.zeros(132, ACTORS, COUNTERS, dtype=torch.int32, device="cuda")
    forward_many.SOURCE, plain = sources(CHANGES), forward_many.macros
    forward_many.macros = lambda **form: {**plain(**form), "TRACE": f"{trace.data_ptr()}ull"}
    for name in names:
        graph = captured(Trial(name).one)
        us = interleaved({"": graph}, 3, 20)[""]
        trace.zero_()
        graph.replay()
        torch.cuda.synchronize()
        x = trace.double().cpu()
        tiles = x[:, 6, 15].mean().item()
        print(f"{name}: {us:.1f} us with clocks; cycles a tile, {tiles:.2f} a block", flush=True)
        for actor, (who, parts) in WHO.items():
            sums = x[:, actor].mean(0) / tiles
            text = ", ".join(f"{part} {sums[k]:.0f}" for k, part in parts.items())
            print(f"   {who}: {text}; all {sums[:15].sum():.0f}", flush=True)


def build():
    """Compiles the copy, for what registers it needs."""
    for rms in (False, True):
        macros = forward_many.macros(rms=rms, norm_bias=not rms, up_bias=not rms, branch_bias=not rms, gelu="tanh")
        cubin = cuda.build(sources(CHANGES), {**macros, "TRACE": "140000000100ull"}, "sm_90a")
        print(cubin.resources(), "C75" in cubin.log)


if __name__ == "__main__":
    if sys.argv[1:] == ["build"]:
        build()
    else:
        ends_in(float(sys.argv[1]))
        main(sys.argv[2:] or ["gpt2-c256-512", "fast-c256-512"])
