"""Products in tiles against fp64: strides, stacks, segments, epilogues; the error PyTorch's own in the same storage."""

import pytest
import torch
from torch import Tensor

from error_budget import DEVICE, DTYPES, check
from ridgeline.ops.dropout import DropoutState
from ridgeline.ops.linear import Masks, linear_reference

pytest.importorskip("triton")

from ridgeline.ops.linear.tiled import Epilogue, Tile, product_raw, row_tiles, segments_of

SMALL = Tile(rows=16, columns=64, depth=32, warps=4, stages=1)
LARGE = Tile(rows=128, columns=128, depth=32, warps=8, stages=3)


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", [SMALL, LARGE])
def test_product_of_views_transposed_either_way(dtype: torch.dtype, tile: Tile, poisoned: None) -> None:
    rows_MK, columns_NK = draw(37, 45, dtype=dtype), draw(70, 45, dtype=dtype, seed=1)
    rows_KM, columns_KN = rows_MK.t().contiguous(), columns_NK.t().contiguous()
    truth, budget = rows_MK.double() @ columns_NK.double().t(), rows_MK @ columns_NK.t()
    for a, b in (
        (rows_MK, columns_NK.t()),
        (rows_MK, columns_KN),
        (rows_KM.t(), columns_NK.t()),
        (rows_KM.t(), columns_KN),
    ):
        out = torch.empty(37, 70, device=DEVICE, dtype=dtype)
        product_raw(a, b, out, tile)
        check("product", out, budget, truth)


@pytest.mark.parametrize("dtype", DTYPES)
def test_stack_with_a_shared_operand_added_to_what_is_there(dtype: torch.dtype) -> None:
    a_UMK, b_KN = draw(3, 20, 33, dtype=dtype), draw(33, 18, dtype=dtype, seed=1)
    before = draw(3, 20, 18, dtype=dtype, seed=2)
    out = before.clone()
    product_raw(a_UMK, b_KN.expand(3, -1, -1), out, SMALL, accumulate=True)
    truth = before.double() + a_UMK.double() @ b_KN.double()
    check("stack", out, before + a_UMK @ b_KN, truth)


@pytest.mark.parametrize("dtype", DTYPES)
def test_segments_add_up_to_the_whole_sum(dtype: torch.dtype, poisoned: None) -> None:
    a_KM, b_KN = draw(517, 20, dtype=dtype), draw(517, 18, dtype=dtype, seed=1)
    pieces, segment = segments_of(20, 18, 517, SMALL, a_KM)
    assert pieces > 1
    parts = torch.empty(1, pieces, 20, 18, device=DEVICE)
    product_raw(a_KM.t()[None], b_KN[None], parts, SMALL, segment=segment)
    truth = a_KM.double().t() @ b_KN.double()
    check("segments", parts.sum((0, 1)), a_KM.float().t() @ b_KN.float(), truth)


@pytest.mark.parametrize(("gelu", "bias"), [("exact", True), ("tanh", True), ("exact", False)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_in_the_epilogue_and_its_derivative(dtype: torch.dtype, gelu: str, bias: bool, poisoned: None) -> None:
    x_NK, weight_MK = draw(37, 24, dtype=dtype), draw(70, 24, dtype=dtype, seed=1)
    bias_M = draw(70, dtype=dtype, seed=2) if bias else None
    pre, out = (torch.empty(37, 70, device=DEVICE, dtype=dtype) for _ in range(2))
    product_raw(x_NK, weight_MK.t(), out, LARGE, epilogue=Epilogue(bias_N=bias_M, gelu=gelu, pre_MN=pre))  # type: ignore[arg-type]
    alone = torch.empty_like(out)
    product_raw(x_NK, weight_MK.t(), alone, LARGE, epilogue=Epilogue(bias_N=bias_M, gelu=gelu))  # type: ignore[arg-type]
    assert torch.equal(alone, out)

    def forward(kind: torch.dtype) -> tuple[Tensor, Tensor]:
        wide = None if bias_M is None else bias_M.to(kind)
        linear = linear_reference(x_NK.to(kind), weight_MK.to(kind), wide)
        return linear, torch.nn.functional.gelu(linear, approximate="tanh" if gelu == "tanh" else "none")

    (u, a), (u_pt, a_pt) = forward(torch.float64), forward(dtype)
    check("pre", pre, u_pt, u)
    check("gelu", out, a_pt, a)

    dz_NC, down_CM = draw(37, 16, dtype=dtype, seed=3), draw(16, 70, dtype=dtype, seed=4)
    du, sums = torch.empty_like(out), torch.empty(row_tiles(37, SMALL), 70, device=DEVICE)
    epilogue = Epilogue(gelu=gelu, gelu_input_MN=pre, sums_PN=sums)  # type: ignore[arg-type]
    product_raw(dz_NC, down_CM, du, SMALL, epilogue=epilogue)
    approximate = "tanh" if gelu == "tanh" else "none"
    gradients = [
        torch.ops.aten.gelu_backward(dz_NC.to(kind) @ down_CM.to(kind), pre.to(kind), approximate=approximate)
        for kind in (torch.float64, dtype)
    ]
    check("derivative", du, gradients[1], gradients[0], gradient=True)
    check("column sums", sums.sum(0), gradients[1].sum(0), gradients[0].sum(0), gradient=True)


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_residual_and_dropout_in_the_epilogue(dtype: torch.dtype, p: float, poisoned: None) -> None:
    B, T, M, K = 3, 13, 36, 24
    x_NK, weight_MK, bias_M = draw(B * T, K, dtype=dtype), draw(M, K, dtype=dtype, seed=1), draw(M, dtype=dtype, seed=2)
    residual = draw(B * T, M, dtype=dtype, seed=3)
    masks = Masks(p, DropoutState(torch.tensor([3, 4], device=DEVICE), 5), 7, T) if p else None
    out = torch.empty(B * T, M, device=DEVICE, dtype=dtype)
    epilogue = Epilogue(bias_N=bias_M, residual_MN=residual, masks=masks)
    product_raw(x_NK, weight_MK.t(), out, SMALL, epilogue=epilogue)
    truth, budget = (
        linear_reference(
            x_NK.to(kind), weight_MK.to(kind), bias_M.to(kind), residual_NM=residual.to(kind), masks=masks
        )
        for kind in (torch.float64, dtype)
    )  # fmt: skip
    check("residual", out, budget, truth)
