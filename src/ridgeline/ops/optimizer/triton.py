"""Norm, clip, AdamW and all counters of a step in two kernels; nothing that changes between steps passes the host.

The first kernel sums squares, one partial a program; the program that arrives last adds the partials in a fixed
order, decides whether the step counts, and writes the plan (coefficient of the gradient, rate, step size, correction)
and every counter. The second reads the plan and passes over the buffers once. Bytes a parameter with a 16-bit copy:
4 for the norm, 30 for the update. Where the kernels that wrote gradients have left sums of their squares, the first
reads these sums and the gradients that they are not of.
"""

# mypy: disallow-untyped-defs=False
# (kernels take Triton values, for which there are no types)
from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.ops._triton.early import early_launch, previous_done
from ridgeline.ops._triton.support import Launch, grid_rows, processors
from ridgeline.ops.optimizer.reference import CLIP_EPS, AdamWSettings, AdamWState, KnownSquares

_CLIP_EPS = tl.constexpr(CLIP_EPS)
PLAN = 8  # fp32 numbers of a step's plan: what the gradient is multiplied by, the rate, …, whether the step counts
MAX_PARTIALS = 1024
_COEFFICIENT, _RATE, _STEP_SIZE, _ROOT_CORRECTION, _UPDATE = (tl.constexpr(slot) for slot in range(5))


@triton.jit
def plan_ahead(
    rates_ptr, seed_step_ptr, applied_ptr, skipped_ptr, loss_ptr, weight_ptr, scale_ptr, rates,
    LOG_BETA_1: tl.constexpr, LOG_BETA_2: tl.constexpr,
):  # fmt: skip
    """What is known before the norm: step, rate, loss, divisor, steps applied, step size, correction, steps skipped."""
    step = tl.load(seed_step_ptr + 1)
    rate = tl.load(rates_ptr + tl.minimum(step, rates - 1))
    loss, divisor = tl.load(loss_ptr), 1.0
    if scale_ptr is not None:
        divisor *= tl.load(scale_ptr)
    if weight_ptr is not None:
        divisor *= tl.load(weight_ptr)
        loss = tl.div_rn(loss, tl.load(weight_ptr))
    applied = tl.load(applied_ptr)
    # in fp64: 1 − β^t loses four digits in fp32 at the first steps
    exponent = applied.to(tl.float64) + 1.0
    correction_1 = 1.0 - tl.exp(exponent * tl.full((), LOG_BETA_1, tl.float64))
    correction_2 = 1.0 - tl.exp(exponent * tl.full((), LOG_BETA_2, tl.float64))
    size = (rate.to(tl.float64) / correction_1).to(tl.float32)
    skipped, in_a_row = tl.load(skipped_ptr), tl.load(skipped_ptr + 1)
    return step, rate, loss, divisor, applied, size, tl.sqrt(correction_2).to(tl.float32), skipped, in_a_row


@triton.jit
def plan_step(
    squares, step, rate, loss, divisor, applied, size, root_correction, skipped, in_a_row, plan_ptr, seed_step_ptr,
    applied_ptr, skipped_ptr, ring_ptr, scale_ptr, growth_ptr, max_norm, growth, backoff, interval, RING: tl.constexpr,
):  # fmt: skip
    """The scalar part of a step, given the gradient's sum of squares and what `plan_ahead` knew."""
    norm = tl.div_rn(tl.sqrt_rn(squares), divisor)
    finite = tl.abs(norm + loss) < float("inf")  # false for NaN too
    tl.store(applied_ptr, applied + finite.to(tl.float32))
    excess = tl.maximum(tl.div_rn(norm + _CLIP_EPS, max_norm), 1.0)
    tl.store(plan_ptr + _COEFFICIENT, tl.div_rn(1.0, divisor * excess))
    tl.store(plan_ptr + _RATE, rate)
    tl.store(plan_ptr + _STEP_SIZE, size)
    tl.store(plan_ptr + _ROOT_CORRECTION, root_correction)
    tl.store(plan_ptr + _UPDATE, finite.to(tl.float32))
    row_ptr = ring_ptr + (step % RING) * 4
    tl.store(row_ptr, loss)
    tl.store(row_ptr + 1, norm)
    tl.store(row_ptr + 2, rate)
    tl.store(row_ptr + 3, 1.0 - finite.to(tl.float32))
    tl.store(skipped_ptr, skipped + 1 - finite.to(tl.int64))
    tl.store(skipped_ptr + 1, (in_a_row + 1) * (1 - finite.to(tl.int64)))
    if growth_ptr is not None:  # as torch._amp_update_scale_
        scale, calm = tl.load(scale_ptr), tl.load(growth_ptr) + 1
        grown = tl.where(calm == interval, scale * growth, scale)
        grown = tl.where(grown < float("inf"), grown, scale)
        tl.store(scale_ptr, tl.where(finite, grown, scale * backoff))
        tl.store(growth_ptr, tl.where(finite & (calm != interval), calm, 0))
    tl.store(seed_step_ptr + 1, step + 1)


