"""Melee on consoles: many matches at a time in lock step, one call of the model a frame for all of them.

A window is filled and read as in any other game (see `rollout`); what is particular is that a game runs outside this
process, as fast as its console allows, that it can hang or crash, and that no seed determines it.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ridgeline.errors import ConfigError, WorkerError
from ridgeline.games.env import Controller
from ridgeline.games.melee.console import FRAME_SECONDS, START_SECONDS, Console, Match
from ridgeline.games.melee.controls import Encoding
from ridgeline.games.melee.features import MeleeEyes, encoding_of
from ridgeline.games.melee.frames import Frames
from ridgeline.games.melee.score import MatchResult, Tally
from ridgeline.play.decide import Decider, source
from ridgeline.play.evaluate import check_games
from ridgeline.play.player import Player
from ridgeline.play.statistics import bootstrap, wilson
from ridgeline.play.window import Window

LONGEST = 8 * 60 * 60 + 1_000  # frames of an eight-minute match, with what is around it
MEANS = ("stocks_taken", "stocks_lost", "dealt", "taken")


@dataclass(frozen=True, kw_only=True)
class Matches:
    """The results of some matches.

    Attributes:
        match: what was played.
        results: one a match that came to its end, by number.
        failed: number of every other one, and why.
        seconds: of time that all took.
        decision_s: the median decision.
    """

    match: Match
    results: tuple[MatchResult, ...]
    failed: dict[int, str]
    seconds: float
    decision_s: float

    def summary(self) -> dict[str, Any]:
        """For JSON.

        games (that came to their end), wins, losses, ties: numbers of games; stocks_taken, stocks_lost, dealt, taken:
        means a game, damage in percent; `intervals` holds a 95 % interval of wins and of each mean; `matches` lists
        every game with these figures and its winner (1, −1 or 0 for nobody); `failed` lists {game, reason}.
        """
        games = len(self.results)
        winners = [result.winner for result in self.results]
        columns = {name: [float(getattr(result, name)) for result in self.results] for name in MEANS}
        intervals = {}
        if games:
            intervals = {"wins": [games * end for end in wilson(winners.count(1), games)]}
            intervals |= {name: list(bootstrap(values)) for name, values in columns.items()}
        return {
            "games": games,
            "wins": winners.count(1),
            "losses": winners.count(-1),
            "ties": winners.count(0),
            **{name: statistics.fmean(values) if values else None for name, values in columns.items()},
            "intervals": intervals,
            "level": self.match.level,
            "matches": [dataclasses.asdict(result) for result in self.results],
            "failed": [{"game": game, "reason": reason} for game, reason in sorted(self.failed.items())],
            "frames": sum(result.frames for result in self.results),
            "seconds": round(self.seconds, 3),
            "decision_ms": round(1e3 * self.decision_s, 3),
        }


def play_matches(
    player: Player,
    match: Match,
    games: int = 30,
    *,
    consoles: int = 4,
    temperature: float = 1.0,
    seed: int = 0,
    on_game: Callable[[], None] | None = None,
) -> Matches:
    """Let a policy play matches against the game's own opponent.

    A console that hangs or crashes is ended, and its match is reported as failed; the others go on.

    Args:
        player: a policy for Melee.
        match: what is played.
        games: how many matches.
        consoles: that run at a time, each in a process of its own.
        temperature: 1 samples from the policy, 0 takes the most likely class of each head.
        seed: of the samples.
        on_game: called whenever a match has ended or failed.

    Raises:
        ConfigError: no games, no consoles, or a temperature or seed that cannot be.
        DataError: a policy for another game.
    """
    check_games(games, 0)
    if consoles < 1:
        raise ConfigError(f"consoles must be at least 1, got {consoles}")
    if not 0 <= temperature < float("inf"):
        raise ConfigError(f"temperature must be 0 or more and finite, got {temperature}")
    if not 0 <= seed < 2**63:
        raise ConfigError(f"seed must be in [0, 2^63), got {seed}")
    encoding = encoding_of(player.features)
    begun = time.perf_counter()
    results: list[MatchResult] = []
    failed: dict[int, str] = {}
    thought: list[float] = []
    for first in range(0, games, consoles):
        numbers = range(first, min(first + consoles, games))
        wave = _Wave(player, encoding, match, numbers, temperature, seed)
        for ended in wave.play():
            if isinstance(ended, MatchResult):
                results.append(ended)
            if on_game:
                on_game()
        failed |= wave.failed
        thought += wave.thought
    return Matches(
        match=match,
        results=tuple(sorted(results, key=lambda result: result.game)),
        failed=failed,
        seconds=time.perf_counter() - begun,
        decision_s=statistics.median(thought) if thought else 0.0,
    )


class _Seat:
    """One match: its console, its window, and the controllers that are on their way."""

    def __init__(self, player: Player, encoding: Encoding, game: int, console: Console) -> None:
        self.game, self.console, self.tally = game, console, Tally()
        self.window: Window | None = None
        self._spec, self._encoding = player.window, encoding
        self._eyes, self._held = MeleeEyes(), encoding.released()
        self._pending = deque([encoding.neutral] * player.window.delay)

    def see(self, frame: Frames) -> None:
        """Take in the next frame; every `stride`-th is one to decide at."""
        (previous,), self._held = self._encoding.encode_next(frame["players"][:, 0]["controller"], self._held)
        if self.tally.frames % self._spec.stride == 0:
            row = self._eyes(frame)
            self.window = self.window or Window(self._spec.context, row, len(previous))
            self.window.append(row, tuple(previous.tolist()))
        self.tally.count(frame)

    def hold(self, controller: Controller) -> None:
        """Send what was chosen, or with a delay what was chosen so many frames ago."""
        self._pending.append(controller)
        self.console.send(self._encoding.decode(np.array([self._pending.popleft()])))


class _Wave:
    """Matches that begin together."""

    def __init__(
        self,
        player: Player,
        encoding: Encoding,
        match: Match,
        numbers: Sequence[int],
        temperature: float,
        seed: int,
    ) -> None:
        self.failed: dict[int, str] = {}
        self.thought: list[float] = []
        self._player, self._temperature, self._seed = player, temperature, seed
        self._seats = [_Seat(player, encoding, number, Console(match, number)) for number in numbers]

    def play(self) -> Iterator[MatchResult | None]:
        """Play all; yields the result of a match when it ends, and None when it fails."""
        everyone = list(self._seats)
        try:
            yield from self._receive(START_SECONDS)
            if not self._seats:
                return
            sources = [source(self._seed, seat.game) for seat in self._seats]
            decide = Decider(self._player, len(sources), temperature=self._temperature, generators=sources)
            while self._seats:
                chosen = self._decide(decide)
                for _ in range(self._player.window.stride):
                    before = list(self._seats)
                    for seat in before:
                        seat.hold(chosen[seat.game])
                    yield from self._receive(FRAME_SECONDS)
                    if len(self._seats) < len(before):
                        decide.keep([place for place, seat in enumerate(before) if seat in self._seats])
        finally:
            for seat in everyone:
                seat.console.close()

    def _decide(self, decide: Decider) -> dict[int, Controller]:
        windows = [seat.window for seat in self._seats]
        started = time.perf_counter()
        chosen = decide([window for window in windows if window is not None])
        self.thought.append(time.perf_counter() - started)
        return {seat.game: controller for seat, controller in zip(self._seats, chosen, strict=True)}

    def _receive(self, seconds: float) -> Iterator[MatchResult | None]:
        """The next frame of every match; those that ended or failed leave."""
        going = []
        for seat in self._seats:
            try:
                frame = seat.console.receive(seconds)
                if frame is not None and seat.tally.frames >= LONGEST:
                    raise WorkerError(f"the match did not end within {LONGEST} frames")
            except WorkerError as error:
                self.failed[seat.game] = str(error)
                yield None
                continue
            if frame is None:
                yield seat.tally.result(seat.game)
            else:
                seat.see(frame)
                going.append(seat)
        self._seats = going
