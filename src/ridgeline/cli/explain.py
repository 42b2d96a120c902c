"""`ridgeline explain`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from rich.console import Console
from tyro.conf import Positional, arg

from ridgeline.bench.explain import explain_preset
from ridgeline.bench.explain_view import render
from ridgeline.bench.usual import check_folder, record_file, store
from ridgeline.cli.output import Flag, parse
from ridgeline.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Options:
    """Say where the time of a training step must go on a card: FLOPs, bytes, floors, memory, and what would help.

    Attributes:
        preset: its name, or that of a file of settings; either with settings changed: gpt2-c256+norm=rmsnorm+layers=8.
        device: a card, such as h200, a100 or rtx4090; without it the one that is here. An unknown name lists near ones.
        batch: windows in a step; without it the preset's.
        context: positions in a window; without it the preset's.
        precision: bf16, fp16, tf32 or fp32; without it the best of bf16, fp16 and fp32 that the card has.
        plan: what is stored for the backward pass: plain, as PyTorch does; fused, lean or leanest, as the engines best,
            best+lean and best+leanest do; without it what this package does on the card.
        accumulation: parts into which a batch is cut; without it the preset's.
        measure: run the step on the CUDA card that is here, profile it, and set measured times beside the floors.
        engine: how the measured step is run: eager, compile, graph, compile+graph, best, …; without it compile.
        out: folder of records, for one of the measured step that `ridgeline report` draws; without it none is kept.
        json: print one JSON object as the last line.
    """

    preset: Annotated[str, Positional, arg(metavar="PRESET")]
    device: str | None = None
    batch: int | None = None
    context: int | None = None
    precision: str | None = None
    plan: str | None = None
    accumulation: int | None = None
    measure: Flag = False
    engine: str | None = None
    out: str | None = None
    json: Flag = False


def run(arguments: Sequence[str]) -> int:
    """Explain and print."""
    options = parse(Options, arguments, "explain")
    if options.measure:
        return _measure(options)
    if options.engine is not None:
        raise ConfigError("--engine says how a measured step is run; add --measure")
    if options.out is not None:
        raise ConfigError("--out keeps the record of a measured step; add --measure")
    result = explain_preset(
        options.preset,
        device=options.device,
        batch=options.batch,
        context=options.context,
        precision=options.precision,
        plan=options.plan,
        accumulation=options.accumulation,
    )
    if options.json:
        print(json.dumps(result.to_json()))
    else:
        Console().print(render(result))
    return 0


def _measure(options: Options) -> int:
    from ridgeline.bench.measure import measure_preset
    from ridgeline.bench.measure_view import render_measured

    odd = [name for name in ("device", "plan", "accumulation") if getattr(options, name) is not None]
    if odd:
        raise ConfigError(f"--measure runs the whole batch on the card that is here; leave out --{odd[0]}")
    if options.out is not None:
        check_folder(options.out)
    result = measure_preset(
        options.preset,
        engine=options.engine or "compile",
        batch=options.batch,
        context=options.context,
        precision=options.precision,
    )
    if options.json:
        print(json.dumps(result.to_json()))
    else:
        Console().print(render(result.explained))
        Console().print(render_measured(result))
    if options.out is not None:
        record = result.to_record()
        print(f"→ {store(record, record_file(record, options.out))}", file=sys.stderr)
    return 0
