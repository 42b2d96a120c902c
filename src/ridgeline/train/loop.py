"""The training loop: steps, validations, checkpoints, and a stop that loses nothing."""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from ridgeline import checkpoint
from ridgeline.checkpoint import Checkpoint
from ridgeline.data.api import load_dataset
from ridgeline.data.loader import Validation
from ridgeline.engine import Replicas, TrainStep
from ridgeline.engine.distributed import together
from ridgeline.errors import ConfigError, DivergedError, enough_memory
from ridgeline.games import stick_points
from ridgeline.models import PolicyConfig
from ridgeline.optim import learning_rate
from ridgeline.train import state, words
from ridgeline.train.by_head import HeadScores
from ridgeline.train.config import STOPS, TrainConfig
from ridgeline.train.engines import build_model, find_device, make_step
from ridgeline.train.guards import Interrupt, last_words, without_gc
from ridgeline.train.lanes import settle_lanes
from ridgeline.train.meter import meter
from ridgeline.train.metrics import LiveLine, MetricsFile, Tracker, check_trackers, make_trackers
from ridgeline.train.resolve import resolve
from ridgeline.train.settings import to_dict
from ridgeline.train.stages import Course, tokens_until
from ridgeline.train.state import Content, Progress
from ridgeline.train.validate import Evaluation

KEPT = "the last good checkpoint is kept: resume from it or lower optimizer.lr"
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
        tokens: positions learned from in that time, by all processes together.
        interrupted: whether SIGINT ended it.
        rank: number of this process; the first one writes and speaks for all.
    """

    config: TrainConfig
    folder: Path
    progress: Progress
    seconds: float
    tokens: int
    interrupted: bool
    rank: int = 0

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
    """Train a new run, in one process or in all that torchrun has started.

    Args:
        config: the run.
        init_from: checkpoint or run whose weights to start from; a run's best is taken.
        console: where the live line goes; None for standard error.

    Raises:
        RidgelineError: something that the config asks for cannot be; no folder is made then.
        DivergedError: the loss is no longer finite; the last good checkpoint is kept.
        WorkerError: another process of the run is gone; the last checkpoint is kept.
    """
    with together(str(find_device(config.device))) as replicas, enough_memory(SMALLER):
        return _train(config, init_from, replicas, _console(console, replicas))


def _train(config: TrainConfig, init_from: str | Path | None, replicas: Replicas, console: Console) -> TrainResult:
    data = replicas.first(lambda: load_dataset(config.data))
    config = resolve(config, data)
    saved = None if init_from is None else checkpoint.load(checkpoint.find(init_from, prefer=state.BEST))
    if saved is not None:
        checkpoint.check_config(state.settings_of(saved).get("model"), to_dict(config.model), "model")
    run = _Run(config, data, replicas, console)
    if saved is not None:
        state.load_weights(saved, run.model)
    with state.open_folder(config) if replicas.rank == 0 else nullcontext(Path()) as own:
        folder = Path(replicas.told(str(own)))
        try:
            return run.go(folder, fresh=True)
        except BaseException:
            if run.progress.step == 0 and replicas.rank == 0:  # nothing was trained, nothing could be gone on with
                state.discard(folder)
            raise


def _console(console: Console | None, replicas: Replicas) -> Console:
    """Where this process speaks: only the first one does."""
    return Console(quiet=True) if replicas.rank else console or Console(stderr=True)


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
        WorkerError: another process of the run is gone; the last checkpoint is kept.
    """
    saved = checkpoint.load(checkpoint.find(path, prefer=state.LAST))
    config = config or state.config_to_resume(saved)
    with together(str(find_device(config.device))) as replicas, enough_memory(SMALLER):
        return _resume(saved, config, replicas, _console(console, replicas))


