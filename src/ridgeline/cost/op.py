"""The vocabulary of cost: what one op asks of a card, whatever the card.

A multiply and its add count as two FLOPs. Three counts of matrix-product FLOPs are kept apart, because published
numbers mix them up:

    flops           what the model needs: causal attention counts the half under the diagonal, nothing twice
    dense_flops     the same with attention's whole square, as PyTorch's counter and most papers have it
    executed_flops  what the matrix units do under a plan: the square where scores are formed whole, and
                    everything that the backward pass computes a second time

Bytes are the fewest an op can move when it runs alone: every input read once, every output written once.

Arithmetic outside matrix products is counted in slots of the fp32 pipe: an instruction is 2 FLOPs of the card's fp32
peak (a fused multiply-add, whether it is one or not); a special function (exponential, square root, reciprocal)
takes the place of 8 instructions, for a multiprocessor yields 16 of them a clock and 128 of the others (CUDA C++
Programming Guide, arithmetic instructions, compute capability 8.6 to 12.0).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from ridgeline.hardware import Precision

Phase = Literal["forward", "backward", "optimizer"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "optimizer")

INSTRUCTION = 2  # vector FLOPs of one fp32 or integer instruction
SPECIAL = 8 * INSTRUCTION  # vector FLOPs of one special function


class Storage(NamedTuple):
    """Bytes of one number, by what it is.

    Attributes:
        activation: tensors that pass between ops, and the residual stream.
        weight: the weights that products read (16-bit copies of fp32 masters, or the fp32 weights themselves).
        gradient: weight gradients.
        statistic: norm statistics, log-sum-exp, losses.
        slope: GELU's derivative beside its output.
    """

    activation: int
    weight: int
    gradient: int = 4
    statistic: int = 4
    slope: int = 2


def storage(precision: Precision) -> Storage:
    """How the numbers of a training step are stored in a precision."""
    size = 2 if precision in ("bf16", "fp16") else 4
    return Storage(activation=size, weight=size, slope=1 if precision == "bf16" else size)


@dataclass(frozen=True, kw_only=True)
class OpCost:
    """One op in one phase, once; `count` says how often a step runs it.

    Attributes:
        name: the op, as tables print it.
        phase: forward, backward or optimizer.
        flops: matrix-product FLOPs that the model needs.
        dense_flops: the same with the whole square of attention; None where it is `flops`.
        executed_flops: what the matrix units really do; None where it is `flops`.
        vector_flops: arithmetic outside matrix products, in slots of the fp32 pipe (see the module).
        read_bytes, written_bytes: the fewest.
        launches: kernels that it takes at least.
        count: how often a step runs the op.
    """

    name: str
    phase: Phase
    flops: float = 0
    dense_flops: float | None = None
    executed_flops: float | None = None
    vector_flops: float = 0
    read_bytes: float = 0
    written_bytes: float = 0
    launches: int = 1
    count: int = 1

    @property
    def dense(self) -> float:
        """Matrix-product FLOPs with attention's whole square."""
        return self.flops if self.dense_flops is None else self.dense_flops

    @property
    def executed(self) -> float:
        """Matrix-product FLOPs that are really done."""
        return self.flops if self.executed_flops is None else self.executed_flops

    @property
    def bytes(self) -> float:
        """Bytes read and written."""
        return self.read_bytes + self.written_bytes


class StepCost(NamedTuple):
    """All ops of a training step."""

    ops: tuple[OpCost, ...]

    def total(self, field: str, phase: Phase | None = None) -> float:
        """Sum of a field or property of OpCost over the step, or over one phase of it."""
        return sum(getattr(op, field) * op.count for op in self.ops if phase in (None, op.phase))

    @property
    def flops(self) -> float:
        """Matrix-product FLOPs that the model needs: the numerator of MFU."""
        return self.total("flops")

    @property
    def dense_flops(self) -> float:
        """Matrix-product FLOPs with attention's whole square."""
        return self.total("dense")

    @property
    def executed_flops(self) -> float:
        """Matrix-product FLOPs that the plan does: the numerator of hardware utilisation."""
        return self.total("executed")

    @property
    def bytes(self) -> float:
        """The fewest bytes of all ops, one after another."""
        return self.total("bytes")

    @property
    def launches(self) -> int:
        """Kernels that the step takes at least."""
        return sum(op.launches * op.count for op in self.ops)
