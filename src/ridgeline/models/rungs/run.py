"""What one pass over a model carries from op to op on a rung."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ridgeline.models.config import DecoderConfig
from ridgeline.models.fused.attention import Shape
from ridgeline.models.rungs.buffers import Buffers
from ridgeline.models.rungs.ladder import Rung
from ridgeline.ops.sink import sink_of

# one set of buffers a model and stream: on one stream, what is launched later runs later
_BUFFERS: weakref.WeakKeyDictionary[nn.Module, dict[tuple[Rung, int], Buffers]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Run:
    """A pass.

    Attributes:
        config: the decoder's.
        rung: how.
        shape: samples, positions, dropout.
        buffers: where results go.
        gradients: of weights without a sink, by the weight's id.
    """

    config: DecoderConfig
    rung: Rung
    shape: Shape
    buffers: Buffers
    gradients: dict[int, Tensor] = field(default_factory=dict)

    @property
    def dropping(self) -> bool:
        """Whether this pass drops anything."""
        return self.shape.p > 0

    @contextlib.contextmanager
    def gradient(self, weight: Tensor) -> Iterator[tuple[Tensor, bool]]:
        """Where a weight's gradient is to be written, and whether to add it: its fp32 sink, or a tensor like it."""
        sink = sink_of(weight)
        if sink is None:
            self.gradients[id(weight)] = torch.empty_like(weight)
            yield self.gradients[id(weight)], False
            return
        yield sink.take()
        sink.finished()


def run_of(module: nn.Module, config: DecoderConfig, rung: Rung, shape: Shape, device: torch.device) -> Run:
    """A pass over `module` with the buffers of its passes on the current stream.

    Without autograd no backward pass comes that would give buffers back, and those on the shelf are a captured step's:
    such a pass takes fresh ones.
    """
    if not torch.is_grad_enabled():
        return Run(config, rung, shape, Buffers(zero_fill=rung.zero_fill, reuse=False))
    stream = torch.cuda.current_stream(device).stream_id if device.type == "cuda" else 0
    known = _BUFFERS.setdefault(module, {})
    if (rung, stream) not in known:
        known[rung, stream] = Buffers(zero_fill=rung.zero_fill, reuse=rung.reuse)
    return Run(config, rung, shape, known[rung, stream])
