"""Melee's controller as classes: what a policy predicts, and what is pressed when it has chosen.

Main stick 37 classes, c-stick 9, buttons 5, 6 or 7, optionally the analog shoulder in 3: the tables of Eric Gu's HAL
and, for 7 buttons, of MIMIC. All sticks of the tables are whole eightieths, so the nearest class is found exactly, and
a tie goes to the lower one.

Buttons are one label a frame. The newest press wins (of several, the lowest class); a change without a new press is
NONE, and stays so while that set of buttons is held. So a label depends on the frames before it: a whole game is
encoded at once, and live each frame goes on from the last (`encode_next`). Encoding each window of a game by itself
would make the first labels of a window depend on where it begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ridgeline.errors import ConfigError
from ridgeline.games.env import Controller
from ridgeline.games.melee.frames import CONTROLLER, STICK_UNITS, TRIGGER_UNITS, A, B, Frames, L, R, X, Y, Z

Point = tuple[int, int]


def _axis(far: int) -> tuple[Point, ...]:
    return (far, 0), (-far, 0), (0, far), (0, -far)


def _corners(x: int, y: int) -> tuple[Point, ...]:
    return (x, y), (-x, y), (x, -y), (-x, -y)


MAIN: tuple[Point, ...] = (
    (0, 0),
    *(point for far in (28, 54, 80) for point in _axis(far)),
    *(point for xy in ((76, 24), (68, 40), (56, 56), (40, 40), (40, 68), (24, 76)) for point in _corners(*xy)),
)
C_STICK: tuple[Point, ...] = ((0, 0), *_axis(80), *_corners(56, 56))
SHOULDER = (0, 56, 140)
Z_SHOULDER = 49  # what Z alone makes of the trigger: no light shield of the player's

LABELS = {
    5: ("A", "B", "JUMP", "Z", "NONE"),
    6: ("A", "B", "JUMP", "Z", "L", "NONE"),
    7: ("A", "B", "JUMP", "Z", "L", "A+L", "NONE"),
}
_PRESSED = {"A": A, "B": B, "JUMP": X, "Z": Z, "L": L, "A+L": A | L, "NONE": 0}
_GROUPS = (A, B, X | Y, Z, L | R)  # the buttons behind a label, lowest class first


class Held(NamedTuple):
    """Which buttons were down last, as bits of their classes, and what that was called; uint8[N], one a game."""

    groups: NDArray[np.uint8]
    label: NDArray[np.uint8]


@dataclass(frozen=True)
class Encoding:
    """Which classes a policy has.

    Attributes:
        buttons: 5 (without L and R), 6, or 7 (with A and L together).
        shoulder: whether the analog shoulder is a head, the first.

    Raises:
        ConfigError: another number of buttons.
    """

    buttons: int = 6
    shoulder: bool = False

    def __post_init__(self) -> None:
        if self.buttons not in LABELS:
            raise ConfigError(f"buttons must be {', '.join(map(str, LABELS))}, got {self.buttons}")

    @property
    def heads(self) -> tuple[tuple[str, int], ...]:
        """Name and number of classes of each part, in the order in which they are predicted."""
        heads = (("c", len(C_STICK)), ("main", len(MAIN)), ("buttons", self.buttons))
        return (("shoulder", len(SHOULDER)), *heads) if self.shoulder else heads

    @property
    def none(self) -> int:
        """The label of no button."""
        return self.buttons - 1

    def released(self, games: int = 1) -> Held:
        """Before games begin."""
        return Held(np.zeros(games, np.uint8), np.full(games, self.none, np.uint8))

    @property
    def neutral(self) -> Controller:
        """The classes of a controller that nobody touches."""
        return tuple(self.none if name == "buttons" else 0 for name, _ in self.heads)

    def encode(self, controllers: Frames) -> NDArray[np.uint8]:
        """The classes of a whole game's controllers, from its first frame on.

        Args:
            controllers: CONTROLLER[T].

        Returns:
            uint8[T, heads].
        """
        groups_T = self._groups(controllers)
        before_T = np.concatenate([np.zeros(1, np.uint8), groups_T[:-1]])
        label_T = self._at_change(groups_T, before_T)
        # between changes it is what the last one made it
        last_T = np.maximum.accumulate(np.where(groups_T != before_T, np.arange(len(groups_T)), -1))
        return self._classes(controllers, np.where(last_T < 0, np.uint8(self.none), label_T[last_T]))

    def encode_next(self, controllers: Frames, held: Held) -> tuple[NDArray[np.uint8], Held]:
        """The classes of the next controller of several games.

        Args:
            controllers: CONTROLLER[N], one a game.
            held: what came before, from `released` or from the last call.

        Returns:
            uint8[N, heads], and what to go on from.
        """
        groups_N = self._groups(controllers)
        changed_N = groups_N != held.groups
        label_N = np.where(changed_N, self._at_change(groups_N, held.groups), held.label)
        return self._classes(controllers, label_N), Held(groups_N, label_N)

    def decode(self, classes: NDArray[np.integer[Any]]) -> Frames:
        """What to hold for chosen classes: integers[N, heads] become CONTROLLER[N].

        The digital L is held wherever the analog one is pressed to the end: techs, air dodges and wavedashes read it.
        """
        made = np.zeros(len(classes), CONTROLLER)
        chosen = {name: classes[:, column] for column, (name, _) in enumerate(self.heads)}
        made["main"], made["c"] = _MAIN_POINTS[chosen["main"]], _C_POINTS[chosen["c"]]
        made["buttons"] = np.array([_PRESSED[label] for label in LABELS[self.buttons]], np.uint8)[chosen["buttons"]]
        if self.shoulder:
            made["trigger"] = np.array(SHOULDER, np.uint8)[chosen["shoulder"]]
            made["buttons"] |= np.where(made["trigger"] == TRIGGER_UNITS, np.uint8(L), np.uint8(0))
        made["trigger"][made["buttons"] & L > 0] = TRIGGER_UNITS
        return made

    def _groups(self, controllers: Frames) -> NDArray[np.uint8]:
        """Which classes of buttons are down, as bits."""
        groups = _GROUP_TABLE[controllers["buttons"]]
        return groups & ~L_GROUP if self.buttons == 5 else groups

    def _at_change(self, groups: NDArray[np.uint8], before: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The label where the buttons change: the lowest new press, or none."""
        label = _LOWEST[groups & ~before]
        label = np.where(label == NO_GROUP, np.uint8(self.none), label)
        if self.buttons == 7:
            both = (groups & (A_GROUP | L_GROUP)) == A_GROUP | L_GROUP
            label = np.where(both & ((label == 0) | (label == 4)), np.uint8(5), label)
        return label

    def _classes(self, controllers: Frames, label: NDArray[np.uint8]) -> NDArray[np.uint8]:
        parts = [_nearest(controllers["c"], _C_TABLE), _nearest(controllers["main"], _MAIN_TABLE), label]
        if self.shoulder:
            parts.insert(0, _shoulder(controllers))
        return np.stack(parts, axis=-1)


