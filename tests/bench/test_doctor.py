"""Doctor: what would run, attention's backend as PyTorch itself says, known bad combinations with cures."""

import importlib.util
import json
import os
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

from ridgeline.bench import doctor as doctoring
from ridgeline.bench.doctor import OpChoice, best_precision, choices_of, doctor, pick, ptxas
from ridgeline.bench.doctor_view import render_doctor
from ridgeline.bench.findings import Facts, find, numbers
from ridgeline.bench.sdpa import SdpaAnswer, _refusal, ask_sdpa
from ridgeline.errors import ConfigError, UnsupportedError
from ridgeline.models import DecoderConfig
from ridgeline.presets import PRESETS, preset

CPU = torch.device("cpu")
GOOD = Facts(torch="2.11.0+cu130", cuda="13.0", triton="3.7.1", ptxas="13.1.80", nvrtc="13.0", capability=(9, 0))


def names(facts: Facts) -> dict[str, str]:
    return {finding.name: finding.severity for finding in find(facts)}


def answer(backend: str, **settings: object) -> SdpaAnswer:
    return replace(SdpaAnswer(call="as impl='torch' calls it", backend=backend, others={}, score_bytes=0), **settings)


def test_a_sound_machine_has_no_findings() -> None:
    assert find(GOOD) == []
    assert find(replace(GOOD, sdpa=(answer("flash"),))) == []
    assert find(Facts(torch="2.13.0+cpu")) == []


@pytest.mark.parametrize(("version", "bad"), [("3.3.1", False), ("3.4.0", True), ("3.6.0", True), ("3.7.0", True),
                                              ("3.7.1", False), ("3.9.0", False)])  # fmt: skip
def test_the_triton_range_that_miscompiles_on_hopper(version: str, bad: bool) -> None:
    assert ("Triton miscompiles transposed results on Hopper" in names(replace(GOOD, triton=version))) is bad
    assert "Triton miscompiles transposed results on Hopper" not in names(
        replace(GOOD, triton=version, capability=(8, 0))
    )


def test_ptxas_before_13_1_80_on_hopper() -> None:
    found = find(replace(GOOD, ptxas="12.8.93"))
    assert [finding.name for finding in found] == ["ptxas miscompiles some Hopper kernels"]
    assert "has both known cases" in found[0].detail
    assert "TRITON_PTXAS_PATH" in found[0].cure
    assert "fixes one of two" in find(replace(GOOD, ptxas="13.0.88"))[0].detail
    assert find(replace(GOOD, ptxas="12.8.93", capability=(8, 0))) == []


def test_cudnn_backward_is_bad_only_where_its_condition_holds() -> None:
    name = "cuDNN attention's backward pass"
    assert names(replace(GOOD, sdpa=(answer("cudnn"),))) == {name: "watch"}
    assert names(replace(GOOD, sdpa=(answer("cudnn", masked=True),), T=320)) == {name: "bad"}
    assert names(replace(GOOD, sdpa=(answer("cudnn", masked=True),), T=256)) == {name: "watch"}
    assert "enable_cudnn_sdp(False)" in find(replace(GOOD, sdpa=(answer("cudnn"),)))[0].cure


@pytest.mark.parametrize(("version", "bad"), [("2.9.0", False), ("2.10.0+cu128", True), ("2.11.0", False)])
def test_mix_order_reduction(version: str, bad: bool) -> None:
    found = names(replace(GOOD, torch=version))
    assert ("torch.compile's mix-order reduction" in found) is bad
    assert ("PyTorch too old" in found) is (numbers(version) < (2, 11))


def test_falling_to_math_is_bad_for_our_own_call_and_a_warning_for_another() -> None:
    """Items 5 and 6 of the second article: on a T4, or with KV heads that are not expanded, no fused kernel runs."""
    math = answer("math", score_bytes=2**21)
    found = find(replace(GOOD, sdpa=(math,)))
    assert [(f.name, f.severity) for f in found] == [("attention falls to the MATH backend", "bad")]
    assert "2.0 MiB a layer and window" in found[0].detail
    other = answer("math", call="1 KV heads not expanded", score_bytes=2**21)
    found = find(replace(GOOD, sdpa=(answer("flash"), other)))
    assert [f.severity for f in found] == ["watch"]
    assert found[0].cure == "expand the KV heads before the call"


def test_turing_is_told_to_use_pytorchs_ops() -> None:
    found = find(Facts(torch="2.11.0", cuda="12.8", triton="3.6.0", capability=(7, 5), sdpa=(answer("efficient"),)))
    assert [finding.name for finding in found] == ["a card before compute capability 8.0"]
    assert "fp16" in found[0].cure
    assert "never to flash or cuDNN" in found[0].cure


