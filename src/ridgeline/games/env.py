"""The environment interface: what a game must offer so that policies can be trained for it and judged by playing it.

A controller is a tuple of class indices, one a head, in the order of the game's heads. One step is one decision; how
many frames of the game it lasts is the game's business.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

Controller = tuple[int, ...]


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
