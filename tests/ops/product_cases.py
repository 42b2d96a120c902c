"""What the emulation asks of both Hopper products: random operands, the division of the work, the result in float64."""

import ctypes

import torch
from torch import Tensor

from ridgeline.ops.dropout import DropoutState, hidden_keep, quantise
from ridgeline.ops.linear.gemm import Form, divide

SITE, FIRST_SAMPLE, P = 3, 5, 0.3
SEED_STEP = (77, 9)


def source(kernel: str, parameters: str = "", arguments: str = "") -> str:
    """A host program around the kernel of that name and its file, with what it takes beyond the others."""
    return f"""#include "{kernel}_sm90.cu"
extern "C" const char* run(const rl::TensorMap* m, const int* schedule, int segments, const rl::u16* bias,
                           float* partials, const rl::i64* seed_step, const int* n, float scale, int grid, int random,
                           int late{parameters}) {{
  return emulation::launch(grid, 384, random, late, [=] {{
    {kernel}(m[0], m[1], m[2], m[3], m[4], reinterpret_cast<const int4*>(schedule), segments, bias, partials, seed_step,
         n[0], n[1], n[2], scale, n[3], n[4]{arguments});
  }});
}}
"""


def aligned(rows: int, width: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random numbers whose rows start at multiples of 16 bytes."""
    return torch.randn(rows, -(-width // 8) * 8).to(dtype)[:, :width]


def beside(form: Form, rows: int, width: int) -> tuple[Tensor, Tensor]:
    """What the epilogue reads, and unwritten memory for slopes."""
    c_MN = aligned(rows, width, torch.float16 if form.factor else torch.bfloat16)
    return c_MN, aligned(rows, width, torch.float16).fill_(float("nan"))


def form_of(epilogue: str, transposed_b: bool) -> Form:
    """The form of an epilogue: plain, bias, gelu (with its slope), residual (with dropout), factor, terms."""
    return Form(
        transposed_b=transposed_b,
        bias=epilogue in ("bias", "gelu", "residual"),
        gelu="exact" if epilogue == "gelu" else None,
        slope=epilogue == "gelu",
        residual=epilogue == "residual",
        dropout=epilogue == "residual",
        factor=epilogue == "factor",
        terms=epilogue == "terms",
    )


def scheduled(row_tiles: int, columns: int, units: int) -> tuple[Tensor, int]:
    """The schedule [blocks, segments, 4] of a division, and its rows of partial sums."""
    work, slots = divide(row_tiles, columns, units)
    longest = max(map(len, work)) + 1
    table = [[*mine, *[(0, 0, 0, 0)] * (longest - len(mine))] for mine in work]
    return torch.tensor(table, dtype=torch.int32), slots


def dropping(M: int, N: int) -> tuple[Tensor, ctypes.Array[ctypes.c_int], ctypes.c_float]:
    """Seed and step, the kernel's numbers and its scale for two samples of M / 2 rows."""
    threshold, scale = quantise(P)
    return torch.tensor(SEED_STEP), (ctypes.c_int * 5)(N, SITE, threshold, M // 2, FIRST_SAMPLE), ctypes.c_float(scale)


def expected(form: Form, a_MK: Tensor, b: Tensor, bias_N: Tensor, c_MN: Tensor) -> tuple[Tensor, Tensor]:
    """The result in float64, and GELU's derivative where there is one."""
    M, N = c_MN.shape
    product = a_MK.double() @ (b.double() if form.transposed_b else b.double().t())
    if form.bias:
        product = product + bias_N.double()
    if form.gelu:
        value = torch.nn.functional.gelu(product.requires_grad_())
        return value.detach(), torch.autograd.grad(value.sum(), product)[0]
    if form.residual:
        state = DropoutState(torch.tensor(SEED_STEP), FIRST_SAMPLE)
        keep = hidden_keep(state, SITE, (2, M // 2, N), P, torch.device("cpu")).view(M, N)
        return c_MN.double() + product * keep * quantise(P)[1], product
    if form.factor:
        return product * c_MN.double(), product
    return product, product
