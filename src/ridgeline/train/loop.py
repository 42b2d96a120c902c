"""The training loop: steps, validations, checkpoints, and a stop that loses nothing."""

from __future__ import annotations

import dataclasses
import math
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ridgeline import checkpoint
from ridgeline.checkpoint import Checkpoint
from ridgeline.data.api import load_dataset
from ridgeline.data.loader import Batches, Validation
from ridgeline.errors import ConfigError
from ridgeline.optim import learning_rate
from ridgeline.train import state
from ridgeline.train.config import TrainConfig
from ridgeline.train.engines import build_model, make_step
from ridgeline.train.guards import Interrupt, enough_memory
from ridgeline.train.meter import mfu_meter
from ridgeline.train.metrics import LiveLine, MetricsFile, amount, check_trackers, make_trackers
from ridgeline.train.resolve import resolve
from ridgeline.train.settings import to_dict
from ridgeline.train.state import Progress
from ridgeline.train.validate import validate

READ_SECONDS = 0.25  # between looks at the device's numbers: each look waits for it
SMALLER = "lower --batch or raise --accumulation, or take a smaller model"
READ_STEPS = 512  # at most so many steps between looks; a step keeps the numbers of the last 1,024


@dataclass(frozen=True)
class TrainResult:
    """What a run came to.

    Attributes:
        config: as resolved.
        folder: of the run.
        progress: how far it is.
        seconds: training time of this process.
        tokens: positions learned from by this process.
        interrupted: whether SIGINT ended it.
    """

    config: TrainConfig
    folder: Path
    progress: Progress
    seconds: float
    tokens: int
    interrupted: bool

    @property
    def checkpoint(self) -> Path:
        """The checkpoint of the last step."""
        return self.folder / state.LAST

    def summary(self) -> dict[str, Any]:
        """What `ridgeline train --json` prints; losses in nats, of the last step and the last validation."""
        return {
            "preset": self.config.preset,
            "steps": self.progress.step,
            "tokens": self.progress.tokens,
            "seconds": round(self.progress.seconds, 3),
            "tokens_per_s": round(self.tokens / self.seconds, 1) if self.seconds else 0.0,
            "train_loss": self.progress.train_loss,
            "val_loss": self.progress.val_loss,
            "checkpoint": str(self.checkpoint),
        }


def train(config: TrainConfig, *, init_from: str | Path | None = None, console: Console | None = None) -> TrainResult:
    """Train a new run.

    Args:
        config: the run.
        init_from: checkpoint or run whose weights to start from; a run's best is taken.
        console: where the live line goes; None for standard error.

    Raises:
        RidgelineError: something that the config asks for cannot be; no folder is made then.
        DivergedError: the loss is no longer finite; the last good checkpoint is kept.
    """
    data = load_dataset(config.data)
    config = resolve(config, data)
    saved = None if init_from is None else checkpoint.load(checkpoint.find(init_from, prefer=state.BEST))
    if saved is not None:
        checkpoint.check_config(state.settings_of(saved).get("model"), to_dict(config.model), "model")
    with enough_memory(SMALLER):
        run = _Run(config, data, console or Console(stderr=True))
        if saved is not None:
            state.load_weights(saved, run.model)
        folder = state.open_folder(config)
        try:
            return run.go(folder, fresh=True)
        except BaseException:
            if run.progress.step == 0:  # nothing was trained, and what there is could not be gone on with
                state.discard(folder)
            raise


def resume(path: str | Path, config: TrainConfig | None = None, *, console: Console | None = None) -> TrainResult:
    """Go on with a run in its folder, from its last checkpoint or a given one.

    On the CPU the result is that of the run never having stopped, to the bit, with the same number of threads.

    Args:
        path: folder of a run or of one of its checkpoints.
        config: the run's config, changed in length, intervals, trackers, engine or device; None for the run's own.
        console: as for `train`.

    Raises:
        CheckpointError: there is no such run, or the config asks for another one.
        ConfigError: the run is complete.
    """
    saved = checkpoint.load(checkpoint.find(path, prefer=state.LAST))
    config = config or state.config_to_resume(saved)
    data = load_dataset(config.data)
    config = resolve(config, data)
    state.check_resumable(saved, config)
    with enough_memory(SMALLER):
        run = _Run(config, data, console or Console(stderr=True))
        run.restore(saved)
        if run.complete:
            raise ConfigError(f"the run in {saved.path.parent} is complete at step {run.progress.step}; lengthen it")
        return run.go(saved.path.parent, fresh=False)


