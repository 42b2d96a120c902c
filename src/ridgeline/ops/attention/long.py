"""Attention over windows of any length in Triton: launches that write into given buffers. Imports Triton."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ridgeline.ops._triton.support import Launch
from ridgeline.ops.attention import triton as kernels
from ridgeline.ops.attention.short import Dropping

TABLE_SHARES = 32  # programs that share the heads of one window of the table gradient


def default_launch(D: int, relative: bool) -> Launch:
    """Tiles that keep a program in registers: small ones where the skew's gather needs two more of them."""
    return Launch(rows=32, warps=4, stages=2) if relative else Launch(rows=64, warps=8 if D > 64 else 4, stages=2)


def _strides(*tensors_BTHD: Tensor) -> list[int]:
    return [stride for x in tensors_BTHD for stride in x.stride()[:3]]


def forward(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    table_RD: Tensor | None,
    out_BTHD: Tensor,
    lse_BHT: Tensor,
    *,
    scale: float,
    drop: Dropping,
    sweeps: int = 1,
    launch: Launch | None = None,
) -> None:
    """Attention's output and the natural log-sum-exp of each row's scaled scores.

    Args:
        q_BTHD, k_BTGD, v_BTGD: any strides with 1 as the last one.
        table_RD: contiguous, or None.
        out_BTHD: as q.
        lse_BHT: fp32, contiguous.
        scale: of the scores.
        drop: from `short.dropping`.
        sweeps: 1, or 2 to find each row's maximum and sum before the values are read.
        launch: rows of a (square) tile, warps and stages; `default_launch` where none is given.
    """
    B, T, H, D = q_BTHD.shape
    launch = launch or default_launch(D, table_RD is not None)
    kernels.forward_kernel[(triton.cdiv(T, launch.rows), B * H)](
        q_BTHD, k_BTGD, v_BTGD, table_RD, out_BTHD, lse_BHT, drop.seed_step, drop.site, drop.first_sample, scale,
        drop.kept, T, 0 if table_RD is None else table_RD.shape[0], H, *_strides(q_BTHD, k_BTGD, v_BTGD, out_BTHD),
        SHARE=H // k_BTGD.shape[2], D=D, THRESHOLD=drop.threshold, SWEEPS=sweeps, TILE=launch.rows,
        num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip


def backward(
    d_out_BTHD: Tensor,
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    table_RD: Tensor | None,
    out_BTHD: Tensor,
    lse_BHT: Tensor,
    dq_BTHD: Tensor,
    dk_BTGD: Tensor,
    dv_BTGD: Tensor,
    d_table_RD: Tensor | None,
    *,
    scale: float,
    drop: Dropping,
    launch: Launch | None = None,
) -> None:
    """All gradients of `forward`, in a fixed order of summation.

    Args:
        d_out_BTHD: gradient of the output.
        q_BTHD, k_BTGD, v_BTGD, table_RD, out_BTHD, lse_BHT: as in `forward`.
        dq_BTHD, dk_BTGD, dv_BTGD: gradients, any strides with 1 as the last one.
        d_table_RD: fp32; rows before the last T become zero.
        scale, drop, launch: as in `forward`.
    """
    B, T, H, D = q_BTHD.shape
    G, R = k_BTGD.shape[2], 0 if table_RD is None else table_RD.shape[0]
    launch = launch or default_launch(D, table_RD is not None)
    blocks = triton.cdiv(T, launch.rows)
    delta_BHT = torch.empty_like(lse_BHT)
    inputs = (q_BTHD, k_BTGD, v_BTGD)
    randomness = (drop.seed_step, drop.site, drop.first_sample, scale, drop.kept)
    options = {
        "SHARE": H // G, "D": D, "THRESHOLD": drop.threshold, "TILE": launch.rows, "num_warps": launch.warps,
        "num_stages": launch.stages,
    }  # fmt: skip
    kernels.query_gradient_kernel[(blocks, B * H)](
        *inputs, table_RD, out_BTHD, d_out_BTHD, lse_BHT, delta_BHT, dq_BTHD, *randomness, T, R, H,
        *_strides(*inputs, out_BTHD, d_out_BTHD, dq_BTHD), **options,
    )  # fmt: skip
    kernels.key_gradient_kernel[(blocks, B * G)](
        *inputs, table_RD, d_out_BTHD, lse_BHT, delta_BHT, dk_BTGD, dv_BTGD, *randomness, T, R, H,
        *_strides(*inputs, d_out_BTHD, dk_BTGD, dv_BTGD), **options,
    )  # fmt: skip
    if d_table_RD is not None:
        shares = min(TABLE_SHARES, B * H)
        parts = torch.empty(shares, blocks * launch.rows, D, device=q_BTHD.device)
        kernels.table_gradient_kernel[(blocks, shares)](
            *inputs, table_RD, d_out_BTHD, lse_BHT, delta_BHT, parts, *randomness, T, R, H, B * H,
            *_strides(*inputs, d_out_BTHD), **options | {"num_stages": 1},
        )  # fmt: skip
        d_table_RD.zero_()
        d_table_RD[-T:] = parts.sum(0)[:T].flip(0)
