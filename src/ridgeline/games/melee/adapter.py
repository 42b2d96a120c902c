"""Melee as `ridgeline.games.env.Game`, as far as it is one: its games run on consoles, not in this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from ridgeline.errors import UnsupportedError
from ridgeline.games.melee.controls import C_STICK, MAIN, Encoding
from ridgeline.games.melee.features import MeleeEyes, encoding_of
from ridgeline.games.melee.frames import STICK_UNITS


class Adapter:
    """See Game; what a game in this process would have raises."""

    name = "melee"
    heads = Encoding().heads
    points: Mapping[str, NDArray[np.float32]] = {
        "main": np.array(MAIN, np.float32) / np.float32(STICK_UNITS),
        "c": np.array(C_STICK, np.float32) / np.float32(STICK_UNITS),
    }

    @property
    def levels(self) -> NoReturn:
        """See Game.

        Raises:
            UnsupportedError: always; the computer's level is the console's matter.
        """
        raise _elsewhere()

    def environment(self, level: int) -> NoReturn:
        """See Game.

        Raises:
            UnsupportedError: always; a console needs a copy of the game.
        """
        raise _elsewhere()

    def eyes(self, features: Mapping[str, Any]) -> MeleeEyes:
        """See Game."""
        encoding_of(features)
        return MeleeEyes()


def _elsewhere() -> UnsupportedError:
    return UnsupportedError("Melee is played on a console: give --game melee, --iso and --dolphin, see docs/melee.md")


GAME = Adapter()
