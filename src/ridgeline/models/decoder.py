"""The trunk: pre-norm Transformer blocks in plain PyTorch, the specification of every fast path.

    x ← x + dropout(out(attention(norm₁(x))))
    x ← x + dropout(down(gelu(up(norm₂(x)))))

Implementations (`impl`):
    reference   explicit attention in the tensors' dtype; dropout masks from the counter of ops.dropout
    torch       what a PyTorch expert writes: scaled_dot_product_attention and F.dropout (PyTorch's own masks)
    fused       the reference's function, masks included, by the kernels of models.fused; fused+lean and fused+leanest
                keep less for the backward pass (models.plan)
    m0 … r16    the same function on a rung of the ladder (models.rungs), single changes such as m2+reuse included
"""

from __future__ import annotations

import contextlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.errors import ConfigError, UnsupportedError, nearest
from ridgeline.models.config import DecoderConfig
from ridgeline.models.plan import fused_plan
from ridgeline.models.rungs.ladder import find_rung, is_rung
from ridgeline.ops.attention.reference import attention_reference, skew
from ridgeline.ops.dropout import DropoutState, check_dropping, hidden_keep, quantise

IMPLEMENTATIONS = ("reference", "torch", "fused")
EMBEDDING_SITE = 0


def check_filled(batch: dict[str, Tensor]) -> None:
    """Raises ConfigError where a batch has no position, of which no loss can be the mean."""
    if not batch["targets"].numel():
        raise ConfigError(f"a batch whose targets have shape {tuple(batch['targets'].shape)} is empty; it has no loss")


def check_impl(impl: str) -> str:
    """`impl` itself.

    Raises:
        UnsupportedError: there is no such implementation; says which are near.
    """
    if isinstance(impl, str) and is_rung(impl):
        find_rung(impl)
    elif fused_plan(impl) is None and impl not in IMPLEMENTATIONS:
        raise UnsupportedError(nearest(impl, IMPLEMENTATIONS, "implementation"))
    return impl


def dropout_sites(layer: int) -> tuple[int, int, int]:
    """Site numbers of a block's dropouts: attention probabilities, attention output, MLP output."""
    return 3 * layer + 1, 3 * layer + 2, 3 * layer + 3


class Dropout(nn.Module):
    """Dropout of a (B, T, C) tensor at one site of the model."""

    def __init__(self, p: float, site: int, impl: str) -> None:
        super().__init__()
        self.p, self.site, self.impl = p, site, impl
        if impl != "torch":
            quantise(p)  # that masks have such a probability is told before a step

    def forward(self, x_BTC: Tensor, dropout: DropoutState | None) -> Tensor:
        if not self.training or self.p == 0:
            return x_BTC
        if self.impl == "torch":
            return F.dropout(x_BTC, self.p)
        assert dropout is not None
        B, T, C = x_BTC.shape
        keep_BTC = hidden_keep(dropout, self.site, (B, T, C), self.p, x_BTC.device)
        return x_BTC * keep_BTC * quantise(self.p)[1]


def make_norm(config: DecoderConfig, width: int) -> nn.Module:
    """The config's norm over `width` numbers."""
    if config.norm == "rmsnorm":
        return nn.RMSNorm(width, eps=config.norm_eps)
    return nn.LayerNorm(width, eps=config.norm_eps, bias=config.bias)


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads and an optional relative term."""

    def __init__(self, config: DecoderConfig, layer: int, impl: str) -> None:
        super().__init__()
        self.config, self.impl = config, impl
        self.site, out_site, _ = dropout_sites(layer)
        self.qkv = nn.Linear(config.width, config.qkv_width, bias=config.bias)
        self.out = nn.Linear(config.heads * config.head_dim, config.width, bias=config.bias)
        self.relative: nn.Parameter | None = None
        if config.positions == "relative":
            self.relative = nn.Parameter(torch.empty(config.table_rows, config.head_dim))
        self.dropout = Dropout(config.dropout, out_site, impl)

    def split(self, qkv_BTN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of the joint projection: q (B, T, H, D), k and v (B, T, G, D)."""
        c = self.config
        B, T, _ = qkv_BTN.shape
        q, k, v = qkv_BTN.split([c.heads * c.head_dim, c.groups * c.head_dim, c.groups * c.head_dim], dim=-1)
        return (
            q.view(B, T, c.heads, c.head_dim),
            k.view(B, T, c.groups, c.head_dim),
            v.view(B, T, c.groups, c.head_dim),
        )

    def forward(self, x_BTC: Tensor, dropout: DropoutState | None) -> Tensor:
        return self.dropout(self.out(self.mix(x_BTC, dropout)), dropout)

    def mix(self, x_BTC: Tensor, dropout: DropoutState | None) -> Tensor:
        """What the heads take from the positions before, side by side: (B, T, H·D)."""
        q_BTHD, k_BTGD, v_BTGD = self.split(self.qkv(x_BTC))
        p = self.config.dropout if self.training else 0.0
        scale = 1.0 / math.sqrt(self.config.head_dim)
        table_RD = None if self.relative is None else self.relative.to(q_BTHD.dtype)
        if self.impl == "torch":
            mixed_BTHD = _sdpa(q_BTHD, k_BTGD, v_BTGD, table_RD, scale, p)
        else:
            mixed_BTHD = attention_reference(
                q_BTHD, k_BTGD, v_BTGD, table_RD, scale=scale, p=p, dropout=dropout, site=self.site
            )
        return mixed_BTHD.flatten(2)


