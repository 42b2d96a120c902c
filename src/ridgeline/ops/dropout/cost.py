"""Cost of dropout: the mask's arithmetic, and its traffic where it is a pass of its own.

Drawn from a counter, a mask costs arithmetic and no memory: forward and backward draw it anew in the kernel that
needs it. As PyTorch has it, it is a pass that reads x and writes y and a byte for each element, kept for backward.
"""

from __future__ import annotations

from ridgeline.cost import INSTRUCTION, OpCost, Storage

# Two wide multiplications and about a dozen integer operations yield four decisions; a compare and a select each.
MASK_FLOPS = 7 * INSTRUCTION
MASK_BYTES = 1


def dropout_pass(name: str, elements: int, *, store: Storage, count: int = 1) -> tuple[OpCost, OpCost]:
    """Dropout of `elements` numbers as a pass of its own with a stored mask, forward and backward."""
    size = elements * store.activation
    return (
        OpCost(
            name=name,
            phase="forward",
            vector_flops=elements * MASK_FLOPS,
            read_bytes=size,
            written_bytes=size + elements * MASK_BYTES,
            count=count,
        ),
        OpCost(
            name=name,
            phase="backward",
            vector_flops=elements * INSTRUCTION,
            read_bytes=size + elements * MASK_BYTES,
            written_bytes=size,
            count=count,
        ),
    )
