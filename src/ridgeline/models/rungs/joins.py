"""What stands between two products, in a rung's form: residual, dropout and norm; bias and GELU.

unfused     bias, dropout, residual addition, norm, GELU and each of their derivatives: a launch each
fused       bias, dropout, residual and norm in one kernel, its backward likewise; bias and GELU in one
epilogue    bias, dropout, residual and GELU in the product before, the norm alone; backward as fused, with GELU's
            derivative and the bias's column sums in the product
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.models.fused.joins import Join, Joined, Norm, Slopes
from ridgeline.models.fused.mlp import MlpWeights
from ridgeline.models.rungs.products import add_bias, bias_gradient, input_gradient, product, project, tile_of
from ridgeline.models.rungs.run import Run
from ridgeline.ops.activation import triton as activation
from ridgeline.ops.dropout.triton import dropout_raw
from ridgeline.ops.linear import Masks
from ridgeline.ops.linear.tiled import Epilogue, row_tiles
from ridgeline.ops.norm import triton as norms
from ridgeline.ops.scope import scope


class Hidden(NamedTuple):
    """The MLP's pre-activation (None where the backward pass repeats its product) and activation."""

    u_NF: Tensor | None
    a_NF: Tensor


def dropped(run: Run, x_NC: Tensor, site: int, *, leaves: bool = False) -> Tensor:
    """Dropout as a pass of its own, which is its own backward pass; x itself where nothing is dropped."""
    s = run.shape
    if not run.dropping:
        return x_NC
    assert s.dropout is not None
    out_NC = run.buffers.new(x_NC, *x_NC.shape, lasting=leaves)
    with scope("dropout"):
        dropout_raw(x_NC, out_NC, s.T, s.p, s.dropout, site)
    return out_NC


def _added(run: Run, x_NC: Tensor, y_NC: Tensor, *, leaves: bool = False) -> Tensor:
    out_NC = run.buffers.new(x_NC, *x_NC.shape, lasting=leaves)
    with scope("residual"):
        return torch.add(x_NC, y_NC, out=out_NC)


def _normed(run: Run, r_NC: Tensor, norm: Norm, *, leaves: bool = False, **joined: object) -> Joined:
    """The stream with its norm, which may leave the pass; with `joined`, r is a branch, and the kernel joins it too."""
    c, new = run.config, run.buffers.new
    h_NC = new(r_NC, *r_NC.shape, lasting=leaves)
    mean_N = new(r_NC, len(r_NC), dtype=torch.float32) if c.norm == "layernorm" else None
    rstd_N = new(r_NC, len(r_NC), dtype=torch.float32)
    if joined:
        joined["r_NC"] = new(r_NC, *r_NC.shape)
    with scope("norm"):
        norms.norm_forward_raw(
            r_NC, norm.weight_C, norm.bias_C, h_NC, mean_N, rstd_N, eps=c.norm_eps, kind=c.norm,
            **joined,  # type: ignore[arg-type]
        )  # fmt: skip
    return Joined(joined.get("r_NC", r_NC), h_NC, mean_N, rstd_N)  # type: ignore[arg-type]


def begin(run: Run, x_NC: Tensor, join: Join) -> Joined:
    """The stream's beginning: dropout of the input, which is not taken over, and the first norm."""
    s = run.shape
    if run.dropping and run.rung.pointwise != "unfused":
        return _normed(run, x_NC, join.norm, T=s.T, p=s.p, dropout=s.dropout, site=join.site)
    r_NC = dropped(run, x_NC, join.site) if run.dropping else run.buffers.new(x_NC, *x_NC.shape).copy_(x_NC)
    return _normed(run, r_NC, join.norm)


def branch(
    run: Run, name: str, x_NK: Tensor, weight_CK: Tensor, before_NC: Tensor, join: Join, *, leaves: bool = False
) -> Joined:
    """r = before + dropout(x Wᵀ + b), and its norm, which leaves the pass where it is the last."""
    s, form, bias_C = run.shape, run.rung.pointwise, join.branch_bias_C
    if form == "epilogue":
        masks = Masks(s.p, s.dropout, join.site, s.T) if s.dropout is not None and run.dropping else None
        epilogue = Epilogue(bias_N=bias_C, residual_MN=before_NC, masks=masks)
        return _normed(run, product(run, name, x_NK, weight_CK, epilogue), join.norm, leaves=leaves)
    y_NC = product(run, name, x_NK, weight_CK)
    if form == "fused":
        joined = _normed(
            run, y_NC, join.norm, leaves=leaves, residual_NC=before_NC, branch_bias_C=bias_C,
            T=s.T, p=s.p, dropout=s.dropout if run.dropping else None, site=join.site,
        )  # fmt: skip
    else:
        y_NC = add_bias(run, name, y_NC, bias_C)
        kept_NC = dropped(run, y_NC, join.site)
        joined = _normed(run, _added(run, before_NC, kept_NC), join.norm, leaves=leaves)
        if kept_NC is not y_NC:
            run.buffers.done(kept_NC)
    run.buffers.done(y_NC)
    return joined


