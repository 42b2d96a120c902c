"""Clock stamps of the policy heads' Hopper kernel: where the cycles of a tile of 64 rows go, by warpgroup, beside each other.

PYTHONPATH=src OUT=$OUT python3 dev/gpu/heads_trace_gpu.py                (25 s, cold; the op is captured, as in a step)
PYTHONPATH=src python3 dev/gpu/heads_trace_gpu.py build                   (no card: the marked kernels compile, registers)
"""
import json, os, shutil, sys
from pathlib import Path
ROOT, COPY = Path("src/ridgeline/ops"), Path("/tmp/heads_trace_src")
SLOTS, ACTORS, ROUND, BLOCKS = 80, 5, 3, 132
NAMES = ("copies 0", "copies 1", "rows 0", "rows 1", "sums")
STAMP = """
// Actors: warp 0 and 1 (copies), first warps of the warpgroups.
RL_D u32 trace_slot(int actor, int what) {
  __shared__ u64 area[5 * 80 + 1];
  return smem_address(area) + (actor * 80 + what) * 8;
}
RL_D u64 ticks() { u64 t; asm volatile("mov.u64 %0, %clock64;" : "=l"(t) :: "memory"); return t; }
RL_D u64 nanoseconds() { u64 t; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t) :: "memory"); return t; }
RL_D void stamp_value(int actor, int what, u64 value) {
  asm volatile("st.shared.u64 [%0], %1;" ::"r"(trace_slot(actor, what)), "l"(value) : "memory");
}
RL_D int trace_actor() { return threadIdx.x < 64 ? threadIdx.x / 32 : threadIdx.x / 128 + 1; }
RL_D bool trace_first() { return threadIdx.x < 64 ? threadIdx.x % 32 == 0 : threadIdx.x >= 128 && threadIdx.x % 128 == 0; }
RL_D void stamp(int what) { if (trace_first()) stamp_value(trace_actor(), what, ticks()); }
RL_D void stamp_if(bool now, int what) { if (now) stamp(what); }
// When a number is there.
RL_D void stamp_of(bool now, int what, float x) {
  if (now && trace_first()) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(trace_slot(5, 0)), "f"(x) : "memory");
    stamp_value(trace_actor(), what, ticks());
  }
}
RL_D void dump_stamps() {
  __syncthreads();
  i64* base = reinterpret_cast<i64*>(TRACE) + blockIdx.x * 400;
  for (int i = threadIdx.x; i < 400; i += 512) {
    u64 v; asm volatile("ld.shared.u64 %0, [%1];" : "=l"(v) : "r"(trace_slot(0, i)) : "memory");
    base[i] = v;
  }
}
"""


def put(s, old, new, n=1):
    assert s.count(old) == n, (s.count(old), old)
    return s.replace(old, new)


