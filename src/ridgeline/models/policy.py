"""A controller policy: what the game shows and the previous controller in, autoregressive heads out.

The heads follow Eric Gu's HAL: each is LayerNorm → Linear → GELU → Linear on the trunk's state and what the
earlier heads said. By default they hear the earlier heads' raw logits, detached: no teacher forcing, so the parts
of a sampled controller are independent given the state. With conditioning="classes" they hear the chosen class:
the target's in training, the sampled one at play.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.models.config import PolicyConfig
from ridgeline.models.decoder import Decoder, check_filled
from ridgeline.models.init import initialise
from ridgeline.models.language import IGNORE
from ridgeline.ops.dropout import DropoutState

HEAD_EPS = 1e-5
Chance = torch.Generator | Sequence[torch.Generator]  # one for all rows of a batch, or one a row


class ClassHead(nn.Module):
    """LayerNorm → Linear to half → exact GELU → Linear to classes."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=HEAD_EPS)
        self.up = nn.Linear(width, width // 2)
        self.down = nn.Linear(width // 2, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


class ControllerPolicy(nn.Module):
    """Embeddings, numbers and previous controller → decoder → heads.

    A batch holds, with T positions:
        categories  int[B, T, columns], the columns of `config.categories` in order (absent without categories)
        numbers     float[B, T, N] (absent without numbers)
        previous    int[B, T, heads], the controller that led to this state, in the order of `config.heads`
        targets     int[B, T, heads], the controller to choose; −100 does not count (training only)
    """

    def __init__(self, config: PolicyConfig, *, impl: str = "torch", seed: int | None = None) -> None:
        super().__init__()
        self.config = config
        width = config.decoder.width
        self.tables = nn.ModuleDict({c.name: nn.Embedding(c.rows, c.width) for c in config.categories})
        self.input = nn.Linear(config.input_width, width)
        self.decoder = Decoder(config.decoder, impl=impl)
        heads, seen = {}, width
        for head in config.heads:
            heads[head.name] = ClassHead(seen, head.classes)
            seen += head.classes
        self.heads = nn.ModuleDict(heads)
        initialise(self, config.decoder.layers, seed)

    def inputs(self, batch: dict[str, Tensor]) -> Tensor:
        """The concatenated input vector (B, T, input_width): embeddings, numbers, one-hots."""
        dtype, parts, column = self.input.weight.dtype, [], 0
        for category in self.config.categories:
            for _ in range(category.columns):
                parts.append(self.tables[category.name](batch["categories"][..., column].long()))
                column += 1
        if self.config.numbers:
            parts.append(batch["numbers"].to(dtype))
        names = [head.name for head in self.config.heads]
        for name in self.config.previous:
            previous_BT = batch["previous"][..., names.index(name)].long()
            parts.append(F.one_hot(previous_BT, self.config.classes(name)).to(dtype))
        return torch.cat(parts, dim=-1)

    def trunk(self, batch: dict[str, Tensor], dropout: DropoutState | None = None) -> Tensor:
        """The decoder's state (B, T, C)."""
        return self.decoder(self.input(self.inputs(batch)), dropout)

    def forward(self, batch: dict[str, Tensor], dropout: DropoutState | None = None) -> dict[str, Tensor]:
        """Logits (B, T, classes) of each head; conditioning on classes takes them from `batch["targets"]`."""
        seen, logits = self.trunk(batch, dropout), {}
        for index, head in enumerate(self.config.heads):
            logits[head.name] = self.heads[head.name](seen)
            if self.config.conditioning == "logits":
                said = logits[head.name].detach()
            else:
                said = F.one_hot(batch["targets"][..., index].long().clamp(min=0), head.classes)
            seen = torch.cat([seen, said.to(seen.dtype)], dim=-1)
        return logits

    def losses(self, batch: dict[str, Tensor], dropout: DropoutState | None = None) -> dict[str, Tensor]:
        """Mean cross-entropy in nats of each head, by name."""
        check_filled(batch)
        if self.decoder.fuses_ends:
            from ridgeline.models.fused.policy import policy_losses  # imports Triton

            return policy_losses(self, batch, dropout, HEAD_EPS)
        with self.decoder.products():
            logits = self(batch, dropout)
        return {
            head.name: F.cross_entropy(
                logits[head.name].flatten(0, 1).float(),
                batch["targets"][..., index].long().flatten(),
                ignore_index=IGNORE,
            )
            for index, head in enumerate(self.config.heads)
        }

    def loss(self, batch: dict[str, Tensor], dropout: DropoutState | None = None) -> Tensor:
        """The scalar to minimise: the unweighted sum of the heads' losses."""
        return torch.stack(list(self.losses(batch, dropout).values())).sum()

    @torch.no_grad()
    def act(
        self,
        batch: dict[str, Tensor],
        at_B: Tensor,
        *,
        temperature: float = 1.0,
        generator: Chance | None = None,
    ) -> Tensor:
        """Choose a controller at position `at_B` of each window: int64[B, heads].

        Args:
            batch: windows filled from the left; positions after `at_B` are not looked at.
            at_B: int64[B], the position of the newest state.
            temperature: 1 samples from the model, 0 takes the most likely class.
            generator: source of the samples; see `noise`.
        """
        noise_BV = self.noise(len(at_B), temperature, generator)
        return self.choose(self.state_at(batch, at_B), noise_BV, temperature)

    def state_at(self, batch: dict[str, Tensor], at_B: Tensor) -> Tensor:
        """The decoder's state (B, C) at position `at_B` of each window."""
        return self.decoder.state_at(self.input(self.inputs(batch)), at_B)

    def noise(self, batch: int, temperature: float, generator: Chance | None = None) -> Tensor | None:
        """What `choose` needs of chance: exponential numbers (B, classes of all heads); None at temperature 0.

        From one generator on the policy's device, or from one a row, on any device: then a row's numbers are the same
        whatever the other rows are.
        """
        if temperature == 0:
            return None
        device, columns = self.input.weight.device, sum(head.classes for head in self.config.heads)
        if generator is None or isinstance(generator, torch.Generator):
            return torch.empty(batch, columns, device=device).exponential_(generator=generator)
        rows = [torch.empty(columns, device=own.device).exponential_(generator=own) for own in generator]
        return torch.stack(rows).to(device)

    @torch.no_grad()
    def choose(self, state_BC: Tensor, noise_BV: Tensor | None, temperature: float) -> Tensor:
        """A controller, int64[B, heads], from the decoder's state at the newest position of B windows."""
        chosen, column, seen_BC = [], 0, state_BC
        for head in self.config.heads:
            logits_BV = self.heads[head.name](seen_BC)
            own_BV = None if noise_BV is None else noise_BV[:, column : column + head.classes]
            chosen.append(choose(logits_BV, own_BV, temperature))
            column += head.classes
            said = logits_BV if self.config.conditioning == "logits" else F.one_hot(chosen[-1], head.classes)
            seen_BC = torch.cat([seen_BC, said.to(seen_BC.dtype)], dim=-1)
        return torch.stack(chosen, dim=-1)


def choose(logits_BV: Tensor, noise_BV: Tensor | None, temperature: float) -> Tensor:
    """One class a row, int64[B]: sampled at `temperature`, or without noise the most likely.

    The first of several exponential clocks to ring, each with a class's probability as its rate, rings with that
    class's probability; in logarithms no temperature can overflow.
    """
    if noise_BV is None:
        return logits_BV.argmax(-1)
    tiny = torch.finfo(torch.float32).tiny
    logits_BV = logits_BV.float()
    scaled_BV = (logits_BV - logits_BV.amax(-1, keepdim=True)) / max(temperature, tiny)
    return (scaled_BV - noise_BV.clamp(min=tiny).log()).argmax(-1)
