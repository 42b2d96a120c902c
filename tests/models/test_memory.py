"""The accounting of memory against what a step allocates, tensor by tensor, on a Hopper card of fake tensors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ridgeline.models.memory import memory
from ridgeline.presets import preset

REHEARSAL = Path(__file__).resolve().parents[2] / "dev/gpu/memory_rehearsal.py"
CASES = (
    "gpt2-c256:32:256", "gpt2-c256:32:256:fp32", "gpt2-c256:4:2048", "fast-c256:4:2048", "gpt2-c256:512:256",
    "fast-c256:512:256", "gpt2-124m:64:1024", "hal-20m:512:256", "hal-20m:512:256:bf16:fused+lean",
    "hal-20m:512:256:bf16:fused+leanest", "hal-5m:512:128",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="a build of torch for CUDA has a card of its own")
def test_the_accounting_is_what_a_step_holds_at_most() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)  # as on a card
    done = subprocess.run(
        [sys.executable, REHEARSAL, *CASES], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert [case["case"] for case in told] == list(CASES)
    assert {case["case"]: case["accounting"] for case in told} == {
        case["case"]: pytest.approx(case["peak"], rel=0.035) for case in told
    }


def test_long_windows_hold_partial_sums_of_the_queries_gradient() -> None:
    """Four thread blocks share the keys of each of four windows' eight heads; each leaves fp32 for all its queries."""
    model = preset("gpt2-c256").model
    decoder = type(model.decoder)(**{**vars(model.decoder), "context": 2048})
    long = memory(type(model)(**{**vars(model), "decoder": decoder}), batch=4)
    short = memory(model, batch=32)
    assert long.workspace - short.workspace == 4 * 8 * 4 * 2048 * 32 * 4