def sources():
    for folder in ("policy_heads", "linear", "attention/cuda"):
        shutil.copytree(ROOT / folder, COPY / folder, dirs_exist_ok=True)
    here = COPY / "policy_heads"
    p = here / "heads_layout.cuh"; s = p.read_text()
    s = put(s, "struct Barriers {", STAMP + "struct Barriers {"); p.write_text(s)
    p = here / "heads_rows.cuh"; s = p.read_text()
    s = put(s, "  int group;\n", "  int group;\n  bool now;\n")
    s = put(s, "      begin(x, piece, phase);\n", "      const bool mark = now && piece == 4;\n      stamp_if(now && piece < 2, 17 + piece);\n      stamp_if(mark, 20);\n      begin(x, piece, phase);\n      stamp_of(mark, 21, x[0]);\n")
    s = put(s, "      wgmma_fence();\n      add_product(totals.logits", "      stamp_of(mark, 22, from_bits(a[3][1] ^ s_slope[3][1]));\n      wgmma_fence();\n      add_product(totals.logits")
    s = put(s, "      if (E == 0) add_state(eights, piece), ask_state(eights, piece + 1, next);\n      wgmma_wait<0>();\n", "      stamp_if(mark, 23);\n      if (E == 0) add_state(eights, piece), ask_state(eights, piece + 1, next);\n      stamp_if(mark, 24);\n      wgmma_wait<0>();\n")
    s = put(s, "      wgmma_touch(totals.s);\n", "      wgmma_touch(totals.s);\n      stamp_if(mark, 25);\n")
    s = put(s, "      const u32 tile = p_tile(smem, group, chunk);\n      float x[32];\n", "      const u32 tile = p_tile(smem, group, chunk);\n      stamp_if(now && chunk == 2, 50);\n      float x[32];\n")
    s = put(s, "      wgmma_wait<0>();\n      wgmma_touch(x);\n#pragma unroll\n      for (int half = 0; half < 2; ++half) {\n", "      wgmma_wait<0>();\n      wgmma_touch(x);\n      stamp_if(now && chunk == 2, 51);\n#pragma unroll\n      for (int half = 0; half < 2; ++half) {\n")
    s = put(s, "      publish(bar.q_ready(group, chunk));\n", "      stamp_if(now && chunk == 2, 53);\n      publish(bar.q_ready(group, chunk));\n      stamp_if(now && chunk == 2, 54);\n")
    s = put(s, "    auto& logits = totals.logits;\n", "    stamp_if(now, 40);\n    auto& logits = totals.logits;\n")
    s = put(s, "    barrier_wait(bar.weights(), 0);\n", "    barrier_wait(bar.weights(), 0);\n    stamp(3);\n")
    s = put(s, "      const u32 phase = tiles.round & 1;\n", f"      const u32 phase = tiles.round & 1;\n      now = tiles.round == {ROUND};\n      stamp_if(tiles.round < 12, 64 + tiles.round);\n      stamp_if(now, 10);\n")
    s = put(s, "      barrier_wait(bar.narrow_free(group), phase ^ 1);\n", "      stamp_of(now, 11, deviation[0] + deviation[1]);\n      barrier_wait(bar.narrow_free(group), phase ^ 1);\n      stamp_if(now, 12);\n")
    s = put(s, "      barrier_wait(bar.a_free(group), phase ^ 1);\n", "      stamp_if(now, 13);\n      barrier_wait(bar.a_free(group), phase ^ 1);\n      stamp_if(now, 14);\n")
    s = put(s, "      publish(bar.narrow_ready(group));\n", "      stamp_if(now, 42);\n      publish(bar.narrow_ready(group));\n      stamp_if(now, 43);\n")
    s = put(s, "      backward();\n", "      stamp_if(now, 45);\n      backward();\n      stamp_if(now, 58);\n")
    s = put(s, "    write_sums();\n  }\n", "    stamp(76);\n    write_sums();\n  }\n")
    p.write_text(s)
    p = here / "heads_sm90.cu"; s = p.read_text()
    s = put(s, "    const u32 phase = tiles.round & 1;\n    const int row", f"    const u32 phase = tiles.round & 1;\n    const bool now = tiles.round == {ROUND};\n    const int row")
    s = put(s, "      if (chunk < CHUNKS) send(chunk, phase, row);\n", "      if (chunk < CHUNKS) send(chunk, phase, row);\n      stamp_if(now && chunk < CHUNKS, 20 + 4 * chunk);\n")
    s = put(s, "      barrier_wait(bar.q_done(group, chunk - 1), phase);\n", "      stamp_if(now, 17 + 4 * chunk);\n      barrier_wait(bar.q_done(group, chunk - 1), phase);\n      stamp_if(now, 18 + 4 * chunk);\n")
    s = put(s, "      load_p(p, smem, bar, group, chunk - 1, tiles.row());\n", "      load_p(p, smem, bar, group, chunk - 1, tiles.row());\n      stamp_if(now, 19 + 4 * chunk);\n")
    s = put(s, "      barrier_wait(bar.narrow_ready(group), phase);\n      wgmma_fence();\n", f"      const bool now = tiles[group].round == {ROUND};\n      const int base = 10 + 30 * group;\n      stamp_if(now, base);\n      barrier_wait(bar.narrow_ready(group), phase);\n      stamp_if(now, base + 1);\n      wgmma_fence();\n")
    s = put(s, "      release(bar.a_free(group));\n", "      stamp_if(now, base + 2);\n      release(bar.a_free(group));\n")
    s = put(s, "        barrier_wait(bar.q_ready(group, chunk), phase);\n        wgmma_fence();\n", "        barrier_wait(bar.q_ready(group, chunk), phase);\n        stamp_if(now, base + 3 + 2 * chunk);\n        wgmma_fence();\n")
    s = put(s, "        release(bar.q_done(group, chunk));\n", "        stamp_if(now, base + 4 + 2 * chunk);\n        release(bar.q_done(group, chunk));\n")
    s = put(s, "  if (threadIdx.x == 0) {\n    prefetch_map(p.p);\n", "  for (int i = threadIdx.x; i < 400; i += 512) stamp_value(0, i, 0);\n  __syncthreads();\n  stamp(0);\n  if (threadIdx.x == 0) stamp_value(0, 70, nanoseconds());\n  if (threadIdx.x == 0) {\n    prefetch_map(p.p);\n")
    s = put(s, "  wait_for_previous();\n  let_next_start();\n", "  wait_for_previous();\n  stamp(1);\n  let_next_start();\n")
    s = put(s, "  __syncthreads();\n  if (role == 0) {\n", "  __syncthreads();\n  stamp(2);\n  if (role == 0) {\n")
    at = s.rindex("}")
    s = s[:at] + "  stamp(77);\n  __syncwarp();\n  if (threadIdx.x == 0) stamp_value(0, 71, nanoseconds());\n  dump_stamps();\n}" + s[at + 1:]
    p.write_text(s)
    return here / "heads_sm90.cu"


