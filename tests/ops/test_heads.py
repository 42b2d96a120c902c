"""The policy's heads against fp64, within the error of the same sum in plain PyTorch."""

import pytest
import torch

from error_budget import DEVICE, DTYPES, check, evaluate, relative
from ridgeline.errors import UnsupportedError
from ridgeline.ops.heads import Conditioning, HeadWeights, heads_losses

pytest.importorskip("triton")


def draw(*shape: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(DEVICE, dtype)


def make(N: int, C: int, classes: tuple[int, ...], dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor]:
    """State, then the weights of each head; and targets with ignored rows."""
    tensors, width, targets = [draw(N, C, dtype=dtype, seed=0)], C, []
    for k, V in enumerate(classes):
        F, seed = width // 2, 10 * k + 1
        tensors += [
            1 + draw(width, dtype=dtype, seed=seed, scale=0.1),
            draw(width, dtype=dtype, seed=seed + 1, scale=0.1),
            draw(F, width, dtype=dtype, seed=seed + 2, scale=width**-0.5),
            draw(F, dtype=dtype, seed=seed + 3, scale=0.1),
            draw(V, F, dtype=dtype, seed=seed + 4, scale=F**-0.5),
            draw(V, dtype=dtype, seed=seed + 5, scale=0.1),
        ]
        column = torch.randint(0, V, (N,), generator=torch.Generator().manual_seed(k))
        column[k :: 5 + k] = -100
        targets.append(column)
        width += V
    return tensors, torch.stack(targets, 1).to(DEVICE, torch.int8)


def run(classes: tuple[int, ...], targets: torch.Tensor, conditioning: Conditioning, impl: str):
    def op(state: torch.Tensor, *flat: torch.Tensor) -> torch.Tensor:
        heads = [HeadWeights(*flat[6 * k : 6 * k + 6]) for k in range(len(classes))]
        return heads_losses(state, heads, targets, conditioning=conditioning, impl=impl)

    return op


def compare_with_fp64(N: int, C: int, classes: tuple[int, ...], conditioning: Conditioning, dtype: torch.dtype) -> None:
    tensors, targets = make(N, C, classes, dtype)
    truth = evaluate(run(classes, targets, conditioning, "reference"), [x.double() for x in tensors])
    budget = evaluate(run(classes, targets, conditioning, "reference"), tensors)
    got, again = (evaluate(run(classes, targets, conditioning, "triton"), tensors) for _ in range(2))
    names = ["dstate", *(f"d{field} of head {k}" for k in range(len(classes)) for field in HeadWeights._fields)]
    # means over rows whose logits were rounded: a quarter of that rounding for luck, as there are so few of them
    allowed = 1.5 * relative(budget[0][0], truth[0][0]) + torch.finfo(dtype).eps / 4
    assert relative(got[0][0], truth[0][0]) <= allowed
    for name, *values, repeated in zip(names, got[1], budget[1], truth[1], again[1], strict=True):
        check(name, *values, gradient=True)
        assert torch.equal(values[0], repeated), f"{name} differs between two runs"


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("conditioning", ["logits", "classes"])
def test_three_unaligned_heads(conditioning: Conditioning, dtype: torch.dtype) -> None:
    compare_with_fp64(46, 20, (9, 37, 6), conditioning, dtype)


def test_one_head() -> None:
    compare_with_fp64(30, 16, (5,), "logits", torch.float32)


def test_matrix_gradients_go_to_their_sinks() -> None:
    from ridgeline.ops.sink import ATTRIBUTE, GradientSink

    classes = (9, 6)
    tensors, targets = make(40, 20, classes, torch.float32)
    leaves = [x.requires_grad_() for x in tensors]
    expected = torch.autograd.grad(run(classes, targets, "logits", "reference")(*leaves).sum(), leaves)
    matrices = [index for index, leaf in enumerate(leaves) if index and leaf.dim() == 2]
    for index in matrices:
        setattr(leaves[index], ATTRIBUTE, GradientSink(torch.full_like(leaves[index], float("nan"))))
    got = torch.autograd.grad(run(classes, targets, "logits", "triton")(*leaves).sum(), leaves, allow_unused=True)
    for index, truth in enumerate(expected):
        gradient = getattr(leaves[index], ATTRIBUTE).target if index in matrices else got[index]
        assert (got[index] is None) == (index in matrices)
        torch.testing.assert_close(gradient, truth, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"conditioning": "samples"}, "conditioning must be logits or classes"),
        ({"targets_NK": torch.zeros(8, 1, dtype=torch.int64, device=DEVICE)}, r"targets_NK must have shape \(8, 2\)"),
        ({"state_NC": torch.ones(8, 12, device=DEVICE)}, r"norm_C of head 0 must have shape \(12,\), got \(20,\)"),
        ({"state_NC": torch.ones(8, 20, device=DEVICE).half()}, "norm_C of head 0 must be torch.float16"),
    ],
)
def test_bad_input(change: dict, message: str) -> None:
    tensors, targets = make(8, 20, (9, 6), torch.float32)
    heads = [HeadWeights(*tensors[1 + 6 * k : 7 + 6 * k]) for k in range(2)]
    good = {"state_NC": tensors[0], "heads": heads, "targets_NK": targets, "impl": "triton"}
    with pytest.raises(UnsupportedError, match=message):
        heads_losses(**(good | change))


@pytest.mark.gpu
def test_real_shapes() -> None:
    compare_with_fp64(131072, 512, (9, 37, 6), "logits", torch.bfloat16)
