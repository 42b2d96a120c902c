"""Attention inside a block: a forward that remembers, a backward that writes one gradient of the joint projection."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ridgeline.models.config import DecoderConfig
from ridgeline.models.fused.choices import split_heads
from ridgeline.ops.attention import float32, plain, short
from ridgeline.ops.attention.reference import attention_reference
from ridgeline.ops.dropout import DropoutState

PLAIN_LEAST = (
    128  # positions from which the backward pass for any window was measured ahead with a key head for each head
)


@dataclass(frozen=True)
class Shape:
    """Samples, positions and the dropout of this pass (p is 0 outside training)."""

    B: int
    T: int
    p: float
    dropout: DropoutState | None

    @property
    def N(self) -> int:
        """Rows of a flattened (B · T) tensor."""
        return self.B * self.T


class AttentionGradients(NamedTuple):
    """Gradients of the joint projection, of the relative table, and fp32 partial sums over rows of the first."""

    dqkv_NQ: Tensor
    dtable_RD: Tensor | None
    partials_PQ: Tensor | None


class KernelAttention:
    """The short-window kernels (CUDA C++, Hopper): saves the projection, the output and each row's log-sum-exp."""

    def __init__(self, config: DecoderConfig, shape: Shape, site: int) -> None:
        self.config, self.shape = config, shape
        self.scale = 1 / math.sqrt(config.head_dim)
        self.drop = short.dropping(shape.p, shape.dropout if shape.p > 0 else None, site)

    def forward(self, qkv_NQ: Tensor, table_RD: Tensor | None) -> Tensor:
        """The mixed heads (N, H · D) of the joint projection (N, (H + 2 G) · D)."""
        c, s = self.config, self.shape
        self.heads = split_heads(c, qkv_NQ.view(s.B, s.T, -1))
        self.table_RD = table_RD
        self.mixed_NM = qkv_NQ.new_empty(s.N, c.heads * c.head_dim)
        self.lse_BHT = qkv_NQ.new_empty(s.B, c.heads, s.T, dtype=torch.float32)
        out_BTHD = self.mixed_NM.view(s.B, s.T, c.heads, c.head_dim)
        self._forward(out_BTHD)
        return self.mixed_NM

    def backward(self, dmixed_NM: Tensor, *, bias: bool) -> AttentionGradients:
        """Gradients of the joint projection, of the relative table, and partial sums for the projection's bias."""
        c, s = self.config, self.shape
        dqkv_NQ = dmixed_NM.new_empty(s.N, c.qkv_width)
        gradients = split_heads(c, dqkv_NQ.view(s.B, s.T, -1))
        dtable_RD = None if self.table_RD is None else torch.empty_like(self.table_RD, dtype=torch.float32)
        shaped = (s.B, s.T, c.heads, c.head_dim)
        forward = (*self.heads, self.table_RD, self.mixed_NM.view(shaped), self.lse_BHT)
        partials_PQ = self._backward((dmixed_NM.view(shaped), *forward, *gradients, dtable_RD), dqkv_NQ, bias)
        return AttentionGradients(dqkv_NQ, dtable_RD, partials_PQ)

    @property
    def _plain(self) -> bool:
        """Whether the kernels for any window serve this too, at the head width where they are faster."""
        return (
            self.config.head_dim == 32
            and not self.drop.threshold
            and plain.unsupported(*self.heads, self.table_RD) is None
        )

    def _forward(self, out_BTHD: Tensor) -> None:
        if self._plain:
            return plain.forward(*self.heads, out_BTHD, self.lse_BHT, scale=self.scale)
        short.forward(*self.heads, self.table_RD, out_BTHD, self.lse_BHT, scale=self.scale, drop=self.drop)

    def _backward(self, tensors: tuple[Any, ...], dqkv_NQ: Tensor, bias: bool) -> Tensor | None:
        if self._plain and (self.shape.T >= PLAIN_LEAST or self.config.groups == 1 < self.config.heads):
            return _plain_backward(self, tensors, dqkv_NQ, bias)
        q, k, _ = self.heads
        workspace = dqkv_NQ.new_empty(short.workspace_size(q, k, self.table_RD), dtype=torch.float32)
        partials_PQ = workspace.new_empty(short.column_sum_rows(q), dqkv_NQ.shape[1]) if bias else None
        short.backward(*tensors, workspace, scale=self.scale, drop=self.drop, column_sums=partials_PQ)  # type: ignore[misc, arg-type]
        return partials_PQ


