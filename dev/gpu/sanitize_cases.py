"""One small run of each kernel, for compute-sanitizer, started by sanitize_gpu.py.

    PYTHONPATH=src python3 dev/gpu/sanitize_cases.py CASE[+CASE…]

Says which kernels it launches, each at its first launch. Without a card the Triton kernels are interpreted and the
references stand in for CUDA C++. Data is made on the host, so that no kernel but those under test is instrumented.
"""

import contextlib
import functools
import sys
from unittest import mock

import sanitize_controls  # noqa: F401  (its cases)
import sanitize_kit
import sanitize_steps
import sanitize_twins
import torch
from sanitize_kit import (
    CASES,
    DEVICE,
    TOOL,
    ProductsOnHost,
    case,
    control,
    differentiate,
    draw,
    dropout_state,
    impl,
    masks,
    tell_of_copies,
)

from ridgeline.ops import heads as sequential
from ridgeline.ops._triton.columns import column_sums_raw
from ridgeline.ops.activation import bias_gelu
from ridgeline.ops.attention import attention, float32
from ridgeline.ops.cross_entropy import cross_entropy, linear_cross_entropy
from ridgeline.ops.dropout import dropout
from ridgeline.ops.embedding import embedding
from ridgeline.ops.inputs import InputColumns, input_layer
from ridgeline.ops.linear import doubles, gemm, linear, wgrad
from ridgeline.ops.linear.codes import codes_empty
from ridgeline.ops.linear.products import aligned_empty, slope_empty
from ridgeline.ops.linear.reduce import Job
from ridgeline.ops.mlp import Mlp, Norm, forward_many, kernels, many, mlp_half, norm_project, project_join
from ridgeline.ops.norm import norm, residual_norm
from ridgeline.ops.policy_heads import HeadWeights, policy_heads


def attend(name, B, T, H, G, D, rows=0, p=0.0, dtype=None):
    joint = draw(B, T, (H + 2 * G) * D, dtype=dtype)
    q, k, v = (x.unflatten(-1, (-1, D)) for x in joint.split((H * D, G * D, G * D), -1))
    table = draw(rows, D, scale=0.5, dtype=dtype) if rows else None
    state = dropout_state() if p else None
    out = attention(q, k, v, table, scale=D**-0.5, p=p, dropout=state, site=4, impl=impl(name))
    differentiate(out, [joint, table])


@case
def attention_short():
    attend("cuda", 2, 177, 4, 2, 64, 177, 0.2)
    attend("cuda", 2, 100, 4, 4, 32)


@case
def attention_short_256():
    attend("cuda", 1, 256, 2, 2, 64, 256, 0.2)


@case
def attention_short_group():
    attend("cuda", 1, 256, 4, 1, 32)


@case
def attention_short_whole_groups():
    """Enough groups that a block takes one with all its heads."""
    attend("cuda", 400, 16, 2, 1, 64, 16, 0.2)


@case
def attention_plain():
    attend("cuda-plain", 1, 333, 6, 2, 64)
    attend("cuda-plain", 1, 200, 4, 1, 32, dtype=torch.float16)


@case
def attention_float():
    attend("cuda-fp32", 2, 177, 8, 1, 32, dtype=torch.float32)


@case
def attention_float_lanes():
    """The kernels of cards without Hopper's rate in fp64."""
    with mock.patch.object(float32, "choose", lambda device: float32.LANES):
        attend("cuda-fp32", 2, 177, 8, 1, 32, dtype=torch.float32)


@case
def attention_triton():
    attend("triton", 1, 70, 2, 1, 32, 80, 0.2)
    attend("triton", 1, 77, 4, 1, 32)
    attend("triton-two-sweep", 1, 65, 1, 1, 64, 65, dtype=torch.float32)


def norm_of(C, kind, bias=True):
    return Norm(kind, 1e-5, draw(C, scale=0.2, shift=1.0), draw(C) if bias else None)


@case
def mlp_rows(C=256, F=512, N=200):
    for kind, gelu, bias, drop in (("layernorm", "exact", True, masks(100)), ("rmsnorm", "tanh", False, None)):
        norm, following = norm_of(C, kind, bias), norm_of(C, kind, bias)
        small = (draw(F), draw(C)) if bias else (None, None)
        mlp = Mlp(draw(F, C, scale=C**-0.5), small[0], draw(C, F, scale=F**-0.5), small[1], gelu)
        r = draw(N, C)
        weights = (norm.weight_C, norm.bias_C, *mlp[:4], following.weight_C, following.bias_C)
        differentiate(mlp_half(r, norm, mlp, following, masks=drop, impl=impl("cuda")), [r, *weights])


