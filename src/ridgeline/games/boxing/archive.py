"""Many demonstrations in one small file: an xz stream of a JSON header, checksums and actions.

4 bytes             length of the header, little-endian
header              {"format", "schema", "origins": […], "games": […]}, a game being
                        [seed, level, index of its origin, decisions, dealt, taken]
8 bytes a game      checksum of its states
1 byte a decision   the expert's labels, game after game
1 byte a decision   executed XOR label, 0 wherever the expert's will was done
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline import files
from ridgeline.errors import DataError
from ridgeline.games.boxing.demos import Demonstration, Origin

FORMAT = "ridgeline-boxing-demonstrations"
SCHEMA = 1
SHIPPED = Path(__file__).with_name("demos.xz")

_CHECKSUM = 8
_FILTERS: list[dict[str, Any]] = [
    {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 0, "lp": 0, "pb": 0}
]


def save(path: Path, games: Sequence[Demonstration]) -> Path:
    """Write demonstrations, by seed; a file that exists is replaced in one step.

    Raises:
        DataError: no games, two of one seed, or a file that cannot be written.
    """
    games = sorted(games, key=lambda game: game.seed)
    seeds = [game.seed for game in games]
    if not games or len(set(seeds)) < len(seeds):
        raise DataError("demonstrations need at least one game, and every game a seed of its own")
    origins: list[dict[str, Any]] = []
    rows = []
    for game in games:
        origin = asdict(game.origin)
        if origin not in origins:
            origins.append(origin)
        rows.append([game.seed, game.level, origins.index(origin), len(game.labels), game.dealt, game.taken])
    header = json.dumps({"format": FORMAT, "schema": SCHEMA, "origins": origins, "games": rows}).encode()
    content = b"".join(
        [
            len(header).to_bytes(4, "little"),
            header,
            *(bytes.fromhex(game.checksum) for game in games),
            *(game.labels.tobytes() for game in games),
            *((game.executed ^ game.labels).tobytes() for game in games),
        ]
    )
    try:
        return files.replace(path, lzma.compress(content, filters=_FILTERS))
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}; free space or choose another file") from error


def load(path: Path = SHIPPED) -> list[Demonstration]:
    """Read demonstrations, by default those that ship with the package. They are not replayed yet.

    Raises:
        DataError: missing, damaged, foreign or newer.
    """
    try:
        content = lzma.decompress(path.read_bytes())
        size = int.from_bytes(content[:4], "little")
        header = files.parsed(content[4 : 4 + size])
        if header["format"] != FORMAT or header["schema"] > SCHEMA:
            raise DataError(f"{path} is of format {header['format']} {header['schema']}; upgrade ridgeline")
        if header["schema"] < 1:
            raise ValueError(f"schema {header['schema']}")
        return _games(header, content[4 + size :])
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); give a file of demonstrations") from error
    except (lzma.LZMAError, AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        raise DataError(
            f"{path} is not an archive of demonstrations ({error}); give one, or a file of JSON lines (.jsonl)"
        ) from error


def _games(header: dict[str, Any], body: bytes) -> list[Demonstration]:
    origins = [Origin.from_dict(origin) for origin in header["origins"]]
    rows = header["games"]
    ends = np.cumsum([0] + [row[3] for row in rows])
    checksums, actions = body[: _CHECKSUM * len(rows)], np.frombuffer(body[_CHECKSUM * len(rows) :], np.uint8)
    labels, changes = actions.reshape(2, ends[-1])
    games = []
    for index, (seed, level, origin, _, dealt, taken) in enumerate(rows):
        own = slice(ends[index], ends[index + 1])
        games.append(
            Demonstration(
                seed=seed,
                level=level,
                origin=origins[origin],
                executed=labels[own] ^ changes[own],
                labels=labels[own],
                dealt=dealt,
                taken=taken,
                checksum=checksums[_CHECKSUM * index : _CHECKSUM * (index + 1)].hex(),
            )
        )
    return games
