"""One training step as one program: forward, backward, all-reduce, clip, AdamW, schedule, seeds and counters.

On a CUDA card the program is captured into one CUDA graph a batch shape, so a step costs the host one launch; on
the CPU, and where capture is declined, the same program runs call by call. It is the same list of calls in both
cases, and everything that changes from step to step is a tensor, so both give the same numbers.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ridgeline.engine import demands
from ridgeline.engine.capture import Capture, CudaCapture, Program, choose_capture, reason
from ridgeline.engine.diagnose import first_bad
from ridgeline.engine.distributed import Replicas
from ridgeline.engine.feed import DrawnFeed, Feed, Signature, Source, signature, tensors_of
from ridgeline.engine.flat import FlatParameters
from ridgeline.engine.memory import described, enough, kept
from ridgeline.engine.muon import muon_names
from ridgeline.engine.passes import Cut, Passes, compiled, targets_that_count
from ridgeline.engine.phases import END, Marks, measure, no_mark
from ridgeline.engine.precision import find_precision, without_autocast
from ridgeline.engine.reduction import Reduction
from ridgeline.engine.slots import Decays, matrices_decay
from ridgeline.engine.update import LossScale, StepMetrics, Update
from ridgeline.engine.watch import Watch, steady
from ridgeline.errors import ConfigError, DivergedError, RidgelineError, UnsupportedError
from ridgeline.ops.dropout import DropoutState
from ridgeline.optim import OptimizerConfig

log = logging.getLogger(__name__)

Loss = Callable[[nn.Module, Any], Tensor]
MAX_SHAPES = 8  # captured batch shapes; a loop with more of them should pad


class _Prepared(NamedTuple):
    """What a step on one batch shape is made of."""

    feed: Feed
    reduction: Reduction | None
    program: Program


class TrainStep:
    """Trains a module step by step; owns the flat weights, the optimiser, the counters and the captured graphs.

    Between steps the module is as it always was: fp32 parameters under their own names, with the state of the last
    finished step, which may be changed in place between steps; whoever does so by `parameter.data`, which PyTorch keeps
    no account of, calls `flat.refresh()` behind it. Which parameters learn is settled when the step is built. Buffers
    that a forward pass writes, as BatchNorm's, are each process' own where several train.

    Args:
        model: any module with fp32 parameters on one device. Move it before, not after.
        loss: loss(model, batch) → scalar, a mean over the samples; None calls `model.loss(batch, dropout)`, as this
            package's models have it. In bf16 and fp16 the module has been converted as by `model.bfloat16()`, and so
            are the batch's floating-point tensors.
        optimizer: settings of clipping, AdamW or Muon, and schedule.
        steps: length of the schedule; None for a rate that stays at `optimizer.lr` or follows `set_rate`.
        precision: fp32, tf32, bf16, fp16 (copies of fp32 masters), bf16-autocast or fp16-autocast.
        accumulate: micro-batches a batch is split into; gradients are summed in fp32.
        lanes: pieces of a micro-batch that run beside each other on streams of their own.
        weight: weight(part of a batch) → scalar tensor, what share of the part's items its loss is a mean of, where
            that differs between parts; None takes parts as equal. For `model.loss` it is the targets that are not −100.
        capture: one CUDA graph a step; None for wherever there is a CUDA device. A `Capture` replaces the CUDA one.
        compile: mode of torch.compile for forward and backward ("default", "max-autotune-no-cudagraphs", …) or None.
        decays: which of AdamW's parameters decay.
        orthogonal: names of the matrices that Muon trains; None for those of linear layers in its nn.ModuleLists.
        seed: seed of the dropout masks.
        replicas: the processes that train together; None for all of torch.distributed's default group.
        scale: settings of fp16's loss scale.
        prefetch: send a batch from the host to the card while the step before it runs, by a pinned copy and a stream of
            its own; False to copy it when its turn has come.
        bad_steps: consecutive non-finite steps after which `check` stops the run.

    Raises:
        ConfigError: parameters that cannot be masters, settings that cannot be, no such mode of torch.compile.
        UnsupportedError: capture without a CUDA device.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | None = None,
        optimizer: OptimizerConfig | None = None,
        *,
        steps: int | None = None,
        precision: str = "bf16",
        accumulate: int = 1,
        lanes: int = 1,
        weight: Callable[[Any], Tensor] | None = None,
        capture: bool | Capture | None = None,
        compile: str | None = None,
        decays: Decays = matrices_decay,
        orthogonal: Iterable[str] | None = None,
        seed: int = 0,
        replicas: Replicas | None = None,
        scale: LossScale | None = None,
        prefetch: bool = True,
        bad_steps: int = 20,
    ) -> None:
        demands.numbers(accumulate, lanes, bad_steps, steps, seed)
        demands.demand(model, loss, optimizer, weight, decays)
        demands.instance(replicas, Replicas, "replicas")
        demands.instance(scale, LossScale, "scale")
        optimizer = optimizer or OptimizerConfig()
        self.model, self.bad_steps, self._prefetch = model, bad_steps, prefetch
        self.precision = find_precision(precision)
        self.replicas = Replicas() if replicas is None else replicas
        rank, world = self.replicas.rank, self.replicas.world
        names = muon_names(model, optimizer, orthogonal)
        self.flat = FlatParameters(
            model, compute=self.precision.compute, decays=decays, orthogonal=names, lanes=lanes, world=world
        )
        self.device = self.flat.device
        scaling = (scale or LossScale()) if self.precision.scaled else None
        settings = (self.precision, scaling, steps, accumulate, lanes, seed)
        alike = {"parameters": self.flat.described(), "optimizer": optimizer, "settings": settings}
        self.replicas.agree(alike, self.device)
        self.replicas.same([self.flat.masters, *self.flat.beside()])
        self.flat.refresh()
        self._even = weight is None  # else it tells how the parts' losses are to be weighed
        whole = accumulate * lanes * world == 1
        if whole or (weight is None and loss is None):
            weight = None if whole else targets_that_count
        self.update = Update(
            self.flat, optimizer, steps=steps, weighted=weight is not None, scale=scaling, seed=seed, whole=whole
        )
        self._user_loss = loss
        call = self._call_loss if compile is None else compiled(self._call_loss, compile)
        self.cut = Cut(accumulate=accumulate, lanes=lanes, rank=rank, world=world, weight=weight)
        device_state = {"seed_step": self.update.seed_step, "loss_scale": self.update.loss_scale}
        self.passes = Passes(call, self.flat, self.precision, self.cut, **device_state, own=loss is None)
        self._capture = choose_capture(capture, self.device)
        self._at_once = self.device.type == "cpu" and self._capture is None  # what is wrong is told before the update
        self._modules = list(model.modules())
        self._shapes: dict[tuple[Signature, bytes, Source | None], _Prepared] = {}
        self._activations = 0
        self._last: _Prepared | None = None

    def _call_loss(self, batch: Any, dropout: DropoutState) -> Tensor:
        if self._user_loss is not None:
            return self._user_loss(self.model, batch)
        return self.model.loss(batch, dropout)  # type: ignore[operator]

    def _program(self, feed: Feed, reduction: Reduction | None) -> Program:
        def run() -> None:
            feed.draw(self.passes.seed_step)
            first = self.passes.watch is not None
            self.passes(feed, reduction)
            if reduction is not None:
                self.passes.mark("all-reduce")  # what of it the backward pass has not hidden
                reduction.finish(check=first or self._at_once)
            self.passes.mark("optimizer")
            self.update(self.passes.whole)
            self.passes.mark(END)

        return run

    def __call__(self, batch: Any) -> None:
        """Trains on `batch`: a tensor or a nest of tensors [samples, …], on the host or on the model's device.

        A `Source` in its place draws the batch inside the step, from the step's own number.
        """
        demands.demand_training_mode()
        with without_autocast(self.device):
            self._last, leaves = self._prepared(batch)
            self.flat.follow()
            self._last.feed.load(leaves)
            self._last.program()

    def prepare(self, batch: Any) -> None:
        """Makes ready, captured where steps are, what a batch like this one takes, and changes no state."""
        self._prepared(batch, expected=True)

    def _prepared(self, batch: Any, *, expected: bool = False) -> tuple[_Prepared, list[Tensor]]:
        source = batch if isinstance(batch, Source) else None
        leaves, spec = tensors_of(batch if source is None else dict(source.tensors))
        key = (signature(leaves, spec), bytes(module.training for module in self._modules), source)
        if key not in self._shapes:
            self._shapes[key] = self._prepare(leaves, spec, source, expected=expected)
        return self._shapes[key], leaves

    def _prepare(self, leaves: list[Tensor], spec: Any, source: Source | None, *, expected: bool) -> _Prepared:
        """Static buffers and program for a new batch shape; a loop that did not expect a further one is told."""
        shapes = described(leaves)
        if len(leaves[0]) % self.cut.pieces:
            raise ConfigError(
                f"accumulate={self.cut.accumulate} times lanes={self.cut.lanes} does not divide a batch of "
                f"{len(leaves[0])} samples"
            )
        if len(self._shapes) == MAX_SHAPES:
            raise ConfigError(f"more than {MAX_SHAPES} batch shapes ({shapes} is new); pad batches to fewer shapes")
        if self._shapes and not expected:
            log.warning("batch of a new shape (%s): preparing step program %d", shapes, len(self._shapes) + 1)
        self.flat.refresh(captured=self.captures)
        try:
            with self._enough(leaves):
                return self._make(leaves, spec, source)
        except RidgelineError:
            raise
        except Exception as error:
            if self._capture is None:
                raise
            raise UnsupportedError(f"no step can be taken on a batch of {shapes}: {reason(error)}") from error

    def _make(self, leaves: list[Tensor], spec: Any, source: Source | None) -> _Prepared:
        if source is not None:
            feed: Feed = DrawnFeed(source, self.device)
        else:
            feed = Feed(leaves, spec, self.device, prefetch=self._prefetch)
        reduction = self._reduction(leaves) if self.replicas.world > 1 else None
        program = self._program(feed, reduction)
        self.passes.watch = functools.partial(Watch, self.flat, self.model, self.precision, self.captures)
        if self._capture is None:

            def run() -> None:
                self.flat.refresh()
                with self._enough(feed.static):
                    program()

            return _Prepared(feed, reduction, run)
        feed.load(leaves)
        with self._undone():
            if isinstance(self._capture, CudaCapture):
                self._capture.warm_up(program)
            else:
                program()
            with self._high_water(), steady(self.model, self.device):
                return _Prepared(feed, reduction, self._capture(program))

    def _reduction(self, leaves: list[Tensor]) -> Reduction:
        """The sum over the processes, which tell each other how large their batches are where all weigh the same."""
        size, unit = len(leaves[0]), "samples"
        if self._user_loss is None and leaves[0].dim() > 1:
            size, unit = leaves[0].shape[:2].numel(), "positions"
        return Reduction(self.replicas, self.flat, size if self._even else 1, unit)

    def _kept(self) -> dict[str, int]:
        return kept(self.flat, self.update, [prepared.feed for prepared in self._shapes.values()])

    def _enough(self, leaves: list[Tensor]) -> contextlib.AbstractContextManager[None]:
        return enough(leaves, self.device, self._kept)

    @contextlib.contextmanager
    def _high_water(self) -> Iterator[None]:
        """Notes the most memory that a capture held beyond what was there before: activations and workspace."""
        if self.device.type != "cuda":
            yield
            return
        gc.collect()  # what an earlier step has left would be freed in between
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        yield
        self._activations = max(self._activations, torch.cuda.max_memory_allocated(self.device) - before)

    def memory(self) -> dict[str, int]:
        """Bytes of device memory by what they are for; all of it stays where it is from the first step on.

        "activations and workspace" is the high-water mark inside the captured step, 0 where nothing is captured.
        """
        return {**self._kept(), "activations and workspace": self._activations}

    @contextlib.contextmanager
    def _undone(self) -> Iterator[None]:
        """Puts weights, optimiser, counters, buffers and random state back to what they were before."""
        tensors = [*self.update.state(), *self.model.buffers()]
        saved = [tensor.clone() for tensor in tensors]
        cpu_state = torch.get_rng_state()
        cuda_state = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        try:
            with without_autocast(self.device):
                yield
        finally:
            with torch.no_grad():
                for tensor, value in zip(tensors, saved, strict=True):
                    tensor.copy_(value)
            torch.set_rng_state(cpu_state)
            if cuda_state is not None:
                torch.cuda.set_rng_state(cuda_state, self.device)

    def phases(self, batch: Any, steps: int = 10) -> dict[str, float]:
        """Median milliseconds of each phase of a step on `batch`, measured in a program of its own; changes no state.

        With lanes, forward and backward overlap and are one phase.
        """
        captured = isinstance(self._capture, CudaCapture)
        marks = Marks(self.device, captured=captured)
        with self._undone():
            self(batch)  # prepares the shape
            assert self._last is not None
            self.passes.mark = marks
            try:
                program = self._program(self._last.feed, self._last.reduction)
                return measure(self._capture(program) if captured and self._capture else program, marks, steps)
            finally:
                self.passes.mark = no_mark

    @contextlib.contextmanager
    def weights(self) -> Iterator[nn.Module]:
        """The module computing with the weights of the step's precision, for evaluation and sampling."""
        with self.flat.swapped(), self.precision.products(), self.precision.forward(self.device):
            yield self.model

    @property
    def captures(self) -> bool:
        """Whether what it runs is captured."""
        return self._capture is not None

    def captured(self, program: Program) -> Program:
        """What runs `program` again and again, captured as a step is; it must change no state, and may read `weights`.

        Results that it leaves in memory of the capture hold until the next step or captured program runs.

        Raises:
            UnsupportedError: steps are not captured, or the program cannot be.
        """
        if self._capture is None:
            raise UnsupportedError("this step is not captured, so nothing beside it is")
        if isinstance(self._capture, CudaCapture):
            self._capture.warm_up(program)
        return self._capture(program)

    @property
    def taken(self) -> int:
        """Steps taken, skipped ones included. Waits for the device."""
        return int(self.update.seed_step[1])

    def metrics(self, since: int = 0) -> list[StepMetrics]:
        """What the steps from number `since` on reported; at most the last 1,024. Waits for the device."""
        return self.update.metrics(since)

    def set_rate(self, rate: float) -> None:
        """Sets the learning rate of the steps that follow, where there is no schedule; asynchronous."""
        self.update.set_rate(rate)

    def check(self) -> None:
        """Stops a run that no longer trains. Waits for the device.

        Raises:
            ConfigError: a parameter was replaced, moved, added, frozen, thawed or given a hook, or a buffer replaced,
                of which a captured step knows nothing; one that is not captured says so at once. Or the processes'
                batches were of different sizes.
            DivergedError: the last `bad_steps` steps were all skipped; names the step and the first bad tensor.
        """
        self.flat.check_views(captured=self.captures)
        for prepared in self._shapes.values():
            if prepared.reduction is not None:
                prepared.reduction.check()
        in_a_row = int(self.update.skipped[1])
        if in_a_row >= self.bad_steps:
            raise DivergedError(
                f"training stopped at step {self.taken}: loss or gradient was not finite {in_a_row} times in a row; "
                f"first bad tensor: {self.first_bad()}; the weights are those of step {self.taken - in_a_row}"
            )

    def first_bad(self) -> str:
        """The first tensor that is not finite when the last batch runs again, call by call (ConfigError before any)."""
        if self._last is None:
            raise ConfigError("no step has been taken; there is no batch to look at")
        stream = self._capture.stream if isinstance(self._capture, CudaCapture) else None
        usual, self.passes.loss = self.passes.loss, self._call_loss
        try:
            with self._undone(), torch.cuda.stream(stream) if stream else contextlib.nullcontext():
                return first_bad(self.model, self.passes, self._last.feed)
        finally:
            self.passes.loss = usual

    def state_dict(self) -> dict[str, Tensor]:
        """Optimiser state and counters, by parameter name; the weights are the model's own `state_dict`."""
        return self.update.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes up the state of another run of the same model, whatever its engine settings.

        Raises:
            CheckpointError: it belongs to another model.
        """
        self.update.load_state_dict(state)
        self.flat.refresh()
