"""`ridgeline data`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tyro.conf import Positional, arg

from ridgeline.cli.output import Flag, emit, parse
from ridgeline.data import api, shards
from ridgeline.errors import ConfigError

SHARED = {"source", "out", "json"}
OWN = {  # what each kind of source listens to, beside SHARED
    "tinyshakespeare": {"file"},
    "pystdlib": set(),
    "boxing": {"file", "processes", "demonstrate", "first_seed", "expert", "levels"},
    "boxing-visible": {"file", "processes"},
    "melee": {"folder", "processes", "buttons", "shoulder", "character", "stage", "min_version"},
}
TEXT = {"kind"}
PLAYED = ("first_seed", "expert", "levels")  # what counts only where games are played
LINE_SECONDS = 30.0  # between lines of progress where there is no terminal
TOLD = 20  # refused replays that are named


@dataclass(frozen=True, kw_only=True)
class Options:
    """Prepare a data set: `ridgeline data SOURCE [options]`; it is kept in ~/.cache/ridgeline or in --out.

    - a file: any text; bytes, characters, or nanoGPT's .bin of uint16 tokens. The last tenth is held out.
    - tinyshakespeare: fetched, or taken from --file, and checked.
    - pystdlib: the source of this Python's standard library.
    - boxing: the demonstrations that ship with the package, or those of --file, replayed in the emulator; every
      tenth game is held out. With --demonstrate N an expert first plays N games into --file. The look-ahead expert is
      privileged: it tries every controller on a copy of the emulator before it decides, which no policy can.
    - boxing-visible: the same games, only what the screen shows.
    - melee FOLDER: the Slippi replays (.slp) in a folder and those in it; one that was interrupted is gone on with.
      Each human player of each game is imitated; every tenth game is held out. See docs/melee.md.

    With --json the last line describes the data set: name, path, kind, its sizes and its fingerprint; for melee
    {"games", "frames", "windows", "frames_per_s", "refused": [{"file", "reason"}], "path"}, which is also printed, with
    path null, where too few games are left.

    Attributes:
        source: a file or one of the names above.
        folder: of Melee replays.
        out: folder of the data set, which must not exist; the cache without it.
        kind: how to read a file: bytes, characters, tokens, or auto for what it looks like.
        file: the original tinyshakespeare, or a file of Boxing demonstrations.
        demonstrate: number of games that the expert plays into --file; one that was interrupted is gone on with.
        first_seed: of these games; all must be below 10,000, where the seeds of evaluation begin.
        expert: who plays them: look-ahead or scripted.
        levels: difficulties 0 to 3 to cycle through; without them a mix, half of them at 0.
        processes: games at a time; without it one a processor.
        buttons: classes of Melee's buttons: 5 (without L and R), 6, or 7 (with A and L together).
        shoulder: predict Melee's analog shoulder too.
        character: of Melee, whose players are imitated; without it all.
        stage: of Melee, the only one; without it all that tournaments allow.
        min_version: lowest version of the replay format, such as 3.8; without it 2.1, the oldest that can be used.
        json: print one JSON object as the last line.
    """

    source: Annotated[str, Positional, arg(metavar="SOURCE")]
    folder: Annotated[Path | None, Positional, arg(metavar="[FOLDER]")] = None
    out: Annotated[Path | None, arg(aliases=["-o"])] = None
    kind: str = "auto"
    file: Path | None = None
    demonstrate: int | None = None
    first_seed: int = 0
    expert: str = "look-ahead"
    levels: Annotated[tuple[int, ...], arg(help_behavior_hint="(default: a mix)")] = ()
    processes: int | None = None
    buttons: int = 6
    shoulder: Flag = False
    character: str | None = None
    stage: str | None = None
    min_version: str | None = None
    json: Flag = False


def run(arguments: Sequence[str]) -> int:
    """Prepare a data set and describe it."""
    options = parse(Options, arguments, "data")
    _check(options)
    result = _prepare(options)
    refused = result.get("refused")
    if refused is not None and not options.json:
        _tell_refused(refused)
        result = {**result, "refused": len(refused)}
    emit(result, as_json=options.json, title="data set")
    return 0


def _check(options: Options) -> None:
    """Refuse a source that is not there, and options that the source does not listen to."""
    if options.source not in OWN and not shards.exists(Path(options.source)):
        api.load_dataset(options.source)  # which says what is near
    known = SHARED | OWN.get(options.source, TEXT)
    given = [field.name for field in fields(options) if field.name not in known]
    usual = Options(source="")
    useless = [name for name in given if getattr(options, name) != getattr(usual, name)]
    if useless:
        flag = "FOLDER" if useless[0] == "folder" else f"--{useless[0]}".replace("_", "-")
        raise ConfigError(f"{flag} means nothing to the source {options.source}; leave it out")
    if options.source == "melee" and options.folder is None:
        raise ConfigError("melee needs the folder of the replays: ridgeline data melee FOLDER")
    if options.demonstrate is not None and options.file is None:
        raise ConfigError("--demonstrate needs --file, the file of JSON lines (.jsonl) to play the games into")
    played = [name for name in PLAYED if getattr(options, name) != getattr(usual, name)]
    if played and options.demonstrate is None:
        raise ConfigError(
            f"--{played[0].replace('_', '-')} is of games to be played; add --demonstrate, or leave it out"
        )
    if options.out is not None:
        shards.check_new(options.out)  # before there is anything to wait for


def _prepare(options: Options) -> dict[str, Any]:
    match options.source:
        case "tinyshakespeare":
            return api.prepare_tinyshakespeare(options.out, options.file)
        case "pystdlib":
            return api.prepare_pystdlib(options.out)
        case "boxing" | "boxing-visible":
            return _boxing(options)
        case "melee":
            return _melee(options)
        case source:
            return api.prepare_text(source, options.out, options.kind)


def _boxing(options: Options) -> dict[str, Any]:
    with bar() as progress:
        if options.demonstrate is not None:
            _demonstrate(options, counter(progress, "demonstrating"))
        return api.prepare_boxing(
            options.out,
            options.file,
            visible=options.source == "boxing-visible",
            processes=options.processes,
            progress=counter(progress, "replaying"),
        )


def _melee(options: Options) -> dict[str, Any]:
    from ridgeline.data.melee.prepare import TooFewError

    assert options.folder is not None
    try:
        with bar() as progress:
            return api.prepare_melee(
                options.folder,
                options.out,
                buttons=options.buttons,
                shoulder=options.shoulder,
                character=options.character,
                stage=options.stage,
                min_version=options.min_version,
                processes=options.processes,
                progress=counter(progress, "reading replays"),
            )
    except TooFewError as error:
        if options.json:
            emit(error.report, as_json=True, title="data set")
        raise


def _tell_refused(refused: Sequence[Mapping[str, str]]) -> None:
    """The replays that are not in the data set, on standard error."""
    console = Console(stderr=True, soft_wrap=True)
    for entry in refused[:TOLD]:
        console.print(f"refused {entry['file']}: {entry['reason']}", highlight=False, markup=False)
    if len(refused) > TOLD:
        console.print(f"… and {len(refused) - TOLD} more; --json lists all")


def _demonstrate(options: Options, count: Callable[[int, int], None]) -> None:
    from ridgeline.data import boxing

    assert options.file is not None
    assert options.demonstrate is not None
    boxing.demonstrate(
        options.file,
        count=options.demonstrate,
        first_seed=options.first_seed,
        player=options.expert,
        levels=options.levels or None,
        processes=options.processes,
        progress=lambda state: count(state.done, state.total),
    )


def replay_shipped(name: str) -> None:
    """Replay the shipped games of boxing or boxing-visible, which the first use takes half a minute for, in sight."""
    with bar() as progress:
        api.prepare_boxing(visible=name == "boxing-visible", progress=counter(progress, "replaying the demonstrations"))


def bar() -> Progress:
    """A progress bar on standard error, if that is a terminal; elsewhere `counter` prints lines."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def counter(progress: Progress, what: str) -> Callable[[int, int], None]:
    """What takes (done, total) and shows it under the name `what`: in the bar, or as a line every half a minute."""
    if progress.disable:
        return _lines(progress.console, what)
    task = progress.add_task(what, total=None, visible=False)
    return lambda done, total: progress.update(task, completed=done, total=total, visible=True)


def _lines(console: Console, what: str) -> Callable[[int, int], None]:
    said = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal said
        if time.monotonic() - said >= LINE_SECONDS:
            said = time.monotonic()
            console.print(f"{what}: {done:,} of {total:,}", highlight=False)

    return tell
