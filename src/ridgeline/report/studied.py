"""What comparisons of models and recipes, and runs that watch the gradient's norm, say: tables for the documents."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ridgeline.bench.workloads import workload
from ridgeline.models.memory import memory
from ridgeline.models.plan import FUSED
from ridgeline.records import Record
from ridgeline.report.names import told_apart
from ridgeline.report.played import MISSING, curves_of, setting_of
from ridgeline.report.sections import Section, workload_name
from ridgeline.report.series import curve_sections
from ridgeline.report.table import NONE, Cell, Table, number, quantity, words
from ridgeline.study.trials import choices_apart, rank, states_of

SHORT = 300  # steps of a comparison that looks where the article looked, after 200
COMPARED = ("standings", "inversion", "training", "starts")  # curves of studies that set contenders side by side
LONGEST = 30  # letters of a name in a title
LONG = 2048  # positions from which a window counts as long
GB = 1e9
WHOLE = ("training_s", "validations_s", "checkpoints_s", "call_s", "in_all_s")  # of a command that trained to its end


def title(record: Record) -> str | None:
    """What sets a study apart from others on the same data: who is compared, and to which loss."""
    if not record.contenders or not any(curves_of(record, figure) for figure in COMPARED):
        return None
    names = list(told_apart([result.name for result in record.contenders])[0].values())
    short = len(names) == 2 and len(names[1]) <= LONGEST
    others = f" and {names[1]}" if short else f" and {len(names) - 1} more" if len(names) > 1 else ""
    settings = curves_of(record, "setting")
    target = settings[0].get("target") if settings else None
    sought = "" if target is None else f", to a loss of {target:g}"
    return f"{names[0]}{others}{sought} on {workload_name(record)}"


def comparison(records: Sequence[Record]) -> str:
    """Models under one recipe: rate, losses, speed, and the difference to the first."""
    record = next(iter(_studies(records, "models")), None)
    if record is None:
        return MISSING
    rows: list[list[Cell]] = [
        [
            words(f"`{row['contender']}`"),
            quantity(row["parameters"]),
            Cell(text=f"{row['learning_rate']:g}{' (edge)' if row['at_edge'] else ''}"),
            Cell(text=_with_spread(row["best_loss"], row["best_spread"])),
            Cell(text=_with_spread(row["final_loss"], row["final_spread"])),
            quantity(row["tokens_per_s"]),
            words(row.get("difference", NONE)),
        ]
        for row in _rows(record, "standings")
    ]
    headers = ("contender", "parameters", "rate", "lowest", "at the end", "tokens/s", "lowest, against the first")
    return f"{_where(record)}\n\n{Table(headers=headers, rows=rows).markdown()}"


def recipe(records: Sequence[Record]) -> str:
    """Recipes by the seconds in which they hold a loss, a table for each data set."""
    return _recipes(records, "recipes")


def article(records: Sequence[Record]) -> str:
    """The same for a run as short as the article's."""
    return _recipes(records, "article")


def confirmed(records: Sequence[Record]) -> str:
    """The same for one recipe against another, such as what a search found against where it began."""
    return _recipes(records, "pair")


def _recipes(records: Sequence[Record], kind: str) -> str:
    return "\n\n".join(_recipe(record) for record in _studies(records, kind)) or MISSING


def _recipe(record: Record) -> str:
    target, seeds = setting_of(record)["target"], setting_of(record)["seeds"]
    speed = {result.name: result.step_ms for result in record.contenders}
    names, shared = told_apart([row["contender"] for row in _rows(record, "standings")])
    rows: list[list[Cell]] = [
        [
            words(f"`{names[row['contender']]}`"),
            number(speed.get(row["contender"]), ".3f"),
            Cell(text=_with_spread(row["best_loss"], row["best_spread"])),
            Cell(text=f"{row['reached']} of {seeds}"),
            number(row["target_steps"], ",.0f"),
            Cell(text=_with_spread(row["target_s"], row["target_spread_s"], 2)),
            words(row.get("target_difference_s", NONE)),
        ]
        for row in _rows(record, "standings")
    ]
    headers = (
        "recipe",
        "ms a step",
        "lowest loss",
        f"held {target:g}",
        "from step",
        "from second",
        "later than the first by",
    )
    common = f" all with {', '.join(f'`{change}`' for change in shared)}:" if shared else ""
    return f"{_where(record)}{common}\n\n{Table(headers=headers, rows=rows).markdown()}"


