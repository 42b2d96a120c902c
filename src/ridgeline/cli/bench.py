"""`ridgeline bench`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
from tyro.conf import Positional, arg

from ridgeline.bench.plan import CPU_PLAN, Plan
from ridgeline.bench.run import check_run, run_bench
from ridgeline.bench.usual import check_folder, record_file, store, usual_contenders
from ridgeline.bench.view import table
from ridgeline.bench.workloads import Workload, vary, workload
from ridgeline.cli.output import Flag, parse
from ridgeline.errors import ConfigError, nearest
from ridgeline.hardware import PRECISIONS
from ridgeline.records import Record, read_record, to_json
from ridgeline.train.config import AUTO
from ridgeline.train.engines import find_device, find_precision

FAILED = 1  # exit code where no contender could be timed


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure ways to train a workload against each other: each in a process of its own, taking turns in one run.

    Attributes:
        workload: a preset or a file of settings, or either with settings changed: gpt2-c256+kv_heads=1; on the CPU a
            smaller batch and context of it.
        contenders: names with commas between them: eager, compile, reduce-overhead, max-autotune, graph,
            compile+graph, best, the rungs m0 m1 m2 m3 r16, the peers transformers and liger; best+lean and
            best+leanest keep less for the backward pass; NAME:copies and NAME:autocast say how half precision is
            stored, NAME:explicit that attention is written out, NAME:host that batches come from the host. Without it
            every engine on a card, eager and compile on the CPU.
        batch: windows a step, of one card.
        context: positions a window.
        precision: bf16, fp16, tf32 or fp32; without it bf16 where the card has it.
        vary: one record for each value, doubling: context=128:2048 (positions a step are kept) or batch=32:512.
        gpus: numbers of cards that train together, each with the batch: 1,2,4; one record holds all, each
            number in groups of its own.
        device: cpu, cuda or cuda:N.
        rounds: turns of each contender, an even number.
        steps: timed steps of a turn, at least.
        profile: measure overlap and kernel times too, from a profile of each contender after its turns.
        together: start all contenders at once, which is quicker but leaves their first steps unmeasured.
        out: folder of records; each card has its own in it.
        append: go on with this record: further contenders as a further group of it.
        json: print one JSON object as the last line.
    """

    workload: Annotated[str, Positional, arg(metavar="WORKLOAD")]
    contenders: str | None = None
    batch: int | None = None
    context: int | None = None
    precision: str = AUTO
    vary: str | None = None
    gpus: str = "1"
    device: str = AUTO
    rounds: int | None = None
    steps: int | None = None
    profile: bool = True
    together: Flag = False
    out: str = "benchmarks/results"
    append: str | None = None
    json: Flag = False


def _listed(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def _numbers(text: str) -> list[int]:
    words = _listed(text)
    if not all(word.isdecimal() and int(word) > 0 for word in words) or len(set(words)) < len(words):
        raise ConfigError(
            f"--gpus takes different numbers of cards with commas between them, such as 1,2; got {text!r}"
        )
    return [int(word) for word in words]


def _cases(options: Options, device: torch.device) -> list[Workload]:
    """What is measured, in order; on the CPU at a size that it can bear, as far as none is asked for."""
    if options.precision not in (AUTO, *PRECISIONS):
        raise ConfigError(nearest(options.precision, PRECISIONS, "precision"))
    precision = find_precision(options.precision, device)
    case = workload(options.workload, batch=options.batch, context=options.context, precision=precision)
    if device.type == "cpu":
        small = case.reduced()
        case = replace(
            case, batch=options.batch or small.batch, context=small.context if options.context is None else case.context
        )
    return vary(case, options.vary) if options.vary else [case]


def _plan(options: Options, device: torch.device) -> Plan:
    usual = Plan() if device.type == "cuda" else CPU_PLAN
    return Plan(
        rounds=usual.rounds if options.rounds is None else options.rounds,
        steps=usual.steps if options.steps is None else options.steps,
        turn_s=usual.turn_s,
        warm_s=usual.warm_s,
        phases=usual.phases,
        profile=usual.profile if options.profile else 0,
        together=options.together,
    )


def run(arguments: Sequence[str]) -> int:
    """Measure, write records, print."""
    options = parse(Options, arguments, "bench")
    device, counts = find_device(options.device), _numbers(options.gpus)
    if device.type == "cpu" and counts != [1]:
        raise ConfigError("--gpus counts CUDA cards, and the device is the CPU; leave it out")
    cases, plan = _cases(options, device), _plan(options, device)
    names = _listed(options.contenders) if options.contenders else usual_contenders(cases[0], device)
    check_run(names, device, counts)
    onto = None if options.append is None else read_record(options.append)
    if onto is not None and len(cases) * len(counts) > 1:
        raise ConfigError("--append goes on with one record; leave out --vary and name one number of --gpus")
    check_folder(options.out if options.append is None else Path(options.append).parent)
    files, records = [], []
    for case in cases:
        file, record = _measure(case, names, device, plan, counts, options, onto)
        files.append(file)
        records.append(record)
        if not options.json:
            print(table(record), f"→ {file}\n", sep="\n", flush=True)
    if options.json:
        print(
            json.dumps({"files": [str(file) for file in files], "records": [to_json(r) for r in records]}), flush=True
        )
    return 0 if all(any(c.step_ms for c in record.contenders) for record in records) else FAILED


def _measure(
    case: Workload,
    names: Sequence[str],
    device: torch.device,
    plan: Plan,
    gpus: Sequence[int],
    options: Options,
    onto: Record | None,
) -> tuple[Path, Record]:
    place: list[Path] = [] if options.append is None else [Path(options.append)]

    def keep(record: Record) -> None:
        if not place:
            place.append(record_file(record, options.out))
        store(record, place[0])

    record = run_bench(case, names, device, plan, gpus=gpus, onto=onto, keep=keep, say=_say)
    return place[0], record


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
