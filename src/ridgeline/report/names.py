"""Names of contenders as a drawing or a table has room for them, and the order of models."""

from __future__ import annotations

from collections.abc import Sequence

MODELS = ("hal-20m", "hal-5m", "gpt2-c256", "fast-c256", "gpt2-124m")


def told_apart(names: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Each name without the changes that all of them have (what follows a "+"), and those changes.

    Args:
        names: PRESET+CHANGE+CHANGE.
    """
    parts = {name: name.split("+") for name in names}
    first = next(iter(parts.values()), [])
    shared = [change for change in first[1:] if len(parts) > 1 and all(change in part[1:] for part in parts.values())]
    short = {name: "+".join([part[0], *(c for c in part[1:] if c not in shared)]) for name, part in parts.items()}
    return short, shared


def broken(name: str, letters: int) -> str:
    """A name on as many lines as it takes, broken before a change; a change that is longer stays whole."""
    lines = [""]
    for place, part in enumerate(name.split("+")):
        piece = f"+{part}" if place else part
        if lines[-1] and len(lines[-1]) + len(piece) > letters:
            lines.append("")
        lines[-1] += piece
    return "\n".join(lines)


def model_place(name: str) -> int:
    """Where a model stands among others on a page; those without a place of their own come last."""
    return MODELS.index(name) if name in MODELS else len(MODELS)
