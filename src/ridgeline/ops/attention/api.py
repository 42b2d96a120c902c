"""The public function of attention: checks, and the choice of an implementation.

reference   explicit, in the inputs' dtype, any device (reference.py)
torch       F.scaled_dot_product_attention; a relative term becomes its attn_mask, grouped heads are expanded.
            SDPA draws dropout masks of its own, so with p > 0 the reference's formula is used with the mask of the
            specification
cuda        CUDA C++ for short windows on Hopper (short.py)
cuda-plain  CUDA C++ for any window on Hopper, without a relative term or dropout (plain.py)
cuda-fp32   CUDA C++ for short windows in IEEE fp32, without a relative term or dropout (float32.py)
triton      any window on cards from sm_80 on, one sweep over the keys (long.py, triton.py). On an H200 ahead of
            PyTorch's kernels wherever gradients are wanted in one joint buffer: theirs come apart and must be copied
triton-two-sweep   the same with two sweeps forward: maximum and sum of each row first
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.errors import UnsupportedError, nearest
from ridgeline.ops import checks
from ridgeline.ops._triton.support import triton_missing
from ridgeline.ops.attention import float32, plain, short
from ridgeline.ops.attention.reference import attention_reference, skew
from ridgeline.ops.dropout import DropoutState, check_dropping

IMPLEMENTATIONS = ("reference", "torch", "cuda", "cuda-plain", "cuda-fp32", "triton", "triton-two-sweep")
TRITON_WIDTHS = (16, 32, 64, 128)


def available(impl: str, q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, table_RD: Tensor | None = None) -> str | None:
    """Why `impl` cannot serve tensors such as these, or None when it can."""
    if impl not in IMPLEMENTATIONS:
        return nearest(impl, IMPLEMENTATIONS, "implementation")
    if impl.startswith("cuda"):
        kernels = {"cuda": short, "cuda-plain": plain, "cuda-fp32": float32}[impl]
        return kernels.unsupported(q_BTHD, k_BTGD, v_BTGD, table_RD)
    if impl.startswith("triton"):
        return _triton_unsupported(q_BTHD, k_BTGD, v_BTGD, table_RD)
    return None


def _triton_unsupported(*tensors: Tensor | None) -> str | None:
    q_BTHD = tensors[0]
    assert q_BTHD is not None
    reason = triton_missing(q_BTHD.device)
    if reason is None and q_BTHD.shape[3] not in TRITON_WIDTHS:
        reason = f"takes head widths {TRITON_WIDTHS}, got {q_BTHD.shape[3]}"
    if reason is None and any(x is not None and x.stride(-1) != 1 for x in tensors):
        reason = f"needs tensors with last stride 1, got {[x.stride() for x in tensors if x is not None]}"
    return reason


def _check(q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, table_RD: Tensor | None, scale: float) -> None:
    checks.floats(q=q_BTHD)
    if q_BTHD.dim() != 4 or k_BTGD.dim() != 4 or k_BTGD.shape != v_BTGD.shape:
        raise UnsupportedError(
            "q must be (B, T, H, D), k and v (B, T, G, D); got shapes "
            f"{tuple(q_BTHD.shape)}, {tuple(k_BTGD.shape)}, {tuple(v_BTGD.shape)}"
        )
    B, T, H, D = q_BTHD.shape
    G = k_BTGD.shape[2]
    if k_BTGD.shape != (B, T, G, D) or min(G, H) == 0 or H % G:
        raise UnsupportedError(
            f"k and v must be ({B}, {T}, G, {D}) with G a divisor of {H} heads, got {tuple(k_BTGD.shape)}"
        )
    if table_RD is not None and (table_RD.dim() != 2 or table_RD.shape[0] < T or table_RD.shape[1] != D):
        raise UnsupportedError(f"table must be (R, {D}) with R at least T = {T}, got {tuple(table_RD.shape)}")
    if not 0 < scale < math.inf:  # kernels take a row's largest score before they scale it
        raise UnsupportedError(f"scale must be positive and finite, got {scale}")
    for name, x in (("k", k_BTGD), ("v", v_BTGD), ("table", table_RD)):
        if x is not None and (x.device != q_BTHD.device or x.dtype != q_BTHD.dtype):
            raise UnsupportedError(
                f"{name} must be {q_BTHD.dtype} on {q_BTHD.device} as q is, got {x.dtype} on {x.device}"
            )


def _torch_attention(q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, table_RD: Tensor | None, scale: float) -> Tensor:
    T, share = q_BTHD.shape[1], q_BTHD.shape[2] // k_BTGD.shape[2]
    q_BHTD, k_BHTD, v_BHTD = (x.transpose(1, 2) for x in (q_BTHD, k_BTGD, v_BTGD))
    if share > 1:
        k_BHTD, v_BHTD = (x.repeat_interleave(share, dim=1) for x in (k_BHTD, v_BHTD))
    if table_RD is None:
        out_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True, scale=scale)
    else:
        future = torch.ones(T, T, dtype=torch.bool, device=q_BTHD.device).triu(1)
        bias_BHTT = (skew(q_BHTD @ table_RD[-T:].t()) * scale).masked_fill(future, float("-inf"))
        out_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, attn_mask=bias_BHTT, scale=scale)
    return out_BHTD.transpose(1, 2)


def attention(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    table_RD: Tensor | None = None,
    *,
    scale: float,
    p: float = 0.0,
    dropout: DropoutState | None = None,
    site: int = 0,
    impl: str = "reference",
) -> Tensor:
    """Causal attention, as `attention_reference` defines it.

    Args:
        q_BTHD: queries.
        k_BTGD, v_BTGD: keys and values; H / G consecutive query heads share one of theirs.
        table_RD: position table of the relative term, R ≥ T; its last row belongs to distance 0. None for none.
        scale: of the scores, positive and finite.
        p: probability of dropping an attention weight, from 0 to 1 − 2⁻¹⁵, kept to 15 bits.
        dropout: what the step draws its masks from; None drops nothing.
        site: the place of this dropout in the model.
        impl: one of IMPLEMENTATIONS.

    Returns:
        (B, T, H, D) in q's dtype.

    Raises:
        UnsupportedError: the implementation cannot run here, or a shape, dtype, stride or device it does not take.
    """
    _check(q_BTHD, k_BTGD, v_BTGD, table_RD, scale)
    check_dropping(p, dropout, q_BTHD.device)
    reason = available(impl, q_BTHD, k_BTGD, v_BTGD, table_RD)
    if reason is not None:
        raise UnsupportedError(f"impl={impl!r} cannot run: {reason}")
    drop = short.dropping(p, dropout, site)
    if impl.startswith("triton"):
        from ridgeline.ops.attention.function import LongWindow

        sweeps = 2 if impl == "triton-two-sweep" else 1
        return LongWindow.apply(q_BTHD, k_BTGD, v_BTGD, table_RD, scale, drop, sweeps)
    if impl in ("cuda-plain", "cuda-fp32"):
        from ridgeline.ops.attention.function import PlainWindow

        if drop.threshold:
            raise UnsupportedError(f"impl={impl!r} cannot run: has no dropout")
        kernels = plain if impl == "cuda-plain" else float32
        return PlainWindow.apply(kernels, q_BTHD, k_BTGD, v_BTGD, scale)
    if impl == "cuda":
        from ridgeline.ops.attention.function import ShortWindow

        return ShortWindow.apply(q_BTHD, k_BTGD, v_BTGD, table_RD, scale, drop)
    if impl == "torch" and (dropout is None or p == 0):
        return _torch_attention(q_BTHD, k_BTGD, v_BTGD, table_RD, scale)
    return attention_reference(q_BTHD, k_BTGD, v_BTGD, table_RD, scale=scale, p=p, dropout=dropout, site=site)
