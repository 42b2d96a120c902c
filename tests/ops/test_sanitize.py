"""dev/gpu's runs under compute-sanitizer: each kernel has a case, none needs cuBLAS, and what reports are taken for."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[2] / "dev/gpu"


@pytest.fixture(autouse=True)
def _import_from_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)


@pytest.fixture
def verdicts() -> ModuleType:
    return importlib.import_module("sanitize_verdicts")


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="a build of torch for CUDA has a card of its own")
def test_each_kernel_has_a_case_and_each_form_of_the_goals(verdicts: ModuleType) -> None:
    """Every case runs to its end on a Hopper card of fake tensors; between them they launch all kernels there are.

    And a step of each goal's workload, at its size, launches no CUDA C++ in a form that no case launches.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)  # as on a card
    done = subprocess.run(
        [sys.executable, FOLDER / "sanitize_rehearsal.py"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = [json.loads(line) for line in done.stdout.splitlines()]
    cases = [each for each in told if not each["case"].startswith("goal ")]
    assert {kernel for case in cases for kernel in case["launched"]} == verdicts.kernels()
    in_jobs = [name for job in importlib.import_module("sanitize_gpu").JOBS for name in job.split("+")]
    assert sorted(in_jobs) == sorted(case["case"] for case in cases)
    of_cases = {form for case in cases for form in case["forms"]}
    of_goals = {form: each["case"] for each in told[len(cases) :] for form in each["forms"]}
    assert len(of_goals) > 50
    assert {form: goal for form, goal in of_goals.items() if form not in of_cases} == {}


def test_kernels_are_found_whose_name_a_macro_chooses(verdicts: ModuleType) -> None:
    """A kernel that is not named to the tool would not be looked at."""
    found = verdicts.kernels()
    assert {"mlp/project_many.cu:project_many_forward", "mlp/project_many.cu:project_many_backward"} <= found
    assert {"mlp/project.cu:project_forward", "attention/cuda/plain_keys.cu:attention_plain_keys"} <= found
    assert {"windows/triton.py:gather_kernel", "embedding/triton.py:gather_kernel"} <= found
    assert verdicts.names() >= {"stationary", "head", "muon_after_kernel"}


def test_products_of_the_card_are_the_host_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every form that the package calls: results, their types and where they lie."""
    mode = importlib.import_module("sanitize_kit").ProductsOnHost
    monkeypatch.setattr(mode, "KIND", "cpu")
    a, b, c = (torch.randn(shape).bfloat16() for shape in ((5, 7), (7, 3), (5, 3)))
    exact = a.double() @ b.double()
    out, total = torch.empty(5, 3), torch.randn(5, 3)
    before = total.double()
    with mode() as products:
        assert torch.equal(a @ b, exact.bfloat16())
        assert torch.mm(a, b, out_dtype=torch.float32, out=out) is out
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
        torch.testing.assert_close(total.double(), before + exact, rtol=1e-5, atol=1e-5)
        batch = torch.baddbmm(c[None].float(), a[None].float(), b[None].float(), beta=0.5, alpha=2)
        torch.testing.assert_close(batch[0].double(), 0.5 * c.double() + 2 * exact, rtol=1e-5, atol=1e-5)
        x = a.float().requires_grad_()
        torch.nn.functional.linear(x, b.float().t()).sum().backward()
        torch.testing.assert_close(x.grad.double(), b.double().sum(1).expand(5, 7), rtol=1e-5, atol=1e-5)
    assert products.calls == 6


REPORT = """\
========= COMPUTE-SANITIZER
CASE one
LAUNCHED gemm
LAUNCHED head
ENDED one
CASE two
LAUNCHED head
LAUNCHED stationary
"""
RACE = """\
========= Error: Race reported between Read access at head+0x120
=========     and Write access at head+0x240 [128 hazards]
=========
"""


def test_a_process_that_ends_has_a_verdict_on_all_it_launched(verdicts: ModuleType) -> None:
    text = REPORT + "ENDED two\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
    found = verdicts.read(text, 0, {"gemm", "head", "stationary"})
    assert found["died"] is None
    words = [verdicts.verdict("racecheck", kernel, [found])[0] for kernel in ("gemm", "head", "stationary", "tables")]
    assert words == ["clean", "clean", "clean", "none"]


def test_a_process_that_dies_has_one_on_the_cases_before(verdicts: ModuleType) -> None:
    text = REPORT + "========= Internal Sanitizer Error: it failed\n========= RACECHECK SUMMARY: 1 hazard displayed\n"
    found = verdicts.read(text, 255, {"gemm", "head", "stationary"})
    assert found["died"] == "Internal Sanitizer Error: it failed"
    assert verdicts.verdict("racecheck", "gemm", [found]) == ("clean", "")
    assert verdicts.verdict("racecheck", "head", [found]) == ("clean", "but not ended: two")
    assert verdicts.verdict("racecheck", "stationary", [found]) == ("none", "not ended: two")


def test_a_process_stopped_before_its_summary_has_ended_nothing(verdicts: ModuleType) -> None:
    """What the tool still had to say is not known."""
    found = verdicts.read(REPORT, "timeout", {"gemm", "head", "stationary"})
    assert found["died"] == "timeout"
    assert verdicts.verdict("memcheck", "gemm", [found]) == ("none", "not ended: one")


def test_a_report_counts_wherever_it_stands(verdicts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    ending = "ENDED two\n========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n"
    clean = verdicts.read(REPORT + ending, 0, {"gemm", "head", "stationary"})
    found = verdicts.read(REPORT + RACE + ending, 0, {"gemm", "head", "stationary"})
    assert found["reported"] == {"head": 2}
    assert verdicts.verdict("racecheck", "head", [clean, found])[0] == "REPORT"
    monkeypatch.setitem(verdicts.KNOWN, ("racecheck", "head"), "a reason")
    assert verdicts.verdict("racecheck", "head", [clean, found]) == ("known", "a reason")
    assert verdicts.verdict("memcheck", "head", [found])[0] == "REPORT"
    lines = "\n".join(verdicts.table({"racecheck": [clean, found]}, {"gemm", "head"}))
    assert "of 2 kernels 1 clean, 1 known, 0 REPORT, 0 none" in lines
    assert "known, a reason: head" in lines


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck", "initcheck"])
def test_no_tool_reports_what_is_not_known(tool: str, tmp_path: Path) -> None:
    """One small run of each kernel: every one has a verdict, every report a reason, and a planted mistake is seen."""
    if "COMPUTE_SANITIZER" not in os.environ:
        pytest.skip("takes minutes: COMPUTE_SANITIZER is to name the tool (compute-sanitizer, beside nvcc)")
    done = subprocess.run(
        [sys.executable, FOLDER / "sanitize_gpu.py", "580", tool],
        env={**os.environ, "OUT": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
