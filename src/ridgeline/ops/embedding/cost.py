"""Cost of looking rows up in a table: no FLOPs, the rows and their gradients' traffic."""

from __future__ import annotations

from ridgeline.cost import INSTRUCTION, OpCost, Storage


def embedding(
    name: str, rows: int, table_rows: int, width: int, *, store: Storage, count: int = 1
) -> tuple[OpCost, OpCost]:
    """`rows` look-ups in a table of `table_rows` × `width`, forward and backward.

    Each row of the table is fetched at most once from memory: repeated ones come from the cache. The backward pass
    writes the whole table's gradient, for rows that no token chose must be zero.
    """
    touched = min(rows, table_rows) * width
    return (
        OpCost(
            name=name,
            phase="forward",
            read_bytes=touched * store.weight + rows * 8,
            written_bytes=rows * width * store.activation,
            count=count,
        ),
        OpCost(
            name=name,
            phase="backward",
            vector_flops=rows * width * INSTRUCTION,
            read_bytes=rows * width * store.activation + rows * 8,
            written_bytes=table_rows * width * store.gradient,
            count=count,
        ),
    )


def positions(
    windows: int, T: int, table_rows: int, width: int, *, store: Storage, joined: bool
) -> tuple[OpCost, OpCost]:
    """Learned positions: the table's first T rows added to every window, forward and backward.

    Args:
        windows, T, table_rows, width: shapes.
        store: sizes of numbers.
        joined: the sum rides in the kernel that writes the embedding, so that only the table itself is read.
    """
    elements = windows * T * width
    own = 0 if joined else elements * store.activation
    return (
        OpCost(
            name="positions",
            phase="forward",
            vector_flops=elements * INSTRUCTION,
            read_bytes=T * width * store.weight + own,
            written_bytes=own,
            launches=0 if joined else 1,
        ),
        OpCost(
            name="positions",
            phase="backward",
            vector_flops=elements * INSTRUCTION,
            read_bytes=elements * store.activation,
            written_bytes=table_rows * width * store.gradient,
        ),
    )
