"""Boxing demonstrations: whole games, kept as the seed and the actions, replayed to get the states back.

A game of some 300 decisions takes about 200 bytes. Replaying it must give the very states that were seen when it
was recorded: their checksum is stored, and a replay that differs is an error.
"""

from __future__ import annotations

import base64
import hashlib
import lzma
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ridgeline
from ridgeline.errors import DataError
from ridgeline.games.boxing.actions import CONTROLLERS, NEUTRAL
from ridgeline.games.boxing.experts import Expert, expert
from ridgeline.games.boxing.game import CAP, DECISION_FRAMES, IDLE_FRAMES, STICKY, Boxing, Ram, versions
from ridgeline.games.env import FIRST_EVALUATION_SEED
from ridgeline.models.reader import convert, read

_OWN = {"seed": int, "level": int, "dealt": int, "taken": int, "checksum": str}  # what a line says beside its origin
_CODE = {controller: code for code, controller in enumerate(CONTROLLERS)}
_LZMA = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 0, "lp": 0, "pb": 0}]


@dataclass(frozen=True, kw_only=True)
class Drift:
    """Bursts of a random controller held for a while, so that demonstrations show the way back from mistakes.

    Attributes:
        rate: probability, per decision of the expert's own, that a burst begins.
        shortest: decisions a burst lasts at least.
        longest: decisions a burst lasts at most.
    """

    rate: float = 0.02
    shortest: int = 2
    longest: int = 7


@dataclass(frozen=True, kw_only=True)
class Origin:
    """How a demonstration came about, but for its seed and level."""

    expert: str = "look-ahead"
    settings: dict[str, Any] = field(default_factory=dict)
    privileged: bool = True
    drift: Drift = Drift()
    sticky: float = STICKY
    decision_frames: int = DECISION_FRAMES
    idle_frames: int = IDLE_FRAMES
    ale_py: str = ""
    rom_md5: str = ""
    package: str = ridgeline.__version__

    @classmethod
    def of(cls, player: Expert, drift: Drift) -> Origin:
        """The origin of games that `player` demonstrates now, with the versions at hand."""
        return cls(
            expert=player.name,
            settings=player.settings(),
            privileged=player.privileged,
            drift=drift,
            ale_py=versions()["ale_py"],
            rom_md5=versions()["rom_md5"],
        )

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Origin:
        """From what `asdict` gave.

        Raises:
            ConfigError: a field is unknown, or its value cannot be.
        """
        return read(cls, content)


@dataclass(frozen=True, kw_only=True, eq=False)
class Demonstration:
    """One whole game.

    Attributes:
        seed: of the game and of the drift, below FIRST_EVALUATION_SEED.
        level: the console's difficulty.
        origin: expert, settings, versions.
        executed: uint8[T], what was done, as indices of CONTROLLERS.
        labels: uint8[T], what the expert would have done, likewise.
        dealt: points at the end.
        taken: points at the end.
        checksum: of the T + 1 states, the last one included.
    """

    seed: int
    level: int
    origin: Origin
    executed: NDArray[np.uint8]
    labels: NDArray[np.uint8]
    dealt: int
    taken: int
    checksum: str

    def __post_init__(self) -> None:
        _check_seed(self.seed)
        if max(self.labels.max(initial=0), self.executed.max(initial=0)) >= len(CONTROLLERS):
            raise DataError(f"the demonstration of seed {self.seed} is damaged (an unknown action); generate it again")

    def provenance(self) -> dict[str, Any]:
        """All but the actions, as JSON can hold it."""
        return {
            "seed": self.seed,
            "level": self.level,
            "decisions": len(self.labels),
            "dealt": self.dealt,
            "taken": self.taken,
            "checksum": self.checksum,
            **asdict(self.origin),
        }