@triton.jit
def adamw_plan_kernel(
    gradient_ptr, partials_ptr, arrivals_ptr, plan_ptr, rates_ptr, seed_step_ptr, applied_ptr, skipped_ptr, ring_ptr,
    loss_ptr, weight_ptr, scale_ptr, growth_ptr, M, rates, max_norm, growth, backoff, interval,
    known_ptr, pieces_ptr, known, pieces,
    LOG_BETA_1: tl.constexpr, LOG_BETA_2: tl.constexpr, RING: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Sum of squares of the gradient; the last program to arrive plans the step and resets the arrival count.

    With squares known already, the first programs add these and the last ones read the pieces of the gradient (first,
    end) that they are not of. Every program reads the scalars first, so that the last one need not wait for them when
    all wait for it.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    piece = programs - 1 - program
    if pieces_ptr is not None:  # a table that no kernel writes, so it may be read before the kernel before has ended
        first = tl.load(pieces_ptr + 2 * piece, mask=piece < pieces, other=0)
        end = tl.load(pieces_ptr + 2 * piece + 1, mask=piece < pieces, other=0)
    previous_done(EARLY)
    step, rate, loss, divisor, applied, size, root_correction, skipped, in_a_row = plan_ahead(
        rates_ptr, seed_step_ptr, applied_ptr, skipped_ptr, loss_ptr, weight_ptr, scale_ptr, rates, LOG_BETA_1,
        LOG_BETA_2,
    )  # fmt: skip
    lanes = tl.arange(0, BLOCK)
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    if known_ptr is not None:
        for tile in tl.range(program, tl.cdiv(known, BLOCK), programs):
            offset = tile * BLOCK + lanes
            squares += tl.load(known_ptr + offset, mask=offset < known, other=0.0)
        for now in tl.range(piece, pieces, programs):
            g = tl.load(gradient_ptr + first + lanes, mask=first + lanes < end, other=0.0)
            squares += g * g
            following = now + programs
            first = tl.load(pieces_ptr + 2 * following, mask=following < pieces, other=0)
            end = tl.load(pieces_ptr + 2 * following + 1, mask=following < pieces, other=0)
    else:
        for tile in tl.range(program, tl.cdiv(M, BLOCK), programs, num_stages=STAGES):
            offset = tl.cast(tile, tl.int64) * BLOCK + lanes
            g = tl.load(gradient_ptr + offset, mask=offset < M, other=0.0)
            squares += g * g
    tl.store(partials_ptr + program, tl.sum(squares, axis=0))
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals_ptr, 1, sem="acq_rel", scope="gpu")
    if arrived == programs - 1:
        rows = tl.arange(0, BLOCK_P)
        parts = tl.load(partials_ptr + rows, mask=rows < programs, other=0.0, volatile=True)
        plan_step(
            tl.sum(parts, axis=0), step, rate, loss, divisor, applied, size, root_correction, skipped, in_a_row,
            plan_ptr, seed_step_ptr, applied_ptr, skipped_ptr, ring_ptr, scale_ptr, growth_ptr, max_norm, growth,
            backoff, interval, RING,
        )  # fmt: skip
        tl.store(arrivals_ptr, 0)


