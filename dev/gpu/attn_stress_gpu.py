"""Attention's kernels of this checkout: thousands of passes in graphs, two streams beside each other, equal bits and column sums.

attn_stress_gpu.py [SECONDS [SHAPE ...]]: names as in SHAPES, and relative (hal-20m's kernels with dropout). 30 s for all; it exits with 0 if
nothing differed. attn_stress_gpu.py compile: no card.
"""
import os, sys, threading, time

LIMIT = float(sys.argv[1]) if sys.argv[1:] and sys.argv[1] != "compile" else 26
SHAPES = {  # B, T, heads, key heads
    "T37": (70, 37, 8, 8), "T100": (60, 100, 8, 8), "T780": (3, 780, 8, 2), "T330": (5, 330, 4, 2), "gpt2 B32": (32, 256, 8, 8), "fast B32": (32, 256, 8, 1),
    "gpt2 B512": (512, 256, 8, 8), "fast B512": (512, 256, 8, 1), "gpt2 T2048": (4, 2048, 8, 8), "fast T2048": (4, 2048, 8, 1),
}

def cut(x, D, *heads): return [y.unflatten(-1, (-1, D)) for y in x.split([h * D for h in heads], -1)]

class Plain:
    def __init__(s, B, T, H, G, D=32):
        import torch
        from ridgeline.ops.attention import plain
        bf = dict(device="cuda", dtype=torch.bfloat16); s.m, s.scale = plain, D**-0.5
        x = torch.randn(B, T, (H + 2 * G) * D, **bf); s.d = torch.full_like(x, float("nan")); s.o = torch.full((B, T, H, D), float("nan"), **bf); s.do = torch.randn(B, T, H, D, **bf)
        s.lse = torch.full((B, H, T), float("nan"), device="cuda"); s.h, s.g = cut(x, D, H, G, G), cut(s.d, D, H, G, G)
        s.sums = torch.full((plain.column_sum_rows(s.h[0], s.h[1]), s.d.shape[-1]), float("nan"), device="cuda"); s.out = (s.o, s.lse, s.d)
    def run(s):
        s.m.forward(*s.h, s.o, s.lse, scale=s.scale); s.m.backward(s.do, *s.h, s.o, s.lse, *s.g, scale=s.scale, column_sums=s.sums)

class Relative:
    def __init__(s, B=64, T=256, H=8, D=64):
        import torch
        from ridgeline.ops.attention import short
        from ridgeline.ops.dropout import DropoutState
        bf = dict(device="cuda", dtype=torch.bfloat16); s.m, s.scale = short, D**-0.5; x = torch.randn(B, T, 3 * H * D, **bf); s.d = torch.full_like(x, float("nan"))
        s.o, s.do, s.table = torch.full((B, T, H, D), float("nan"), **bf), torch.randn(B, T, H, D, **bf), torch.randn(T, D, **bf)
        s.lse, s.dt = torch.empty(B, H, T, device="cuda"), torch.empty(T, D, device="cuda"); s.h, s.g = cut(x, D, H, H, H), cut(s.d, D, H, H, H)
        s.drop = short.dropping(0.2, DropoutState(torch.tensor([1, 2], device="cuda"), 0), 0); s.w = torch.empty(short.workspace_size(s.h[0], s.h[1], s.table), device="cuda")
        s.sums = torch.full((short.column_sum_rows(s.h[0]), 3 * H * D), float("nan"), device="cuda"); s.out = (s.o, s.lse, s.d, s.dt)
    def run(s):
        s.m.forward(*s.h, s.table, s.o, s.lse, scale=s.scale, drop=s.drop)
        s.m.backward(s.do, *s.h, s.table, s.o, s.lse, *s.g, s.dt, s.w, scale=s.scale, drop=s.drop, column_sums=s.sums)

def stress(name, make, calls, seconds, t0):
    import torch
    both = [make(), make()]; graphs = []
    for x in both: x.run()
    torch.cuda.synchronize(); bits = [[y.clone() for y in x.out] for x in both]; n = differ = 0
    finite = all(bool(torch.isfinite(y.float()).all()) for y in (*bits[0], both[0].sums)); exact = both[0].d.double().sum((0, 1)); sums = float((both[0].sums.double().sum(0) - exact).norm() / exact.norm())
    for x in both:
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            for _ in range(calls): x.run()
        graphs.append(g)
    beside, began = torch.cuda.Stream(), time.time()
    while n == 0 or time.time() - began < seconds:
        for x in both: x.d.fill_(float("nan")), x.o.fill_(float("nan"))
        torch.cuda.synchronize(); graphs[0].replay()
        with torch.cuda.stream(beside): graphs[1].replay()
        torch.cuda.synchronize(); n += 2 * calls; differ += sum(not torch.equal(y, z) for x, b in zip(both, bits) for y, z in zip(x.out, b))
    print("STRESS", name, n, "passes,", differ, "differ", "" if finite else "NOT FINITE", f"column sums {sums:.1e}, at {time.time() - t0:.0f} s", flush=True)
    return differ == 0 and finite and sums < 5e-3

def main(names):
    t0, right, each = time.time(), True, LIMIT / (len(names) + 1)
    def end(): print("out of time", flush=True); os._exit(3)
    threading.Timer(LIMIT + 15, end).start()
    for n in names:
        shape = SHAPES.get(n)
        right &= stress(n, Relative if n == "relative" else lambda: Plain(*shape), 4 if n == "relative" or shape[0] * shape[1] > 20000 else 20, each, t0)
    print("STRESS", "right" if right else "NOT RIGHT", flush=True); os._exit(0 if right else 4)

if __name__ == "__main__":
    if sys.argv[1:] == ["compile"]:
        import ridgeline.ops.attention.plain, ridgeline.ops.attention.short, torch; from ridgeline.ops.dropout import DropoutState; sys.exit(print("imports; shapes", *SHAPES, "relative"))
    main(sys.argv[2:] or [*SHAPES, "relative"])
