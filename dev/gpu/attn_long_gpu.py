"""Attention over windows beyond 256 on the GPU: every route and the Triton kernels' launches, each shape in a process of
its own. Writes $OUT/attn_long.json. `attn_long_gpu.py [SHAPE ...]`, names as in SHAPES."""
import concurrent.futures as cf, json, os, subprocess, sys, time
from pathlib import Path

OUT = Path(os.environ.get("OUT", "/tmp")); ROOT = Path(__file__).resolve().parents[2]
LIMIT = float(os.environ.get("LONG_LIMIT", "110"))  # seconds for a shape
# B, T, H, G, D
SHAPES = {
    "gpt2-c256": (4, 2048, 8, 8, 32), "fast-c256": (4, 2048, 8, 1, 32), "gpt2-124m": (64, 1024, 12, 12, 64),
    "T512 D64": (32, 512, 8, 8, 64), "T4096 D64": (4, 4096, 8, 8, 64), "T512 D32": (16, 512, 8, 8, 32), "T4096 D32 mqa": (2, 4096, 8, 1, 32),
}
LAUNCHES = [(64, 4, 2), (64, 4, 3), (64, 8, 2), (128, 4, 2), (128, 8, 2), (128, 8, 3), (32, 4, 2), (32, 2, 3), (64, 2, 3), (64, 4, 4)]

def make(shape):
    import torch
    B, T, H, G, D = shape
    g = torch.Generator("cuda").manual_seed(1)
    qkv = torch.randn(B, T, (H + 2 * G) * D, device="cuda", generator=g).bfloat16()
    q, k, v = (x.unflatten(-1, (-1, D)) for x in qkv.split((H * D, G * D, G * D), -1))
    return q, k, v, torch.randn(B, T, H, D, device="cuda", generator=g).bfloat16()

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
    ops = torch.ops.aten; t = timer(); q, k, v, do = make(shape); B, T, H, G, D = shape; sc = D ** -0.5
    ref, share = reference(q, k, v, do)
    T2 = lambda x: x.transpose(1, 2)
    dqkv = torch.empty(B, T, (H + 2 * G) * D, device="cuda", dtype=q.dtype)
    views = [x.unflatten(-1, (-1, D)) for x in dqkv.split((H * D, G * D, G * D), -1)]
    def gathered(dq, dk, dv):  # into the joint buffer, groups summed
        if dk.shape[1] != G: dk, dv = (x.unflatten(1, (G, -1)).sum(2) for x in (dk, dv))
        for to, x in zip(views, (dq, dk, dv)): to.copy_(T2(x))
    expand = lambda x: x[:, :, :, None].expand(B, T, G, H // G, D).reshape(B, T, H, D)
    for name in ("cudnn", "flash"):
        for kv in (("own",) if G == H else ("grouped", "expanded", "stride0")):
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

def ours(shape, launches):
    import torch
    from ridgeline.ops._triton.support import Launch
    from ridgeline.ops.attention import long, short
    from ridgeline.ops.attention import triton as kernels
    t = timer(); q, k, v, do = make(shape); B, T, H, G, D = shape; drop = short.dropping(0.0, None, 0)
    o, lse = torch.empty(B, T, H, D, device="cuda", dtype=q.dtype), torch.empty(B, H, T, device="cuda")
    d = torch.empty(B, T, (H + 2 * G) * D, device="cuda", dtype=q.dtype)
    g = [x.unflatten(-1, (-1, D)) for x in d.split((H * D, G * D, G * D), -1)]
    ref, share = reference(q, k, v, do)
    for rows, warps, stages in launches:
        launch = Launch(rows=rows, warps=warps, stages=stages)
        try:
            f = lambda: long.forward(q, k, v, None, o, lse, scale=D ** -0.5, drop=drop, launch=launch)
            b = lambda: long.backward(do, q, k, v, None, o, lse, *g, None, scale=D ** -0.5, drop=drop, launch=launch)
            f(); b()
            names = ("forward_kernel", "query_gradient_kernel", "key_gradient_kernel")
            r = dict(fwd=t(f), bwd=t(b), e=errors(ref, share, o, *g))
            for n in names[1:]:  # the two halves of the backward pass apart
                real = {m: getattr(kernels, m) for m in names[1:]}
                class Nothing:
                    def __getitem__(self, grid): return lambda *a, **k: None
                for m in names[1:]:
                    if m != n: setattr(kernels, m, Nothing())
                try: r[n.split("_")[0]] = t(b)
                finally:
                    for m, x in real.items(): setattr(kernels, m, x)
            say(f"triton {rows} w{warps} s{stages}", **r)
        except Exception as x: say(f"triton {rows} w{warps} s{stages}", failed=repr(x)[:160])

def compile_only(shape, launches):
    """Fills Triton's cache, so that timing processes compile nothing."""
    import torch
    from ridgeline.ops._triton.support import Launch
    from ridgeline.ops.attention import long, short
    B, T, H, G, D = shape; q, k, v, do = make((1, T, H, G, D)); drop = short.dropping(0.0, None, 0)
    o, lse = torch.empty_like(do), torch.empty(1, H, T, device="cuda"); d = torch.empty(1, T, (H + 2 * G) * D, device="cuda", dtype=q.dtype)
    g = [x.unflatten(-1, (-1, D)) for x in d.split((H * D, G * D, G * D), -1)]
    for rows, warps, stages in launches:
        try:
            launch = Launch(rows=rows, warps=warps, stages=stages)
            long.forward(q, k, v, None, o, lse, scale=D ** -0.5, drop=drop, launch=launch)
            long.backward(do, q, k, v, None, o, lse, *g, None, scale=D ** -0.5, drop=drop, launch=launch)
        except Exception: pass
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
        kinds = {(SHAPES[n][2:], n) for n in names}
        seen, jobs = set(), []
        for (kind, n) in sorted(kinds, key=lambda x: names.index(x[1])):
            if kind in seen: continue
            seen.add(kind); jobs += [pool.submit(sub, ["compile", n, str(i)], 60) for i in range(len(LAUNCHES))]
        list(map(cf.Future.result, jobs))
    print("compiled in %.0f s" % (time.time() - t0), flush=True)
    for n in names:
        report[n] = sub(["library", n], 40) + sub(["ours", n], 60)
        print("==", n, SHAPES[n])
        for r in sorted(report[n], key=lambda r: r.get("fwd", 9e9) + r.get("bwd_joint", r.get("bwd", 9e9))):
            print("  ", r["what"], *(f"{k} {v}" for k, v in r.items() if k not in ("what", "out_strides", "dq_strides")), flush=True)
        (OUT / "attn_long.json").write_text(json.dumps(report))
        if time.time() - t0 > LIMIT: break
    print("all %.0f s" % (time.time() - t0))

if __name__ == "__main__":
    a = sys.argv[1:]
    if a[:1] == ["compile"]: compile_only(SHAPES[a[1]], [LAUNCHES[int(a[2])]])
    elif a[:1] == ["library"]: library(SHAPES[a[1]])
    elif a[:1] == ["ours"]: ours(SHAPES[a[1]], LAUNCHES)
    else: main(a or list(SHAPES))
