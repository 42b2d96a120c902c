"""What the emulation asks of both Hopper products: random operands, the division of the work, the result in float64."""

import ctypes

import torch
from torch import Tensor

from ridgeline.ops.dropout import DropoutState, hidden_keep, quantise
from ridgeline.ops.linear.codes import LINE, TILE, codes_empty
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
    if form.coded:
        c_MN.uniform_(-0.13, 1.13)
    return c_MN, aligned(rows, width, torch.float16).fill_(float("nan"))


def _place_of_codes(rows: int, columns: int, streaming: bool) -> Tensor:
    """Where the code of each element lies: the streaming product has rows where the other one has columns."""
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    tile = row // TILE * (2 * (-(-columns // (2 * TILE)))) + column // TILE
    down, across = (column % TILE, row % TILE) if streaming else (row % TILE, column % TILE)
    warp, high, lane = across // 16, across % 16 // 8, across % 8 * 4 + down % 8 // 2
    part = down // 8
    return tile * TILE * TILE + warp * 1024 + part // 4 * 512 + lane * 16 + part % 4 * 4 + down % 2 * 2 + high


def coded(slope_MN: Tensor, streaming: bool) -> Tensor:
    """Slopes in codes, as the kernels keep them; codes of nothing are 255."""
    codes = codes_empty(slope_MN, *slope_MN.shape).fill_(255)
    place = _place_of_codes(*slope_MN.shape, streaming)
    codes.view(-1)[place] = (slope_MN.double() * 195 + 32).round().to(torch.uint8)
    return codes


def decoded(codes: Tensor, rows: int, columns: int, streaming: bool) -> Tensor:
    """Slopes of codes, as the kernels read them."""
    return ((codes.view(-1)[_place_of_codes(rows, columns, streaming)].double() - 32) * 42 / 8192).half()


def code_lines(codes: Tensor) -> Tensor:
    """Codes as the copy engine takes them."""
    return codes.view(torch.float16).view(-1, LINE)


def slopes_are(got: Tensor, right: Tensor, codes: bool, behind_norm: bool = False) -> bool:
    """Whether slopes are right to within the arithmetic of half precision, and in codes half a step more."""
    error, most = got.double() - right, 7e-3 if behind_norm else 3e-3 if codes else 1e-3
    near = behind_norm or not codes or bool(error.abs().max() < 2.5e-3 + 0.5 / 195)
    return near and bool(error.norm() <= most * right.norm())


def form_of(epilogue: str, transposed_b: bool, coded: bool = False) -> Form:
    """The form of an epilogue: plain, bias, gelu (with its slope), residual (with dropout), factor, terms."""
    return Form(
        coded=coded,
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
