"""Attention over windows beyond 256 on the GPU: every route and the Triton kernels' launches, each shape in a process of
its own. Writes $OUT/attn_long.json. `attn_long_gpu.py [SHAPE ...]`, names as in SHAPES."""
import concurrent.futures as cf, json, os, subprocess, sys, time
from pathlib import Path

OUT = Path(os.environ.get("OUT", "/tmp")); ROOT = Path(__file__).resolve().parents[2]
LIMIT = float(os.environ.get("LONG_LIMIT", "115"))  # seconds for a shape
# B, T, H, G, D, fp32
SHAPES = {
    "gpt2-c256": (4, 2048, 8, 8, 32, 0), "fast-c256": (4, 2048, 8, 1, 32, 0), "gpt2-124m": (64, 1024, 12, 12, 64, 0),
    "gpt2 fp32": (32, 256, 8, 8, 32, 1), "fast fp32": (32, 256, 8, 1, 32, 1),
    "T512 D64": (32, 512, 8, 8, 64, 0), "T4096 D64": (4, 4096, 8, 8, 64, 0), "T4096 D32 mqa": (2, 4096, 8, 1, 32, 0),
}
# queries, keys, warps, stages
HALF = {
    "forward": [(64, 64, 4, 3), (128, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 2), (128, 32, 4, 4)],
    "queries": [(64, 64, 4, 3), (128, 64, 8, 2), (64, 32, 4, 3), (128, 32, 4, 3)],
    "keys": [(64, 64, 4, 2), (32, 64, 4, 3), (64, 128, 8, 2), (32, 128, 8, 3)],
}
FLOAT = {
    "forward": [(32, 32, 4, 1), (64, 64, 8, 1), (32, 64, 4, 1)],
    "queries": [(32, 32, 4, 1), (16, 16, 4, 1), (32, 32, 8, 1)],
    "keys": [(32, 32, 4, 1), (32, 64, 4, 1), (32, 32, 8, 1)],
}
def table(shape): return FLOAT if shape[5] else HALF

def make(shape):
    import torch
    B, T, H, G, D, f = shape
    g = torch.Generator("cuda").manual_seed(1)
    qkv = torch.randn(B, T, (H + 2 * G) * D, device="cuda", generator=g).to(torch.float32 if f else torch.bfloat16)
    q, k, v = (x.unflatten(-1, (-1, D)) for x in qkv.split((H * D, G * D, G * D), -1))
    return q, k, v, torch.randn(B, T, H, D, device="cuda", generator=g).to(qkv.dtype)

