"""Cost of causal attention with H query heads over G key/value heads of width D, T positions, B windows.

    product        forward   backward
    scores         Q Kᵀ      dQ += dS K,   dK += dSᵀ Q
    relative       Q Eᵀ      dQ += dR E,   dE += dRᵀ Q        with a relative table E only
    values         P V       dP  = dO Vᵀ,  dV += Pᵀ dO

Each is 2·T·T·D FLOPs a head and window over the whole square, and half of that under the diagonal, which is what a
causal model needs. (The diagonal itself counts as half of its T cells: T² / 2, not T (T + 1) / 2.) Grouped heads
save bytes of K and V and no FLOPs.

    kept whole       three kernels as in a textbook: scores, softmax, values; the square is computed and the weights
                     stay in memory for the backward pass. Four passes over a (B, H, T, T) tensor forward (written by
                     the scores, read and written by the softmax, read by the values), seven backward; one more pair
                     each way for a relative term, and for dropout.
    never whole      one kernel forward, which keeps the log-sum-exp of each row; the backward pass computes the score
                     products again.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.cost import INSTRUCTION, SPECIAL, OpCost, Storage
from ridgeline.ops.dropout.cost import MASK_BYTES, MASK_FLOPS

# scale, running maximum, subtraction, exponential, sum, conversion
SOFTMAX_FLOPS = 5 * INSTRUCTION + SPECIAL
# exponential again, dP − δ, product with P, conversions
SOFTMAX_GRADIENT_FLOPS = 5 * INSTRUCTION + SPECIAL


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """What attention works on: windows B, positions T, heads H and G, head width D, relative term, dropout."""

    B: int
    T: int
    H: int
    G: int
    D: int
    relative: bool = False
    dropout: bool = False

    @property
    def scores(self) -> int:
        """Cells of the whole square of every head."""
        return self.B * self.H * self.T * self.T

    @property
    def product(self) -> int:
        """FLOPs of one product under the diagonal, over all heads and windows."""
        return self.scores * self.D

    @property
    def qkv(self) -> int:
        """Numbers in queries, keys and values."""
        return self.B * self.T * (self.H + 2 * self.G) * self.D

    @property
    def mixed(self) -> int:
        """Numbers in the output."""
        return self.B * self.T * self.H * self.D

    @property
    def table(self) -> int:
        """Numbers of the relative table that T positions use."""
        return self.T * self.D if self.relative else 0

    @property
    def forward_products(self) -> int:
        """Products of the forward pass."""
        return 3 if self.relative else 2

    @property
    def score_products(self) -> int:
        """Products that make up the scores."""
        return 2 if self.relative else 1


def attention_fused(s: AttentionShape, *, store: Storage, count: int = 1) -> tuple[OpCost, OpCost]:
    """Forward and backward that never hold the square; the backward pass repeats the score products."""
    cells = s.scores / 2
    drop = MASK_FLOPS if s.dropout else 0
    lse = s.B * s.H * s.T * store.statistic
    forward, backward = s.forward_products * s.product, 2 * s.forward_products * s.product
    return (
        OpCost(
            name="attention",
            phase="forward",
            flops=forward,
            dense_flops=2 * forward,
            vector_flops=cells * (SOFTMAX_FLOPS + drop),
            read_bytes=s.qkv * store.activation + s.table * store.weight,
            written_bytes=s.mixed * store.activation + lse,
            count=count,
        ),
        OpCost(
            name="attention",
            phase="backward",
            flops=backward,
            dense_flops=2 * backward,
            executed_flops=backward + s.score_products * s.product,
            vector_flops=cells * (SOFTMAX_GRADIENT_FLOPS + drop),
            read_bytes=(s.qkv + 2 * s.mixed) * store.activation + s.table * store.weight + lse,
            written_bytes=s.qkv * store.activation + s.table * store.gradient,
            count=count,
        ),
    )


def square_passes(s: AttentionShape) -> tuple[int, int]:
    """Passes over a (B, H, T, T) tensor, forward and backward, when the weights are kept whole.

    Forward: S written, read, P written, P read. Backward: dP written; P, dP read, dS written; P read for dV, dS read
    for dQ and dK. A relative term is one more tensor written and read each way. Dropout writes and reads the dropped
    weights (dV then reads those), and reads and writes dP.
    """
    forward, backward = 4, 7
    if s.relative:
        forward, backward = forward + 2, backward + 2
    if s.dropout:
        forward, backward = forward + 2, backward + 2
    return forward, backward


def attention_whole(s: AttentionShape, *, store: Storage, count: int = 1) -> tuple[OpCost, OpCost]:
    """Forward and backward in separate kernels with the square in memory; the whole of it is computed."""
    forward_passes, backward_passes = square_passes(s)
    square, mask = s.scores * store.activation, s.scores * MASK_BYTES * s.dropout
    forward, backward = s.forward_products * s.product, 2 * s.forward_products * s.product
    written = 3 if s.relative or s.dropout else 2
    written += s.relative and s.dropout
    return (
        OpCost(
            name="attention",
            phase="forward",
            flops=forward,
            dense_flops=2 * forward,
            executed_flops=2 * forward,
            vector_flops=s.scores * (SOFTMAX_FLOPS + (MASK_FLOPS if s.dropout else 0)),
            read_bytes=(s.qkv + s.mixed * s.relative) * store.activation
            + s.table * store.weight
            + (forward_passes - written) * square,
            written_bytes=s.mixed * store.activation + written * square + mask,
            launches=3 + s.relative + s.dropout,
            count=count,
        ),
        OpCost(
            name="attention",
            phase="backward",
            flops=backward,
            dense_flops=2 * backward,
            executed_flops=2 * backward,
            vector_flops=s.scores * (4 + s.dropout) * INSTRUCTION,
            # dV reads dO; dP reads dO and V; dQ reads K, dK reads Q; the table's gradient reads Q again
            read_bytes=(s.qkv + (2 + s.relative) * s.mixed) * store.activation
            + s.table * store.weight
            + (backward_passes - written) * square
            + mask,
            written_bytes=s.qkv * store.activation + s.table * store.gradient + written * square,
            launches=5 + 2 * s.relative + s.dropout,
            count=count,
        ),
    )