CONSUMER = {
    10: "tile", 11: "statistics", 12: "side free", 13: "side", 14: "a free", 17: "piece 0", 18: "piece 1", 20: "[piece 4", 21: "p and heard", 22: "gelu", 23: "stored",
    24: "state", 25: "logits]", 40: "(loss", 42: "dl)", 43: "published", 45: "said", 50: "<chunk 2", 51: "da", 53: "stored", 54: "out>", 58: "all q",
}
COPIES = {key: name for c in range(5) for key, name in ((20 + 4 * c, f"q{c} sent"), (21 + 4 * c, f"read"), (22 + 4 * c, f"summed"), (23 + 4 * c, f"p{c} asked"))}
SUMS = {}
for g in range(2):
    SUMS |= {10 + 30 * g: f"{g}: at", 11 + 30 * g: "dl there", 12 + 30 * g: "a'dl"}
    for c in range(5):
        SUMS |= {13 + 30 * g + 2 * c: f"q{c} there", 14 + 30 * g + 2 * c: "q'side"}


def tell(title, x):
    """x: [launches, blocks, actors, slots]."""
    ns = (x[:, :, 0, 71] - x[:, :, 0, 70])
    span = (x[:, :, 0, 71].amax(1) - x[:, :, 0, 70].amin(1)).mean() / 1e3
    cycles = (x[:, :, 2:, 77].amax(2) - x[:, :, 2:, 0].amin(2))
    print(f"{title}: {x.shape[1]} blocks, span {span:.1f} us, a block {cycles.mean():.0f} cycles = {ns.mean() / 1e3:.1f} us; starts apart {((x[:, :, 0, 70].amax(1) - x[:, :, 0, 70].amin(1)).mean()) / 1e3:.1f}, ends apart {((x[:, :, 0, 71].amax(1) - x[:, :, 0, 71].amin(1)).mean()) / 1e3:.1f}", flush=True)
    out = {}
    for a in (2, 3):
        start = x[:, :, a, 0]
        at = lambda k: (x[:, :, a, k] - start).mean().item()
        rounds = [x[:, :, a, 64 + r] for r in range(12) if (x[:, :, a, 64 + r] > 0).all()]
        lengths = [round((b - s).mean().item()) for s, b in zip(rounds, rounds[1:])]
        print(f"  {NAMES[a]}: previous done {at(1):.0f}, set up {at(2):.0f}, weights {at(3):.0f}, first tile {(rounds[0] - start).mean():.0f}, rounds {lengths}, after the last {(x[:, :, a, 77] - x[:, :, a, 76]).mean():.0f}")
        out[NAMES[a] + " rounds"] = lengths
    apart = (x[:, :, 3, 10] - x[:, :, 2, 10])
    print(f"  group 1 begins its tile {apart.mean():.0f} cycles behind group 0 (absolute {apart.abs().mean():.0f})")
    for a, names, base in ((2, CONSUMER, 2), (3, CONSUMER, 3), (0, COPIES, 2), (1, COPIES, 3), (4, SUMS, 2)):
        zero = x[:, :, base, 10]
        values = {k: (x[:, :, a, k] - zero).mean().item() for k in names if (x[:, :, a, k] > 0).all()}
        line, previous = [], 0.0
        for k, v in sorted(values.items(), key=lambda kv: kv[1]):
            line.append(f"{names[k]} {v:.0f} (+{v - previous:.0f})"); previous = v
        print(f"  {NAMES[a]}: " + ", ".join(line), flush=True)
        out[NAMES[a]] = values
    return out