def _plain_backward(attention: KernelAttention, tensors: tuple[Any, ...], dqkv_NQ: Tensor, bias: bool) -> Tensor | None:
    """The backward pass of the kernels for any window."""
    q, k, _ = attention.heads
    rows = plain.column_sum_rows(q, k) if bias else 0
    partials_PQ = dqkv_NQ.new_empty(rows, dqkv_NQ.shape[1], dtype=torch.float32) if bias else None
    plain.backward(*_without_table(tensors), scale=attention.scale, column_sums=partials_PQ)
    return partials_PQ


def _without_table(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a backward pass takes, but for the relative table and its gradient."""
    return (*tensors[:4], *tensors[5:10])


class TiledAttention(KernelAttention):
    """The portable Triton kernels: any window."""

    def _forward(self, out_BTHD: Tensor) -> None:
        from ridgeline.ops.attention import long  # imports Triton

        long.forward(*self.heads, self.table_RD, out_BTHD, self.lse_BHT, scale=self.scale, drop=self.drop)

    def _backward(self, tensors: tuple[Any, ...], dqkv_NQ: Tensor, bias: bool) -> Tensor | None:
        from ridgeline.ops.attention import long  # imports Triton

        long.backward(*tensors, scale=self.scale, drop=self.drop)
        return dqkv_NQ.sum(0, keepdim=True, dtype=torch.float32) if bias else None


class PlainAttention(KernelAttention):
    """The kernels for any window: no relative term, no dropout."""

    def _forward(self, out_BTHD: Tensor) -> None:
        plain.forward(*self.heads, out_BTHD, self.lse_BHT, scale=self.scale)

    def _backward(self, tensors: tuple[Any, ...], dqkv_NQ: Tensor, bias: bool) -> Tensor | None:
        return _plain_backward(self, tensors, dqkv_NQ, bias)


class FloatAttention(KernelAttention):
    """The short-window kernels in fp32: no relative term, no dropout."""

    def _forward(self, out_BTHD: Tensor) -> None:
        float32.forward(*self.heads, out_BTHD, self.lse_BHT, scale=self.scale)

    def _backward(self, tensors: tuple[Any, ...], dqkv_NQ: Tensor, bias: bool) -> Tensor | None:
        float32.backward(*_without_table(tensors), scale=self.scale)
        return dqkv_NQ.sum(0, keepdim=True) if bias else None


class ReferenceAttention:
    """Explicit attention, differentiated by autograd: any shape, any device, slow."""

    def __init__(self, config: DecoderConfig, shape: Shape, site: int) -> None:
        self.config, self.shape, self.site = config, shape, site

    def forward(self, qkv_NQ: Tensor, table_RD: Tensor | None) -> Tensor:
        """The mixed heads (N, H · D) of the joint projection (N, (H + 2 G) · D)."""
        c, s = self.config, self.shape
        self._qkv = qkv_NQ.detach().requires_grad_()
        self._table = None if table_RD is None else table_RD.detach().requires_grad_()
        with torch.enable_grad():
            q, k, v = split_heads(c, self._qkv.view(s.B, s.T, -1))
            self._out = attention_reference(
                q, k, v, self._table, scale=1 / math.sqrt(c.head_dim), p=s.p, dropout=s.dropout, site=self.site
            ).reshape(s.N, -1)
        self.mixed_NM = self._out.detach()
        return self.mixed_NM

    def backward(self, dmixed_NM: Tensor, *, bias: bool) -> AttentionGradients:
        """Gradients of the joint projection, of the relative table, and the sum for the projection's bias."""
        wanted = [self._qkv] if self._table is None else [self._qkv, self._table]
        grads = torch.autograd.grad(self._out, wanted, dmixed_NM)
        sums_1Q = grads[0].sum(0, keepdim=True, dtype=torch.float32) if bias else None
        return AttentionGradients(grads[0], grads[1] if self._table is not None else None, sums_1Q)


AttentionStep = KernelAttention | ReferenceAttention
ATTENTION: dict[str, type[KernelAttention] | type[ReferenceAttention]] = {
    "cuda": KernelAttention,
    "cuda-plain": PlainAttention,
    "cuda-fp32": FloatAttention,
    "triton": TiledAttention,
    "reference": ReferenceAttention,
}
