"""The norms' kernels against fp64, within PyTorch's own error."""

import pytest
import torch

from error_budget import DEVICE, DTYPES, compare
from ridgeline.errors import UnsupportedError
from ridgeline.ops.dropout import DropoutState
from ridgeline.ops.norm import NormKind, available, norm, norm_reference, residual_norm

pytest.importorskip("triton")
DROPOUT = DropoutState(torch.tensor([2**40 + 17, 5], device=DEVICE), sample_offset=3)


def draw(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2 + 0.5).to(DEVICE, dtype)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("shape", [(3, 7, 36), (2, 5, 64), (11, 130)])
def test_norm_alone(shape: tuple[int, ...], kind: NormKind, dtype: torch.dtype) -> None:
    C = shape[-1]
    inputs = {"x": draw(*shape, dtype=dtype, seed=1), "weight": draw(C, dtype=dtype, seed=2)}
    if kind == "layernorm":
        inputs["bias"] = draw(C, dtype=dtype, seed=3)
    compare(lambda *x, impl: norm(*x, kind=kind, impl=impl), inputs, "triton")


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "residual", "bias", "branch_bias", "p"),
    [
        ("layernorm", True, True, True, 0.2),
        ("layernorm", True, True, False, 0.0),
        ("layernorm", False, False, True, 0.2),
        ("rmsnorm", True, False, False, 0.2),
        ("rmsnorm", True, False, True, 0.0),
    ],
)
def test_residual_norm(
    kind: NormKind, residual: bool, bias: bool, branch_bias: bool, p: float, dtype: torch.dtype
) -> None:
    B, T, C = 3, 7, 36
    inputs = {
        "branch": draw(B, T, C, dtype=dtype, seed=1),
        "residual": draw(B, T, C, dtype=dtype, seed=2) if residual else None,
        "weight": draw(C, dtype=dtype, seed=3),
        "bias": draw(C, dtype=dtype, seed=4) if bias else None,
        "branch_bias": draw(C, dtype=dtype, seed=5) if branch_bias else None,
    }

    def op(branch, residual, weight, bias, branch_bias, impl):
        return residual_norm(
            branch,
            residual,
            weight,
            bias,
            kind=kind,
            branch_bias_C=branch_bias,
            p=p,
            dropout=DROPOUT,
            site=9,
            impl=impl,
        )

    compare(op, inputs, "triton")


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_padded_rows_inside_a_wider_buffer(kind: NormKind) -> None:
    """13 numbers in rows of 16 inside rows of 32: padding is not read, h's becomes 0; dr goes back to 8 columns."""
    from ridgeline.ops._triton.columns import column_sums_raw
    from ridgeline.ops.norm.triton import norm_backward_raw, norm_forward_raw, partial_rows

    N, C, W, OUT = 21, 13, 16, 8

    def holes(*shape: int) -> torch.Tensor:
        return torch.full(shape, float("nan"), device=DEVICE)

    joint, h, mean, rstd = holes(N, 32), holes(N, 24), holes(N), holes(N)
    joint[:, :C] = draw(N, C, dtype=torch.float32, seed=1)
    weight, bias = draw(C, dtype=torch.float32, seed=2), draw(C, dtype=torch.float32, seed=3)
    dh, dresidual = holes(N, W), draw(N, OUT, dtype=torch.float32, seed=5)
    dh[:, :C] = draw(N, C, dtype=torch.float32, seed=4)
    inputs = [x.double().requires_grad_() for x in (joint[:, :C], weight, bias)]
    truth = norm_reference(*inputs, eps=1e-5, kind=kind)
    dx, dweight, dbias = torch.autograd.grad(truth, inputs, dh[:, :C].double())
    mean_N = mean if kind == "layernorm" else None
    norm_forward_raw(joint[:, :W], weight, bias, h[:, :W], mean_N, rstd, eps=1e-5, kind=kind, columns=C)
    torch.testing.assert_close(h[:, :C].double(), truth.detach(), rtol=1e-5, atol=1e-5)
    assert not h[:, C:W].any()
    assert h[:, W:].isnan().all()
    partials, sums = holes(partial_rows(N, W, joint), 2 * C), holes(2 * C)
    norm_backward_raw(
        dh, joint[:, :W], weight, mean_N, rstd, partials,
        kind=kind, bias=True, columns=C, dresidual_NC=dresidual, dr_NC=(dr := holes(N, OUT)),
    )  # fmt: skip
    column_sums_raw(partials, sums, accumulate=False)
    torch.testing.assert_close(dr.double(), dresidual + dx[:, :OUT], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums.double(), torch.cat([dweight, dbias]), rtol=1e-5, atol=1e-5)


