"""Who takes part in a race: a contender as every study names it, under an engine, with a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.data.games import GameData
from ridgeline.data.text import TextData
from ridgeline.errors import ConfigError
from ridgeline.presets import find_config
from ridgeline.study.contenders import check_gpus
from ridgeline.train.config import TrainConfig
from ridgeline.train.resolve import resolve
from ridgeline.train.settings import override

FORM = "give each as PRESET, PRESET:ENGINE or PRESET:ENGINE:SEED; a TOML file may stand for the preset"


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One of a race.

    Attributes:
        name: as the user wrote it.
        folder: name of its folder within the race's.
        config: with nothing left open.
    """

    name: str
    folder: str
    config: TrainConfig


def folder_of(word: str) -> str:
    """Name of a contender's folder, by what the user wrote."""
    return word.replace(":", "-").replace("/", "-").replace("\\", "-").lstrip(".-")


def find_racers(
    words: Sequence[str], data: TextData | GameData, settings: dict[str, Any], gpus: int = 1
) -> tuple[Contender, ...]:
    """The contenders that a user names.

    Args:
        words: one each, `NAME[:ENGINE[:SEED]]`, the name as ridgeline.study.contenders explains.
        data: what all train on.
        settings: of all, such as minutes, device and precision.
        gpus: cards over which they are spread; with one, the device is that of the settings.

    Raises:
        ConfigError: none, two alike, or one that cannot be.
        UnsupportedError: a device, precision or engine that cannot run here.
    """
    if not words:
        raise ConfigError(f"a race needs contenders; {FORM}")
    check_gpus(gpus)
    found = []
    for number, word in enumerate(words):
        name, *rest = word.split(":")
        if len(rest) > 2 or (len(rest) == 2 and not rest[1].isdecimal()):
            raise ConfigError(f"{word!r} is no contender; {FORM}")
        own: dict[str, Any] = {"device": f"cuda:{number % gpus}"} if gpus > 1 else {}
        if rest:
            own["engine"] = rest[0]
        if len(rest) == 2:
            own["seed"] = int(rest[1])
        config = resolve(override(find_config(name), {**settings, **own}), data)
        found.append(Contender(name=word, folder=folder_of(word), config=config))
    for place, contender in enumerate(found):
        if contender.folder in [other.folder for other in found[:place]]:
            raise ConfigError(f"{contender.name} takes part twice; give it another seed: {contender.name}:ENGINE:1")
    return tuple(found)
