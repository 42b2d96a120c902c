"""Boxing demonstrations as a data set: the shipped ones, or those that an expert plays anew.

Demonstrations are kept as seeds and actions. To train on them they are replayed in the emulator, verified against
their checksums and seen through the features; the result is kept, so that this happens once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ridgeline import files
from ridgeline.checkpoint import sha256
from ridgeline.data import games, shards
from ridgeline.errors import ConfigError, DataError
from ridgeline.games.boxing import archive, generate, tables
from ridgeline.games.boxing.actions import HEADS
from ridgeline.games.boxing.adapter import GAME
from ridgeline.games.boxing.demos import FIRST_EVALUATION_SEED, Demonstration
from ridgeline.games.boxing.experts import expert
from ridgeline.games.boxing.features import FEATURES_VERSION
from ridgeline.games.boxing.game import LEVELS
from ridgeline.games.parallel import count_processes


def write(
    out: Path | None,
    source: Path | None,
    *,
    visible: bool = False,
    processes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Replay demonstrations and write them as a data set.

    Args:
        out: its folder; None for the cache, where a data set of the same games is found again.
        source: a file of demonstrations (an archive or JSON lines); None for those that ship with the package.
        visible: only what the screen shows; see `ridgeline.games.boxing.features`.
        processes: games that are replayed at a time; None for as many as there are processors.
        progress: called with the number of games that are ready, and of all.

    Returns:
        The folder.

    Raises:
        DataError: the file cannot be used, a game replays differently here, or `out` exists.
        ConfigError: fewer than one process.
        MissingExtraError: there is something to replay and no emulator.
    """
    workers = count_processes(processes)
    if out is not None:
        shards.check_new(out)
    file = source or archive.SHIPPED
    demonstrations = _read(file)
    name = GAME.name + ("-visible" if visible else "")
    folder = out or files.cache() / f"{name}-v{FEATURES_VERSION}-{sha256(file)[:16]}"
    if shards.exists(folder):
        return folder
    return games.write(
        folder,
        tables.tables(demonstrations, visible=visible, processes=workers, progress=progress),
        name=name,
        game=GAME.name,
        heads=HEADS,
        features=GAME.features(visible),
        provenance=[demonstration.provenance() for demonstration in demonstrations],
        once=out is None,
    )


def demonstrate(
    file: Path,
    *,
    count: int,
    first_seed: int = 0,
    player: str = "look-ahead",
    levels: Sequence[int] | None = None,
    processes: int | None = None,
    progress: Callable[[generate.Progress], None] | None = None,
) -> list[Demonstration]:
    """Let an expert play games, into a file of JSON lines; called again it goes on where it was interrupted.

    Args:
        file: the JSON lines.
        count: games.
        first_seed: of the games, which have the seeds that follow it.
        player: "look-ahead", which is privileged (it copies the emulator to see what comes), or "scripted".
        levels: difficulties to cycle through; None for a mix of all, half of them the easiest.
        processes: games at a time; None for as many as there are processors.
        progress: called at the start and after every game.

    Raises:
        DataError: fewer than two games, a seed that is reserved for evaluation, or a file of something else.
        ConfigError: no such expert or level, or fewer than one process.
    """
    if count < 2:
        raise DataError(f"demonstrate must be at least 2 games, one to train on and one to hold out, got {count}")
    if first_seed < 0 or first_seed + count > FIRST_EVALUATION_SEED:
        raise DataError(
            f"the seeds of demonstrations must be 0 to {FIRST_EVALUATION_SEED - 1}, got {first_seed} to "
            f"{first_seed + count - 1}; change the first seed or the number of games (larger seeds are for evaluation)"
        )
    wrong = [level for level in levels or () if level not in LEVELS]
    if wrong:
        raise ConfigError(f"Boxing has the levels {', '.join(map(str, LEVELS))}, got {wrong[0]}")
    seeds, workers = range(first_seed, first_seed + count), count_processes(processes)
    return generate.generate(file, seeds, expert(player), processes=workers, levels=levels, progress=progress)


def _read(file: Path) -> list[Demonstration]:
    games = generate.read_lines(file) if file.suffix == generate.LINES else archive.load(file)
    return sorted(games, key=lambda game: game.seed)  # lines are in the order in which games happened to end
