"""The heads' kernels compiled for Hopper at the sizes of HAL's heads: no spills to speak of, no transposed result."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.slow
MOST_SPILLED = 64  # bytes a thread: addresses that are kept across the statistics of the state


def report() -> list[dict[str, object]]:
    """Registers, spills and transposes of each head's kernel; in a process without the interpreter."""
    from ridgeline.ops._triton.compiled import compile_kernel, transposed_results
    from ridgeline.ops.policy_heads import launch
    from ridgeline.ops.policy_heads import triton as kernels
    from ridgeline.ops.policy_heads.layout import CHUNK, layout

    plan, rows = layout(512, ((256, 9), (260, 37), (279, 6))), []
    names = {"*bf16": "x p a side dl b down down_bias", "*fp32": "state rows partials s c", "*i64": "targets"}
    pointers = {f"{name}_ptr": kind for kind, group in names.items() for name in group.split()}
    for place in plan.heads:
        config = launch.head_config(place)
        constants = {
            "C": plan.width, "E": place.earlier, "V": place.classes, "H": place.padded, "W": plan.inner,
            "SIDE": plan.side, "DL": plan.gradient, "SUMS": plan.sums, "CLASS_AT": place.class_at,
            "STATISTICS_AT": place.statistics_at, "LOSS_AT": plan.classes + 2 * place.index, "HEARD": place.index < 2,
            "GRADIENT": True, "PRECISE": False, "ROWS": config.rows, "CHUNK": CHUNK, "BLOCK_C": config.columns,
            "BLOCK_E": place.block_e, "BLOCK_V": place.block_v, "STAGES": config.stages,
        }  # fmt: skip
        scalars = {"N": "i32", "target_stride": "i32", "eps": "fp32"}
        result = compile_kernel(
            kernels.head_kernel, pointers, scalars, constants, architecture=90, warps=config.warps
        )  # fmt: skip
        rows.append(
            {
                "head": place.index,
                "threads": 32 * config.warps,
                "registers": result.registers,
                "spilled": result.spilled,
                "shared": result.shared,
                "transposed": transposed_results(result.ttgir),
            }
        )
    return rows


def test_head_kernels_on_hopper() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    assert len(rows) == 3
    for row in rows:
        assert row["spilled"] <= MOST_SPILLED, row
        assert row["transposed"] == [], row
        assert row["registers"] * row["threads"] <= 65536, row
        assert row["shared"] <= 99 * 1024, row


if __name__ == "__main__":
    print(json.dumps(report()))
