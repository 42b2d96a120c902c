"""Single kernels of many rows against fp64, for many_gpu.py and many_trace_gpu.py."""

import torch
from fused_gpu import captured, interleaved
from many_variants import BOTH, VARIANTS, Variant, take

from ridgeline.ops.linear import products
from ridgeline.ops.linear.reduce import Job
from ridgeline.ops.linear.wgrad import Gradient, weight_gradients_raw
from ridgeline.ops.mlp import many
from ridgeline.ops.mlp.kernels import Join, JoinGradient
from ridgeline.ops.norm import triton as norms

N, EPS = 131072, 1e-5


def relative(a, b):
    return float((a.double() - b).norm() / b.norm())


def told(label, got, apart, exact):
    """One line: the worst error as a multiple of what product and join apart err."""
    ratios = {n: relative(got[n], exact[n]) / max(relative(apart[n], exact[n]), 1e-7) for n in exact}
    worst = max(ratios, key=lambda n: ratios[n] if ratios[n] == ratios[n] else float("inf"))
    print(f"{label}: {'right' if ratios[worst] <= 1.5 else 'WRONG'}, {ratios[worst]:.2f} ({worst})", end="", flush=True)
    return ratios[worst] <= 1.5


def normal(*shape, scale=1.0):
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


def exact_norm(x, weight, shift, rms):
    if rms:
        return torch.nn.functional.rms_norm(x, (256,), weight, EPS)
    return torch.nn.functional.layer_norm(x, (256,), weight, shift, EPS)


def forward(label, K, rms):
    kind = "rmsnorm" if rms else "layernorm"
    x, weight, residual, scale = normal(N, K), normal(256, K, scale=K**-0.5), normal(N, 256), normal(256) + 1
    shift, bias = (None, None) if rms else (normal(256), normal(256))
    nan = lambda *s, dtype=torch.bfloat16: torch.full(s, float("nan"), device="cuda", dtype=dtype)
    new = lambda: [nan(N, 256), nan(N, 256), None if rms else nan(N, dtype=torch.float32), nan(N, dtype=torch.float32)]
    joined, apart, branch = new(), new(), nan(N, 256)

    def together():
        many.project_many_forward_raw(x, weight, Join(kind, EPS, scale, shift, bias, residual, *joined, masks=None))

    def before():
        r, h, mean, rstd = apart
        if K <= 256:  # as a block does with attention's projection
            products.forward_raw(x, weight, r, bias_M=bias, residual_NM=residual, impl="cuda")
            norms.norm_forward_raw(r, scale, shift, h, mean, rstd, eps=EPS, kind=kind)
        else:
            torch.mm(x, weight.t(), out=branch)
            norms.norm_forward_raw(
                branch,
                scale,
                shift,
                h,
                mean,
                rstd,
                eps=EPS,
                kind=kind,
                r_NC=r,
                residual_NC=residual,
                branch_bias_C=bias,
            )

    together(), before()
    again = [None if t is None else t.clone() for t in joined]
    together()
    same = all(a is None or torch.equal(a, b) for a, b in zip(again, joined))
    r = x.double() @ weight.double().t() + residual.double() + (0 if bias is None else bias.double())
    exact = {"r": r, "h": exact_norm(r, scale.double(), None if shift is None else shift.double(), rms)}
    right = told(label, dict(zip("rh", joined)), dict(zip("rh", apart)), exact)
    return report(right and same, same, together, before)


def backward(label, K, rms):
    kind, kinds = ("rmsnorm", 1) if rms else ("layernorm", 2)
    dy, weight, scale = normal(N, K), normal(K, 256, scale=K**-0.5), normal(256) + 1
    r, dresidual = normal(N, 256) + 0.3, normal(N, 256)
    mean = None if rms else r.float().mean(1)
    rstd = ((r.float() if rms else r.float() - mean[:, None]).square().mean(1) + EPS).rsqrt()
    dr, dr_apart = torch.empty_like(r), torch.empty_like(r)
    partials = torch.full((many.blocks(N, r.device), kinds * 256), float("nan"), device="cuda")
    partials_apart = torch.empty(norms.partial_rows(N, 256, r), kinds * 256, device="cuda")
    join = JoinGradient(kind, scale, r, mean, rstd, dresidual, dr, None, partials, not rms, False, None)

    def together():
        many.project_many_backward_raw(dy, weight, join)

    def before():
        norms.norm_backward_raw(
            dy @ weight,
            r,
            scale,
            mean,
            rstd,
            partials_apart,
            kind=kind,
            bias=not rms,
            branch_bias=False,
            dresidual_NC=dresidual,
            dr_NC=dr_apart,
        )

    together(), before()
    again = [dr.clone(), partials.clone()]
    together()
    same = torch.equal(again[0], dr) and torch.equal(again[1], partials)
    leaves = [t.double().requires_grad_() for t in (r, scale, torch.zeros_like(scale))]
    h = exact_norm(*leaves, rms=rms) + (leaves[2] if rms else 0)
    expected, dscale, dshift = torch.autograd.grad(h, leaves, dy.double() @ weight.double())
    exact = {"dr": expected + dresidual.double(), "dscale": dscale} | ({} if rms else {"dshift": dshift})
    take = lambda d, p: dict(zip(("dr", "dscale", "dshift"), (d, *p.double().sum(0).split(256))))
    right = told(label, take(dr, partials), take(dr_apart, partials_apart), exact)
    return report(right and same, same, together, before)


def report(right, same, together, before):
    if not right:
        print("" if same else ", REPEATS DIFFER", flush=True)
        return None
    graphs = {"apart": captured(before)}
    for key in BOTH:
        take(VARIANTS[key])
        graphs[key] = captured(together)
    take(Variant())
    return told_us(interleaved(graphs, 5, 8))


def told_us(us):
    print(", us", {key: round(value, 1) for key, value in us.items()}, flush=True)
    return us


def gradients(label, shapes, biases, rows=N):
    made = [
        Gradient(
            normal(rows, M),
            normal(rows, K),
            torch.empty(M, K, device="cuda"),
            torch.empty(M, device="cuda") if biased else None,
        )
        for (M, K), biased in zip(shapes, biases)
    ]
    sums = 512 if any(biases) else 256
    also = [Job(torch.randn(132, 1, sums, device="cuda"), torch.empty(1, sums, device="cuda")) for _ in range(2)]

    def errors():
        truths = [(g.dweight_MK, g.dy_NM.double().t() @ g.x_NK.double()) for g in made]
        return max(relative(got, truth) for got, truth in truths)

    weight_gradients_raw(made, also=also)
    ours, first = errors(), [g.dweight_MK.clone() for g in made]
    weight_gradients_raw(made, also=also)
    same = all(torch.equal(a, g.dweight_MK) for a, g in zip(first, made))
    cublas(made)
    graphs = {"cuBLAS": captured(lambda: cublas(made))}
    for key in BOTH:
        take(VARIANTS[key])
        graphs[key] = captured(lambda: weight_gradients_raw(made, also=also))
    take(Variant())
    # wgmma rounds towards zero: half of 4.5e-8 a step of 16 rows that a share has, 2,000 of them at most.
    right = "right" if ours < 5e-5 and same else "WRONG"
    print(f"{label}: {right}, error {ours:.2g} (cuBLAS {errors():.2g}), same bits {same}", end="", flush=True)
    return told_us(interleaved(graphs, 5, 8))


def cublas(made):
    for g in made:
        products.weight_gradient_raw(g.dy_NM, g.x_NK, g.dweight_MK, accumulate=False)
