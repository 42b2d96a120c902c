"""Where the row-fused kernels' time goes: clock stamps in edited copies of ops/mlp/*.cu. Prints mean cycles from a block's
start by warpgroup and stamp, launch to launch, inside a graph of different operands."""
import sys, re, json, os, shutil
from pathlib import Path
sys.path.insert(0, "src")
ROOT = Path("src/ridgeline/ops")
OUT = Path("/tmp/mlp_trace_src/mlp")
N_ST = 32
STAMP = """
RL_D void stamp(int what) {
  if (threadIdx.x % 128 == 0) {
    const int group = threadIdx.x / 128;
    reinterpret_cast<i64*>(TRACE)[(blockIdx.x * 3 + group) * 32 + what] = clock64();
  }
}
RL_D void stamp_time(int what) {
  if (threadIdx.x % 128 == 0) {
    u64 t; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    reinterpret_cast<i64*>(TRACE)[(blockIdx.x * 3 + threadIdx.x / 128) * 32 + what] = t;
  }
}
"""
def put(s, old, new, n=1):
    assert s.count(old) == n, (s.count(old), old)
    return s.replace(old, new)
def sources():
    OUT.parent.mkdir(exist_ok=True, parents=True)
    for folder in ("mlp", "linear"):
        shutil.copytree(ROOT / folder, OUT.parent / folder, dirs_exist_ok=True)
    f = (OUT / "access.cuh").read_text()
    f = put(f, "RL_D float shuffle_xor", STAMP + "RL_D float shuffle_xor")
    (OUT / "access.cuh").write_text(f)
    t = OUT / "tile.cuh"; f = t.read_text()
    f = put(f, "RL_D void begin(Barriers bar) {\n", "RL_D void begin(Barriers bar) {\n  stamp(0); stamp_time(30);\n")
    f = put(f, "  sync_block();\n  sync_warp();\n}", "  sync_block();\n  sync_warp();\n  stamp(1);\n}")
    t.write_text(f)
    j = OUT / "join.cuh"; f = j.read_text()
    f = put(f, "  sync_consumers();\n}", "  stamp(17);\n  sync_consumers();\n  stamp(3);\n}")
    j.write_text(f)
    def common(s):
        s = put(s, "    wait_for_previous();\n", "    wait_for_previous();\n    stamp(2);\n")
        at = s.rindex("}")
        return s[:at] + "  stamp(21); stamp_time(31);\n}" + s[at + 1:]
    for file, first, second, inner, sums, count in (("forward", "up", "down", "u", "z", "chunk"), ("backward", "down", "up", "da", "dh", "turn")):
        p = OUT / f"{file}.cu"; s = common(p.read_text())
        s = put(s, f"    take_turn(me);\n    multiply_{first}({inner}", f"    stamp(4);\n    take_turn(me);\n    stamp(5);\n    multiply_{first}({inner}")
        s = put(s, f"    wgmma_touch({inner});\n    release_all", f"    wgmma_touch({inner});\n    stamp(6);\n    release_all")
        s = put(s, f"      take_turn(me);\n      multiply_{second}(", f"      if ({count} == 0) stamp(7); else if ({count} == 1) stamp(10);\n      take_turn(me);\n      if ({count} == 0) stamp(8);\n      multiply_{second}(")
        s = put(s, f"      wgmma_touch({inner});\n      release_all", f"      wgmma_touch({inner});\n      if ({count} == 0) stamp(9);\n      release_all")
        s = put(s, "    if (!APART && me.group == 1) named_arrive<256>(6);", "    stamp(11);\n    if (!APART && me.group == 1) named_arrive<256>(6);")
        s = put(s, f"    take_turn(me);\n    multiply_{second}({sums}, ", f"    take_turn(me);\n    stamp(12);\n    multiply_{second}({sums}, ")
        s = put(s, "    release_all<HALVES>(ring, 0, me);\n", "    release_all<HALVES>(ring, 0, me);\n    stamp(13);\n")
        s = put(s, f"    finish_sums(v, {sums}, machine, me);\n", f"    finish_sums(v, {sums}, machine, me);\n    stamp(14);\n")
        end = "    join_forward(join, v, ahead, row + first_row(me), me);\n" if file == "forward" else "STATISTICS_BYTES, row / 64, me);\n"
        s = put(s, end, end + "    stamp(15);\n")
        p.write_text(s)
    p = OUT / "project.cu"; s = common(p.read_text())
    s = put(s, "    begin_sums<BRANCH_BIAS && !BACKWARD>(acc, bias + 2 * me.column(), true, me);\n", "    stamp(4);\n    begin_sums<BRANCH_BIAS && !BACKWARD>(acc, bias + 2 * me.column(), true, me);\n    stamp(5);\n")
    s = put(s, "    multiply(acc, blocks, ring, me);\n", "    multiply(acc, blocks, ring, me);\n    stamp(13);\n")
    s = put(s, "    take_rows(v, acc);\n", "    take_rows(v, acc);\n    stamp(14);\n")
    s = put(s, "    finish(v, ahead, row, tiles);\n", "    finish(v, ahead, row, tiles);\n    stamp(15);\n")
    p.write_text(s)
