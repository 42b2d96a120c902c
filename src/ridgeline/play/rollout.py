"""Games played by a policy: several in lock step, so that one call of the model decides in all of them.

As in training, a window is filled from the left and read at its newest position; once it is full the oldest state
leaves it. With stride 2 it holds every other state and each decision is held for two. With a delay of d, a controller
takes effect d states after the one it was chosen at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ridgeline.data.window import WindowSpec
from ridgeline.errors import ConfigError, WorkerError
from ridgeline.games import game
from ridgeline.games.env import Controller, Game, Row, check_seeds
from ridgeline.play.player import Player


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
    """

    seed: int
    level: int
    dealt: int
    taken: int
    knockout: int
    steps: int


def play_games(
    player: Player, seeds: Sequence[int], *, level: int, temperature: float = 1.0
) -> Iterator[list[GameResult]]:
    """Play one game a seed, all at once, and yield after every decision the results of the games that it ended.

    The same arguments give the same games on the same machine. The samples of all games come from one generator,
    seeded by the first seed, so another set of seeds gives other games.

    Args:
        player: the policy.
        seeds: one a game.
        level: strength of the opponent.
        temperature: 1 samples from the policy, 0 takes the most likely class of each head.

    Raises:
        ConfigError: a temperature, level or seed that cannot be.
        WorkerError: a game does not end.
    """
    if not 0 <= temperature < float("inf"):
        raise ConfigError(f"temperature must be 0 or more, got {temperature}")
    for seed in seeds:
        check_seeds(seed, 1)
    adapter = game(player.game)
    generator = torch.Generator(player.device).manual_seed(seeds[0])
    seats = [_Seat(adapter, player, seed, level) for seed in seeds]
    while seats:
        newest = len(seats[0].window) - 1  # the same in all games: they began together
        at_B = torch.full((len(seats),), newest, device=player.device)
        batch = _batch([seat.window for seat in seats], player.device)
        chosen = player.policy.act(batch, at_B, temperature=temperature, generator=generator).tolist()
        for seat, controller in zip(seats, chosen, strict=True):
            seat.hold(tuple(controller))
        yield [seat.result() for seat in seats if seat.environment.done]
        seats = [seat for seat in seats if not seat.environment.done]


class Window:
    """The newest states that a policy sees, filled from the left.

    Attributes:
        rows: name → [T, …], of which the first `len(window)` hold states.
    """

    def __init__(self, context: int, row: Row, heads: int) -> None:
        categories, numbers = row
        self.rows: dict[str, NDArray[Any]] = {
            "categories": np.zeros((context, len(categories)), np.int64),
            "numbers": np.zeros((context, len(numbers)), np.float32),
            "previous": np.zeros((context, heads), np.int64),
        }
        self._context = context
        self._filled = 0

    def __len__(self) -> int:
        return self._filled

    def append(self, row: Row, previous: Controller) -> None:
        """Add the newest state and the controller that led to it; the oldest leaves a full window."""
        if self._filled == self._context:
            for array in self.rows.values():
                array[:-1] = array[1:].copy()
        else:
            self._filled += 1
        newest = self._filled - 1
        self.rows["categories"][newest], self.rows["numbers"][newest] = row
        self.rows["previous"][newest] = previous


class _Seat:
    """One game, its window, and the controllers that are on their way."""

    def __init__(self, adapter: Game, player: Player, seed: int, level: int) -> None:
        self.environment = adapter.environment(level)
        self.seed, self.level, self.steps = seed, level, 0
        self._spec: WindowSpec = player.window
        self._eyes = adapter.eyes(player.features)
        row = self._eyes(self.environment.reset(seed))
        self.window = Window(self._spec.context, row, len(adapter.heads))
        self.window.append(row, self.environment.neutral)
        self._pending = deque([self.environment.neutral] * self._spec.delay)

    def hold(self, controller: Controller) -> None:
        """Play one decision, until the next one is due or the game ends."""
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
        )


def _batch(windows: Sequence[Window], device: torch.device) -> dict[str, Tensor]:
    """The windows of several games as one batch, cut to what they hold."""
    filled = len(windows[0])
    batch = {}
    for name, array in windows[0].rows.items():
        if array.shape[1]:  # a game may lack categories or numbers
            stacked = np.stack([window.rows[name][:filled] for window in windows])
            batch[name] = torch.from_numpy(stacked).to(device)
    return batch
