"""`ridgeline demo`: the whole job in a few minutes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from ridgeline.cli.data import replay_shipped
from ridgeline.cli.output import Flag, parse
from ridgeline.cli.play import judge, table
from ridgeline.errors import require
from ridgeline.games.env import FIRST_EVALUATION_SEED
from ridgeline.play.evaluate import check_games, check_level
from ridgeline.presets import preset
from ridgeline.train import train

INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train a policy on the Boxing games that ship with the package, then let it play 30 games it has never seen.

    The last line is the JSON object of `ridgeline play`, with the checkpoint's folder and the share of games won by
    knockout, "ko_rate".

    Attributes:
        minutes: of training.
        games: to play.
        level: strength of the opponent, 0 to 3.
        out: folder of the run, new or empty; "auto" for runs/boxing with the first free number.
        json: print nothing but the JSON object on standard output.
    """

    minutes: float = 3.0
    games: int = 30
    level: int = 0
    out: str = "auto"
    json: Flag = False


def run(arguments: Sequence[str]) -> int:
    """Train, play, print."""
    options = parse(Options, arguments, "demo")
    check_games(options.games, FIRST_EVALUATION_SEED)  # before anything is trained
    check_level("boxing", options.level)
    config = dataclasses.replace(preset("boxing"), minutes=options.minutes, steps=None, tokens=None, out=options.out)
    require("ale_py", "games")
    replay_shipped("boxing")
    trained = train(config)
    if trained.interrupted:
        return INTERRUPTED
    result = judge(trained.checkpoint, options.games, level=options.level).summary()
    if not options.json:
        console = Console()
        console.print(table(result))
        console.print(f"trained for {options.minutes:g} minutes; the checkpoint is in {trained.checkpoint}")
    played = {"checkpoint": str(trained.checkpoint), "ko_rate": result["ko"] / result["games"]}
    print(json.dumps({**result, **played}))
    return 0