def backward(
    run: Run, joined: Joined, join: Join, dh_NC: Tensor, dresidual_NC: Tensor | None, *, leaves: bool = False
) -> Slopes:
    """The gradients behind a `branch`'s sum or a `begin`, whose dbranch leaves the pass.

    Spends the stream and its statistics, not its norm.
    """
    s, new, norm = run.shape, run.buffers.new, join.norm
    fused = run.rung.pointwise != "unfused"
    N, C = dh_NC.shape
    small = [w for w in (norm.weight_C, norm.bias_C, join.branch_bias_C if fused else None) if w is not None]
    partials = new(dh_NC, norms.partial_rows(N, C, dh_NC), len(small) * C, dtype=torch.float32)
    apart = fused and run.dropping  # two results, of which the second leaves
    dr_NC = new(dh_NC, N, C, lasting=leaves and fused and not apart)
    dbranch_NC = new(dh_NC, N, C, lasting=leaves) if apart else dr_NC
    with scope("norm"):
        norms.norm_backward_raw(
            dh_NC, joined.r_NC, norm.weight_C, joined.mean_N, joined.rstd_N, partials, kind=run.config.norm,
            bias=norm.bias_C is not None, branch_bias=fused and join.branch_bias_C is not None,
            dresidual_NC=dresidual_NC if fused else None, dr_NC=dr_NC,
            dbranch_NC=dbranch_NC if apart else None, T=s.T, p=s.p,
            dropout=s.dropout if apart else None, site=join.site,
        )  # fmt: skip
    for place, weight in enumerate(small):
        bias_gradient(run, weight, partials[:, place * C : (place + 1) * C])
    run.buffers.done(partials, joined.r_NC, joined.mean_N, joined.rstd_N)
    if fused:
        return Slopes(dr_NC, dbranch_NC)
    if dresidual_NC is not None:
        alone_NC, dr_NC = dr_NC, _added(run, dr_NC, dresidual_NC, leaves=leaves and not run.dropping)
        run.buffers.done(alone_NC)
    dbranch_NC = dropped(run, dr_NC, join.site, leaves=leaves)
    bias_gradient(run, join.branch_bias_C, dbranch_NC)
    return Slopes(dr_NC, dbranch_NC)


def _before_gelu(run: Run, h_NC: Tensor, mlp: MlpWeights) -> Tensor:
    """h Wᵀ + b; under "fused" without the bias, which goes with GELU."""
    if run.rung.pointwise == "fused":
        return product(run, "mlp_up", h_NC, mlp.up_FC)
    return project(run, "mlp_up", h_NC, mlp.up_FC, mlp.up_bias_F)


def hidden(run: Run, h_NC: Tensor, mlp: MlpWeights) -> Hidden:
    """The MLP's inside: u = h Wᵀ + b and gelu(u)."""
    kind, rung, buffers = run.config.gelu, run.rung, run.buffers
    if rung.pointwise == "epilogue":
        u_NF = None if rung.recompute else buffers.new(h_NC, h_NC.shape[0], mlp.up_FC.shape[0])
        epilogue = Epilogue(bias_N=mlp.up_bias_F, gelu=kind, pre_MN=u_NF)
        return Hidden(u_NF, product(run, "mlp_up", h_NC, mlp.up_FC, epilogue))
    u_NF = _before_gelu(run, h_NC, mlp)
    a_NF = buffers.new(u_NF, *u_NF.shape)
    with scope("gelu"):
        within = mlp.up_bias_F if rung.pointwise == "fused" else None
        activation.bias_gelu_forward_raw(u_NF, within, a_NF, kind=kind)
    if not rung.recompute:
        return Hidden(u_NF, a_NF)
    buffers.done(u_NF)
    return Hidden(None, a_NF)


def hidden_backward(run: Run, dz_NC: Tensor, h_NC: Tensor, u_NF: Tensor | None, mlp: MlpWeights) -> Tensor:
    """The gradient of u, given that of the MLP's output. Spends u."""
    kind, form, new = run.config.gelu, run.rung.pointwise, run.buffers.new
    u_NF = _before_gelu(run, h_NC, mlp) if u_NF is None else u_NF
    N, F = u_NF.shape
    sums_PF = None
    if form == "epilogue":
        sums_PF = new(dz_NC, row_tiles(N, tile_of(run.rung)), F, dtype=torch.float32)
        epilogue = Epilogue(gelu=kind, gelu_input_MN=u_NF, sums_PN=sums_PF)
        du_NF = input_gradient(run, "mlp_down", dz_NC, mlp.down_CF, epilogue)
    else:
        da_NF, du_NF = input_gradient(run, "mlp_down", dz_NC, mlp.down_CF), new(u_NF, N, F)
        within = mlp.up_bias_F if form == "fused" else None
        if within is not None:
            sums_PF = new(u_NF, activation.partial_rows(N, F, u_NF), F, dtype=torch.float32)
        with scope("gelu"):
            activation.bias_gelu_backward_raw(da_NF, u_NF, within, du_NF, sums_PF, kind=kind)
        run.buffers.done(da_NF)
    bias_gradient(run, mlp.up_bias_F, du_NF if sums_PF is None else sums_PF)
    run.buffers.done(sums_PF, u_NF)
    return du_NF