@triton.jit
def adamw_update_kernel(
    weights_ptr, gradient_ptr, moment_1_ptr, moment_2_ptr, copy_ptr, plan_ptr, M, start, boundary,
    weight_decay, complement_1, beta_2, complement_2, eps, BLOCK: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """One pass: clipped gradient, moments, decayed and updated weights, their 16-bit copy."""
    previous_done(EARLY)
    offset = start + tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < M
    if tl.load(plan_ptr + _UPDATE) != 0.0:
        g = tl.load(gradient_ptr + offset, mask=inside, other=0.0) * tl.load(plan_ptr + _COEFFICIENT)
        w = tl.load(weights_ptr + offset, mask=inside, other=0.0)
        m = tl.load(moment_1_ptr + offset, mask=inside, other=0.0)
        v = tl.load(moment_2_ptr + offset - start, mask=inside, other=0.0)
        w *= 1.0 - tl.load(plan_ptr + _RATE) * tl.where(offset < boundary, weight_decay, 0.0)
        m += (g - m) * complement_1
        v = v * beta_2 + g * g * complement_2
        denominator = tl.div_rn(tl.sqrt_rn(v), tl.load(plan_ptr + _ROOT_CORRECTION)) + eps
        w -= tl.load(plan_ptr + _STEP_SIZE) * tl.div_rn(m, denominator)
        tl.store(weights_ptr + offset, w, mask=inside)
        tl.store(moment_1_ptr + offset, m, mask=inside)
        tl.store(moment_2_ptr + offset - start, v, mask=inside)
        if copy_ptr is not None:
            tl.store(copy_ptr + offset, w.to(copy_ptr.dtype.element_ty), mask=inside)


def plan_config(M: int) -> Launch:
    """The launch of the norm kernel for M parameters."""
    return Launch(rows=1, columns=4096, warps=8, per_processor=4)


def update_config(M: int) -> Launch:
    """The launch of the update kernel for M parameters."""
    return Launch(rows=1, columns=1024, warps=4)


def workspace(device: torch.device) -> Tensor:
    """The step's private fp32 memory: plan, arrival count (as int32 bits) and partials. Zero before the first step."""
    return torch.zeros(PLAN + 8 + MAX_PARTIALS, dtype=torch.float32, device=device)


def plan_numbers(work: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of the step planned last: what multiplies the gradient, the rate, 1 where it counts; fp32[1] each."""
    return work[0:1], work[1:2], work[4:5]


@functools.lru_cache(maxsize=128)
def _pieces(rest: tuple[tuple[int, int], ...], columns: int, device: torch.device) -> Tensor:
    """int64[pieces, 2]: first and end of at most so many elements each; made before a capture, kept for it."""
    rows = [(start, min(start + columns, end)) for first, end in rest for start in range(first, end, columns)]
    return torch.tensor(rows, dtype=torch.int64).view(-1, 2).to(device)


def _logarithm(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf


def adamw_raw(
    state: AdamWState,
    settings: AdamWSettings,
    work: Tensor,
    *,
    known: KnownSquares | None = None,
    plan: Launch | None = None,
    update: Launch | None = None,
) -> None:
    """One step in place; allocates nothing, reads nothing back.

    Args:
        state: the flat buffers and device-side scalars.
        settings: what stays the same over the run.
        work: what `workspace` returned.
        known: squares of gradients that need not be read for the norm; None to read all.
        plan: launch of the norm kernel; None for the frozen one.
        update: launch of the update kernel; None for the frozen one.
    """
    M = state.weights.numel()
    plan, update = plan or plan_config(M), update or update_config(M)
    pieces = None if known is None else _pieces(known.rest, plan.columns, work.device)
    sums = 0 if known is None else len(known.partials)
    tiles = grid_rows(M, plan.columns) if pieces is None else len(pieces) + grid_rows(sums, plan.columns)
    programs = min(tiles, plan.per_processor * processors(work.device), MAX_PARTIALS)
    plan_P, arrivals, partials = work[:PLAN], work[PLAN : PLAN + 1].view(torch.int32), work[PLAN + 8 :]
    adamw_plan_kernel[(programs,)](
        state.gradient, partials, arrivals, plan_P, state.rates, state.seed_step, state.applied, state.skipped,
        state.ring, state.loss, state.weight, state.loss_scale, state.growth, M, state.rates.shape[0],
        settings.max_norm, settings.growth, settings.backoff, settings.interval,
        None if known is None else known.partials, pieces, sums, 0 if pieces is None else len(pieces),
        LOG_BETA_1=_logarithm(settings.beta_1), LOG_BETA_2=_logarithm(settings.beta_2), RING=state.ring.shape[0],
        BLOCK_P=MAX_PARTIALS, BLOCK=plan.columns, STAGES=plan.stages, num_warps=plan.warps,
        **early_launch(work.device),
    )  # fmt: skip
    if state.start == M:
        return
    adamw_update_kernel[(grid_rows(M - state.start, update.columns),)](
        state.weights, state.gradient, state.moment_1, state.moment_2, state.copy, plan_P, M, state.start,
        state.boundary, settings.weight_decay, 1 - settings.beta_1, settings.beta_2, 1 - settings.beta_2, settings.eps,
        BLOCK=update.columns, num_warps=update.warps, **early_launch(work.device),
    )  # fmt: skip
