"""A search as a record: trials with predicted and measured speed, and who led by when."""

from __future__ import annotations

import dataclasses
from typing import Any

from ridgeline.records import ContenderResult, Record
from ridgeline.study.circumstances import circumstances
from ridgeline.study.search import Search
from ridgeline.study.trials import Trial, choice, front

CURVES = 5  # of the best trials, which with the front's have a colour each


def search_record(plan: Search, trials: list[Trial], best: Trial) -> Record:
    """The record of a search whose best trial is `best`."""
    base, goal, kind = plan.base, plan.goal, plan.goal.kind
    figure, label = ("loss", "held-out loss (nats)") if kind == "loss" else ("strength", "knockout rate")
    leads = front(trials, goal)
    sign = 1 if kind == "loss" else -1
    judged = sorted((t for t in trials if t.path), key=lambda t: (t is not best, sign * t.path[-1][1]))
    axes = {"figure": figure, "x_label": "seconds of training", "y_label": label}
    curves: list[dict[str, Any]] = [
        {**axes, "name": f"trial {t.number}", "x": [s for s, _ in t.path], "y": [q for _, q in t.path]}
        for t in judged[:CURVES]
    ]
    curves.append({**axes, "name": "best so far", "x": [s for s, _, _ in leads], "y": [q for _, q, _ in leads]})
    chosen = {trial.number: choice(trial.params) for trial in trials}
    leaders = [{"from_second": s, kind: q, "trial": n, "choice": chosen[n]} for s, q, n in leads]
    curves.append({"figure": "front", "name": "front", "rows": leaders})
    rows = [{"number": trial.number, "choice": chosen[trial.number], **dataclasses.asdict(trial)} for trial in trials]
    for row in rows:
        del row["folder"]  # a place on the machine that trained, where a record's reader is not
    curves.append({"figure": "trials", "name": "trials", "rows": rows})
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
