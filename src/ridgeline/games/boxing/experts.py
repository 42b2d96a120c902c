"""Players that demonstrate Boxing: a scripted boxer, and one that looks ahead.

The look-ahead expert is PRIVILEGED: before every decision it copies the emulator, hidden state and all, tries
every controller on the copy and keeps what came off best. No policy can do that from what it sees; a policy learns
to do what such a player would have done.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Protocol

from ridgeline.errors import ConfigError, nearest
from ridgeline.games.boxing.actions import CONTROLLERS, direction
from ridgeline.games.boxing.game import OPPONENT_X, OPPONENT_Y, PLAYER_X, PLAYER_Y, Boxing
from ridgeline.games.env import Controller

JOYSTICK = 14  # the memory's copy of the stick, which differs where nothing else does


@dataclass(frozen=True, kw_only=True)
class Stance:
    """Where the scripted boxer wants to stand, in pixels of the console's screen.

    Attributes:
        x: distance from the opponent, sideways.
        y: distance from the opponent, up or down.
        slack: how far off it may be and not move.
        reach: how far off it may be and punch, every other decision.
    """

    x: int
    y: int
    slack: int = 2
    reach: int = 6


class Expert(Protocol):
    """A player for demonstrations.

    Attributes:
        name: by which `expert` finds it.
        privileged: whether it sees more than a player can.
    """

    name: str
    privileged: bool

    def choose(self, game: Boxing, previous: Controller) -> Controller:
        """The controller for the game's current state, given the one before."""

    def settings(self) -> dict[str, Any]:
        """What to record so that the same expert can be built again."""


class Scripted:
    """Walks to its stance beside the opponent and punches every other decision. Sees positions only."""

    name = "scripted"
    privileged = False

    def __init__(self, stance: Stance | None = None) -> None:
        self.stance = stance or Stance(x=26, y=6)

    def choose(self, game: Boxing, previous: Controller) -> Controller:
        """See Expert."""
        return follow(self.stance, game.state.tolist(), previous)

    def settings(self) -> dict[str, Any]:
        """See Expert."""
        return {"stance": asdict(self.stance)}


class LookAhead:
    """Tries each of the 18 controllers on a copy of the game, goes on by the script, and takes the best. PRIVILEGED.

    The copy knows the hidden state of the opponent and is played without sticky actions. The script's own choice wins
    ties, so that the labels follow what can be seen wherever that costs nothing.

    Args:
        stance: of the script that follows each try.
        horizon: decisions of the script after the one that is tried.
        discount: of a point, per decision that it lies later.
        range: pixels sideways within which it looks ahead; no blow lands from further away, so the script walks.
    """

    name = "look-ahead"
    privileged = True

    def __init__(
        self, stance: Stance | None = None, *, horizon: int = 3, discount: float = 0.97, range: int = 48
    ) -> None:
        self.stance = stance or Stance(x=14, y=13)
        self.horizon = horizon
        self.discount = discount
        self.range = range
        self._copy: Boxing | None = None

    def choose(self, game: Boxing, previous: Controller) -> Controller:
        """See Expert."""
        ram = game.state.tolist()
        scripted = follow(self.stance, ram, previous)
        if abs(ram[OPPONENT_X] - ram[PLAYER_X]) > self.range:
            return scripted
        if self._copy is None or self._copy.level != game.level:
            self._copy = Boxing(game.level, sticky=0.0)
            self._copy.reset(0)
        snapshot, seen = game.snapshot(), set()
        best, best_value = scripted, -float("inf")
        for controller in (scripted, *(c for c in CONTROLLERS if c != scripted)):
            self._copy.restore(snapshot)
            gained = self._copy.advance(controller)
            outcome = self._copy.state
            outcome[JOYSTICK] = 0
            key = (gained, outcome.tobytes())
            if key in seen:  # it did just what an earlier one did
                continue
            seen.add(key)
            value = gained + self._go_on(self._copy, controller)
            if value > best_value + 1e-6:
                best, best_value = controller, value
        return best

    def _go_on(self, copy: Boxing, previous: Controller) -> float:
        """Discounted points of the script from here on."""
        value, weight = 0.0, 1.0
        for _ in range(self.horizon):
            previous = follow(self.stance, copy.state.tolist(), previous)
            weight *= self.discount
            value += weight * copy.advance(previous)
        return value

    def settings(self) -> dict[str, Any]:
        """See Expert."""
        return {
            "stance": asdict(self.stance),
            "horizon": self.horizon,
            "discount": self.discount,
            "range": self.range,
        }


def follow(stance: Stance, ram: list[int], previous: Controller) -> Controller:
    """The script's choice in a state, given the controller before: a punch follows a decision without one."""
    x, y, opponent_x, opponent_y = ram[PLAYER_X], ram[PLAYER_Y], ram[OPPONENT_X], ram[OPPONENT_Y]
    right = opponent_x + (-stance.x if x < opponent_x else stance.x) - x
    down = opponent_y + (stance.y if y >= opponent_y else -stance.y) - y
    punches = not previous[1] and abs(right) <= stance.reach and abs(down) <= stance.reach
    return direction(_beyond(right, stance.slack), _beyond(down, stance.slack)), int(punches)


def _beyond(value: int, slack: int) -> int:
    return 0 if abs(value) <= slack else value


EXPERTS: dict[str, type[Scripted] | type[LookAhead]] = {kind.name: kind for kind in (Scripted, LookAhead)}


def expert(name: str, settings: dict[str, Any] | None = None) -> Expert:
    """The expert of a name, with recorded settings or its own.

    Raises:
        ConfigError: no such expert.
    """
    if name not in EXPERTS:
        raise ConfigError(nearest(name, EXPERTS, "expert"))
    options = dict(settings or {})
    if "stance" in options:
        options["stance"] = Stance(**options["stance"])
    return EXPERTS[name](**options)
