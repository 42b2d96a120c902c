"""Mapping kernels to ops: every product of a real step on the CPU, what torch.compile names, and what nobody knows."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from ridgeline.bench import measure as measuring
from ridgeline.bench.contenders import build_step, find_contender
from ridgeline.bench.explain import explain, preset_case
from ridgeline.bench.kernel_map import COPIES, UNMAPPED, KernelMap
from ridgeline.bench.measure import MeasuredRow, MeasureResult, measure_preset, profile, tabulate
from ridgeline.bench.measure_view import render_measured
from ridgeline.bench.nvml import Clocks, course
from ridgeline.bench.timing import Timing
from ridgeline.bench.trace import Kernel, occupation, read_trace
from ridgeline.bench.workloads import Workload, random_batch
from ridgeline.cli import main
from ridgeline.cost import Phase
from ridgeline.errors import UnsupportedError
from ridgeline.hardware import card
from ridgeline.models import Category, DecoderConfig, Head, LanguageConfig, ModelConfig, PolicyConfig
from ridgeline.presets import preset
from ridgeline.records import Record, read_record, to_json

B, T, L = 3, 20, 2
POLICY = PolicyConfig(
    decoder=DecoderConfig(
        layers=L, width=32, heads=4, mlp_width=80, positions="relative", position_table=24, dropout=0.1, context=T
    ),
    heads=(Head(name="c", classes=9), Head(name="main", classes=37)),
    categories=(Category(name="stage", rows=7, width=4),),
    numbers=6,
    previous=("c",),
)
LANGUAGE = LanguageConfig(
    decoder=DecoderConfig(layers=L, width=32, heads=4, kv_heads=1, mlp_width=64, norm="rmsnorm", bias=False, context=T),
    vocabulary=50,
)
MATRIX = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")


def as_if_on_a_card(trace: dict[str, Any]) -> dict[str, Any]:
    """The CPU's trace with a kernel for each operator, launched from where and when it ran."""
    launched = []
    for number, event in enumerate(trace["traceEvents"]):
        if event.get("cat") != "cpu_op" or not event["name"].startswith("aten::"):
            continue
        launched += [
            {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": event["ts"], "dur": 0,
             "tid": event["tid"], "args": {"correlation": number}},
            {"ph": "X", "cat": "kernel", "name": "void some_kernel", "ts": event["ts"], "dur": 1, "tid": 0,
             "args": {"correlation": number, "stream": 7}},
        ]  # fmt: skip
    return {"traceEvents": [*trace["traceEvents"], *launched]}


def cpu_kernels(config: ModelConfig, contender: str) -> list[Kernel]:
    """What a real step of a PyTorch contender would have launched, by its operators on the CPU."""
    work = Workload(name="test", model=config, batch=B, context=T, precision="fp32")
    device = torch.device("cpu")
    step, data = build_step(find_contender(contender), work, device), random_batch(work, device)
    return read_trace(as_if_on_a_card(profile(lambda: step(data), 1)))


def counts(kernels: list[Kernel], config: ModelConfig) -> dict[tuple[str, Phase | None], int]:
    to_op = KernelMap(config, B, T)
    found: dict[tuple[str, Phase | None], int] = {}
    for kernel in kernels:
        if kernel.operator in MATRIX:
            key = (to_op(kernel), kernel.phase)
            found[key] = found.get(key, 0) + 1
    return found


@pytest.mark.parametrize("contender", ["eager", "eager:explicit"])
def test_every_product_of_a_policys_step_finds_its_op(contender: str) -> None:
    found = counts(cpu_kernels(POLICY, contender), POLICY)
    heads = len(POLICY.heads)
    for name, count in (("qkv", L), ("out", L), ("mlp_up", L), ("mlp_down", L), ("input", 1), ("heads.up", heads)):
        assert found[(name, "forward")] == count, name
        assert found[(f"{name}.input_gradient", "backward")] == count, name
        assert found[(f"{name}.weight_gradient", "backward")] == count, name
    assert found[("heads.down", "forward")] == heads
    attention = {phase: count for (name, phase), count in found.items() if name == "attention"}
    assert set(attention) == {"forward", "backward"}
    assert {name.split(".")[0] for name, _ in found} == {
        "qkv",
        "out",
        "mlp_up",
        "mlp_down",
        "input",
        "heads",
        "attention",
    }


