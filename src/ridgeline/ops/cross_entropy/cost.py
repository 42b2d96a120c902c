"""Cost of cross-entropy over N rows of V logits.

fused   one kernel reads the logits and overwrites them with their gradient
plain   as PyTorch has it: logits to fp32, log-softmax written, its gradient and the logits' gradient in fp32

Fused, a head of many logits is taken a chunk of rows at a time. They are not kept, but a chunk is several times the
level-2 cache, so they travel all the same.
"""

from __future__ import annotations

from typing import Literal

from ridgeline.cost import INSTRUCTION, SPECIAL, OpCost, Storage

LossForm = Literal["fused", "plain"]
LOGIT_FLOPS = SPECIAL + 4 * INSTRUCTION
TARGET = 8  # bytes of a target
CHUNK_ELEMENTS = 1 << 28  # logits of a chunk: 512 MiB in 16-bit storage
WHOLE_ROWS = 2048  # classes up to which a tile of the loss holds whole rows
KEPT_ELEMENTS = 1 << 26  # logits that a small head keeps


def chunk_rows(N: int, V: int) -> int:
    """Rows of a chunk: as many as the memory of a chunk allows, spread evenly, a multiple of 128 where N is larger."""
    chunks = -(-N * V // CHUNK_ELEMENTS)
    return min(N, -(-N // chunks // 128) * 128)


def keeps_logits(N: int, V: int) -> bool:
    """Whether a fused head takes all rows at once, and keeps their logits."""
    return V <= WHOLE_ROWS and N * V <= KEPT_ELEMENTS


def cross_entropy(name: str, rows: int, classes: int, *, form: LossForm, store: Storage) -> tuple[OpCost, OpCost]:
    """The loss and the logits' gradient, forward and backward, of `rows` × `classes` logits."""
    logits = rows * classes
    stored, full = logits * store.activation, logits * 4
    read = written = read_back = written_back = 0
    if form == "fused":
        read, written = stored, stored
    else:
        cast = store.activation != 4
        read, written = full + cast * stored, full + cast * full
        # the loss fills the log-softmax's gradient; its backward reads that and the log-softmax
        read_back, written_back = 2 * full + cast * full, 2 * full + cast * stored
    return (
        OpCost(
            name=name,
            phase="forward",
            vector_flops=logits * LOGIT_FLOPS,
            read_bytes=read + rows * TARGET,
            written_bytes=written + rows * store.statistic,
        ),
        OpCost(
            name=name,
            phase="backward",
            vector_flops=logits * LOGIT_FLOPS if form == "plain" else 0,
            read_bytes=read_back,
            written_bytes=written_back,
            launches=2 if form == "plain" else 0,
        ),
    )
