"""What a training run is: frozen, keyword-only, checked on construction."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass, field

from ridgeline.data.window import WindowSpec
from ridgeline.engine.precision import PRECISIONS
from ridgeline.engine.step import MAX_SHAPES
from ridgeline.errors import ConfigError, UnsupportedError, nearest
from ridgeline.models import ModelConfig
from ridgeline.models.plan import FUSED, fused_plan
from ridgeline.models.rungs import RUNGS, Rung, find_rung, is_rung
from ridgeline.optim import OptimizerConfig

AUTO, BEST = "auto", "best"
TRACKERS = ("tensorboard", "wandb")
STOPS = ("steps", "tokens", "minutes")


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A way to run a step.

    Attributes:
        compile: mode of torch.compile for forward and backward, or None.
        capture: whether the whole step is one CUDA graph of the step engine; without it PyTorch's own step.
        impl: implementation of the model.
        lanes: pieces of a batch that run beside each other, where the run's config does not say.
        prefetch: whether the next batch is on its way to the card while a step runs.
    """

    compile: str | None = None
    capture: bool = False
    impl: str = "torch"
    lanes: int = 1
    prefetch: bool = True

    @property
    def own(self) -> bool:
        """Whether the step engine takes the step, and not PyTorch's optimiser and autocast."""
        return self.capture or self.impl != "torch"


def _on_rung(rung: Rung) -> Engine:
    return Engine(capture=rung.capture, impl=rung.name, lanes=rung.lanes, prefetch=rung.prefetch)


ENGINES = {
    "eager": Engine(),
    "compile": Engine(compile="default"),
    "reduce-overhead": Engine(compile="reduce-overhead"),
    "max-autotune": Engine(compile="max-autotune"),
    "graph": Engine(capture=True),
    "compile+graph": Engine(compile="default", capture=True),
    **{name: _on_rung(rung) for name, rung in RUNGS.items()},
    BEST: Engine(capture=True, impl=FUSED.name),
}


def is_best(name: str) -> bool:
    """Whether an engine is the fused blocks, on whatever storage plan."""
    return name.partition("+")[0] == BEST


def has_changes(name: str) -> bool:
    """Whether a name is an engine's with something changed, so that `engine_called` is the one to judge it."""
    return is_rung(name) or (is_best(name) and name != BEST)


