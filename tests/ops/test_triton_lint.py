"""Compiled for every card without one: no spills, shared memory within the card's, no transposed register result."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ridgeline.ops._triton.compiled import ARCHITECTURES, SHARED_LIMIT

pytest.importorskip("triton")
pytestmark = pytest.mark.slow  # about a hundred compilations: half a minute of one core
SCRIPT = Path(__file__).with_name("triton_kernels.py")


def compile_rows(*arguments: str) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, SCRIPT, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return compile_rows(*map(str, ARCHITECTURES))


def test_every_kernel_was_compiled_for_every_card(rows: list[dict[str, Any]]) -> None:
    names = {row["name"] for row in rows}
    assert len(names) >= 18
    assert {(row["name"], row["architecture"]) for row in rows} == {(n, a) for n in names for a in ARCHITECTURES}


def test_nothing_spills(rows: list[dict[str, Any]]) -> None:
    assert [row for row in rows if row["spilled"]] == []


def test_a_program_fits_the_register_file(rows: list[dict[str, Any]]) -> None:
    assert [row for row in rows if row["registers"] * 32 * row["warps"] > 65536] == []


def test_shared_memory_fits_the_card(rows: list[dict[str, Any]]) -> None:
    assert [row for row in rows if row["shared"] > SHARED_LIMIT[row["architecture"]] * 1024] == []


def test_no_transposed_register_result(rows: list[dict[str, Any]]) -> None:
    assert [row for row in rows if row["transposed"]] == []


def test_the_lint_catches_the_planted_kernel() -> None:
    """dot(trans(dot(…))) for sm_90 is what the lint exists for; the same sum without a transpose passes it."""
    planted = {row["name"]: row for row in compile_rows("--planted")}
    assert planted["transposed result"]["transposed"]
    assert not planted["no transpose"]["transposed"]
