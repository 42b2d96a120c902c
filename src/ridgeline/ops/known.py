"""What a step lets ops know of tensors beyond their values, so that they can leave work out.

one            the gradient of the loss with respect to itself: an op that computes loss and gradient together needs
               not multiply by it
padded_rows    a weight in a flat buffer is followed by zeros up to a multiple of ROWS rows: a product that wants
               that many rows reads them in place
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS = 64
ATTRIBUTE = "padded_rows"

_ONES: dict[torch.device, Tensor] = {}


def one(device: torch.device) -> Tensor:
    """fp32 scalar 1, the same tensor every time, which lives for good; nobody may write to it."""
    if device not in _ONES:
        _ONES[device] = torch.ones((), dtype=torch.float32, device=device)
    return _ONES[device]


def is_one(gradient: Tensor) -> bool:
    """Whether a scalar gradient is `one`'s own memory, so known to be 1 without a look at its value."""
    known = _ONES.get(gradient.device)
    return known is not None and gradient.numel() == 1 and gradient.data_ptr() == known.data_ptr()


def padded_rows(weight_VC: Tensor) -> Tensor | None:
    """The weight with the rows of zeros that follow it, (a multiple of ROWS, C), where a step has told of them."""
    return getattr(weight_VC, ATTRIBUTE, None)
