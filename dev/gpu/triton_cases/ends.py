"""A policy's ends: its heads' losses and its input layer. Each function returns trials: see triton_gpu.py."""

from triton_cases import DEV, rand, rel


def heads(N, C):
    import torch

    from ridgeline.ops.heads import HeadWeights, heads_losses

    classes, width, flat, t = (9, 37, 6), C, [], []
    x = rand(N, C).requires_grad_()
    for V in classes:
        F = width // 2
        flat += [
            rand(width) * 0.1 + 1,
            rand(width) * 0.1,
            rand(F, width) * width**-0.5,
            rand(F) * 0.1,
            rand(V, F) * F**-0.5,
            rand(V) * 0.1,
        ]
        t.append(torch.randint(0, V, (N,), device=DEV))
        width += V
    flat = [w.requires_grad_() for w in flat]
    t = torch.stack(t, 1).to(torch.int8)
    got = {}

    def run(impl="triton"):
        l = heads_losses(x, [HeadWeights(*flat[6 * k : 6 * k + 6]) for k in range(3)], t, impl=impl)
        got[impl] = [l.detach(), *torch.autograd.grad(l.sum(), [x, *flat])]

    def check():
        run("reference")
        wide = [w.detach().float().requires_grad_() for w in [x, *flat]]
        l = heads_losses(wide[0], [HeadWeights(*wide[1 + 6 * k : 7 + 6 * k]) for k in range(3)], t, impl="reference")
        truth = [l.detach(), *torch.autograd.grad(l.sum(), wide)]
        e, r = ([rel(a.float(), b) for a, b in zip(got[i], truth)] for i in ("triton", "reference"))
        return {"ratio": max(a / (b + 1e-6) for a, b in zip(e, r)), "worst": max(e)}

    return [
        dict(
            name="ours f+b",
            run=run,
            check=check,
            state=lambda: [g.clone() for g in got["triton"]],
            bytes=N * C * 24,
            limit=3.0,
        ),
        dict(name="torch f+b", run=lambda: run("reference")),
    ]


def inputs(N, C):
    import torch

    from ridgeline.ops.inputs import InputColumns, input_layer

    rows = ((32, 4), (33, 12), (400, 32))
    cols = InputColumns((0, 1, 1, 2, 2), 18, ((0, 9), (1, 37), (2, 6)))
    W = 4 + 24 + 64 + 18 + 52
    cats = torch.stack([torch.randint(0, rows[k][0], (N,), device=DEV) for k in cols.tables], 1).to(torch.int16)
    nums = torch.randn(N, 18, device=DEV)
    prev = torch.stack([torch.randint(0, k, (N,), device=DEV) for k in (9, 37, 6)], 1).to(torch.uint8)
    flat = [w.requires_grad_() for w in (rand(C, W) * W**-0.5, rand(C), *(rand(*r) for r in rows))]
    dout, got = rand(N, C), {}

    def run(impl="triton"):
        out = input_layer(cats, nums, prev, cols, flat[2:], flat[0], flat[1], impl=impl)
        got[impl] = [out.detach(), *torch.autograd.grad(out, flat, dout)]

    def check():
        run("reference")
        return {f"{i}": rel(a.float(), b.float()) for i, (a, b) in enumerate(zip(got["triton"], got["reference"]))}

    return [
        dict(
            name="ours f+b",
            run=run,
            check=check,
            state=lambda: [g.clone() for g in got["triton"]],
            bytes=N * (C * 4 + W * 6),
            limit=2e-2,
        ),
        dict(name="torch f+b", run=lambda: run("reference")),
    ]
