"""Every kernel of a hal-20m block alone, in either form: µs in turns from cold clocks, µs and millijoules at the power
limit. Checks of each kernel are gemm_gpu.py's and fused_gpu.py's.

    PYTHONPATH=src:dev/gpu OUT=… python3 dev/gpu/hal_gpu.py [seconds] [part of a name …]      ($OUT/hal.json)
"""

import json
import os
import sys
import time

import torch
from gemm_gpu import graph_of, hot, in_turns

from ridgeline.models.config import DecoderConfig
from ridgeline.models.fused.attention import KernelAttention, Shape
from ridgeline.ops.dropout import DropoutState
from ridgeline.ops.linear import Masks, products
from ridgeline.ops.linear.folded import FoldedNorm
from ridgeline.ops.linear.folded_triton import folded_gradient_raw
from ridgeline.ops.norm import triton as norms

B, T, C, F, Q, P = 512, 256, 512, 2048, 1536, 0.2
N, BF, DEV = B * T, torch.bfloat16, "cuda"
FLOPS, BYTES = 800e12, 4.2e12
CONFIG = DecoderConfig(layers=6, width=C, heads=8, positions="relative", position_table=1024, dropout=P)


def draw(*shape, scale=1.0):
    return (torch.randn(*shape, device=DEV) * scale).to(BF)


class Block:
    """A block's tensors, in the sizes of numbers that training has."""

    def __init__(self):
        torch.manual_seed(0)
        self.r, self.h, self.z = draw(N, C), draw(N, C), draw(N, C)
        self.a = torch.nn.functional.gelu(draw(N, F))
        self.slope = products.slope_empty(self.a, N, F).uniform_(-0.1, 1.1)
        self.qkv, self.dqkv = draw(N, Q), draw(N, Q, scale=1e-3)
        self.du, self.dh, self.dr = draw(N, F, scale=1e-3), draw(N, C, scale=1e-3), draw(N, C, scale=1e-3)
        self.out, self.out2 = torch.empty_like(self.r), torch.empty_like(self.r)
        self.wide = torch.empty_like(self.a)
        self.w = {key: draw(m, k, scale=k**-0.5) for key, m, k in (("qkv", Q, C), ("out", C, C), ("up", F, C), ("down", C, F))}
        self.bias, self.scale, self.shift = draw(F), 1 + draw(C, scale=0.1), draw(C, scale=0.1)
        self.mean, self.rstd = torch.zeros(N, device=DEV), torch.ones(N, device=DEV)
        self.folded = FoldedNorm("layernorm", 1e-5, self.scale, self.shift, torch.rand(8, N, 2, device=DEV) + 64, self.mean, self.rstd)
        self.state = DropoutState(torch.tensor([5, 9], device=DEV), 3)
        self.masks = Masks(P, self.state, 2, T)
        self.gradient = torch.empty(F, C, device=DEV)
        self.partials = torch.empty(norms.partial_rows(N, C, self.r), 3 * C, device=DEV)
        self.drop = {"T": T, "p": P, "dropout": self.state, "site": 2}
        self.attention = KernelAttention(CONFIG, Shape(B, T, P, self.state), 1)
        self.attention.forward(self.qkv, draw(CONFIG.table_rows, 64))


