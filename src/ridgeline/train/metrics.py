"""What a run says while it goes: metrics.jsonl, one live line, and trackers.

metrics.jsonl   {"step", "loss", "grad_norm", "lr", "tokens", "seconds"} a step, steps counted from 1;
                {"step", "val_loss", "tokens", "seconds"} a validation. `seconds` is training time; a number that is
                    not finite is null.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ridgeline import files
from ridgeline.errors import RidgelineError, require
from ridgeline.train.guards import writing
from ridgeline.train.meter import Meter

FILE = "metrics.jsonl"
LINE_SECONDS = 10.0  # between lines where the output is no terminal
SMOOTHING = 0.9  # share of the past in the shown loss, per refresh


class Tracker(Protocol):
    """Where numbers by step go beside the file."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record numbers of a step."""

    def close(self) -> None:
        """Finish."""


class TensorBoard:
    """Scalars in FOLDER/tensorboard."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See Tracker."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """See Tracker."""
        self._writer.close()


class WandB:
    """A run of Weights & Biases, kept in FOLDER; project and mode come from wandb's own settings."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        wandb = require("wandb", "track")
        self._run = wandb.init(dir=str(folder), name=folder.name, config=dict(settings), resume="allow")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See Tracker."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """See Tracker."""
        self._run.finish()


def check_trackers(names: tuple[str, ...]) -> None:
    """Raise for trackers that are not installed.

    Raises:
        MissingExtraError: names the extra that installs it.
    """
    for name in names:
        require(name, "track")


def make_trackers(names: tuple[str, ...], folder: Path, step: int, settings: Mapping[str, Any]) -> list[Tracker]:
    """The trackers called `names` of a run that has done `step` steps."""
    made: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: TensorBoard(folder, step),
        "wandb": lambda: WandB(folder, settings),
    }
    return [made[name]() for name in names]


class MetricsFile:
    """metrics.jsonl of a run; opening it drops the records of steps after `step`, which a resumed run does again.

    Every method raises RidgelineError where the disk takes no more.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self._folder = folder
        file = folder / FILE
        kept = [record for record in read_metrics(folder) if record["step"] <= step] if file.exists() else []
        with writing(folder):
            files.replace(file, "".join(json.dumps(record) + "\n" for record in kept))
            self._stream = file.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record; `flush` hands it to the operating system."""
        with writing(self._folder):
            self._stream.write(json.dumps(record) + "\n")

    def flush(self) -> None:
        """After this the records survive the process."""
        with writing(self._folder):
            self._stream.flush()

    def close(self) -> None:
        """Flush and close."""
        with writing(self._folder):
            self._stream.close()


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    """The records of a run, without a last line that was cut off.

    Raises:
        RidgelineError: a line is no record.
    """
    file = Path(folder) / FILE
    lines = file.read_bytes().splitlines(keepends=True)
    records = []
    for number, line in enumerate(lines, 1):
        if line.endswith(b"\n"):
            try:
                record = files.parsed(line)
            except ValueError:
                record = None
            if not _is_record(record):
                raise RidgelineError(f"line {number} of {file} is no record of a run; repair the file or move it away")
            records.append(record)
    return records


def _is_record(value: object) -> bool:
    if not isinstance(value, dict) or type(value.get("step")) is not int:
        return False
    return value.get("val_loss") is None or {"tokens", "seconds"} <= value.keys()


class LiveLine:
    """One line that says how the run goes; where the output is no terminal, a line every ten seconds.

    In a narrow terminal it leaves out what can be missed, so that loss and time stay.

    Args:
        console: where it goes.
        name: of the run.
        meter: from tokens/s to the card's utilisation; None where it is not known.
    """

    def __init__(self, console: Console, name: str, meter: Meter | None = None) -> None:
        self._console, self._name, self._meter = console, name, meter
        self._live = Live(console=console, auto_refresh=False, transient=False) if console.is_terminal else None
        self._loss: float | None = None
        self._printed = time.monotonic()
        self.val_loss: float | None = None

    def __enter__(self) -> LiveLine:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, step: int, progress: float, loss: float, rate: float, remaining: float | None) -> None:
        """Show the state of the run.

        Args:
            step: steps done.
            progress: share of the run done.
            loss: newest loss.
            rate: tokens/s of late.
            remaining: estimated seconds to the end; None where unknown.
        """
        before = loss if self._loss is None else self._loss
        self._loss = SMOOTHING * before + (1 - SMOOTHING) * loss
        smoothed, val, mfu, traffic = " (smoothed)", "", "", ""
        if self.val_loss is not None:
            val = f"  val {self.val_loss:.4f}"
        if self._meter is not None and rate > 0:
            used = self._meter(rate)
            share = "" if used.bandwidth is None else f" ({used.bandwidth:.0%} of the memory's)"
            mfu, traffic = f"  MFU {used.mfu:.1%}", f"  {amount(used.bytes_per_s)}B/s{share}"
        left = "" if remaining is None else f"  {clock(remaining)} left"
        begin = f"{self._name}  step {step}  {progress:4.0%}  loss {self._loss:.4f}"
        line = f"{begin}{smoothed}{val}  {amount(rate)} tokens/s{mfu}{traffic}{left}"
        self._show(line, spare=(traffic, smoothed, mfu, val))

    def _show(self, line: str, spare: Sequence[str]) -> None:
        if self._live is not None:
            for part in spare:
                if len(line) > self._console.width:
                    line = line.replace(part, "", 1)
            self._live.update(Text(line, overflow="ellipsis", no_wrap=True), refresh=True)
        elif time.monotonic() - self._printed >= LINE_SECONDS:
            self._printed = time.monotonic()
            self._console.print(Text(line), soft_wrap=True)


def amount(number: float) -> str:
    """A number with three digits and a unit: 1234567 → 1.23 M."""
    for unit, size in ((" T", 1e12), (" G", 1e9), (" M", 1e6), (" k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    if not math.isfinite(seconds):
        return "?"
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