class _Run:
    """A run in this process."""

    def __init__(self, config: TrainConfig, data: Any, console: Console) -> None:
        self.config, self.data, self.console = config, data, console
        self.device = torch.device(config.device)
        check_trackers(config.track)
        torch.manual_seed(config.seed)
        self.model = build_model(config)
        self.step = make_step(self.model, config)
        self.batches = Batches(data, config.window, batch=config.batch, seed=config.seed)
        self.validation = Validation(data, config.window, batch=config.batch // config.accumulation)
        self.progress = Progress()
        self._read, self._read_at = 0, 0.0
        self._read_tokens, self._read_seconds, self._rate = 0, 0.0, 0.0

    def restore(self, saved: Checkpoint) -> None:
        """Take up the state of a checkpoint."""
        self.progress = state.restore(saved, self.config, self.model, self.step, self.batches)
        before, now = saved.meta["threads"], torch.get_num_threads()
        if self.device.type == "cpu" and before != now:
            self.console.print(f"saved with {before} threads, going on with {now}: last bits may differ; ", end="")
            self.console.print(f"OMP_NUM_THREADS={before} repeats them")
        self._read, self._read_tokens = self.progress.step, self.progress.tokens
        self._read_seconds = self.progress.seconds

    @property
    def share(self) -> float:
        """Share of the run that is done."""
        if self.config.minutes is not None:
            return self.progress.seconds / (60 * self.config.minutes)
        return self.progress.step / self.config.total_steps  # type: ignore[operator]

    @property
    def complete(self) -> bool:
        """Whether the run has reached its length."""
        return self.share >= 1

    def go(self, folder: Path, *, fresh: bool) -> TrainResult:
        """Train to the end or to SIGINT, in a folder that is the run's own."""
        config = self.config = dataclasses.replace(self.config, out=str(folder))
        self.folder = folder
        state.write_config(folder, config)
        done, seconds, tokens = self.progress.step, self.progress.seconds, self.progress.tokens
        self.trackers = make_trackers(config.track, folder, done, to_dict(config))
        self.file = MetricsFile(folder, done)
        self._introduce()
        try:
            with Interrupt() as interrupt, self._live_line() as self.line:
                if fresh:
                    self._save()
                while not self.complete and not interrupt.asked:
                    self._advance()
                interrupted = interrupt.asked and not self.complete
                self._finish(interrupted=interrupted)
        finally:
            with ExitStack() as closing:  # each is closed, also where closing another fails
                closing.callback(self.file.close)
                for tracker in self.trackers:
                    closing.callback(tracker.close)
        spent = self.progress.seconds - seconds
        return TrainResult(config, folder, self.progress, spent, self.progress.tokens - tokens, interrupted)

    def _introduce(self) -> None:
        config, name = self.config, str(self.device)
        if self.device.type == "cuda":
            name = torch.cuda.get_device_name(self.device)
        elif (threads := torch.get_num_threads()) > 1:
            name = f"{name} ({threads} threads)"
        size = amount(sum(parameter.numel() for parameter in self.model.parameters()))
        self.console.print(
            f"{config.preset}: {size} parameters on {name}, {config.precision}, {config.engine}, in {self.folder}",
            highlight=False,
        )

    def _live_line(self) -> LiveLine:
        return LiveLine(self.console, self.config.preset, mfu_meter(self.config))

    def _advance(self) -> None:
        """One step, and what falls due after it."""
        config, progress = self.config, self.progress
        started = time.perf_counter()
        if config.minutes is not None:
            self.step.set_rate(learning_rate(config.optimizer, progress.step, self.share))
        self.step(self.batches.next())
        progress.step += 1
        progress.tokens += config.step_tokens
        evaluates, saves = (progress.step % n == 0 for n in (config.eval_interval, config.checkpoint_interval))
        looks = started - self._read_at >= READ_SECONDS or progress.step - self._read >= READ_STEPS
        if looks or evaluates or saves:
            self._look(started)
        else:
            progress.seconds += time.perf_counter() - started
        if self.complete:
            return
        if evaluates:
            self._validate()
        if evaluates or saves:
            self._save()

    def _look(self, started: float) -> None:
        """Read the steps' numbers, which waits for the device; record and show them; stop if they are bad."""
        progress = self.progress
        entries = self.step.metrics(self._read)
        now = time.perf_counter()
        progress.seconds += now - started
        for entry in entries:
            done = entry.step + 1
            values = {"loss": entry.loss, "grad_norm": entry.norm, "lr": entry.lr}
            self._record(done, values, tokens=done * self.config.step_tokens)
            progress.train_loss = entry.loss
        self.file.flush()
        self._read, self._read_at = progress.step, now
        self.step.check()
        self._show()

    def _show(self) -> None:
        progress = self.progress
        spent = progress.seconds - self._read_seconds
        if spent > 0:
            self._rate = (progress.tokens - self._read_tokens) / spent
        self._read_tokens, self._read_seconds = progress.tokens, progress.seconds
        remaining = progress.seconds * (1 / self.share - 1) if self.share else None
        if progress.train_loss is not None:
            self.line.update(progress.step, self.share, progress.train_loss, self._rate, remaining)

    def _validate(self) -> None:
        progress = self.progress
        loss = validate(self.step, self.validation, self.device, self.config.eval_windows)
        progress.val_loss = self.line.val_loss = loss
        self._record(progress.step, {"val_loss": loss}, tokens=progress.tokens)
        self.file.flush()
        self._show()

    def _record(self, step: int, values: dict[str, float], *, tokens: int) -> None:
        known = {name: value if math.isfinite(value) else None for name, value in values.items()}  # JSON has no NaN
        self.file.write({"step": step, **known, "tokens": tokens, "seconds": round(self.progress.seconds, 3)})
        for tracker in self.trackers:
            tracker.log(step, values)

    def _save(self) -> None:
        """Write `last`, and copy it to `best` if its validation is the lowest so far."""
        progress = self.progress
        better = progress.val_loss is not None and (
            progress.best_loss is None or progress.val_loss < progress.best_loss
        )
        if better:
            progress.best_loss = progress.val_loss
        for name in (state.LAST, state.BEST) if better else (state.LAST,):
            state.save(self.folder / name, self.config, progress, self.model, self.step, self.batches, self.data)

    def _finish(self, *, interrupted: bool) -> None:
        if self._read < self.progress.step:
            self._look(time.perf_counter())
        if not interrupted:
            self._validate()
        self._save()
