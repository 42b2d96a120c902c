"""Cross-entropy and the head without logits against fp64, within PyTorch's own error."""

import pytest
import torch

from error_budget import DEVICE, DTYPES, compare
from ridgeline.errors import UnsupportedError
from ridgeline.ops.cross_entropy import IGNORE, cross_entropy, linear_cross_entropy
from ridgeline.ops.known import is_one, one
from ridgeline.ops.sink import ATTRIBUTE, GradientSink, join

pytest.importorskip("triton")


def draw(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2).to(DEVICE, dtype)


def draw_targets(N: int, V: int, ignored: float = 0.2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(N + V)
    targets = torch.randint(0, V, (N,), generator=generator)
    targets[torch.rand(N, generator=generator) < ignored] = IGNORE
    targets[0], targets[-1] = V - 1, 0
    return targets.to(DEVICE)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("N", "V"), [(37, 9), (70, 65), (5, 2500)])
def test_cross_entropy(N: int, V: int, dtype: torch.dtype) -> None:
    targets = draw_targets(N, V)
    inputs = {"logits": draw(N, V, dtype=dtype, seed=1)}
    compare(lambda x, impl: cross_entropy(x, targets, impl=impl), inputs, "triton")


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("V", "bias", "chunk"), [(65, True, 20), (9, False, None), (65, False, 64), (2500, False, 32)])
def test_linear_cross_entropy(V: int, bias: bool, chunk: int | None, dtype: torch.dtype) -> None:
    N, C = 50, 24
    targets = draw_targets(N, V)
    inputs = {
        "hidden": draw(N, C, dtype=dtype, seed=1),
        "weight": draw(V, C, dtype=dtype, seed=2) / 4,
        "bias": draw(V, dtype=dtype, seed=3) if bias else None,
    }

    def op(hidden, weight, bias, impl):
        return linear_cross_entropy(hidden, weight, bias, targets, chunk=chunk, impl=impl)

    compare(op, inputs, "triton")


def test_upstream_gradient_scales() -> None:
    logits, targets = draw(6, 9, dtype=torch.float32, seed=1).requires_grad_(), draw_targets(6, 9)
    grads = [
        torch.autograd.grad(cross_entropy(logits, targets, impl=impl) * -3, [logits])[0]
        for impl in ("reference", "triton")
    ]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("V", [9, 2500])
def test_in_place_padded_and_scaled(V: int) -> None:
    """The raw form writes the gradient over the logits, clears the padding and carries a loss scale."""
    from ridgeline.ops.cross_entropy import triton as kernels

    N, W = 11, V + 7
    x, targets = draw(N, V, dtype=torch.bfloat16, seed=1), draw_targets(N, V)
    reference = x.double().requires_grad_()
    (truth,) = torch.autograd.grad(cross_entropy(reference, targets) * 1024, [reference])
    buffer = torch.full((N, W), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    buffer[:, :V] = x
    counts = torch.full((kernels.COUNTS,), -1, dtype=torch.int32, device=DEVICE)
    losses = torch.full((kernels.loss_partials(N, V, x),), float("nan"), device=DEVICE)
    kernels.count_valid_raw(targets, counts)
    scale = torch.full((1,), 1024.0, device=DEVICE)
    kernels.cross_entropy_raw(buffer, targets, buffer, losses, counts, classes=V, gradient_scale=scale)
    assert int(counts.sum()) == int((targets != IGNORE).sum())
    torch.testing.assert_close(buffer[:, :V].double(), truth, rtol=4e-3, atol=1e-6)
    assert not buffer[:, V:].any()


@pytest.mark.parametrize("V", [9, 2500])
def test_a_class_out_of_range_is_loud(V: int) -> None:
    logits = draw(4, V, dtype=torch.float32, seed=1)
    for wrong in (V, -1):
        targets = torch.tensor([0, wrong, 1, 2], device=DEVICE)
        assert cross_entropy(logits, targets, impl="triton").isnan()


def test_all_ignored_is_nan_as_in_torch() -> None:
    logits, targets = draw(4, 9, dtype=torch.float32, seed=1).requires_grad_(), torch.full((4,), IGNORE, device=DEVICE)
    for impl in ("torch", "triton"):
        loss = cross_entropy(logits, targets, impl=impl)
        assert loss.isnan()
        assert not torch.autograd.grad(loss, [logits])[0].nan_to_num().any()


@pytest.mark.parametrize("chunk", [None, 7])
def test_a_head_without_rows_is_nan_as_in_torch(chunk: int | None) -> None:
    torch.manual_seed(1)
    hidden, weight, bias = (torch.randn(shape, device=DEVICE) for shape in ((0, 8), (9, 8), (9,)))
    targets = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    for impl in ("torch", "triton"):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
        loss = linear_cross_entropy(*leaves, targets, chunk=chunk, impl=impl)
        assert loss.isnan()
        for gradient, leaf in zip(torch.autograd.grad(loss, leaves), leaves, strict=True):
            assert gradient.shape == leaf.shape
            assert not gradient.nan_to_num().any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"targets_N": torch.zeros(3, dtype=torch.int64, device=DEVICE)}, r"targets_N must have shape \(4,\)"),
        ({"targets_N": torch.zeros(4, device=DEVICE)}, "targets_N must be signed integers, got torch.float32"),
        ({"logits_NV": torch.ones(8, 4, device=DEVICE).t()}, "contiguous columns"),
        ({"logits_NV": torch.ones(4, 8, 1, device=DEVICE)}, "must have 2 axes"),
        ({"impl": "fused"}, "unknown implementation"),
    ],
)
def test_bad_input(arguments: dict, message: str) -> None:
    targets = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    good = {"logits_NV": torch.ones(4, 8, device=DEVICE), "targets_N": targets, "impl": "triton"}
    with pytest.raises(UnsupportedError, match=message):
        cross_entropy(**(good | arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weight_VC": torch.ones(5, 7, device=DEVICE)}, r"weight_VC must have shape \(5, 8\), got \(5, 7\)"),
        ({"weight_VC": torch.ones(5, 8, device=DEVICE).half()}, "weight_VC must be torch.float32 like hidden_NC"),
        ({"bias_V": torch.ones(4, device=DEVICE)}, r"bias_V must have shape \(5,\)"),
        ({"chunk": 0}, "chunk must be at least 1, got 0"),
    ],
)
def test_bad_input_of_the_head(arguments: dict, message: str) -> None:
    good = {
        "hidden_NC": torch.ones(4, 8, device=DEVICE),
        "weight_VC": torch.ones(5, 8, device=DEVICE),
        "bias_V": None,
        "targets_N": torch.zeros(4, dtype=torch.int64, device=DEVICE),
        "impl": "triton",
    }
    with pytest.raises(UnsupportedError, match=message):
        linear_cross_entropy(**(good | arguments))


