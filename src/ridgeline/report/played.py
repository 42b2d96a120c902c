"""What races and trainings on replays say, as tables for the project's documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ridgeline.records import Record, RecordError
from ridgeline.report.sections import Section
from ridgeline.report.series import curve_sections
from ridgeline.report.table import Cell, Table, number, quantity, words

MISSING = "*Not measured yet.*"
CUT = "cut off: the quickest rounds only"  # in place of the margin of rounds that are no sample of all
BY_HEART = "by heart"  # in the name of the workload


def races(records: Sequence[Record]) -> list[Record]:
    """Of the races on cards the newest of each length and setting of the games: the longest first, then the largest.

    Args:
        records: newest first.
    """
    found: dict[tuple[Any, ...], Record] = {}
    for record in records:
        if record.kind == "race" and record.gpus:
            games = setting_of(record)["games"]
            found.setdefault((record.card, _length(record), games["level"], games["cache"]), record)
    return sorted(found.values(), key=lambda record: (-_length(record), -len(record.contenders)))


def _length(record: Record) -> float:
    """Seconds that each contender of a race trained."""
    return float(setting_of(record)["grid"][-1])


def title(record: Record) -> str | None:
    """What sets a race apart from others: its contenders differ in model and batch, so those say nothing of it."""
    if record.kind != "race" or not curves_of(record, "setting"):
        return None
    setting = setting_of(record)
    games = setting["games"]
    return f"{setting['data']}, {_length(record):g} s of training, level {games['level']}, cache {games['cache']}"


def race(records: Sequence[Record]) -> str:
    """Every contender at every time of a race: how far it was and how it played."""
    return "\n\n".join(f"{_where(record)}\n\n{_standings(record)}" for record in races(records)) or MISSING


def _where(record: Record) -> str:
    setting = setting_of(record)
    games, cards = setting["games"], "one card each" if record.gpus > 1 else "one card"
    return (
        f"{games['count']} games at level {games['level']}, `--cache {games['cache']}`, seeds from "
        f"{games['first_seed']:,}; {record.workload.name if record.workload else setting['data']} data, "
        f"{_length(record):g} s of training, {cards} ({record.card}), {record.date[:10]}:"
    )


def _standings(record: Record) -> str:
    rows: list[list[Cell]] = []
    wanted = setting_of(record)["games"]["count"]
    for curve in curves_of(record, "race"):
        for point in curve["points"]:
            low, high = point["intervals"]["margin"]
            margin = f"{point['margin']:.1f} ({low:.1f} to {high:.1f})"
            played = point["games"]
            rows.append(
                [
                    words(f"`{curve['name']}`"),
                    number(point["seconds"], ".1f"),
                    number(point["steps"], ",d"),
                    quantity(point["tokens"] / point["seconds"]),
                    number(point["val_loss"], ".3f"),
                    *(_count(point[figure], played, wanted) for figure in ("wins", "ko")),
                    Cell(text=margin if played == wanted else CUT),
                ]
            )
    headers = ("contender", "seconds", "steps", "tokens/s", "held-out loss", "won", "by knockout", "margin, 95 %")
    return Table(headers=headers, rows=rows).markdown()


def _count(found: int, played: int, wanted: int) -> Cell:
    """So many games, and of how many where that is not said above."""
    return number(found, "d") if played == wanted else Cell(text=f"{found} of {played}")


def crossings(records: Sequence[Record]) -> str:
    """From when on who is strong enough, in the first of the races."""
    found = races(records)
    rows = [
        [
            words(f"`{row['contender']}`"),
            words(row["target"]),
            Cell(text=_since(row)),
        ]
        for curve in (curves_of(found[0], "crossings") if found else ())
        for row in curve["rows"]
    ]
    return Table(headers=("contender", "reaches", "from"), rows=rows).markdown() if rows else MISSING


def _since(row: dict[str, Any]) -> str:
    """From when on, and which checkpoints cannot tell."""
    told = "not in this time" if row["seconds"] is None else f"{row['seconds']:.1f} s"
    unknown = " and ".join(f"{seconds:.1f}" for seconds in row.get("open", ()))
    return f"{told} (at {unknown} s too few games to tell)" if unknown else told


def race_section(records: Sequence[Record]) -> Section | None:
    """The picture of the first of the races: margins over time."""
    found = races(records)
    sections = curve_sections(found[0], 0) if found else ()
    return next((section for section in sections if section.key.startswith("margin")), None)


def replays(records: Sequence[Record]) -> str:
    """Training on Melee replays: its rate beside the same step's on one batch, and what is known by heart."""
    trained = [record for record in records if record.kind == "study" and curves_of(record, "melee")]
    rates = next((record for record in trained if len(record.contenders) > 1), None)
    heart = next((record for record in trained if record.workload and BY_HEART in record.workload.name), None)
    parts = [table for table in (rates and _rates(rates), heart and _by_heart(heart)) if table]
    return "\n\n".join(parts) or MISSING


def _rates(record: Record) -> str:
    rows = [[words(c.name), quantity(c.tokens_per_s), number(c.step_ms, ".4g")] for c in record.contenders]
    table = Table(headers=("on these games", "tokens/s", "ms a step"), rows=rows)
    return f"`{setting_of(record)['command']}` on one {record.card}, {record.date[:10]}:\n\n{table.markdown()}"


def _by_heart(record: Record) -> str:
    rows = []
    for validation in curves_of(record, "melee")[0]["rows"]:
        row = [number(validation["step"], ",d")]
        for head in ("c", "main", "buttons"):
            loss, accuracy = validation[f"val_loss.{head}"], validation[f"val_accuracy.{head}"]
            row.append(Cell(text=f"{loss:.4f}, {accuracy:.2%}"))
        rows.append(row)
    table = Table(headers=("step", "c-stick: nats, right", "main stick", "buttons"), rows=rows)
    where = f"{setting_of(record)['seconds']:.0f} s on one {record.card}, {record.date[:10]}"
    return f"One game by heart, as both players, {where}:\n\n{table.markdown()}"


def curves_of(record: Record, figure: str) -> list[dict[str, Any]]:
    """The curves of one figure of a record."""
    given = record.curves if isinstance(record.curves, list) else []
    return [curve for curve in given if curve.get("figure") == figure]


def setting_of(record: Record) -> dict[str, Any]:
    """What a study was asked for.

    Raises:
        RecordError: the record does not say it.
    """
    found = curves_of(record, "setting")
    if not found:
        raise RecordError(f"the {record.kind} record of {record.date} does not say what was asked for; measure again")
    return found[0]