def _sdpa(q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, table_RD: Tensor | None, scale: float, p: float) -> Tensor:
    T, repeat = q_BTHD.shape[1], q_BTHD.shape[2] // k_BTGD.shape[2]
    q_BHTD, k_BHTD, v_BHTD = (x.transpose(1, 2) for x in (q_BTHD, k_BTGD, v_BTGD))
    if repeat > 1:  # expanded, because grouped heads can fall to the MATH backend
        k_BHTD, v_BHTD = (x.repeat_interleave(repeat, dim=1) for x in (k_BHTD, v_BHTD))
    bias_BHTT = None
    if table_RD is not None:
        future = torch.ones(T, T, dtype=torch.bool, device=q_BTHD.device).triu(1)
        bias_BHTT = (skew(q_BHTD @ table_RD[-T:].t()) * scale).masked_fill(future, float("-inf"))
    mixed_BHTD = F.scaled_dot_product_attention(
        q_BHTD, k_BHTD, v_BHTD, attn_mask=bias_BHTT, dropout_p=p, is_causal=bias_BHTT is None, scale=scale
    )
    return mixed_BHTD.transpose(1, 2)


class MLP(nn.Module):
    """Two linear layers around a GELU."""

    def __init__(self, config: DecoderConfig, layer: int, impl: str) -> None:
        super().__init__()
        self.approximate = "tanh" if config.gelu == "tanh" else "none"
        self.up = nn.Linear(config.width, config.hidden, bias=config.bias)
        self.down = nn.Linear(config.hidden, config.width, bias=config.bias)
        self.dropout = Dropout(config.dropout, dropout_sites(layer)[2], impl)

    def forward(self, x_BTC: Tensor, dropout: DropoutState | None) -> Tensor:
        hidden_BTF = F.gelu(self.up(x_BTC), approximate=self.approximate)
        return self.dropout(self.down(hidden_BTF), dropout)


class Block(nn.Module):
    """One pre-norm block."""

    def __init__(self, config: DecoderConfig, layer: int, impl: str) -> None:
        super().__init__()
        self.norm_1 = make_norm(config, config.width)
        self.attention = Attention(config, layer, impl)
        self.norm_2 = make_norm(config, config.width)
        self.mlp = MLP(config, layer, impl)

    def forward(self, x_BTC: Tensor, dropout: DropoutState | None) -> Tensor:
        x_BTC = x_BTC + self.attention(self.norm_1(x_BTC), dropout)
        return x_BTC + self.mlp(self.norm_2(x_BTC), dropout)

    def behind(self, mixed_BN: Tensor, x_BC: Tensor) -> Tensor:
        """The rest of a block without dropout for single positions.

        Args:
            mixed_BN: what their heads took from the positions before.
            x_BC: what the block is given there.
        """
        x_BC = x_BC + self.attention.out(mixed_BN)
        return x_BC + self.mlp(self.norm_2(x_BC), None)


