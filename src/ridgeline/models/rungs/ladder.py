"""The rungs as data: what changes from one to the next, and how a single change is asked for.

    m0    products in 16×64 tiles, attention with its scores in memory, pointwise work in launches of its own, every
          result in a fresh buffer filled with zeros
    m1    tiles of 128×128; weight gradients split along the tokens
    m2    pointwise work fused with its neighbours; attention in two sweeps over tiles
    m3    buffers allocated once and not filled; the whole step one CUDA graph; the next batch sent ahead
    r16   loads under the products; pointwise work in the products' epilogues; attention in one sweep; two lanes

Beside the rungs themselves, each change can stand alone: `m2+zero_fill` is m2 with that one change of the next rung,
`m3-zero_fill` is m3 without that one of its own, and `r16+recompute` is how the first article runs its smaller model.
All of them compute one function, the reference decoder's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Literal

from ridgeline.errors import UnsupportedError, nearest

Tiles = Literal["16x64", "128x128", "pipelined"]
Pointwise = Literal["unfused", "fused", "epilogue"]
Attention = Literal["materialised", "two-sweep", "one-sweep"]


@dataclass(frozen=True, kw_only=True)
class Rung:
    """A set of implementation choices and step policies.

    Attributes:
        name: how it is asked for.
        tiles: output tile of a matrix product, loads one after another or "pipelined" under the products.
        split: weight gradients as partial sums over segments of the tokens, added in a second kernel.
        pointwise: bias, GELU, dropout and residual addition in launches of their own ("unfused"), in one pass with
            the next norm or with each other ("fused"), or in the epilogues of the products ("epilogue").
        attention: scores and weights in memory, or tiles in two sweeps or one.
        zero_fill: each result's buffer is filled with zeros before the kernel that overwrites it.
        reuse: results go to buffers that an earlier result has left, instead of fresh ones from PyTorch's allocator.
        capture: the whole step is one CUDA graph.
        prefetch: the next batch travels to the card while a step runs.
        lanes: pieces of a batch that run beside each other.
        recompute: GELU's input is not kept: the backward pass repeats its product.
    """

    name: str
    tiles: Tiles
    split: bool
    pointwise: Pointwise
    attention: Attention
    zero_fill: bool
    reuse: bool
    capture: bool
    prefetch: bool
    lanes: int
    recompute: bool = False


_M0 = Rung(
    name="m0",
    tiles="16x64",
    split=False,
    pointwise="unfused",
    attention="materialised",
    zero_fill=True,
    reuse=False,
    capture=False,
    prefetch=False,
    lanes=1,
)
CHANGES: dict[str, dict[str, Any]] = {
    "m1": {"tiles": "128x128", "split": True},
    "m2": {"pointwise": "fused", "attention": "two-sweep"},
    "m3": {"zero_fill": False, "reuse": True, "capture": True, "prefetch": True},
    "r16": {"tiles": "pipelined", "pointwise": "epilogue", "attention": "one-sweep", "lanes": 2},
}
BEYOND: dict[str, Any] = {"recompute": True}  # after the last rung


def _climb() -> dict[str, Rung]:
    rungs = {_M0.name: _M0}
    for name, changes in CHANGES.items():
        rungs[name] = replace(list(rungs.values())[-1], name=name, **changes)
    return rungs


RUNGS = _climb()
_NAMES = list(RUNGS)


def _single(rung: Rung, sign: str, change: str) -> Any:
    """The value of one change: the next rung's with "+", that of the rung before with "-"."""
    place = _NAMES.index(rung.name)
    ahead = [*CHANGES.values(), BEYOND]
    changes = ahead[place] if sign == "+" else ahead[place - 1] if place else {}
    if not changes:
        raise UnsupportedError(f"{rung.name}{sign}{change}: there is no rung before {rung.name}")
    if change not in changes:
        raise UnsupportedError(f"{rung.name}{sign}{change}: {nearest(change, tuple(changes), 'change')}")
    return changes[change] if sign == "+" else getattr(RUNGS[_NAMES[place - 1]], change)


def find_rung(name: str) -> Rung:
    """The rung called `name`, single changes included.

    Raises:
        UnsupportedError: there is no such rung or change.
    """
    base = re.split(r"[+-]", name, maxsplit=1)[0]
    if base not in RUNGS:
        raise UnsupportedError(nearest(base, _NAMES, "rung"))
    rung = RUNGS[base]
    singles = re.findall(r"([+-])([^+-]*)", name)
    return replace(rung, name=name, **{change: _single(rung, sign, change) for sign, change in singles})


def is_rung(name: str) -> bool:
    """Whether `name` begins with a rung's, so that `find_rung` is the one to judge it."""
    return re.split(r"[+-]", name, maxsplit=1)[0] in RUNGS
