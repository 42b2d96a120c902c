"""Games played by a policy: several in lock step, so that one call of the model decides in all of them.

As in training, a window is filled from the left and read at its newest position; once it is full the oldest state
leaves it. With stride 2 it holds every other state and each decision is held for two. With a delay of d, a controller
takes effect d states after the one it was chosen at.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ridgeline.data.window import WindowSpec
from ridgeline.errors import ConfigError, WorkerError
from ridgeline.games import game
from ridgeline.games.env import Controller, Game, check_seeds
from ridgeline.play.decide import Decider, source
from ridgeline.play.player import Player
from ridgeline.play.window import Window


@dataclass(frozen=True, kw_only=True)
class GameResult:
    """How one game ended.

    Attributes:
        seed: of the game.
        level: strength of the opponent.
        dealt: points.
        taken: points.
        knockout: 1 if the player won early, −1 if the opponent did, else 0.
        steps: controllers that the game took.
        decision_s: median seconds of a decision, which games in lock step take together; differs from run to run.
    """

    seed: int
    level: int
    dealt: int
    taken: int
    knockout: int
    steps: int
    decision_s: float = field(default=0.0, compare=False)


def play_games(
    player: Player, seeds: Sequence[int], *, level: int, temperature: float = 1.0
) -> Iterator[list[GameResult]]:
    """Play one game a seed, all at once, and yield after every decision the results of the games that it ended.

    A seed gives the same game on the same machine, whichever others are played beside it, but for rounding: products
    of another number of rows may differ in their last bit.

    Args:
        player: the policy.
        seeds: one a game.
        level: strength of the opponent.
        temperature: 1 samples from the policy, 0 takes the most likely class of each head.

    Raises:
        ConfigError: a temperature, level or seed that cannot be.
        WorkerError: a game does not end.
    """
    check_temperature(temperature)
    for seed in seeds:
        check_seeds(seed, 1)
    adapter = game(player.game)
    seats = [Seat(adapter, player, seed, level) for seed in seeds]
    decide = Decider(player, len(seats), temperature=temperature, generators=map(source, seeds))
    while seats:
        begun = time.perf_counter()
        chosen = decide([seat.window for seat in seats])
        seconds = time.perf_counter() - begun
        for seat, controller in zip(seats, chosen, strict=True):
            seat.thought.append(seconds)
            seat.hold(controller)
        yield [seat.result() for seat in seats if seat.environment.done]
        going = [place for place, seat in enumerate(seats) if not seat.environment.done]
        if len(going) < len(seats):
            seats = [seats[place] for place in going]
            decide.keep(going)


def check_temperature(temperature: float) -> None:
    """Refuse a temperature that cannot be.

    Raises:
        ConfigError: negative or not finite.
    """
    if not 0 <= temperature < float("inf"):
        raise ConfigError(f"temperature must be 0 or more and finite, got {temperature}")


class Seat:
    """One game, its window, and the controllers that are on their way.

    Attributes:
        environment: the game.
        window: what the policy sees next.
        thought: seconds of each decision so far, which the games of one call share.
    """

    def __init__(self, adapter: Game, player: Player, seed: int, level: int) -> None:
        self.environment = adapter.environment(level)
        self.seed, self.level, self.steps = seed, level, 0
        self._spec: WindowSpec = player.window
        self._eyes = adapter.eyes(player.features)
        row = self._eyes(self.environment.reset(seed))
        self.window = Window(self._spec.context, row, len(adapter.heads))
        self.window.append(row, self.environment.neutral)
        self.thought: list[float] = []
        self._pending = deque([self.environment.neutral] * self._spec.delay)

    def hold(self, controller: Controller) -> None:
        """Play one decision, until the next one is due or the game ends.

        Raises:
            WorkerError: the game goes on beyond its cap of steps.
        """
        for _ in range(self._spec.stride):
            if self.steps == self.environment.cap:
                raise WorkerError(
                    f"the game of seed {self.seed} did not end within {self.environment.cap} steps; leave the seed out"
                )
            self._pending.append(controller)
            effective = self._pending.popleft()
            row = self._eyes(self.environment.step(effective))
            self.steps += 1
            if self.environment.done:
                return
        self.window.append(row, effective)

    def result(self) -> GameResult:
        """How the game ended."""
        score = self.environment.score
        return GameResult(
            seed=self.seed,
            level=self.level,
            dealt=score.dealt,
            taken=score.taken,
            knockout=self.environment.knockout,
            steps=self.steps,
            decision_s=statistics.median(self.thought),
        )
