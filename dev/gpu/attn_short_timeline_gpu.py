"""Timeline of plain attention's kernels at T 256, head width 32, B 512: clock marks in a copy of their sources. About 15 s.

attn_short_timeline_gpu.py [SECONDS]: 8 key heads and one, tiles 40 to 47 of each thread block. attn_short_timeline_gpu.py compile: no card.
Prints medians over blocks and writes all marks of four blocks to $OUT/attn_short_timeline.json: [block][group][8 + 9 * tile + mark]; the
warps that prepare are groups 2, 4, 5, 6. Differences hold within a block alone: clocks of processors differ.
Marks, computing (groups 0, 1): 0 before the tile, 1 tile there, 2 its step 0 differentiated, 3 dS there; before a head's first tile 4 the head
before done, 5 its keys' gradients stored, 6 next keys in registers; 7 statistics there, 8 scores of step 0 there. Preparing: 0 before dS, 1 dS
there, 2 copies and statistics done; of the tile whose statistics are next 3 before it, 4 there, 5 written. dQ (3): 0 before dS, 1 there, 2
multiplied, 3 a span's end. Forward: 0 before the tile, 1 there, 2 scores, 3 exponentials, 4 product begun; 5 a block's last product, 6 its end.
"""
import json, os, statistics as st, sys, threading
from pathlib import Path
OUT = Path(os.environ.get("OUT", "/tmp")); LIMIT = float(sys.argv[1]) if sys.argv[1:] and sys.argv[1] != "compile" else 30
COMMON = '''
#define LO 40
#define PLACE(i) reinterpret_cast<long long*>(MARKS)[(blockIdx.x * 8 + (threadIdx.x >> 7)) * 80 + (i)]
#define PUT(group, t, k) do { const int t_ = static_cast<int>(t) - LO; if (t_ >= 0 && t_ < 8) reinterpret_cast<long long*>(MARKS)[(blockIdx.x * 8 + (group)) * 80 + 8 + 9 * t_ + (k)] = clock64(); } while (0)
#define AT(t, k) do { if ((threadIdx.x & 127) == 0) PUT(threadIdx.x >> 7, t, k); } while (0)
#define ATW(t, k) do { if (p.lane == 0) PUT(p.warp ? 3 + p.warp : 2, t, k); } while (0)
#define ENTER() do { if ((threadIdx.x & 127) == 0) PLACE(0) = clock64(); } while (0)
#define LEAVE() do { if ((threadIdx.x & 127) == 0) PLACE(4) = clock64(); } while (0)
'''
PATCHES = {
    "plain_backward.cu": [
        ("namespace rl {\n", "namespace rl {\n#define MARKS a.column_sums\n" + COMMON),
        ("  const Here p;\n  p.start();\n", "  const Here p;\n  ENTER();\n  p.start();\n"),
        ("  p.wait_full(tile);\n  const u32 queries = operand_at(p.pair(tile));\n", "  AT(tile, 0);\n  p.wait_full(tile);\n  AT(tile, 1);\n  const u32 queries = operand_at(p.pair(tile));\n"),
        ("  p.arrive(p.square_full(tile));\n}\n", "  AT(tile, 3);\n  p.arrive(p.square_full(tile));\n}\n"),
        ("    if (k == 0) p.wait_square_empty(tile);\n    store", "    if (k == 0) { AT(tile, 2); p.wait_square_empty(tile); }\n    store"),
        ("      for (int h = 0; h < a.heads_per_part; ++h) take_head(w, a, p, scores, first, places, h == 0, tile);\n", "      AT(tile, 6);\n#pragma unroll 1\n      for (int h = 0; h < a.heads_per_part; ++h) { take_head(w, a, p, scores, first, places, h == 0, tile); AT(tile, 4); }\n"),
        ("    if (k == 0) p.wait_ready(tile);\n", "    if (k == 0) { p.wait_ready(tile); AT(tile, 7); }\n"),
        ("    wgmma_touch(w.s);\n", "    if (k == 0) AT(tile, 8);\n    wgmma_touch(w.s);\n"),
        ("      p.wait_own(spans);\n      const Scores", "      AT(tile, 5);\n      p.wait_own(spans);\n      const Scores"),
        ("          p.wait_square(tile);\n          multiply_span", "          AT(tile, 0);\n          p.wait_square(tile);\n          AT(tile, 1);\n          multiply_span"),
        ("          p.arrive(p.square_empty(tile));\n          if (last) {", "          AT(tile, 2);\n          p.arrive(p.square_empty(tile));\n          if (last) {"),
        ("      p.arrive(p.own_empty(spans));\n", "      AT(tile, 3);\n      p.arrive(p.own_empty(spans));\n"),
        ("      p.wait_square(tile);\n      p.arrive", "      ATW(tile, 0);\n      p.wait_square(tile);\n      ATW(tile, 1);\n      p.arrive"),
        ("two tiles with their statistics before all others\n", "two tiles with their statistics before all others\n    ATW(tile, 2);\n"),
        ("      p.wait_full(statistics);\n", "      ATW(statistics, 3);\n      p.wait_full(statistics);\n      ATW(statistics, 4);\n"),
        ("      p.arrive(p.ready(statistics));\n", "      p.arrive(p.ready(statistics));\n      ATW(statistics, 5);\n"),
        ("    run_queries(a, p);\n  }\n", "    run_queries(a, p);\n  }\n  LEAVE();\n"),
    ],
    "plain_forward.cu": [
        ("namespace rl {\n", "namespace rl {\n#define MARKS (a.lse + 1048576)\n" + COMMON),
        ("  const Here p;\n  p.start();\n", "  const Here p;\n  ENTER();\n  p.start();\n"),
        ("        p.wait_full(tile);\n        const u32 keys", "        AT(tile, 0);\n        p.wait_full(tile);\n        AT(tile, 1);\n        const u32 keys"),
        ("        wgmma_touch(s);\n", "        AT(tile, 2);\n        wgmma_touch(s);\n"),
        ("        wgmma_fence();\n        multiply_pairs", "        AT(tile, 3);\n        wgmma_fence();\n        multiply_pairs"),
        ("multiply_pairs(o, pairs, keys + units(TILE), j == i);\n        wgmma_commit();\n", "multiply_pairs(o, pairs, keys + units(TILE), j == i);\n        wgmma_commit();\n        AT(tile, 4);\n"),
        ("    p.release_own(round);\n", "    AT(tile, 5);\n    p.release_own(round);\n"),
        ("      finish(a, p, unit, i, x, o);\n", "      finish(a, p, unit, i, x, o);\n      AT(tile, 6);\n"),
        ("  if (!p.copies())\n    run(a, p);\n", "  if (!p.copies()) {\n    run(a, p);\n    LEAVE();\n  }\n"),
    ],
}

