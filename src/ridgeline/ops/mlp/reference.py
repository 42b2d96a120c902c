"""The halves of a pre-norm block around its two joins, as plain torch: the specification.

    mlp_half        h = norm(r), z = gelu(h Wupᵀ + b) Wdownᵀ, then join(r, z) with the norm that follows
    project_join    y = x Wᵀ, then join(residual, y): attention's output projection
    norm_project    y = norm(r) Wᵀ + b: the joint QKV projection

A join is r' = residual + dropout(branch + bias), rounded to its storage, and h' = norm(r').
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from ridgeline.ops.activation.reference import GeluKind, bias_gelu_reference
from ridgeline.ops.linear.reference import Masks
from ridgeline.ops.norm.reference import NormKind, norm_reference, residual_norm_reference


class Norm(NamedTuple):
    """A norm's kind, epsilon, scale and shift (None without one)."""

    kind: NormKind
    eps: float
    weight_C: Tensor
    bias_C: Tensor | None


class Mlp(NamedTuple):
    """An MLP's weights and biases (None without them), and its GELU."""

    up_FC: Tensor
    up_bias_F: Tensor | None
    down_CF: Tensor
    down_bias_C: Tensor | None
    gelu: GeluKind


def norm_of(x: Tensor, norm: Norm) -> Tensor:
    """The norm over the last axis."""
    return norm_reference(x, norm.weight_C, norm.bias_C, eps=norm.eps, kind=norm.kind)


def join_of(
    branch_NC: Tensor, bias_C: Tensor | None, residual_NC: Tensor | None, norm: Norm, masks: Masks | None
) -> tuple[Tensor, Tensor]:
    """(r', h') of rows n = sample · T + position."""
    N, C = branch_NC.shape
    T = masks.T if masks else N
    r_BTC, h_BTC = residual_norm_reference(
        branch_NC.view(-1, T, C), None if residual_NC is None else residual_NC.view(-1, T, C),
        norm.weight_C, norm.bias_C, eps=norm.eps, kind=norm.kind, branch_bias_C=bias_C,
        p=masks.p if masks else 0.0, dropout=masks.state if masks else None, site=masks.site if masks else 0,
    )  # fmt: skip
    return r_BTC.view(N, C), h_BTC.view(N, C)


def mlp_half_reference(
    r_NC: Tensor, norm: Norm, mlp: Mlp, next_norm: Norm, masks: Masks | None
) -> tuple[Tensor, Tensor]:
    """(r', h') of the MLP's half of a block."""
    u_NF = F.linear(norm_of(r_NC, norm), mlp.up_FC)
    a_NF = bias_gelu_reference(u_NF, mlp.up_bias_F, kind=mlp.gelu)
    return join_of(F.linear(a_NF, mlp.down_CF), mlp.down_bias_C, r_NC, next_norm, masks)


def project_join_reference(
    x_NK: Tensor, weight_CK: Tensor, bias_C: Tensor | None, residual_NC: Tensor, norm: Norm, masks: Masks | None
) -> tuple[Tensor, Tensor]:
    """(r', h') of a projection and its join."""
    return join_of(F.linear(x_NK, weight_CK), bias_C, residual_NC, norm, masks)


def norm_project_reference(r_NC: Tensor, norm: Norm, weight_QC: Tensor, bias_Q: Tensor | None) -> Tensor:
    """norm(r) Wᵀ + b."""
    return F.linear(norm_of(r_NC, norm), weight_QC, bias_Q)
