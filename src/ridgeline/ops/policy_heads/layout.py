"""Where each head's part lies in the joint buffers of all heads. Plain arithmetic; imports no Triton."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ridgeline.ops._triton.support import power_of_two

CHUNK = 64  # inner columns that Triton's kernel takes at a time; a head's inner width is padded to a multiple of it
ALIGN = 8  # elements: rows of 16-bit storage start on 16-byte boundaries


def _up(n: int, step: int) -> int:
    return -(-n // step) * step


@dataclass(frozen=True)
class HeadPlace:
    """One head.

    Attributes:
        index: its number.
        inner: H, and `padded`, H rounded up to a multiple of the kernel's; `at`: its first column among W.
        classes: V; `class_at`: its first column among the logits of all heads.
        earlier: E, logits of earlier heads that it hears.
        block_v, block_e: V and E rounded up for a matrix unit.
        statistics_at: column of `side` for its row means, then for the reciprocals of its row scales.
    """

    index: int
    inner: int
    padded: int
    at: int
    classes: int
    class_at: int
    earlier: int
    block_v: int
    block_e: int
    statistics_at: int


@dataclass(frozen=True)
class Layout:
    """The joint buffers.

    Attributes:
        width: C, of the state.
        heads: the heads' places.
        inner: W, padded inner columns of all heads.
        classes: logits of all heads.
        gradient: columns of the logits' gradients, `classes` rounded up to 8.
        side: columns of the narrow matrix: the logits that are heard, then two statistics a head; a multiple of 8.
        rows_v, rows_e: rows of the packed second weights and of the packed weights for earlier logits.
        sums: columns of the partial sums: `classes` bias gradients, then loss and number of valid rows a head.
    """

    width: int
    heads: tuple[HeadPlace, ...]
    inner: int
    classes: int
    gradient: int
    side: int
    rows_v: int
    rows_e: int
    sums: int


@functools.lru_cache(maxsize=64)
def layout(width: int, shapes: tuple[tuple[int, int], ...], step: int = CHUNK) -> Layout:
    """The buffers of heads with these (H, V) on a state of `width` numbers, for a kernel that takes H in `step`s."""
    heard = sum(classes for _, classes in shapes[:-1])
    heads: list[HeadPlace] = []
    at = class_at = 0
    for index, (inner, classes) in enumerate(shapes):
        padded = _up(inner, step)
        heads.append(
            HeadPlace(
                index=index,
                inner=inner,
                padded=padded,
                at=at,
                classes=classes,
                class_at=class_at,
                earlier=class_at,
                block_v=max(16, power_of_two(classes)),
                block_e=max(16, power_of_two(class_at)),
                statistics_at=heard + 2 * index,
            )
        )
        at, class_at = at + padded, class_at + classes
    return Layout(
        width=width,
        heads=tuple(heads),
        inner=at,
        classes=class_at,
        gradient=_up(class_at, ALIGN),
        side=_up(heard + 2 * len(shapes), ALIGN),
        rows_v=max(head.block_v for head in heads),
        rows_e=max(head.block_e for head in heads),
        sums=class_at + 2 * len(shapes),
    )
