"""A search as a record: trials with predicted and measured speed, and who led by when."""

from __future__ import annotations

import dataclasses
from typing import Any

from ridgeline.records import ContenderResult, Record
from ridgeline.study.circumstances import circumstances
from ridgeline.study.search import Search
from ridgeline.study.trials import Trial, front

CURVES = 6  # of the best trials


def search_record(plan: Search, trials: list[Trial], best: Trial) -> Record:
    """The record of a search whose best trial is `best`."""
    base, goal = plan.base, plan.goal
    figure, label = ("loss", "held-out loss (nats)") if goal.kind == "loss" else ("strength", "knockout rate")
    leads = front(trials, goal)
    sign = 1 if goal.kind == "loss" else -1
    judged = sorted((t for t in trials if t.path), key=lambda t: (t is not best, sign * t.path[-1][1]))
    axes = {"figure": figure, "x_label": "seconds of training", "y_label": label}
    curves: list[dict[str, Any]] = [
        {**axes, "name": f"trial {t.number}", "x": [s for s, _ in t.path], "y": [q for _, q in t.path]}
        for t in judged[:CURVES]
    ]
    curves.append({**axes, "name": "best so far", "x": [s for s, _, _ in leads], "y": [q for _, q, _ in leads]})
    curves.append({"figure": "trials", "name": "trials", "rows": [dataclasses.asdict(trial) for trial in trials]})
    curves.append({"figure": "setting", "name": "setting", **plan.plan(), "budget_s": plan.budget_s})
    return Record(
        kind="search",
        **circumstances(base),
        contenders=[
            ContenderResult(name=f"trial {trial.number}", tokens_per_s=trial.tokens_per_s)
            for trial in trials
            if trial.tokens_per_s
        ],
        curves=curves,
    )
