"""The MLP inside a block: up, bias, GELU and down, with the activation's derivative on the way back."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.models.fused.gradients import Side, column_gradients
from ridgeline.ops.activation import triton as activation
from ridgeline.ops.linear import GeluKind, products


class Hidden(NamedTuple):
    """What the MLP saves: pre-activation (bias added under "cuda", not yet under "torch") and activation."""

    u_NF: Tensor
    a_NF: Tensor


def hidden_forward(h_NC: Tensor, up_FC: Tensor, bias_F: Tensor | None, gelu: GeluKind, impl: str) -> Hidden:
    """u = h Wupᵀ and a = gelu(u + b)."""
    u_NF = h_NC.new_empty(h_NC.shape[0], up_FC.shape[0])
    a_NF = torch.empty_like(u_NF)
    if impl == "cuda":
        products.forward_raw(h_NC, up_FC, a_NF, bias_M=bias_F, gelu=gelu, pre_NM=u_NF, impl="cuda")
    else:
        torch.mm(h_NC, up_FC.t(), out=u_NF)
        activation.bias_gelu_forward_raw(u_NF, bias_F, a_NF, kind=gelu)
    return Hidden(u_NF, a_NF)


def hidden_backward(
    dz_NC: Tensor, down_CF: Tensor, hidden: Hidden, bias_F: Tensor | None, gelu: GeluKind, impl: str, side: Side
) -> tuple[Tensor, Tensor | None]:
    """du = (dz Wdown) · gelu'(u + b), and the gradient of b where there is one."""
    du_NF = torch.empty_like(hidden.u_NF)
    if impl == "cuda":
        partials = products.input_gradient_raw(dz_NC, down_CF, du_NF, pre_NK=hidden.u_NF, gelu=gelu, impl="cuda")
        assert partials is not None
        return du_NF, None if bias_F is None else side.run(column_gradients, partials, [bias_F])[0]
    torch.mm(dz_NC, down_CF, out=du_NF)
    partials = None
    if bias_F is not None:
        rows = activation.partial_rows(du_NF.shape[0], du_NF.shape[1], du_NF)
        partials = du_NF.new_empty(rows, du_NF.shape[1], dtype=torch.float32)
    activation.bias_gelu_backward_raw(du_NF, hidden.u_NF, bias_F, du_NF, partials, kind=gelu)
    return du_NF, None if partials is None or bias_F is None else side.run(column_gradients, partials, [bias_F])[0]
