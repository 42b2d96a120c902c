"""`ridgeline report`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from ridgeline.cli.output import Flag, emit, parse
from ridgeline.errors import ConfigError
from ridgeline.records import Record, read_record

PAGE = b"<!doctype html>"  # how one begins


@dataclass(frozen=True, kw_only=True)
class Options:
    """Draw records into one page that needs nothing else: ladders, phases, sweeps, rooflines, losses, strength, each
    with its table and its circumstances.

    Attributes:
        records: files that bench, explain, study and race wrote, or folders of them.
        output: the page.
        png: a folder for every figure as a PNG as well.
        title: of the page.
        json: print one JSON object as the last line.
    """

    records: Annotated[tuple[str, ...], Positional, arg(metavar="RECORD…")]
    output: Annotated[str, arg(aliases=["-o"])] = "report.html"
    png: str | None = None
    title: str = "Ridgeline report"
    json: Flag = False


def read_all(places: Sequence[str]) -> list[Record]:
    """Every record named, those of folders in the order of their names.

    Raises:
        ConfigError: a folder without records, or none named.
        RecordError: a file that is no record, or was edited.
    """
    files: list[Path] = []
    for place in map(Path, places):
        inside = sorted(place.rglob("*.json")) if place.is_dir() else [place]
        if not inside:
            raise ConfigError(f"{place} holds no records (*.json); name a record or a folder of them")
        files += inside
    if not files:
        raise ConfigError("name at least one record: ridgeline report RECORD… -o report.html")
    return [read_record(file) for file in dict.fromkeys(files)]


def check_place(target: Path) -> None:
    """A page may take the place of an earlier page, and of nothing else.

    Raises:
        ConfigError: another file is there, a record perhaps, or one that cannot be read.
    """
    if not target.is_file():
        return
    try:
        begins = target.read_bytes()[: len(PAGE)]
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror}; choose another -o") from error
    if begins and begins.lower() != PAGE:
        raise ConfigError(f"{target} is there already and is no page; choose another -o")


def run(arguments: Sequence[str]) -> int:
    """Read, draw and write."""
    options = parse(Options, arguments, "report")
    from ridgeline.report.page import build_page, write_images

    records, target = read_all(options.records), Path(options.output)
    check_place(target)
    page = build_page(records, title=options.title)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(page, encoding="utf-8")
        images = write_images(records, Path(options.png)) if options.png else []
    except OSError as error:
        where = error.filename or target
        raise ConfigError(f"{where} cannot be written: {error.strerror}; choose another -o or --png") from error
    said = {"report": str(target), "records": len(records), "bytes": len(page.encode())}
    if options.json:
        print(json.dumps({**said, "images": [str(image) for image in images]}), flush=True)
    else:
        emit(said, as_json=False, title="report")
    return 0
