"""Melee's controller as classes: what a policy predicts, and what is pressed when it has chosen.

Main stick 37 classes, c-stick 9, buttons 5, 6 or 7, optionally the analog shoulder in 3: the tables of Eric Gu's HAL
and, for 7 buttons, of MIMIC. All sticks of the tables are whole eightieths, so the nearest class is found exactly, and
a tie goes to the lower one.

Buttons are one label a frame. The newest press wins (of several, the lowest class); a change without a new press is
NONE, and stays so while that set of buttons is held. So a label depends on the frames before it: a whole game is
encoded at once, and live one goes on from where it was (`Held`). Encoding each window of a game by itself would make
the first labels of a window depend on where it begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ridgeline.errors import ConfigError
from ridgeline.games.env import Controller
from ridgeline.games.melee.frames import STICK_UNITS, TRIGGER_UNITS, A, B, Frames, L, R, X, Y, Z

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


class Inputs(NamedTuple):
    """What is to be held: sticks in eightieths (right, up), trigger in 140ths, bits of buttons."""

    main: Point
    c: Point
    trigger: int
    buttons: int


@dataclass(frozen=True)
class Held:
    """Which buttons were down last, by class, and what that was called."""

    groups: int
    label: int


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

    @property
    def released(self) -> Held:
        """Before a game begins."""
        return Held(0, self.none)

    @property
    def neutral(self) -> Controller:
        """The classes of a controller that nobody touches."""
        return tuple(self.none if name == "buttons" else 0 for name, _ in self.heads)

    def encode(self, controllers: Frames, held: Held | None = None) -> tuple[NDArray[np.uint8], Held]:
        """The classes of controllers that follow one another.

        Args:
            controllers: CONTROLLER[T], from the first frame of a game, or from the one after `held`.
            held: what came before; None at the start of a game.

        Returns:
            uint8[T, heads], and what to go on from.
        """
        labels, held = self._labels(controllers["buttons"], held or self.released)
        parts = [_nearest(controllers["c"], _C_TABLE), _nearest(controllers["main"], _MAIN_TABLE), labels]
        if self.shoulder:
            parts.insert(0, _shoulder(controllers))
        return np.stack(parts, axis=-1), held

    def decode(self, controller: Controller) -> Inputs:
        """What to hold for the chosen classes.

        The digital L is held wherever the analog one is pressed to the end: techs, air dodges and wavedashes read it.
        """
        chosen = dict(zip((name for name, _ in self.heads), controller, strict=True))
        buttons = _PRESSED[LABELS[self.buttons][chosen["buttons"]]]
        analog = SHOULDER[chosen["shoulder"]] if self.shoulder else 0
        if analog == TRIGGER_UNITS:
            buttons |= L
        if buttons & L:
            analog = TRIGGER_UNITS
        return Inputs(MAIN[chosen["main"]], C_STICK[chosen["c"]], analog, buttons)

    def _labels(self, buttons: NDArray[np.uint8], held: Held) -> tuple[NDArray[np.uint8], Held]:
        groups_T: NDArray[np.uint8] = _GROUP_TABLE[buttons]
        if self.buttons == 5:
            groups_T = groups_T & np.uint8(0b01111)
        before_T = np.concatenate([np.array([held.groups], np.uint8), groups_T[:-1]])
        # at a change: the lowest new press; none new, no label
        changed_T = groups_T != before_T
        label_T = _LOWEST[groups_T & ~before_T]
        label_T[label_T == NO_GROUP] = self.none
        if self.buttons == 7:
            both_T = (groups_T & 0b10001) == 0b10001
            label_T[both_T & ((label_T == 0) | (label_T == 4))] = 5
        # in between: what the last change made it
        last_T = np.maximum.accumulate(np.where(changed_T, np.arange(len(buttons)), -1))
        label_T = np.where(last_T < 0, np.uint8(held.label), label_T[last_T]).astype(np.uint8)
        return label_T, Held(int(groups_T[-1]), int(label_T[-1])) if len(buttons) else held


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
_MAIN_TABLE, _C_TABLE = _stick_table(MAIN), _stick_table(C_STICK)
_GROUP_TABLE = np.array(
    [sum(1 << index for index, group in enumerate(_GROUPS) if buttons & group) for buttons in range(256)], np.uint8
)
_LOWEST = np.array([next((i for i in range(5) if groups >> i & 1), NO_GROUP) for groups in range(256)], np.uint8)
