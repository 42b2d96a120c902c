"""`ridgeline play`."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table
from tyro.conf import Positional, arg

from ridgeline.cli import play_melee
from ridgeline.cli.data import bar, counter
from ridgeline.cli.output import Flag, parse
from ridgeline.cli.threads import usable_cores
from ridgeline.errors import ConfigError
from ridgeline.games.env import FIRST_EVALUATION_SEED
from ridgeline.play import Evaluation, GameResult, evaluate, load_player
from ridgeline.play.evaluate import check_games, check_level
from ridgeline.play.watch import Watched, show, write_picture

COUNTS = {"wins": "wins", "ties": "ties", "ko": "won by knockout", "ko_against": "lost by knockout"}
MEANS = {"margin": "margin, points a game", "dealt": "dealt, points a game", "taken": "taken, points a game"}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Judge a trained policy by letting it play seeded games against the game's own opponent, or watch it play one.

    Melee is played on consoles: see `ridgeline play CHECKPOINT --game melee --help`.

    With --json the last line is {"games", "wins", "ties", "ko", "ko_against", "margin", "dealt", "taken",
    "intervals", "level", "seconds", "games_per_s", "decision_ms"}: numbers of games, mean points a game, and a 95 %
    interval of each; the time that all took, and the median decision, up to eight games together.

    Attributes:
        checkpoint: folder of a checkpoint, or of a run, whose best is taken.
        games: how many; with --watch and --picture one.
        level: strength of the opponent; in Boxing 0 to 3.
        temperature: 1 samples from the policy, 0 takes the most likely class of each head.
        processes: that play at a time; without it one a core.
        first_seed: of the games; seeds below 10,000 may be those of demonstrations.
        device: where the policy computes: cpu, cuda or cuda:N.
        cache: what is kept between decisions: exact (keys and values until the window is full, then whole windows),
            rolling (keys and values always; not the trained function once the window is full) or none.
        keep: a file of JSON lines that finished games are kept in; called again, those in it are not played again.
        watch: draw the game of --first-seed in the terminal while it is played.
        picture: write the game of --first-seed to this file, an animated PNG of the real screen.
        json: print one JSON object as the last line.
    """

    checkpoint: Annotated[str, Positional, arg(metavar="CHECKPOINT")]
    games: Annotated[int | None, arg(help_behavior_hint="(default: 30)")] = None
    level: int = 0
    temperature: float = 1.0
    processes: int | None = None
    first_seed: int = FIRST_EVALUATION_SEED
    device: str = "cpu"
    cache: str = "exact"
    keep: Path | None = None
    watch: Flag = False
    picture: Path | None = None
    json: Flag = False


def run(arguments: Sequence[str]) -> int:
    """Play and print."""
    if play_melee.asked(arguments):
        return play_melee.run(arguments)
    options = parse(Options, arguments, "play")
    result = (_watch if options.watch or options.picture else _judge)(options).summary()
    if options.json:
        print(json.dumps(result))
    else:
        Console().print(table(result))
    return 0


def _judge(options: Options) -> Evaluation:
    return judge(
        options.checkpoint,
        30 if options.games is None else options.games,
        level=options.level,
        temperature=options.temperature,
        processes=options.processes,
        first_seed=options.first_seed,
        device=options.device,
        cache=options.cache,
        keep=options.keep,
    )


def _watch(options: Options) -> Evaluation:
    """One game, to be seen."""
    if options.games not in (None, 1) or (options.watch and options.picture):
        raise ConfigError("one game is watched, in one place: leave --games out, and --watch or --picture")
    if options.keep or options.processes is not None:
        raise ConfigError("a game that is watched is not kept and takes one process; leave --keep and --processes out")
    check_games(1, options.first_seed)
    player = load_player(options.checkpoint, options.device, options.cache)
    check_level(player.game, options.level)
    begun = time.monotonic()
    seen = Watched(player, options.first_seed, level=options.level, temperature=options.temperature)
    if options.picture:
        write_picture(seen, options.picture)
    else:
        show(seen, sys.stdout, shutil.get_terminal_size)
    return Evaluation(level=options.level, results=(seen.result,), seconds=time.monotonic() - begun)


def judge(source: str | Path, games: int, *, processes: int | None = None, **settings: Any) -> Evaluation:
    """`evaluate` with a progress bar on standard error."""
    ended: list[GameResult] = []
    with bar() as progress:
        count = counter(progress, "playing")

        def on_game(result: GameResult) -> None:
            ended.append(result)
            count(len(ended), games)

        return evaluate(
            source, games, processes=usable_cores() if processes is None else processes, on_game=on_game, **settings
        )


def table(result: Mapping[str, Any]) -> Table:
    """The games as people read them."""
    made = Table(title=f"{result['games']} games at level {result['level']}", title_justify="left")
    made.add_column("")
    made.add_column("result", justify="right")
    made.add_column("95 % interval", justify="right")
    for names, form in ((COUNTS, "{:.0f}"), (MEANS, "{:.1f}")):
        for name, words in names.items():
            low, high = (form.format(end) for end in result["intervals"][name])
            made.add_row(words, form.format(result[name]), f"{low} to {high}")
    return made