def engine_called(name: str) -> Engine:
    """The engine of a name that is decided: one of ENGINES, a rung with single changes, such as m2+reuse, or best on
    another storage plan, such as best+lean.

    Raises:
        UnsupportedError: there is none.
    """
    if name in ENGINES:
        return ENGINES[name]
    if is_best(name):
        impl = name.replace(BEST, FUSED.name, 1)
        fused_plan(impl)
        return dataclasses.replace(ENGINES[BEST], impl=impl)
    if is_rung(name):
        return _on_rung(find_rung(name))
    raise UnsupportedError(nearest(name, ENGINES, "engine"))


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run.

    Attributes:
        preset: name of the preset that it comes from.
        model: the model; vocabulary, inputs and heads follow the data.
        data: a text file, nanoGPT's .bin, the folder of a data set, or one of the names `ridgeline data --help` lists.
        window: what a training window is.
        batch: windows in an optimisation step, over all processes that train together.
        accumulation: parts into which a step's batch is cut to save memory; must divide `batch`.
        stages: short windows or small batches first: (share of the steps at which it ends, batch, context) of each
            stage before the last, which has `batch` and `window.context`.
        lanes: pieces of a part that run beside each other; 0 to measure, on a card, whether one or two are faster.
        optimizer: AdamW, schedule and clipping.
        precision: fp32, tf32, bf16 or fp16; "auto" for bf16 where a CUDA card has it, else fp32.
        engine: how a step is run: PyTorch's eager, compile, reduce-overhead, max-autotune, graph or compile+graph; a
            rung, m0, m1, m2, m3 or r16; or best, which is the fused blocks; best+lean and best+leanest repeat norms and
            activations, or the product before these too, and need less memory. "auto" is eager on the CPU, and on a
            card best, or compile+graph where the fused blocks cannot run or are slower.
            m0, m1, m2, m3 and r16 are the rungs of the ladder, to be compared and not to be trained with.
        device: cpu, cuda or cuda:N; "auto" for a CUDA card where there is one, else cpu.
        seed: of initial weights, order of the data and dropout.
        steps: length of the run in optimisation steps; one of steps, tokens and minutes is set.
        tokens: length of the run in tokens (positions of windows).
        minutes: length of the run in minutes of training time; validation, checkpoints and what is captured before the
            first step are not counted. The schedule then follows the clock, so two such runs differ.
        eval_interval: steps between validations; the last step is always followed by one.
        eval_windows: held-out windows a validation looks at, spread evenly; 0 for all of them.
        checkpoint_interval: steps between checkpoints; the last step is always followed by one. With each, the state of
            the lowest validation so far is written too, where a validation since the one before it was the lowest.
        out: folder of the run, new or empty; "auto" for runs/PRESET with the first free number.
        track: what to log to beside metrics.jsonl: tensorboard, wandb.
    """

    preset: str
    model: ModelConfig
    data: str
    window: WindowSpec
    batch: int
    accumulation: int = 1
    stages: tuple[tuple[float, int, int], ...] = ()
    lanes: int = 0
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: str = AUTO
    engine: str = AUTO
    device: str = AUTO
    seed: int = 0
    steps: int | None = None
    tokens: int | None = None
    minutes: float | None = None
    eval_interval: int = 500
    eval_windows: int = 0
    checkpoint_interval: int = 500
    out: str = AUTO
    track: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._check_names()
        for name in ("batch", "accumulation", "eval_interval", "checkpoint_interval"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.batch >= 2**32:
            raise ConfigError(f"batch must be below 2^32, got {self.batch}; lower --batch")
        if self.batch % self.accumulation:
            raise ConfigError(
                f"accumulation={self.accumulation}, which {self.preset} sets unless you do, does not divide "
                f"batch={self.batch}; set accumulation={math.gcd(self.accumulation, self.batch)} or change the batch"
            )
        for name, nothing in (("eval_windows", "all"), ("lanes", "to be measured")):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be 0 ({nothing}) or more, got {getattr(self, name)}")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed must be in [0, 2^63), got {self.seed}")
        stops = [name for name in STOPS if getattr(self, name) is not None]
        if len(stops) != 1:
            raise ConfigError(f"set exactly one of steps, tokens and minutes, got {', '.join(stops) or 'none'}")
        if not 0 < getattr(self, stops[0]) < math.inf:
            raise ConfigError(f"{stops[0]} must be positive and finite, got {getattr(self, stops[0])}")
        context = self.model.decoder.context
        if self.window.context > context:
            raise ConfigError(
                f"window.context={self.window.context} is longer than the model's context={context}; "
                "shorten the window or raise model.decoder.context"
            )
        self._check_stages(context)

    def _check_stages(self, longest: int) -> None:
        if self.stages and self.steps is None:
            raise ConfigError("stages are shares of a number of steps; set steps, or leave the stages out")
        if len(self.stages) >= MAX_SHAPES:
            raise ConfigError(f"a run has at most {MAX_SHAPES - 1} stages before the last, got {len(self.stages)}")
        shares = [0.0, *(share for share, _, _ in self.stages), 1.0]
        if any(one >= other for one, other in itertools.pairwise(shares)):
            raise ConfigError(f"the shares of stages must rise between 0 and 1, got {shares[1:-1]}")
        for _, batch, context in self.stages:
            if batch < 1 or batch % self.accumulation or not 1 <= context <= longest:
                raise ConfigError(
                    f"a stage needs a batch that accumulation={self.accumulation} divides and a context from 1 to "
                    f"{longest}, got {batch} and {context}"
                )

    def _check_names(self) -> None:
        for name, known in (
            ("precision", (AUTO, *PRECISIONS)),
            ("engine", (AUTO, *ENGINES)),
        ):
            value = getattr(self, name)
            if value not in known and not (name == "engine" and has_changes(value)):
                raise ConfigError(nearest(value, known, name))
        if self.engine != AUTO:
            engine_called(self.engine)
        for tracker in self.track:
            if tracker not in TRACKERS:
                raise ConfigError(nearest(tracker, TRACKERS, "tracker"))

    @property
    def step_tokens(self) -> int:
        """Positions that one optimisation step learns from, in the last stage."""
        return self.batch * self.window.context

    @property
    def total_steps(self) -> int | None:
        """Optimisation steps of the whole run; None where the clock decides."""
        if self.tokens is not None:
            return -(-self.tokens // self.step_tokens)
        return self.steps
