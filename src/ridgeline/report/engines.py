"""Tables of the second article's comparison: PyTorch's ways to run a step, peers and `best`, on its two models."""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.bench.peers import PEERS
from ridgeline.bench.ratios import SUBJECT, over_pytorch, ratio
from ridgeline.cost import Phase
from ridgeline.records import ContenderResult, Record, WorkloadInfo
from ridgeline.report.sweeps import sweeps, swept
from ridgeline.report.table import Cell, Table, number, quantity, words

MODELS = ("gpt2-c256", "fast-c256")
BATCH, CONTEXT, PRECISION = 32, 256, "bf16"
PYTORCH = ("eager", "graph", "compile", "reduce-overhead", "max-autotune", "compile+graph")
PHASES: tuple[Phase, ...] = ("forward", "backward", "optimizer")


def _first_step(name: str, records: Sequence[Record]) -> float | None:
    """Seconds of a contender's first step, from the newest group that measured it: a clock's, so of any run."""
    results = (r for record in records for r in record.contenders)
    return next((r.first_step_s for r in results if r.name == name and r.first_step_s is not None), None)


def alike(record: Record, records: Sequence[Record]) -> list[Record]:
    """It, and behind it those records that are of its card, number of cards and workload."""
    place = (record.card, record.gpus, record.workload)
    return [record, *(r for r in records if (r.card, r.gpus, r.workload) == place)]


def engines(records: Sequence[Record], others: Sequence[Record] = ()) -> Table:
    """Every engine and peer on each model: speed, phases, first step, and how much faster `best` is.

    Args:
        records: one of a workload.
        others: further records, newest first: an engine that the one of its workload did not time has the row of the
            newest that did, and its ratio within that; first steps are those of the newest that measured them.
    """
    rows: list[list[Cell]] = []
    for model in MODELS:
        asked = WorkloadInfo(name=model, batch=BATCH, context=CONTEXT, precision=PRECISION)
        record = next((r for r in records if r.workload == asked), None)
        if record is None:
            continue
        runs = alike(record, others)
        for name in (*PYTORCH, *PEERS, SUBJECT):
            for run in runs:
                result = next((r for r in run.contenders if r.name == name and r.step_ms is not None), None)
                if result is not None:  # of the first group, whose phases are measured
                    rows.append(_row(run, result, _first_step(name, runs)))
                    break
    headers = ("model", "engine", "ms a step", "tokens/s", *(f"{phase} ms" for phase in PHASES), "first step, s",
               f"`{SUBJECT}` against it")  # fmt: skip
    return Table(headers=headers, rows=rows).without_empty()


def _row(record: Record, result: ContenderResult, first_step_s: float | None) -> list[Cell]:
    over = None if result.name == SUBJECT else ratio(record, SUBJECT, result.name)
    return [
        words(f"`{'' if record.workload is None else record.workload.name}`"),
        words(f"`{result.name}`"),
        number(result.step_ms, ".4g"),
        quantity(result.tokens_per_s),
        *(number((result.phases_ms or {}).get(phase), ".3g") for phase in PHASES),
        number(first_step_s, ".0f"),
        Cell(text="–" if over is None else str(over)),
    ]


def contexts(records: Sequence[Record]) -> Table:
    """Tokens/s over the context at the same positions a step on one card, and `best` against the best PyTorch."""
    shown = (SUBJECT, *reversed(PYTORCH))
    rows: list[list[Cell]] = []
    for sweep in (sweep for sweep in sweeps(records) if sweep.kind.name == "context"):
        names = swept(sweep, records)
        for value, index in sweep.members.items():
            info, over = records[index].workload, over_pytorch(records[index])
            if info is None or over is None or records[index].gpus > 1:
                continue
            found = {name: r.tokens_per_s for name, r in sweep.results(value, records).items() if name in names}
            place = [words(f"`{info.name}`"), number(info.context, "d"), number(info.batch, "d")]
            rows.append([*place, *(quantity(found.get(name)) for name in shown), Cell(text=str(over))])
    headers = ("model", "context", "batch", *(f"`{name}`" for name in shown), "`best` against the best PyTorch")
    return Table(headers=headers, rows=rows).without_empty()
