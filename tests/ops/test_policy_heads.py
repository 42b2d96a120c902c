"""The policy heads' kernels against the reference: losses and every gradient."""

import pytest
import torch
from torch import Tensor

from ridgeline.errors import UnsupportedError
from ridgeline.ops.policy_heads import HeadWeights, policy_heads
from ridgeline.ops.sink import ATTRIBUTE, GradientSink

pytest.importorskip("triton")

SHAPES = {  # width, rows, (inner, classes) of each head
    "one head": (16, 70, ((8, 5),)),
    "two heads": (24, 133, ((12, 5), (14, 3))),
    "three heads, more than a chunk": (40, 65, ((70, 9), (24, 37), (67, 6))),
    "four heads": (136, 40, ((68, 3), (69, 9), (74, 17), (82, 5))),
}


def make(name: str, seed: int = 1, factor: int = 1) -> tuple[Tensor, list[HeadWeights], Tensor]:
    """State, heads and targets whose values every storage dtype can hold."""
    width, rows, shapes = SHAPES[name]
    rows *= factor
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    heads, seen = [], width
    for inner, classes in shapes:
        norm = (1 + draw(seen) / 4, draw(seen) / 4)
        up, down = (draw(inner, seen) / 4, draw(inner)), (draw(classes, inner) / 4, draw(classes))
        heads.append(HeadWeights(*(weight.bfloat16().float() for weight in (*norm, *up, *down))))
        seen += classes
    targets = torch.stack([torch.randint(v, (rows,), generator=generator) for _, v in shapes], 1)
    targets[torch.rand(targets.shape, generator=generator) < 0.2] = -100
    return (draw(rows, width) + 0.5).bfloat16().float(), heads, targets


def run(
    x: Tensor, heads: list[HeadWeights], targets: Tensor, impl: str, dtype: torch.dtype, dlosses: Tensor | None = None
) -> dict[str, Tensor]:
    x = x.to(dtype).requires_grad_()
    heads = [HeadWeights(*(w.detach().to(dtype).requires_grad_() for w in head)) for head in heads]
    losses = policy_heads(x, heads, targets, impl=impl)
    dlosses = torch.ones_like(losses) if dlosses is None else dlosses.to(losses.dtype)
    names = ["x", *(f"{i}.{name}" for i in range(len(heads)) for name in HeadWeights._fields)]
    gradients = torch.autograd.grad(losses, [x, *(w for head in heads for w in head)], dlosses)
    return {"losses": losses.detach(), **dict(zip(names, gradients, strict=True))}


def relative_error(result: Tensor, exact: Tensor) -> float:
    return float((result.double() - exact).norm() / exact.norm())


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", SHAPES)
def test_fp32_equals_the_reference_to_rounding(name: str) -> None:
    problem = make(name)
    dlosses = torch.tensor([1.0, -0.5, 2.0, 0.25])[: len(problem[1])]
    exact = run(*problem, "reference", torch.float64, dlosses)
    fused = run(*problem, "triton", torch.float32, dlosses)
    for key, value in exact.items():
        assert relative_error(fused[key], value) < 3e-6, key


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", SHAPES)
def test_bf16_error_is_at_most_one_and_a_half_times_pytorchs(name: str) -> None:
    """Errors of one kind of gradient, over all heads and several draws: a bias of five numbers alone is luck."""
    squares: dict[str, list[float]] = {}
    for seed in range(3):
        problem = make(name, seed, factor=2)
        exact = run(*problem, "reference", torch.float64)
        for side, impl in enumerate(("triton", "reference")):
            for key, value in run(*problem, impl, torch.bfloat16).items():
                if key == "losses":
                    continue  # below: a mean has one error a head and draw
                squares.setdefault(key.split(".")[-1], [0.0, 0.0])[side] += relative_error(value, exact[key]) ** 2
    for kind, (fused, torch_bf16) in squares.items():
        assert fused**0.5 <= 1.5 * torch_bf16**0.5, kind


@pytest.mark.parametrize("name", ["one head", "two heads"])
def test_bf16_losses_over_many_draws(name: str) -> None:
    """Root mean square over draws, because the error of a single mean may be 0 by luck."""
    squares = [0.0, 0.0]
    for seed in range(16):
        x, heads, targets = make(name, seed)
        exact = policy_heads(x.double(), [HeadWeights(*(w.double() for w in head)) for head in heads], targets)
        low = [HeadWeights(*(w.bfloat16() for w in head)) for head in heads]
        for side, impl in enumerate(("triton", "reference")):
            squares[side] += relative_error(policy_heads(x.bfloat16(), low, targets, impl=impl), exact) ** 2
    assert squares[0] ** 0.5 <= 1.5 * squares[1] ** 0.5


