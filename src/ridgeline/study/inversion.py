"""The eager inversion: does a model that is cheap by design, run eagerly, beat another that is compiled?

Both models are benchmarked under `eager` and `compile` in one go, in the order A, B, B, A, so that a machine that
warms up or slows down favours neither. A difference counts where it is more than the spread of the times, the
difference between a model's two runs included.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ridgeline.bench.plan import Plan
from ridgeline.bench.run import run_bench
from ridgeline.bench.timing import Timing, distinct
from ridgeline.bench.workloads import Workload
from ridgeline.errors import ConfigError, RidgelineError
from ridgeline.records import ContenderResult, Record

WAYS = ("eager", "compile")


@dataclass(frozen=True, kw_only=True)
class Inversion:
    """What the two models reach.

    Attributes:
        record: contenders named MODEL:WAY, both runs joined; times and spreads in milliseconds and shares.
        eager: the model that was to win eagerly (A). compiled: the model that was compiled (B).
        ratio: how many times as fast A is eagerly as B compiled.
        inverted: whether A eagerly is the faster; None where the spread swallows the difference.
    """

    record: Record
    eager: str
    compiled: str
    ratio: float
    inverted: bool | None


def inversion(a: Workload, b: Workload, device: torch.device, plan: Plan, told: Callable[[str], None]) -> Inversion:
    """Benchmark both models.

    Raises:
        ConfigError: they are one, or batch or context differ, so that tokens a second could not be compared.
        RidgelineError: one of the four could not be timed; says why.
    """
    if a.name == b.name:
        raise ConfigError(f"the eager inversion compares two models, got {a.name} twice; name another")
    if (a.batch, a.context, a.precision) != (b.batch, b.context, b.precision):
        raise ConfigError("the eager inversion compares two models at one batch, context and precision; set them alike")
    found: dict[str, list[ContenderResult]] = {}
    records = []
    for case in (a, b, b, a):
        told(f"{case.name}: {', '.join(WAYS)}")
        record = run_bench(case, list(WAYS), device, plan)
        records.append(record)
        for way in WAYS:
            result = record.result(way)
            if result is None or result.step_ms is None:
                raise RidgelineError(
                    f"{case.name} under {way} was not timed: {result.error if result else 'no result'}"
                )
            found.setdefault(f"{case.name}:{way}", []).append(result)
    joined = {name: _joined(name, runs) for name, runs in found.items()}
    ours, theirs = joined[f"{a.name}:eager"], joined[f"{b.name}:compile"]
    clear = distinct(_timing(ours), _timing(theirs))
    ratio = _timing(theirs).median_ms / _timing(ours).median_ms
    return Inversion(
        record=dataclasses.replace(records[0], kind="study", contenders=list(joined.values())),
        eager=a.name,
        compiled=b.name,
        ratio=ratio,
        inverted=ratio > 1 if clear else None,
    )


def _joined(name: str, runs: Sequence[ContenderResult]) -> ContenderResult:
    """Two runs of one contender as one: the mean of the medians, and the wider of spread and disagreement."""
    times = [run.step_ms or 0.0 for run in runs]
    middle = statistics.fmean(times)
    spread = max([(max(times) - min(times)) / middle, *(run.spread or 0.0 for run in runs)])
    scale = (runs[0].step_ms or middle) / middle
    return ContenderResult(
        name=name,
        step_ms=middle,
        spread=spread,
        tokens_per_s=None if runs[0].tokens_per_s is None else runs[0].tokens_per_s * scale,
        windows_per_s=None if runs[0].windows_per_s is None else runs[0].windows_per_s * scale,
        first_step_s=runs[0].first_step_s,
        peak_memory_bytes=runs[0].peak_memory_bytes,
    )


def _timing(result: ContenderResult) -> Timing:
    return Timing(result.step_ms or 0.0, result.spread or 0.0, 0)
