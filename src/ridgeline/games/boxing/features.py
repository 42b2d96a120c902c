"""What a policy sees of Boxing: the console's memory as a row of numbers. One function for training and for play.

By default a policy sees the whole memory but for the clock and the score: how long the round has lasted and who leads
stays hidden. With `visible=True` it sees only what the screen shows: where the boxers are and how far their arms
reach, and neither the hidden counters nor the random numbers that the opponent's next move depends on.

The numbers lie about within [−1, 1]: positions, how they changed since the last decision, the opponent relative to the
player, the same in steps of STEP pixels (a blow lands or misses by a pixel or two), the arms, then the single bytes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ridgeline.games.boxing.game import OPPONENT_X, OPPONENT_Y, PLAYER_X, PLAYER_Y, Ram

FEATURES_VERSION = 1

# frames, minutes, seconds, points, points, frames left of the second, frames: no policy sees these
CLOCK_AND_SCORE = (0, 16, 17, 18, 19, 20, 22)
# how far each arm is stretched: the player's two, the opponent's two
ARMS = (55, 57, 59, 61)
# every other byte that varies, but for copies of positions
HIDDEN = (
    *(14, 15, 21, 24, 46, 47, 49, 51, 53, 56, 60, 73, 74, 75, 77, 78, 79, 81, 82, 83, 88, 90, 91, 92, 93, 94, 95, 96),
    *(97, 98, 99, 101, 103, 105, 107, 109, 111, 113),
)

_POSITIONS = (PLAYER_X, PLAYER_Y, OPPONENT_X, OPPONENT_Y)
_LARGEST = np.array([109, 87, 109, 87], np.float32)  # of each
STEP = 4  # pixels
_STEPS = np.arange(-40, 40, STEP, dtype=np.float32)


def count(visible: bool = False) -> int:
    """Numbers in a row (N)."""
    return 2 * len(_POSITIONS) + 2 + 2 * len(_STEPS) + len(ARMS) + (0 if visible else len(HIDDEN))


def features(states: Ram, *, visible: bool = False, before: Ram | None = None) -> NDArray[np.float32]:
    """Rows of numbers for states that follow one another.

    Args:
        states: uint8[T, 128].
        visible: only what the screen shows.
        before: uint8[128], the state before the first; None at the start of a round, when nothing has moved yet.

    Returns:
        float32[T, N].
    """
    first = states[:1] if before is None else before[None]
    positions = states[:, _POSITIONS].astype(np.float32)
    earlier = np.concatenate([first, states[:-1]])[:, _POSITIONS].astype(np.float32)
    apart = positions[:, 2:] - positions[:, :2]
    stairs = np.clip((apart[:, :, None] - _STEPS) / STEP, 0, 1).reshape(len(states), -1)
    parts = [
        2 * positions / _LARGEST - 1,
        np.clip((positions - earlier) / 8, -1, 1),
        apart / 64,
        stairs,
        states[:, ARMS].astype(np.float32) / 72,
    ]
    if not visible:
        parts.append(states[:, HIDDEN].astype(np.float32) / 255)
    return np.concatenate(parts, axis=1, dtype=np.float32)


class BoxingEyes:
    """The same rows live, one state at a time: it remembers the state before. One instance a game."""

    def __init__(self, visible: bool = False) -> None:
        self.visible = visible
        self._before: Ram | None = None

    def __call__(self, state: Ram) -> tuple[NDArray[np.uint16], NDArray[np.float32]]:
        """Categories uint16[0] and numbers float32[N] of the next state of the round."""
        numbers = features(state[None], visible=self.visible, before=self._before)[0]
        self._before = state
        return np.zeros(0, np.uint16), numbers
