"""Attention inside a block on a rung: with its scores and weights in memory, or swept over in tiles."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ridgeline.models.fused.choices import split_heads
from ridgeline.models.rungs.products import reduce_rows, tile_of
from ridgeline.models.rungs.run import Run
from ridgeline.ops.attention import long, materialised
from ridgeline.ops.attention.short import dropping
from ridgeline.ops.linear.tiled import product_raw
from ridgeline.ops.scope import scope


class Attention:
    """What both forms share. A forward pass takes the joint projection over; a backward pass spends all that is kept.

    Args:
        run: the pass.
        site: of the dropout of the weights.
    """

    def __init__(self, run: Run, site: int) -> None:
        self.run = run
        self.table_RD: Tensor | None = None
        self.scale = 1 / math.sqrt(run.config.head_dim)
        self.drop = dropping(run.shape.p, run.shape.dropout if run.dropping else None, site)

    def _table_gradient(self, dtable_RD: Tensor) -> None:
        """Takes an fp32 gradient of the relative table to where it goes."""
        assert self.table_RD is not None
        with self.run.gradient(self.table_RD) as (target_RD, add):
            target_RD.add_(dtable_RD) if add else target_RD.copy_(dtable_RD)
        self.run.buffers.done(dtable_RD)

    def _heads(self, joint_NQ: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s = self.run.shape
        return split_heads(self.run.config, joint_NQ.view(s.B, s.T, -1))


class SweptAttention(Attention):
    """Tiles of scores that never leave the chip: keeps the projection, the output and each row's log-sum-exp."""

    def forward(self, qkv_NQ: Tensor, table_RD: Tensor | None) -> Tensor:
        """The mixed heads (N, H · D) of the joint projection (N, (H + 2 G) · D)."""
        c, s, new = self.run.config, self.run.shape, self.run.buffers.new
        self.qkv_NQ, self.table_RD = qkv_NQ, table_RD
        self.mixed_NM = new(qkv_NQ, s.N, c.heads * c.head_dim)
        self.lse_BHT = new(qkv_NQ, s.B, c.heads, s.T, dtype=torch.float32)
        with scope("attention"):
            long.forward(
                *self._heads(qkv_NQ), table_RD, self.mixed_NM.view(s.B, s.T, c.heads, c.head_dim), self.lse_BHT,
                scale=self.scale, drop=self.drop, sweeps=2 if self.run.rung.attention == "two-sweep" else 1,
            )  # fmt: skip
        return self.mixed_NM

    def backward(self, dmixed_NM: Tensor) -> Tensor:
        """The gradient of the joint projection; that of the relative table goes its way."""
        c, s, buffers = self.run.config, self.run.shape, self.run.buffers
        dqkv_NQ = buffers.new(dmixed_NM, s.N, c.qkv_width)
        dtable_RD = None
        if self.table_RD is not None:
            dtable_RD = buffers.new(dmixed_NM, *self.table_RD.shape, dtype=torch.float32)
        shaped = (s.B, s.T, c.heads, c.head_dim)
        with scope("attention"):
            long.backward(
                dmixed_NM.view(shaped), *self._heads(self.qkv_NQ), self.table_RD, self.mixed_NM.view(shaped),
                self.lse_BHT, *self._heads(dqkv_NQ), dtable_RD, scale=self.scale, drop=self.drop,
            )  # fmt: skip
            if dtable_RD is not None:
                self._table_gradient(dtable_RD)
        buffers.done(self.qkv_NQ, self.lse_BHT)
        return dqkv_NQ


