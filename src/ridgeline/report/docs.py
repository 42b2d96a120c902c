"""`make docs`: the tables in the project's own documents, from the benchmark records.

A document holds blocks between `<!-- from records: NAME -->` and `<!-- end -->`; what stands between them is written
here and nowhere else, and a test fails when a document and the records differ.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ridgeline.bench.explain_view import amount
from ridgeline.bench.goals import find_records, judge, read_goals
from ridgeline.bench.layers import PHASES
from ridgeline.bench.ratios import SUBJECT, Ratio, baselines, deciding, gain, over_pytorch
from ridgeline.bench.workloads import floor_s, workload
from ridgeline.errors import ConfigError, RidgelineError
from ridgeline.hardware import by_driver_name
from ridgeline.records import ContenderResult, Record
from ridgeline.report import articles, engines, played, studied
from ridgeline.report.page import circumstances
from ridgeline.report.scaling import scaling
from ridgeline.report.sections import base_of, bench_sections, overview_section, rungs_of, timed
from ridgeline.report.svg import write_png
from ridgeline.report.table import Cell, Table, number, quantity, words

DOCUMENTS = ("README.md", "docs/ladder.md", "docs/playing.md", "docs/melee.md", "docs/studies.md")
KINDS = ("bench", "race", "search", "study")  # of records that documents show
IMAGES = "docs/images"
RECORDS, GOALS = "benchmarks/results", "benchmarks/goals.toml"
LADDER = "hal-20m"
X2 = ("r16", "r16+recompute")  # the rung that the article's smaller model stands on, without and with its own change
MISSING = played.MISSING
_BLOCK = re.compile(r"(<!-- from records: ([a-z-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def newest(records: Sequence[Record]) -> list[Record]:
    """The record that decides each workload on one card of each kind, newest first."""
    return [record for record in deciding(records) if record.workload is not None and record.gpus <= 1]


def _result(record: Record, name: str, group: int | None = None) -> ContenderResult | None:
    return next((r for r in record.contenders if r.name == name and group in (None, r.group) and r.step_ms), None)


def _pair(record: Record, found: Ratio) -> tuple[ContenderResult, ContenderResult]:
    """The two results of a ratio of `best`."""
    ours, theirs = _result(record, SUBJECT, found.group), _result(record, found.over, found.group)
    assert ours is not None
    assert theirs is not None
    return ours, theirs


def performance(records: Sequence[Record]) -> str:
    """`best` against the best PyTorch, a row a goal; also where it is slower, and where nothing was measured."""
    rows: list[list[Cell]] = []
    used: list[Record] = []
    for goal in read_goals(GOALS):
        name = words(f"`{goal.workload}` {goal.batch} × {goal.context}, {goal.precision}")
        record = judge(goal, records).record
        found = None if record is None else over_pytorch(record)
        if record is None or found is None:
            rows.append([name, *[Cell(text="–")] * 5])
            continue
        used.append(record)
        ours, theirs = _pair(record, found)
        rows.append(
            [
                name,
                quantity(ours.tokens_per_s),
                Cell(text=f"{amount(theirs.tokens_per_s or 0.0)} (`{found.over}`)"),
                Cell(text=str(found)),
                number(ours.mfu, ".0%"),
                number(_floor_share(record, ours), ".0%"),
            ]
        )
    if not used:
        return MISSING
    headers = ("batch × context", "`best`, tokens/s", "best PyTorch, tokens/s", "ratio", "MFU", "of the floor")
    return f"{_where(used)}\n\n{Table(headers=headers, rows=rows).markdown()}"


def _floor_share(record: Record, result: ContenderResult) -> float | None:
    """The floor as a share of the measured step: by the accounting of today, so that rows of records of several
    revisions are of one formula; None where the card's peaks are not known."""
    spec, info = by_driver_name(record.card), record.workload
    if spec is None or info is None or not result.step_ms:
        return None
    case = workload(info.name, batch=info.batch, context=info.context, precision=info.precision)
    return 1e3 * floor_s(case, spec) / result.step_ms


def _where(records: Sequence[Record]) -> str:
    cards = ", ".join(sorted({record.card for record in records}))
    torches = ", ".join(sorted({record.versions.get("torch", "?") for record in records}))
    dates = sorted({record.date[:10] for record in records})
    span = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"One {cards}, PyTorch {torches}, {span}."


def _climbs(records: Sequence[Record]) -> dict[str, list[Record]]:
    """By model, the records on one card that climb two rungs or more, newest first."""
    found: dict[str, list[Record]] = {}
    for record in records:
        if record.gpus <= 1 and record.workload is not None and len(set(rungs_of(record)) - {SUBJECT}) > 1:
            found.setdefault(record.workload.name, []).append(record)
    return found


def _ladder(records: Sequence[Record]) -> Record | None:
    """The climb of the first article's model that is shown: the one of the most rungs among those whose every gain is
    larger than the spread of its times, of several the newest; where there is none such, the newest of all."""
    climbs = _climbs(records).get(LADDER, [])
    clear = [record for record in climbs if all(map(_told, _gains(record)))]
    return max(clear, key=lambda record: len(rungs_of(record)), default=next(iter(climbs), None))


