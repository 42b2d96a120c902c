"""The gradients of small tables in one pass: run on the host by tests/ops/emulation against float64, and compiled."""

import ctypes
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from ridgeline.ops import _cuda as cuda
from ridgeline.ops.inputs import InputColumns, tables

COLUMNS = InputColumns(tables=(0, 1, 1, 2, 2, 1), numbers=3, one_hots=())
SHAPES = ((7, 4), (33, 12), (40, 40))
HAL = (InputColumns(tables=(0, 1, 1, 2, 2), numbers=18, one_hots=()), ((7, 4), (33, 12), (400, 32)))

SOURCE = """#include "tables_sm90.cu"
extern "C" const char* run(const rl::u16* dvector, const void* ids, const Place* places, float* partials, int rows,
                           int stride, int ids_stride, int grid, int random) {
  return emulation::launch(grid, 32 * WARPS, random, false, [=] {
    tables(dvector, ids, places, partials, rows, stride, ids_stride);
  });
}
"""


@pytest.mark.parametrize(("columns", "shapes"), [(COLUMNS, SHAPES), HAL], ids=["many columns", "hal"])
def test_rounds_have_every_number_once_and_no_table_twice(columns: InputColumns, shapes: tables.Shapes) -> None:
    found = tables.rounds(columns, shapes)
    lanes = [lane for lanes in found for lane in lanes if lane != tables.NOTHING]
    assert sorted(source for source, *_ in lanes) == list(range(sum(shapes[table][1] for table in columns.tables)))
    for lanes in found:
        assert len(lanes) == tables.LANES
        pairs = {(columns.tables[category], category) for _, category, *_, rows in lanes if rows}
        assert len({table for table, _ in pairs}) == len(pairs)
    assert len(tables.rounds(*HAL)) == 3


@pytest.mark.parametrize(("rows", "grid", "dtype"), [(150, 2, torch.int16), (7, 1, torch.int64), (90, 1, torch.uint8)])
def test_kernel_matches_float64(rows: int, grid: int, dtype: torch.dtype, emulation: Any) -> None:
    torch.manual_seed(rows)
    width = sum(SHAPES[table][1] for table in COLUMNS.tables)
    dvector = torch.randn(rows, width + 8).bfloat16()
    ids = torch.stack([torch.randint(SHAPES[table][0], (rows,)) for table in COLUMNS.tables], 1).to(dtype)
    ids[3, 2] = 100  # of no table
    macros = tables.defines(COLUMNS, SHAPES, torch.bfloat16, dtype) | {"WARPS": 3}
    partials = torch.full((grid, macros["LENGTH"]), float("nan"))
    places = torch.tensor(tables.rounds(COLUMNS, SHAPES), dtype=torch.int32)
    sizes = (rows, dvector.stride(0), ids.stride(0), grid, rows)
    pointers = (ctypes.c_void_p(x.data_ptr()) for x in (dvector, ids, places, partials))
    fault = emulation.compile(SOURCE, macros, tables.SOURCE.parent)(*pointers, *sizes)
    assert fault is None
    right, offset = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES], 0
    for category, table in enumerate(COLUMNS.tables):
        part = dvector[:, offset : offset + SHAPES[table][1]].double()
        known = ids[:, category].long() < SHAPES[table][0]
        right[table].index_add_(0, ids[known, category].long(), part[known])
        offset += SHAPES[table][1]
    torch.testing.assert_close(partials.sum(0).double(), torch.cat([x.flatten() for x in right]), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("needs_nvrtc")
def test_compiles_for_hopper(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    macros = tables.defines(*HAL, torch.bfloat16, torch.int16)
    usage = cuda.build(tables.SOURCE, macros).resources()["tables"]
    assert (usage.spill_loads, usage.spill_stores) == (0, 0)
    assert macros["WARPS"] == 4
    assert 4 * macros["WARPS"] * macros["LENGTH"] <= tables.SMEM_LIMIT


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("columns", "shapes"), [(COLUMNS, SHAPES), HAL], ids=["many columns", "hal"])
def test_gradients_on_a_card(columns: InputColumns, shapes: tables.Shapes, dtype: torch.dtype) -> None:
    if not tables.fits(shapes, torch.device("cuda"), dtype):
        pytest.skip("needs compute capability 9.0")
    torch.manual_seed(0)
    rows, width = 20_011, sum(shapes[table][1] for table in columns.tables)
    ids = torch.stack([torch.randint(shapes[table][0], (rows,), device="cuda") for table in columns.tables], 1).short()
    dvector = torch.randn(rows, -(-width // 8) * 8, device="cuda").to(dtype)
    found = [torch.full((tables.length_of(shapes),), float("nan"), device="cuda") for _ in range(2)]
    for flat in found:
        tables.table_gradients_raw(dvector, ids, columns, shapes, flat)
    assert torch.equal(*found)
    right, offset = [torch.zeros(shape, dtype=torch.float64, device="cuda") for shape in shapes], 0
    for category, table in enumerate(columns.tables):
        part = dvector[:, offset : offset + shapes[table][1]].double()
        right[table].index_add_(0, ids[:, category].long(), part)
        offset += shapes[table][1]
    torch.testing.assert_close(found[0].double(), torch.cat([x.flatten() for x in right]), rtol=1e-5, atol=1e-3)
