"""Timeline of plain attention's kernels at head width 32, T 2048: clock marks in a copy of their sources. About 12 s.

attn_timeline_gpu.py [SECONDS [both]]: 8 key heads, and with `both` one. When thread blocks start, meet each of their tiles (by
warpgroup) and end, and when each kernel of forward, backward, sum begins and ends. Writes $OUT/attn_timeline.json.
"""
import json, os, statistics as st, sys, threading
from pathlib import Path

OUT = Path(os.environ.get("OUT", "/tmp")); LIMIT = float(sys.argv[1]) if len(sys.argv) > 1 else 30
COMMON = '''
RL_D long long ns_now() { long long t; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)); return t; }
#define PLACE(i) reinterpret_cast<long long*>(MARKS)[(blockIdx.x * 8 + (threadIdx.x >> 7)) * 64 + (i)]
#define WARP(i) do { if ((threadIdx.x & 31) == 0) PLACE((i) + 7 * (threadIdx.x >> 5 & 3)) = clock64(); } while (0)
#define STEP_MARK(i) do { if (tile == 12) MARK(44 + 5 * k + (i)); } while (0)
#define MARK(i) do { if ((threadIdx.x & 127) == 0) PLACE(i) = clock64(); } while (0)
#define ENTER() do { if ((threadIdx.x & 127) == 0) PLACE(0) = clock64(), PLACE(1) = ns_now(); } while (0)
#define LEAVE() do { if ((threadIdx.x & 127) == 0) PLACE(4) = clock64(), PLACE(5) = ns_now(); } while (0)
'''
PATCHES = {  # file: what stands there once, and what instead. 3: barriers are there; 8 + n: tile n; 52: a span's or unit's end
    "plain_backward.cu": [
        ("namespace rl {\n", "namespace rl {\n#define MARKS a.column_sums\n" + COMMON),
        ("  const Here p;\n  p.start();\n", "  const Here p;\n  ENTER();\n  p.start();\n  MARK(3);\n"),
        ("  const u32 queries = operand_at(p.pair(tile));\n", "  const u32 queries = operand_at(p.pair(tile));\n  MARK(8 + tile);\n"),
        ("  wait_for_previous_knowing(copied.unit.all());\n  copy_tile(a, p, copied, 0);\n", "  WARP(8);\n  wait_for_previous_knowing(copied.unit.all());\n  WARP(9);\n  copy_tile(a, p, copied, 0);\n  WARP(11);\n"),
        ("    if (k == 0) p.wait_ready(tile);\n    if (key", "    STEP_MARK(0);\n    if (k == 0) p.wait_ready(tile);\n    if (key"),
        ("    wgmma_touch(w.s);\n", "    STEP_MARK(1);\n    wgmma_touch(w.s);\n"),
        ("    if (k == 0) p.wait_square_empty(tile);\n    store", "    STEP_MARK(2);\n    if (k == 0) p.wait_square_empty(tile);\n    store"),
        ("p.warp, p.lane);\n    if (products) {\n", "p.warp, p.lane);\n    STEP_MARK(3);\n    if (products) {\n"),
        ("      w.touch_gradients(last);\n    }\n", "      w.touch_gradients(last);\n    }\n    STEP_MARK(4);\n"),
        ("    if (notes && tile == -2) begin_notes(a, p.lane);\n", "    if (tile == -2) WARP(13);\n    if (notes && tile == -2) begin_notes(a, p.lane);\n    if (tile == -2) WARP(10);\n"),
        ("      p.wait_full(statistics);\n", "      p.wait_full(statistics);\n      if (statistics == 0) WARP(12);\n"),
        ("      p.arrive(p.ready(statistics));\n", "      p.arrive(p.ready(statistics));\n      if (statistics == 0) WARP(14);\n"),
        ("      p.wait_own(spans);\n      const", "      if (spans == 0) MARK(6);\n      p.wait_own(spans);\n      if (spans == 0) MARK(7);\n      const"),
        ("          multiply_span(dq, p.square(tile, 0)", "          MARK(8 + tile);\n          multiply_span(dq, p.square(tile, 0)"),
        ("    run_queries(a, p);\n  }\n", "    run_queries(a, p);\n  }\n  LEAVE();\n"),
    ],
    "plain_forward.cu": [
        ("namespace rl {\n", "namespace rl {\n#define MARKS (a.lse + 65536)\n" + COMMON),
        ("  const Here p;\n  p.start();\n", "  const Here p;\n  ENTER();\n  p.start();\n  MARK(3);\n"),
        ("        p.wait_full(tile);\n        const u32 keys", "        p.wait_full(tile);\n        MARK(8 + tile);\n        const u32 keys"),
        ("        wgmma_touch(s);\n", "        if (tile == 12) MARK(60);\n        wgmma_touch(s);\n"),
        ("        wgmma_fence();\n        multiply_pairs", "        if (tile == 12) MARK(61);\n        wgmma_fence();\n        multiply_pairs"),
        ("multiply_pairs(o, pairs, keys + units(TILE), j == i);\n        wgmma_commit();\n", "multiply_pairs(o, pairs, keys + units(TILE), j == i);\n        wgmma_commit();\n        if (tile == 12) MARK(62);\n"),
        ("    p.release_own(round);\n", "    p.release_own(round);\n    MARK(52 + round);\n"),
        ("  if (!p.copies())\n    run(a, p);\n", "  if (!p.copies()) {\n    run(a, p);\n    LEAVE();\n  }\n"),
    ],
    "plain_sum.cu": [
        ("#include \"plain_spans.cuh\"\n", "#include \"plain_spans.cuh\"\n#define MARKS column_sums\nnamespace rl {" + COMMON + "}\n"),
        ("  let_next_start();\n", "  ENTER();\n  let_next_start();\n"),
        ("#pragma unroll 2\n", "  MARK(3);\n#pragma unroll 2\n"),
        ("#if RL_COLUMN_SUMS\n", "  LEAVE();\n#if RL_COLUMN_SUMS\n"),
    ],
}
SUMS_ARGUMENT = {"plain_backward": 12, "plain_sum": 2}  # column_sums, which nobody wants here

