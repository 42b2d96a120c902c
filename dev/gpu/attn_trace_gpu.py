"""Timeline of one block of the backward kernel : clock marks in a copy of the source. About 8 s."""
import os, shutil, statistics as st, sys
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parent))
import attn_gpu as A
SRC = Path(os.environ.get("ATTN_FOLDER", A.ROOT / "src/ridgeline/ops/attention")) / "cuda"
MARK = '''#define MARK(group, square, id) do { if (p.warp == 0 && p.lane == 0 && blockIdx.x == 0 && (square) < 300) reinterpret_cast<i64*>(a.dk_heads)[((group) * 300 + (square)) * 16 + (id)] = clock64(); } while (0)
'''
S = [  # file, anchor, group, square, id, after
    ("scores.cuh", "      if (q.first) rows = take_rows(", 0, "squares", 0, 0),
    ("scores.cuh", "      wgmma_wait<0>();\n      wgmma_touch(s);\n", 0, "squares", 1, 0),
    ("scores.cuh", "      wgmma_touch(s);\n      wgmma_touch(dp);\n", 0, "squares", 2, 1),
    ("scores.cuh", "      const Stage stage(squares);\n      barrier_wait(p.barrier(STAGE_EMPTY", 0, "squares", 3, 0),
    ("scores.cuh", "      barrier_wait(p.barrier(STAGE_EMPTY + stage.index), stage.phase ^ 1);\n", 0, "squares", 4, 1),
    ("scores.cuh", "      const bool same_head = n + 1 < SQUARES, more = same_head", 0, "squares", 5, 0),
    ("scores.cuh", "      wgmma_wait<0>();\n      wgmma_touch(r);\n      take_window(windows, first, r);\n      u32 pairs", 1, "squares", 0, 0),
    ("scores.cuh", "      wgmma_touch(r);\n      take_window(windows, first, r);\n      u32 pairs", 1, "squares", 1, 0),
    ("scores.cuh", "      barrier_wait(p.barrier(R_EMPTY + p.warp), ~squares & 1);\n", 1, "squares", 2, 0),
    ("scores.cuh", "      barrier_wait(p.barrier(R_EMPTY + p.warp), ~squares & 1);\n", 1, "squares", 3, 1),
    ("scores.cuh", "      const int next = n + 1 < SQUARES ? n + 1 : 0;\n", 1, "squares", 4, 0),
    ("scores.cuh", "    const Stage stage(squares++);\n", 4, "squares", 0, 0),
    ("scores.cuh", "    for (int b = 0; b < 4; ++b) {\n      u32 m[4];\n      load_matrices(m, p.smem + DS_AT", 4, "squares - 1", 1, 0),
    ("scores.cuh", "    if (q.first) keys.clear(), first = 0;\n", 4, "squares - 1", 2, 0),
    ("scores.cuh", "    if (q.last) {  // nothing more to the left", 4, "squares - 1", 3, 0),
    ("scores.cuh", "      send_window_gradient(keys, p, to_right, windows++);\n    }\n", 4, "squares - 1", 4, 1),
    ("gradients.cuh", "      barrier_wait(p.barrier(STAGE_FULL + stage.index), stage.phase);\n      const u32 operands = p.operands(), queries", 2, "done * SQUARES + n", 0, 0),
    ("gradients.cuh", "      const u32 operands = p.operands(), queries = operands", 2, "done * SQUARES + n", 1, 0),
    ("gradients.cuh", "      wgmma_touch(dk[slot]);\n", 2, "done * SQUARES + n", 2, 1),
    ("gradients.cuh", "store_key_rows(a, p, Head(a, unit), q.j, dk[slot], dv[slot]);\n", 2, "done * SQUARES + n", 3, 1),
    ("gradients.cuh", "      if (q.first && !q.last) prepare_next();\n", 2, "done * SQUARES + n", 4, 1),
    ("gradients.cuh", "      const Stage stage(squares);\n      barrier_wait", 3, "squares", 0, 0),
    ("gradients.cuh", "      const u32 operands = p.operands();\n      wgmma_fence();\n      multiply_square(dq, operands + units(DS_AT)", 3, "squares", 1, 0),
    ("gradients.cuh", "      wgmma_wait<0>();\n      wgmma_touch(dq);\n      arrive_for_warp(p.barrier(STAGE_EMPTY", 3, "squares", 2, 0),
    ("gradients.cuh", "      if (RELATIVE && q.i != q.j) add_window", 3, "squares", 3, 0),
    ("gradients.cuh", "      if (BLOCKS <= 2 && p.warp == 0", 3, "squares", 4, 0),
    ("gradients.cuh", "      if (q.last && q.j > 0) {", 3, "squares", 5, 0),
    ("gradients.cuh", "        store_query_rows(a, p, head, q.i, dq);\n      }\n", 3, "squares", 6, 1),
]
NAMES = ["scores: rows, keep | wgmma | mask | stage empty | elementwise and store", "relative: wgmma | skew | R empty | store",
         "keys: stage full | dropout, wgmma | rows of a visit of one square, flush | rows", "queries: stage full | dq, keep, copies | wgmma | windows | copies | store", "back: stage full | load | window | last window"]