def _resume(saved: Checkpoint, config: TrainConfig, replicas: Replicas, console: Console) -> TrainResult:
    data = replicas.first(lambda: load_dataset(config.data))
    config = resolve(config, data)
    state.check_resumable(saved, config)
    run = _Run(config, data, replicas, console)
    run.restore(saved)
    if run.complete:
        longer = next(name for name in STOPS if getattr(config, name) is not None)
        raise ConfigError(
            f"the run in {saved.path.parent} is complete at step {run.progress.step}; give it a larger --{longer}"
        )
    with state.go_on_in(saved) if replicas.rank == 0 else nullcontext(saved.path.parent) as folder:
        return run.go(folder, fresh=False)


class _Run:
    """A run in this process, which may be one of several that train one model on shares of every batch.

    All of them take the same steps, validate shares of the held-out windows and stop together. The first one alone
    writes and speaks, and its clock counts.
    """

    def __init__(self, config: TrainConfig, data: Any, replicas: Replicas, console: Console) -> None:
        self.data, self.replicas, self.console = data, replicas, console
        self.device = torch.device(config.device)
        check_trackers(config.track)
        world, rank = replicas.world, replicas.rank
        self.course = Course(config, data, rank=rank, world=world)
        part = config.batch // config.accumulation
        windows = config.eval_windows
        validation = Validation(data, config.window, batch=part, windows=windows, rank=rank, world=world)
        self.config, self._lanes = settle_lanes(config, self.course.last, world)
        torch.manual_seed(config.seed + rank)  # masks that do not come from the step's own counter
        with enough_memory(words.large_model(config)):
            self.model = build_model(self.config)
            self.step = make_step(self.model, self.config, world=world)
        self.evaluation = Evaluation(self.step, validation, self.device, replicas)
        self.progress = Progress()
        self._best: Content | None = None  # of the lowest validation, until it is written
        self._setup = 0.0
        self._batch: dict[str, Tensor] | None = None
        self.file: MetricsFile | None = None
        self.trackers: list[Tracker] = []
        self._read, self._read_at = 0, 0.0
        self._read_tokens, self._read_seconds, self._rate = 0, 0.0, 0.0

    def restore(self, saved: Checkpoint) -> None:
        """Take up the state of a checkpoint."""
        self.course.enter(state.progress_of(saved).step)
        self.progress = state.restore(saved, self.config, self.model, self.step, self.course.batches)
        if self.replicas.rank:  # the checkpoint holds the first process' generators
            torch.manual_seed((self.config.seed + self.replicas.rank + 1_000_003 * self.progress.step) % 2**63)
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
        done, seconds, tokens = self.progress.step, self.progress.seconds, self.progress.tokens
        if self.replicas.rank == 0:
            state.write_config(folder, config)
            self.trackers = make_trackers(config.track, folder, done, to_dict(config))
            self.file = MetricsFile(folder, done)
        self.console.print(words.introduction(config, self.model, self.replicas.world, self._lanes), highlight=False)
        bereaved = nullcontext() if self.replicas.world == 1 else last_words(words.bereaved(config, self.replicas.rank))
        try:
            with Interrupt() as interrupt, bereaved, without_gc(), self._live_line() as self.line:
                self._loop(interrupt, fresh=fresh)
        finally:
            with ExitStack() as closing:  # each is closed, also where closing another fails
                for open_one in (self.file, *self.trackers):
                    if open_one is not None:
                        closing.callback(open_one.close)
        spent = self.progress.seconds - seconds
        interrupted = interrupt.asked and not self.complete
        tokens = self.progress.tokens - tokens
        return TrainResult(config, folder, self.progress, spent, tokens, interrupted, self.replicas.rank)

    def _loop(self, interrupt: Interrupt, *, fresh: bool) -> None:
        if fresh:
            self._save()
        started = time.perf_counter()
        self.course.settle(self.config, self.step, self.progress.step)
        self._setup = time.perf_counter() - started
        over = self._over(interrupt)
        while not over:
            self._advance()
            over = self._over(interrupt)
            if not self.complete:
                self._fall_due()
        self._finish(interrupted=not self.complete)

    def _over(self, interrupt: Interrupt) -> bool:
        """Whether the run is at its end or asked to stop, on which all processes agree."""
        if self.replicas.world > 1:
            interrupt.asked, self.progress.seconds = self.replicas.exchange(interrupt.asked, self.progress.seconds)
        return self.complete or interrupt.asked

    def _live_line(self) -> LiveLine:
        return LiveLine(self.console, self.config.preset, meter(self.config, cards=self.replicas.world))

    def _advance(self) -> None:
        """One step."""
        config, progress, course = self.config, self.progress, self.course
        started = time.perf_counter()
        if config.minutes is not None:
            self.step.set_rate(learning_rate(config.optimizer, progress.step, self.share))
        if course.resident is not None and isinstance(self.step, TrainStep):
            self.step(course.resident)
            course.batches.skip()
        else:
            # no step keeps the batch's memory, and fresh memory costs more than the gather
            self._batch = course.batches.next(self._batch)
            self.step(self._batch)
        progress.step += 1
        progress.tokens += course.stage.batch * course.stage.context
        if course.enter(progress.step):
            self._batch = None
        looks = started - self._read_at >= READ_SECONDS or progress.step - self._read >= READ_STEPS
        if looks or any(self._due()):
            first = self._read_at == 0.0
            self._look(started)
            if first and isinstance(self.step, TrainStep) and self.device.type == "cuda":
                told = words.first_step(self.step, course.resident, self._setup + time.perf_counter() - started)
                self.console.print(told, highlight=False)
        else:
            progress.seconds += time.perf_counter() - started

    def _due(self) -> tuple[bool, bool]:
        """Whether a validation and a checkpoint fall due after the last step."""
        config = self.config
        return self.progress.step % config.eval_interval == 0, self.progress.step % config.checkpoint_interval == 0

    def _fall_due(self) -> None:
        evaluates, saves = self._due()
        if evaluates:
            self._validate()
        if saves:
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
            self._record(done, values, tokens=tokens_until(self.config, done))
            progress.train_loss = entry.loss
        self._flush()
        self._read, self._read_at = progress.step, now
        try:
            self.step.check()
        except DivergedError as error:
            self._save_best()
            raise DivergedError(f"{error}; {KEPT}") from error
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
        scores = self._scores()
        loss = self.evaluation(scores)
        progress.val_loss = self.line.val_loss = loss
        if math.isfinite(loss) and (progress.best_loss is None or loss < progress.best_loss):
            progress.best_loss = loss
            self._best = self._content().apart() if self.replicas.rank == 0 else None
        parts = scores.values(self.replicas) if scores else {}
        self._record(progress.step, {"val_loss": loss, **parts}, tokens=progress.tokens)
        self._flush()
        self._show()

    def _scores(self) -> HeadScores | None:
        """What takes note of a policy's heads; a language model has none."""
        model = self.config.model
        if not isinstance(model, PolicyConfig):
            return None
        return HeadScores(model.heads, stick_points(self.data.game), self.device)

    def _record(self, step: int, values: dict[str, float], *, tokens: int) -> None:
        if self.file is None:
            return
        known = {name: value if math.isfinite(value) else None for name, value in values.items()}  # JSON has no NaN
        self.file.write({"step": step, **known, "tokens": tokens, "seconds": round(self.progress.seconds, 3)})
        for tracker in self.trackers:
            tracker.log(step, values)

    def _flush(self) -> None:
        if self.file is not None:
            self.file.flush()

    def _content(self) -> Content:
        return state.content(self.config, self.progress, self.model, self.step, self.course.batches, self.data)

    def _save(self) -> None:
        """Write `last`, and before it `best` where a validation since the checkpoint before was the lowest."""
        gc.collect()
        if self.replicas.rank:
            return
        self._save_best()
        self._content().write(self.folder / state.LAST)

    def _save_best(self) -> None:
        if self._best is not None:
            self._best.write(self.folder / state.BEST)
            self._best = None

    def _finish(self, *, interrupted: bool) -> None:
        if self._read < self.progress.step:
            self._look(time.perf_counter())
        if not interrupted:
            self._validate()
        self._save()