def test_sinks_receive_what_autograd_would() -> None:
    x, heads, targets = make("two heads")
    expected = run(x, heads, targets, "triton", torch.float32)
    sinks = {}
    for index, head in enumerate(heads):
        for name, weight in head._asdict().items():
            sinks[f"{index}.{name}"] = GradientSink(torch.full(weight.shape, float("nan")))
            setattr(weight.requires_grad_(), ATTRIBUTE, sinks[f"{index}.{name}"])
    for repeat in (1, 2):  # written, then added
        for sink in sinks.values():
            sink.begin(add=repeat == 2)
        weights = [weight for head in heads for weight in head]
        losses = policy_heads(x.detach().requires_grad_(), heads, targets, impl="triton")
        assert all(g is None for g in torch.autograd.grad(losses.sum(), weights, allow_unused=True))
        for key, sink in sinks.items():
            torch.testing.assert_close(sink.target, repeat * expected[key], rtol=1e-5, atol=1e-6, msg=key)


def test_two_backward_passes_give_the_same() -> None:
    x, heads, targets = make("two heads")
    x.requires_grad_()
    losses = policy_heads(x, heads, targets, impl="triton")
    first = torch.autograd.grad(losses.sum(), x, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(losses.sum(), x)[0], first)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8])
def test_targets_of_any_integer_dtype_and_no_gradient(dtype: torch.dtype) -> None:
    x, heads, targets = make("three heads, more than a chunk")
    expected = policy_heads(x, heads, targets)
    torch.testing.assert_close(policy_heads(x, heads, targets.to(dtype), impl="triton"), expected)


def test_rows_without_a_target_have_no_part() -> None:
    x, heads, targets = make("two heads")
    targets[:, 1] = -100
    got = run(x, heads, targets, "triton", torch.float32, torch.tensor([1.0, 0.0]))
    assert got["losses"][1].isnan()
    assert not got["x"].isnan().any()
    assert (got["1.up_HS"] == 0).all()
    targets[0, 0] = 5  # a class that does not exist
    assert policy_heads(x, heads, targets, impl="triton")[0].isnan()


def test_bad_input_is_refused() -> None:
    x, heads, targets = make("two heads")
    with pytest.raises(UnsupportedError, match="targets_NK must have shape"):
        policy_heads(x, heads, targets[:, :1])
    with pytest.raises(UnsupportedError, match="must be integers"):
        policy_heads(x, heads, targets.float())
    with pytest.raises(UnsupportedError, match="like x_NC"):
        policy_heads(x.bfloat16(), heads, targets)
    with pytest.raises(UnsupportedError, match="multiple of 8"):
        policy_heads(x[:, :20], [HeadWeights(*(w[..., :20] for w in heads[0][:3]), *heads[0][3:])], targets[:, :1],
                     impl="triton")  # fmt: skip


def test_what_the_hopper_kernel_sums_gives_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Triton's kernel in its place, whose products are put where the other leaves its sums over rows."""
    from ridgeline.ops.policy_heads import hopper, launch
    from ridgeline.ops.policy_heads.function import PolicyHeads
    from ridgeline.ops.policy_heads.layout import CHUNK, Layout

    def stand_in(
        plan: Layout, packed: launch.Packed, heads: list[HeadWeights], *rest: Tensor, eps: float
    ) -> launch.Passed:
        passed = launch.forward(plan, packed, heads, *rest, eps=eps, gradient=True)
        narrow_WX = torch.full((plan.inner, hopper.NARROW), float("nan"))
        products = launch.head_products(plan, passed.q_NW, passed.rest)  # type: ignore[arg-type]
        for place, (side_HX, at, down_VH) in zip(plan.heads, products, strict=True):
            mine, first = narrow_WX[place.at : place.at + place.padded], hopper.side_at(place)
            mine[:, : place.classes] = down_VH[: place.classes, : place.padded].t()
            mine[:, first : first + place.earlier] = side_HX[: place.padded, : place.earlier]
            mine[:, first + place.earlier : first + place.earlier + 2] = side_HX[: place.padded, at : at + 2]
        return passed._replace(rest=narrow_WX)

    monkeypatch.setattr(hopper, "STEP", CHUNK)
    monkeypatch.setattr(hopper, "forward", stand_in)
    x, heads, targets = make("three heads, more than a chunk")
    expected = run(x, heads, targets, "triton", torch.float32)
    flat = [w.detach().requires_grad_() for head in heads for w in head]
    losses = PolicyHeads.apply(x.requires_grad_(), targets, 1e-5, True, *flat)
    gradients = torch.autograd.grad(losses.sum(), [x, *flat])
    torch.testing.assert_close(losses, expected.pop("losses"))
    for key, gradient in zip(expected, gradients, strict=True):
        torch.testing.assert_close(gradient, expected[key], msg=key)
