"""Muon's passes over the flat buffers, a kernel each: 14 bytes a parameter before, 12 with a 16-bit copy after."""

# mypy: disallow-untyped-defs=False
# (kernels take Triton values, for which there are no types)
from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.ops._triton.support import grid_rows
from ridgeline.ops.optimizer.muon import MuonState

BLOCK, WARPS = 1024, 4


@triton.jit
def muon_before_kernel(
    gradient_ptr, momentum_ptr, direction_ptr, coefficient_ptr, counts_ptr, M, mu, complement, BLOCK: tl.constexpr
):
    """See `muon_before`."""
    offset = tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < M
    if tl.load(counts_ptr) != 0.0:
        g = tl.load(gradient_ptr + offset, mask=inside, other=0.0) * tl.load(coefficient_ptr)
        m = tl.load(momentum_ptr + offset, mask=inside, other=0.0)
        m += (g - m) * complement
        tl.store(momentum_ptr + offset, m, mask=inside)
        tl.store(direction_ptr + offset, (g + (m - g) * mu).to(tl.bfloat16), mask=inside)


@triton.jit
def muon_after_kernel(weights_ptr, direction_ptr, copy_ptr, rate_ptr, counts_ptr, M, weight_decay, BLOCK: tl.constexpr):
    """See `muon_after`."""
    offset = tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < M
    if tl.load(counts_ptr) != 0.0:
        rate = tl.load(rate_ptr)
        w = tl.load(weights_ptr + offset, mask=inside, other=0.0)
        o = tl.load(direction_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        w = w * (1.0 - rate * weight_decay) - rate * o
        tl.store(weights_ptr + offset, w, mask=inside)
        if copy_ptr is not None:
            tl.store(copy_ptr + offset, w.to(copy_ptr.dtype.element_ty), mask=inside)


def muon_before_raw(state: MuonState, momentum: float) -> None:
    """`muon_before`; where the step does not count the direction stays what it was."""
    M = state.weights.numel()
    muon_before_kernel[(grid_rows(M, BLOCK),)](
        state.gradient, state.momentum, state.direction, state.coefficient, state.counts, M, momentum, 1 - momentum,
        BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip


def muon_after_raw(state: MuonState, weight_decay: float) -> None:
    """`muon_after`."""
    M = state.weights.numel()
    muon_after_kernel[(grid_rows(M, BLOCK),)](
        state.weights, state.direction, state.copy, state.rate, state.counts, M, weight_decay,
        BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
