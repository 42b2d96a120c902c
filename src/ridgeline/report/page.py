"""A report: chapters of sections, and the circumstances of every record, as one HTML file that needs nothing else."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import ridgeline
from ridgeline.bench.ratios import SUBJECT
from ridgeline.errors import ConfigError, require
from ridgeline.records import Record
from ridgeline.report import played, studied
from ridgeline.report.names import model_place
from ridgeline.report.palette import DARK, LIGHT, variables
from ridgeline.report.sections import (
    Section,
    bench_sections,
    beside_section,
    overview_section,
    rungs_of,
    timed,
    workload_name,
)
from ridgeline.report.series import (
    curve_sections,
    op_section,
    plain_section,
    roofline_section,
)
from ridgeline.report.svg import inline_svg, write_png
from ridgeline.report.sweeps import sweep_section, sweeps

TEMPLATE = "report.html.j2"
CONTENTS = 12  # chapters from which the list of contents is closed until it is asked for
FOLD = 2  # benchmarks of a sweep with more values than this, or of one contender, are closed until they are asked for


@dataclass(frozen=True, kw_only=True)
class Chapter:
    """Sections under one heading.

    Attributes:
        title: the heading.
        sections: what is below it.
        folded: closed until it is asked for.
    """

    title: str
    sections: Sequence[Section]
    folded: bool = False


def chapters(records: Sequence[Record]) -> list[Chapter]:
    """Everything that the records hold, in the order in which it is read: benchmarks, what they show together, single
    ops and rooflines, curves.

    Raises:
        ConfigError: no records, or none that holds anything to show.
    """
    overview = overview_section([records[index] for index in _in_order(records)])
    found = [] if overview is None else [Chapter(title="At a glance", sections=[overview])]
    swept = sweeps(records)
    folded = {
        index
        for sweep in swept
        for index in itertools.chain.from_iterable(sweep.runs.values())
        if set(rungs_of(records[index])) <= {SUBJECT}  # a ladder is never folded
        and (len(sweep.members) > FOLD or len(timed(records[index])) == 1)
    }
    benchmarks = {
        index: Chapter(
            title=workload_name(records[index]),
            sections=list(bench_sections(records[index], index)),
            folded=index in folded,
        )
        for index in _in_order(records)
    }
    found += [chapter for chapter in benchmarks.values() if not chapter.folded]
    beside = beside_section(records)
    if beside is not None:
        found.append(Chapter(title="The smaller model on every other frame", sections=[beside]))
    found += [
        Chapter(title=sweep.title, sections=[sweep_section(sweep, records, number)])
        for number, sweep in enumerate(swept)
    ]
    found += [chapter for chapter in benchmarks.values() if chapter.folded]
    found += [chapter for index, record in enumerate(records) for chapter in _other(record, index)]
    if not found:
        raise ConfigError("there is nothing to report: name at least one record that a benchmark, study or race wrote")
    return _told_apart(found, records)


def _told_apart(found: Sequence[Chapter], records: Sequence[Record]) -> list[Chapter]:
    """The chapters; where several have one title, each says its record's day, and if need be its number."""
    sources = [next((s.source for s in chapter.sections if s.source is not None), None) for chapter in found]
    numbers = ["" if source is None else f", record {source + 1}" for source in sources]
    dates = ["" if source is None else f", {records[source].date[:10]}" for source in sources]
    titles = [chapter.title for chapter in found]
    for endings in (dates, numbers):
        times = Counter(titles)
        titles = [f"{t}{end}" if times[t] > 1 else t for t, end in zip(titles, endings, strict=True)]
    return [replace(chapter, title=title) for chapter, title in zip(found, titles, strict=True)]