@pytest.mark.gpu
@pytest.mark.parametrize(("N", "V"), [(131072, 37), (8192, 65), (4096, 50257)])
def test_real_shapes(N: int, V: int) -> None:
    targets = draw_targets(N, V)
    compare(
        lambda x, impl: cross_entropy(x, targets, impl=impl),
        {"logits": draw(N, V, dtype=torch.bfloat16, seed=1)},
        "triton",
    )


@pytest.mark.gpu
def test_a_large_head() -> None:
    N, C, V = 4096, 512, 50257
    targets = draw_targets(N, V)
    inputs = {
        "hidden": draw(N, C, dtype=torch.bfloat16, seed=1),
        "weight": draw(V, C, dtype=torch.bfloat16, seed=2) / 16,
    }

    def op(hidden, weight, impl):
        return linear_cross_entropy(hidden, weight, None, targets, chunk=1024, impl=impl)

    compare(op, inputs, "triton")


@pytest.mark.parametrize("chunk", [None, 20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_computed_with_the_loss_is_the_one_computed_after_it(
    dtype: torch.dtype, chunk: int | None
) -> None:
    hidden, weight = draw(50, 24, dtype=dtype, seed=1).requires_grad_(), draw(65, 24, dtype=dtype, seed=2) / 4
    bias, targets = draw(65, dtype=dtype, seed=3).requires_grad_(), draw_targets(50, 65)
    weight.requires_grad_()

    def gradients(start: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loss = linear_cross_entropy(hidden, weight, bias, targets, chunk=chunk, impl="triton")
        return torch.autograd.grad(loss, [hidden, weight, bias], start)

    for known, asked in zip(gradients(one(hidden.device)), gradients(torch.ones((), device=DEVICE)), strict=True):
        assert torch.equal(known, asked)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [8192, 65536])
def test_a_weights_gradient_goes_to_its_sink_beside_the_backward_pass(rows: int) -> None:
    hidden = draw(rows, 256, dtype=torch.bfloat16, seed=1).requires_grad_()
    weight, targets = (draw(65, 256, dtype=torch.bfloat16, seed=2) / 16).requires_grad_(), draw_targets(rows, 65)

    def gradients() -> tuple[torch.Tensor, ...]:
        loss = linear_cross_entropy(hidden, weight, None, targets, impl="triton")
        return torch.autograd.grad(loss, [hidden, weight], one(hidden.device), allow_unused=True)

    expected_hidden, expected_weight = gradients()
    sink = GradientSink(torch.full((65, 256), float("nan"), device=DEVICE))
    setattr(weight, ATTRIBUTE, sink)
    for times in (1, 2):
        found, nothing = gradients()
        join([sink])
        assert nothing is None
        assert torch.equal(found, expected_hidden)
        torch.testing.assert_close(sink.target, times * expected_weight.float(), rtol=0.01, atol=1e-5)


def test_only_one_itself_is_known_to_be_one() -> None:
    known = one(torch.device(DEVICE))
    assert is_one(known.view(()))
    assert is_one(known.view(1))
    assert not is_one(torch.ones((), device=known.device))
    assert not is_one(known.expand(3))