def test_every_product_of_a_language_models_step_finds_its_op() -> None:
    found = counts(cpu_kernels(LANGUAGE, "eager:explicit"), LANGUAGE)
    for name, count in (("qkv", L), ("out", L), ("mlp_up", L), ("mlp_down", L), ("head", 1)):
        for suffix, phase in (("", "forward"), (".input_gradient", "backward"), (".weight_gradient", "backward")):
            assert found[(f"{name}{suffix}", phase)] == count, f"{name}{suffix}"  # type: ignore[index]
    assert found[("attention", "forward")] == 2 * L
    assert found[("attention", "backward")] == 4 * L
    assert UNMAPPED not in {name for name, _ in found}


# what torch.compile recorded for POLICY's step on a CPU: products write into given memory, which follows the factors
COMPILED = (
    ("aten::addmm", ((32,), (60, 19), (19, 32), (60, 32)), "forward", "input"),
    ("aten::addmm", ((96,), (60, 32), (32, 96), (60, 96)), "forward", "qkv"),
    ("aten::mm", ((240, 8), (8, 20), (240, 20)), "forward", "attention"),
    ("aten::addmm", ((32,), (60, 32), (32, 32), (60, 32)), "forward", "out"),
    ("aten::addmm", ((80,), (60, 32), (32, 80), (60, 80)), "forward", "mlp_up"),
    ("aten::addmm", ((32,), (60, 80), (80, 32), (60, 32)), "forward", "mlp_down"),
    ("aten::addmm", ((20,), (60, 41), (41, 20), (60, 20)), "forward", "heads.up"),
    ("aten::addmm", ((37,), (60, 20), (20, 37), (60, 37)), "forward", "heads.down"),
    ("aten::mm", ((9, 60), (60, 16), (9, 16)), "backward", "heads.down.weight_gradient"),
    ("aten::mm", ((60, 9), (9, 16), (60, 16)), "backward", "heads.down.input_gradient"),
    ("aten::mm", ((32, 60), (60, 80), (32, 80)), "backward", "mlp_down.weight_gradient"),
    ("aten::mm", ((60, 32), (32, 80), (60, 80)), "backward", "mlp_down.input_gradient"),
    ("aten::mm", ((80, 60), (60, 32), (80, 32)), "backward", "mlp_up.weight_gradient"),
    ("aten::mm", ((60, 80), (80, 32), (60, 32)), "backward", "mlp_up.input_gradient"),
    ("aten::mm", ((20, 240), (240, 8), (20, 8)), "backward", "attention"),
    ("aten::mm", ((240, 20), (20, 8), (240, 8)), "backward", "attention"),
    ("aten::mm", ((96, 60), (60, 32), (96, 32)), "backward", "qkv.weight_gradient"),
    ("aten::mm", ((60, 96), (96, 32), (60, 32)), "backward", "qkv.input_gradient"),
    ("aten::mm", ((32, 60), (60, 19), (32, 19)), "backward", "input.weight_gradient"),
)


@pytest.mark.parametrize(("operator", "shapes", "phase", "op"), COMPILED)
def test_products_of_a_compiled_step(operator: str, shapes: tuple[tuple[int, ...], ...], phase: Phase, op: str) -> None:
    kernel = compiled("nvjet_tst_256x128", phase, *shapes, operator=operator)
    assert KernelMap(POLICY, B, T)(kernel) == op


def test_other_operators_of_a_real_step_find_theirs() -> None:
    kernels = cpu_kernels(POLICY, "eager:explicit")
    to_op = KernelMap(POLICY, B, T)
    named: dict[str, set[str]] = {}
    for kernel in kernels:
        named.setdefault(kernel.operator, set()).add(to_op(kernel))
    assert named["aten::native_layer_norm"] == {"norm", "heads.norm"}
    assert named["aten::gelu"] == {"gelu", "heads.gelu"}
    assert named["aten::_softmax"] == {"attention"}
    assert named["aten::_log_softmax"] == {"cross_entropy"}
    assert {to_op(kernel) for kernel in kernels if kernel.update} == {"adamw"}
    assert {to_op(kernel) for kernel in kernels if kernel.phase == "optimizer" and not kernel.update} == {"grad_norm"}
    assert UNMAPPED not in named["aten::native_layer_norm_backward"]


def compiled(name: str, phase: Phase, *shapes: tuple[int, ...], operator: str = "") -> Kernel:
    return Kernel(
        name=name, kind="kernel", start=0, duration=1, stream=7, operator=operator, shapes=shapes, phase=phase
    )


