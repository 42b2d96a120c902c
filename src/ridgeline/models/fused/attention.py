"""Attention inside a block: a forward that remembers, a backward that writes one gradient of the projection."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ridgeline.models.config import DecoderConfig
from ridgeline.ops.attention.reference import attention_reference
from ridgeline.ops.dropout import DropoutState


class AttentionStep:
    """One layer's attention in one pass."""

    def __init__(
        self, config: DecoderConfig, impl: str, B: int, T: int, p: float, dropout: DropoutState | None, site: int
    ) -> None:
        self.config, self.impl, self.B, self.T = config, impl, B, T
        self.p, self.dropout, self.site = p, dropout, site

    def forward(self, qkv_NQ: Tensor, table_RD: Tensor | None) -> Tensor:
        """The mixed heads (N, H · D) of the joint projection (N, (H + 2 G) · D)."""
        self._qkv = qkv_NQ.detach().requires_grad_()
        self._table = None if table_RD is None else table_RD.detach().requires_grad_()
        c = self.config
        with torch.enable_grad():
            widths = [c.heads * c.head_dim, c.groups * c.head_dim, c.groups * c.head_dim]
            q, k, v = (
                x.view(self.B, self.T, -1, c.head_dim) for x in self._qkv.view(self.B, self.T, -1).split(widths, dim=-1)
            )
            self._out = attention_reference(
                q, k, v, self._table, scale=1 / math.sqrt(c.head_dim), p=self.p, dropout=self.dropout, site=self.site
            ).reshape(self.B * self.T, -1)
        self.mixed_NM = self._out.detach()
        return self.mixed_NM

    def backward(self, dmixed_NM: Tensor) -> tuple[Tensor, Tensor | None]:
        """Gradients of the joint projection and of the relative table."""
        wanted = [self._qkv] if self._table is None else [self._qkv, self._table]
        grads = torch.autograd.grad(self._out, wanted, dmixed_NM)
        return grads[0], grads[1] if self._table is not None else None