def build():
    import torch
    from ridgeline.ops import _cuda as cuda
    from ridgeline.ops.policy_heads import hopper
    from ridgeline.ops.policy_heads.layout import layout
    plan = layout(512, ((256, 9), (260, 37), (279, 6)), hopper.STEP)
    for place in plan.heads:
        for path, more in ((hopper.SOURCE, {}), (sources(), {"TRACE": "140000000000ull"})):
            cubin = cuda.build(path, {**hopper.defines(plan, place, torch.bfloat16, torch.int64), **more})
            print(place.index, cubin.resources()["head"], "SERIALISED" if "C7510" in cubin.log else "", flush=True)


def op():
    """Both passes of hal-20m's heads by the Hopper kernel, to be called."""
    import heads_gpu as H
    import torch

    from ridgeline.ops.policy_heads import policy_heads
    from ridgeline.ops.sink import ATTRIBUTE
    x, heads, y = H.problem(H.N, torch.bfloat16)
    x.requires_grad_()
    flat = [w.requires_grad_() for head in heads for w in head]
    H.sinks_on(flat)

    def step():
        for w in flat:
            getattr(w, ATTRIBUTE).begin(add=False)
        torch.autograd.grad(policy_heads(x, heads, y, impl="cuda").sum(), [x, *flat], allow_unused=True)

    return step


def main():
    from fused_gpu import captured
    import torch
    from ridgeline.ops import _cuda as cuda
    from ridgeline.ops.policy_heads import hopper
    step = op()
    print("without stamps, each head, us:", each := each_head(captured(step)), flush=True)
    size = BLOCKS * ACTORS * SLOTS
    traces, real = {}, cuda.load

    def load(path, macros):
        key = macros["E"]
        if key not in traces:
            traces[key] = torch.zeros(size, dtype=torch.int64, device="cuda")
        return real(path, {**macros, "TRACE": f"{traces[key].data_ptr()}ull"})

    hopper.SOURCE, cuda.load = sources(), load
    hopper._kernel.cache_clear()
    graph, found = captured(step), {key: [] for key in traces}
    for _ in range(12):
        for t in traces.values():
            t.zero_()
        graph.replay()
        torch.cuda.synchronize()
        for key, t in traces.items():
            found[key].append(t.clone())
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record()
    for _ in range(10):
        graph.replay()
    b.record(); torch.cuda.synchronize()
    print(f"with stamps {a.elapsed_time(b) * 100:.0f} us", flush=True)
    out = {}
    for key, list_ in found.items():
        t = torch.stack(list_[2:]).view(-1, BLOCKS, ACTORS, SLOTS).double()
        used = t[0, :, 2, 0] > 0
        out[key] = tell(f"head that hears {key}", t[:, used])
    json.dump({"plain": each, "stamps": out}, open(os.environ.get("OUT", "/tmp") + "/heads_trace.json", "w"))


def profiled(graph, names, replays=10):
    """(start, us, name) of every kernel of those names in some replays."""
    import torch
    from torch.profiler import ProfilerActivity, profile
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()
    return sorted((e.time_range.start, e.device_time, e.name) for e in prof.events() if e.name in names)


def each_head(graph):
    """Median us of the first head's kernel, the second's, the third's."""
    import statistics
    found = profiled(graph, ("head",))
    return [round(statistics.median(us for _, us, _ in found[i::3]), 1) for i in range(3)]


if __name__ == "__main__":
    sys.path[:0] = ["src", "dev/gpu"]
    if sys.argv[1:] == ["build"]:
        build()
    else:
        main()
