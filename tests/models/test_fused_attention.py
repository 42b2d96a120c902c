"""Which attention a fused block takes, and how the kernels without a relative term are called, without a card."""

import pytest
import torch

from ridgeline.models import DecoderConfig
from ridgeline.models.fused import attention as fused
from ridgeline.models.fused.choices import attention_missing
from ridgeline.ops.attention import attention_reference, float32, plain, short


def test_kernels_without_dropout_are_not_for_models_with_it() -> None:
    config = DecoderConfig(width=64, heads=2, kv_heads=1, layers=1, context=300, dropout=0.1)
    for impl in ("cuda-plain", "cuda-fp32"):
        assert attention_missing(impl, config, torch.device("cpu"), torch.bfloat16, 300) == "has no dropout"


@pytest.mark.parametrize(
    ("impl", "kernels", "kv_heads", "T"),
    [
        ("cuda-plain", plain, 1, 20),
        ("cuda-fp32", float32, 1, 20),
        ("cuda", plain, 1, 20),
        ("cuda", plain, 2, fused.PLAIN_LEAST),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_reach_the_joint_buffer(
    impl: str, kernels, kv_heads: int, T: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the kernels played by the reference: forward and backward take their tensors in this order.

    At head width 32 the kernels for any window serve short ones too, with a key head for each head if they are not
    too short.
    """
    config = DecoderConfig(width=64, heads=2, kv_heads=kv_heads, layers=1, context=T, positions="learned")

    def forward(q, k, v, out, lse, *, scale):
        out.copy_(attention_reference(q, k, v, None, scale=scale))

    def backward(d_out, q, k, v, out, lse, dq, dk, dv, *, scale, column_sums=None):
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            gradients = torch.autograd.grad(attention_reference(*leaves, None, scale=scale), leaves, d_out)
        for to, x in zip((dq, dk, dv), gradients, strict=True):
            to.copy_(x)
        if column_sums is not None:
            column_sums.copy_(torch.cat([x.sum((0, 1)).flatten() for x in gradients])[None])

    monkeypatch.setattr(kernels, "forward", forward)
    monkeypatch.setattr(kernels, "backward", backward)
    monkeypatch.setattr(plain, "column_sum_rows", lambda *_: 1)
    monkeypatch.setattr(plain, "unsupported", lambda *_: None)
    torch.manual_seed(0)
    shape = fused.Shape(3, T, 0.0, None)
    qkv_NQ, dmixed_NM = torch.randn(3 * T, config.qkv_width), torch.randn(3 * T, 64)
    results = []
    for name in (impl, "reference"):
        step = fused.ATTENTION[name](config, shape, 0)
        mixed_NM = step.forward(qkv_NQ, None)
        results.append((mixed_NM, step.backward(dmixed_NM, bias=bias)))
    (mixed, got), (expected, wanted) = results
    assert torch.allclose(mixed, expected, atol=1e-5)
    assert torch.allclose(got.dqkv_NQ, wanted.dqkv_NQ, atol=1e-5)
    assert (got.partials_PQ is not None) == bias
    if bias:
        assert torch.allclose(got.partials_PQ.sum(0), wanted.partials_PQ.sum(0), atol=1e-4)


def test_few_positions_with_a_key_head_for_each_head_take_the_short_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    config = DecoderConfig(width=64, heads=2, layers=1, context=20, positions="learned")
    taken = []
    monkeypatch.setattr(plain, "unsupported", lambda *_: None)
    monkeypatch.setattr(plain, "forward", lambda *_, **__: None)
    monkeypatch.setattr(short, "workspace_size", lambda *_: 1)
    monkeypatch.setattr(short, "backward", lambda *_, **__: taken.append("short"))
    step = fused.KernelAttention(config, fused.Shape(3, fused.PLAIN_LEAST - 1, 0.0, None), 0)
    rows = 3 * (fused.PLAIN_LEAST - 1)
    step.forward(torch.randn(rows, config.qkv_width), None)
    step.backward(torch.randn(rows, 64), bias=False)
    assert taken == ["short"]
