"""What is measured: a preset, a batch, a context and a precision, on random data."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ridgeline.cost import floor_of, table_rates
from ridgeline.errors import ConfigError
from ridgeline.hardware import DeviceSpec, check_precision
from ridgeline.models import LanguageConfig, ModelConfig
from ridgeline.models.accounting import step_cost
from ridgeline.models.config import LARGEST
from ridgeline.presets import find_config
from ridgeline.records import WorkloadInfo

CPU_BATCH, CPU_CONTEXT = 4, 64


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One row of a benchmark.

    Attributes:
        name: preset of the model.
        model: its config.
        batch: samples a step (B).
        context: positions a sample (T).
        precision: fp32, tf32, bf16 or fp16.
    """

    name: str
    model: ModelConfig
    batch: int
    context: int
    precision: str = "bf16"

    def __post_init__(self) -> None:
        if self.batch < 1 or self.context < 1:
            raise ConfigError(f"{self.name} needs batch ≥ 1 and context ≥ 1, got {self.batch} and {self.context}")
        if self.batch > LARGEST:
            raise ConfigError(f"{self.name}: batch must be at most {LARGEST:,}, got {self.batch}")
        if self.context > self.model.decoder.context:
            raise ConfigError(f"{self.name} has {self.model.decoder.context} positions, got context {self.context}")

    @property
    def tokens(self) -> int:
        """Positions a step."""
        return self.batch * self.context

    def info(self) -> WorkloadInfo:
        """The part of it that a record keeps."""
        return WorkloadInfo(name=self.name, batch=self.batch, context=self.context, precision=self.precision)

    def reduced(self) -> Workload:
        """The same model at a size that a CPU runs in seconds."""
        return replace(self, batch=min(self.batch, CPU_BATCH), context=min(self.context, CPU_CONTEXT))


BATCHES = {"gpt2-124m": 64}  # where a preset's own batch is more than a card takes in one part


def workload(name: str, *, batch: int | None = None, context: int | None = None, precision: str = "bf16") -> Workload:
    """The workload of a preset at its usual batch and context, or at those given.

    Args:
        name: a preset, or what else `find_config` takes.
        batch, context: windows a step and positions a window.
        precision: fp32, tf32, bf16 or fp16.

    Raises:
        ConfigError: there is no such preset, or the sizes cannot be.
    """
    config = find_config(name)
    usual_batch = BATCHES.get(name, config.batch)
    length = config.window.context if context is None else context
    decoder = replace(config.model.decoder, context=max(length, config.window.context))
    return Workload(
        name=name,
        model=replace(config.model, decoder=decoder),
        batch=usual_batch if batch is None else batch,
        context=length,
        precision=precision,
    )


def floor_s(case: Workload, spec: DeviceSpec) -> float:
    """The least seconds of a step on a card, its ops one after another at the dense peaks of the card's table.

    Raises:
        UnsupportedError: the table has no peak of that precision.
    """
    precision = check_precision(spec, case.precision)
    cost = step_cost(case.model, batch=case.batch, context=case.context, precision=precision)
    return floor_of(cost.ops, table_rates(spec, precision)).seconds


def vary(case: Workload, sweep: str) -> list[Workload]:
    """The workload at each value of a sweep, doubling: "context=128:2048" or "batch=32:512".

    A sweep over the context keeps the positions a step (batch · context) where the context divides them.

    Raises:
        ConfigError: the sweep cannot be read, or leaves no sample.
    """
    name, _, span = sweep.partition("=")
    low, _, high = span.partition(":")
    if name not in ("batch", "context") or not low.isdecimal() or not (high or low).isdecimal() or int(low) < 1:
        raise ConfigError(f"a sweep reads context=128:2048 or batch=32:512, got {sweep!r}")
    values, value = [], int(low)
    while value <= int(high or low):
        values.append(value)
        value *= 2
    if not values or (name == "context" and values[-1] > case.tokens):
        raise ConfigError(f"{sweep}: the context must rise, to {case.tokens} positions at most (one sample a step)")
    if name == "batch":
        return [replace(case, batch=value) for value in values]
    return [
        workload(case.name, batch=case.tokens // value, context=value, precision=case.precision) for value in values
    ]


def random_batch(case: Workload, device: torch.device, seed: int = 0) -> dict[str, Tensor]:
    """A batch of uniformly random inputs and targets. Random because zeros draw less power and clock higher."""
    generator = torch.Generator().manual_seed(seed)
    B, T, model = case.batch, case.context, case.model

    def classes(*limits: int) -> Tensor:
        columns = [torch.randint(0, limit, (B, T), generator=generator) for limit in limits]
        return torch.stack(columns, dim=-1)

    if isinstance(model, LanguageConfig):
        tokens_BS = torch.randint(0, model.vocabulary, (B, T + 1), generator=generator)
        batch = {"tokens": tokens_BS[:, :-1].contiguous(), "targets": tokens_BS[:, 1:].contiguous()}
    else:
        heads = [head.classes for head in model.heads]
        batch = {}
        if model.categories:
            batch["categories"] = classes(*(c.rows for c in model.categories for _ in range(c.columns)))
        if model.numbers:
            batch["numbers"] = torch.randn(B, T, model.numbers, generator=generator)
        batch |= {"previous": classes(*heads), "targets": classes(*heads)}
    return {name: tensor.to(device) for name, tensor in batch.items()}