def _gains(record: Record) -> list[Ratio | None]:
    return [gain(record, upper, lower) for lower, upper in itertools.pairwise(rungs_of(record))]


def _told(found: Ratio | None) -> bool:
    return found is not None and found.distinct


def ladder(records: Sequence[Record]) -> str:
    """The rungs: speed and gain here, gain in the article, kernel time a layer here and there."""
    record = _ladder(records)
    if record is None:
        return MISSING
    rows: list[list[Cell]] = []
    results, failed = {r.name: r for r in timed(record)}, {r.name: r.error for r in record.contenders if r.error}
    before: str | None = None
    for name in (*articles.LADDER, SUBJECT):
        result, article = results.get(name), articles.LADDER.get(name)
        if result is None:
            if name in failed:
                rows.append([words(f"`{name}`"), words(f"failed: {failed[name]}")])
            continue
        step = gain(record, name, before) if before else None
        published = None if before is None or article is None else articles.gain(before, name)
        rows.append(
            [
                words(f"`{name}`"),
                number(result.step_ms, ".4g"),
                quantity(result.tokens_per_s),
                Cell(text="–" if step is None else str(step)),
                Cell(text="–" if published is None else f"{published:.2f}×"),
                Cell(text=_layer(result, "forward", article)),
                Cell(text=_layer(result, "backward", article)),
                number(result.mfu, ".0%"),
            ]
        )
        before = name
    for other in baselines(record)[:1]:
        rows.append(
            [
                words(f"PyTorch's best, `{other.name}`"),
                number(other.step_ms, ".4g"),
                quantity(other.tokens_per_s),
                *[Cell(text="–")] * 2,
                *(Cell(text=_layer(other, phase, None)) for phase in PHASES),
                number(other.mfu, ".0%"),
            ]
        )
    headers = ("rung", "ms a step", "tokens/s", "gain here", "in the article", "forward ms a layer, here (article)",
               "backward", "MFU")  # fmt: skip
    said = circumstances(record)
    where = f"`{LADDER}`, batch {said['workload'].split('batch ')[1]}, on one {record.card}, {record.date[:10]}"
    return f"{where}.\n\n{Table(headers=headers, rows=rows).markdown()}"


def climbed(records: Sequence[Record]) -> str:
    """The rungs in the newest climb, with the spread of their times, where the ladder's table is of an earlier one."""
    record = next(iter(_climbs(records).get(LADDER, [])), None)
    if record is None or record == _ladder(records):
        return "*The table above is of the newest run.*"
    return _rungs([record])


def elsewhere(records: Sequence[Record]) -> str:
    """The rungs of other models, each in its newest climb."""
    newest = [runs[0] for name, runs in sorted(_climbs(records).items()) if name != LADDER]
    return _rungs(newest) if newest else MISSING


def _rungs(records: Sequence[Record]) -> str:
    """The rungs of each record from the lowest up: times with their spread, gain, kernels."""
    rows: list[list[Cell]] = []
    for record in records:
        before: str | None = None
        for result in (r for r in timed(record) if r.name in rungs_of(record)):
            step = gain(record, result.name, before) if before else None
            rows.append(
                [
                    words(f"`{'' if record.workload is None else record.workload.name}`"),
                    words(f"`{result.name}`"),
                    number(result.step_ms, ".4g"),
                    number(result.spread, ".0%"),
                    Cell(text="–" if step is None else str(step)),
                    quantity(result.tokens_per_s),
                    *(Cell(text=_layer(result, phase, None)) for phase in PHASES),
                    number(result.mfu, ".0%"),
                ]
            )
            before = result.name
    headers = ("model", "rung", "ms a step", "spread", "gain", "tokens/s", "forward ms a layer", "backward", "MFU")
    return f"{_where(records)}\n\n{Table(headers=headers, rows=rows).markdown()}"


def _layer(result: ContenderResult, phase: str, article: articles.ArticleRung | None) -> str:
    groups = result.groups_ms_per_layer or {}
    mine = sum(value for name, value in groups.items() if name.startswith(phase))
    ours = f"{mine:.2f}" if groups else "–"
    return ours if article is None else f"{ours} ({getattr(article, f'{phase}_ms'):.2f})"


def layers(records: Sequence[Record]) -> str:
    """Kernel milliseconds a layer by group, a column a rung."""
    record = _ladder(records)
    found = [r for r in timed(record) if r.groups_ms_per_layer and r.name in rungs_of(record)] if record else []
    if not found:
        return MISSING
    groups = list(dict.fromkeys(name for result in found for name in result.groups_ms_per_layer or {}))
    rows = [
        [words(group), *(number((r.groups_ms_per_layer or {}).get(group), ".3f") for r in found)] for group in groups
    ]
    return Table(headers=("kernel ms a layer", *(f"`{r.name}`" for r in found)), rows=rows).markdown()


