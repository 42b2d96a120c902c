"""The input layer: the specification.

vector = [tableᵢ[categoriesᵢ] …, numbers, onehot(previousⱼ) …],    out = vector · weightᵀ + bias
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class InputColumns(NamedTuple):
    """What stands in the input vector, in this order.

    Attributes:
        tables: for each column of the categories, the number of its table.
        numbers: how many numbers follow.
        one_hots: (column of the previous controller, its classes) of each one-hot.
    """

    tables: tuple[int, ...]
    numbers: int
    one_hots: tuple[tuple[int, int], ...]


def input_layer_reference(
    categories_NK: Tensor | None,
    numbers_NM: Tensor | None,
    previous_NH: Tensor | None,
    columns: InputColumns,
    tables: Sequence[Tensor],
    weight_CW: Tensor,
    bias_C: Tensor,
) -> Tensor:
    """(N, C) in the weight's dtype."""
    dtype, parts = weight_CW.dtype, []
    for place, table in enumerate(columns.tables):
        assert categories_NK is not None
        parts.append(F.embedding(categories_NK[:, place].long(), tables[table]))
    if columns.numbers:
        assert numbers_NM is not None
        parts.append(numbers_NM.to(dtype))
    for place, classes in columns.one_hots:
        assert previous_NH is not None
        parts.append(F.one_hot(previous_NH[:, place].long(), classes).to(dtype))
    return F.linear(torch.cat(parts, dim=1), weight_CW, bias_C)
