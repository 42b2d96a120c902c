"""Contenders of a study: what they differ in, what they share, and where they train."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from ridgeline.errors import ConfigError
from ridgeline.presets import DECODER, find_config
from ridgeline.train.config import TrainConfig


def single_changes(first: str, second: str) -> list[str]:
    """Contenders between two: `first` with one setting of its decoder at a time as `second` has it.

    Raises:
        ConfigError: their decoders are alike.
    """
    a, b = (find_config(name).model.decoder for name in (first, second))
    names = [
        f"{first}+{field}={_literal(getattr(b, field))}" for field in DECODER if getattr(a, field) != getattr(b, field)
    ]
    if not names:
        raise ConfigError(f"{first} and {second} have the same decoder: there is no change between them to measure")
    return names


def same_recipe(configs: Mapping[str, TrainConfig]) -> dict[str, TrainConfig]:
    """The contenders with everything but the model taken from the first: data, windows, batch, optimiser, length.

    Raises:
        ConfigError: a model's context is too short for the first's windows.
    """
    recipe = next(iter(configs.values()))
    found = {}
    for name, config in configs.items():
        if config.model.decoder.context < recipe.window.context:
            raise ConfigError(
                f"{name} has a context of {config.model.decoder.context}, the study's windows are of "
                f"{recipe.window.context} positions; set --context {config.model.decoder.context} or lower"
            )
        found[name] = dataclasses.replace(recipe, preset=config.preset, model=config.model)
    return found


def own_recipes(configs: Mapping[str, TrainConfig]) -> dict[str, TrainConfig]:
    """The contenders as they are, on the data of the first and judged on its held-out windows.

    Raises:
        ConfigError: one has windows of another kind, so that its held-out loss would be another figure.
    """
    first, recipe = next(iter(configs.items()))
    for name, config in configs.items():
        if config.window != recipe.window:
            raise ConfigError(
                f"{name} and {first} have different windows, and their held-out losses could not be compared; set "
                "--context, or change the context within a run by stages"
            )
    return {name: dataclasses.replace(config, data=recipe.data) for name, config in configs.items()}


def distinct(names: Sequence[str]) -> list[str]:
    """The names, each once.

    Raises:
        ConfigError: fewer than two, or one comes twice.
    """
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{twice[0]} is named twice; name each contender once")
    if len(names) < 2:
        raise ConfigError("a comparison needs two contenders or more: ridgeline study compare gpt2-c256 fast-c256")
    return list(names)


def device_of(config: TrainConfig) -> torch.device:
    """The device of a run that is resolved; a card becomes this process' current one, which kernels go to."""
    device = torch.device(config.device)
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
    return device


def check_gpus(gpus: int) -> None:
    """Refuse more cards than there are.

    Raises:
        ConfigError: there are not so many.
    """
    if gpus < 1 or (gpus > 1 and gpus > torch.cuda.device_count()):
        raise ConfigError(f"gpus must be 1 or at most the number of cards ({torch.cuda.device_count()}), got {gpus}")


def spread(configs: Mapping[str, TrainConfig], gpus: int) -> dict[str, TrainConfig]:
    """The contenders dealt out over the first `gpus` cards; with one, they stay where they are.

    Raises:
        ConfigError: there are not so many.
    """
    check_gpus(gpus)
    if gpus == 1:
        return dict(configs)
    return {
        name: dataclasses.replace(config, device=f"cuda:{number % gpus}")
        for number, (name, config) in enumerate(configs.items())
    }


def _literal(value: object) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
