"""Clock stamps of ops/mlp's kernels inside a whole captured step: cycles from a block's start, per warpgroup, layer by layer.

PYTHONPATH=src OUT=$OUT python3 dev/gpu/mlp_trace_gpu.py [gpt2-c256] [fast-c256:late]        (20 s each, cold)
"""
import contextlib, json, os, shutil, sys
from pathlib import Path
sys.path[:0] = ["src", "dev/gpu"]
ROOT, OUT = Path("src/ridgeline/ops"), Path("/tmp/w256_trace_src/mlp")
STAMPS, LAYERS = 48, 6
STAMP = """
RL_D u32 trace_slot(int what) {
  __shared__ u64 area[3 * 48];
  return smem_address(area) + (threadIdx.x / 128 * 48 + what) * 8;
}
RL_D void stamp_value(int what, u64 value) {
  if (threadIdx.x % 128 == 0) asm volatile("st.shared.u64 [%0], %1;" ::"r"(trace_slot(what)), "l"(value) : "memory");
}
RL_D u64 ticks() { u64 t; asm volatile("mov.u64 %0, %clock64;" : "=l"(t) :: "memory"); return t; }
RL_D u64 nanoseconds() { u64 t; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t) :: "memory"); return t; }
RL_D void stamp(int what) { stamp_value(what, ticks()); }
RL_D void stamp_if(bool now, int what) { if (now) stamp(what); }
RL_D void dump_stamps() {
  stamp_value(47, nanoseconds());
  if (threadIdx.x % 128) return;
  i64* base = reinterpret_cast<i64*>(TRACE);
  const i64 launch = base[132 * 3 * 48 * 8 + blockIdx.x] & 7;
  for (int i = 0; i < 48; ++i) {
    u64 v; asm volatile("ld.shared.u64 %0, [%1];" : "=l"(v) : "r"(trace_slot(i)) : "memory");
    base[((launch * 132 + blockIdx.x) * 3 + threadIdx.x / 128) * 48 + i] = v;
  }
  named_arrive_done();
}
"""
def put(s, old, new, n=1):
    assert s.count(old) == n, (s.count(old), old)
    return s.replace(old, new)
