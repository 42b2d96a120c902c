"""Every public op refuses what it does not take, whichever argument it is, with what was expected and what came."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.errors import UnsupportedError
from ridgeline.ops.activation import bias_gelu
from ridgeline.ops.attention import attention
from ridgeline.ops.cross_entropy import cross_entropy, linear_cross_entropy
from ridgeline.ops.dropout import DropoutState, dropout
from ridgeline.ops.embedding import embedding
from ridgeline.ops.heads import HeadWeights, heads_losses
from ridgeline.ops.inputs import InputColumns, input_layer
from ridgeline.ops.linear import Masks, linear
from ridgeline.ops.mlp import Mlp, Norm, mlp_half, norm_project, project_join
from ridgeline.ops.norm import norm, residual_norm
from ridgeline.ops.policy_heads import policy_heads
from ridgeline.ops.policy_heads.reference import HeadWeights as PolicyHead

COLUMNS = InputColumns(tables=(0, 1), numbers=3, one_hots=((0, 9),))
EPS = 1e-5


@dataclass(frozen=True)
class Op:
    call: Callable[..., Any]
    arguments: dict[str, tuple[int, ...]]  # shapes; integers where the name says so
    free: frozenset[str] = field(default=frozenset())  # last axes that may be longer
    integers: tuple[str, ...] = ()


def state() -> DropoutState:
    return DropoutState(torch.tensor([1, 2]))


HEAD = {"norm": (8,), "shift": (8,), "up": (4, 8), "up_bias": (4,), "down": (5, 4), "down_bias": (5,)}
OPS = {
    "bias_gelu": Op(bias_gelu, {"x": (3, 8), "bias": (8,)}),
    "dropout": Op(lambda x: dropout(x, 0.2, state(), 3), {"x": (2, 3, 8)}, frozenset("x")),
    "norm": Op(norm, {"x": (3, 8), "weight": (8,), "bias": (8,)}),
    "residual_norm": Op(residual_norm, {"branch": (2, 3, 8), "residual": (2, 3, 8), "weight": (8,), "bias": (8,)}),
    "attention": Op(
        lambda *x: attention(*x, scale=0.3), {"q": (2, 5, 4, 8), "k": (2, 5, 2, 8), "v": (2, 5, 2, 8), "table": (6, 8)}
    ),
    "embedding": Op(
        embedding, {"ids": (2, 5), "table": (9, 8), "positions": (6, 8)}, frozenset({"ids"}), integers=("ids",)
    ),
    "cross_entropy": Op(
        cross_entropy, {"logits": (4, 7), "targets": (4,)}, frozenset({"logits"}), integers=("targets",)
    ),
    "linear_cross_entropy": Op(
        linear_cross_entropy, {"hidden": (4, 8), "weight": (7, 8), "bias": (7,), "targets": (4,)}, integers=("targets",)
    ),
    "heads_losses": Op(
        lambda x, targets, *head: heads_losses(x, [HeadWeights(*head)], targets),
        {"state": (6, 8), "targets": (6, 1), **HEAD},
        integers=("targets",),
    ),
    "policy_heads": Op(
        lambda x, targets, *head: policy_heads(x, [PolicyHead(*head)], targets),
        {"x": (6, 8), "targets": (6, 1), **HEAD},
        integers=("targets",),
    ),
    "input_layer": Op(
        lambda categories, numbers, previous, first, second, weight, bias: input_layer(
            categories, numbers, previous, COLUMNS, [first, second], weight, bias
        ),
        {"categories": (4, 2), "numbers": (4, 3), "previous": (4, 1), "first": (5, 4), "second": (6, 6)}
        | {"weight": (8, 22), "bias": (8,)},
        frozenset({"previous"}),
        integers=("categories", "previous"),
    ),
    "linear": Op(linear, {"x": (2, 3, 8), "weight": (6, 8), "bias": (6,)}),
    "mlp_half": Op(
        lambda r, a, b, up, up_bias, down, down_bias, c, d: mlp_half(
            r,
            Norm("layernorm", EPS, a, b),
            Mlp(up, up_bias, down, down_bias, "exact"),
            Norm("layernorm", EPS, c, d),
        ),
        {"r": (6, 8), "scale": (8,), "shift": (8,), "up": (16, 8), "up_bias": (16,), "down": (8, 16), "down_bias": (8,)}
        | {"next_scale": (8,), "next_shift": (8,)},
    ),
    "project_join": Op(
        lambda x, weight, bias, residual, a, b: project_join(
            x, weight, bias, residual, Norm("layernorm", EPS, a, b)
        ),
        {"x": (6, 16), "weight": (8, 16), "bias": (8,), "residual": (6, 8), "scale": (8,), "shift": (8,)},
    ),
    "norm_project": Op(
        lambda r, a, b, weight, bias: norm_project(r, Norm("layernorm", EPS, a, b), weight, bias),
        {"r": (6, 8), "scale": (8,), "shift": (8,), "weight": (16, 8), "bias": (16,)},
    ),
}  # fmt: skip


def made(op: Op) -> dict[str, Tensor]:
    return {
        name: torch.zeros(shape, dtype=torch.int64) if name in op.integers else torch.randn(shape)
        for name, shape in op.arguments.items()
    }


def mistakes(op: Op, name: str, x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """One argument made wrong in each way."""
    yield "a scalar", x.flatten()[0]
    yield "an axis too many, of one", x[None].expand(2, *x.shape) if x.dim() == 1 else x.flatten()
    if len(op.arguments) > 1:
        yield "another device", x.to("meta")
    if name in op.integers:
        yield "floats", x.float()
        yield "truths", x.bool()
    else:
        for dtype in (torch.int64, torch.bool, torch.complex64):
            yield str(dtype), x.to(dtype)
    if name not in op.free:
        yield "too long", torch.cat([x, x[..., :1]], -1)
        if x.shape[-1] > 1:
            yield "one, that would be broadcast", x[..., :1]


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_every_argument_is_refused_where_it_does_not_fit(op: Op) -> None:
    op.call(*made(op).values())
    for name in op.arguments:
        right = made(op)
        for what, wrong in mistakes(op, name, right[name]):
            try:
                op.call(*(right | {name: wrong}).values())
            except (ValueError, UnsupportedError) as error:
                told = str(error)
            else:
                told = "nothing"
            assert re.search("must .* got ", told), f"{name} as {what}: {told}"


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_all_arguments_alike_in_a_dtype_that_is_none(op: Op, dtype: torch.dtype) -> None:
    arguments = {name: x if name in op.integers else x.to(dtype) for name, x in made(op).items()}
    with pytest.raises((ValueError, UnsupportedError), match=rf"must .* got .*{dtype}"):
        op.call(*arguments.values())


P_ON = {
    "attention": lambda p, s: attention(*made(OPS["attention"]).values(), scale=0.3, p=p, dropout=s),
    "dropout": lambda p, s: dropout(torch.randn(2, 3, 8), p, s, 0),
    "embedding": lambda p, s: embedding(*made(OPS["embedding"]).values(), p=p, dropout=s),
    "residual_norm": lambda p, s: residual_norm(*made(OPS["residual_norm"]).values(), p=p, dropout=s),
    "linear": lambda p, s: linear(
        torch.randn(2, 3, 8), torch.randn(4, 8), residual=torch.randn(2, 3, 4), masks=Masks(p, s, 0, 3)
    ),
    "project_join": lambda p, s: project_join(
        *list(made(OPS["project_join"]).values())[:4],
        Norm("layernorm", EPS, torch.ones(8), torch.ones(8)),
        masks=Masks(p, s, 0, 3),
    ),
}


@pytest.mark.parametrize("call", P_ON.values(), ids=P_ON)
def test_what_dropout_draws_from_is_checked_everywhere(call: Callable[[float, DropoutState], Any]) -> None:
    for p in (0.0, 0.3, 1 - 2.0**-15):
        call(p, state())
    for p in (-0.1, 1 - 2.0**-16, 1.0, 2.0, float("nan")):
        with pytest.raises(UnsupportedError, match=r"p must be from 0 to .*, got"):
            call(p, state())
    for seed_step in (
        torch.tensor([1.0, 2.0]),
        torch.tensor([1]),
        torch.tensor([1, 2]).int(),
        torch.ones(4).long()[::2],
    ):
        with pytest.raises(UnsupportedError, match=r"seed_step must be int64\[2\], contiguous, on cpu, got"):
            call(0.3, DropoutState(seed_step))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_attentions_scale_is_a_positive_number(scale: float) -> None:
    with pytest.raises(UnsupportedError, match="scale must be positive and finite"):
        attention(*made(OPS["attention"]).values(), scale=scale)


@pytest.mark.parametrize("name", ["linear_cross_entropy", "heads_losses", "input_layer"])
def test_weights_share_a_dtype_unless_autocast_casts_them(name: str) -> None:
    op = OPS[name]
    mixed = made(op)
    mixed["bias" if "bias" in mixed else "up"] = mixed["bias" if "bias" in mixed else "up"].bfloat16()
    with pytest.raises(UnsupportedError, match=r"must be torch\.float32 like .* got torch\.bfloat16"):
        op.call(*mixed.values())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.isfinite(op.call(*mixed.values())).all()


def test_columns_of_an_input_layer_are_there() -> None:
    arguments = made(OPS["input_layer"])
    with pytest.raises(UnsupportedError, match="columns take numbers_NM, got None"):
        OPS["input_layer"].call(*(arguments | {"numbers": None}).values())
    layer = (arguments["categories"], arguments["numbers"], arguments["previous"])
    rest = ([arguments["first"], arguments["second"]], arguments["weight"], arguments["bias"])
    with pytest.raises(UnsupportedError, match=r"name tables \(0, 2\), got 2 tables"):
        input_layer(*layer, COLUMNS._replace(tables=(0, 2)), *rest)
    with pytest.raises(UnsupportedError, match=r"name columns \[1\] of previous_NH"):
        input_layer(*layer, COLUMNS._replace(one_hots=((1, 9),)), *rest)
