"""How much device memory a training step takes: what stays, what the backward pass waits for, what comes and goes.

Not counted: the CUDA context, the libraries' own workspaces, and what an allocator loses to fragmentation.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.cost import Storage, storage
from ridgeline.hardware import Precision
from ridgeline.models.accounting import check_context, head_widths, parameters, part_of
from ridgeline.models.config import DecoderConfig, LanguageConfig, ModelConfig
from ridgeline.models.plan import FUSED, StoragePlan
from ridgeline.ops.cross_entropy.cost import CHUNKED_VOCABULARY, chunk_rows
from ridgeline.ops.norm.cost import statistics
from ridgeline.ops.optimizer.cost import MASTER

INDEX = 8  # bytes of a token, category or target as PyTorch's kernels take them


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of device memory in one training step.

    Attributes:
        weights: fp32 masters, and their 16-bit copies where products read such.
        optimizer: the gradient buffer and both of AdamW's moments, all fp32.
        saved: what the backward pass waits for, by name, largest first.
        workspace: the most that comes and goes within one block or the loss.
    """

    weights: int
    optimizer: int
    saved: dict[str, int]
    workspace: int

    @property
    def activations(self) -> int:
        """All that the backward pass waits for."""
        return sum(self.saved.values())

    @property
    def peak(self) -> int:
        """The most at any one time."""
        return self.weights + self.optimizer + self.activations + self.workspace

    def to_json(self) -> dict[str, int]:
        """The five figures of `explain --json`, in bytes."""
        return {
            "weights": self.weights,
            "optimizer": self.optimizer,
            "activations": self.activations,
            "workspace": self.workspace,
            "peak": self.peak,
        }


def block_saved(c: DecoderConfig, N: int, T: int, store: Storage, plan: StoragePlan) -> dict[str, int]:
    """Bytes that one block keeps for its backward pass, for each of N rows (windows and positions), by name."""
    a, mixed = store.activation, c.heads * c.head_dim
    saved = {
        "residual": 2 * c.width * a,
        "norm statistics": 2 * statistics(c.norm) * store.statistic,
        # with whole scores grouped keys and values are kept as expanded to all heads, and queries once a product
        "qkv": (mixed * (3 + (c.positions == "relative")) if plan.scores else c.qkv_width) * a,
        "attention output": mixed * a,
    }
    if plan.normalised:
        saved["norm output"] = 2 * c.width * a
    if plan.preactivation:
        # beside the activation, GELU's derivative serves as well as its input
        name = "GELU's input or slope" if plan.fused and plan.activation else "pre-activation"
        saved[name] = c.hidden * plan.kept_of_gelu(c, N, store)
    if plan.activation:
        saved["activation"] = c.hidden * a
    if plan.scores:
        drop = c.dropout > 0
        saved["attention weights"] = c.heads * T * (a * (1 + drop) + drop)
    else:
        saved["log-sum-exp"] = c.heads * store.statistic
    if plan.masks and c.dropout > 0:
        saved["dropout masks"] = 2 * c.width
    return saved


def _outside_saved(config: ModelConfig, store: Storage, plan: StoragePlan) -> dict[str, int]:
    """The same for everything outside the blocks, for each row."""
    c, a = config.decoder, store.activation
    norm = c.width * a + statistics(c.norm) * store.statistic
    saved = {"final norm": norm, "dropout masks": c.width if plan.masks and c.dropout > 0 else 0}
    if isinstance(config, LanguageConfig):
        saved["head input"] = c.width * a  # kept even where the norm outputs of blocks are not
        saved["logits"] = logits_bytes(config.vocabulary, store, plan)
        saved["indices"] = 2 * INDEX
        return saved
    columns = sum(category.columns for category in config.categories)
    saved["inputs"] = config.input_width * a
    saved["indices"] = (columns + 2 * len(config.heads)) * INDEX
    saved["logits"] = sum(logits_bytes(head.classes, store, plan) for head in config.heads)
    saved["heads"] = sum(
        (2 * inputs + 2 * (inputs // 2)) * a + statistics("layernorm") * store.statistic
        for inputs, _ in head_widths(config)
    )
    return saved


def logits_bytes(classes: int, store: Storage, plan: StoragePlan) -> int:
    """Bytes of a row that the loss keeps: the log-softmax in fp32, the logits' gradient in their place, or nothing."""
    if plan.loss == "plain":
        return classes * 4
    return classes * store.activation if classes < CHUNKED_VOCABULARY else 0


def _workspace(config: ModelConfig, N: int, T: int, store: Storage, plan: StoragePlan) -> int:
    """The larger of one block's backward pass and the loss."""
    c, a = config.decoder, store.activation
    mlp = c.hidden * a * ((2 if not plan.fused else 1) + (not plan.preactivation))
    attention = (c.qkv_width + c.heads * c.head_dim) * a
    if plan.scores:
        attention += c.heads * T * a * (2 + (c.dropout > 0))
    block = max(mlp, attention) + (3 + (not plan.normalised)) * c.width * a
    classes = config.vocabulary if isinstance(config, LanguageConfig) else max(h.classes for h in config.heads)
    if plan.loss == "fused" and classes >= CHUNKED_VOCABULARY:
        return max(N * block, chunk_rows(N, classes) * classes * a)
    loss = classes * (8 + (a if a != 4 else 0)) if plan.loss == "plain" else 0
    return N * max(block, loss)


def memory(
    config: ModelConfig,
    *,
    batch: int,
    context: int | None = None,
    precision: Precision = "bf16",
    plan: StoragePlan = FUSED,
    accumulation: int = 1,
) -> Memory:
    """Device memory of one training step; arguments as for `step_cost`."""
    T, store, count = check_context(config, context), storage(precision), parameters(config)
    N = part_of(batch, accumulation) * T
    saved: dict[str, int] = {}
    for name, size in block_saved(config.decoder, N, T, store, plan).items():
        saved[name] = size * N * config.decoder.layers
    for name, size in _outside_saved(config, store, plan).items():
        saved[name] = saved.get(name, 0) + size * N
    copies = store.weight if store.weight != MASTER else 0
    return Memory(
        weights=count * (MASTER + copies),
        optimizer=count * (store.gradient + 2 * MASTER),
        saved=dict(sorted(((k, v) for k, v in saved.items() if v), key=lambda item: -item[1])),
        workspace=_workspace(config, N, T, store, plan),
    )
