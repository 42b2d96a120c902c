"""Keys and values kept between calls: a decoder's newest position without computing the earlier ones again.

Position t of a sequence lies in slot t mod T, so with T slots the keys of the newest T positions are there at any
time. Slot s then holds the position at distance (t − s) mod T, if that is not before the sequence's begin:

    score[s] = scale · (q · k_s + q · table[R − 1 − distance])

While t < T this is exactly what the decoder computes for the whole sequence. Beyond, it is another function than the
decoder on the newest T positions (it "rolls"): the keys and values of deeper blocks were computed when positions that
have since left were still seen.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ridgeline.errors import UnsupportedError
from ridgeline.models.decoder import Attention, Block, Decoder


class DecoderCache:
    """Runs a decoder one position at a time, for B sequences that are at the same position.

    Everything that changes from call to call is a tensor at a fixed address, so that a call can be captured in a CUDA
    graph.

    Args:
        decoder: in evaluation mode.
        batch: sequences (B).
        slots: positions that are seen at most (T); None for the decoder's context.
        rolls: whether more than T positions may come.

    Attributes:
        keys: for each block (B, T, G, D).
        values: likewise.
        position: int64[1], positions so far.

    Raises:
        UnsupportedError: a cache cannot do what the decoder does.
    """

    def __init__(self, decoder: Decoder, batch: int, slots: int | None = None, *, rolls: bool = False) -> None:
        c = decoder.config
        if decoder.training:
            raise UnsupportedError("a decoder in training mode has no cache; call its eval() first")
        if rolls and decoder.positions is not None:
            raise UnsupportedError("learned positions end with the context, so their cache cannot roll; use exact")
        self.decoder, self.slots = decoder, slots or c.context
        like = next(decoder.blocks.parameters())
        shape = (batch, self.slots, c.groups, c.head_dim)
        self.keys = [torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in decoder.blocks]
        self.values = [torch.zeros_like(key) for key in self.keys]
        self.position = torch.zeros(1, dtype=torch.int64, device=like.device)
        self._slot_T = torch.arange(self.slots, device=like.device)

    def step(self, x_BC: Tensor) -> Tensor:
        """The decoder's state (B, C) at the next position, whose input is `x_BC`."""
        distance_T = (self.position - self._slot_T).remainder(self.slots)
        future_T = distance_T > self.position
        if self.decoder.positions is not None:
            x_BC = x_BC + self.decoder.positions[self.position].to(x_BC.dtype)
        for layer, block in enumerate(self.decoder.blocks):
            assert isinstance(block, Block)
            mixed_BC = self._attend(block.attention, layer, block.norm_1(x_BC), distance_T, future_T)
            x_BC = block.behind(mixed_BC, x_BC)
        self.position += 1
        return self.decoder.norm(x_BC)

    def _attend(self, attention: Attention, layer: int, x_BC: Tensor, distance_T: Tensor, future_T: Tensor) -> Tensor:
        """What the newest position takes from all: (B, H·D)."""
        c, T = self.decoder.config, self.slots
        q_B1HD, k_B1GD, v_B1GD = attention.split(attention.qkv(x_BC)[:, None])
        slot = self.position.remainder(T)
        keys_BTGD = self.keys[layer].index_copy_(1, slot, k_B1GD)
        values_BTGD = self.values[layer].index_copy_(1, slot, v_B1GD)
        q_BGPD = q_B1HD.view(-1, c.groups, c.heads // c.groups, c.head_dim)  # P query heads share a key head
        scores_BGPT = q_BGPD @ keys_BTGD.permute(0, 2, 3, 1)
        if attention.relative is not None:
            table_TD = attention.relative[-T:].to(q_BGPD.dtype)
            scores_BGPT = scores_BGPT + (q_BGPD @ table_TD.t()).index_select(-1, T - 1 - distance_T)
        scores_BGPT = (scores_BGPT / math.sqrt(c.head_dim)).masked_fill(future_T, float("-inf"))
        return (scores_BGPT.softmax(-1) @ values_BTGD.transpose(1, 2)).flatten(1)

    def keep(self, rows: Tensor) -> None:
        """Go on with some of the sequences: `rows` is int64[B'] on the cache's device."""
        self.keys = [keys[rows] for keys in self.keys]
        self.values = [values[rows] for values in self.values]

    def clear(self) -> None:
        """Begin anew at position 0."""
        self.position.zero_()