class MaterialisedAttention(Attention):
    """A product for each of S = Q Kᵀ and O = P V, heads copied apart and together, everything (T, T) in memory."""

    def forward(self, qkv_NQ: Tensor, table_RD: Tensor | None) -> Tensor:
        """The mixed heads (N, H · D) of the joint projection (N, (H + 2 G) · D)."""
        c, s, buffers = self.run.config, self.run.shape, self.run.buffers
        with scope("attention"):
            self.q, self.k, self.v = (self._apart(x) for x in self._heads(qkv_NQ))
            buffers.done(qkv_NQ)
            self.table_RD, r_UTT = table_RD, None
            if table_RD is not None:
                window_TD = table_RD[-s.T :]
                r_UTT = self._product(self.q, window_TD.t().expand(c.heads * s.B, -1, -1))
            s_UTT = self._product(self.q, self.k.transpose(1, 2))
            self.p_UTT = buffers.new(s_UTT, *s_UTT.shape)
            materialised.softmax_raw(s_UTT, r_UTT, self.p_UTT, self.scale)
            buffers.done(s_UTT, r_UTT)
            self.dropped_UTT = self._dropped(self.p_UTT)
            out_UTD = self._product(self.dropped_UTT, self.v)
            mixed_NM = buffers.new(qkv_NQ, s.N, c.heads * c.head_dim)
            mixed_NM.view(s.B, s.T, c.heads, -1).copy_(self._together(out_UTD))
            buffers.done(out_UTD)
        return mixed_NM

    def backward(self, dmixed_NM: Tensor) -> Tensor:
        """The gradient of the joint projection; that of the relative table goes its way."""
        c, s, buffers = self.run.config, self.run.shape, self.run.buffers
        with scope("attention"):
            do_UTD = self._apart(dmixed_NM.view(s.B, s.T, c.heads, c.head_dim))
            dv_UTD = self._product(self.dropped_UTT.transpose(1, 2), do_UTD)
            if self.dropped_UTT is not self.p_UTT:
                buffers.done(self.dropped_UTT)
            ddropped_UTT = self._product(do_UTD, self.v.transpose(1, 2))
            buffers.done(do_UTD, self.v)
            dp_UTT = self._dropped(ddropped_UTT)
            if dp_UTT is not ddropped_UTT:
                buffers.done(ddropped_UTT)
            ds_UTT = buffers.new(dp_UTT, *dp_UTT.shape)
            materialised.softmax_gradient_raw(self.p_UTT, dp_UTT, ds_UTT, self.scale)
            buffers.done(dp_UTT, self.p_UTT)
            dq_UTD = self._product(ds_UTT, self.k)
            dk_UTD = self._product(ds_UTT.transpose(1, 2), self.q)
        if self.table_RD is not None:
            self._relative(self.table_RD, ds_UTT, dq_UTD)
        buffers.done(ds_UTT, self.q, self.k)
        dqkv_NQ = buffers.new(dmixed_NM, s.N, c.qkv_width)
        with scope("attention"):
            for target, part in zip(self._heads(dqkv_NQ), (dq_UTD, dk_UTD, dv_UTD), strict=True):
                heads_BTHD = self._together(part)
                if target.shape[2] < c.heads:
                    heads_BTHD = heads_BTHD.unflatten(2, (target.shape[2], -1)).sum(3)
                target.copy_(heads_BTHD)
        buffers.done(dq_UTD, dk_UTD, dv_UTD)
        return dqkv_NQ

    def _relative(self, table_RD: Tensor, ds_UTT: Tensor, dq_UTD: Tensor) -> None:
        """The relative table's gradient; adds the relative term's part to the queries' gradient."""
        c, s, buffers = self.run.config, self.run.shape, self.run.buffers
        with scope("relative_table"):
            dr_UTT = buffers.new(ds_UTT, *ds_UTT.shape)
            materialised.unskew_raw(ds_UTT, dr_UTT)
            window_UTD = table_RD[-s.T :].expand(len(dr_UTT), -1, -1)
            product_raw(dr_UTT, window_UTD, dq_UTD, tile_of(self.run.rung), accumulate=True)
            dtable_RD = buffers.new(ds_UTT, *table_RD.shape, dtype=torch.float32)
            dtable_RD[: -s.T].zero_()
            by_head = (c.heads, s.N, -1)
            reduce_rows(self.run, dr_UTT.view(by_head), self.q.view(by_head), dtable_RD[-s.T :], accumulate=False)
            buffers.done(dr_UTT)
            self._table_gradient(dtable_RD)

    def _apart(self, x_BTGD: Tensor) -> Tensor:
        """A copy (H · B, T, D) of the heads, each key and value head for all its query heads."""
        c, s = self.run.config, self.run.shape
        G = x_BTGD.shape[2]
        out_UTD = self.run.buffers.new(x_BTGD, c.heads * s.B, s.T, c.head_dim)
        shared = x_BTGD.permute(2, 0, 1, 3)[:, None].expand(-1, c.heads // G, -1, -1, -1)
        out_UTD.view(G, c.heads // G, s.B, s.T, c.head_dim).copy_(shared)
        return out_UTD

    def _together(self, x_UTD: Tensor) -> Tensor:
        """The view (B, T, H, D) of heads that lie apart."""
        return x_UTD.unflatten(0, (self.run.config.heads, -1)).permute(1, 2, 0, 3)

    def _product(self, a_UMK: Tensor, b_UKN: Tensor) -> Tensor:
        out_UMN = self.run.buffers.new(a_UMK, *a_UMK.shape[:2], b_UKN.shape[2])
        product_raw(a_UMK, b_UKN, out_UMN, tile_of(self.run.rung))
        return out_UMN

    def _dropped(self, x_UTT: Tensor) -> Tensor:
        """Weights or their gradient behind the mask; themselves where nothing is dropped."""
        if self.drop.threshold == 0:
            return x_UTT
        out_UTT = self.run.buffers.new(x_UTT, *x_UTT.shape)
        by_head = (self.run.config.heads, self.run.shape.B, self.run.shape.T, self.run.shape.T)
        materialised.drop_raw(x_UTT.view(by_head), out_UTT.view(by_head), self.drop)
        return out_UTT


ATTENTION: dict[str, type[SweptAttention] | type[MaterialisedAttention]] = {
    "materialised": MaterialisedAttention,
    "two-sweep": SweptAttention,
    "one-sweep": SweptAttention,
}