def test_norm_of_the_reference_is_torchs() -> None:
    x, weight, bias = (draw(*shape, dtype=torch.float64, seed=1) for shape in ((5, 12), (12,), (12,)))
    expected = torch.nn.functional.layer_norm(x, (12,), weight, bias, 1e-5)
    torch.testing.assert_close(norm_reference(x, weight, bias, eps=1e-5, kind="layernorm"), expected)
    expected = torch.nn.functional.rms_norm(x, (12,), weight, 1e-5)
    torch.testing.assert_close(norm_reference(x, weight, None, eps=1e-5, kind="rmsnorm"), expected)


def test_a_large_mean_does_not_cancel() -> None:
    x = draw(4, 64, dtype=torch.float32, seed=1) + 1000
    ones, zeros = torch.ones(64, device=DEVICE), torch.zeros(64, device=DEVICE)
    truth = norm_reference(x.double(), ones, zeros, eps=1e-5, kind="layernorm")
    got = norm(x, ones, zeros, impl="triton")
    assert (got - truth).abs().max() < 1e-3


def test_gradients_only_of_the_normalised_output() -> None:
    """r may be unused (the last block): its gradient then counts as zero."""
    x = draw(2, 4, 8, dtype=torch.float32, seed=1).requires_grad_()
    weight = torch.ones(8, device=DEVICE)
    weighting = draw(2, 4, 8, dtype=torch.float32, seed=2)
    grads = []
    for impl in ("reference", "triton"):
        _, h = residual_norm(x, None, weight, None, kind="rmsnorm", impl=impl)
        grads += torch.autograd.grad((h * weighting).sum(), [x])
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"impl": "tritn"}, "did you mean"),
        ({"kind": "batchnorm"}, "kind must be layernorm or rmsnorm"),
        ({"weight_C": torch.ones(7, device=DEVICE)}, r"weight_C must have shape \(8,\), got \(7,\)"),
        ({"x": torch.ones(8, 4, device=DEVICE).t()}, "x must be contiguous, got strides"),
        ({"x": torch.ones(4, 8, dtype=torch.int32, device=DEVICE)}, "x must be float32, bfloat16 or float16"),
        ({"weight_C": torch.ones(8, device="meta")}, "weight_C must be on"),
    ],
)
def test_bad_input(arguments: dict, message: str) -> None:
    good = {"x": torch.ones(4, 8, device=DEVICE), "weight_C": torch.ones(8, device=DEVICE), "impl": "triton"}
    with pytest.raises(UnsupportedError, match=message):
        norm(**(good | arguments))


def test_dropout_wants_a_width_of_fours() -> None:
    x, weight = torch.ones(2, 3, 6, device=DEVICE), torch.ones(6, device=DEVICE)
    with pytest.raises(UnsupportedError, match="multiple of 4, got 6"):
        residual_norm(x, None, weight, p=0.1, dropout=DROPOUT)


def test_triton_says_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "need a CUDA card" in (available("triton", torch.device("cpu")) or "")
    with pytest.raises(UnsupportedError, match="need a CUDA card, got device cpu"):
        norm(torch.ones(2, 4), torch.ones(4), impl="triton")
    assert available("torch", torch.device("cpu")) is None


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(512, 256, 512), (32, 256, 256), (4, 2048, 1024), (512, 128, 256)])
@pytest.mark.parametrize("p", [0.0, 0.2])
def test_real_shapes(shape: tuple[int, int, int], p: float) -> None:
    B, T, C = shape
    inputs = {
        "branch": draw(B, T, C, dtype=torch.bfloat16, seed=1),
        "residual": draw(B, T, C, dtype=torch.bfloat16, seed=2),
        "weight": draw(C, dtype=torch.bfloat16, seed=3),
        "bias": draw(C, dtype=torch.bfloat16, seed=4),
        "branch_bias": draw(C, dtype=torch.bfloat16, seed=5),
    }

    def op(branch, residual, weight, bias, branch_bias, impl):
        return residual_norm(branch, residual, weight, bias, branch_bias_C=branch_bias, p=p, dropout=DROPOUT, impl=impl)

    compare(op, inputs, "triton")
