"""The CUDA C++ of short-window attention compiled for Hopper without one: spills, and unbroken wgmma pipelines."""

from pathlib import Path

import pytest
import torch

from ridgeline.ops._cuda import build
from ridgeline.ops.attention import spans
from ridgeline.ops.attention.plain import LAUNCHES

SOURCES = Path(__file__).parents[2] / "src/ridgeline/ops/attention/cuda"
SPILLED = 208  # bytes a thread: counters and addresses in `keys`, whose accumulators take 128 of its 184 registers

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("needs_nvrtc")]


@pytest.mark.parametrize("blocks", [1, 2, 4])
@pytest.mark.parametrize(("D", "relative", "dropout"), [(64, 1, 1), (64, 0, 0), (32, 0, 0)])
@pytest.mark.parametrize("name", ["forward", "backward"])
def test_kernel(name: str, D: int, relative: int, dropout: int, blocks: int) -> None:
    own = {"WARPGROUPS": 3} if name == "forward" else {"RL_GROUPED": 0, "RL_COLUMN_SUMS": 1}
    shape = {"HEAD_WIDTH": D, "ROW_BLOCKS": blocks, "RL_RELATIVE": relative, "RL_DROPOUT": dropout}
    cubin = build(SOURCES / f"{name}.cu", shape | own, "sm_90a")
    used = cubin.resources()[f"attention_{name}"]
    assert used.spill_stores <= SPILLED
    assert used.spill_loads <= SPILLED
    if blocks > 1:  # with one block nothing runs ahead, and ptxas may say that it waits after every wgmma
        assert "serialized" not in cubin.log


@pytest.mark.parametrize("D", [32, 64])
@pytest.mark.parametrize("name", ["forward", "queries", "keys"])
def test_plain_kernel(name: str, D: int) -> None:
    launch = getattr(LAUNCHES[D], name)
    defines = {
        "HEAD_WIDTH": D, "WARPGROUPS": launch.groups, "RING_STAGES": launch.stages,
        "BLOCKS_PER_PROCESSOR": launch.per_processor, "RL_COLUMN_SUMS": 1,
        "STEP_COLUMNS": launch.step,
    }  # fmt: skip
    cubin = build(SOURCES / f"plain_{name}.cu", defines, "sm_90a")
    assert cubin.resources()[f"attention_plain_{name}"].spill_stores <= 32  # loop counters
    assert "serialized" not in cubin.log


def test_plain_backward() -> None:
    cubin = build(SOURCES / "plain_backward.cu", spans.defines(torch.bfloat16, sums=True), "sm_90a")
    assert cubin.resources()["attention_plain_backward"].spill_stores <= 8  # a loop counter
    assert "serialized" not in cubin.log  # ptxas gives up the overlap of a kernel's products without another word


def test_forward_of_few_heads() -> None:
    shape = {"HEAD_WIDTH": 32, "ROW_BLOCKS": 4, "RL_RELATIVE": 0, "RL_DROPOUT": 0, "WARPGROUPS": 4, "RL_HALVES": 1}
    cubin = build(SOURCES / "forward.cu", shape, "sm_90a")
    assert cubin.resources()["attention_forward"].spill_stores == 0
    assert "serialized" not in cubin.log