def _nearest(sticks: NDArray[np.int8], table: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return table[sticks[..., 0].astype(np.intp) + STICK_UNITS, sticks[..., 1].astype(np.intp) + STICK_UNITS]


def _shoulder(controllers: Frames) -> NDArray[np.uint8]:
    buttons, pressed = controllers["buttons"], controllers["trigger"].astype(np.int16)
    pressed = np.where((buttons & Z > 0) & (pressed <= Z_SHOULDER), 0, pressed)
    pressed = np.where(buttons & (L | R) > 0, TRIGGER_UNITS, pressed)
    return np.abs(pressed[..., None] - np.array(SHOULDER)).argmin(-1).astype(np.uint8)


def _stick_table(points: tuple[Point, ...]) -> NDArray[np.uint8]:
    """The nearest class of every position, [right + 80, up + 80]."""
    grid = np.arange(-STICK_UNITS, STICK_UNITS + 1)
    away = [(grid[:, None] - x) ** 2 + (grid[None, :] - y) ** 2 for x, y in points]
    return np.stack(away).argmin(0).astype(np.uint8)


NO_GROUP = 255
A_GROUP, L_GROUP = np.uint8(1), np.uint8(16)
_MAIN_POINTS, _C_POINTS = np.array(MAIN, np.int8), np.array(C_STICK, np.int8)
_MAIN_TABLE, _C_TABLE = _stick_table(MAIN), _stick_table(C_STICK)
_GROUP_TABLE = np.array(
    [sum(1 << index for index, group in enumerate(_GROUPS) if buttons & group) for buttons in range(256)], np.uint8
)
_LOWEST = np.array([next((i for i in range(5) if groups >> i & 1), NO_GROUP) for groups in range(256)], np.uint8)
