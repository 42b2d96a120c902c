"""Games as a data set: the tables of whole games one after another, some of the games held out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.data import shards
from ridgeline.errors import DataError
from ridgeline.games import GAMES, game
from ridgeline.games.table import GameTable

HELD_OUT = 10  # one game in so many validates, at least one
COLUMNS = {"categories": np.uint16, "numbers": np.float32, "controller": np.uint8, "target": np.uint8}


@dataclass(frozen=True, eq=False)
class GameData:
    """Games to train on.

    Attributes:
        name: what the user called them.
        game: which game it is.
        categories: uint16[rows, columns]; the games one after another, as in GameTable.
        numbers: float32[rows, N].
        controller: uint8[rows, heads].
        target: uint8[rows, heads].
        offsets: int64[games + 1], the row at which each game begins, and the end.
        held_out: int64[…], the games that validate.
        fingerprint: checksum of all of these.
        path: the folder.
        heads: name and number of classes of each part of the controller.
        groups: name, rows of the embedding table and number of columns of each categorical input.
        features: name and version of what the columns mean.
        provenance: for every game, how it came about.
    """

    name: str
    game: str
    categories: NDArray[np.uint16]
    numbers: NDArray[np.float32]
    controller: NDArray[np.uint8]
    target: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    held_out: NDArray[np.int64]
    fingerprint: str
    path: Path
    heads: tuple[tuple[str, int], ...]
    groups: tuple[tuple[str, int, int], ...]
    features: dict[str, Any]
    provenance: list[dict[str, Any]]

    def summary(self) -> dict[str, Any]:
        """What `ridgeline data` prints; tables that show one game to each of its players count as one game."""
        game_of = [origin.get("replay", index) for index, origin in enumerate(self.provenance)]
        return {
            "name": self.name,
            "path": str(self.path),
            "kind": "games",
            "game": self.game,
            "games": len(set(game_of)),
            "held_out": len({game_of[table] for table in self.held_out}),
            "frames": len(self.numbers),
            "features": self.features,
            "fingerprint": self.fingerprint,
        }


def split(count: int, seed: int) -> NDArray[np.int64]:
    """Which of `count` games are held out: one in ten, at least one, in ascending order.

    Raises:
        DataError: fewer than two games.
    """
    if count < 2:
        raise DataError(f"{count} game{'' if count == 1 else 's'} cannot be split into training and held-out; give two")
    return np.sort(np.random.default_rng(seed).permutation(count)[: max(1, count // HELD_OUT)])


def write(
    folder: Path,
    tables: Sequence[GameTable],
    *,
    name: str,
    game: str,
    heads: Sequence[tuple[str, int]],
    groups: Sequence[tuple[str, int, int]] = (),
    features: dict[str, Any],
    provenance: Sequence[dict[str, Any]],
    seed: int = 0,
    once: bool = False,
) -> Path:
    """Write whole games as a data set.

    Args:
        folder: the data set's folder.
        tables: one a game, with equal columns.
        name: what to call them.
        game: which game it is.
        heads: see GameData.
        groups: see GameData.
        features: name and version of what the columns mean.
        provenance: one dict a game.
        seed: of the choice of held-out games.
        once: for the cache: a folder that exists holds these very games and stays.

    Raises:
        DataError: fewer than two games, tables that do not fit together or hold a class that does not exist, or a
            folder that cannot be written.
    """
    if len(tables) != len(provenance):
        raise DataError(f"{len(tables)} games have {len(provenance)} records of their origin; give one each")
    held_out = split(len(tables), seed)
    arrays: dict[str, NDArray[Any]] = {
        column: _join([getattr(table, column) for table in tables], column, dtype) for column, dtype in COLUMNS.items()
    }
    classes = [size for _, size in heads]
    _check_classes("controller", arrays["controller"], classes)
    _check_classes("target", arrays["target"], classes)
    _check_classes("categories", arrays["categories"], [rows for _, rows, columns in groups for _ in range(columns)])
    arrays["offsets"] = offsets = np.cumsum([0, *map(len, tables)], dtype=np.int64)
    arrays["held_out"] = held_out
    meta = describe(
        name=name, game=game, heads=heads, groups=groups, features=features, provenance=provenance, offsets=offsets
    )
    return (shards.write_once if once else shards.write)(folder, "games", arrays, meta)


def describe(
    *,
    name: str,
    game: str,
    heads: Sequence[tuple[str, int]],
    groups: Sequence[tuple[str, int, int]],
    features: dict[str, Any],
    provenance: Sequence[dict[str, Any]],
    offsets: NDArray[np.int64],
) -> dict[str, Any]:
    """What a data set of games says of itself in meta.json; see `write` for the arguments and GameData for offsets."""
    return {
        "name": name,
        "game": game,
        "games": len(offsets) - 1,
        "frames": int(offsets[-1]),
        "heads": list(heads),
        "groups": list(groups),
        "features": features,
        "provenance": list(provenance),
    }


def open_games(data: shards.Shards) -> GameData:
    """Games from their data set.

    Raises:
        DataError: they show a game of ours through features that this version does not have.
    """
    meta = data.meta
    if meta["game"] in GAMES:  # else a user's own
        try:
            game(meta["game"]).eyes(meta["features"])
        except DataError as error:
            raise DataError(f"{data.path} cannot be trained on here: {error}") from error
    return GameData(
        name=meta["name"],
        game=meta["game"],
        fingerprint=data.fingerprint,
        path=data.path,
        heads=tuple((head, size) for head, size in meta["heads"]),
        groups=tuple((group, rows, columns) for group, rows, columns in meta["groups"]),
        features=meta["features"],
        provenance=meta["provenance"],
        **data.arrays,
    )


def _join(parts: list[NDArray[Any]], column: str, dtype: type) -> NDArray[Any]:
    for part in parts:
        if part.dtype != dtype or part.ndim != 2 or part.shape[1] != parts[0].shape[1]:
            raise DataError(
                f"{column} must be {np.dtype(dtype).name}[frames, {parts[0].shape[-1]}] in every game, "
                f"got {part.dtype.name}{list(part.shape)}"
            )
    return np.concatenate(parts)


def _check_classes(column: str, array: NDArray[Any], classes: Sequence[int]) -> None:
    if array.shape[1] != len(classes):
        raise DataError(f"{column} has {array.shape[1]} columns, {len(classes)} are declared; make them agree")
    beyond = [
        f"{top} of {size}" for top, size in zip(array.max(axis=0, initial=0), classes, strict=True) if top >= size
    ]
    if beyond:
        raise DataError(f"{column} holds classes that do not exist ({', '.join(beyond)}); correct the encoding")