def starts(records: Sequence[Record]) -> str:
    """Whole commands of a recipe: what is trained until its target, and what goes beside it."""
    record = next((r for r in records if r.gpus and curves_of(r, "starts")), None)
    if record is None:
        return MISSING
    rows = []
    for row in _rows(record, "starts"):
        rows.append(
            [
                number(row["seed"], "d"),
                words(row["caches"]),
                *(number(row[key], ".2f") for key in ("imports_s", "data_s", "first_step_s", "held_s")),
                number(row["held_at_step"], ",d"),
                *(number(row.get(key) if row["held_s"] is not None else None, ".2f") for key in WHOLE),
            ]
        )
    target = curves_of(record, "starts")[0]["target"]
    headers = ("seed", "caches", "imports, s", "data", "compilation, capture, first step", f"training to {target:g}, s",
               "steps", "training in all", "validations", "checkpoints", "this run", "whole command")  # fmt: skip
    return f"{_where(record)}\n\n{Table(headers=headers, rows=rows).markdown()}"


def searched(records: Sequence[Record]) -> str:
    """The trials of a search that were judged, the best first, with predicted beside measured speed."""
    record = next((r for r in records if r.gpus and r.kind == "search"), None)
    if record is None:
        return MISSING
    setting = curves_of(record, "setting")[0]
    kind, target = setting["goal"]
    trials = _rows(record, "trials")
    judged = [trial for trial in trials if trial["quality"] is not None]
    # records of before 2026-11-30, 09:00, have the point alone
    judged.sort(key=lambda trial: rank(kind, trial.get("crossing", trial["seconds"]), trial["quality"]))
    alike, own = choices_apart([trial["params"] for trial in judged])
    rows = [
        [
            number(trial["number"], "d"),
            words(chosen),
            words(f"{trial['quality']:.4f}{'' if trial['state'] == 'complete' else ' …'}"),
            number(trial["seconds"], ".2f"),
            *(quantity(trial[key]) for key in ("tokens_per_s", "predicted_tokens_per_s")),
        ]
        for trial, chosen in zip(judged, own, strict=True)
    ]
    headers = ("trial", "choice", kind, "held from second", "tokens/s", "at the floor")
    sought = kind if target is None else f"{kind}={target:g}"
    told = f"{sought}, budget {setting['budget_s']:g} s, {setting['trial_s']:g} s of training a trial:"
    counts = states_of([trial["state"] for trial in trials])
    all_with = f" All with {alike}." if alike else ""
    return f"{_where(record)} {told} {counts}.{all_with}\n\n{Table(headers=headers, rows=rows).markdown()}"


def inversion(records: Sequence[Record]) -> str:
    """Two models eagerly and compiled, and whether either eagerly beats the other compiled."""
    record = next((r for r in records if r.gpus and curves_of(r, "inversion")), None)
    if record is None:
        return MISSING
    ways = sorted(record.contenders, key=lambda result: result.step_ms or 0.0)
    times = Table(
        headers=("model and way", "ms", "spread", "tokens/s"),
        rows=[
            [words(f"`{way.name}`"), number(way.step_ms, ".3f"), number(way.spread, ".1%"), quantity(way.tokens_per_s)]
            for way in ways
        ],
    )
    answers = Table(
        headers=("run eagerly", "against", "times as fast", "95 % over rounds", "inverted"),
        rows=[
            [
                words(f"`{row['eager']}`"),
                words(f"`{row['compiled']}:{row['way']}`"),
                number(row["ratio"], ".2f"),
                words(f"{row['low']:.2f} to {row['high']:.2f}"),
                words({True: "yes", False: "no", None: "not told apart"}[row["inverted"]]),
            ]
            for row in _rows(record, "inversion")
        ],
    )
    return f"{_where(record)}\n\n{times.markdown()}\n\n{answers.markdown()}"


