"""Which implementation each part of a fused block uses: decided once from config, device and dtype, and printable."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from ridgeline.models.config import DecoderConfig
from ridgeline.models.plan import FEW_TOKENS, MANY_TOKENS, WAVE_TOKENS, StoragePlan
from ridgeline.ops import linear, mlp
from ridgeline.ops.attention import api as attention
from ridgeline.ops.linear.folded import SHARE
from ridgeline.ops.linear.stationary import LARGEST_K
from ridgeline.ops.mlp.many import TURNED
from ridgeline.ops.mlp.many import WIDTH as JOINED_WIDTH

JOINED = frozenset(("out", "down", "hidden", "qkv"))  # with slopes in codes


@dataclass(frozen=True)
class Choices:
    """Implementations by part of the block.

    Attributes:
        attention: "cuda" (short windows, Hopper), "cuda-plain" (any window, Hopper, without relative term or dropout),
            "cuda-fp32" (short windows in fp32, without them too), "triton" (any window) or "reference" (explicit, by
            autograd).
        mlp: "cuda" (GELU and its derivative in the products' epilogues) or "torch" (cuBLAS and one Triton pass).
        coded: under mlp "cuda" the derivative is kept in 8 bits instead of 16.
        qkv: the joint projection: "cuda" (bias in the epilogue, launched early) or "torch" (cuBLAS).
        out: attention's output projection and its input gradient: "torch" (cuBLAS), "cuda" (weights in registers),
            "residual" (and the residual written by the product, so that the norm stands alone).
        folded: no kernel makes the norm before the MLP, the products beside it take its parts (ops/linear/folded): with
            mlp "cuda", out "residual", and without groups.
        rows: products that take the join beside them into their own kernel, a thread block holding whole rows: of
            "mlp" (both products, GELU and the joins), "out" (attention's output projection) and "qkv" (the input
            gradient of the joint projection).
        joined: products that do so with many rows (ops/mlp/many): of "out", "down", and the input gradients of "up" and
            "qkv", or in place of up's of "hidden": down's and up's as one kernel (with `coded`, and multiples of 32
            rows).
        rest: the other products, down and the input gradients of up and of the joint projection: "torch" (cuBLAS),
            "cuda" (in fp32, by the tensor cores in fp64), "residual" (and the residual written by down).
        grouped: weight gradients of many blocks in one launch with every bias's sums, or each by cuBLAS.
        sums_at_once: all column sums by one launch behind the backward pass, as with a group, or each by its own.
        early: kernels start while the one before still runs (ops/early.py).
        side_stream: weight gradients on a stream beside the backward pass, where a kernel does not fill the card.
    """

    attention: str
    mlp: str
    coded: bool = False
    qkv: str = "torch"
    out: str = "torch"
    folded: bool = False
    rows: frozenset[str] = frozenset()
    joined: frozenset[str] = frozenset()
    rest: str = "torch"
    grouped: bool = False
    sums_at_once: bool = False
    early: bool = True
    side_stream: bool = False


def attention_missing(impl: str, config: DecoderConfig, device: torch.device, dtype: torch.dtype, T: int) -> str | None:
    """Why an implementation of attention cannot serve this decoder, or None."""
    if impl in ("cuda-plain", "cuda-fp32") and config.dropout:
        return "has no dropout"
    q, k, v = split_heads(config, torch.empty(1, T, config.qkv_width, device=device, dtype=dtype))
    table = None
    if config.positions == "relative":
        table = torch.empty(config.table_rows, config.head_dim, device=device, dtype=dtype)
    return attention.available(impl, q, k, v, table)


def split_heads(config: DecoderConfig, qkv_BTQ: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of the joint projection (B, T, (H + 2 G) · D): q (B, T, H, D), k and v (B, T, G, D)."""
    B, T, _ = qkv_BTQ.shape
    D = config.head_dim
    heads = qkv_BTQ.view(B, T, config.heads + 2 * config.groups, D)
    q, k, v = heads.split([config.heads, config.groups, config.groups], dim=2)
    return q, k, v


def rows_missing(config: DecoderConfig, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why no product can take its join into its own kernel, or None."""
    widths = (config.hidden, config.qkv_width, config.heads * config.head_dim)
    reasons = (mlp.available("cuda", device, dtype, config.width, inner) for inner in widths)
    return next((reason for reason in reasons if reason is not None), None)


def settle(choices: Choices, plan: StoragePlan) -> Choices:
    """The choices on a plan that does not keep all of the MLP's hidden layer, which whole rows cannot make alone.

    Without the activation it is GELU's input that is kept, and that only the way of mlp "torch" has.
    """
    if plan.activation:
        return choices
    choices = replace(choices, rows=choices.rows - {"mlp"})
    if not plan.preactivation:
        return choices
    return replace(choices, mlp="torch", folded=False, joined=parted(choices.joined))


def parted(joined: frozenset[str]) -> frozenset[str]:
    """The same without the kernel that makes both of the MLP's input gradients."""
    return joined - {"hidden"} | {"up"} if "hidden" in joined else joined


def _projection(in_registers: bool, few: bool) -> str:
    """What makes attention's output: with many rows it saves a pass over them to write the residual stream with it."""
    return "torch" if not in_registers else "cuda" if few else "residual"


def _joined(config: DecoderConfig, dtype: torch.dtype, rows: int) -> frozenset[str]:
    """Products that take their joins with them, of many rows."""
    if config.width != JOINED_WIDTH or config.dropout:
        return frozenset()
    return JOINED if dtype == torch.bfloat16 and rows % TURNED == 0 else parted(JOINED)


@functools.lru_cache(maxsize=256)  # asked in every forward pass, and the probes allocate
def choose(config: DecoderConfig, device: torch.device, dtype: torch.dtype, B: int, T: int) -> Choices:
    """The fastest implementations that can run here, by measurement on an H200."""
    names = ("cuda", "cuda-plain", "cuda-fp32", "triton", "reference")
    attention_impl = next(name for name in names if attention_missing(name, config, device, dtype, T) is None)
    hopper = linear.unavailable("cuda", device, dtype) is None and config.width % 8 == 0 and config.hidden % 8 == 0
    hopper = hopper and (dtype != torch.float32 or config.qkv_width % 4 == 0)
    few = device.type == "cuda" and B * T <= FEW_TOKENS
    narrow = rows_missing(config, device, dtype) is None
    whole_rows, many = few and narrow and B * T <= WAVE_TOKENS, narrow and B * T > MANY_TOKENS
    doubles = hopper and dtype == torch.float32
    streams = "cuda" if config.dropout else "residual"  # in fp32: dropout would be a pass of its own
    in_registers = hopper and max(config.width, config.heads * config.head_dim) <= LARGEST_K
    out = streams if doubles else _projection(in_registers, few)
    return Choices(
        attention=attention_impl,
        mlp="cuda" if hopper else "torch",
        coded=hopper and dtype == torch.bfloat16,
        qkv="cuda" if hopper and (config.bias or config.width <= LARGEST_K) else "torch",
        out=out,
        folded=out == "residual" and not doubles and config.width % SHARE == 0 and not narrow,
        rows=frozenset(("mlp", "out", "qkv") if whole_rows else ()),
        joined=_joined(config, dtype, B * T) if many else frozenset(),
        rest=streams if doubles else "torch",
        grouped=(narrow and few) or many or doubles,
        sums_at_once=hopper,
        early=not many,
        side_stream=few and not narrow and not doubles,  # a group fills the card
    )