@case
def mlp_rows_narrow():
    mlp_rows(128, 200)


@control
def twins():
    with sanitize_twins.twins(sanitize_twins.ROWS_AND_SUMS):
        attention_short()
        attend("cuda-plain", 1, 200, 4, 1, 32, dtype=torch.float16)
        mlp_rows()


@control
def twins_of_products():
    with sanitize_twins.twins(sanitize_twins.ROW_NUMBERS):
        sanitize_steps.step_hal()


@case
def project_rows():
    N, K, C = 200, 200, 256
    norm = norm_of(C, "layernorm")
    x, weight, bias, residual = draw(N, K), draw(C, K, scale=K**-0.5), draw(C), draw(N, C)
    joined = project_join(x, weight, bias, residual, norm, masks=masks(100), impl=impl("cuda"))
    differentiate(joined, [x, weight, bias, residual, *norm[2:]])
    r, weight, bias = draw(N, C), draw(K, C, scale=C**-0.5), draw(K)
    differentiate(norm_project(r, norm, weight, bias, impl=impl("cuda")), [r, *norm[2:], weight, bias])


@case
def project_many():
    if DEVICE == "cpu":
        return
    N, K, C = 700, 200, 256
    vector, matrix = lambda: draw(C).detach(), lambda *shape: draw(*shape).detach()
    empty = lambda *shape: torch.zeros(shape).cuda()
    r, h, mean, rstd = matrix(N, C), matrix(N, C), empty(N), empty(N)
    join = kernels.Join("layernorm", 1e-5, vector(), vector(), vector(), matrix(N, C), r, h, mean, rstd, None)
    many.project_many_forward_raw(matrix(N, K), matrix(C, K), join)
    partials = empty(many.blocks(N, r.device), 2 * C)
    gradient = kernels.JoinGradient(
        "layernorm", vector(), r, mean, rstd, matrix(N, C), matrix(N, C), None, partials, True, False, None
    )
    many.project_many_backward_raw(matrix(N, K), matrix(K, C), gradient)
    assert torch.isfinite(gradient.dr_NC.cpu()).all()


@case
def mlp_many():
    if DEVICE == "cpu":
        return
    N, C = 700, 256
    vector, matrix = lambda width=C: draw(width).detach(), lambda *shape: draw(*shape).detach()
    empty = lambda *shape: torch.zeros(shape).cuda()
    for F, kind in ((1024, "layernorm"), (200, "layernorm"), (512, "rmsnorm")):
        plain = kind == "layernorm"
        h, a, out, normed, rstd = matrix(N, C), matrix(N, F), matrix(N, C), matrix(N, C), empty(N)
        shift, bias, up_bias = (vector(), vector(), vector(F)) if plain else (None, None, None)
        mean = empty(N) if plain else None
        join = kernels.Join(kind, 1e-5, vector(), shift, bias, matrix(N, C), out, normed, mean, rstd, None)
        codes = codes_empty(h, N, F)
        forward_many.mlp_many_forward_raw(h, matrix(F, C), up_bias, matrix(C, F), codes, a, join, gelu="tanh")
        assert torch.isfinite(normed.cpu()).all()


@case
def linear_stationary():
    added = {"residual": draw(2, 150, 264), "masks": masks(150)}
    for K, M, rest in ((256, 512, {"gelu": "exact"}), (512, 264, added), (768, 264, {}), (600, 264, added)):
        x, weight, bias = draw(2, 150, K), draw(M, K, scale=K**-0.5), draw(M)
        differentiate(linear(x, weight, bias, **rest, impl=impl("cuda")), [x, weight, bias, rest.get("residual")])


@case
def linear_gemm():
    """The general product: every epilogue, an inner width that fills no tile, the inner widths of the goals' models."""
    if DEVICE == "cpu":
        return
    M, N = 300, 264
    for K in (584, 768, 832, 448):
        x, w, bias, c = (t.detach() for t in (draw(M, K), draw(N, K, scale=K**-0.5), draw(N), draw(M, N)))
        turned, slope = draw(K, N).detach(), slope_empty(x, M, N, coded=K == 768)
        terms = gemm.RowTerms(c, *(draw(*shape, dtype=torch.float32).detach() for shape in ((2, M), (1,))))
        forms = (
            (w, {"bias_N": bias, "gelu": "tanh", "slope_MN": slope}),
            (turned, {"transposed_b": True, "factor_MN": slope}),
            (turned, {"transposed_b": True, "terms": terms}),
            (w, {}),
            (w, {"bias_N": bias}),
            (w, {"bias_N": bias, "gelu": "exact", "slope_MN": slope}),
            (w, {"bias_N": bias, "residual_MN": c, "masks": masks(150)}),
            (turned, {"transposed_b": True}),
        )
        for weight, rest in forms if K == 584 else forms[:3]:
            out = aligned_empty(x, M, N)
            gemm.gemm(x, weight, out, gemm.Config(), **rest)
            assert torch.isfinite(out.cpu()).all(), (K, rest.keys())


