"""The formula of each op against figures worked out by hand."""

import pytest

from ridgeline.cost import storage
from ridgeline.ops.activation.cost import gelu_flops, gelu_pass
from ridgeline.ops.attention.cost import AttentionShape, attention_fused, attention_whole, square_passes
from ridgeline.ops.cross_entropy.cost import cross_entropy
from ridgeline.ops.dropout.cost import dropout_pass
from ridgeline.ops.embedding.cost import embedding, positions
from ridgeline.ops.linear.cost import (
    add_pass,
    linear_forward,
    linear_input_gradient,
    linear_weight_gradient,
)
from ridgeline.ops.norm.cost import norm_backward, norm_forward, statistics
from ridgeline.ops.optimizer.cost import accumulate, adamw, gradient_norm

BF16, FP32 = storage("bf16"), storage("fp32")
HAL = AttentionShape(B=512, T=256, H=8, G=8, D=64, relative=True, dropout=True)
GPT = AttentionShape(B=32, T=256, H=8, G=8, D=32)
TOKENS = 131_072


def test_hals_attention_products_are_131072_flops_a_token_each() -> None:
    """Causal half; QKᵀ, QEᵀ, PV forward, six products backward, and two repeated."""
    assert HAL.product / TOKENS == 131_072
    forward, backward = attention_fused(HAL, store=BF16)
    assert forward.flops == 3 * HAL.product
    assert backward.flops == 6 * HAL.product
    assert backward.executed == 8 * HAL.product
    assert (forward.dense + backward.dense) == 18 * HAL.product


def test_fused_attention_moves_only_its_inputs_and_outputs() -> None:
    """0.54 GB forward and 1.07 backward at HAL's shapes, beside the small table, statistics and second gradient."""
    forward, backward = attention_fused(HAL, store=BF16)
    qkv, mixed, lse = TOKENS * 1536 * 2, TOKENS * 512 * 2, TOKENS * 8 * 4
    assert forward.bytes == qkv + mixed + lse + 256 * 64 * 2
    assert backward.bytes == 2 * qkv + 2 * mixed + lse + 256 * 64 * (2 + 4)
    assert forward.bytes == pytest.approx(0.54e9, rel=0.01)
    assert backward.bytes == pytest.approx(1.07e9, rel=0.01)


def test_one_kv_head_saves_bytes_of_attention_and_no_flops() -> None:
    mqa = AttentionShape(B=32, T=256, H=8, G=1, D=32)
    for many, one in zip(attention_fused(GPT, store=BF16), attention_fused(mqa, store=BF16), strict=True):
        assert one.flops == many.flops
        assert one.bytes < many.bytes
    assert mqa.qkv / GPT.qkv == 320 / 768  # the joint projection shrinks by 58.3 %, keys and values by 87.5 %
    assert (mqa.qkv - mqa.mixed) / (GPT.qkv - GPT.mixed) == 1 / 8


def test_a_score_tensor_of_the_second_article_is_67_megabytes() -> None:
    assert GPT.scores * 4 == 67_108_864
    assert attention_whole(GPT, store=FP32)[0].executed == 2_147_483_648  # and a layer's products 2.147 GFLOP


def test_whole_scores_travel_eleven_times_a_step_not_twice() -> None:
    """The article's 805 MB is one write and one read of six layers' tensors; three kernels forward, five backward."""
    assert square_passes(GPT) == (4, 7)
    square = GPT.scores * 4
    forward, backward = attention_whole(GPT, store=FP32, count=6)
    assert forward.bytes == 4 * square + (GPT.qkv + GPT.mixed) * 4
    assert backward.bytes == 7 * square + (2 * GPT.qkv + 2 * GPT.mixed) * 4
    assert 6 * (4 + 7) * square > 5 * 805e6


def test_relative_term_and_dropout_each_add_two_passes_each_way() -> None:
    assert square_passes(HAL) == (8, 11)
    square, mask = HAL.scores * 2, HAL.scores
    forward, backward = attention_whole(HAL, store=BF16)
    table = 256 * 64
    assert forward.bytes == 8 * square + mask + (HAL.qkv + 2 * HAL.mixed + table) * 2
    assert backward.bytes == 11 * square + mask + (2 * HAL.qkv + 3 * HAL.mixed + table) * 2 + table * 4
    assert forward.executed == forward.dense == 2 * forward.flops


