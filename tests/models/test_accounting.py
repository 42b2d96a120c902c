"""A step's cost and memory against hand-derived figures, PyTorch's FLOP counter, and what autograd really keeps."""

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ridgeline.cost import StepCost
from ridgeline.errors import ConfigError, UnsupportedError
from ridgeline.hardware import Precision
from ridgeline.models import DecoderConfig, LanguageConfig, ModelConfig, PolicyConfig, build
from ridgeline.models.accounting import parameters, step_cost
from ridgeline.models.memory import memory
from ridgeline.models.plan import FUSED, LEAN, LEANEST, PLAIN, PLANS, StoragePlan, find_plan
from ridgeline.ops.dropout import DropoutState
from ridgeline.presets import PRESETS, preset
from ridgeline.presets.hal import RELEASED_TABLES, hal_20m

ATTENTION, MLP, PROJECTIONS = ("attention",), ("mlp_up", "mlp_down"), ("qkv", "out")


def step(name: str, plan: StoragePlan = FUSED, precision: Precision = "bf16", batch: int | None = None) -> StepCost:
    config = preset(name)
    return step_cost(config.model, batch=batch or config.batch, precision=precision, plan=plan)


def part(cost: StepCost, names: tuple[str, ...], *, phase: str | None = None, dense: bool = True) -> float:
    """FLOPs of the ops whose name, without its kind of gradient, is in `names`."""
    return sum(
        (op.dense if dense else op.flops) * op.count
        for op in cost.ops
        if op.name.split(".")[0] in names and phase in (None, op.phase)
    )


def shares(cost: StepCost, dense: bool) -> list[float]:
    parts = [part(cost, names, phase="forward", dense=dense) for names in (ATTENTION, MLP, PROJECTIONS)]
    return [100 * value / sum(parts) for value in parts]


def test_gpt2_c256_takes_271_4_gflop_a_step() -> None:
    cost = step("gpt2-c256")
    assert cost.dense_flops / 1e9 == pytest.approx(271.4, abs=0.05)
    assert part(cost, ATTENTION + MLP + PROJECTIONS, phase="forward") / 6e9 == pytest.approx(15.03, abs=0.005)


def test_fast_c256_takes_160_3_gflop_a_step() -> None:
    cost = step("fast-c256")
    assert cost.dense_flops / 1e9 == pytest.approx(160.3, abs=0.05)
    assert part(cost, ATTENTION + MLP + PROJECTIONS, phase="forward") / 6e9 == pytest.approx(8.86, abs=0.005)
    assert step("gpt2-c256").dense_flops / cost.dense_flops == pytest.approx(1.69, abs=0.005)


def test_attention_is_14_3_percent_of_a_gpt2_block_and_not_4() -> None:
    """The second article's slip of a factor of four: 2 · (2 · 32 · 8 · 256 · 256 · 32) is 2.147 GFLOP, not 0.54."""
    cost = step("gpt2-c256")
    assert part(cost, ATTENTION, phase="forward") / 6 == 2 * (2 * 32 * 8 * 256 * 256 * 32) == 2_147_483_648
    assert shares(cost, dense=True) == pytest.approx([14.3, 57.1, 28.6], abs=0.05)
    assert shares(cost, dense=False)[0] == pytest.approx(7.7, abs=0.05)


def test_shares_of_a_fast_block() -> None:
    cost = step("fast-c256")
    assert shares(cost, dense=True) == pytest.approx([24.2, 48.5, 27.3], abs=0.05)
    assert shares(cost, dense=False)[0] == pytest.approx(13.8, abs=0.05)


def test_an_mlp_of_half_the_width_halves_its_flops() -> None:
    assert part(step("gpt2-c256"), MLP, phase="forward") / 6 == 8_589_934_592
    assert part(step("fast-c256"), MLP, phase="forward") / 6 == 4_294_967_296


def test_fewer_flops_are_not_that_much_less_time() -> None:
    """The second article took shares of FLOPs for shares of time: 1.69× fewer FLOPs ran 1.435× as fast on a T4."""
    gpt, fast = step("gpt2-c256").dense_flops / 0.1013, step("fast-c256").dense_flops / (0.1013 / 1.435)
    assert gpt / 1e12 == pytest.approx(2.68, abs=0.01)
    assert fast / 1e12 == pytest.approx(2.27, abs=0.01)


