"""Boxing as `ridgeline.games.env.Game`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.errors import DataError
from ridgeline.games.boxing.actions import DIRECTIONS, HEADS
from ridgeline.games.boxing.features import FEATURES_VERSION, BoxingEyes
from ridgeline.games.boxing.game import LEVELS, Boxing


class Adapter:
    """See Game."""

    name = "boxing"
    levels = LEVELS
    heads = HEADS
    points: Mapping[str, NDArray[np.float32]] = {"direction": np.array(DIRECTIONS, np.float32)}

    def environment(self, level: int) -> Boxing:
        """See Game."""
        return Boxing(level)

    def features(self, visible: bool = False) -> dict[str, Any]:
        """What a data set and a checkpoint record about the features; `eyes` takes it."""
        return {"game": self.name, "version": FEATURES_VERSION, "visible": visible}

    def eyes(self, features: Mapping[str, Any]) -> BoxingEyes:
        """See Game."""
        visible = bool(features.get("visible"))
        if dict(features) != self.features(visible):
            raise DataError(
                f"the features {dict(features)} are not those of this version ({self.features(visible)}); "
                "train again, or use the version of ridgeline that trained it"
            )
        return BoxingEyes(visible)


GAME = Adapter()
