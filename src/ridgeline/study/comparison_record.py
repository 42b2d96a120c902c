"""A comparison as a record: losses over steps and seconds, the counted lines in the same figure, and the verdicts."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from ridgeline.records import ContenderResult, Record
from ridgeline.study.circumstances import circumstances
from ridgeline.study.compare import Comparison, Difference, Standing, sooner
from ridgeline.study.runs import Point, Run
from ridgeline.train.config import TrainConfig


def comparison_record(result: Comparison, config: TrainConfig) -> Record:
    """The record; `config` is the first contender's with device, precision and engine decided."""
    return Record(
        kind="study",
        **circumstances(config),
        contenders=[_speed(standing) for standing in result.standings],
        curves=[
            *(curve(standing) for standing in result.standings),
            *_lines(result),
            {"figure": "standings", "name": "standings", "rows": [_told(row) for row in rows(result)]},
            {
                "figure": "setting",
                "name": "setting",
                "seeds": result.plan.seeds,
                "rates": list(result.plan.rates),
                "target": result.plan.target,
                "steps": {name: chosen.total_steps for name, chosen in result.plan.configs.items()},
            },
            {
                "figure": "runs",
                "name": "runs",
                "rows": [_run(s, n, r) for s in result.standings for n, r in enumerate(s.runs)],
            },
        ],
    )


def rows(result: Comparison) -> list[dict[str, Any]]:
    """A row a contender, for JSON; losses in nats, over seeds."""
    found = []
    differences: dict[str, Difference] = {d.name: d for d in result.differences}
    for standing in result.standings:
        row: dict[str, Any] = {
            "contender": standing.name,
            "parameters": standing.parameters,
            "learning_rate": standing.rate,
            "at_edge": standing.at_edge,
            "tried": {f"{rate:g}": loss for rate, loss in standing.tried.items()},
            "best_loss": statistics.fmean(standing.bests),
            "best_spread": _spread(standing.bests),
            "final_loss": statistics.fmean(standing.finals),
            "final_spread": _spread(standing.finals),
            "tokens_per_s": standing.tokens_per_s,
        }
        difference = differences.get(standing.name)
        if difference is not None:
            row["difference"] = _interval(difference)
        if result.plan.target is not None:
            row |= _target(standing, result.standings[0], result.plan.target)
        found.append(row)
    return found


def _told(row: dict[str, Any]) -> dict[str, Any]:
    """A row as a table shows it: an interval in words."""
    intervals = ("difference", "target_difference_s")
    return {**row, **{name: _words(row[name]) for name in intervals if name in row}}


def _words(interval: dict[str, Any]) -> str:
    verdict = {True: "beyond the spread", False: "within the spread", None: "one seed"}[interval["beyond_spread"]]
    low, high = interval["low"], interval["high"]
    between = "" if low is None else f" ({low:+.4f} to {high:+.4f})"
    return f"{interval['mean']:+.4f}{between}, {verdict}"


def _target(standing: Standing, first: Standing, target: float) -> dict[str, Any]:
    """When a contender held the target, and how much sooner than the first."""
    points = [point for point in standing.held(target) if point is not None]
    all_held = len(points) == len(standing.runs)
    held = [standing.seconds(point) for point in points]
    row: dict[str, Any] = {
        "reached": len(held),
        "target_steps": statistics.fmean(point.step for point in points) if all_held else None,
        "target_s": statistics.fmean(held) if all_held else None,
        "target_spread_s": _spread(held) if all_held else None,
    }
    later = None if standing is first else sooner(standing, first, target)
    return row if later is None else {**row, "target_difference_s": _interval(later)}


def _interval(difference: Difference) -> dict[str, Any]:
    return {
        "against": difference.against,
        "mean": difference.mean,
        "low": difference.low,
        "high": difference.high,
        "beyond_spread": difference.beyond,
    }


def curve(standing: Standing) -> dict[str, Any]:
    """Mean held-out loss by step with the lowest and highest seed around it."""
    stacked: list[tuple[Point, ...]] = list(zip(*(run.points for run in standing.runs), strict=False))
    losses = [[point.val_loss for point in points] for points in stacked]
    return {
        "figure": "loss",
        "name": standing.name,
        "x": [points[0].step for points in stacked],
        "y": [statistics.fmean(values) for values in losses],
        "low": [min(values) for values in losses],
        "high": [max(values) for values in losses],
        "tokens": [points[0].tokens for points in stacked],
        "seconds": [standing.seconds(points[0]) for points in stacked],
        "x_label": "step",
        "y_label": "held-out loss (nats)",
    }


def _lines(result: Comparison) -> list[dict[str, Any]]:
    steps = [run.points[-1].step for standing in result.standings for run in standing.runs]
    return [
        {"figure": "loss", "name": f"{order}-gram", "x": [0, max(steps)], "y": [loss, loss], "line": True}
        for order, loss in result.ngrams.items()
    ]


def _run(standing: Standing, seed: int, run: Run) -> dict[str, Any]:
    return {
        "contender": standing.name,
        "seed": seed,
        "lowest": run.best,
        "at_the_end": run.final,
        "steps": [point.step for point in run.points],
        "tokens": [point.tokens for point in run.points],
        "seconds": [standing.seconds(point) for point in run.points],
        "val_loss": [point.val_loss for point in run.points],
    }


def _speed(standing: Standing) -> ContenderResult:
    return ContenderResult(name=standing.name, tokens_per_s=standing.tokens_per_s, step_ms=1e3 * standing.pace.step_s)


def _spread(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None