def test_score_traffic_is_several_times_the_805_megabytes_of_the_second_article() -> None:
    plain = step("gpt2-c256", PLAIN, "fp32")
    traffic = sum(op.bytes * op.count for op in plain.ops if op.name == "attention")
    square = 32 * 8 * 256 * 256 * 4
    assert square == pytest.approx(67.1e6, rel=0.001)
    assert 6 * square == pytest.approx(402.7e6, rel=0.001)  # one tensor a layer; 805 MB is the footprint of two
    assert traffic > 11 * 6 * square > 5 * 805e6
    kept = memory(preset("gpt2-c256").model, batch=32, precision="fp32", plan=PLAIN).saved["attention weights"]
    assert kept == 6 * square


def test_a_steps_activations_are_far_more_than_a_t4s_cache() -> None:
    """The second article's last claim: the tape cannot fit in 4 MB of L2."""
    for plan in PLANS.values():
        assert memory(preset("fast-c256").model, batch=32, precision="fp32", plan=plan).activations > 50 * 4 * 2**20


def test_hal_20m_blocks_take_113_2_plus_7_1_mflop_a_token() -> None:
    cost, tokens = step("hal-20m"), 512 * 256
    assert part(cost, MLP + PROJECTIONS) / tokens / 1e6 == pytest.approx(113.2, abs=0.05)
    assert part(cost, ATTENTION, dense=False) / tokens / 1e6 == pytest.approx(7.1, abs=0.05)
    assert part(cost, ATTENTION, dense=False) / tokens == 6 * 9 * 131_072
    executed = sum(op.executed * op.count for op in cost.ops if op.name == "attention")
    assert executed / tokens / 1e6 == pytest.approx(8.65, abs=0.005)


def test_parameters_as_the_presets_say() -> None:
    assert {name: parameters(preset(name).model) for name in PRESETS if not name.startswith("boxing")} == {
        "gpt2-c256": 4_837_888,
        "fast-c256": 2_559_744,
        "shakespeare-fast": 4_837_888 - 256 * 256 + 6 * 256 * 32,  # a relative table a layer for the learned positions
        "gpt2-124m": 124_439_808,
        "hal-20m": 19_845_065,
        "hal-5m": 5_309_641,
    }
    assert parameters(hal_20m(tables=RELEASED_TABLES).model) == 19_844_861
    assert parameters(hal_20m(shoulder=True, tables=RELEASED_TABLES).model) == 19_983_347


VARIANTS: dict[str, ModelConfig] = {
    "grouped": LanguageConfig(
        decoder=DecoderConfig(layers=2, width=64, heads=4, kv_heads=2, positions="none", context=32), vocabulary=50
    ),
    "odd": LanguageConfig(
        decoder=DecoderConfig(
            layers=1, width=48, heads=4, kv_heads=1, head_width=16, mlp_width=80, norm="rmsnorm", bias=False,
            positions="relative", position_table=40, dropout=0.1, context=24,
        ),
        vocabulary=30,
        tied=True,
    ),
}  # fmt: skip


def meta_batch(config: ModelConfig, B: int, T: int) -> dict[str, Tensor]:
    def indices(*shape: int) -> Tensor:
        return torch.zeros(B, T, *shape, dtype=torch.long, device="meta")

    if isinstance(config, LanguageConfig):
        return {"tokens": indices(), "targets": indices()}
    return {
        "categories": indices(sum(category.columns for category in config.categories)),
        "numbers": torch.zeros(B, T, config.numbers, device="meta"),
        "previous": indices(len(config.heads)),
        "targets": indices(len(config.heads)),
    }