def divergence(records: Sequence[Record]) -> str:
    """Engines by what became of loss and gradient norm."""
    record = _diverging(records)
    if record is None:
        return MISSING
    rows: list[list[Cell]] = [
        [
            words(f"`{row['way']}`"),
            number(row["steps"], ",d"),
            number(row["loss_of_the_last_100_steps"], ".4f"),
            number(row["largest_norm"], ".3g"),
            number(row["largest_norm_after_step_100"], ".3g"),
            number(row["first_step_that_is_not_finite"], "d"),
            number(row["kernels_with_mix_order_reduction"], "d"),
        ]
        for row in _rows(record, "runs")
    ]
    headers = ("engine", "steps", "loss, last 100", "largest norm", "after step 100", "first step not finite",
               "mix-order kernels")  # fmt: skip
    return f"{_where(record)}\n\n{Table(headers=headers, rows=rows).markdown()}"


def long_windows(records: Sequence[Record]) -> str:
    """Speed and memory of long windows under `best` and the best PyTorch, beside the memory that the accounting says.

    Args:
        records: benchmarks, newest first.
    """
    newest: dict[tuple[Any, ...], Record] = {}
    for record in records:
        info = record.workload
        if info is not None and info.context >= LONG and record.result("best") and record.result("compile+graph"):
            newest.setdefault((info.context, info.batch, info.name, info.precision), record)
    rows: list[list[Cell]] = []
    for _, record in sorted(newest.items(), key=lambda item: item[0][:3]):
        info, best, other = record.workload, record.result("best"), record.result("compile+graph")
        assert info is not None
        assert best is not None
        assert other is not None
        case = workload(info.name, batch=info.batch, context=info.context, precision=info.precision)
        said = memory(case.model, batch=info.batch, context=info.context, precision="bf16", plan=FUSED)
        rows.append(
            [
                words(f"`{info.name}`"),
                number(info.context, "d"),
                number(info.batch, "d"),
                *(quantity(result.tokens_per_s) for result in (best, other)),
                *(number(result.peak_memory_bytes, ".2f", scale=1 / GB) for result in (best, other)),
                number(said.peak / GB, ".2f"),
            ]
        )
    headers = ("model", "context", "batch", "`best`, tokens/s", "`compile+graph`", "`best`, GB", "`compile+graph`, GB",
               "GB by the accounting")  # fmt: skip
    return Table(headers=headers, rows=rows).markdown() if rows else MISSING


def pictures(records: Sequence[Record]) -> dict[str, Section]:
    """Sections whose charts the documents show, by name: the comparison's losses, the norms' curves."""
    wanted = {
        "comparison": (next(iter(_studies(records, "models")), None), "loss-0"),
        "recipe": (next(iter(_studies(records, "recipes")), None), "loss-0"),
        "confirmed": (next(iter(_studies(records, "pair")), None), "loss-0-seconds"),
        "divergence": (_diverging(records), "training-0"),
    }
    found = {}
    for name, (record, key) in wanted.items():
        sections = () if record is None else curve_sections(record, 0)
        section = next((section for section in sections if section.key == key), None)
        if section is not None:
            found[name] = section
    return found


def _studies(records: Sequence[Record], kind: str) -> list[Record]:
    """Of each data set the newest comparison of a kind on a card."""
    found: dict[str, Record] = {}
    for record in records:
        if record.gpus and record.workload and _rows(record, "standings") and _kind(record) == kind:
            found.setdefault(record.workload.name, record)
    return [found[name] for name in sorted(found, reverse=True)]  # tinyshakespeare first


def _kind(record: Record) -> str:
    """What a comparison asks: "models" without a target; with one "article" where runs are as short, "pair" of two."""
    standings = _rows(record, "standings")
    if not all("target_s" in row for row in standings):
        return "models"
    if max(setting_of(record).get("steps", {}).values(), default=math.inf) <= SHORT:
        return "article"
    return "pair" if len(standings) == 2 else "recipes"


def _diverging(records: Sequence[Record]) -> Record | None:
    """The newest comparison of engines by their losses and gradient norms on a card."""
    return next((record for record in records if record.gpus and curves_of(record, "training")), None)


def _where(record: Record) -> str:
    info = record.workload
    what = "" if info is None else f"{info.name}, batch {info.batch}, context {info.context}, {info.precision}, "
    return f"{what}one {record.card}, {record.date[:10]}:"


def _with_spread(mean: float | None, spread: float | None, digits: int = 4) -> str:
    if mean is None:
        return NONE
    return f"{mean:.{digits}f}" if spread is None else f"{mean:.{digits}f} ± {spread:.{digits}f}"


def _rows(record: Record, figure: str) -> list[dict[str, Any]]:
    return [row for curve in curves_of(record, figure) for row in curve.get("rows", ())]