def sources():
    OUT.parent.mkdir(exist_ok=True, parents=True)
    for folder in ("mlp", "linear"):
        shutil.copytree(ROOT / folder, OUT.parent / folder, dirs_exist_ok=True)
    p = OUT / "access.cuh"; s = p.read_text()
    stamp = STAMP.replace("  named_arrive_done();\n", "")
    s = put(s, "RL_D float shuffle_xor", stamp + "RL_D float shuffle_xor"); p.write_text(s)
    p = OUT / "tile.cuh"; s = p.read_text()
    s = put(s, "RL_D void begin(Barriers bar) {\n", """RL_D void begin(Barriers bar) {
  if (threadIdx.x % 128 == 0) for (int i = 0; i < 48; ++i) stamp_value(i, 0);
  stamp(0); stamp_value(46, nanoseconds());
""")
    s = put(s, "  sync_block();\n  sync_warp();\n}", "  sync_block();\n  sync_warp();\n  stamp(1);\n}")
    s = put(s, "  u32 phase;\n", "  u32 phase;\n  mutable u32 waited = 0;\n")
    s = put(s, "RL_D void wait() const { barrier_wait(bar.full(slot), phase); }", """RL_D void wait() const {
    const u32 from = static_cast<u32>(ticks());
    barrier_wait(bar.full(slot), phase);
    waited += static_cast<u32>(ticks()) - from;
  }""")
    p.write_text(s)
    p = OUT / "join.cuh"; s = p.read_text()
    s = put(s, "  sync_consumers();\n}", "  sync_consumers();\n  stamp(3);\n}"); p.write_text(s)
    p = OUT / "panels.cuh"; s = p.read_text()
    s = put(s, "const u32 (&pairs)[4][4], const Place& me) {", "const u32 (&pairs)[4][4], const Place& me, bool now = false) {\n  stamp_if(now, 11);")
    s = put(s, "  sync_warp();\n#pragma unroll", "  sync_warp();\n  stamp_if(now, 12);\n#pragma unroll"); p.write_text(s)
    p = OUT / "join.cuh"; s = p.read_text()
    s = put(s, "  row_sums(whole, statistics, me);\n", "  stamp(41);\n  row_sums(whole, statistics, me);\n  stamp(42);\n")
    s = put(s, "  if (BRANCH_BIAS)\n#pragma unroll\n    for (int g = 0; g < GROUPS; ++g) {\n      float dbranch", "  stamp(43);\n  if (BRANCH_BIAS)\n#pragma unroll\n    for (int g = 0; g < GROUPS; ++g) {\n      float dbranch")
    s = put(s, "  float* out = p.partials + partial_row * p.stride;\n", "  stamp(44);\n  float* out = p.partials + partial_row * p.stride;\n")
    s = put(s, "  if (!RMS) row_sums(mean, p.statistics, me);\n", "  stamp(41);\n  if (!RMS) row_sums(mean, p.statistics, me);\n  stamp(42);\n")
    s = put(s, "  row_sums(squares, p.statistics + STATISTICS_BYTES, me);\n", "  stamp(43);\n  row_sums(squares, p.statistics + STATISTICS_BYTES, me);\n  stamp(44);\n"); p.write_text(s)
    def common(s):
        s = put(s, "    wait_for_previous();\n", "    wait_for_previous();\n    stamp(2);\n")
        at = s.rindex("}")
        return s[:at] + "  stamp(37);\n  if (threadIdx.x < 128) stamp(37);\n  dump_stamps();\n  sync_block();\n  if (threadIdx.x == 0) reinterpret_cast<i64*>(TRACE)[132 * 3 * 48 * 8 + blockIdx.x] += 1;\n}" + s[at + 1:]
    for file, first, second, inner, sums, count in (("forward", "up", "down", "u", "z", "chunk"), ("backward", "down", "up", "da", "dh", "turn")):
        p = OUT / f"{file}.cu"; s = common(p.read_text())
        s = put(s, "== 0) wait_for_previous();\n", "== 0) { wait_for_previous(); stamp(2); }\n")
        fetched = "    fetch_rows(h, smem, bar, tiles.tile, tiles.round);\n".replace("h,", "h," if file == "forward" else "dz,")
        s = put(s, fetched, fetched + "    stamp(3);\n")
        now = f"{count} == 3"
        for name, at in (("up", 19 if second == "up" else 21), ("down", 19 if second == "down" else 21)):
            head = {"up": "multiply_up(", "down": "multiply_down("}[name]
            i = s.index(f"RL_D void {head}"); j = s.index("Ring& ring) {", i)
            s = s[:j] + "Ring& ring, bool now = false) {" + s[j + len("Ring& ring) {"):]
            loop = {"up": "UP_SLOTS" if file == "forward" else "HALVES", "down": "HALVES" if file == "forward" else "DOWN_SLOTS"}[name]
            var = "half" if loop == "HALVES" else "k"
            j = s.index("    ring.wait();\n", i)
            s = s[:j] + f"    ring.wait();\n    stamp_if(now, {at} + {var});\n" + s[j + len("    ring.wait();\n"):]
        s = put(s, f"    begin_turn(me);\n    multiply_{first}({inner}", f"    stamp(4);\n    begin_turn(me);\n    stamp(5);\n    multiply_{first}({inner}")
        s = put(s, f"    wgmma_touch({inner});\n    release_all", f"    wgmma_touch({inner});\n    stamp(6);\n    release_all")
        s = put(s, f"      const int part = WORKERS * {count} + first_part(me);\n", f"      const int part = WORKERS * {count} + first_part(me);\n      stamp_if({now}, 10);\n")
        if file == "forward":
            s = put(s, "      activate_rows(a, slope, u, panels, me);\n", f"      activate_rows(a, slope, u, panels, me, {now});\n      stamp_if({now}, 13);\n")
            s = put(s, "float (&u)[32], u32 panels, const Place& me) {", "float (&u)[32], u32 panels, const Place& me, bool now) {")
            s = put(s, "  stage(panels, a, me);", "  stage(panels, a, me, now);")
            s = put(s, "      multiply_down(z, a, ring);\n      multiply_up(u, rows, ring);\n      end_turn(me);\n      send_rows(slope, p, part, row / 64, panels, me);\n", f"      stamp_if({now}, 18);\n      multiply_down(z, a, ring, {now});\n      multiply_up(u, rows, ring, {now});\n      end_turn(me);\n      stamp_if({now}, 23);\n      send_rows(slope, p, part, row / 64, panels, me);\n      stamp_if({now}, 16);\n")
            s = put(s, "      wgmma_wait<UP_SLOTS>();\n", f"      wgmma_wait<UP_SLOTS>();\n      stamp_if({now}, 24);\n")
            s = put(s, "      load_bias(u, smem + BIAS + 128 * (part + WORKERS), me);\n", f"      load_bias(u, smem + BIAS + 128 * (part + WORKERS), me);\n      stamp_if({now}, 17);\n")
        else:
            s = put(s, "      stage(staging, du, me);\n", f"      stage(staging, du, me, {now});\n      stamp_if({now}, 13);\n")
            s = put(s, "      load_kept(kept, p, part + WORKERS, row / 64, inside, me);\n", f"      load_kept(kept, p, part + WORKERS, row / 64, inside, me);\n      stamp_if({now}, 17);\n")
            s = put(s, "      multiply_up(dh, du, ring);\n      multiply_down(da, rows, ring);\n      end_turn(me);\n      send(p.du, staging, 64 * part, row, me);\n", f"      stamp_if({now}, 18);\n      multiply_up(dh, du, ring, {now});\n      multiply_down(da, rows, ring, {now});\n      end_turn(me);\n      stamp_if({now}, 23);\n      send(p.du, staging, 64 * part, row, me);\n      stamp_if({now}, 16);\n")
            s = put(s, "      wgmma_wait<DOWN_SLOTS>();\n", f"      wgmma_wait<DOWN_SLOTS>();\n      stamp_if({now}, 24);\n")
        s = put(s, f"      wgmma_wait<0>();\n      wgmma_touch({inner});\n", f"      wgmma_wait<0>();\n      wgmma_touch({inner});\n      stamp_if({now}, 25);\n")
        s = put(s, "    if (!APART && me.group == 1) named_arrive<256>(6);", "    stamp(30);\n    if (!APART && me.group == 1) named_arrive<256>(6);")
        s = put(s, f"    begin_turn(me);\n    multiply_{second}({sums}, ", f"    stamp(31);\n    begin_turn(me);\n    stamp(32);\n    multiply_{second}({sums}, ")
        s = put(s, "    release_all<HALVES>(ring, 0, me);\n", "    release_all<HALVES>(ring, 0, me);\n    stamp(33);\n")
        s = put(s, f"    finish_sums(v, {sums}, rows, bar, me);\n", f"    finish_sums(v, {sums}, rows, bar, me);\n    stamp(34);\n")
        end = "    join_forward(join, v, ahead, row + first_row(me), me);\n" if file == "forward" else "STATISTICS_BYTES, row / 64, me);\n"
        s = put(s, end, end + "    stamp(35);\n    stamp_value(40, ring.waited);\n")
        s = put(s, "  if (me.lane == 0) store_wait<0>();\n", "  if (me.lane == 0) store_wait<0>();\n  stamp(36);\n")
        p.write_text(s)
    p = OUT / "project.cu"; s = common(p.read_text())
    s = put(s, "  wait_for_previous();\n  ring =", "  wait_for_previous();\n  stamp(2);\n  ring =")
    s = put(s, "    begin_sums<BRANCH_BIAS && !BACKWARD>(acc, bias + 2 * me.column(), true, me);\n", "    stamp(4);\n    begin_sums<BRANCH_BIAS && !BACKWARD>(acc, bias + 2 * me.column(), true, me);\n    stamp(5);\n")
    s = put(s, "    ring.wait();\n", "    stamp_if(k < 8, 10 + 2 * k);\n    ring.wait();\n    stamp_if(k < 8, 11 + 2 * k);\n")
    s = put(s, "    take_rows(v, acc);\n", "    stamp(33);\n    take_rows(v, acc);\n")
    s = put(s, "    finish(v, ahead, row, tiles);\n", "    finish(v, ahead, row, tiles);\n    stamp(35);\n    stamp_value(40, ring.waited);\n")
    p.write_text(s)