def test_a_driver_without_a_pytorch_that_can_use_it() -> None:
    assert names(Facts(torch="2.13.0+cpu", tool=True)) == {"card not usable": "bad"}
    assert "is built without CUDA" in find(Facts(torch="2.13.0+cpu", tool=True))[0].detail
    assert "cannot use it" in find(Facts(torch="2.13.0", cuda="13.0", tool=True))[0].detail


def test_hopper_without_the_run_time_compiler() -> None:
    assert names(replace(GOOD, nvrtc=None)) == {"no run-time CUDA compiler": "bad"}
    assert find(replace(GOOD, nvrtc=None, capability=(8, 0))) == []


def test_bad_findings_come_first_and_every_one_has_a_cure() -> None:
    found = find(replace(GOOD, ptxas="12.8.93", triton="3.6.0", nvrtc=None, torch="2.10.0"))
    assert [finding.severity for finding in found] == sorted(finding.severity for finding in found)
    assert len({finding.severity for finding in found}) > 1
    assert all(finding.cure and finding.detail for finding in found)


def test_versions_compare_as_numbers() -> None:
    assert numbers("2.11.0+cu130") == (2, 11, 0)
    assert numbers("3.10.0") > numbers("3.9.1")
    assert numbers("unknown") == ()


def really(c: DecoderConfig, T: int, masked: bool, grouped: bool, expanded: bool) -> str:
    """The operator that a real call of scaled_dot_product_attention runs on the CPU."""
    q = torch.randn(2, c.heads, T, c.head_dim, requires_grad=True)
    k = torch.randn(2, c.heads if expanded else c.groups, T, c.head_dim, requires_grad=True)
    mask = torch.zeros(2, c.heads, T, T, requires_grad=True) if masked else None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        F.scaled_dot_product_attention(q, k, k, attn_mask=mask, is_causal=not masked, enable_gqa=grouped)
    ran = {event.key for event in profiler.key_averages()}
    return "math" if "aten::_scaled_dot_product_attention_math" in ran else "flash"


def test_the_backend_is_the_one_that_really_runs() -> None:
    hal, fast = preset("hal-20m").model.decoder, preset("fast-c256").model.decoder
    relative = ask_sdpa(replace(hal, dropout=0.0), 32, CPU, torch.float32)
    assert [a.backend for a in relative] == [
        really(hal, 32, masked=True, grouped=False, expanded=True),
        really(hal, 32, masked=False, grouped=False, expanded=True),
    ]
    grouped = ask_sdpa(fast, 32, CPU, torch.float32)
    assert [a.backend for a in grouped] == [
        really(fast, 32, masked=False, grouped=False, expanded=True),
        really(fast, 32, masked=False, grouped=False, expanded=False),
        really(fast, 32, masked=False, grouped=True, expanded=False),
    ]


def test_scores_in_memory_are_counted_for_math_and_for_masks() -> None:
    answers = ask_sdpa(preset("hal-20m").model.decoder, 256, CPU, torch.float32)
    assert answers[0].score_bytes == 8 * 256 * 256 * 4
    assert answers[0].masked
    assert "dropout 0.2" in answers[0].call
    assert answers[1].backend == "flash"
    assert answers[1].score_bytes == 0


def _warn(function: str, words: str) -> None:
    """What PyTorch's C++ code writes, past Python."""
    line = f"[W1129 19:25:33.580655808 sdp_utils_cpp.h:262] Warning: {words} (function {function})\n"
    os.write(2, line.encode())


def test_reasons_are_heard_wherever_pytorch_says_them(capfd: pytest.CaptureFixture[str]) -> None:
    given = {"q": torch.zeros(1, 1, 8, 8), "mask": torch.zeros(1, 1, 8, 8, requires_grad=True), "p": 0.1}
    call = {"k": given["q"], "v": given["q"], "causal": False, "grouped": False}
    given = {name: {**given, **call}[name] for name in ("q", "k", "v", "mask", "p", "causal", "grouped")}

    def speaks(params: object, debug: bool) -> bool:
        warnings.warn("Memory efficient kernel not used because:", stacklevel=1)
        warnings.warn("no such head (Triggered internally at sdp_utils.cpp:12.)", stacklevel=1)
        _warn("check_for_attn_mask", "no mask")
        return False

    assert _refusal(speaks, given) == "no such head; no mask"
    assert _refusal(lambda params, debug: params.attn_mask is None or not params.attn_mask.requires_grad, given) == (
        "does not take a gradient of the mask, by trial"
    )
    assert _refusal(lambda params, debug: params.dropout == 0, given) == "does not take dropout, by trial"
    assert _refusal(lambda params, debug: False, given) == "refused without a word"
    assert _refusal(lambda params, debug: True, given) is None
    assert capfd.readouterr().err == ""
    os.write(2, b"heard again")
    assert capfd.readouterr().err == "heard again"