HAL = preset("hal-20m").model
UP_GRADIENT = "mlp_up.weight_gradient"


@pytest.mark.parametrize(
    ("kernel", "op"),
    [
        (compiled("triton_per_fused_add_native_dropout_native_layer_norm_5", "forward"), "norm"),
        (compiled("triton_per_fused_native_layer_norm_backward_sum_9", "backward"), "norm"),
        (compiled("triton_per_fused_native_layer_norm_7", "forward", (131072, 521)), "heads.norm"),
        (compiled("triton_poi_fused_gelu_3", "forward"), "gelu"),
        (compiled("triton_per_fused__log_softmax_nll_loss_forward_1", "forward"), "cross_entropy"),
        (compiled("triton_red_fused__softmax_add_constant_pad_nd_masked_fill_mul_2", "forward"), "attention"),
        (compiled("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "forward"), "attention"),
        (compiled("fmha_cutlassB_bf16_aligned_64x64_k64_sm80", "backward"), "attention"),
        (compiled("triton_poi_fused_embedding_dense_backward_12", "backward"), "embedding"),
        (compiled("triton_poi_fused__to_copy_native_dropout_4", "forward"), "dropout"),
        (compiled("triton_red_fused__to_copy_sum_8", "backward"), "bias gradients"),
        (compiled("triton_poi_fused__to_copy_2", "forward"), COPIES),
        (compiled("triton_poi_fused_constant_pad_nd_masked_fill_mul_slice_6", "forward"), "attention"),
        (compiled("triton_poi_fused__to_copy_cat_one_hot_1", "forward"), "input"),
        (compiled("triton_poi_fused_concatenated_1", "forward"), UNMAPPED),
        (compiled("triton_poi_fused_cat_30", "backward"), "attention"),
        (compiled("triton_poi_fused_clone_split_with_sizes_transpose_view_30", "forward"), "attention"),
        (compiled("norm_backward_kernel", "backward"), "norm"),
        (compiled("attention_backward", "backward"), "attention"),
        (compiled("table_gradient", "backward"), "relative_table"),
        (compiled("table_gradient_kernel", "backward"), "relative_table"),
        (compiled("query_gradient_kernel", "backward"), "attention"),
        (compiled("forward_kernel", "forward"), "attention"),
        (compiled("attention_plain_keys", "backward"), "attention"),
        (compiled("group_gradients", "backward"), "attention"),
        (compiled("table_gradient_small_kernel", "backward"), "embedding"),
        (compiled("cross_entropy_kernel", "forward"), "cross_entropy"),
        (compiled("bias_gelu_backward_kernel", "backward"), "gelu"),
        (compiled("column_sums_kernel", "backward"), "bias gradients"),
        (compiled("adamw_update_kernel", "optimizer"), "adamw"),
        (compiled("adamw_plan_kernel", "optimizer"), "grad_norm"),
        (compiled("multi_tensor_apply_kernel", "optimizer"), "grad_norm"),
        (compiled("nobody_knows_me", "forward"), UNMAPPED),
        (compiled("nvjet_tst", "forward", (131072, 512), (512, 1536), operator="aten::mm"), "qkv"),
        (compiled("nvjet_tst", "backward", (131072, 512), (512, 2048), operator="aten::mm"), "mlp_down.input_gradient"),
        (compiled("nvjet_tst", "forward", (131072, 512), (512, 2048), operator="aten::mm"), "mlp_up"),
        (compiled("nvjet_tst", "backward", (2048, 131072), (131072, 512), operator="aten::mm"), UP_GRADIENT),
        (compiled("nvjet_tst", "forward", (260,), (131072, 524), (524, 260), operator="aten::addmm"), "heads.up"),
        (compiled("nvjet_tst", "forward", (1048576, 64), (64, 256), operator="aten::mm"), "attention"),
        (compiled("nvjet_tst", "forward", (7, 512), (512, 3), operator="aten::mm"), UNMAPPED),
        (compiled("elementwise", "forward", (512, 8, 256, 256), operator="aten::mul"), "attention"),
        (replace(compiled("Memcpy DtoD", "forward"), kind="gpu_memcpy"), COPIES),
        (replace(compiled("multi_tensor_apply_kernel", "optimizer"), update=True), "adamw"),
    ],
)  # fmt: skip
def test_names_and_shapes_as_torch_compile_gives_them(kernel: Kernel, op: str) -> None:
    assert KernelMap(HAL, 512, 256)(kernel) == op


def test_a_square_batch_is_not_taken_for_scores() -> None:
    """gpt2-c256 at 256 positions: (B, T, C) ends in 256 × 256 and is no score tensor."""
    to_op = KernelMap(preset("gpt2-c256").model, 32, 256)
    assert to_op(compiled("add", "forward", (32, 256, 256), operator="aten::add")) == "residual"
    assert to_op(compiled("mul", "forward", (256, 256, 256), operator="aten::mul")) == "attention"


def test_layers_that_cannot_be_told_apart_share_a_row_and_their_floors() -> None:
    decoder = DecoderConfig(layers=2, width=64, heads=4, mlp_width=192, context=16)
    case = replace(
        preset_case("gpt2-c256", card("h200")), model=LanguageConfig(decoder=decoder, vocabulary=50), context=16
    )
    explained = explain(replace(case, batch=5), card("h200"))
    kernels = [replace(compiled("nvjet", "forward", (80, 64), (64, 192), operator="aten::mm"), duration=5)]
    rows, unmapped = tabulate(kernels, explained, 1, explained.case.model)
    floors = {(row.name, row.phase): row.floor.seconds for row in explained.rows}
    row = next(row for row in rows if row.name == "qkv or mlp_up")
    assert row.seconds == pytest.approx(5e-6)
    assert row.floor_s == pytest.approx(floors[("qkv", "forward")] + floors[("mlp_up", "forward")])
    assert not [row for row in rows if row.name in ("qkv", "mlp_up")]
    assert unmapped == ()


def measured() -> MeasureResult:
    case = replace(preset_case("hal-20m", card("h200")), batch=512)
    explained = explain(case, card("h200"))
    kernels = [
        compiled("nvjet", "forward", (131072, 512), (512, 1536), operator="aten::mm"),
        replace(
            compiled("nvjet", "forward", (131072, 512), (512, 1536), operator="aten::mm"), start=2000, duration=4000
        ),
        replace(compiled("stranger_1", "backward"), start=7000, duration=500),
        replace(compiled("stranger_2", "backward"), start=7500, duration=900),
        replace(compiled("graphed", "forward"), start=8400, phase=None),
    ]
    kernels[0] = replace(kernels[0], duration=2000)
    rows, unmapped = tabulate(kernels, explained, 2, case.model)
    return MeasureResult(
        explained=explained,
        card="NVIDIA H200",
        engine="compile",
        timing=Timing(74.4, 0.01, 20),
        rows=rows,
        occupation=occupation(kernels),
        steps=2,
        unmapped=unmapped,
        peak_bytes=2**34,
        circumstances={"torch": "2.11.0"},
        clocks=course(Clocks(sm_mhz=345), [Clocks(sm_mhz=1700), Clocks(sm_mhz=1980)], Clocks(sm_mhz=1980)),
    )


def test_measured_stands_beside_floor_and_nothing_is_lost() -> None:
    result = measured()
    qkv = next(row for row in result.rows if (row.name, row.phase) == ("qkv", "forward"))
    assert (qkv.seconds, qkv.kernels) == (pytest.approx(3e-3), 1.0)
    assert qkv.floor_s == pytest.approx(1250e-6, rel=0.001)
    total = sum(row.seconds for row in result.rows)
    assert total == pytest.approx(result.occupation.kernel_sum / 2 / 1e6)
    assert result.unmapped == (
        ("stranger_2", pytest.approx(450e-6)),
        ("stranger_1", pytest.approx(250e-6)),
        ("graphed", pytest.approx(0.5e-6)),
    )
    lost = sum(row.seconds for row in result.rows if row.name == UNMAPPED)
    assert lost == pytest.approx(700.5e-6)
    assert {row.name for row in result.explained.rows} <= {row.name for row in result.rows}
    assert result.phases_s["backward"] == pytest.approx(700e-6)


def test_json_record_and_table() -> None:
    result = measured()
    values = result.to_json()["measured"]
    assert values["seconds"] == pytest.approx(0.0744)
    assert values["floor_share"] == pytest.approx(result.explained.floor_s / 0.0744)
    assert values["mfu"] == pytest.approx(16.2e12 / 0.0744 / 989.4e12, rel=0.01)
    assert values["bytes_per_s"] == pytest.approx(result.explained.cost.bytes / 0.0744)
    assert values["profiled"]["longest_gap_s"] == pytest.approx(1e-3)
    assert values["profiled"]["idle_s"] == pytest.approx(0.5e-3)
    record = result.to_record()
    assert isinstance(record, Record)
    assert to_json(record)["kind"] == "explain"  # the schema takes it
    assert record.contenders[0].tokens_per_s == pytest.approx(131_072 / 0.0744)
    assert record.contenders[0].bandwidth == pytest.approx(record.contenders[0].bytes_per_s / 4.8e12)
    assert record.clocks is not None
    assert (record.clocks["before"]["sm_mhz"], record.clocks["during"]["sm_mhz"]) == (345, [1700, 1980])
    assert {op.name for op in record.ops} == {"qkv", UNMAPPED}
    qkv = next(op for op in record.ops if op.name == "qkv")
    # 6 layers of 131,072 × 512 × 1,536 in 3 ms, and at least its factors and result, in bf16, moved in that time
    assert qkv.tflops == pytest.approx(6 * 2 * 131_072 * 512 * 1536 / 3e-3 / 1e12, rel=0.01)
    assert qkv.tb_per_s == pytest.approx(6 * 2 * (131_072 * (512 + 1536) + 512 * 1536) / 3e-3 / 1e12, rel=0.01)
    assert all(op.tflops is None for op in record.ops if op.name == UNMAPPED)
    console = Console(width=150, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render_measured(result))
    text = console.export_text()
    assert "stranger_2" in text
    assert "phase not told" in text
    assert "MFU 22.0%, 984 GB/s (20% of the bandwidth); its floor" in text
    assert "unmapped" in text


def test_a_measured_step_leaves_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measuring, "measure_preset", lambda preset, **options: measured())
    assert main(["explain", "hal-20m", "--measure", "--out", str(tmp_path)]) == 0
    (file,) = tmp_path.rglob("*.json")
    assert file.parent.name == "nvidia-h200"
    assert file.name.endswith("-explain-hal-20m-b512-t256-bf16.json")
    assert read_record(file).kind == "explain"
    assert str(file) in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(measuring, "measure_preset", None)  # it is said before anything is measured
    assert main(["explain", "hal-20m", "--measure", "--out", str(tmp_path / "file")]) == 2
    assert "choose another folder" in capsys.readouterr().err


@pytest.mark.parametrize("width", [150, 80, 60, 41])
def test_a_narrow_terminal_cuts_no_name(width: int) -> None:
    result = measured()
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render_measured(result))
    text = console.export_text()
    words = text.split()
    assert all(row.name in words for row in result.rows)
    assert "…" not in text
    assert ("no room for" in text) == (width < 80)


