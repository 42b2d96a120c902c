"""How much device memory a training step takes: what stays, what the backward pass waits for, what comes and goes.

On a plan that fuses, as `best` has it on a Hopper card; a test holds it against what the step really allocates.
Not counted: the CUDA context, the libraries' own workspaces (cuBLAS takes 32 MiB a stream, a step about 0.1 GB), what
an allocator loses to fragmentation, and the second copy of weights and moments while a graph is captured.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.cost import Storage, storage
from ridgeline.hardware import Precision
from ridgeline.models.accounting import check_context, head_widths, parameters, part_of
from ridgeline.models.config import DecoderConfig, LanguageConfig, ModelConfig, PolicyConfig
from ridgeline.models.plan import FUSED, GATHERED_BYTES, StoragePlan
from ridgeline.ops.attention import spans
from ridgeline.ops.cross_entropy.cost import chunk_rows, keeps_logits
from ridgeline.ops.known import ROWS
from ridgeline.ops.linear.folded import SHARE
from ridgeline.ops.norm.cost import statistics
from ridgeline.ops.optimizer.cost import MASTER

INDEX = 8  # bytes of a token, category or target as PyTorch's kernels take them
SHORT = 256  # positions of a window that one thread block's attention takes
PROCESSORS = 132  # of a Hopper card


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
    folds = plan.folds_norm(c, N, store)
    if plan.normalised:
        saved["norm output"] = (2 - folds) * c.width * a
    if folds:
        saved["norm statistics"] += 2 * c.width // SHARE * store.statistic
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


def _outside_saved(config: ModelConfig, N: int, store: Storage, plan: StoragePlan) -> dict[str, int]:
    """The same for everything outside the blocks, for each row."""
    c, a = config.decoder, store.activation
    norm = c.width * a + statistics(c.norm) * store.statistic
    saved = {"final norm": norm, "dropout masks": c.width if plan.masks and c.dropout > 0 else 0}
    if isinstance(config, LanguageConfig):
        saved["indices"] = 2 * INDEX
        if not plan.joins_head(c, N, store, config.vocabulary):
            saved["head input"] = c.width * a  # kept even where the norm outputs of blocks are not
            saved["logits"] = logits_bytes(config.vocabulary, N, store, plan)
        return saved
    columns = sum(category.columns for category in config.categories)
    saved["inputs"] = config.input_width * a
    saved["indices"] = (columns + 2 * len(config.heads)) * INDEX
    heads = head_widths(config)
    if plan.fused:  # one function, which has gone back to their hidden layers when it ends
        saved["heads"] = sum(inputs // 2 * a + statistics("layernorm") * store.statistic for inputs, _ in heads)
        return saved
    saved["logits"] = sum(logits_bytes(head.classes, N, store, plan) for head in config.heads)
    saved["heads"] = sum(
        (2 * inputs + 2 * (inputs // 2)) * a + statistics("layernorm") * store.statistic for inputs, _ in heads
    )
    return saved


def logits_bytes(classes: int, N: int, store: Storage, plan: StoragePlan) -> int:
    """Bytes of a row that the loss of N rows keeps: the log-softmax in fp32; or the logits, filled up to a multiple of
    ROWS, with their gradient, or nothing where chunks of rows are taken."""
    if plan.loss == "plain":
        return classes * 4
    return 2 * -(-classes // ROWS) * ROWS * store.activation if keeps_logits(N, classes) else 0


def _gathered(c: DecoderConfig, N: int, T: int, store: Storage, plan: StoragePlan) -> int:
    """What weight gradients that are made by one launch keep beyond what the blocks before them have set free."""
    if not plan.gathers(c, N, store):
        return 0
    a, mixed = store.activation, c.heads * c.head_dim
    gradients = (2 * c.width + c.hidden + c.qkv_width) * a
    waiting = gradients + (2 * c.width + mixed + c.hidden) * a
    freed = sum(block_saved(c, N, T, store, plan).values())
    blocks = min(c.layers - 1, GATHERED_BYTES // (gradients * N))
    return N * (c.hidden * a + max(0, waiting - freed) * blocks)


def _attention_sums(c: DecoderConfig, B: int, T: int, store: Storage, plan: StoragePlan) -> int:
    """Partial sums of gradients, where several thread blocks share a head of a long window."""
    own = c.head_dim == spans.WIDTH and T > SHORT and c.positions != "relative" and c.dropout == 0
    if not own or plan.scores or store.activation != 2:
        return 0
    of_queries, of_keys = spans.partial_sums(B, T, c.heads, c.groups, PROCESSORS)
    return 4 * (of_queries + 2 * of_keys)


def _workspace(config: ModelConfig, N: int, T: int, store: Storage, plan: StoragePlan) -> int:
    """The larger of one block's backward pass and the loss."""
    c, a = config.decoder, store.activation
    mlp = c.hidden * a * (2 if not plan.fused else 1)
    attention = (c.qkv_width + c.heads * c.head_dim) * a
    if plan.scores:
        attention += c.heads * T * a * (2 + (c.dropout > 0))
    language = isinstance(config, LanguageConfig)
    joined = isinstance(config, LanguageConfig) and plan.joins_head(c, N, store, config.vocabulary)
    # gradients on their way through the block and, apart where there is dropout, through its branches
    block = N * (max(mlp, attention) + (4 - joined + 2 * (c.dropout > 0)) * c.width * a)
    # what is made again is there till the block's end
    block += N * a * (2 * c.width * (not plan.normalised) + c.hidden * (2 - plan.activation - plan.preactivation))
    if plan.fused:  # the last norm's input is gone by then, and so is its result where a head has no use for it
        block -= N * (1 + (language and not joined)) * c.width * a
    block += _gathered(c, N, T, store, plan) + _attention_sums(c, N // T, T, store, plan)
    classes = config.vocabulary if isinstance(config, LanguageConfig) else max(h.classes for h in config.heads)
    if plan.loss == "plain":
        return max(block, N * classes * (8 + (a if a != 4 else 0)))
    if isinstance(config, PolicyConfig) or keeps_logits(N, classes):
        return block
    # a chunk's logits, and the gradients of the head and of what it reads
    return max(block, (chunk_rows(N, classes) * a + 4 * c.width) * classes + N * c.width * a)


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
    for name, size in _outside_saved(config, N, store, plan).items():
        saved[name] = saved.get(name, 0) + size * N
    copies = store.weight if store.weight != MASTER else 0
    return Memory(
        weights=count * (MASTER + copies),
        optimizer=count * (store.gradient + 2 * MASTER),
        saved=dict(sorted(((k, v) for k, v in saved.items() if v), key=lambda item: -item[1])),
        workspace=_workspace(config, N, T, store, plan),
    )