def kernels(b):
    """name: (what to call, floor in µs)."""
    floor = lambda flops=0, rows=0: max(flops / FLOPS, rows * N * 2 / BYTES) * 1e6
    mm = lambda m, k: 2 * N * m * k
    forward, back = products.forward_raw, products.input_gradient_raw
    norm = lambda **o: norms.norm_forward_raw(b.r, b.scale, b.shift, b.h, b.mean, b.rstd, eps=1e-5, kind="layernorm", **o)
    join = lambda z=b.z, r=b.r, o=b.out, h=b.h, m=b.mean, s=b.rstd: norms.norm_forward_raw(
        z, b.scale, b.shift, h, m, s, eps=1e-5, kind="layernorm", r_NC=o, residual_NC=r, branch_bias_C=b.bias[:C], **b.drop)
    grad = lambda dh=b.dh, r=b.r, dr=b.dr, o=b.out, o2=b.out2, m=b.mean, s=b.rstd, p=b.partials, **more: norms.norm_backward_raw(
        dh, r, b.scale, m, s, p, kind="layernorm", bias=True, branch_bias=True, dresidual_NC=dr, dr_NC=o, dbranch_NC=o2, **b.drop, **more)
    wgrad = lambda dy, x: torch.mm(dy.t(), x, out_dtype=torch.float32, out=b.gradient[: dy.shape[1], : x.shape[1]]) if x.shape[1] == C else torch.mm(
        dy.t(), x, out_dtype=torch.float32, out=b.gradient.view(C, F))
    sums = back(b.z, b.w["down"], b.wide, slope_NK=b.slope, norm=b.folded, impl="cuda")
    found = {
        "qkv": (lambda: forward(b.h, b.w["qkv"], b.qkv, bias_M=b.bias[:Q], impl="cuda"), floor(mm(Q, C), 4 * C)),
        "attention forward": (lambda: b.attention._forward(b.attention.mixed_NM.view(B, T, 8, 64)), floor(rows=4 * C)),
        "out residual": (lambda: forward(b.h, b.w["out"], b.out, bias_M=b.bias[:C], residual_NM=b.r, masks=b.masks, impl="cuda"), floor(mm(C, C), 3 * C)),
        "out folded": (lambda: forward(b.h, b.w["out"], b.out, bias_M=b.bias[:C], residual_NM=b.r, masks=b.masks, norm=b.folded, impl="cuda"), floor(mm(C, C), 3 * C)),
        "norm": (norm, floor(rows=2 * C)),
        "up": (lambda: forward(b.h, b.w["up"], b.wide, bias_M=b.bias, gelu="exact", slope_NM=b.slope, impl="cuda"), floor(mm(F, C), C + 2 * F)),
        "up folded": (lambda: forward(b.h, b.w["up"], b.wide, bias_M=b.bias, gelu="exact", slope_NM=b.slope, norm=b.folded, impl="cuda"), floor(mm(F, C), C + 2 * F)),
        "down": (lambda: torch.mm(b.a, b.w["down"].t(), out=b.z), floor(mm(C, F), C + F)),
        "join": (join, floor(rows=4 * C)),
        "dgelu": (lambda: back(b.dr, b.w["down"], b.wide, slope_NK=b.slope, impl="cuda"), floor(mm(F, C), C + 2 * F)),
        "dgelu folded": (lambda: back(b.dr, b.w["down"], b.wide, slope_NK=b.slope, norm=b.folded, impl="cuda"), floor(mm(F, C), C + 2 * F)),
        "wgrad down": (lambda: wgrad(b.dr, b.a), floor(mm(F, C), C + F)),
        "wgrad up": (lambda: wgrad(b.du, b.h), floor(mm(F, C), C + F)),
        "fold's last step": (lambda: folded_gradient_raw(b.gradient, sums, b.folded, torch.empty_like(b.gradient), b.mean[:F], add_weight=False, add_bias=False), 2),
        "dx up": (lambda: torch.mm(b.du, b.w["up"], out=b.dh), floor(mm(C, F), C + F)),
        "norm backward": (grad, floor(rows=5 * C)),
        "norm backward divided": (lambda: grad(divided=True), floor(rows=5 * C)),
        "wgrad out": (lambda: wgrad(b.dr, b.h), floor(mm(C, C), 2 * C)),
        "dx out": (lambda: back(b.dr, b.w["out"], b.out, impl="cuda"), floor(mm(C, C), 2 * C)),
        "attention backward": (lambda: b.attention.backward(b.dr, bias=True), floor(rows=8 * C)),
        "wgrad qkv": (lambda: wgrad(b.dqkv, b.h), floor(mm(Q, C), C + Q)),
        "dx qkv": (lambda: torch.mm(b.dqkv, b.w["qkv"], out=b.dh), floor(mm(Q, C), C + Q)),
    }
    return found


if __name__ == "__main__":
    end = time.time() + float(sys.argv[1] if len(sys.argv) > 1 else 60)
    table = {name: row for name, row in kernels(Block()).items() if not sys.argv[2:] or any(part in name for part in sys.argv[2:])}
    graphs = {}
    for name, (step, _) in table.items():
        try:
            graphs[name] = graph_of(step, 4)
        except Exception as error:
            print(name, "FAILED", repr(error)[:200], flush=True)
    found = {}
    for name, us in in_turns(graphs, 4).items():
        found[name] = {"us": round(us[len(us) // 2], 1), "best": round(us[0], 1), "floor": round(table[name][1], 1)}
        if time.time() < end - 2:
            ms, energy = hot(graphs[name], 0.3)
            found[name] |= {"hot": round(ms / 4 * 1e3, 1), "mJ": round(energy / 4 * 1e3, 1)}
        print(f"{name:24}", found[name], flush=True)
    with open(f"{os.environ.get('OUT', '/tmp')}/hal.json", "w") as file:
        json.dump(found, file)
