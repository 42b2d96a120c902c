"""What becomes of one replay: the user's choice, applied to it. Workers import this module, which needs no PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ridgeline.data.melee.replay import OLDEST, RefusedError, Replay, Version, dotted, read_replay
from ridgeline.errors import ConfigError, nearest
from ridgeline.games.melee.controls import Encoding
from ridgeline.games.melee.features import game_table
from ridgeline.games.melee.frames import CHARACTERS, STAGES, character_name
from ridgeline.games.table import GameTable

CONTEXT = 256  # frames of a window; a game that has none with its target is refused


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which replays are taken, and as what.

    Attributes:
        encoding: the classes of the controller.
        character: whose players are imitated, by internal number; None for all.
        stage: internal number; None for all tournament stages.
        oldest: lowest version of the format.
    """

    encoding: Encoding = field(default_factory=Encoding)
    character: int | None = None
    stage: int | None = None
    oldest: Version = OLDEST

    def __post_init__(self) -> None:
        if self.oldest < OLDEST:
            raise ConfigError(
                f"min_version must be {dotted(OLDEST)} or later, got {dotted(self.oldest)}: "
                "older replays lack jumps, ground and invulnerability"
            )


def choose(
    *,
    buttons: int = 6,
    shoulder: bool = False,
    character: str | None = None,
    stage: str | None = None,
    min_version: str | None = None,
) -> Choice:
    """A choice in the user's words.

    Raises:
        ConfigError: a name or version that does not exist.
    """
    return Choice(
        encoding=Encoding(buttons, shoulder),
        character=_find(character, CHARACTERS, "character"),
        stage=_find(stage, STAGES, "stage"),
        oldest=OLDEST if min_version is None else _version(min_version),
    )


class Result(NamedTuple):
    """What a worker made of one replay: a reason to refuse it, or tables and what the data set says of them."""

    reason: str | None
    digest: str = ""
    frames: int = 0
    tables: Sequence[GameTable] = ()
    seats: Sequence[dict[str, Any]] = ()


def read(task: tuple[str, Choice]) -> Iterator[Result]:
    """What a worker does: one replay."""
    file, choice = task
    try:
        yield tables_of(read_replay(Path(file), choice.oldest), choice)
    except RefusedError as refusal:
        yield Result(str(refusal))


def tables_of(replay: Replay, choice: Choice) -> Result:
    """The tables of a replay, one for every player who is imitated: a human, of the chosen character if there is one.

    Raises:
        RefusedError: there is none, or the game is too short or on another stage.
    """
    if choice.stage not in (None, replay.stage):
        raise RefusedError("another stage")
    if len(replay.frames) <= CONTEXT:
        raise RefusedError(f"{len(replay.frames)} frames, too short for a window of {CONTEXT} and its target")
    humans = [seat for seat in (0, 1) if replay.human[seat]]
    if not humans:
        raise RefusedError("both players are the computer's")
    seats = [seat for seat in humans if choice.character in (None, replay.characters[seat])]
    if not seats:
        assert choice.character is not None
        raise RefusedError(f"no human plays {character_name(choice.character)}")
    return Result(
        reason=None,
        digest=replay.digest,
        frames=len(replay.frames),
        tables=[game_table(replay.frames, seat, choice.encoding) for seat in seats],
        seats=[
            {
                "stage": replay.stage,
                "character": replay.characters[seat],
                "opponent": replay.characters[1 - seat],
                "version": dotted(replay.version),
                "digest": replay.digest,
            }
            for seat in seats
        ],
    )


def _find(name: str | None, known: Mapping[str, int], kind: str) -> int | None:
    if name is None:
        return None
    if name.upper() not in known:
        raise ConfigError(nearest(name.upper(), known, kind))
    return known[name.upper()]


def _version(words: str) -> Version:
    parts = words.split(".")
    if not 1 <= len(parts) <= 3 or not all(part.isdecimal() for part in parts):
        raise ConfigError(f"min_version must be a version such as 3.8, got {words!r}")
    major, minor, patch = [*map(int, parts), 0, 0][:3]
    return major, minor, patch