def patched(source, folder):
    folder.mkdir(parents=True, exist_ok=True)
    for f in source.glob("*.cu*"):
        s = f.read_text()
        for anchor, text in PATCHES.get(f.name, []):
            assert s.count(anchor) == 1, (f.name, anchor, s.count(anchor))
            s = s.replace(anchor, text)
        (folder / f.name).write_text(s)
    return folder

def compile_all(folder):
    import torch
    from ridgeline.ops import _cuda as cuda
    from ridgeline.ops.attention import plain, spans
    l = plain.LAUNCHES[32].forward; macros = spans.defines(torch.bfloat16, False)
    forward = dict(HEAD_WIDTH=32, WARPGROUPS=l.groups, RING_STAGES=l.stages, BLOCKS_PER_PROCESSOR=l.per_processor, RL_FP16=0, RL_COLUMN_SUMS=0, STEP_COLUMNS=l.step)
    for name, d in (("plain_backward.cu", macros), ("plain_sum.cu", macros), ("plain_forward.cu", forward)):
        c = cuda.build(folder / name, d, "sm_90a"); print(name, {k: tuple(v) for k, v in c.resources().items()}, "SERIALIZED" if "serialized" in c.log else "", flush=True)

def few(x): x = sorted(x); return [round(v) for v in (x[0], x[len(x) // 2], x[-1])] if x else []

def report(name, marks, groups, out):
    x = [b for b in marks.tolist() if b[0][1]]; t0 = min(b[0][1] for b in x)
    r = {"entered ns": few([b[0][1] - t0 for b in x]), "left ns": few([max(g[5] for g in b) - t0 for b in x]), "cycles a ns": round(st.median((b[0][4] - b[0][0]) / max(1, b[0][5] - b[0][1]) for b in x), 3),
         "to start": few([b[0][3] - b[0][0] for b in x])}
    for g in groups:
        tiles = [[round(st.median(d)) if (d := [b[g][9 + i] - b[g][8 + i] for b in x if b[g][8 + i] and b[g][9 + i]]) else -1 for i in range(40)]]
        r[f"group {g}"] = {"first tile": few([min(v for v in b[g][8:52] if v) - b[g][3] for b in x if any(b[g][8:52])]), "end": few([b[g][4] - b[g][3] for b in x if b[g][4]]), "a tile (median)": tiles[0]}
    out[name] = r; print("TIMELINE", name, json.dumps(r), flush=True); (OUT / "attn_timeline.json").write_text(json.dumps(out))

def run(folder, G, out):
    import torch
    from ridgeline.ops.attention import plain, spans
    B, T, H, D = 4, 2048, 8, 32; name = f"{G} key heads"
    torch.manual_seed(0)
    qkv = torch.randn(B, T, (H + 2 * G) * D, device="cuda", dtype=torch.bfloat16); d = torch.zeros_like(qkv)
    cut = lambda x: [y.unflatten(-1, (-1, D)) for y in x.split([H * D, G * D, G * D], -1)]
    do, o = (torch.randn(B, T, H, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    lse = torch.zeros(B * H * T + 2 * 132 * 8 * 64, device="cuda")
    marks = {k: torch.zeros(c, 8, 64, dtype=torch.int64, device="cuda") for k, c in (("plain_backward", 132), ("plain_sum", 2048))}
    real = plain.cuda.load
    class Marked:
        def __init__(s, k, name): s.k, s.name = k, name
        def kernel(s, n, kinds, **kw): return Marked(s.k.kernel(n, kinds, **kw), s.name)
        def launch(s, grid, block, smem, args):
            args = list(args)
            if s.name in marks: args[SUMS_ARGUMENT[s.name]] = marks[s.name]
            s.k.launch(grid, block, smem, args)
    class Cuda:
        Argument, tensor_map = plain.cuda.Argument, staticmethod(plain.cuda.tensor_map)
        @staticmethod
        def load(p, macros): return Marked(real(folder / p.name, macros), p.stem) if p.name in PATCHES else real(p, macros)
    def both():
        plain.forward(*cut(qkv), o, lse, scale=D**-0.5)
        plain.backward(do, *cut(qkv), o, lse, *cut(d), scale=D**-0.5)
    def graph():
        both(); torch.cuda.synchronize(); g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            for _ in range(10): both()
        return g
    def us(g):
        got = []
        for _ in range(5):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            g.replay(); a.record(); g.replay(); b.record(); torch.cuda.synchronize(); got.append(a.elapsed_time(b) * 100)
        return round(sorted(got)[2], 1)
    bare, old = graph(), (plain.cuda, spans.cuda); plain.cuda = spans.cuda = Cuda
    try: marked = graph()
    finally: plain.cuda, spans.cuda = old
    print("TIMELINE", name, "us forward + backward", us(bare), "with marks", us(marked), flush=True)
    found = {"forward": lse[B * H * T:].view(torch.int64).view(132, 8, 64).cpu(), **{k: v.cpu() for k, v in marks.items()}}
    zero = min(int(b[0, 1]) for b in found["forward"] if b[0, 1])
    for k, v in found.items():
        times = v[:, :, [1, 5]]; times = times[times > 0]
        print("TIMELINE", name, k, "from", int(times.min()) - zero, "to", int(times.max()) - zero, "ns after the forward began", flush=True)
        if k == "forward":
            print("TIMELINE", name, "forward, tile 12 by warpgroup, cycles from its pair: scores there, exponentials, product begun", [[few((v[:, g, m] - v[:, g, 20])[v[:, g, m] > 0].tolist()) for m in (60, 61, 62)] for g in range(4)], flush=True)
        if k == "plain_backward":
            print("TIMELINE", name, "backward, tile 12 by warpgroup, cycles from its queries, each step: products issued, scores there, differentiated, stored, products done", [[few((v[:, g, m] - v[:, g, 20])[v[:, g, m] > 0].tolist()) for m in range(44, 64)] for g in (0, 1)], flush=True)
            at = v[:, 2, 8:36].view(-1, 4, 7) - v[:, 2, 3].view(-1, 1, 1)
            names = ("before the wait", "done", "notes begun", "first copy", "first tile", "advanced", "statistics")
            print("TIMELINE", name, "who prepares, by warp, cycles from its start", {f"{n} {w}": few(at[:, w, i].tolist()) for i, n in enumerate(names) for w in range(4)}, flush=True)
            print("TIMELINE", name, "keys waited for, there", [[few((v[:, g, m] - v[:, g, 3]).tolist()) for m in (6, 7)] for g in (0, 1)], flush=True)
        if k == "plain_sum":
            start = int(found["plain_backward"][:, :, 1][found["plain_backward"][:, :, 1] > 0].min())
            ns = v[:1024, 0, [1, 5]].view(8, -1, 2) - start
            print("TIMELINE", name, "sum, by four tiles: entered and left, us after the backward's first block entered", [[round(x / 1000, 1) for x in few(ns[g, :, e].tolist())] for g in range(8) for e in (0, 1)], flush=True)
        report(f"{name} {k}", v, {"forward": range(4), "plain_backward": (0, 1, 3), "plain_sum": ()}[k], out)

if __name__ == "__main__":
    threading.Timer(LIMIT, lambda: os._exit(3)).start()
    from ridgeline.ops.attention import hopper
    folder = patched(hopper.SOURCES, Path("/tmp/attn_timeline")); compile_all(folder)
    if "compile" in sys.argv: os._exit(0)
    found = {}
    for G in (8, 1) if "both" in sys.argv else (8,): run(folder, G, found)
    os._exit(0)
