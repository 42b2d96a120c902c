"""Melee as `ridgeline.games.env.Game`, as far as it is one: its games run on consoles, not in this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from ridgeline.errors import UnsupportedError
from ridgeline.games.melee.controls import Encoding
from ridgeline.games.melee.features import MeleeEyes, encoding_of

LEVELS = tuple(range(1, 10))


class Adapter:
    """See Game."""

    name = "melee"
    levels = LEVELS
    heads = Encoding().heads

    def environment(self, level: int) -> NoReturn:
        """See Game.

        Raises:
            UnsupportedError: always; a console needs a copy of the game.
        """
        raise UnsupportedError(
            "Melee is played on a console; give --game melee with --iso and --dolphin and no --level, see docs/melee.md"
        )

    def eyes(self, features: Mapping[str, Any]) -> MeleeEyes:
        """See Game."""
        encoding_of(features)
        return MeleeEyes()


GAME = Adapter()