NAMES = {0: "start", 1: "set up", 2: "previous done", 17: "vectors here", 3: "consumers synced", 4: "at first turn", 5: "turn", 6: "1st product", 7: "1st pointwise", 8: "2nd turn", 9: "2nd product", 10: "2nd pointwise", 11: "loop done", 12: "last turn", 13: "last product", 14: "exchanged", 16: "staged read", 15: "joined", 20: "finished", 21: "block done"}

def main():
    import torch
    sources()
    from ridgeline.ops.mlp import kernels as K
    from ridgeline.ops import _cuda as cuda
    from ridgeline.ops.early import early_launches
    trace = torch.zeros(132, 3, N_ST, dtype=torch.int64, device="cuda")
    K.FOLDER = OUT.resolve()
    real = cuda.load
    cuda.load = lambda p, d: real(p, {**d, "TRACE": str(trace.data_ptr()) + "ull"})
    torch.manual_seed(0)
    dev, bf = "cuda", torch.bfloat16
    rnd = lambda *s: torch.randn(*s, device=dev).to(bf) * 0.1
    out = {}
    for name, F, Q, bias in (("gpt2", 1024, 768, True), ("fast", 512, 320, False)):
        C, N = 256, 8192
        kind = "layernorm" if bias else "rmsnorm"
        up, down, outw, qkv = rnd(F, C), rnd(C, F), rnd(C, C), rnd(Q, C)
        vec = lambda n: rnd(n) if bias else None
        ub, db, w, b = vec(F), vec(C), rnd(C), vec(C)
        sets = []
        for _ in range(6):
            h, res, x, dy, dz, dres = rnd(N, C), rnd(N, C), rnd(N, C), rnd(N, Q), rnd(N, C), rnd(N, C)
            kept = rnd(*K.kept_shape(N, F)).half(); a, du = rnd(N, F), rnd(N, F)
            mean = torch.zeros(N, device=dev) if bias else None; rstd = torch.ones(N, device=dev)
            r, hn, m2, r2, dr = rnd(N, C), rnd(N, C), torch.zeros(N, device=dev) if bias else None, torch.ones(N, device=dev), rnd(N, C)
            part = torch.zeros(512, 2 * C, device=dev)
            j = K.Join(kind, 1e-5, w, b, db, res, r, hn, m2, r2, None)
            g = K.JoinGradient(kind, w, res, mean, rstd, dres, dr, None, part[:, : (2 if bias else 1) * C], bias, False, None)
            sets.append((h, x, dy, dz, kept, a, du, j, g))
        runs = {
            "mlp_forward": lambda s: K.mlp_forward_raw(s[0], up, ub, down, s[4], s[5], s[7], gelu="tanh"),
            "mlp_backward": lambda s: K.mlp_backward_raw(s[3], up, down, s[4], s[6], None, s[8]),
            "project_forward": lambda s: K.project_forward_raw(s[1], outw, s[7]),
            "project_backward": lambda s: K.project_backward_raw(s[2], qkv, s[8]),
        }
        for part, run in runs.items():
            for early in (True,):
                with early_launches(early):
                    st = torch.cuda.Stream()
                    with torch.cuda.stream(st):
                        for s in sets: run(s)
                        torch.cuda.synchronize()
                        gph = torch.cuda.CUDAGraph()
                        with torch.cuda.graph(gph, stream=st):
                            for s in sets: run(s)
                torch.cuda.synchronize()
                for _ in range(3): gph.replay()
                torch.cuda.synchronize()
                ta, tb = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                ta.record()
                for _ in range(20): gph.replay()
                tb.record(); torch.cuda.synchronize()
                us = ta.elapsed_time(tb) / 120 * 1000
                acc = []
                for _ in range(10):
                    trace.zero_(); gph.replay(); torch.cuda.synchronize(); acc.append(trace.clone())
                t = torch.stack(acc).double()  # [10, block, group, stamp]
                used = t[0, :, 0, 0] > 0
                t = t[:, used]
                blocks = int(used.sum())
                span = (t[..., 31].amax(dim=(1, 2)) - t[..., 30].amin(dim=(1, 2))).mean().item() / 1000
                first = t[:, :, 0, 30]
                skew = (first.amax(1) - first.amin(1)).mean().item() / 1000
                length = (t[..., 31].amax(2) - t[:, :, 0, 30]).mean().item()
                cyc = (t[..., 21].amax(2) - t[:, :, 0, 0]).mean().item()
                print(f"{name} {part} early={early}: {us:.1f} us a launch in a graph; {blocks} blocks; first start to last end {span:.1f} us, starts apart {skew:.1f} us, a block {length/1000:.1f} us = {cyc:.0f} cycles ({cyc/max(length,1):.2f} GHz)", flush=True)
                base = t[..., 0:1].amin(dim=2, keepdim=True)
                for g in (1, 2):
                    line, prev = [], 0.0
                    vals = {k: (t[:, :, g, k] - base[:, :, 0, 0]).mean().item() for k in NAMES if (t[:, :, g, k] > 0).all()}
                    for k, v in sorted(vals.items(), key=lambda kv: kv[1]):
                        line.append(f"{NAMES[k]} {v:.0f} (+{v - prev:.0f})"); prev = v
                    print(f"    group {g - 1}: " + ", ".join(line), flush=True)
                    out[f"{name} {part} {early} {g}"] = vals
                out[f"{name} {part} {early}"] = dict(us=us, span=span, skew=skew, length=length, cycles=cyc)
    json.dump(out, open(os.environ.get("OUT", "/tmp") + "/mlp_trace.json", "w"))
if __name__ == "__main__":
    if len(sys.argv) > 1:  # build only, no card
        sources()
        from ridgeline.ops.mlp import kernels as K
        from ridgeline.ops import _cuda as cuda
        import torch
        K.FOLDER = OUT.resolve()
        for part in K._PARTS:
            cfg = K.fitted(part, 256, K.ABREAST, 1024)
            back = "backward" in part
            m = {**K.tile_macros(256, torch.bfloat16, cfg), "RMS": 0, "DROPOUT": 0, "RESIDUAL": 1, "NORM_BIAS": 1, "BRANCH_BIAS": int(not back), "GELU_TANH": 1, "UP_BIAS": int(not back), "BACKWARD": int(back), "TRACE": "140000000000ull"}
            print(part, cuda.build(K.FOLDER / K.source(part), m, "sm_90a").resources())
    else:
        main()
