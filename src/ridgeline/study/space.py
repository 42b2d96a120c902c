"""What a search chooses from: sizes, norm, context, batch and learning rate around a base config."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ridgeline.errors import ConfigError, nearest
from ridgeline.train.config import TrainConfig

Value = int | str
ALL = "all"  # as many key/value heads as query heads


class Range(NamedTuple):
    """Learning rates from `low` to `high`, on a logarithmic scale."""

    low: float
    high: float


Space = dict[str, tuple[Value, ...] | Range]
WORDS = {"norm": ("layernorm", "rmsnorm"), "kv_heads": (ALL,)}  # besides whole numbers
SETTINGS = {
    "layers": "blocks",
    "width": "of the residual stream, a multiple of the base's head width where heads are not given",
    "heads": "query heads; without them as many of the base's head width as the width holds",
    "kv_heads": f'key/value heads: "{ALL}" or a number',
    "mlp_ratio": "hidden width of the MLP over the width",
    "norm": "layernorm or rmsnorm",
    "context": "positions in a window",
    "stride": "raw frames from one position to the next; games only",
    "batch": "windows in a step",
    "lr": "peak learning rate: LOW:HIGH, or one value",
}


def default_space(base: TrainConfig, *, games: bool) -> Space:
    """Around the base: half to one and a half times its depth and width, half its context, a factor of four in rate."""
    decoder = base.model.decoder
    head = decoder.head_dim
    ratio = decoder.hidden // decoder.width or 1
    context, batch, lr = base.window.context, base.batch, base.optimizer.lr
    space: Space = {
        "layers": _distinct([max(1, decoder.layers // 2), decoder.layers, decoder.layers + -(-decoder.layers // 2)]),
        "width": _distinct([max(1, round(decoder.width * share / head)) * head for share in (0.5, 1.0, 1.5)]),
        "kv_heads": (ALL, 1),
        "mlp_ratio": _distinct([2, ratio]),
        "norm": WORDS["norm"],
        "context": _distinct([max(1, context // 2), context]),
        "batch": _distinct([max(1, batch // 2), batch, 2 * batch]),
        "lr": Range(lr / 4, lr * 4),
    }
    if games:
        space["stride"] = _distinct([base.window.stride, 2 * base.window.stride])
    return space


def narrowed(space: Space, words: Sequence[str]) -> Space:
    """The space with what the user gives as NAME=VALUE,VALUE or, for lr, NAME=LOW:HIGH.

    Raises:
        ConfigError: an unknown name, no value, or one that cannot be.
    """
    found, given = dict(space), set[str]()
    for word in words:
        name, _, text = word.partition("=")
        if name in given:
            raise ConfigError(f"{name} is given twice; give all that it may be at once, as {name}=VALUE,VALUE")
        given.add(name)
        if name not in SETTINGS:
            raise ConfigError(nearest(name, SETTINGS, "setting of a search"))
        if name == "stride" and name not in space:
            raise ConfigError(f"{name} is for games only; leave it out")
        values = [value for value in text.split(",") if value]
        if not values:
            raise ConfigError(f"{word!r} leaves nothing to choose from; write {name}=VALUE,VALUE")
        found[name] = (
            _rates(word, values) if name == "lr" else tuple(dict.fromkeys(_value(name, value) for value in values))
        )
    return found


def configure(base: TrainConfig, params: Mapping[str, Any], seconds: float) -> TrainConfig:
    """The base with chosen values, training for so many seconds by the clock.

    Raises:
        ConfigError: values that do not go together.
    """
    decoder = base.model.decoder
    width, head = int(params["width"]), decoder.head_dim
    if "heads" not in params and width % head:
        raise ConfigError(f"width={width} without heads is no multiple of the base's head width {head}")
    heads = int(params.get("heads", width // head))
    kv_heads = heads if params["kv_heads"] == ALL else int(params["kv_heads"])
    context, lr = int(params["context"]), float(params["lr"])
    chosen = dataclasses.replace(
        decoder,
        layers=int(params["layers"]),
        width=width,
        heads=heads,
        head_width=None,
        kv_heads=None if kv_heads == heads else kv_heads,
        mlp_width=int(params["mlp_ratio"]) * width,
        norm=params["norm"],
        context=context,
        position_table=None if decoder.position_table is None else max(decoder.position_table, context),
    )
    window = dataclasses.replace(base.window, context=context, stride=int(params.get("stride", base.window.stride)))
    return dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, decoder=chosen),
        window=window,
        batch=int(params["batch"]),
        stages=(),  # which are shares of a number of steps
        accumulation=math.gcd(base.accumulation, int(params["batch"])),
        optimizer=base.optimizer.at_rate(lr),
        steps=None,
        tokens=None,
        minutes=seconds / 60,
    )


def _distinct(values: Sequence[int]) -> tuple[Value, ...]:
    return tuple(sorted(set(values)))


def _value(name: str, text: str) -> Value:
    if text in WORDS.get(name, ()):
        return text
    if name == "norm" or not text.isdecimal() or int(text) < 1:
        words = " or ".join((*(() if name == "norm" else ("a whole number of at least 1",)), *WORDS.get(name, ())))
        raise ConfigError(f"{name} must be {words}, got {text!r}")
    return int(text)


def _rates(word: str, values: Sequence[str]) -> Range:
    ends = values[0].split(":")
    try:
        low, high = float(ends[0]), float(ends[-1])
    except ValueError:
        low, high = math.nan, math.nan
    if len(values) > 1 or len(ends) > 2 or not 0 < low <= high < math.inf:
        raise ConfigError(
            f"{word!r} is no range of learning rates; write lr=LOW:HIGH, such as lr=3e-4:3e-3, or lr=RATE"
        )
    return Range(low, high)
