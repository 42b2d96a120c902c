"""The public function of the input layer.

reference   plain torch, which is also what an ordinary model does (reference.py)
triton      the vector in one launch, padded; deterministic gradients of the tables
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ridgeline.errors import UnsupportedError
from ridgeline.ops import checks
from ridgeline.ops._triton.support import availability, demand
from ridgeline.ops.inputs.reference import InputColumns, input_layer_reference

IMPLEMENTATIONS = ("reference", "triton")
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def available(impl: str, device: torch.device) -> str | None:
    """Why `impl` cannot run on `device`, or None when it can."""
    return availability(impl, IMPLEMENTATIONS, device)


def _check_parts(
    columns: InputColumns, tables: Sequence[Tensor], parts: dict[str, Tensor | None], weight_CW: Tensor, bias_C: Tensor
) -> None:
    """What the vector is made of is there, in shapes and integers that fit together."""
    categories_NK, numbers_NM, previous_NH = parts.values()
    for (name, part), wanted in zip(parts.items(), (columns.tables, columns.numbers, columns.one_hots), strict=True):
        if wanted and part is None:
            raise UnsupportedError(f"the columns take {name}, got None")
    if columns.tables and not 0 <= min(columns.tables) <= max(columns.tables) < len(tables):
        raise UnsupportedError(f"the columns name tables {columns.tables}, got {len(tables)} tables")
    width = sum(tables[table].shape[1] for table in columns.tables) + columns.numbers
    width += sum(classes for _, classes in columns.one_hots)
    checks.shape("weight_CW", weight_CW, (weight_CW.shape[0], width))
    checks.shape("bias_C", bias_C, (weight_CW.shape[0],))
    N = next(part.shape[0] for part in parts.values() if part is not None)
    checks.shape("categories_NK", categories_NK, (N, len(columns.tables)))
    checks.shape("numbers_NM", numbers_NM, (N, columns.numbers))
    for name, part in (("categories_NK", categories_NK), ("previous_NH", previous_NH)):
        if part is not None and part.dtype not in _INTEGERS:
            raise UnsupportedError(f"{name} must be integers, got {part.dtype}")
    if previous_NH is not None:
        checks.shape("previous_NH", previous_NH, (N, previous_NH.shape[1]))
        places = [place for place, _ in columns.one_hots]
        if places and not 0 <= min(places) <= max(places) < previous_NH.shape[1]:
            raise UnsupportedError(f"the columns name columns {places} of previous_NH, got {tuple(previous_NH.shape)}")


def input_layer(
    categories_NK: Tensor | None,
    numbers_NM: Tensor | None,
    previous_NH: Tensor | None,
    columns: InputColumns,
    tables: Sequence[Tensor],
    weight_CW: Tensor,
    bias_C: Tensor,
    *,
    impl: str = "reference",
) -> Tensor:
    """Embeddings, numbers and one-hots side by side, times a weight.

    Args:
        categories_NK: integers, a row of `tables[columns.tables[k]]` each, or None.
        numbers_NM: floats, or None.
        previous_NH: integers, the classes of the previous controller, or None.
        columns: what stands in the vector.
        tables: (rows, width) each, in the weight's dtype.
        weight_CW: fp32, bf16 or fp16; W the vector's length.
        bias_C: added to the product.
        impl: "reference" or "triton" (where an index out of its table gives NaN).

    Returns:
        (N, C) in the weight's dtype. Gradients flow to weight, bias and tables.

    Raises:
        UnsupportedError: the implementation cannot run here, or a shape, dtype, stride or device it does not take.
    """
    demand(impl, IMPLEMENTATIONS, weight_CW.device)
    parts = {"categories_NK": categories_NK, "numbers_NM": numbers_NM, "previous_NH": previous_NH}
    if all(part is None for part in parts.values()):
        raise UnsupportedError("an input layer needs categories, numbers or a previous controller, got none of them")
    rows = {f"table {index}": table for index, table in enumerate(tables)}
    checks.axes(2, weight_CW=weight_CW, **parts, **rows)
    checks.floats(weight_CW=weight_CW, bias_C=bias_C, numbers_NM=numbers_NM, **rows)
    checks.alike("weight_CW", weight_CW, strict=impl == "triton", bias_C=bias_C, **rows)
    checks.devices(weight_CW.device, bias_C=bias_C, **parts, **rows)
    _check_parts(columns, tables, parts, weight_CW, bias_C)
    if impl == "reference":
        return input_layer_reference(categories_NK, numbers_NM, previous_NH, columns, tables, weight_CW, bias_C)
    checks.storage(weight_CW=weight_CW, bias_C=bias_C, **rows)
    for name, part in parts.items():
        if part is not None and not part.is_contiguous():
            raise UnsupportedError(f"{name} must be contiguous, got strides {part.stride()}")
    from ridgeline.ops.inputs.function import InputLayer

    return InputLayer.apply(categories_NK, numbers_NM, previous_NH, columns, weight_CW, bias_C, *tables)