def demonstrate(seed: int, level: int, player: Expert, drift: Drift) -> Demonstration:
    """Let an expert play one game, and record it.

    Raises:
        DataError: an evaluation seed, or a game that does not end.
    """
    _check_seed(seed)
    game, rng = Boxing(level), np.random.default_rng([seed, 1])
    states = [game.reset(seed)]
    labels: list[int] = []
    executed: list[int] = []
    previous, held, left = NEUTRAL, NEUTRAL, 0
    while not game.done:
        if len(labels) == CAP:
            raise DataError(f"the game of seed {seed} did not end within {CAP} decisions; leave the seed out")
        label = player.choose(game, previous)
        if left == 0 and rng.random() < drift.rate:
            left = int(rng.integers(drift.shortest, drift.longest + 1))
            held = CONTROLLERS[int(rng.integers(len(CONTROLLERS)))]
        previous, left = (held, left - 1) if left else (label, 0)
        labels.append(_CODE[label])
        executed.append(_CODE[previous])
        states.append(game.step(previous))
    score = game.score
    return Demonstration(
        seed=seed,
        level=level,
        origin=Origin.of(player, drift),
        executed=np.array(executed, np.uint8),
        labels=np.array(labels, np.uint8),
        dealt=score.dealt,
        taken=score.taken,
        checksum=_checksum(states),
    )


def demonstrate_task(task: tuple[int, int, str, dict[str, Any], Drift]) -> Iterator[Demonstration]:
    """`demonstrate` for a worker process: (seed, level, expert's name, its settings, drift)."""
    seed, level, name, settings, drift = task
    yield demonstrate(seed, level, expert(name, settings), drift)


def replay(demonstration: Demonstration) -> Ram:
    """Play a demonstration's actions again.

    Returns:
        uint8[T, 128], the state at each decision.

    Raises:
        DataError: the states are not those that were recorded.
    """
    game = Boxing(demonstration.level, demonstration.origin.sticky)
    states = [game.reset(demonstration.seed)]
    states += [game.step(CONTROLLERS[code]) for code in demonstration.executed]
    if _checksum(states) != demonstration.checksum or not game.done:
        here, there = versions(), demonstration.origin
        raise DataError(
            f"the demonstration of seed {demonstration.seed} replays differently here (recorded with ale-py "
            f"{there.ale_py} and game file {there.rom_md5[:8]}, replayed with {here['ale_py']} and "
            f"{here['rom_md5'][:8]}); install that version or generate demonstrations anew"
        )
    return np.stack(states[:-1])


def to_json(demonstration: Demonstration) -> dict[str, Any]:
    """A demonstration as one JSON object, actions included."""
    actions = compress(demonstration.labels.tobytes() + (demonstration.executed ^ demonstration.labels).tobytes())
    return demonstration.provenance() | {"actions": base64.b85encode(actions).decode()}


def from_json(content: dict[str, Any]) -> Demonstration:
    """The inverse of `to_json`.

    Raises:
        DataError: something is missing or damaged.
    """
    try:
        content = dict(content)
        count = content.pop("decisions")
        both = np.frombuffer(decompress(base64.b85decode(content.pop("actions"))), np.uint8).reshape(2, count)
        own = {name: convert(kind, content.pop(name), name) for name, kind in _OWN.items()}
        return Demonstration(origin=Origin.from_dict(content), labels=both[0], executed=both[0] ^ both[1], **own)
    except (KeyError, TypeError, ValueError, lzma.LZMAError) as error:
        raise DataError(f"not a demonstration ({error})") from error


def compress(content: bytes) -> bytes:
    """LZMA without a container: the shortest for small contents."""
    return lzma.compress(content, lzma.FORMAT_RAW, filters=_LZMA)


def decompress(content: bytes) -> bytes:
    """The inverse of `compress`."""
    return lzma.decompress(content, lzma.FORMAT_RAW, filters=_LZMA)


def _check_seed(seed: int) -> None:
    if not 0 <= seed < FIRST_EVALUATION_SEED:
        raise DataError(
            f"seed {seed} is not for demonstrations: use 0 to {FIRST_EVALUATION_SEED - 1}, the rest is for evaluation"
        )


def _checksum(states: list[Ram]) -> str:
    return hashlib.blake2b(np.stack(states).tobytes(), digest_size=8).hexdigest()