COUNT = [6, 5, 5, 7, 5]

def patched(folder):
    folder.mkdir(parents=True, exist_ok=True)
    texts = {f.name: f.read_text() for f in SRC.glob("*.cu*")}
    texts["schedule.cuh"] = texts["schedule.cuh"].replace("struct Place {", MARK + "struct Place {", 1)
    for file, anchor, group, square, id, after in S:
        s = texts[file]
        assert s.count(anchor) == 1, (file, anchor)
        m = f"MARK({group}, {square}, {id});\n"
        texts[file] = s.replace(anchor, anchor + m if after else m + anchor)
    t = texts["scores.cuh"].replace("RL_D void run(const Place& p, Square q, const Shift& to_right)", "RL_D void run(const Arguments& a, const Place& p, Square q, const Shift& to_right)")
    texts["scores.cuh"] = t.replace("back.run(p,", "back.run(a, p,")
    for n, s in texts.items(): (folder / n).write_text(s)
    return folder / "backward.cu"

def run(name):
    import torch
    short = A.short_module(os.environ.get("ATTN_FOLDER"))
    case = A.TIMES[name]; us = A.Ours(case, A.make(case)); us.fwd(); torch.cuda.synchronize()
    path, real = patched(Path("/tmp/attn_trace")), short.cuda.load
    buf = torch.zeros(5 * 300 * 16, dtype=torch.int64, device="cuda")
    class Fake:
        def __init__(s, k): s.k = k
        def launch(s, grid, block, smem, args, *more, **kw): args = list(args); args[10] = buf; s.k.launch(grid, block, smem, args, *more, **kw)
    class M:
        def __init__(s, m): s.m = m
        def kernel(s, n, k, **kw): return Fake(s.m.kernel(n, k, **kw))
    short.cuda.load = lambda p, d: M(real(path, d)) if p.name == "backward.cu" else real(p, d)
    try:
        us.bwd(); torch.cuda.synchronize(); us.bwd(); torch.cuda.synchronize()
    finally: short.cuda.load = real
    x = buf.view(5, 300, 16).cpu().tolist(); b = -(-case[1] // 64); per = b * (b + 1) // 2; heads = range(5, 25)
    print(f"TRACE {name}: cycles a head {(x[0][per * 25][1] - x[0][per * 5][1]) / 20:.0f}")
    for g in range(5):
        print(" " + NAMES[g])
        for s in range(per):
            row = []
            for i in range(COUNT[g] - 1):
                d = [x[g][h * per + s][i + 1] - x[g][h * per + s][i] for h in heads if x[g][h * per + s][i] and x[g][h * per + s][i + 1]]
                row.append(int(st.median(d)) if d else -1)
            lag = int(st.median([x[g][h * per + s][0] - x[0][h * per + s][0] for h in heads]))
            print("  ", s, row, "after scores", lag, "next", int(st.median([x[g][h * per + s + 1][0] - x[g][h * per + s][0] for h in heads])))

FMARK = MARK.replace("a.dk_heads", "a.lse + static_cast<i64>(a.heads_in_all) * a.T")
F = [  # anchor, id, after
    ("    const u32 operands = p.operands(), tile = operands + (KEYS_AT >> 4)", 0, 0), ("    wgmma_touch(o);\n    if (STAGED", 1, 0),
    ("      take_window(band, first, r);\n    }\n", 2, 1), ("      wgmma_fence();\n      multiply_rows(s, aq, tile, !RELATIVE);", 3, 0),
    ("      wgmma_touch(s);\n", 4, 1), ("      if (raise) raise_reference(x, o, s, scale);\n", 5, 1), ("    score(i, j, tile);\n", 6, 1),
    ("    if (RELATIVE) start_window(operands, j == 0 ? 0 : i - j + 1);\n", 7, 1), ("    float share[2];\n", 8, 0),
    ("    if (p.lane == 0) barrier_arrive(p.barrier(QUERY_DONE));\n", 9, 0), ("               share[1], a.T - at, p.lane);\n", 10, 1),
]
FNAMES = "wait | take window | skew | S | mask, raise | exponentials | start | to end | lse, wait | store | to next"

def forward(name):
    import torch
    short = A.short_module(os.environ.get("ATTN_FOLDER"))
    case = A.TIMES[name]; us = A.Ours(case, A.make(case)); B, T, H = case[:3]
    folder = Path("/tmp/attn_trace_f"); folder.mkdir(parents=True, exist_ok=True)
    texts = {f.name: f.read_text() for f in SRC.glob("*.cu*")}; s = texts["forward.cu"]
    for anchor, id, after in F:
        assert s.count(anchor) == 1, anchor
        m = f"MARK(p.group, squares, {id});\n"; s = s.replace(anchor, anchor + m if after else m + anchor)
    s = s.replace("// What a warpgroup holds in registers", FMARK + "// What a warpgroup holds in registers").replace("  u32 aq[D / 16][4], pairs[16];\n  Softmax x;", "  u32 aq[D / 16][4], pairs[16], squares = ~0u;\n  Softmax x;")
    start = "  RL_D void square(int i, int j, int top, u32 phase, bool more) {\n"; assert start in s; s = s.replace(start, start + "    ++squares;\n")
    texts["forward.cu"] = s
    for n, t in texts.items(): (folder / n).write_text(t)
    us.lse = torch.zeros(B * H * T + 8 * 300 * 16, device="cuda"); real = short.cuda.load
    short.cuda.load = lambda p, d: real(folder / p.name, d)
    try:
        us.fwd(); torch.cuda.synchronize(); us.fwd(); torch.cuda.synchronize()
    finally: short.cuda.load = real
    x = us.lse[B * H * T:].view(torch.int64).view(4, 300, 16).cpu().tolist(); b = -(-T // 64); per = b * (b + 1) // 2; heads = range(2, 9)
    print(f"FORWARD {name}: cycles a head and warpgroup {[(x[g][per * 9][0] - x[g][per * 2][0]) // 7 for g in range(3)]}"); print("  ", FNAMES)
    for s in range(per):
        row = []
        for i in range(11):
            d = []
            for h in heads:
                here, after = x[0][h * per + s], x[0][h * per + s + 1]
                to = after[0] if i == 10 or (i == 7 and not here[8]) else here[i + 1]
                if here[i] and to: d.append(to - here[i])
            row.append(int(st.median(d)) if d else -1)
        print("  ", s, row)

if __name__ == "__main__":
    if sys.argv[1:] == ["compile"]:
        from ridgeline.ops import _cuda as cuda
        sys.exit(print({k: tuple(v) for k, v in cuda.build(patched(Path("/tmp/attn_trace")), dict(HEAD_WIDTH=64, ROW_BLOCKS=4, RL_RELATIVE=1, RL_DROPOUT=1, RL_GROUPED=0, RL_COLUMN_SUMS=0), "sm_90a").resources().items()}))
    for n in sys.argv[1:] or ["HAL-20M p=.2"]:
        for f in (run, forward):
            try: f(n)
            except Exception as e: print("TRACE FAILED", n, repr(e)[:300])
