"""Ways to run a training step, as data: PyTorch's own as an expert would write them, and this package's.

A contender is asked for as NAME, or NAME:copies for bf16 or fp16 copies of fp32 master weights where the plain name
means autocast, or NAME:explicit for attention written out where the plain name means scaled_dot_product_attention
(with the relative term as its mask). "Best PyTorch" is the fastest of all that ran.
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

from ridgeline.bench.peers import peer_model
from ridgeline.bench.workloads import Workload
from ridgeline.engine import TrainStep, find_precision
from ridgeline.engine.capture import CudaCapture
from ridgeline.engine.phases import END, Mark, Marks, measure, no_mark
from ridgeline.errors import ConfigError, UnsupportedError, nearest
from ridgeline.models import build
from ridgeline.models.decoder import Attention
from ridgeline.ops.attention.reference import skew
from ridgeline.ops.dropout import DropoutState
from ridgeline.optim import OptimizerConfig, build_adamw

OPTIMIZER = OptimizerConfig(lr=3e-4, weight_decay=0.1, clip=1.0)


@dataclass(frozen=True, kw_only=True)
class Contender:
    """How a step is run.

    Attributes:
        name: what it is asked for by, variants included.
        compile: mode of torch.compile for forward and backward, or None.
        capture: whether the whole step is one CUDA graph.
        impl: implementation of the model.
        copies: half-precision copies of the weights instead of autocast.
        explicit: attention as matmul, softmax, matmul.
        ours: this package's own and no PyTorch baseline.
        peer: another package's model, and no baseline either.
    """

    name: str
    compile: str | None = None
    capture: bool = False
    impl: str = "torch"
    copies: bool = False
    explicit: bool = False
    ours: bool = False
    peer: str | None = None

    @property
    def baseline(self) -> bool:
        """Whether it is PyTorch alone, so that "best PyTorch" may be this one."""
        return not self.ours and self.peer is None


CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender(name="eager"),
        Contender(name="compile", compile="default"),
        Contender(name="reduce-overhead", compile="reduce-overhead"),
        Contender(name="max-autotune", compile="max-autotune"),
        Contender(name="graph", capture=True),
        Contender(name="compile+graph", compile="default", capture=True),
        Contender(name="transformers", compile="default", capture=True, peer="transformers"),
        Contender(name="liger", capture=True, peer="liger"),
        Contender(name="best", capture=True, impl="fused", copies=True, ours=True),
    )
}
VARIANTS = ("copies", "explicit")


def find_contender(asked: str) -> Contender:
    """The contender called `asked`, with its variants.

    Raises:
        ConfigError: no such contender or variant.
    """
    name, *variants = asked.split(":")
    if name not in CONTENDERS:
        raise ConfigError(nearest(name, CONTENDERS, "contender"))
    for variant in variants:
        if variant not in VARIANTS:
            raise ConfigError(nearest(variant, VARIANTS, "variant of a contender"))
    contender = CONTENDERS[name]
    if variants and not contender.baseline:
        raise ConfigError(f"{name} has no variants; ask for it as {name!r}")
    return replace(
        contender, name=asked, copies=contender.copies or "copies" in variants, explicit="explicit" in variants
    )


class TorchStep:
    """A step as a PyTorch expert writes it: autocast, foreach clip, fused AdamW, optionally compiled or captured."""

    def __init__(self, model: nn.Module, contender: Contender, precision: str) -> None:
        self.model = model
        self.precision = find_precision(precision)
        self.device = next(model.parameters()).device
        self.optimizer = build_adamw(
            model, lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, weight_decay=OPTIMIZER.weight_decay
        )
        for group in self.optimizer.param_groups:
            group["capturable"] = contender.capture
        plain = cast(Callable[[dict[str, Tensor]], Tensor], model.loss)
        self.loss = plain
        if contender.compile is not None:
            self.loss = torch.compile(plain, mode=contender.compile, dynamic=False)
        self.capture = CudaCapture(self.device) if contender.capture else None
        self.replay: Callable[[], None] | None = None
        self.mark: Mark = no_mark

    def _step(self, batch: dict[str, Tensor]) -> None:
        with self.precision.products():
            self.mark("forward")
            with self.precision.forward(self.device):
                loss = self.loss(batch)
            self.mark("backward")
            loss.backward()
            self.mark("optimizer")
            nn.utils.clip_grad_norm_(self.model.parameters(), OPTIMIZER.clip, foreach=True)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.mark(END)

    def __call__(self, batch: dict[str, Tensor]) -> None:
        """Trains on `batch`, which a captured step reads at the addresses it had the first time."""
        if self.capture is None:
            self._step(batch)
            return
        if self.replay is None:
            self.capture.warm_up(lambda: self._step(batch))
            self.replay = self.capture(lambda: self._step(batch))
        self.replay()

    def phases(self, batch: dict[str, Tensor], steps: int = 10) -> dict[str, float]:
        """Median milliseconds of each phase, measured in a program of its own; trains on `batch` meanwhile."""
        self(batch)
        marks = Marks(self.device, captured=self.capture is not None)
        self.mark = marks
        try:
            run = lambda: self._step(batch)  # noqa: E731
            return measure(self.capture(run) if self.capture else run, marks, steps)
        finally:
            self.mark = no_mark


Step = TorchStep | TrainStep


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


def build_step(contender: Contender, case: Workload, device: torch.device) -> Step:
    """The contender's step on the workload's model, initialised alike for every contender.

    Raises:
        UnsupportedError: it cannot run on this device or in this precision.
    """
    if contender.capture and device.type != "cuda":
        raise UnsupportedError(f"{contender.name} needs a CUDA device; on {device} choose eager or compile")
    half = case.precision in ("bf16", "fp16")
    if contender.copies and not half and not contender.ours:
        raise UnsupportedError(f"{contender.name}: {case.precision} has no copies; ask for the plain contender")
    torch.manual_seed(0)
    model: nn.Module = (
        peer_model(contender.peer, case) if contender.peer else build(case.model, impl=contender.impl, seed=0)
    )
    model = model.to(device).train()
    if contender.explicit:
        for module in model.modules():
            if isinstance(module, Attention):
                module.forward = types.MethodType(_explicit_attention, module)  # type: ignore[method-assign]
    if contender.copies:
        return TrainStep(
            model,
            optimizer=OPTIMIZER,
            precision=case.precision,
            capture=contender.capture,
            compile=contender.compile,
        )
    if case.precision == "fp16":
        raise UnsupportedError(
            f"{contender.name}: fp16 is measured with its loss scale; ask for {contender.name}:copies"
        )
    return TorchStep(model, contender, f"{case.precision}-autocast" if half else case.precision)
