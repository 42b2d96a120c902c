"""`ridgeline study inversion`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.table import Table
from tyro.conf import Positional, arg

from ridgeline.bench.plan import CPU_PLAN, Plan
from ridgeline.bench.workloads import workload
from ridgeline.cli.output import Flag, parse
from ridgeline.errors import ConfigError
from ridgeline.study.folder import check_place, keep_record
from ridgeline.study.inversion import Inversion, inversion
from ridgeline.train.engines import find_device, find_precision


@dataclass(frozen=True, kw_only=True)
class Options:
    """Is one model faster run eagerly than another that is compiled, on this machine?

    Both are timed eagerly, compiled and, on a card, compiled into a CUDA graph, in turns. With --json the last line is
    {"record", "answers", "contenders"}: of each answer, `ratio` is how many times as fast `eager` is run eagerly as
    `compiled` is by `way`, with its 95 % interval over rounds, `low` to `high`; `inverted` is null where that does not
    exclude equal times. The first answer is the one asked for; the others are the rest of both directions.

    Attributes:
        models: two presets: the one run eagerly, then the one compiled.
        batch: windows in a step; without it 32, on the CPU 4.
        context: positions in a window; without it 256, on the CPU 64.
        precision: bf16, fp16, tf32 or fp32; without it the device's best.
        device: cpu, cuda, cuda:N or auto.
        out: file of the record.
        json: print one JSON object as the last line.
    """

    models: Annotated[tuple[str, ...], Positional, arg(metavar="EAGER COMPILED")] = ("fast-c256", "gpt2-c256")
    batch: int | None = None
    context: int | None = None
    precision: str = "auto"
    device: str = "auto"
    out: Path = Path("runs/inversion.json")
    json: Flag = False


def run(arguments: Sequence[str]) -> int:
    """Time and print."""
    options = parse(Options, arguments, "study inversion")
    if len(options.models) != 2:
        raise ConfigError("name two presets: the one run eagerly, then the one compiled")
    device = find_device(options.device)
    cpu = device.type == "cpu"
    batch = (4 if cpu else 32) if options.batch is None else options.batch
    context = (64 if cpu else 256) if options.context is None else options.context
    precision = find_precision(options.precision, device)
    a, b = (workload(name, batch=batch, context=context, precision=precision) for name in options.models)
    check_place(options.out)
    # a step that waits for the host is never steady enough to end a warm-up by itself
    plan = CPU_PLAN if cpu else Plan(rounds=6, warm_s=2)
    said = Console(stderr=True)
    result = inversion(a, b, device, plan, lambda line: said.print(line, highlight=False))
    file = keep_record(result.record, options.out)
    if options.json:
        contenders = [dataclasses.asdict(contender) for contender in result.record.contenders]
        answers = [dataclasses.asdict(answer) | {"inverted": answer.inverted} for answer in result.answers]
        made = {"record": str(file), "answers": answers, "contenders": contenders}
        print(json.dumps(made))
    else:
        _print(result, file)
    return 0


def _print(result: Inversion, file: Path) -> None:
    table = Table(title="eager and compiled", title_justify="left")
    for heading in ("model and way", "ms a step", "± %", "tokens/s"):
        table.add_column(heading, justify="left" if heading == "model and way" else "right")
    for contender in sorted(result.record.contenders, key=lambda c: c.step_ms or 0.0):
        spread, speed = 100 * (contender.spread or 0.0), contender.tokens_per_s or 0.0
        table.add_row(contender.name, f"{contender.step_ms:.3f}", f"{spread:.1f}", f"{speed:,.0f}")
    console = Console()
    console.print(table)
    for answer in result.answers:
        words = {
            True: f"is {answer.ratio:.2f} times as fast as",
            False: f"reaches {answer.ratio:.2f} of the speed of",
            None: "cannot be told apart from",
        }[answer.inverted]
        between = f"({answer.low:.2f} to {answer.high:.2f})"
        console.print(f"{answer.eager} eagerly {words} {answer.compiled} by {answer.way} {between}", highlight=False)
    console.print(f"the intervals are over rounds, at 95 %; the record is in {file}")
