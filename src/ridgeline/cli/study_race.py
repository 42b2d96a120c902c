"""`ridgeline study race`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from rich.console import Console
from rich.table import Table
from tyro.conf import Positional, arg

from ridgeline.cli.data import bar, counter, replay_shipped
from ridgeline.cli.output import Flag, parse
from ridgeline.cli.threads import usable_cores
from ridgeline.data.api import load_dataset
from ridgeline.data.games import GameData
from ridgeline.errors import ConfigError
from ridgeline.games.env import FIRST_EVALUATION_SEED
from ridgeline.games.parallel import count_processes
from ridgeline.play.evaluate import SILENCE_SECONDS, check_games, check_level
from ridgeline.play.player import check_cache, find_device
from ridgeline.play.rollout import check_temperature
from ridgeline.study.clocked import Point, grid_until
from ridgeline.study.folder import RECORD, keep_record
from ridgeline.study.outcome import Standing, crossings, make_record, standings
from ridgeline.study.race import Games, Race, Watcher, open_race, run_race
from ridgeline.study.racers import find_racers
from ridgeline.train.config import AUTO

GRID = (5, 10, 20, 30, 45, 60, 90, 120, 180, 300, 450, 600, 900, 1200, 1800, 3600)  # seconds of training


@dataclass(frozen=True, kw_only=True)
class Options:
    """Race: train each contender for the same time on the same data, and see how well it plays on the way.

    A contender is PRESET, PRESET:ENGINE or PRESET:ENGINE:SEED; a TOML file of settings may stand for the preset, and
    behind either stand changes, as in hal-5m+batch=256:best. Contenders train one after another, or one a card. The
    clock counts training alone: compilation, validation and checkpoints do not count and are reported apart. Games are
    played when all training has ended, in processes of their own. Called again with the same arguments, and --out, it
    goes on where it was stopped; with other contenders, these join the race. A copy of the folder goes on elsewhere, on
    the same kind of card; a contender that is trained and played needs no checkpoints there.

    With --json the last line is {"folder", "record", "contenders", "crossings", "failures"}: for each contender what
    it was at each time ("at", "seconds", "steps", "samples", "tokens", losses, "wins", "ko", "margin", "dealt",
    "taken", "intervals", …), from when on it reached 26 of 30 wins and a knockout rate of 0.9, and why it ended early
    if its numbers were no longer finite.

    Attributes:
        contenders: who takes part.
        minutes: of training, for each.
        games: to play at each checkpoint.
        level: strength of the opponent; in Boxing 0 to 3.
        temperature: 1 samples from the policies, 0 takes the most likely class of each head.
        grid: times of the checkpoints in seconds of training; the beginning and the end are added.
        data: games to train on.
        device: where to train: cpu, cuda, cuda:N or auto.
        precision: of training; auto for bf16 where a card has it, else fp32.
        gpus: cards over which contenders and games are spread; contenders on different cards train at the same time.
        play_device: where the policies compute at play: cpu, cuda, cuda:N, or auto for the cards of the training.
        cache: what they keep between decisions; see `ridgeline play --help`.
        processes: that play at a time; without it one a core.
        first_seed: of the games; seeds below 10,000 may be those of demonstrations.
        out: folder of the race; without it runs/race with the first free number.
        json: print one JSON object as the last line.
    """

    contenders: Annotated[tuple[str, ...], Positional, arg(metavar="CONTENDER…")]
    minutes: float = 5.0
    games: int = 30
    level: int = 0
    temperature: float = 1.0
    grid: Annotated[tuple[float, ...], arg(help_behavior_hint="(default: 5 10 20 30 45 60 90 120 …)")] = GRID
    data: str = "boxing"
    device: str = "auto"
    precision: str = "auto"
    gpus: int = 1
    play_device: str = "auto"
    cache: str = "exact"
    processes: int | None = None
    first_seed: int = FIRST_EVALUATION_SEED
    out: Path | None = None
    json: Flag = False


def run(arguments: Sequence[str]) -> int:
    """Race and print."""
    options = parse(Options, arguments, "study race")
    race, folder = _plan(options), options.out or _free(Path("runs"))
    open_race(race, folder)
    said = Console(stderr=True)
    with bar() as progress:
        count = counter(progress, "playing")
        outcome = run_race(
            race,
            folder,
            threads=torch.get_num_threads(),
            processes=usable_cores() if options.processes is None else options.processes,
            timeout=SILENCE_SECONDS,
            watcher=Watcher(trained=lambda name, point: said.print(_line(name, point), highlight=False), played=count),
        )
    table = standings(race, outcome)
    file = keep_record(make_record(race, outcome), folder / RECORD)
    if options.json:
        contenders = {name: [standing.to_json() for standing in path] for name, path in table.items()}
        made = {"folder": str(folder), "record": str(file), "contenders": contenders, "crossings": crossings(table)}
        print(json.dumps({**made, "failures": outcome.failures}))
    else:
        _print(table, outcome.failures, file)
    return 0


def _plan(options: Options) -> Race:
    """The race that the options ask for; what cannot be is told before anything is trained."""
    check_games(options.games, options.first_seed)
    check_temperature(options.temperature)
    count_processes(options.processes)
    if options.data in ("boxing", "boxing-visible"):
        replay_shipped(options.data)
    data = load_dataset(options.data)
    if not isinstance(data, GameData):
        raise ConfigError(f"{options.data} is a text, and a race is judged by games; give games to --data")
    check_level(data.game, options.level)
    settings = {name: getattr(options, name) for name in ("minutes", "device", "precision")}
    settings["data"] = str(data.path)
    racers = find_racers(options.contenders, data, settings, options.gpus)
    early = [at for at in options.grid if not at > 0]
    if early:
        raise ConfigError(f"times of the grid must be positive seconds of training, got {early[0]:g}")
    if options.play_device != AUTO:
        find_device(options.play_device)
    for racer in racers:
        check_cache(options.cache, racer.config.model.decoder)
    games = Games(
        count=options.games,
        level=options.level,
        temperature=options.temperature,
        first_seed=options.first_seed,
        device=options.play_device,
        cache=options.cache,
    )
    grid = grid_until(60 * options.minutes, options.grid)
    return Race(
        contenders=racers,
        grid=grid,
        games=games,
        data=data.name,
        fingerprint=data.fingerprint,
        gpus=options.gpus,
    )


def _free(parent: Path) -> Path:
    number = 1
    while (folder := parent / ("race" if number == 1 else f"race-{number}")).exists():
        number += 1
    return folder


def _line(name: str, point: Point) -> str:
    loss = f"val {point.val_loss:.4f}"
    return f"{name} at {point.at:g} s: {point.steps} steps, {loss}, {point.setup_s:.0f} s to set up"


def _print(table: Mapping[str, Sequence[Standing]], failures: Mapping[str, str], file: Path) -> None:
    console = Console()
    for name, path in table.items():
        made = Table(title=name, title_justify="left")
        for heading in ("seconds", "steps", "val loss", "won", "by knockout", "margin", "95 %"):
            made.add_column(heading, justify="right")
        for standing in path:
            point, strength = standing.point, standing.strength
            low, high = strength["intervals"]["margin"]
            made.add_row(
                f"{point.seconds:.1f}",
                f"{point.steps:,}",
                f"{point.val_loss:.4f}",
                f"{strength['wins']} of {strength['games']}",
                str(strength["ko"]),
                f"{strength['margin']:.1f}",
                f"{low:.1f} to {high:.1f}",
            )
        console.print(made)
    for crossing in crossings(table):
        when = "never" if crossing["seconds"] is None else f"from second {crossing['seconds']:.0f}"
        console.print(f"{crossing['contender']} reaches {crossing['target']} {when}", highlight=False)
    for name, reason in failures.items():
        console.print(f"{name} ended early: {reason}", highlight=False)
    console.print(f"the record is in {file}", highlight=False)
