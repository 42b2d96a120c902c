"""The attention kernels as autograd functions."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ridgeline.ops.attention import short


def _like(*tensors: Tensor) -> list[Tensor]:
    """Contiguous tensors of the same shapes."""
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in tensors]


class LongWindow(torch.autograd.Function):
    """The Triton kernels, any window."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BTHD: Tensor,
        k_BTGD: Tensor,
        v_BTGD: Tensor,
        table_RD: Tensor | None,
        scale: float,
        drop: short.Dropping,
        sweeps: int,
    ) -> Tensor:
        from ridgeline.ops.attention import long

        B, T, H, _ = q_BTHD.shape
        (out_BTHD,) = _like(q_BTHD)
        lse_BHT = torch.empty(B, H, T, device=q_BTHD.device)
        table_RD = None if table_RD is None else table_RD.contiguous()
        long.forward(q_BTHD, k_BTGD, v_BTGD, table_RD, out_BTHD, lse_BHT, scale=scale, drop=drop, sweeps=sweeps)
        ctx.save_for_backward(q_BTHD, k_BTGD, v_BTGD, table_RD, out_BTHD, lse_BHT)
        ctx.scale, ctx.drop = scale, drop
        return out_BTHD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out_BTHD: Tensor) -> tuple[Tensor | None, ...]:
        from ridgeline.ops.attention import long

        q_BTHD, k_BTGD, v_BTGD, table_RD, out_BTHD, lse_BHT = ctx.saved_tensors
        dq_BTHD, dk_BTGD, dv_BTGD = _like(q_BTHD, k_BTGD, v_BTGD)
        d_table_RD = None if table_RD is None else torch.empty(table_RD.shape, device=table_RD.device)
        long.backward(
            d_out_BTHD.contiguous(), q_BTHD, k_BTGD, v_BTGD, table_RD, out_BTHD, lse_BHT,
            dq_BTHD, dk_BTGD, dv_BTGD, d_table_RD, scale=ctx.scale, drop=ctx.drop,
        )  # fmt: skip
        d_table = None if d_table_RD is None else d_table_RD.to(table_RD.dtype)
        return dq_BTHD, dk_BTGD, dv_BTGD, d_table, None, None, None


class ShortWindow(torch.autograd.Function):
    """The CUDA C++ kernels for short windows."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BTHD: Tensor,
        k_BTGD: Tensor,
        v_BTGD: Tensor,
        table_RD: Tensor | None,
        scale: float,
        drop: short.Dropping,
    ) -> Tensor:
        B, T, H, _ = q_BTHD.shape
        (out_BTHD,) = _like(q_BTHD)
        lse_BHT = torch.empty(B, H, T, device=q_BTHD.device)
        short.forward(q_BTHD, k_BTGD, v_BTGD, table_RD, out_BTHD, lse_BHT, scale=scale, drop=drop)
        ctx.save_for_backward(q_BTHD, k_BTGD, v_BTGD, table_RD, out_BTHD, lse_BHT)
        ctx.scale, ctx.drop = scale, drop
        return out_BTHD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out_BTHD: Tensor) -> tuple[Tensor | None, ...]:
        q_BTHD, k_BTGD, v_BTGD, table_RD, out_BTHD, lse_BHT = ctx.saved_tensors
        dq_BTHD, dk_BTGD, dv_BTGD = _like(q_BTHD, k_BTGD, v_BTGD)
        d_table_RD = None if table_RD is None else torch.empty(table_RD.shape, device=table_RD.device)
        workspace = torch.empty(short.workspace_size(q_BTHD, k_BTGD, table_RD), device=q_BTHD.device)
        short.backward(
            d_out_BTHD.contiguous(), q_BTHD, k_BTGD, v_BTGD, table_RD, out_BTHD, lse_BHT,
            dq_BTHD, dk_BTGD, dv_BTGD, d_table_RD, workspace, scale=ctx.scale, drop=ctx.drop,
        )  # fmt: skip
        d_table = None if d_table_RD is None else d_table_RD.to(table_RD.dtype)
        return dq_BTHD, dk_BTGD, dv_BTGD, d_table, None, None


class PlainWindow(torch.autograd.Function):
    """CUDA C++ kernels without a relative term or dropout: those of the module `kernels`."""

    @staticmethod
    def forward(ctx: Any, kernels: ModuleType, q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, scale: float) -> Tensor:
        B, T, H, _ = q_BTHD.shape
        (out_BTHD,) = _like(q_BTHD)
        lse_BHT = torch.empty(B, H, T, device=q_BTHD.device)
        kernels.forward(q_BTHD, k_BTGD, v_BTGD, out_BTHD, lse_BHT, scale=scale)
        ctx.save_for_backward(q_BTHD, k_BTGD, v_BTGD, out_BTHD, lse_BHT)
        ctx.kernels, ctx.scale = kernels, scale
        return out_BTHD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out_BTHD: Tensor) -> tuple[Tensor | None, ...]:
        q_BTHD, k_BTGD, v_BTGD, out_BTHD, lse_BHT = ctx.saved_tensors
        gradients = _like(q_BTHD, k_BTGD, v_BTGD)
        ctx.kernels.backward(
            d_out_BTHD.contiguous(), q_BTHD, k_BTGD, v_BTGD, out_BTHD, lse_BHT, *gradients, scale=ctx.scale
        )
        return None, *gradients, None
