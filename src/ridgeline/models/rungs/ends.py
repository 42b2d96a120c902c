"""The model's input and heads on the rungs that fuse nothing: the module's own code, its products in the rung's tiles.

What is no product (embeddings, the heads' norms and GELUs, the loss) stays PyTorch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from ridgeline.models.decoder import Decoder
from ridgeline.models.fused.attention import Shape
from ridgeline.models.rungs.buffers import Buffers
from ridgeline.models.rungs.ladder import find_rung
from ridgeline.models.rungs.products import bias_gradient, input_gradient, project, weight_gradient
from ridgeline.models.rungs.run import Run

NAME = "head"


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Run, x_NK: Tensor, weight_MK: Tensor, bias_M: Tensor | None) -> Tensor:
        ctx.run, ctx.x_NK, ctx.weight_MK, ctx.bias_M = run, x_NK, weight_MK, bias_M
        return project(run, NAME, x_NK, weight_MK, bias_M)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NM: Tensor) -> tuple[Tensor | None, ...]:
        run, dy_NM = ctx.run, dy_NM.contiguous()
        dx_NK = input_gradient(run, NAME, dy_NM, ctx.weight_MK) if ctx.needs_input_grad[1] else None
        weight_gradient(run, NAME, ctx.weight_MK, dy_NM, ctx.x_NK)
        bias_gradient(run, ctx.bias_M, dy_NM, f"{NAME}.bias")
        return None, dx_NK, run.gradients.get(id(ctx.weight_MK)), run.gradients.get(id(ctx.bias_M))


class RungProducts(TorchFunctionMode):
    """While it is on, F.linear is the product of the decoder's rung."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is not F.linear:
            return func(*args, **(kwargs or {}))
        x, weight_MK, bias_M = args
        decoder, rung = self.decoder, find_rung(self.decoder.impl)
        x_NK = x.reshape(-1, x.shape[-1])
        buffers = Buffers(zero_fill=rung.zero_fill, reuse=False)  # every result is autograd's to keep
        run = Run(decoder.config, rung, Shape(len(x_NK), 1, 0.0, None), buffers)
        return _Linear.apply(run, x_NK, weight_MK, bias_M).view(*x.shape[:-1], -1)
