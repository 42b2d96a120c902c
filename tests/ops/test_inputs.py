"""The policy's input layer against fp64, within the error of the same sum in plain PyTorch."""

import pytest
import torch

from error_budget import DEVICE, DTYPES, check, evaluate
from ridgeline.errors import UnsupportedError
from ridgeline.ops.inputs import InputColumns, input_layer

pytest.importorskip("triton")
ROWS = ((5, 4), (20, 6), (30, 8))
COLUMNS = InputColumns(tables=(0, 1, 1, 2, 2), numbers=7, one_hots=((0, 9), (2, 5)))
WIDTH = 4 + 2 * 6 + 2 * 8 + 7 + 14


def draw(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def make_batch(N: int, integers: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(N)
    categories = [torch.randint(0, ROWS[table][0], (N,), generator=generator) for table in COLUMNS.tables]
    previous = [torch.randint(0, classes, (N,), generator=generator) for classes in (9, 3, 5)]
    numbers = torch.randn(N, 7, generator=generator)
    return (
        torch.stack(categories, 1).to(DEVICE, integers),
        numbers.to(torch.bfloat16).float().to(DEVICE),
        torch.stack(previous, 1).to(DEVICE, integers),
    )


def make_weights(dtype: torch.dtype) -> list[torch.Tensor]:
    shapes = ((24, WIDTH), (24,), *ROWS)
    return [draw(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("dtype", "integers"), list(zip(DTYPES, (torch.int64, torch.int32, torch.uint8), strict=True)))
def test_input_layer(dtype: torch.dtype, integers: torch.dtype) -> None:
    batch = make_batch(83, integers)

    def run(impl: str):
        def op(weight: torch.Tensor, bias: torch.Tensor, *tables: torch.Tensor) -> torch.Tensor:
            return input_layer(*batch, COLUMNS, tables, weight, bias, impl=impl)

        return op

    weights = make_weights(dtype)
    truth = evaluate(run("reference"), [x.double() for x in weights])
    budget = evaluate(run("reference"), weights)
    got, again = (evaluate(run("triton"), weights) for _ in range(2))
    check("out", got[0][0], budget[0][0], truth[0][0])
    names = ["dweight", "dbias", *(f"dtable {index}" for index in range(3))]
    for name, *values, repeated in zip(names, got[1], budget[1], truth[1], again[1], strict=True):
        check(name, *values, gradient=True)
        assert torch.equal(values[0], repeated), f"{name} differs between two runs"


@pytest.mark.parametrize("kept", ["categories", "numbers", "previous"])
def test_each_part_alone(kept: str) -> None:
    categories, numbers, previous = make_batch(9, torch.int64)
    parts = {
        "categories": ((categories, None, None), InputColumns(COLUMNS.tables, 0, ()), 32),
        "numbers": ((None, numbers, None), InputColumns((), 7, ()), 7),
        "previous": ((None, None, previous), InputColumns((), 0, COLUMNS.one_hots), 14),
    }
    batch, columns, width = parts[kept]
    _, bias, *tables = make_weights(torch.float32)
    weight = draw(24, width, dtype=torch.float32, seed=9)
    used = tables if kept == "categories" else []
    out = [input_layer(*batch, columns, used, weight, bias, impl=impl) for impl in ("reference", "triton")]
    torch.testing.assert_close(*out, rtol=1e-5, atol=1e-5)


def test_gradients_go_to_their_sinks() -> None:
    from ridgeline.ops.sink import ATTRIBUTE, GradientSink

    batch = make_batch(20, torch.int64)
    weights = [x.requires_grad_() for x in make_weights(torch.float32)]
    out = input_layer(*batch, COLUMNS, weights[2:], weights[0], weights[1], impl="reference")
    expected = torch.autograd.grad(out.square().sum(), weights)
    for weight in weights:
        setattr(weight, ATTRIBUTE, GradientSink(torch.full_like(weight, float("nan"))))
    out = input_layer(*batch, COLUMNS, weights[2:], weights[0], weights[1], impl="triton")
    got = torch.autograd.grad(out.square().sum(), weights, allow_unused=True)
    assert got == (None,) * 5
    for weight, truth in zip(weights, expected, strict=True):
        torch.testing.assert_close(getattr(weight, ATTRIBUTE).target, truth, rtol=1e-4, atol=1e-4)


def test_an_index_out_of_its_table_is_loud() -> None:
    categories, numbers, previous = make_batch(4, torch.int64)
    categories[2, 3] = ROWS[2][0]
    weight, bias, *tables = make_weights(torch.float32)
    out = input_layer(categories, numbers, previous, COLUMNS, tables, weight, bias, impl="triton")
    assert out.isnan().any(1).tolist() == [False, False, True, False]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_CW": torch.ones(24, 5, device=DEVICE)}, rf"weight_CW must have shape \(24, {WIDTH}\), got \(24, 5\)"),
        ({"numbers_NM": torch.ones(4, 6, device=DEVICE)}, r"numbers_NM must have shape \(4, 7\), got \(4, 6\)"),
        ({"categories_NK": torch.ones(4, 5, device=DEVICE)}, "categories_NK must be integers"),
        ({"categories_NK": None, "numbers_NM": None, "previous_NH": None}, "got none of them"),
    ],
)
def test_bad_input(change: dict, message: str) -> None:
    categories, numbers, previous = make_batch(4, torch.int64)
    weight, bias, *tables = make_weights(torch.float32)
    good = {
        "categories_NK": categories,
        "numbers_NM": numbers,
        "previous_NH": previous,
        "columns": COLUMNS,
        "tables": tables,
        "weight_CW": weight,
        "bias_C": bias,
        "impl": "triton",
    }
    with pytest.raises(UnsupportedError, match=message):
        input_layer(**(good | change))