def timer():
    import torch
    flush = torch.empty(96 << 20, dtype=torch.uint8, device="cuda")
    def time_us(f, n=15):
        """Inside a graph of five calls, after warm-up: launch gaps stay out, small tensors stay in L2 as in a step."""
        s = torch.cuda.Stream()
        with torch.cuda.stream(s):
            f(); f()
        torch.cuda.synchronize()
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g, stream=s):
            for _ in range(5): f()
        g.replay(); ts = []
        for _ in range(n):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_(); a.record(); g.replay(); b.record(); torch.cuda.synchronize(); ts.append(a.elapsed_time(b) * 200)
        return round(sorted(ts)[n // 2], 1)
    return time_us

def error(x, ref): return float(f"{float((x.double() - ref).norm() / ref.norm()):.1e}")

def reference(q, k, v, do):
    """float64 of the first and the last sample's first group of heads, as a check of numbers: o, dq, dk, dv."""
    import torch
    from ridgeline.ops.attention.reference import attention_reference
    share = q.shape[2] // k.shape[2]
    out = {}
    for b in {0, q.shape[0] - 1}:
        x = [t[b : b + 1, :, :n].double().requires_grad_() for t, n in ((q, share), (k, 1), (v, 1))]
        o = attention_reference(*x, None, scale=q.shape[3] ** -0.5)
        out[b] = (o.detach(), *torch.autograd.grad(o, x, do[b : b + 1, :, :share].double()))
    return out, share

def errors(ref, share, o=None, dq=None, dk=None, dv=None):
    r = {}
    for b, (ro, rq, rk, rv) in ref.items():
        for n, x, y, c in (("o", o, ro, share), ("dq", dq, rq, share), ("dk", dk, rk, 1), ("dv", dv, rv, 1)):
            if x is not None: r[n] = max(r.get(n, 0), error(x[b : b + 1, :, :c], y))
    return r

def say(what, **more): print("RESULT " + json.dumps({"what": what, **more}), flush=True)

def library(shape):
    """PyTorch's kernels forward and backward as explicit calls on strided views, K and V as they are and expanded."""
    import torch
    ops = torch.ops.aten; t = timer(); q, k, v, do = make(shape); B, T, H, G, D, f = shape; sc = D ** -0.5
    ref, share = reference(q, k, v, do)
    T2 = lambda x: x.transpose(1, 2)
    dqkv = torch.empty(B, T, (H + 2 * G) * D, device="cuda", dtype=q.dtype)
    views = [x.unflatten(-1, (-1, D)) for x in dqkv.split((H * D, G * D, G * D), -1)]
    def gathered(dq, dk, dv):  # into the joint buffer, groups summed
        if dk.shape[1] != G: dk, dv = (x.unflatten(1, (G, -1)).sum(2) for x in (dk, dv))
        for to, x in zip(views, (dq, dk, dv)): to.copy_(T2(x))
    expand = lambda x: x[:, :, :, None].expand(B, T, G, H // G, D).reshape(B, T, H, D)
    for name in (("efficient",) if f else ("cudnn", "flash")):
        for kv in (("own",) if G == H else ("expanded", "stride0") if f else ("grouped", "expanded", "stride0")):
            try:
                def inputs():
                    if kv == "expanded": return expand(k), expand(v)
                    if kv == "stride0": return (x[:, :, :, None].expand(B, T, G, H // G, D).flatten(2, 3) if G == 1 else expand(x) for x in (k, v))
                    return k, v
                if name == "cudnn":
                    def fwd():
                        a, b = inputs(); r = ops._scaled_dot_product_cudnn_attention(T2(q), T2(a), T2(b), None, True, 0.0, True, False, scale=sc)
                        return (a, b, *r)
                    s = fwd()
                    def bwd(): return ops._scaled_dot_product_cudnn_attention_backward(T2(do), T2(q), T2(s[0]), T2(s[1]), s[2], s[3], s[8], s[9], None, s[4], s[5], s[6], s[7], 0.0, True, scale=sc)
                elif name == "efficient":
                    def fwd():
                        a, b = inputs(); r = ops._scaled_dot_product_efficient_attention(T2(q), T2(a), T2(b), None, True, 0.0, True, scale=sc)
                        return (a, b, *r)
                    s = fwd()
                    def bwd(): return ops._scaled_dot_product_efficient_attention_backward(T2(do), T2(q), T2(s[0]), T2(s[1]), None, s[2], s[3], s[4], s[5], 0.0, [True, True, True, False], True, scale=sc)[:3]
                else:
                    def fwd():
                        a, b = inputs(); r = ops._scaled_dot_product_flash_attention(T2(q), T2(a), T2(b), 0.0, True, False, scale=sc)
                        return (a, b, *r)
                    s = fwd()
                    def bwd(): return ops._scaled_dot_product_flash_attention_backward(T2(do), T2(q), T2(s[0]), T2(s[1]), s[2], s[3], s[4], s[5], s[6], s[7], 0.0, True, s[8], s[9], scale=sc)
                g = bwd()
                gathered(*g)
                e = errors(ref, share, T2(s[2]), *views)
                say(f"{name} {kv}", fwd=t(fwd), bwd=t(bwd), bwd_joint=t(lambda: gathered(*bwd())), out_strides=list(s[2].stride()), dq_strides=list(g[0].stride()), e=e)
            except Exception as x: say(f"{name} {kv}", failed=repr(x)[:200])

KERNELS = {"forward": "forward_kernel", "queries": "query_gradient_kernel", "keys": "key_gradient_kernel"}

class Case:
    """Tensors of a shape, and the Triton kernels' passes with some kernels left out."""
    def __init__(self, shape):
        import torch
        from ridgeline.ops.attention import long, short, triton as kernels
        self.long, self.kernels, self.shape = long, kernels, shape
        self.q, self.k, self.v, self.do = make(shape); B, T, H, G, D, f = shape; self.drop = short.dropping(0.0, None, 0)
        self.o, self.lse = torch.empty(B, T, H, D, device="cuda", dtype=self.q.dtype), torch.empty(B, H, T, device="cuda")
        d = torch.empty(B, T, (H + 2 * G) * D, device="cuda", dtype=self.q.dtype)
        self.g = [x.unflatten(-1, (-1, D)) for x in d.split((H * D, G * D, G * D), -1)]
        self.default = long.default_launches(D, False, self.q.dtype)
    def launches(self, **more):
        import dataclasses
        from ridgeline.ops._triton.support import Launch
        return dataclasses.replace(self.default, **{n: Launch(rows=q, columns=k, warps=w, stages=s) for n, (q, k, w, s) in more.items()})
    def forward(self, l): self.long.forward(self.q, self.k, self.v, None, self.o, self.lse, scale=self.shape[4] ** -0.5, drop=self.drop, launches=l)
    def backward(self, l, only=None):
        class Nothing:
            def __getitem__(self, grid): return lambda *a, **k: None
        names = [KERNELS[n] for n in ("queries", "keys") if only and n != only] + (["key_parts_kernel"] if only == "queries" else [])
        real = {n: getattr(self.kernels, n) for n in names}
        for n in names: setattr(self.kernels, n, Nothing())
        try: self.long.backward(self.do, self.q, self.k, self.v, None, self.o, self.lse, *self.g, None, scale=self.shape[4] ** -0.5, drop=self.drop, launches=l)
        finally:
            for n, x in real.items(): setattr(self.kernels, n, x)

def ours(shape):
    t, c = timer(), Case(shape); ref, share = reference(c.q, c.k, c.v, c.do); best = {}
    c.forward(c.default); c.backward(c.default)
    say("triton default", fwd=t(lambda: c.forward(c.default)), bwd=t(lambda: c.backward(c.default)), e=errors(ref, share, c.o, *c.g))
    for kind, tiles in table(shape).items():
        for tile in tiles:
            try:
                l = c.launches(**{kind: tile})
                us = t((lambda: c.forward(l)) if kind == "forward" else (lambda: c.backward(l, kind)))
                c.forward(l) if kind == "forward" else c.backward(l)
                e = errors(ref, share, c.o, *c.g)
                say(f"  {kind} {tile}", us=us, e=max(e.values()))
                if max(e.values()) < 8e-3 and us < best.get(kind, (9e9,))[0]: best[kind] = (us, tile)
            except Exception as x: say(f"  {kind} {tile}", failed=repr(x)[:120])
    l = c.launches(**{k: v[1] for k, v in best.items()})
    c.forward(l); c.backward(l)
    say("triton best", fwd=t(lambda: c.forward(l)), bwd=t(lambda: c.backward(l)), tiles={k: v[1] for k, v in best.items()}, e=errors(ref, share, c.o, *c.g))

def compile_only(shape, kind, number):
    """Fills Triton's cache, so that timing processes compile nothing."""
    import torch
    c = Case(shape); l = c.launches(**{kind: table(shape)[kind][number]})
    c.forward(l) if kind == "forward" else c.backward(l, kind)
    torch.cuda.synchronize()

def sub(args, timeout):
    try:
        p = subprocess.run([sys.executable, __file__, *args], capture_output=True, text=True, timeout=timeout, cwd=ROOT)
        lines = [json.loads(l[7:]) for l in p.stdout.splitlines() if l.startswith("RESULT ")]
        return lines + ([] if p.returncode == 0 else [{"what": args[0], "failed": (p.stderr.strip().splitlines() or ["?"])[-1][:300]}])
    except subprocess.TimeoutExpired as e:
        return [json.loads(l[7:]) for l in (e.stdout or b"").decode().splitlines() if l.startswith("RESULT ")] + [{"what": args[0], "failed": "timeout"}]

def main(names):
    t0 = time.time(); report = {}
    with cf.ThreadPoolExecutor(14) as pool:
        jobs, seen = [], set()
        for n in names:
            kind = (SHAPES[n][2] // SHAPES[n][3], *SHAPES[n][4:])
            if kind not in seen: jobs += [pool.submit(sub, ["compile", n, k, str(i)], 60) for k, tiles in table(SHAPES[n]).items() for i in range(len(tiles))]
            seen.add(kind)
        list(map(cf.Future.result, jobs))
    print("compiled in %.0f s" % (time.time() - t0), flush=True)
    for n in names:
        report[n] = (sub(["library", n], 30) if os.environ.get("LONG_LIBRARY") or SHAPES[n][5] else []) + sub(["ours", n], 40)
        print("==", n, SHAPES[n])
        for r in report[n]:
            print("  ", r["what"], *(f"{k} {v}" for k, v in r.items() if k not in ("what", "out_strides", "dq_strides")), flush=True)
        (OUT / "attn_long.json").write_text(json.dumps(report))
        if time.time() - t0 > LIMIT: break
    print("all %.0f s" % (time.time() - t0))

if __name__ == "__main__":
    a = sys.argv[1:]
    if a[:1] == ["compile"]: compile_only(SHAPES[a[1]], a[2], int(a[3]))
    elif a[:1] == ["library"]: library(SHAPES[a[1]])
    elif a[:1] == ["ours"]: ours(SHAPES[a[1]])
    else: main(a or list(SHAPES))
