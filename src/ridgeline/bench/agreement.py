"""Does the fast step train the same model? Losses of several precisions and implementations beside those of fp32.

Every contender starts from the same weights and sees the same batches. What is compared is the distance of its loss
from the fp32 loss of the same step, over the last steps of several seeds. The yardstick is PyTorch's own step with
bf16 copies of fp32 masters and a bf16 residual; autocast, with its fp32 residual, is a finer one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ridgeline.bench.workloads import Workload
from ridgeline.engine import TrainStep
from ridgeline.errors import ConfigError
from ridgeline.models import LanguageConfig, build
from ridgeline.optim import OptimizerConfig

REFERENCE = "fp32"
READ = 1000  # steps between two reads of the metrics; the step keeps 1,024


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A contender of the comparison.

    Attributes:
        impl: implementation of the model.
        precision: of the step.
    """

    impl: str
    precision: str


VARIANTS = {
    REFERENCE: Variant(impl="torch", precision="fp32"),
    "best": Variant(impl="fused", precision="bf16"),
    "copies": Variant(impl="torch", precision="bf16"),
    "autocast": Variant(impl="torch", precision="bf16-autocast"),
}


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Losses of one variant.

    Attributes:
        variant: its name.
        losses: by seed, by step, in nats.
        distance: mean distance from the reference's losses over the last steps and all seeds, in nats.
        worst: the largest mean distance of a seed.
    """

    variant: str
    losses: list[list[float]]
    distance: float
    worst: float


def chain(vocabulary: int, length: int, seed: int) -> Tensor:
    """A text that can be learned: a random order-1 chain in which every token has four likely successors. int64."""
    generator = torch.Generator().manual_seed(seed)
    successors = torch.randint(0, vocabulary, (vocabulary, 4), generator=generator).tolist()
    choices = torch.multinomial(torch.tensor([0.6, 0.25, 0.1, 0.05]), length, replacement=True, generator=generator)
    tokens, token = [], 0
    for choice in choices.tolist():
        token = successors[token][choice]
        tokens.append(token)
    return torch.tensor(tokens)


def batch_of(tokens: Tensor, case: Workload, seed: int, step: int) -> dict[str, Tensor]:
    """Windows of `tokens` at random places that depend on seed and step alone."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    starts_B = torch.randint(0, len(tokens) - case.context, (case.batch,), generator=generator)
    windows_BS = tokens[starts_B[:, None] + torch.arange(case.context + 1)]
    return {"tokens": windows_BS[:, :-1].contiguous(), "targets": windows_BS[:, 1:].contiguous()}


def losses_of(
    variant: Variant,
    case: Workload,
    tokens: Tensor,
    optimizer: OptimizerConfig,
    *,
    steps: int,
    seed: int,
    device: torch.device,
) -> list[float]:
    """The loss of each step of one run."""
    model = build(case.model, impl=variant.impl, seed=seed).to(device).train()
    step = TrainStep(model, optimizer=optimizer, steps=steps, precision=variant.precision, seed=seed)
    found: list[float] = []
    for number in range(steps):
        step(batch_of(tokens, case, seed, number))
        if (number + 1) % READ == 0 or number + 1 == steps:
            found += [m.loss for m in step.metrics(len(found))]
    return found


def agreement(
    case: Workload,
    tokens: Tensor,
    *,
    variants: Sequence[str] = tuple(VARIANTS),
    seeds: int = 5,
    steps: int = 500,
    last: int = 100,
    device: torch.device,
    optimizer: OptimizerConfig | None = None,
) -> list[Agreement]:
    """Runs every variant on every seed.

    Args:
        case: a language model's workload; dropout is left out, since PyTorch draws other masks.
        tokens: int64 tokens below the model's vocabulary.
        variants: names of VARIANTS, the reference among them.
        seeds: runs of each.
        steps: length of a run.
        last: steps at its end whose losses are compared.
        device: where.
        optimizer: AdamW and schedule; None for the defaults at a rate of 1e-3.

    Raises:
        ConfigError: a workload that is no language model, or numbers that cannot be.
    """
    if not isinstance(case.model, LanguageConfig):
        raise ConfigError(f"{case.name} is no language model; compare gpt2-c256, fast-c256 or gpt2-124m")
    if not 1 <= last <= steps or seeds < 1 or REFERENCE not in variants:
        raise ConfigError(f"an agreement needs seeds ≥ 1, 1 ≤ last ≤ steps and the variant {REFERENCE}")
    plain = replace(case, model=replace(case.model, decoder=replace(case.model.decoder, dropout=0.0)))
    settings = optimizer or OptimizerConfig(lr=1e-3, floor=1e-4, warmup=min(50, steps))
    losses = {
        name: [
            losses_of(VARIANTS[name], plain, tokens, settings, steps=steps, seed=seed, device=device)
            for seed in range(seeds)
        ]
        for name in variants
    }
    found = []
    for name in variants:
        by_seed = [
            sum(abs(a - b) for a, b in zip(mine[-last:], reference[-last:], strict=True)) / last
            for mine, reference in zip(losses[name], losses[REFERENCE], strict=True)
        ]
        found.append(Agreement(variant=name, losses=losses[name], distance=sum(by_seed) / seeds, worst=max(by_seed)))
    return found
