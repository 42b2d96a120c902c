"""`ridgeline doctor`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from rich.console import Console
from tyro.conf import Positional, arg

from ridgeline.bench.doctor import doctor
from ridgeline.bench.doctor_view import render_doctor
from ridgeline.cli.output import Flag, parse


@dataclass(frozen=True, kw_only=True)
class Options:
    """Say what would run here and why: versions, card, implementations, attention's backend, known bad combinations.

    Attributes:
        preset: whose ops and shapes are asked about; or a file of settings, or either with settings changed.
        precision: bf16, fp16, tf32 or fp32; without it what training takes by itself.
        json: print one JSON object as the last line.
    """

    preset: Annotated[str, Positional, arg(metavar="[PRESET]")] = "hal-20m"
    precision: str | None = None
    json: Flag = False


def run(arguments: Sequence[str]) -> int:
    """Look and print."""
    options = parse(Options, arguments, "doctor")
    result = doctor(options.preset, precision=options.precision)
    if options.json:
        print(json.dumps(result.to_json()))
    else:
        Console().print(render_doctor(result))
    return 0