class Decoder(nn.Module):
    """Positions, dropout, blocks, final norm: (B, T, C) → (B, T, C).

    With dropout, `impl="reference"` and training mode, each call draws its masks from `dropout`; without one
    it uses a state of its own that advances by a step at every call, so that any PyTorch loop is right.
    """

    seed_step: Tensor

    def __init__(self, config: DecoderConfig, *, impl: str = "torch") -> None:
        super().__init__()
        self.config, self.impl = config, check_impl(impl)
        self.positions: nn.Parameter | None = None
        if config.positions == "learned":
            self.positions = nn.Parameter(torch.empty(config.table_rows, config.width))
        self.dropout = Dropout(config.dropout, EMBEDDING_SITE, impl)
        self.blocks = nn.ModuleList(Block(config, layer, impl) for layer in range(config.layers))
        self.norm = make_norm(config, config.width)
        self.register_buffer("seed_step", torch.tensor([torch.initial_seed() % 2**63, 0]), persistent=False)

    @property
    def fuses_ends(self) -> bool:
        """Whether the model's input and heads run by fused kernels, as its blocks do."""
        return fused_plan(self.impl) is not None or (is_rung(self.impl) and find_rung(self.impl).pointwise != "unfused")

    def products(self) -> contextlib.AbstractContextManager[object]:
        """What the linear layers around the decoder run in: on a rung, its products take PyTorch's place."""
        if not is_rung(self.impl):
            return contextlib.nullcontext()
        from ridgeline.models.rungs.ends import RungProducts  # imports Triton

        return RungProducts(self)

    def next_dropout(self) -> DropoutState:
        """The masks of the next step of a loop that does not manage them itself."""
        state = DropoutState(self.seed_step.clone())
        self.seed_step[1] += 1
        return state

    def forward(self, x_BTC: Tensor, dropout: DropoutState | None = None) -> Tensor:
        return self.transform(self._placed(x_BTC), dropout)

    def _placed(self, x_BTC: Tensor) -> Tensor:
        """An input with its positions added."""
        T = x_BTC.shape[1]
        self.check_length(T)
        return x_BTC if self.positions is None else x_BTC + self.positions[:T].to(x_BTC.dtype)

    def check_length(self, T: int) -> None:
        """Raises ConfigError where a sequence of T positions is longer than the model's context."""
        if self.config.context < T:
            raise ConfigError(f"a sequence of {T} positions is longer than the model's context={self.config.context}")

    def check_kernels(self, x_BTC: Tensor, dropout: DropoutState | None) -> None:
        """Raises UnsupportedError where kernels would not compute what PyTorch's operations do in their place."""
        device = x_BTC.device
        if not x_BTC.numel():
            raise UnsupportedError(f"impl={self.impl!r} needs at least one position, got none in {tuple(x_BTC.shape)}")
        if torch.get_default_dtype() != torch.float32:
            raise UnsupportedError(
                f"impl={self.impl!r} keeps its sums in PyTorch's default dtype, which must be float32 and is "
                f"{torch.get_default_dtype()}; call torch.set_default_dtype(torch.float32)"
            )
        check_dropping(self.config.dropout, dropout, device)
        if torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type) != x_BTC.dtype:
            raise UnsupportedError(
                f"impl={self.impl!r} computes in the dtype of its weights, {x_BTC.dtype}, and autocast would cast "
                "between its products; convert the model instead, as model.bfloat16() does, or take impl='torch'"
            )

    def state_at(self, x_BTC: Tensor, at_B: Tensor) -> Tensor:
        """What `forward` gives at one position of each sequence: (B, C).

        In evaluation plain PyTorch computes what is behind the last block's attention there alone.

        Args:
            x_BTC: the sequences.
            at_B: int64[B], the positions.
        """
        rows_B = torch.arange(len(at_B), device=at_B.device)
        if self.training or self.impl not in ("reference", "torch"):
            return self(x_BTC)[rows_B, at_B]  # type: ignore[no-any-return]
        x_BTC = self._placed(x_BTC)
        for block in self.blocks[:-1]:
            x_BTC = block(x_BTC, None)
        last = self.blocks[-1]
        assert isinstance(last, Block)
        mixed_BTN = last.attention.mix(last.norm_1(x_BTC), None)
        return self.norm(last.behind(mixed_BTN[rows_B, at_B], x_BTC[rows_B, at_B]))  # type: ignore[no-any-return]

    def transform(self, x_BTC: Tensor, dropout: DropoutState | None = None) -> Tensor:
        """`forward` for an input that holds its positions already."""
        if dropout is None and self.training and self.config.dropout > 0 and self.impl != "torch":
            dropout = self.next_dropout()
        if self.impl not in ("reference", "torch"):
            self.check_kernels(x_BTC, dropout)
        if fused_plan(self.impl) is not None:
            from ridgeline.models.fused.stack import fused_stack  # imports Triton

            return fused_stack(self, x_BTC, dropout)
        if is_rung(self.impl):
            from ridgeline.models.rungs.stack import rung_stack  # imports Triton

            return rung_stack(self, x_BTC, dropout)
        x_BTC = self.dropout(x_BTC, dropout)
        for block in self.blocks:
            x_BTC = block(x_BTC, dropout)
        return self.norm(x_BTC)
