"""The fused half-blocks: reference, refusals, what the compiler makes of the kernels, cost; on a card, the numbers."""

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from error_budget import compare
from ridgeline.cost import Storage
from ridgeline.errors import UnsupportedError
from ridgeline.ops import _cuda as cuda
from ridgeline.ops.dropout import DropoutState, hidden_keep, quantise
from ridgeline.ops.linear import Masks
from ridgeline.ops.mlp import Mlp, Norm, available, cost, kernels, mlp_half, norm_project, project_join
from ridgeline.ops.mlp.kernels import ABREAST, WHOLE, Config

GPU = pytest.mark.gpu
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPS = 1e-5


def draw(*shape: int, scale: float = 1.0, shift: float = 0.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(shape) * scale + shift).to(DEVICE, dtype)


def torch_norm(x: Tensor, norm: Norm) -> Tensor:
    if norm.kind == "rmsnorm":
        return functional.rms_norm(x, (x.shape[-1],), norm.weight_C, norm.eps)
    return functional.layer_norm(x, (x.shape[-1],), norm.weight_C, norm.bias_C, norm.eps)


def torch_join(y: Tensor, residual: Tensor, norm: Norm, masks: Masks | None) -> tuple[Tensor, Tensor]:
    if masks is not None:
        N, C = y.shape
        keep = hidden_keep(masks.state, masks.site, (N // masks.T, masks.T, C), masks.p, y.device)
        y = y * keep.view(N, C) * quantise(masks.p)[1]
    r = residual + y
    return r, torch_norm(r, norm)


def masks_of(p: float, T: int) -> Masks | None:
    return Masks(p, DropoutState(torch.tensor([2**40 + 17, 5], device=DEVICE), 3), 4, T) if p else None


def half(kind: str, gelu: str, p: float, T: int) -> Callable[..., tuple[Tensor, Tensor]]:
    """The MLP half as a function of tensors, with PyTorch's own ops as `impl="torch"`."""

    def op(r, w, b, up, up_b, down, down_b, next_w, next_b, impl):
        norm, following = Norm(kind, EPS, w, b), Norm(kind, EPS, next_w, next_b)
        masks = masks_of(p, T)
        if impl != "torch":
            return mlp_half(r, norm, Mlp(up, up_b, down, down_b, gelu), following, masks=masks, impl=impl)
        u = functional.linear(torch_norm(r, norm), up, up_b)
        a = functional.gelu(u, approximate="tanh" if gelu == "tanh" else "none")
        return torch_join(functional.linear(a, down, down_b), r, following, masks)

    return op


def half_inputs(N: int, C: int, F: int, bias: bool) -> dict[str, Tensor | None]:
    torch.manual_seed(N + F)
    small = lambda n: draw(n, scale=0.5) if bias else None  # noqa: E731
    return {
        "r": draw(N, C, shift=0.2), "w": draw(C, scale=0.2, shift=1.0), "b": small(C), "up": draw(F, C, scale=C**-0.5),
        "up_b": small(F), "down": draw(C, F, scale=F**-0.5), "down_b": small(C),
        "next_w": draw(C, scale=0.2, shift=1.0), "next_b": small(C),
    }  # fmt: skip


def test_reference_is_the_formula() -> None:
    """Float64 on the CPU, against the formula written with PyTorch's own ops, gradients included."""
    for kind, gelu, bias, p in (("layernorm", "exact", True, 0.3), ("rmsnorm", "tanh", False, 0.0)):
        inputs = {k: None if x is None else x.double() for k, x in half_inputs(12, 16, 24, bias).items()}
        leaves = {k: None if x is None else x.requires_grad_() for k, x in inputs.items()}
        op = half(kind, gelu, p, 4)
        outputs = [op(*leaves.values(), impl=impl) for impl in ("reference", "torch")]
        wanted = [x for x in leaves.values() if x is not None]
        grads = [torch.autograd.grad((r.sin() + h.cos()).sum(), wanted) for r, h in outputs]
        for got, expected in zip((*outputs[0], *grads[0]), (*outputs[1], *grads[1]), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def test_refusals_say_what_was_expected() -> None:
    N, C, F = 8, 128, 64
    norm = Norm("rmsnorm", EPS, torch.ones(C), None)
    mlp = Mlp(torch.ones(F, C), None, torch.ones(C, F), None, "exact")
    r = torch.ones(N, C)
    with pytest.raises(UnsupportedError, match=r"down_CF must have shape \(128, 64\)"):
        mlp_half(r, norm, mlp._replace(down_CF=torch.ones(F, C)), norm)
    with pytest.raises(UnsupportedError, match="up_FC must be torch"):
        mlp_half(r, norm, mlp._replace(up_FC=torch.ones(F, C).bfloat16()), norm)
    with pytest.raises(UnsupportedError, match="both norms must be alike"):
        mlp_half(r, norm, mlp, norm._replace(eps=1e-3))
    with pytest.raises(UnsupportedError, match=r"residual_NC must have shape \(8, 128\), got \(4, 128\)"):
        project_join(r, torch.ones(C, C), None, torch.ones(4, C), norm)
    with pytest.raises(UnsupportedError, match="multiple of the masks' T=3, got 8"):
        project_join(r, torch.ones(C, C), None, r, norm, masks=masks_of(0.2, 3))
    with pytest.raises(UnsupportedError, match="at least one row"):
        norm_project(r[:0], norm, torch.ones(F, C))
    with pytest.raises(UnsupportedError, match="impl='cuda' cannot run: the fused half-blocks need a"):
        norm_project(torch.ones(N, C), norm, torch.ones(F, C), impl="cuda")
    assert "did you mean" in str(available("cudda", r.device, r.dtype, C, F))


def test_layout_header(compile_host: Callable[..., ctypes.CDLL]) -> None:
    """Owned columns are a permutation in which a lane's eight are neighbours; `keep` and `unkeep` follow the header."""
    library = compile_host(
        '#include "layout.cuh"\n'
        'extern "C" int owned_column(int position) { return rl::owned(position); }\n'
        'extern "C" long long place(long long group, int chunks, int chunk, int step, int thread, int element) {\n'
        "  return rl::kept_index(group, chunks, chunk, step, thread) * 8 + element;\n}\n"
        'extern "C" int row(int thread, int element) { return rl::kept_row(thread, element); }\n'
        'extern "C" int column(int step, int thread, int element) { return rl::kept_column(step, thread, element); }\n',
        kernels.FOLDER,
    )
    library.place.restype = ctypes.c_longlong
    columns = [library.owned_column(n) for n in range(128)]
    assert sorted(columns) == list(range(128))
    for quad in range(4):
        for group in range(4):
            mine = [columns[32 * group + 8 * j + 2 * quad + e] for j in range(4) for e in range(2)]
            assert mine == list(range(32 * group + 8 * quad, 32 * group + 8 * quad + 8))
    u = torch.arange(100 * 200, dtype=torch.float32).view(100, 200)
    kept = torch.full(kernels.kept_shape(100, 200), float("nan"))
    kernels.keep(u, kept)
    assert torch.equal(kernels.unkeep(kept, 100, 200), u)
    flat = kept.flatten()
    rng = np.random.default_rng(0)
    for group, chunk, step, thread, element in rng.integers(0, [2, 2, 8, 128, 8], (300, 5)).tolist():
        row = 64 * group + library.row(thread, element)
        column = 128 * chunk + library.column(step, thread, element)
        if row < 100 and column < 200:
            assert flat[library.place(ctypes.c_longlong(group), 2, chunk, step, thread, element)] == u[row, column]


BUILDS = [  # part, width, configuration, spilled bytes allowed: what only a tile's end or a launch's beginning needs
    ("mlp_forward", 128, ABREAST, 0),
    ("mlp_forward", 256, ABREAST, 64),
    ("mlp_forward", 256, WHOLE, 128),
    ("mlp_backward", 128, ABREAST, 0),
    ("mlp_backward", 256, ABREAST, 64),
    ("mlp_backward", 256, WHOLE, 128),
    ("project_forward", 128, ABREAST, 0),
    ("project_forward", 256, ABREAST, 0),
    ("project_forward", 256, WHOLE, 32),
    ("project_backward", 128, ABREAST, 0),
    ("project_backward", 256, ABREAST, 0),
    ("project_backward", 256, WHOLE, 64),
]


def built(part: kernels.Part, width: int, config: Config) -> cuda.Cubin:
    macros = kernels.tile_macros(width, torch.bfloat16, config) | {
        "RMS": 0, "DROPOUT": 0, "RESIDUAL": 1, "NORM_BIAS": 1, "BRANCH_BIAS": 1, "UP_BIAS": 1, "GELU_TANH": 1,
        "BACKWARD": int(part.endswith("backward")),
    }  # fmt: skip
    return cuda.build(kernels.FOLDER / kernels.source(part), macros)


@pytest.mark.usefixtures("needs_nvrtc")
@pytest.mark.parametrize("part", kernels._PARTS)
def test_operands_are_described_in_uniform_registers(part: kernels.Part, machine_code: Callable[[bytes], str]) -> None:
    """A role that the compiler does not know to be a warp's own costs two moves and ten instructions a product.

    A lane that it does not know to be alone costs a loop over lanes at every copy.
    """
    text = machine_code(built(part, 256, kernels.fitted(part, 256, ABREAST, 1024)).image)
    products, moves = text.count("HGMMA"), text.count("R2UR")
    assert products >= 4
    assert moves < products + 8
    assert "BRA.U.ANY" not in text


@pytest.mark.usefixtures("needs_nvrtc")
@pytest.mark.parametrize(("part", "width", "config", "spills"), BUILDS)
def test_kernels_compile_within_their_means(part: kernels.Part, width: int, config: Config, spills: int) -> None:
    config = kernels.fitted(part, width, config, 1024)
    assert kernels.smem(part, width, config, config.stages, 1024) <= kernels.SMEM_LIMIT
    cubin = built(part, width, config)
    usage = cubin.resources()[part]
    assert usage.registers <= 168  # × 384 threads: what setmaxnreg divides anew
    assert usage.spill_stores <= spills
    assert "serialized" not in cubin.log  # products that wait for each other


def test_cost_counts_products_and_traffic() -> None:
    store = Storage(2, 2)
    N, C, F = 8192, 256, 1024
    forward = cost.mlp_forward("mlp", N, C, F, kind="layernorm", gelu="tanh", dropout=False, store=store)
    backward = cost.mlp_backward("mlp", N, C, F, kind="layernorm", dropout=False, store=store)
    assert forward.flops == backward.flops == 4 * N * C * F
    a = store.activation
    assert forward.read_bytes == 2 * N * C * a + 2 * C * F * store.weight
    assert forward.written_bytes == N * (2 * C + 2 * F) * a + 2 * N * store.statistic
    assert backward.read_bytes == N * (3 * C + F) * a + 2 * C * F * store.weight + 2 * N * store.statistic
    assert backward.written_bytes == N * (C + F) * a
    forward = cost.project_forward("out", N, 512, C, kind="rmsnorm", dropout=True, store=store)
    backward = cost.project_backward("qkv", N, 768, C, kind="rmsnorm", dropout=True, store=store)
    assert forward.flops == 2 * N * 512 * C
    assert backward.written_bytes == 2 * N * C * a


@GPU
@pytest.mark.parametrize(
    ("N", "C", "F", "kind", "gelu", "bias", "p"),
    [
        (200, 256, 1024, "layernorm", "tanh", True, 0.0),
        (200, 128, 200, "layernorm", "exact", True, 0.2),
        (8192, 256, 512, "rmsnorm", "tanh", False, 0.0),
        (33000, 256, 1024, "layernorm", "exact", True, 0.2),
    ],
)
def test_mlp_half_on_the_card(N: int, C: int, F: int, kind: str, gelu: str, bias: bool, p: float) -> None:
    _hopper()
    inputs = half_inputs(N, C, F, bias)
    if kind == "rmsnorm":
        inputs["b"] = inputs["next_b"] = None
    compare(half(kind, gelu, p, 100 if N % 256 else 256), inputs, "cuda")


@GPU
@pytest.mark.parametrize(("N", "K", "p"), [(200, 200, 0.2), (8192, 256, 0.0), (33000, 768, 0.2)])
def test_projections_on_the_card(N: int, K: int, p: float) -> None:
    _hopper()
    torch.manual_seed(N)
    C, T = 256, 100 if N % 256 else 256

    def forward(x, weight, bias, residual, w, b, impl):
        norm, masks = Norm("layernorm", EPS, w, b), masks_of(p, T)
        if impl == "torch":
            return torch_join(functional.linear(x, weight, bias), residual, norm, masks)
        return project_join(x, weight, bias, residual, norm, masks=masks, impl=impl)

    def backward(r, w, b, weight, bias, impl):
        norm = Norm("layernorm", EPS, w, b)
        if impl == "torch":
            return functional.linear(torch_norm(r, norm), weight, bias)
        return norm_project(r, norm, weight, bias, impl=impl)

    small = {"w": draw(C, scale=0.2, shift=1.0), "b": draw(C)}
    inputs = {"x": draw(N, K), "weight": draw(C, K, scale=K**-0.5), "bias": draw(C), "residual": draw(N, C), **small}
    compare(forward, inputs, "cuda")
    compare(backward, {"r": draw(N, C), **small, "weight": draw(K, C, scale=C**-0.5), "bias": draw(K)}, "cuda")


def _hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the fused half-blocks need compute capability 9.0")
