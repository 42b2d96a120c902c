"""Clip and AdamW over flat buffers in two kernels; nothing that changes between steps passes through the host.

The first kernel sums squares, one partial a program; the program that finishes last adds the partials in a fixed
order and writes the step's plan (clip coefficient, step size, corrections, whether to update). The second reads the
plan and passes over the buffers once: 30 bytes a parameter with a 16-bit copy, 34 when it clears the gradient too.
"""

# mypy: disallow-untyped-defs=False
# (kernels take Triton values, for which there are no types)
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.ops._triton.support import Launch, grid_rows, processors
from ridgeline.ops.optimizer.reference import CLIP_EPS, AdamWSettings, AdamWState

_CLIP_EPS = tl.constexpr(CLIP_EPS)
PLAN = 8  # fp32 numbers of a step's plan
_COEFFICIENT, _RATE, _STEP_SIZE, _ROOT_CORRECTION, _UPDATE = (tl.constexpr(slot) for slot in range(5))


@triton.jit
def adamw_plan_kernel(
    gradient_ptr, partials_ptr, arrivals_ptr, plan_ptr, rate_ptr, counters_ptr, norm_ptr, scale_ptr, M, max_norm,
    LOG_BETA_1: tl.constexpr, LOG_BETA_2: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Global norm of the gradient; the last program to arrive plans the step and resets the arrival count."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    lanes = tl.arange(0, BLOCK)
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    for tile in tl.range(program, tl.cdiv(M, BLOCK), programs):
        offset = tl.cast(tile, tl.int64) * BLOCK + lanes
        g = tl.load(gradient_ptr + offset, mask=offset < M, other=0.0)
        squares += g * g
    tl.store(partials_ptr + program, tl.sum(squares, axis=0))
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals_ptr, 1, sem="acq_rel", scope="gpu")
    if arrived == programs - 1:
        rows = tl.arange(0, BLOCK_P)
        parts = tl.load(partials_ptr + rows, mask=rows < programs, other=0.0, volatile=True)
        norm = tl.sqrt_rn(tl.sum(parts, axis=0))
        scale = 1.0
        if scale_ptr is not None:
            scale = tl.load(scale_ptr)
        norm *= scale
        finite = norm < float("inf")  # false for NaN too
        step = tl.load(counters_ptr) + finite.to(tl.int64)
        tl.store(counters_ptr, step)
        tl.store(counters_ptr + 1, tl.load(counters_ptr + 1) + (1 - finite.to(tl.int64)))
        tl.store(norm_ptr, norm)
        # in fp64: 1 − β^t loses four digits in fp32 at the first steps
        exponent = step.to(tl.float64)
        correction_1 = 1.0 - tl.exp(exponent * tl.full((), LOG_BETA_1, tl.float64))
        correction_2 = 1.0 - tl.exp(exponent * tl.full((), LOG_BETA_2, tl.float64))
        rate = tl.load(rate_ptr)
        tl.store(plan_ptr + _COEFFICIENT, scale * tl.minimum(tl.div_rn(max_norm, norm + _CLIP_EPS), 1.0))
        tl.store(plan_ptr + _RATE, rate)
        tl.store(plan_ptr + _STEP_SIZE, (rate.to(tl.float64) / correction_1).to(tl.float32))
        tl.store(plan_ptr + _ROOT_CORRECTION, tl.sqrt(correction_2).to(tl.float32))
        tl.store(plan_ptr + _UPDATE, finite.to(tl.float32))
        tl.store(arrivals_ptr, 0)


@triton.jit
def adamw_update_kernel(
    weights_ptr, gradient_ptr, moment_1_ptr, moment_2_ptr, decay_ptr, copy_ptr, plan_ptr, M,
    complement_1, beta_2, complement_2, eps,
    GRANULE: tl.constexpr, CLEAR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One pass: clipped gradient, moments, decayed and updated weights, their 16-bit copy; clears the gradient."""
    offset = tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < M
    if tl.load(plan_ptr + _UPDATE) != 0.0:
        g = tl.load(gradient_ptr + offset, mask=inside, other=0.0) * tl.load(plan_ptr + _COEFFICIENT)
        w = tl.load(weights_ptr + offset, mask=inside, other=0.0)
        m = tl.load(moment_1_ptr + offset, mask=inside, other=0.0)
        v = tl.load(moment_2_ptr + offset, mask=inside, other=0.0)
        decay = tl.load(decay_ptr + offset // GRANULE, mask=inside, other=0.0)
        w *= 1.0 - tl.load(plan_ptr + _RATE) * decay
        m += (g - m) * complement_1
        v = v * beta_2 + g * g * complement_2
        denominator = tl.div_rn(tl.sqrt_rn(v), tl.load(plan_ptr + _ROOT_CORRECTION)) + eps
        w -= tl.load(plan_ptr + _STEP_SIZE) * tl.div_rn(m, denominator)
        tl.store(weights_ptr + offset, w, mask=inside)
        tl.store(moment_1_ptr + offset, m, mask=inside)
        tl.store(moment_2_ptr + offset, v, mask=inside)
        if copy_ptr is not None:
            tl.store(copy_ptr + offset, w.to(copy_ptr.dtype.element_ty), mask=inside)
    if CLEAR:
        tl.store(gradient_ptr + offset, tl.zeros((BLOCK,), dtype=tl.float32), mask=inside)


def plan_config(M: int) -> Launch:
    """The launch of the norm kernel for M parameters."""
    return Launch(rows=1, columns=2048, warps=8, per_processor=2)


def update_config(M: int) -> Launch:
    """The launch of the update kernel for M parameters."""
    return Launch(rows=1, columns=1024, warps=4)


def _logarithm(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf


def workspace(device: torch.device) -> Tensor:
    """The step's private fp32 memory: plan, arrival count (as int32 bits) and partials. Zero before the first step."""
    return torch.zeros(PLAN + 8 + 1024, device=device)


def adamw_raw(
    state: AdamWState,
    settings: AdamWSettings,
    work: Tensor,
    *,
    clear: bool = False,
    plan: Launch | None = None,
    update: Launch | None = None,
) -> None:
    """One step in place; allocates nothing, reads nothing back.

    Args:
        state: the flat buffers and device-side scalars.
        settings: what stays the same over the run.
        work: what `workspace` returned.
        clear: whether to zero the gradient on the way.
        plan, update: launches; None for the frozen ones.
    """
    M = state.weights.numel()
    plan, update = plan or plan_config(M), update or update_config(M)
    programs = min(grid_rows(M, plan.columns), plan.per_processor * processors(work.device), 1024)
    plan_P, arrivals, partials = work[:PLAN], work[PLAN : PLAN + 1].view(torch.int32), work[PLAN + 8 :]
    adamw_plan_kernel[(programs,)](
        state.gradient, partials, arrivals, plan_P, state.learning_rate, state.counters, state.norm,
        state.gradient_scale, M, settings.max_norm,
        LOG_BETA_1=_logarithm(settings.beta_1), LOG_BETA_2=_logarithm(settings.beta_2),
        BLOCK_P=1024, BLOCK=plan.columns, num_warps=plan.warps,
    )  # fmt: skip
    adamw_update_kernel[(grid_rows(M, update.columns),)](
        state.weights, state.gradient, state.moment_1, state.moment_2, state.decay, state.copy, plan_P, M,
        1 - settings.beta_1, settings.beta_2, 1 - settings.beta_2, settings.eps,
        GRANULE=M // state.decay.numel(), CLEAR=clear, BLOCK=update.columns, num_warps=update.warps,
    )  # fmt: skip
