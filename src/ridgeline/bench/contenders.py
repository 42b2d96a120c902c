"""Ways to run a training step, as they are asked for: every engine that `train` knows, its rungs, and peers.

A contender is NAME or NAME:VARIANT, where a variant says otherwise what the name leaves to `train`:

    copies, autocast   half-precision copies of fp32 weights, or PyTorch's autocast. Captured engines compute with
                       copies, the others with autocast; "best PyTorch" is the fastest of all that ran
    explicit           attention as matmul, softmax, matmul, where the plain name means scaled_dot_product_attention
                       (with the relative term as its mask)
    host               the batch comes from the host with every step, and does not lie on the card
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.bench.peers import PEERS, peer_model
from ridgeline.bench.workloads import Workload, random_batch
from ridgeline.engine import TrainStep, choose_lanes
from ridgeline.engine.distributed import launched
from ridgeline.errors import ConfigError, UnsupportedError, nearest
from ridgeline.models import build
from ridgeline.models.decoder import Attention
from ridgeline.ops.attention.reference import skew
from ridgeline.ops.dropout import DropoutState
from ridgeline.optim import OptimizerConfig
from ridgeline.train.config import ENGINES, Engine, engine_called, has_changes
from ridgeline.train.engines import engine_step, find_engine
from ridgeline.train.lanes import CANDIDATES, measures_lanes
from ridgeline.train.step import TorchStep

OPTIMIZER = OptimizerConfig(lr=3e-4, weight_decay=0.1, clip=1.0)
VARIANTS = ("copies", "autocast", "explicit", "host")
Step = TorchStep | TrainStep


@dataclass(frozen=True, kw_only=True)
class Contender:
    """How a step is run.

    Attributes:
        name: what it is asked for by, variants included.
        engine: the engine of `train` that runs it.
        variants: what is done otherwise than that engine does by itself.
        peer: another package's model instead of this one's.
    """

    name: str
    engine: str
    variants: frozenset[str] = frozenset()
    peer: str | None = None

    @property
    def settings(self) -> Engine:
        """The engine as data."""
        return engine_called(self.engine)

    @property
    def baseline(self) -> bool:
        """Whether the model is PyTorch's alone, so that "best PyTorch" may be this one."""
        return self.peer is None and self.settings.impl == "torch"


CONTENDERS = {
    **{name: Contender(name=name, engine=name) for name in ENGINES},
    **{peer: Contender(name=peer, engine=engine, peer=peer) for peer, engine in PEERS.items()},
}


def find_contender(asked: str) -> Contender:
    """The contender called `asked`, with its variants.

    Raises:
        ConfigError: no such contender or variant.
        UnsupportedError: an engine with a change that it does not know.
    """
    name, *variants = asked.split(":")
    if not asked:
        raise ConfigError("the name of a contender is empty; name them with commas between them, such as eager,compile")
    if name not in CONTENDERS and not has_changes(name):
        raise ConfigError(nearest(name, CONTENDERS, "contender"))
    for variant in variants:
        if variant not in VARIANTS:
            raise ConfigError(nearest(variant, VARIANTS, "variant of a contender"))
    if {"copies", "autocast"} <= set(variants):
        raise ConfigError(f"{asked}: weights are copies or under autocast, not both")
    contender = CONTENDERS.get(name) or Contender(name=name, engine=name)
    odd = sorted(set(variants) - {"host"})
    if not contender.baseline and odd:
        raise ConfigError(f"{name} has no variant {odd[0]!r}; ask for it as {name!r}")
    return replace(contender, name=asked, variants=frozenset(variants))


def is_baseline(name: str) -> bool:
    """Whether a record's contender is PyTorch alone; False for names that are not known here."""
    try:
        return find_contender(name).baseline
    except (ConfigError, UnsupportedError):
        return False


def _explicit_attention(module: Attention, x_BTC: Tensor, dropout: DropoutState | None) -> Tensor:
    """Attention as the articles' PyTorch code has it: matmul, softmax, F.dropout, matmul."""
    q_BTHD, k_BTGD, v_BTGD = module.split(module.qkv(x_BTC))
    T, repeat = q_BTHD.shape[1], q_BTHD.shape[2] // k_BTGD.shape[2]
    q_BHTD, k_BHTD, v_BHTD = (x.transpose(1, 2) for x in (q_BTHD, k_BTGD, v_BTGD))
    if repeat > 1:
        k_BHTD, v_BHTD = (x.repeat_interleave(repeat, dim=1) for x in (k_BHTD, v_BHTD))
    scores_BHTT = q_BHTD @ k_BHTD.transpose(-1, -2)
    if module.relative is not None:
        scores_BHTT = scores_BHTT + skew(q_BHTD @ module.relative[-T:].to(q_BHTD.dtype).t())
    future_TT = torch.ones(T, T, dtype=torch.bool, device=x_BTC.device).triu(1)
    scores_BHTT = (scores_BHTT / math.sqrt(module.config.head_dim)).masked_fill(future_TT, float("-inf"))
    weights_BHTT = F.dropout(scores_BHTT.softmax(-1).to(v_BHTD.dtype), module.config.dropout, module.training)
    return module.dropout(module.out((weights_BHTT @ v_BHTD).transpose(1, 2).flatten(2)), dropout)


def build_step(
    contender: Contender, case: Workload, device: torch.device, *, capture: bool = True, alone: bool = True
) -> Step:
    """The contender's step on the workload's model, initialised alike for every contender.

    Args:
        contender: how the step is run.
        case: the model and its precision.
        device: where.
        capture: False for a captured step's kernels launched call by call, so that a profile can tell them apart.
        alone: nobody else is on the card, so that one lane can be measured against two where `train` would do it.

    Raises:
        UnsupportedError: it cannot run on this device or in this precision.
        MissingExtraError: a peer's package is not installed.
    """
    find_engine(contender.engine, device)
    variants = contender.variants
    half, storage = case.precision in ("bf16", "fp16"), variants & {"copies", "autocast"}
    if storage and not half:
        raise UnsupportedError(f"{contender.name}: {case.precision} has no {min(storage)}; ask for the plain contender")
    engine = contender.settings

    def make(lanes: int | None = None) -> Step:
        return engine_step(
            engine,
            _model(contender, case, device),
            OPTIMIZER,
            steps=None,
            precision=f"{case.precision}-autocast" if engine.own and "autocast" in variants else case.precision,
            lanes=lanes,
            world=launched(),
            own="copies" in variants,
            capture=engine.capture and capture,
        )

    if alone and capture and device.type == "cuda" and measures_lanes(engine, launched()):
        times = choose_lanes(cast(Callable[[int], TrainStep], make), random_batch(case, device), CANDIDATES)
        return make(min(times, key=lambda lanes: times[lanes]))
    return make()


def _model(contender: Contender, case: Workload, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = (
        peer_model(contender.peer, case) if contender.peer else build(case.model, impl=contender.settings.impl, seed=0)
    )
    model = model.to(device).train()
    if "explicit" in contender.variants:
        for module in model.modules():
            if isinstance(module, Attention):
                module.forward = types.MethodType(_explicit_attention, module)  # type: ignore[method-assign]
    return model