@case
def weight_gradients():
    if DEVICE == "cpu":
        return
    fp32 = lambda *shape: torch.zeros(shape).cuda()
    for N, shapes in ((1000, [(768, 256), (256, 256), (512, 256), (256, 512)] * 3), (200, [(136, 72), (64, 130)])):
        layers = [
            wgrad.Gradient(draw(N, M).detach(), draw(N, -(-K // 8) * 8).detach()[:, :K], fp32(M, K), fp32(M))
            for M, K in shapes
        ]
        partials, sums = draw(264, 1, 512, dtype=torch.float32).detach(), fp32(1, 512)
        wgrad.weight_gradients_raw(layers, also=[Job(partials, sums)], room=lambda count: fp32(count))
        assert all(torch.isfinite(layer.dweight_MK.cpu()).all() for layer in layers)


@case
def fp32_products():
    if DEVICE == "cpu":
        return
    draw_fp32 = lambda *shape: draw(*shape, dtype=torch.float32).detach()
    x, w, bias, c = draw_fp32(300, 72), draw_fp32(68, 72), draw_fp32(68), draw_fp32(300, 68)
    for b, rest in (
        (w, {"bias_N": bias}),
        (w, {"bias_N": bias, "gelu": "tanh", "slope_MN": torch.empty_like(c)}),
        (w, {"residual_MN": c}),
        (w.t().contiguous(), {"transposed_b": True, "factor_MN": c}),
    ):
        out = torch.empty_like(c)
        doubles.product(x, b, out, **rest)
        assert torch.isfinite(out.cpu()).all(), rest.keys()
    zeros = lambda *shape: torch.zeros(shape).cuda()
    shapes = [(136, 72), (64, 132)] * 3
    layers = [wgrad.Gradient(draw_fp32(1000, M), draw_fp32(1000, K), zeros(M, K), zeros(M)) for M, K in shapes]
    doubles.weight_gradients(layers)
    assert all(torch.isfinite(layer.dweight_MK.cpu()).all() for layer in layers)


def policy_heads_by(name, dtype=None):
    draw = functools.partial(sanitize_kit.draw, dtype=dtype)
    rows, width, classes = 333, 128, (9, 37, 6)
    heads, seen = [], width
    for count in classes:
        inner = seen // 2 // 4 * 4
        norm, up = (draw(seen, scale=0.2, shift=1.0), draw(seen)), (draw(inner, seen, scale=seen**-0.5), draw(inner))
        heads.append(HeadWeights(*norm, *up, draw(count, inner, scale=inner**-0.5), draw(count)))
        seen += count
    targets = torch.stack([torch.randint(count, (rows,)) for count in classes], 1)
    targets[::7] = -100
    x = draw(rows, width)
    losses = policy_heads(x, heads, targets.to(DEVICE), impl=impl(name))
    differentiate(losses, [x, *(w for head in heads for w in head)])


@case
def heads_hopper():
    policy_heads_by("cuda")


@case
def heads_float():
    policy_heads_by("triton", torch.float32)


@case
def heads_triton():
    policy_heads_by("triton")
    N, C, width, heads = 200, 64, 64, []
    for V in (9, 6):
        F, some = width // 2, draw(width, scale=0.2, shift=1.0)
        heads.append(
            sequential.HeadWeights(some, draw(width), draw(F, width, scale=width**-0.5), draw(F), draw(V, F), draw(V))
        )
        width += V
    targets = torch.stack([torch.randint(V, (N,)) for V in (9, 6)], 1).to(torch.int8).to(DEVICE)
    state = draw(N, C)
    losses = sequential.heads_losses(state, heads, targets, conditioning="logits", impl="triton")
    differentiate(losses, [state, *(w for head in heads for w in head)])


@case
def inputs():
    rows = ((5, 4), (20, 6), (30, 8))
    columns = InputColumns(tables=(0, 1, 1, 2, 2), numbers=7, one_hots=((0, 9), (2, 5)))
    width, N = 4 + 2 * 6 + 2 * 8 + 7 + 14, 333
    categories = torch.stack([torch.randint(rows[t][0], (N,)) for t in columns.tables], 1).short().to(DEVICE)
    previous = torch.stack([torch.randint(n, (N,)) for n in (9, 3, 5)], 1).short().to(DEVICE)
    numbers = draw(N, 7, dtype=torch.float32).detach()
    weight, bias, tables = draw(64, width), draw(64), [draw(*shape) for shape in rows]
    differentiate(
        input_layer(categories, numbers, previous, columns, tables, weight, bias, impl="triton"),
        [weight, bias, *tables],
    )


@case
def norms():
    B, T, C = 3, 37, 200
    for dtype in (torch.bfloat16, torch.float32):
        branch, residual, weight, bias, branch_bias = (draw(*s, dtype=dtype) for s in [(B, T, C)] * 2 + [(C,)] * 3)
        differentiate(
            residual_norm(
                branch, residual, weight, bias,
                branch_bias_C=branch_bias, p=0.2, dropout=dropout_state(), impl="triton",
            ),
            [branch, residual, weight, bias, branch_bias],
        )  # fmt: skip
        x = draw(B, T, C, dtype=dtype)
        differentiate(norm(x, weight, impl="triton", kind="rmsnorm"), [x, weight])


@case
def embeddings():
    for B, T, V, C in ((4, 33, 65, 64), (2, 40, 50257, 32), (1310, 51, 65, 32)):
        ids, table, positions = torch.randint(V, (B, T)).to(DEVICE), draw(V, C), draw(T, C)
        out = embedding(ids, table, positions, p=0.1, dropout=dropout_state(), site=4, impl="triton")
        differentiate(out, [table, positions])


@case
def cross_entropies():
    for N, V in ((300, 65), (40, 50257)):
        targets, logits = torch.randint(V, (N,)), draw(N, V)
        targets[::5] = -100
        differentiate(cross_entropy(logits, targets.to(DEVICE), impl="triton"), [logits])
    for V, chunk in ((65, None), (650, 100), (2500, 100)):
        hidden, weight, bias = draw(300, 64), draw(V, 64, scale=0.1), draw(V)
        targets = torch.randint(V, (300,)).to(DEVICE)
        differentiate(
            linear_cross_entropy(hidden, weight, bias, targets, chunk=chunk, impl="triton"), [hidden, weight, bias]
        )


@case
def pointwise():
    for kind in ("exact", "tanh"):
        x, bias = draw(77, 200), draw(200)
        differentiate(bias_gelu(x, bias, kind=kind, impl="triton"), [x, bias])
    x = draw(3, 37, 52)
    differentiate(dropout(x, 0.2, dropout_state(), 3, impl="triton"), [x])
    for P, W in ((37, 100), (300, 70), (20, 5000)):
        column_sums_raw(draw(P, W, dtype=torch.float32).detach(), torch.zeros(W).to(DEVICE))


def run(names):
    """The cases, one after another: says when each begins and has ended, and which kernels it launches."""
    import triton
    from triton.runtime.interpreter import GridExecutor

    from ridgeline.ops._cuda.launch import Kernel

    launched, launch, interpret = set(), Kernel.launch, GridExecutor.__call__

    def tell(kernel):  # at once: a run that hangs has said what it launched last
        if kernel not in launched:
            launched.add(kernel)
            print(f"LAUNCHED {kernel}", flush=True)

    Kernel.launch = lambda kernel, *a: (tell(kernel.name), launch(kernel, *a))[1]
    GridExecutor.__call__ = lambda grid, *a, **k: (tell(grid.fn.__name__), interpret(grid, *a, **k))[1]
    triton.knobs.runtime.launch_enter_hook.add(lambda data: tell(data.get()["name"]))
    if TOOL == "initcheck":
        tell_of_copies()
    torch.set_num_threads(1)
    torch.autograd.set_multithreading_enabled(False)  # a thread of autograd's may end a process badly as Python ends
    for name in names:
        print(f"CASE {name}", flush=True)
        torch.manual_seed(0)
        launched.clear()
        with contextlib.nullcontext() if name == "vendor" else ProductsOnHost():
            CASES[name]()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        print(f"ENDED {name}", flush=True)


if __name__ == "__main__":
    run(sys.argv[1].split("+"))