def singles(records: Sequence[Record]) -> str:
    """Single changes: each made alone to the rung below, or alone taken back."""
    rows: list[list[Cell]] = []
    for record in records:
        info = record.workload
        for result in timed(record):
            base = base_of(result.name)
            found = gain(record, result.name, base) if result.name != base and base in articles.LADDER else None
            if found is not None and info is not None:
                rows.append([words(f"`{info.name}`"), words(f"`{result.name}`"), number(result.step_ms, ".4g"),
                             Cell(text=str(found)), words(f"`{base}`")])  # fmt: skip
    headers = ("workload", "rung with one change", "ms a step", "speed", "compared with")
    return Table(headers=headers, rows=rows).markdown() if rows else MISSING


def windows(records: Sequence[Record]) -> str:
    """The smaller model beside the larger one, in windows/s: `best`, PyTorch's best, and the article's last rung."""
    rows: list[list[Cell]] = []
    for name in ("hal-20m", "hal-5m"):
        record = next((r for r in newest(records) if r.workload and r.workload.name == name), None)
        found = None if record is None else over_pytorch(record)
        if record is None or found is None or record.workload is None:
            return MISSING
        runs = engines.alike(record, records)
        rungs = [next(filter(None, (_result(run, rung) for run in runs)), None) for rung in X2]
        for result in filter(None, (*_pair(record, found), *rungs)):
            rows.append(
                [
                    words(f"`{name}`, {record.workload.context} of 256 frames"),
                    words(f"`{result.name}`"),
                    quantity(result.windows_per_s),
                    number(result.step_ms, ".4g"),
                ]
            )
    return Table(headers=("model", "contender", "windows/s", "ms a step"), rows=rows).markdown()


def _shown(table: Table) -> str:
    return table.markdown() if table.rows else MISSING


BLOCKS: dict[str, Callable[[Sequence[Record]], str]] = {
    "performance": performance,
    "ladder": ladder,
    "layers": layers,
    "climbed": climbed,
    "elsewhere": elsewhere,
    "singles": singles,
    "windows": windows,
    "engines": lambda records: _shown(engines.engines(newest(records), records)),
    "contexts": lambda records: _shown(engines.contexts(records)),
    "scaling": scaling,
    "long-windows": studied.long_windows,
}
OTHERS: dict[str, Callable[[Sequence[Record]], str]] = {  # from records that are no benchmarks
    "race": played.race,
    "crossings": played.crossings,
    "replays": played.replays,
    "comparison": studied.comparison,
    "recipe": studied.recipe,
    "article": studied.article,
    "divergence": studied.divergence,
    "starts": studied.starts,
    "confirmed": studied.confirmed,
    "inversion": studied.inversion,
    "search": studied.searched,
}


def written(text: str, records: Sequence[Record], name: str = "the document") -> str:
    """A document with its blocks written anew.

    Args:
        text: the document.
        records: newest first.
        name: of the document, for errors.

    Raises:
        ConfigError: it has no block, or one that is not known.
    """
    blocks = [match[2] for match in _BLOCK.finditer(text)]
    known = BLOCKS | OTHERS
    odd = [block for block in blocks if block not in known]
    if odd or not blocks:
        raise ConfigError(
            f"{name} has the block {odd[0]!r}, known are {', '.join(known)}"
            if odd
            else f"{name} has no block `<!-- from records: NAME -->` … `<!-- end -->`; nothing can be written"
        )
    benches = [record for record in records if record.kind == "bench"]
    return _BLOCK.sub(
        lambda match: f"{match[1]}{known[match[2]](benches if match[2] in BLOCKS else records)}\n{match[4]}", text
    )


def images(records: Sequence[Record], folder: Path) -> list[Path]:
    """The pictures that the documents show: all workloads at a glance, the ladder, the race, and those of studies.

    Raises:
        MissingExtraError: Matplotlib is not installed.
    """
    benches = [record for record in records if record.kind == "bench"]
    climbed = _ladder(benches)
    sections = {"overview": overview_section(sorted(newest(benches), key=_place)), "race": played.race_section(records)}
    sections |= studied.pictures(records)
    if climbed is not None:
        sections["ladder"] = next(bench_sections(climbed, 0))
    return [
        write_png(section.chart, folder / f"{name}.png")
        for name, section in sections.items()
        if section is not None and section.chart is not None
    ]


def _place(record: Record) -> tuple[int, str, int]:
    """The place of a record's goal in the file of goals; what is no goal comes last, by model and context."""
    goals, info = read_goals(GOALS), record.workload
    place = next((place for place, goal in enumerate(goals) if goal.fits(record)), len(goals))
    return place, "" if info is None else info.name, 0 if info is None else info.context


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the documents named, or the project's own with their images; 2 where something cannot be read."""
    names = list(sys.argv[1:] if arguments is None else arguments)
    try:
        records = find_records(RECORDS, KINDS)
        for name in names or DOCUMENTS:
            file = Path(name)
            before = file.read_text(encoding="utf-8")
            after = written(before, records, name)
            if after != before:
                file.write_text(after, encoding="utf-8")
            print(f"{name}: {'written' if after != before else 'as the records have it'}")
        if not names:
            print(*(f"{file}: drawn" for file in images(records, Path(IMAGES))), sep="\n")
    except (RidgelineError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