def _in_order(records: Sequence[Record]) -> list[int]:
    """Indices of the benchmarks: ladders first, then by the model, larger steps first."""

    def place(index: int) -> tuple[object, ...]:
        record = records[index]
        info = record.workload
        if info is None:
            return (0, model_place(""))
        return (
            -len(rungs_of(record)),
            model_place(info.name),
            info.precision,
            -info.batch * info.context,
            info.context,
        )

    return sorted((i for i, record in enumerate(records) if record.kind == "bench"), key=place)


def _other(record: Record, index: int) -> list[Chapter]:
    """Chapters of what is no benchmark, and of a benchmark's curves."""
    sections = list(curve_sections(record, index))
    if record.kind == "explain":
        roof = roofline_section(record, index)
        sections += [roof] if roof is not None else [op_section(record, index)]
    elif record.kind == "ops":
        sections.append(op_section(record, index))
    elif record.kind != "bench" and record.contenders:
        sections.append(plain_section(record, index))
    ran = "".join(f", {c.name}" for c in record.contenders) if record.kind == "explain" else ""
    said = played.title(record) or studied.title(record) or workload_name(record)
    title = f"{record.kind.capitalize()}: {said}{ran}"
    return [Chapter(title=title, sections=sections)] if sections else []


def _range(values: list[float] | None, unit: str) -> str:
    return "?" if not values else f"{values[0]:.0f}–{values[1]:.0f} {unit}"


def circumstances(record: Record) -> dict[str, str]:
    """Where, when and under what a record was measured."""
    during = (record.clocks or {}).get("during") or {}
    said = {
        "workload": workload_name(record),
        "card": record.card + (f" × {record.gpus}" if record.gpus > 1 else ""),
        "date": record.date,
        "revision": record.git or "not known",
        "versions": ", ".join(f"{name} {version}" for name, version in record.versions.items()),
    }
    if during:
        said["clock"] = _range(during.get("sm_mhz"), "MHz")
        said["power"] = _range(during.get("power_w"), "W")
        said["temperature"] = _range(during.get("temperature_c"), "°C")
        said["throttled by"] = ", ".join(during.get("throttle") or []) or "nothing"
    return said


def _drawn(section: Section) -> dict[str, Any]:
    """A section with its drawings; Markup, because they are this package's own."""
    markup = require("markupsafe", "report").Markup
    figures = {}
    if section.chart is not None:
        for name, narrow in (("wide", False), ("narrow", True)):
            figures[name] = markup(inline_svg(section.chart, f"{section.key}-{name}", section.title, narrow=narrow))
    return {"section": section, "figures": figures}


def build_page(records: Sequence[Record], *, title: str = "Ridgeline report") -> str:
    """The page as text.

    Raises:
        ConfigError: nothing to show.
        MissingExtraError: jinja2 or Matplotlib is not installed.
    """
    jinja2 = require("jinja2", "report")
    records = [part for record in records for part in record.parts()]
    source = resources.files("ridgeline.report").joinpath("templates", TEMPLATE).read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    found = chapters(records)
    parts = [
        {"chapter": chapter, "id": f"chapter-{number}", "sections": [_drawn(section) for section in chapter.sections]}
        for number, chapter in enumerate(found)
    ]
    markup = require("markupsafe", "report").Markup
    return environment.from_string(source).render(
        title=title,
        version=ridgeline.__version__,
        light=markup(variables(LIGHT)),
        dark=markup(variables(DARK)),
        parts=parts,
        contents_open=sum(not chapter.folded for chapter in found) <= CONTENTS,
        cards=sorted({record.card for record in records}),
        dates=sorted({record.date[:10] for record in records}),
        circumstances=[circumstances(record) for record in records],
    )


def write_images(records: Sequence[Record], folder: Path) -> list[Path]:
    """Every figure as a PNG, named by its section.

    Raises:
        ConfigError: nothing to show.
        MissingExtraError: Matplotlib is not installed.
    """
    return [
        write_png(section.chart, folder / f"{section.key}.png")
        for chapter in chapters([part for record in records for part in record.parts()])
        for section in chapter.sections
        if section.chart is not None
    ]