def run_on_meta(config: ModelConfig, B: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Parameters, PyTorch's FLOP count and the bytes that autograd keeps, of one step of the reference model."""
    with torch.device("meta"):
        model = build(config, impl="reference").to(dtype).train()
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in weights:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    dropout = DropoutState(torch.zeros(2, dtype=torch.long, device="meta"))
    with FlopCounterMode(display=False) as counter, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model.loss(meta_batch(config, B, config.decoder.context), dropout).backward()
    nbytes = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    return sum(p.numel() for p in model.parameters()), counter.get_total_flops(), nbytes


@pytest.mark.parametrize("name", [*PRESETS, *VARIANTS])
def test_flops_and_parameters_agree_with_pytorchs_counter(name: str) -> None:
    config = VARIANTS[name] if name in VARIANTS else preset(name).model
    count, flops, _ = run_on_meta(config, 2, torch.float32)
    assert parameters(config) == count
    for plan in PLANS.values():
        assert step_cost(config, batch=2, plan=plan).dense_flops == pytest.approx(flops, rel=0.01)
    assert step_cost(config, batch=2, plan=PLAIN).executed_flops == pytest.approx(flops, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gpt2-c256", "gpt2-124m", "hal-20m", "hal-5m", "grouped"])
def test_saved_activations_of_the_plain_plan_are_what_autograd_keeps(name: str, dtype: torch.dtype) -> None:
    config = VARIANTS[name] if name in VARIANTS else preset(name).model
    kept = run_on_meta(config, 4, dtype)[2]
    precision: Precision = "fp32" if dtype == torch.float32 else "bf16"
    assert memory(config, batch=4, precision=precision, plan=PLAIN).activations == pytest.approx(kept, rel=0.01)


def test_rmsnorm_outside_cuda_keeps_one_tensor_more() -> None:
    """PyTorch composes RMSNorm of four ops on the meta device and keeps x · rstd; its CUDA kernel does not."""
    config = preset("fast-c256").model
    kept = run_on_meta(config, 2, torch.float32)[2]
    extra = 13 * 2 * 256 * 256 * 4
    assert memory(config, batch=2, precision="fp32", plan=PLAIN).activations + extra == pytest.approx(kept, rel=0.01)


def test_fused_memory_by_hand() -> None:
    """HAL's block keeps 4 C + Q + F numbers of 2 bytes a token, F of one, log-sum-exp and statistics.

    The norm before the MLP is never made; each 64 columns leave two numbers for it.
    """
    m = memory(preset("hal-20m").model, batch=512)
    rows = 512 * 256
    block = {name: size for name, size in m.saved.items() if name not in ("inputs", "heads", "indices")}
    outside = rows * (512 * 2 + 8)  # the last norm's input and statistics
    assert sum(block.values()) - outside == 6 * rows * (
        (4 * 512 + 1536 + 2048) * 2 + 2048 + 8 * 4 + 2 * 2 * 4 + 8 * 2 * 4
    )
    assert m.weights == 19_845_065 * 6
    assert m.optimizer == 19_845_065 * 12
    assert m.peak == m.weights + m.optimizer + m.activations + m.workspace
    assert list(m.saved.values()) == sorted(m.saved.values(), reverse=True)


def test_what_is_recomputed_is_not_kept_and_costs_what_it_says() -> None:
    config, tokens = preset("hal-20m").model, 512 * 256
    kept = {plan.name: memory(config, batch=512, plan=plan).activations for plan in PLANS.values()}
    assert kept["plain"] > kept["fused"] > kept["lean"] > kept["leanest"]
    assert kept["fused"] - kept["lean"] == 6 * tokens * (512 * 2 + 8 * 2 * 4 + 2048)
    assert kept["lean"] - kept["leanest"] == 6 * tokens * 2048 * 2
    fused, lean, leanest = (step_cost(config, batch=512, plan=plan) for plan in (FUSED, LEAN, LEANEST))
    passes = {op.name: op.bytes * op.count for op in lean.ops if op.name.endswith(".again")}
    assert passes["gelu.again"] == 6 * tokens * 2 * 2048 * 2
    assert passes["norm.again"] == pytest.approx(12 * tokens * (2 * 512 * 2 + 8), rel=1e-3)
    assert {op.name for op in leanest.ops if op.name.endswith(".again")} == {"norm.again", "mlp_up.again"}
    assert fused.flops == lean.flops == leanest.flops
    assert fused.executed_flops == lean.executed_flops
    assert leanest.executed_flops - fused.executed_flops == 6 * 2 * tokens * 512 * 2048


def test_a_plan_that_fuses_moves_fewer_bytes_in_fewer_kernels() -> None:
    for name in PRESETS:
        plain, fused = step(name, PLAIN, batch=8), step(name, FUSED, batch=8)
        assert fused.bytes < plain.bytes
        assert fused.launches < plain.launches


def test_slopes_are_codes_but_in_whole_rows() -> None:
    config = preset("gpt2-c256").model
    few, many = (memory(config, batch=batch).saved["GELU's input or slope"] / (batch * 256 * 6) for batch in (32, 64))
    assert (few, many) == (2 * 1024, 1024)
    bytes_of = lambda batch, precision: step_cost(config, batch=batch, precision=precision).bytes  # noqa: E731
    assert bytes_of(32, "fp16") == bytes_of(32, "bf16")
    assert bytes_of(64, "fp16") - bytes_of(64, "bf16") == 2 * 6 * 64 * 256 * 1024  # written and read
    half, coded = (memory(config, batch=64, precision=p).saved["GELU's input or slope"] for p in ("fp16", "bf16"))
    assert half - coded == 6 * 64 * 256 * 1024


def test_a_small_head_that_takes_the_last_norm_keeps_neither_its_input_nor_logits() -> None:
    config = preset("gpt2-c256").model
    kept = {precision: memory(config, batch=32, precision=precision).saved for precision in ("bf16", "fp16")}
    assert not {"logits", "head input"} & set(kept["bf16"])
    rows = 32 * 256
    assert (kept["fp16"]["logits"], kept["fp16"]["head input"]) == (rows * 2 * 128 * 2, rows * 256 * 2)


def test_bytes_of_fp32_are_about_twice_those_of_bf16() -> None:
    half, full = step("hal-20m").bytes, step("hal-20m", precision="fp32").bytes
    assert 1.8 < full / half <= 2.1


def test_accumulation_repeats_the_passes_of_a_part_and_keeps_only_its_activations() -> None:
    config = preset("gpt2-124m").model
    whole, parts = step_cost(config, batch=32), step_cost(config, batch=32, accumulation=8)
    assert parts.flops == pytest.approx(whole.flops)
    assert parts.total("flops", "optimizer") == whole.total("flops", "optimizer")
    assert parts.bytes > whole.bytes
    one, eight = memory(config, batch=32), memory(config, batch=32, accumulation=8)
    assert one.activations == 8 * eight.activations
    assert one.weights == eight.weights


def test_gradients_are_read_again_for_their_norm_only_where_no_kernel_writes_them_whole() -> None:
    config, count = preset("gpt2-c256").model, 4_837_888
    read = {
        (plan.name, parts): sum(op.bytes for op in cost.ops if op.name == "grad_norm")
        for plan in (FUSED, PLAIN)
        for parts in (1, 2)
        for cost in [step_cost(config, batch=32, plan=plan, accumulation=parts)]
    }
    assert read == {("fused", 1): 0, ("fused", 2): 4 * count, ("plain", 1): 4 * count, ("plain", 2): 4 * count}


def test_logits_of_a_large_vocabulary_travel_though_none_are_kept() -> None:
    """Written by the product, read and overwritten by the loss, read by both gradients."""
    logits = 2 * 64 * 1024 * 50257
    ops = {(op.name, op.phase): op for op in step("gpt2-124m", batch=64).ops}
    assert ops["head", "forward"].written_bytes == logits
    assert ops["cross_entropy", "forward"].bytes == 2 * logits + 64 * 1024 * (8 + 4)
    for name in ("head.input_gradient", "head.weight_gradient"):
        assert ops[name, "backward"].read_bytes > logits


def test_a_large_vocabulary_keeps_no_logits_when_fused() -> None:
    config = preset("gpt2-124m").model
    assert "logits" not in memory(config, batch=8).saved
    assert memory(config, batch=8, plan=PLAIN).saved["logits"] == 8 * 1024 * 50257 * 4


def test_a_shorter_context_costs_less_attention_a_token() -> None:
    config = preset("hal-20m").model
    full, half = (part(step_cost(config, batch=8, context=T), ATTENTION) / T for T in (256, 128))
    assert half == full / 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": 0}, "batch and accumulation must be at least 1"),
        ({"batch": 8, "context": 512}, "context must be between 1 and the model's 256, got 512"),
        ({"batch": 8, "accumulation": 3}, "accumulation=3 does not divide batch=8"),
    ],
)
def test_impossible_steps(settings: dict[str, int], message: str) -> None:
    for account in (step_cost, memory):
        with pytest.raises(ConfigError, match=message):
            account(preset("gpt2-c256").model, **settings)  # type: ignore[operator]


def test_a_mistyped_plan_is_answered_with_near_ones() -> None:
    with pytest.raises(UnsupportedError, match="unknown plan 'leen'; did you mean lean"):
        find_plan("leen")


def test_policies_without_categories_need_no_gradient_of_their_inputs() -> None:
    model = preset("hal-20m").model
    assert isinstance(model, PolicyConfig)
    names = {op.name for op in step_cost(model, batch=2).ops}
    assert "input.input_gradient" in names
    bare = PolicyConfig(decoder=model.decoder, heads=model.heads, numbers=18)
    assert "input.input_gradient" not in {op.name for op in step_cost(bare, batch=2).ops}
