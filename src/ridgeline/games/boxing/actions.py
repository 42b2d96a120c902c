"""Boxing's controller: where the stick points and whether the button is down, for the console's 18 actions."""

from __future__ import annotations

from ridgeline.errors import ConfigError
from ridgeline.games.env import Controller

# stick directions in the console's order, as (right, down)
DIRECTIONS = ((0, 0), (0, -1), (1, 0), (-1, 0), (0, 1), (1, -1), (-1, -1), (1, 1), (-1, 1))
HEADS = (("direction", len(DIRECTIONS)), ("fire", 2))
NEUTRAL: Controller = (0, 0)
CONTROLLERS: tuple[Controller, ...] = tuple((d, f) for f in (0, 1) for d in range(len(DIRECTIONS)))

_INDEX = {direction: index for index, direction in enumerate(DIRECTIONS)}


def direction(right: int, down: int) -> int:
    """Class of the stick direction with the signs of the two arguments."""
    return _INDEX[(right > 0) - (right < 0), (down > 0) - (down < 0)]


def ale_action(controller: Controller) -> int:
    """The emulator's action, 0 to 17.

    Raises:
        ConfigError: not a controller of this game.
    """
    if controller not in _ALE:
        raise ConfigError(f"a Boxing controller is (direction 0-8, fire 0-1), got {controller}")
    return _ALE[controller]


# the console counts: nothing, fire, the eight directions, the eight directions with fire
_ALE = {(d, f): (f if d == 0 else d + 1 + 8 * f) for d, f in CONTROLLERS}