def test_ops_that_share_a_row_stand_below_each_other() -> None:
    result = measured()
    shared = "heads.down.input_gradient or heads.up.weight_gradient or heads.down.weight_gradient"
    rows = (MeasuredRow(name=shared, phase="backward", seconds=678e-6, kernels=13, floor_s=684e-6),)
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render_measured(replace(result, rows=rows)))
    text = console.export_text()
    assert "no room for" not in text
    assert [line.split()[-1] for line in text.splitlines() if line.startswith(" or ")] == shared.split(" or ")[1:]


def test_a_floor_above_what_was_measured_is_no_share() -> None:
    """An op most of whose work is in another's kernels: a floor of 6.1 µs beside 0.6 µs is not 1008 %."""
    result = measured()
    rows = tuple(replace(row, seconds=row.seconds / 1e4) if row.name == "qkv" else row for row in result.rows)
    console = Console(width=150, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render_measured(replace(result, rows=rows)))
    lines = [line.split() for line in console.export_text().splitlines()]
    qkv = next(line for line in lines if line[:1] == ["qkv"])
    assert qkv[-3:] == [">", "100%", "1"]
    assert any(line[:3] == [">", "100%", "part"] for line in lines)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA card here")
def test_measuring_needs_a_card() -> None:
    with pytest.raises(UnsupportedError, match="--measure profiles real steps on a CUDA card"):
        measure_preset("gpt2-c256")


@pytest.mark.gpu
def test_a_real_step_is_measured_and_mostly_mapped() -> None:
    result = measure_preset("gpt2-c256", engine="eager", batch=8)
    total = sum(row.seconds for row in result.rows)
    lost = sum(seconds for _, seconds in result.unmapped)
    assert lost < 0.1 * total
    assert result.utilisation is not None
    assert 0 < result.utilisation.mfu < 1
    assert result.clocks is None or result.clocks["during"]["sm_mhz"]
    assert result.occupation.busy <= result.occupation.elapsed
