"""The input layer with an explicit forward and backward. Imports Triton."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ridgeline.ops.embedding.triton import table_gradient_raw
from ridgeline.ops.inputs.reference import InputColumns
from ridgeline.ops.inputs.tables import Shapes, fits, length_of, table_gradients_raw
from ridgeline.ops.inputs.triton import CATEGORY, NUMBER, ONE, ONE_HOT, PADDING, input_vector_raw
from ridgeline.ops.linear.products import weight_gradient_raw
from ridgeline.ops.sink import sink_of


def padded(n: int) -> int:
    """The multiple of 8 that is at least n."""
    return -(-n // 8) * 8


@functools.lru_cache(maxsize=64)
def column_table(columns: InputColumns, shapes: Shapes, device: torch.device) -> Tensor:
    """int32[W, 5], what stands in each column of the padded vector; made before a capture, kept for it."""
    starts = [sum(rows * width for rows, width in shapes[:index]) for index in range(len(shapes))]
    entries: list[tuple[int, int, int, int, int]] = []
    for place, table in enumerate(columns.tables):
        rows, width = shapes[table]
        entries += [(CATEGORY, place, starts[table] + d, width, rows) for d in range(width)]
    entries += [(NUMBER, place, 0, 0, 0) for place in range(columns.numbers)]
    entries += [(ONE_HOT, place, value, 0, 0) for place, classes in columns.one_hots for value in range(classes)]
    entries.append((ONE, 0, 0, 0, 0))
    entries += [(PADDING, 0, 0, 0, 0)] * (padded(len(entries)) - len(entries))
    return torch.tensor(entries, dtype=torch.int32).to(device)


def _embedded(columns: InputColumns, shapes: Shapes) -> int:
    """Numbers of the vector that come from tables."""
    return sum(shapes[table][1] for table in columns.tables)


def _groups(columns: InputColumns, shapes: Shapes) -> list[tuple[int, int, int, int]]:
    """Neighbouring category columns of one table: (table, first column, columns, first number of the vector)."""
    groups: list[tuple[int, int, int, int]] = []
    offset = 0
    for place, table in enumerate(columns.tables):
        if groups and groups[-1][0] == table:
            last = groups.pop()
            groups.append((table, last[1], last[2] + 1, last[3]))
        else:
            groups.append((table, place, 1, offset))
        offset += shapes[table][1]
    return groups


def _table_gradients(
    dout_NC: Tensor, wide_CW: Tensor, categories_NK: Tensor | None, columns: InputColumns, shapes: Shapes
) -> list[Tensor]:
    """The gradient of every table, fp32."""
    flat = dout_NC.new_empty(length_of(shapes), dtype=torch.float32)
    tables = [part.view(shape) for part, shape in zip(flat.split([r * w for r, w in shapes]), shapes, strict=True)]
    embedded = padded(_embedded(columns, shapes))
    if categories_NK is None or not embedded:
        flat.zero_()
        return tables
    dvector_NE = dout_NC @ wide_CW[:, :embedded]
    if fits(shapes, dout_NC.device, dout_NC.dtype):
        table_gradients_raw(dvector_NE, categories_NK, columns, shapes, flat)
        return tables
    groups = _groups(columns, shapes)
    if len({table for table, *_ in groups}) < len(shapes):
        flat.zero_()
    seen: set[int] = set()
    for table, first, count, offset in groups:
        part_NX = dvector_NE[:, offset : offset + count * shapes[table][1]]
        table_gradient_raw(part_NX, categories_NK[:, first : first + count], tables[table], accumulate=table in seen)
        seen.add(table)
    return tables


class InputLayer(torch.autograd.Function):
    """vector · weightᵀ + bias, the bias as the weight of a 1 that stands behind the vector."""

    @staticmethod
    def forward(
        ctx: Any,
        categories_NK: Tensor | None,
        numbers_NM: Tensor | None,
        previous_NH: Tensor | None,
        columns: InputColumns,
        weight_CW: Tensor,
        bias_C: Tensor,
        *tables: Tensor,
    ) -> Tensor:
        shapes: Shapes = tuple((table.shape[0], table.shape[1]) for table in tables)
        place = column_table(columns, shapes, weight_CW.device)
        N = next(part.shape[0] for part in (categories_NK, numbers_NM, previous_NH) if part is not None)
        vector_NW = weight_CW.new_empty(N, place.shape[0])
        elements = torch.cat([table.reshape(-1) for table in tables]) if tables else weight_CW.new_empty(0)
        input_vector_raw(categories_NK, numbers_NM, previous_NH, elements, place, _embedded(columns, shapes), vector_NW)
        wide_CW = weight_CW.new_zeros(weight_CW.shape[0], place.shape[0])
        width = weight_CW.shape[1]
        wide_CW[:, :width], wide_CW[:, width] = weight_CW, bias_C
        ctx.columns, ctx.shapes, ctx.categories_NK = columns, shapes, categories_NK
        ctx.vector_NW, ctx.wide_CW, ctx.width = vector_NW, wide_CW, width
        ctx.sinks = [sink_of(weight) for weight in (weight_CW, bias_C, *tables)]
        return torch.mm(vector_NW, wide_CW.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_NC: Tensor) -> tuple[Tensor | None, ...]:
        dout_NC = dout_NC.contiguous()
        gradients: list[Tensor] = []
        fp32_CW = dout_NC.new_empty(ctx.wide_CW.shape, dtype=torch.float32)
        weight_gradient_raw(dout_NC, ctx.vector_NW, fp32_CW, accumulate=False)
        gradients += [fp32_CW[:, : ctx.width], fp32_CW[:, ctx.width]]
        gradients += _table_gradients(dout_NC, ctx.wide_CW, ctx.categories_NK, ctx.columns, ctx.shapes)
        for index, sink in enumerate(ctx.sinks):
            if sink is not None:
                sink.put(gradients[index])
        found = [
            gradient.to(dout_NC.dtype) if sink is None else None
            for gradient, sink in zip(gradients, ctx.sinks, strict=True)
        ]
        return None, None, None, None, *found
