"""`ridgeline play`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table
from tyro.conf import Positional, arg

from ridgeline.cli.data import bar, counter
from ridgeline.cli.output import Flag, parse
from ridgeline.cli.threads import usable_cores
from ridgeline.games.env import FIRST_EVALUATION_SEED
from ridgeline.play import Evaluation, GameResult, evaluate

COUNTS = {"wins": "wins", "ties": "ties", "ko": "won by knockout", "ko_against": "lost by knockout"}
MEANS = {"margin": "margin, points a game", "dealt": "dealt, points a game", "taken": "taken, points a game"}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Judge a trained policy by letting it play seeded games against the game's own opponent.

    With --json the last line is {"games", "wins", "ties", "ko", "ko_against", "margin", "dealt", "taken",
    "intervals", "level", "seconds", "games_per_s", "decision_ms"}: numbers of games, mean points a game, and a 95 %
    interval of each; the time that all took, and the median decision, up to eight games together.

    Attributes:
        checkpoint: folder of a checkpoint, or of a run, whose best is taken.
        games: how many.
        level: strength of the opponent; in Boxing 0 to 3.
        temperature: 1 samples from the policy, 0 takes the most likely class of each head.
        processes: that play at a time; without it one a core.
        first_seed: of the games; seeds below 10,000 may be those of demonstrations.
        device: where the policy computes: cpu, cuda or cuda:N.
        cache: what is kept between decisions: exact (keys and values until the window is full, then whole windows),
            rolling (keys and values always; not the trained function once the window is full) or none.
        json: print one JSON object as the last line.
    """

    checkpoint: Annotated[str, Positional, arg(metavar="CHECKPOINT")]
    games: int = 30
    level: int = 0
    temperature: float = 1.0
    processes: int | None = None
    first_seed: int = FIRST_EVALUATION_SEED
    device: str = "cpu"
    cache: str = "exact"
    json: Flag = False


def run(arguments: Sequence[str]) -> int:
    """Play and print."""
    options = parse(Options, arguments, "play")
    result = judge(
        options.checkpoint,
        options.games,
        level=options.level,
        temperature=options.temperature,
        processes=options.processes,
        first_seed=options.first_seed,
        device=options.device,
        cache=options.cache,
    ).summary()
    if options.json:
        print(json.dumps(result))
    else:
        Console().print(table(result))
    return 0


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
