"""`ridgeline play` for Melee: matches on consoles, and the championship's protocol."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table
from tyro.conf import Positional, arg

from ridgeline.cli.data import bar, counter
from ridgeline.cli.output import Flag, parse
from ridgeline.cli.threads import usable_cores
from ridgeline.errors import CheckpointError, ConfigError, WorkerError, nearest
from ridgeline.play.player import Player, load_player

WORDS = ("--game", "--iso", "--dolphin", "--serve")
MEANS = {
    "stocks_taken": "stocks taken a game",
    "stocks_lost": "stocks lost a game",
    "dealt": "damage dealt a game, %",
    "taken": "damage taken a game, %",
}
SERVED = ("umi",)
MATCHES_ALONE = ("iso", "dolphin", "games", "opponent_level", "opponent", "stage", "consoles", "seed", "cache")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Let a policy play Melee against the game's own opponent (--game melee), or in the championship (--serve umi).

    Matches need your own copy of the game (NTSC 1.02) and Slippi's Dolphin; see docs/melee.md. Every match runs on a
    console of its own, without picture and sound. With --json the last line is {"games", "wins", "losses", "ties",
    "stocks_taken", "stocks_lost", "dealt", "taken", "intervals", "level", "matches", "failed", "frames", "seconds",
    "decision_ms"}: means a game of those that came to their end, with 95 % intervals, each of them, and those that did
    not with the reason; where there are such, the exit code is 2.

    Attributes:
        checkpoint: folder of a checkpoint, or of a run, whose best is taken.
        game: melee.
        iso: the game.
        dolphin: Slippi's Dolphin, the executable.
        games: how many matches.
        opponent_level: of the computer, 1 to 9.
        character: that the policy plays; without it FOX, in the championship ALL.
        opponent: character of the computer; without it the policy's.
        stage: where.
        consoles: that run at a time; without it one a core.
        temperature: 1 samples from the policy, 0 takes the most likely class of each head.
        seed: of the samples; matches are not determined by it.
        device: where the policy computes: cpu, cuda or cuda:N.
        cache: what is kept between decisions: exact, rolling or none; see `ridgeline play --help`.
        serve: umi, to answer the arena that UMI_SOCKET names instead of playing matches here.
        json: print one JSON object as the last line.
    """

    checkpoint: Annotated[str, Positional, arg(metavar="CHECKPOINT")]
    game: str = "melee"
    iso: Path | None = None
    dolphin: Path | None = None
    games: int = 30
    opponent_level: int = 9
    character: str | None = None
    opponent: str | None = None
    stage: str = "FINAL_DESTINATION"
    consoles: int | None = None
    temperature: float = 1.0
    seed: int = 0
    device: str = "cpu"
    cache: str = "exact"
    serve: str | None = None
    json: Flag = False


def asked(arguments: Sequence[str]) -> bool:
    """Whether the arguments of `ridgeline play` are these."""
    return any(word.partition("=")[0] in WORDS for word in arguments)


def run(arguments: Sequence[str]) -> int:
    """Play and print, or serve."""
    options = parse(Options, arguments, "play")
    if options.game != "melee":
        raise ConfigError(f"--game is for melee, got {options.game!r}; for any other game leave it out")
    if options.serve not in (None, *SERVED):
        raise ConfigError(nearest(str(options.serve), SERVED, "protocol"))
    if options.serve:
        _check_served(options)
        _serve(options, _player(options, "none"))
        return 0
    result = _play(options)
    if options.json:
        print(json.dumps(result))
    elif result["games"]:
        Console().print(table(result))
    if result["failed"]:
        first = result["failed"][0]
        raise WorkerError(
            f"{len(result['failed'])} of {options.games} matches failed, the first of them {first['game']}: "
            f"{first['reason']}; see docs/melee.md"
        )
    return 0


def table(result: Mapping[str, Any]) -> Table:
    """The matches as people read them."""
    made = Table(title=f"{result['games']} matches at level {result['level']}", title_justify="left")
    made.add_column("")
    made.add_column("result", justify="right")
    made.add_column("95 % interval", justify="right")
    low, high = result["intervals"]["wins"]
    made.add_row("wins", str(result["wins"]), f"{low:.0f} to {high:.0f}")
    for name in ("losses", "ties"):
        made.add_row(name, str(result[name]), "")
    for name, words in MEANS.items():
        low, high = result["intervals"][name]
        made.add_row(words, f"{result[name]:.2f}", f"{low:.2f} to {high:.2f}")
    return made


def _play(options: Options) -> dict[str, Any]:
    from ridgeline.games.melee.console import Match
    from ridgeline.play.consoles import play_matches

    if options.iso is None or options.dolphin is None:
        raise ConfigError("a match needs --iso, your copy of the game, and --dolphin, Slippi's Dolphin")
    character = (options.character or "FOX").upper()
    match = Match(
        dolphin=options.dolphin,
        iso=options.iso,
        character=character,
        opponent=(options.opponent or character).upper(),
        level=options.opponent_level,
        stage=options.stage.upper(),
    )
    player = _player(options, options.cache)
    done = 0
    with bar() as progress:
        count = counter(progress, "playing")

        def on_game() -> None:
            nonlocal done
            done += 1
            count(done, options.games)

        consoles = usable_cores() if options.consoles is None else options.consoles
        return play_matches(
            player,
            match,
            options.games,
            consoles=consoles,
            temperature=options.temperature,
            seed=options.seed,
            on_game=on_game,
        ).summary()


def _check_served(options: Options) -> None:
    """Refuse options that are the arena's matter."""
    usual = {field.name: field.default for field in fields(Options)}
    for name in MATCHES_ALONE:
        if getattr(options, name) != usual[name]:
            raise ConfigError(f"--{name.replace('_', '-')} means nothing with --serve; leave it out")


def _serve(options: Options, player: Player) -> None:
    from ridgeline.play.umi import make_bot, serve

    characters = (options.character or "ALL").upper()
    serve(make_bot(player, name="ridgeline", characters=characters, temperature=options.temperature))


def _player(options: Options, cache: str) -> Player:
    player = load_player(options.checkpoint, options.device, cache)
    if player.game != "melee":
        raise CheckpointError(
            f"{options.checkpoint} plays {player.game}, not melee; give the checkpoint of one that does"
        )
    return player