def test_linear_layer() -> None:
    N, K, M = 8192, 256, 1024
    forward = linear_forward("up", N, K, M, bias=True, store=BF16)
    assert forward.flops == 2 * N * K * M == 4_294_967_296
    assert forward.read_bytes == 2 * (N * K + K * M + M)
    assert forward.written_bytes == 2 * N * M
    both = linear_forward("up", N, K, M, bias=True, store=BF16, reads=1, writes=2, element_flops=10)
    assert both.bytes - forward.bytes == 2 * 2 * N * M
    assert both.vector_flops == N * M * 12
    dgrad = linear_input_gradient("up", N, K, M, store=BF16, reads=1)
    assert (dgrad.flops, dgrad.bytes) == (forward.flops, 2 * (N * M + M * K + 2 * N * K))
    coded = linear_forward("up", N, K, M, bias=True, store=BF16, kept=1)
    assert coded.written_bytes - forward.written_bytes == N * M
    assert dgrad.bytes - linear_input_gradient("up", N, K, M, store=BF16, kept=1).bytes == N * K
    wgrad = linear_weight_gradient("up", N, K, M, bias=True, store=BF16)
    assert (wgrad.flops, wgrad.read_bytes, wgrad.written_bytes) == (forward.flops, 2 * N * (K + M), 4 * M * (K + 1))
    assert [cost.phase for cost in (forward, dgrad, wgrad)] == ["forward", "backward", "backward"]


def test_norms_at_hals_width_have_the_measured_floors() -> None:
    """63 µs for one read and one write, 126 joined with the residual, at 4.25 TB/s."""
    alone = norm_forward("norm", TOKENS, 512, kind="layernorm", bias=True, store=BF16)
    joined = norm_forward("norm", TOKENS, 512, kind="layernorm", bias=True, store=BF16, joined=True)
    assert alone.bytes / 4.25e12 == pytest.approx(63e-6, rel=0.01)
    assert joined.bytes / 4.25e12 == pytest.approx(126e-6, rel=0.01)
    assert joined.bytes - alone.bytes == 2 * TOKENS * 512 * 2
    assert (statistics("layernorm"), statistics("rmsnorm")) == (2, 1)


def test_norm_backward_passes() -> None:
    def passes(residual: bool, branch: bool) -> float:
        cost = norm_backward(
            "norm", TOKENS, 512, kind="rmsnorm", bias=False, store=BF16, residual=residual, branch=branch
        )
        return (cost.bytes - TOKENS * 4 - 512 * (2 + 4)) / (TOKENS * 512 * 2)

    assert [passes(False, False), passes(True, False), passes(True, True)] == [3, 4, 5]


def test_passes_of_their_own() -> None:
    for forward, backward, passes in (
        (*gelu_pass("gelu", 100, 8, "exact", store=BF16), (2, 3)),
        (*add_pass("residual", 100, 8, store=BF16), (3, 3)),
    ):
        assert (forward.bytes, backward.bytes) == (passes[0] * 1600, passes[1] * 1600)
    forward, backward = dropout_pass("dropout", 800, store=BF16)
    assert forward.bytes == backward.bytes == 2 * 1600 + 800
    assert gelu_flops("exact") == 50  # 25 instructions, 230 µs of an H200 on 268 M elements
    assert gelu_flops("exact") * 131_072 * 2048 / 66.9e12 == pytest.approx(200e-6, rel=0.01)


def test_cross_entropy_forms() -> None:
    def moved(form: str, store: object) -> tuple[float, float]:
        forward, backward = cross_entropy("loss", 1000, 65, form=form, store=store)  # type: ignore[arg-type]
        return forward.bytes - 1000 * 12, backward.bytes

    logits = 65_000
    assert moved("fused", BF16) == (4 * logits, 0)
    assert moved("plain", FP32) == (8 * logits, 16 * logits)
    assert moved("plain", BF16) == (14 * logits, 22 * logits)


def test_embedding_fetches_a_row_once_and_writes_the_whole_tables_gradient() -> None:
    forward, backward = embedding("embedding", 8192, 65, 256, store=BF16)
    assert forward.read_bytes == 65 * 256 * 2 + 8192 * 8
    assert backward.written_bytes == 65 * 256 * 4
    assert embedding("embedding", 10, 50257, 768, store=BF16)[0].read_bytes == 10 * 768 * 2 + 80
    joined, backward = positions(32, 256, 256, 256, store=BF16, joined=True)
    assert (joined.bytes, joined.launches) == (256 * 256 * 2, 0)
    assert positions(32, 256, 256, 256, store=BF16, joined=False)[0].bytes == 256 * 256 * 2 + 2 * 8192 * 256 * 2


def test_an_update_costs_34_bytes_a_parameter_with_16_bit_copies() -> None:
    assert gradient_norm(1000, store=BF16).bytes + adamw(1000, store=BF16).bytes == 34_000
    assert gradient_norm(1000, store=BF16, rides=True).bytes == 0
    assert adamw(1000, store=FP32).bytes == 28_000
    assert adamw(1000, store=FP32, clip_pass=True).bytes == 36_000
    assert accumulate(1000, 8, store=BF16).bytes * accumulate(1000, 8, store=BF16).count == 28_000


def test_a_special_function_takes_the_place_of_eight_instructions_of_two_flops() -> None:
    assert gelu_flops("tanh") == (8 + 6) * 2
    assert adamw(1000, store=BF16).vector_flops == 1000 * (2 * 8 + 14) * 2
