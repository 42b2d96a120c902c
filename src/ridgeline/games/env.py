"""The environment interface: what a game must offer so that policies can be trained for it and judged by playing it.

A controller is a tuple of class indices, one a head, in the order of the game's heads. One step is one decision; how
many frames of the game it lasts is the game's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ridgeline.errors import ConfigError

SEEDS = 1 << 31  # below which the seed of a game must be
FIRST_EVALUATION_SEED = 10_000  # seeds from here on are for judging only: no demonstration may have one

Controller = tuple[int, ...]
Row = tuple[NDArray[np.uint16], NDArray[np.float32]]  # categories [columns] and numbers [N] of a state


def check_seeds(first: int, count: int) -> None:
    """Refuse seeds that a game cannot have, of `count` games from seed `first` on.

    Raises:
        ConfigError: one of them is negative or too large.
    """
    if first < 0 or first + count > SEEDS:
        raise ConfigError(
            f"the seeds of games must be 0 to {SEEDS - 1}, got {first} to {first + count - 1}; change the first seed"
        )


class Score(NamedTuple):
    """Points dealt to the opponent and taken from it."""

    dealt: int
    taken: int

    @property
    def margin(self) -> int:
        """Points dealt minus points taken."""
        return self.dealt - self.taken


class Environment(Protocol):
    """One running game.

    Attributes:
        heads: name and number of classes of each part of the controller.
        neutral: the controller of a player who does nothing.
        cap: decisions after which a game that has not ended counts as hung.
    """

    heads: tuple[tuple[str, int], ...]
    neutral: Controller
    cap: int

    def reset(self, seed: int) -> Any:
        """Start a new game that the seed determines, and return its first state."""

    def step(self, controller: Controller) -> Any:
        """Hold the controller for one decision and return the next state."""

    @property
    def state(self) -> Any:
        """The current state, as the game's features read it."""

    @property
    def score(self) -> Score:
        """Points so far."""

    @property
    def done(self) -> bool:
        """Whether the game has ended."""

    @property
    def knockout(self) -> int:
        """1 if the player won early, −1 if the opponent did, else 0."""


@runtime_checkable
class Drawn(Protocol):
    """An environment whose screen can be had.

    Attributes:
        step_seconds: of the game's time that a step takes.
    """

    step_seconds: float

    def screen(self) -> NDArray[np.uint8]:
        """The picture now: uint8[height, width, 3], red, green and blue."""


class Eyes(Protocol):
    """The features of one running game: it is shown every state, in order, from the first."""

    def __call__(self, state: Any) -> Row:
        """The row of the next state, equal to the one that training reads."""


class Game(Protocol):
    """The adapter of a game.

    Attributes:
        name: by which `ridgeline.games.game` finds it.
        levels: strengths of the built-in opponent.
        heads: name and number of classes of each part of the controller.
        points: where a stick is for each class of a head that is one, by its name: float32[classes, 2] in [−1, 1].
    """

    name: str
    levels: tuple[int, ...]
    heads: tuple[tuple[str, int], ...]
    points: Mapping[str, NDArray[np.float32]]

    def environment(self, level: int) -> Environment:
        """A game to be started with `reset`.

        Raises:
            ConfigError: a level that does not exist.
            MissingExtraError: the game is not installed.
        """

    def eyes(self, features: Mapping[str, Any]) -> Eyes:
        """Features of the name and version that a data set or a checkpoint records.

        Raises:
            DataError: this version of the package has no such features.
        """
