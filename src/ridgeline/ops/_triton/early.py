"""Triton kernels that are launched early (see ops/early.py): they begin with `previous_done(EARLY)`.

kernel[grid](..., **early_launch(tensor.device))
"""

# mypy: disallow-untyped-defs=False
# (kernels take Triton values, for which there are no types)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.ops.early import early


@triton.jit
def previous_done(EARLY: tl.constexpr):
    """Waits for the end of the kernel before, and lets the one after start its launch."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


def early_launch(device: torch.device) -> dict[str, bool]:
    """The arguments of a launch: the kernel's EARLY, and Triton's option."""
    on = early(device)
    return {"EARLY": on, "launch_pdl": on}