NAMES = {1: "set up", 2: "previous done", 3: "vectors/issued", 4: "at first turn", 5: "turn", 6: "1st product", 10: "[4th part", 11: "math", 12: "panel free", 13: "panel", 14: "fence", 15: "sent", 16: "kept/sums]", 17: "loads", 18: "turn", 19: "slot", 20: "slot", 21: "slot", 22: "slot", 23: "issued", 24: "2nd product done", 25: "1st product done", 30: "loop done", 31: "ahead", 32: "last turn", 33: "last product", 34: "met", 41: "join: first", 42: "sums met", 43: "second", 44: "third", 35: "joined", 36: "stores done", 37: "end"}
PROJECT = {**{10 + i: f"k{i // 2}" + ("full" if i % 2 else "") for i in range(16)}, **{k: v for k, v in NAMES.items() if k < 10 or k > 29}}

TRACES = {}  # by a kernel's macros, so that a second run compiles nothing


def main(name, early):
    import torch
    sources()
    from ridgeline.ops.mlp import kernels as K
    from ridgeline.ops import _cuda as cuda
    import fused_gpu as F
    from ridgeline.engine import TrainStep
    from ridgeline.models import LanguageModel, LanguageConfig
    K.FOLDER, K.SMEM_LIMIT = OUT.resolve(), 225 * 1024
    size = 132 * 3 * STAMPS * 8
    traces, real = TRACES, cuda.load
    def load(path, macros):
        if Path(path).parent != K.FOLDER:
            return real(path, macros)
        key = (Path(path).stem, tuple(sorted(macros.items())))
        if key not in traces:
            traces[key] = torch.zeros(size + 132, dtype=torch.int64, device="cuda")
        return real(path, {**macros, "TRACE": f"{traces[key].data_ptr()}ull"})
    cuda.load = load
    scope = contextlib.ExitStack()
    if not early:
        scope.enter_context(F.chosen(False, {}))
    config, B, T = F.WORKLOADS[name]
    m = LanguageModel(LanguageConfig(vocabulary=65, decoder=config), impl="fused", seed=0).cuda()
    train = TrainStep(m, precision="bf16")
    tokens = torch.randint(65, (B, T + 1), device="cuda")
    batch = {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
    for _ in range(20):
        train(batch)
    torch.cuda.synchronize()
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record()
    for _ in range(20):
        train(batch)
    b.record(); torch.cuda.synchronize()
    print(f"{name}{'' if early else ' late'}: step with stamps {a.elapsed_time(b) / 20:.4f} ms", flush=True)
    got = {key: [] for key in traces}
    for _ in range(10):
        for t in traces.values(): t.zero_()
        for _ in range(1): train(batch)
        torch.cuda.synchronize()
        for key, t in traces.items(): got[key].append(t.clone())
    out = {}
    for (stem, macros), list_ in got.items():
        d = dict(macros)
        t = torch.stack(list_)
        counts = t[0, size:]
        launches = int(counts.max())
        t = t[:, :size].view(len(list_), 8, 132, 3, STAMPS).double()
        for launch in sorted({1, launches // 2, launches - 1}):
            x = t[:, launch]
            used = x[0, :, 0, 0] > 0
            x = x[:, used]
            if not x.numel(): continue
            start, end = x[..., 46].amin(2), x[..., 47].amax(2)
            span = (end.amax(1) - start.amin(1)).mean() / 1e3
            last = (end.amax(1) - end.amin(1)).mean() / 1e3
            apart = (start.amax(1) - start.amin(1)).mean() / 1e3
            names = PROJECT if stem == "project" else NAMES
            title = f"{name} {stem}{' backward' if d.get('BACKWARD') else ''} launch {launch} of {launches}: {x.shape[1]} blocks, span {span:.1f} us, starts apart {apart:.1f}, ends apart {last:.1f}, a block {((end - start).mean() / 1e3):.1f}"
            print(title)
            lines = {}
            for g in (0, 1, 2):
                vals = {k: (x[:, :, g, k] - x[:, :, 0, 0]).mean().item() for k in names if (x[:, :, g, k] > 0).all()}
                line, prev = [], 0.0
                for k, v in sorted(vals.items(), key=lambda kv: kv[1]):
                    line.append(f"{names[k]} {v:.0f} (+{v - prev:.0f})"); prev = v
                waited = x[:, :, g, 40].mean().item()
                print(f"  {('producer', 'group 0', 'group 1')[g]}: " + ", ".join(line) + f"; waited for slots {waited:.0f}", flush=True)
                lines[g] = {**vals, 40: waited}
            out[title] = lines
    scope.close()
    cuda.load = real
    json.dump(out, open(os.environ.get("OUT", "/tmp") + f"/mlp_trace_{name}{'' if early else '_late'}.json", "w"))
if __name__ == "__main__":
    if sys.argv[1:] == ["build"]:
        sources()
        from ridgeline.ops.mlp import kernels as K
        from ridgeline.ops import _cuda as cuda
        import torch
        for folder, more in ((K.FOLDER, {}), (OUT.resolve(), {"TRACE": "140000000000ull"})):
            for part in K._PARTS:
                cfg = K.fitted(part, 256, K.ABREAST, 1024)
                back = "backward" in part
                macros = {**K.tile_macros(256, torch.bfloat16, cfg), "RMS": 0, "DROPOUT": 0, "RESIDUAL": 1, "NORM_BIAS": 1, "BRANCH_BIAS": int(not back or part == "mlp_backward"), "GELU_TANH": 1, "UP_BIAS": 1, "BACKWARD": int(back), **more}
                print(part, cuda.build(folder / K.source(part), macros, "sm_90a").resources())
    else:
        for name in sys.argv[1:] or ["gpt2-c256"]:
            main(name.partition(":")[0], not name.endswith(":late"))