def patched(source, folder):
    folder.mkdir(parents=True, exist_ok=True)
    for f in source.glob("*.cu*"):
        s = f.read_text()
        for anchor, text in PATCHES.get(f.name, []):
            assert s.count(anchor) == 1, (f.name, anchor, s.count(anchor)); s = s.replace(anchor, text)
        (folder / f.name).write_text(s)
    return folder

def compile_all(folder):
    import torch
    from ridgeline.ops import _cuda as cuda
    from ridgeline.ops.attention import plain, spans
    l = plain.LAUNCHES[32].forward
    forward = dict(HEAD_WIDTH=32, WARPGROUPS=l.groups, RING_STAGES=l.stages, BLOCKS_PER_PROCESSOR=l.per_processor, RL_FP16=0, RL_COLUMN_SUMS=0, STEP_COLUMNS=l.step)
    for name, d in (("plain_backward.cu", spans.defines(torch.bfloat16, False)), ("plain_forward.cu", forward)):
        c = cuda.build(folder / name, d, "sm_90a"); print(name, {k: tuple(v) for k, v in c.resources().items()}, "SERIALIZED" if "serialized" in c.log else "", flush=True)

def med(x): return round(st.median(x)) if x else None

def run(folder, G, out):
    import torch
    from ridgeline.ops.attention import plain, spans
    B, T, H, D = 512, 256, 8, 32; name = f"{G} key heads"; torch.manual_seed(0)
    qkv = torch.randn(B, T, (H + 2 * G) * D, device="cuda", dtype=torch.bfloat16); d = torch.zeros_like(qkv)
    cut = lambda x: [y.unflatten(-1, (-1, D)) for y in x.split([H * D, G * D, G * D], -1)]
    do, o = (torch.randn(B, T, H, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    lse = torch.zeros(B * H * T + 2 * 132 * 8 * 80, device="cuda"); marks = torch.zeros(132, 8, 80, dtype=torch.int64, device="cuda"); real = plain.cuda.load
    class Marked:
        def __init__(s, k, name): s.k, s.name = k, name
        def kernel(s, n, kinds, **kw): return Marked(s.k.kernel(n, kinds, **kw), s.name)
        def launch(s, grid, block, smem, args):
            args = list(args)
            if s.name == "plain_backward": args[12] = marks
            s.k.launch(grid, block, smem, args)
    class Cuda:
        Argument, tensor_map = plain.cuda.Argument, staticmethod(plain.cuda.tensor_map)
        @staticmethod
        def load(p, macros): return Marked(real(folder / p.name, macros), p.stem) if p.name in PATCHES else real(p, macros)
    fwd = lambda: plain.forward(*cut(qkv), o, lse[: B * H * T].view(B, H, T), scale=D**-0.5)
    bwd = lambda: plain.backward(do, *cut(qkv), o, lse[: B * H * T].view(B, H, T), *cut(d), scale=D**-0.5)
    def us(f):
        got = []
        f(); torch.cuda.synchronize(); g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            for _ in range(4): f()
        for _ in range(5):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            g.replay(); a.record(); g.replay(); b.record(); torch.cuda.synchronize(); got.append(a.elapsed_time(b) * 250)
        return round(sorted(got)[2], 1)
    bare = us(fwd), us(bwd); old = plain.cuda, spans.cuda; plain.cuda = spans.cuda = Cuda
    try: marked = us(fwd), us(bwd)
    finally: plain.cuda, spans.cuda = old
    print("T256", name, "us forward, backward", bare, "with marks", marked, flush=True)
    for k, v in {"forward": lse[B * H * T :].view(torch.int64).view(132, 8, 80).cpu(), "backward": marks.cpu()}.items():
        out[f"{name} {k}"] = {"cycles": med((v[:, 0, 4] - v[:, 0, 0]).tolist()), "blocks": v[[0, 7, 50, 131]].tolist()}
        w = v[:, :, 8:].view(132, 8, 8, 9)
        there = torch.where(w > 0, w, torch.iinfo(torch.int64).max)
        zero = there[:, :4, 0].flatten(1).amin(1).view(-1, 1, 1, 1)
        rel = w - zero; print("T256", name, k, "cycles of a block", out[f"{name} {k}"]["cycles"], flush=True)
        for g in range(7 if k == "backward" else 4):
            print("T256", name, k, "group", g, "tiles by marks (median of blocks):", [[med(rel[:, g, t, m][w[:, g, t, m] > 0].tolist()) for m in range(9)] for t in range(8)], flush=True)
    (OUT / "attn_short_timeline.json").write_text(json.dumps(out))

if __name__ == "__main__":
    from ridgeline.ops.attention import hopper
    folder = patched(hopper.SOURCES, Path("/tmp/attn_short_timeline"))
    def end(): print("out of time", flush=True); os._exit(3)
    threading.Timer(LIMIT, end).start()
    compile_all(folder)
    if "compile" in sys.argv: os._exit(0)
    out = {}
    for G in (8, 1): run(folder, G, out)
    os._exit(0)