def test_pick_takes_the_fastest_that_can_run_and_says_why_not_the_others() -> None:
    reasons = {"cuda": "needs a Hopper card", "triton": None, "torch": None, "reference": None}
    assert pick("norm", tuple(reasons), reasons.get) == OpChoice(
        op="norm",
        uses="triton",
        others={
            "cuda": "needs a Hopper card",
            "torch": "can run, but triton is chosen",
            "reference": "the specification, slower",
        },
    )


def test_on_the_cpu_every_op_is_pytorchs_and_every_kernel_has_a_reason() -> None:
    """Also under Triton's interpreter, which could run the kernels and never trains."""
    for name in PRESETS:
        choices = choices_of(preset(name).model, CPU, torch.float32, 4, preset(name).window.context)
        assert {choice.uses for choice in choices} == {"torch"}
        for choice in choices:
            for impl in set(choice.others) & {"cuda", "triton"}:
                assert "CUDA" in choice.others[impl], (choice.op, choice.others[impl])
        assert [choice.op for choice in choices][2:4] == ["attention", "MLP products with GELU"]
        assert any("dropout" in choice.op for choice in choices) is (preset(name).model.decoder.dropout > 0)


def test_without_a_card_nothing_is_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else find_spec(name))
    for choice in choices_of(preset("hal-20m").model, CPU, torch.float32, 4, 256):
        assert not any("install" in reason for reason in choice.others.values()), choice


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA card here")
def test_doctor_on_a_machine_without_a_card() -> None:
    result = doctor("fast-c256")
    values = json.loads(json.dumps(result.to_json()))
    assert set(values) == {
        "preset", "precision", "versions", "card", "driver", "ceilings", "ops", "sdpa", "findings",
    }  # fmt: skip
    assert values["card"] is values["driver"] is None
    assert values["precision"] == "fp32"
    assert values["versions"]["torch"] == torch.__version__
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render_doctor(result))
    text = console.export_text()
    assert "cuda, cuda-plain, cuda-fp32, triton, triton-two-sweep (1)" in " ".join(text.split())
    assert text.count("the fused model needs a CUDA card") == 1  # though it is the reason of every op
    assert "(1) the fused model needs a CUDA card, got device cpu" in text
    assert "1 KV heads not expanded" in text
    assert "none that PyTorch can use" in text


def test_ptxas_is_asked_for_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    assert numbers(ptxas() or "") > (12,)
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/nowhere/ptxas")
    assert ptxas() is None


@pytest.mark.parametrize(
    ("capability", "precision"), [(None, "fp32"), ((6, 1), "fp32"), ((7, 5), "fp32"), ((9, 0), "bf16")]
)
def test_the_precision_that_training_takes_by_itself(capability: tuple[int, int] | None, precision: str) -> None:
    assert best_precision(capability) == precision


def test_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="unknown preset 'hal'"):
        doctor("hal")
    with pytest.raises(UnsupportedError, match="unknown precision 'bf61'; did you mean bf16"):
        doctor("fast-c256", precision="bf61")
    with pytest.raises(UnsupportedError, match="unknown precision ''"):
        doctor("fast-c256", precision="")
    monkeypatch.setattr(doctoring, "read_driver", lambda index=0: None)
    with pytest.raises(UnsupportedError, match="the CPU has no tf32; use --precision fp32"):
        doctor("fast-c256", precision="tf32")
    turing = doctoring.DriverReading(
        name="Tesla T4", capability=(7, 5), sm_count=40, memory_bytes=2**34, l2_bytes=2**22,
        shared_per_sm=2**16, shared_per_block=2**16,
    )  # fmt: skip
    monkeypatch.setattr(doctoring, "read_driver", lambda index=0: turing)
    with pytest.raises(UnsupportedError, match="Tesla T4 has no bf16; use --precision fp16 or fp32"):
        doctor("fast-c256", precision="bf16")


@pytest.mark.gpu
def test_doctor_on_a_card() -> None:
    result = doctor("hal-20m")
    assert result.driver is not None
    assert result.sdpa[0].backend in ("cudnn", "flash", "efficient", "math")
    for answer in result.sdpa:
        assert {answer.backend, *answer.others} >= {"flash", "efficient", "cudnn", "math"}
        assert all(reason and reason != "refused without a word" for reason in answer.others.values())
    console = Console(width=160)
    console.print(render_doctor(result))
