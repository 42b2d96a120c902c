"""What a training step costs: every op of a model, forward, backward and update, on a plan and in a precision.

The formula of each op stands beside the op (`ridgeline.ops.<op>.cost`); here they are put together. Shapes as
everywhere: B windows of T positions, N = B · T rows.
"""

from __future__ import annotations

from dataclasses import replace

from ridgeline.cost import OpCost, StepCost, Storage, storage
from ridgeline.errors import ConfigError
from ridgeline.hardware import Precision
from ridgeline.models.config import DecoderConfig, LanguageConfig, ModelConfig, PolicyConfig
from ridgeline.models.plan import FUSED, StoragePlan
from ridgeline.ops.activation.cost import gelu_flops, gelu_gradient_flops, gelu_pass
from ridgeline.ops.attention.cost import AttentionShape, attention_fused, attention_whole
from ridgeline.ops.cross_entropy.cost import cross_entropy
from ridgeline.ops.dropout.cost import MASK_FLOPS, dropout_pass
from ridgeline.ops.embedding.cost import embedding, positions
from ridgeline.ops.linear.cost import (
    add_pass,
    linear_forward,
    linear_input_gradient,
    linear_weight_gradient,
)
from ridgeline.ops.norm.cost import norm_backward, norm_forward
from ridgeline.ops.optimizer.cost import accumulate, adamw, gradient_norm


def _norm_parameters(c: DecoderConfig, width: int) -> int:
    return width * (2 if c.norm == "layernorm" and c.bias else 1)


def block_parameters(c: DecoderConfig) -> int:
    """Parameters of one block."""
    mixed = c.heads * c.head_dim
    matrices = c.width * c.qkv_width + mixed * c.width + 2 * c.width * c.hidden
    biases = (c.qkv_width + c.width + c.hidden + c.width) * c.bias
    table = c.table_rows * c.head_dim if c.positions == "relative" else 0
    return matrices + biases + table + 2 * _norm_parameters(c, c.width)


def head_widths(config: PolicyConfig) -> list[tuple[int, int]]:
    """Input width and classes of each head: later heads also see what the earlier ones said."""
    widths, seen = [], config.decoder.width
    for head in config.heads:
        widths.append((seen, head.classes))
        seen += head.classes
    return widths


def parameters(config: ModelConfig) -> int:
    """Parameters of a model; tied weights count once."""
    c = config.decoder
    total = c.layers * block_parameters(c) + _norm_parameters(c, c.width)
    if c.positions == "learned":
        total += c.table_rows * c.width
    if isinstance(config, LanguageConfig):
        return total + config.vocabulary * c.width * (1 if config.tied else 2)
    total += sum(category.rows * category.width for category in config.categories)
    total += (config.input_width + 1) * c.width
    for inputs, classes in head_widths(config):
        total += 2 * inputs + (inputs + 1) * (inputs // 2) + (inputs // 2 + 1) * classes
    return total


def check_context(config: ModelConfig, context: int | None) -> int:
    """The positions of a window: `context`, or the model's own.

    Raises:
        ConfigError: longer than the model's.
    """
    most = config.decoder.context
    if context is not None and not 1 <= context <= most:
        raise ConfigError(f"context must be between 1 and the model's {most}, got {context}")
    return context or most


def part_of(batch: int, accumulation: int) -> int:
    """Windows of each part of a batch that is cut into `accumulation` parts.

    Raises:
        ConfigError: it cannot be cut so.
    """
    if batch < 1 or accumulation < 1:
        raise ConfigError(f"batch and accumulation must be at least 1, got {batch} and {accumulation}")
    if batch % accumulation:
        raise ConfigError(f"accumulation={accumulation} does not divide batch={batch}; change one")
    return batch // accumulation


def step_cost(
    config: ModelConfig,
    *,
    batch: int,
    context: int | None = None,
    precision: Precision = "bf16",
    plan: StoragePlan = FUSED,
    accumulation: int = 1,
) -> StepCost:
    """Every op of one training step.

    Args:
        config: the model.
        batch: windows in the step (B).
        context: positions of a window (T); None for the model's context.
        precision: of products and activations; masters, gradients and moments are fp32 in all of them.
        plan: what is kept and what is fused.
        accumulation: parts that the batch is cut into to save memory; divides `batch`.
    """
    T, store, part = check_context(config, context), storage(precision), part_of(batch, accumulation)
    ops = [
        *_inputs(config, part, T, store, plan),
        *_norms(config.decoder, part * T, store, plan),
        *block_cost(config.decoder, part, T, store, plan),
        *_heads(config, part * T, store, plan),
    ]
    count = parameters(config)
    if accumulation > 1:
        ops = [replace(op, count=op.count * accumulation) for op in ops]
        ops.append(accumulate(count, accumulation, store=store))
    rides = plan.fused and accumulation == 1  # else a gradient is a sum that no kernel has whole, or PyTorch's
    ops += [gradient_norm(count, store=store, rides=rides), adamw(count, store=store, clip_pass=not plan.fused)]
    order = {"forward": 0, "backward": 1, "optimizer": 2}
    return StepCost(tuple(sorted(ops, key=lambda op: order[op.phase])))


def _inputs(config: ModelConfig, B: int, T: int, store: Storage, plan: StoragePlan) -> list[OpCost]:
    c, N = config.decoder, B * T
    ops: list[OpCost] = []
    if isinstance(config, LanguageConfig):
        ops += embedding("embedding", N, config.vocabulary, c.width, store=store)
    else:
        for category in config.categories:
            ops += embedding("embedding", N * category.columns, category.rows, category.width, store=store)
        ops += _linear("input", N, config.input_width, c.width, True, store, inputs_need=bool(config.categories))
    if c.positions == "learned":
        ops += positions(B, T, c.table_rows, c.width, store=store, joined=plan.fused)
    if c.dropout > 0 and not plan.fused:
        ops += dropout_pass("dropout", N * c.width, store=store)
    return ops


def _linear(
    name: str,
    N: int,
    inputs: int,
    outputs: int,
    bias: bool,
    store: Storage,
    *,
    inputs_need: bool = True,
) -> list[OpCost]:
    """A linear layer on its own: forward, both gradients (the input's only where something below needs it)."""
    ops = [linear_forward(name, N, inputs, outputs, bias=bias, store=store)]
    if inputs_need:
        ops.append(linear_input_gradient(name, N, inputs, outputs, store=store))
    return [*ops, linear_weight_gradient(name, N, inputs, outputs, bias=bias, store=store)]


def _norms(c: DecoderConfig, N: int, store: Storage, plan: StoragePlan) -> list[OpCost]:
    """The 2 · layers + 1 norms on the residual stream, with the joins that they carry."""
    between, drop, joined = 2 * c.layers, c.dropout > 0 and plan.fused, plan.join == "norm"

    def forward(joined: bool, dropout: bool, count: int) -> OpCost:
        return norm_forward(
            "norm", N, c.width, kind=c.norm, bias=c.bias, store=store, joined=joined, dropout=dropout, count=count
        )

    def backward(residual: bool, branch: bool, count: int) -> OpCost:
        return norm_backward(
            "norm", N, c.width, kind=c.norm, bias=c.bias, store=store, residual=residual, branch=branch, count=count
        )

    # forward, the first norm has nothing to join; backward, the last has no residual gradient to add
    ops = [forward(False, drop, 1), forward(joined, drop and joined, between)]
    if plan.fused:
        ops += [backward(False, drop, 1), backward(True, drop, between - 1), backward(True, False, 1)]
    else:
        ops += [backward(False, False, between + 1), *add_pass("residual", N, c.width, store=store, count=between)]
    return ops


def attention_shape(c: DecoderConfig, B: int, T: int, plan: StoragePlan) -> AttentionShape:
    """What attention works on; with whole scores grouped keys and values are expanded to all heads first."""
    return AttentionShape(
        B=B,
        T=T,
        H=c.heads,
        G=c.heads if plan.scores else c.groups,
        D=c.head_dim,
        relative=c.positions == "relative",
        dropout=c.dropout > 0,
    )


def block_cost(c: DecoderConfig, B: int, T: int, store: Storage, plan: StoragePlan = FUSED) -> list[OpCost]:
    """All blocks' products, attention and passes, forward and backward; their norms are the residual stream's."""
    N, L = B * T, c.layers
    attention = attention_whole if plan.scores else attention_fused
    ops = [*attention(attention_shape(c, B, T, plan), store=store, count=L)]
    if plan.scores and c.groups < c.heads:
        ops += _expand(c, N, store)
    if not plan.normalised:
        ops.append(_again(norm_forward("norm", N, c.width, kind=c.norm, bias=c.bias, store=store, count=2 * L)))
    ops += [
        linear_forward("qkv", N, c.width, c.qkv_width, bias=c.bias, store=store, count=L),
        linear_input_gradient("qkv", N, c.width, c.qkv_width, store=store, count=L),
        linear_weight_gradient("qkv", N, c.width, c.qkv_width, bias=c.bias, store=store, count=L),
    ]
    mixed, rides = c.heads * c.head_dim, plan.join == "product"
    drop = MASK_FLOPS if rides and c.dropout > 0 else 0
    ops += [
        linear_forward(
            "out", N, mixed, c.width, bias=c.bias, store=store, reads=int(rides), element_flops=drop, count=L
        ),
        linear_input_gradient("out", N, mixed, c.width, store=store, count=L),
        linear_weight_gradient("out", N, mixed, c.width, bias=c.bias, store=store, count=L),
        *_mlp(c, N, store, plan, drop),
    ]
    if c.dropout > 0 and not plan.fused:
        ops += dropout_pass("dropout", N * c.width, store=store, count=2 * L)
    return ops


def _again(op: OpCost) -> OpCost:
    """Work of the forward pass repeated in the backward pass, because its result was not kept: not the model's."""
    return replace(op, name=f"{op.name}.again", phase="backward", flops=0, executed_flops=op.executed)


def _expand(c: DecoderConfig, N: int, store: Storage) -> list[OpCost]:
    narrow, wide = (2 * N * heads * c.head_dim * store.activation for heads in (c.groups, c.heads))
    return [
        OpCost(name="kv_expand", phase="forward", read_bytes=narrow, written_bytes=wide, launches=2, count=c.layers),
        OpCost(name="kv_expand", phase="backward", read_bytes=wide, written_bytes=narrow, launches=2, count=c.layers),
    ]


def _mlp(c: DecoderConfig, N: int, store: Storage, plan: StoragePlan, drop: int) -> list[OpCost]:
    """MLP up and down around the GELU; `drop` is the dropout that rides in the epilogue of `mlp_down`."""
    C, F, L, rides = c.width, c.hidden, c.layers, plan.join == "product"
    gelu, derivative = (gelu_flops(c.gelu), gelu_gradient_flops(c.gelu)) if plan.fused else (0, 0)
    kept = plan.kept_of_gelu(c, N, store) if plan.fused else 0
    written = kept if plan.preactivation else 0
    ops = [
        linear_forward("mlp_up", N, C, F, bias=c.bias, store=store, kept=written, element_flops=gelu, count=L),
        linear_forward("mlp_down", N, F, C, bias=c.bias, store=store, reads=int(rides), element_flops=drop, count=L),
    ]
    if not plan.preactivation:
        again = linear_forward("mlp_up", N, C, F, bias=c.bias, store=store, kept=kept, element_flops=gelu, count=L)
        ops.append(_again(again))
    elif not plan.activation:
        ops.append(_again(gelu_pass("gelu", N, F, c.gelu, store=store, count=L)[0]))
    ops += [
        linear_input_gradient("mlp_down", N, F, C, store=store, kept=kept, element_flops=derivative, count=L),
        linear_weight_gradient("mlp_down", N, F, C, bias=c.bias, store=store, count=L),
        linear_input_gradient("mlp_up", N, C, F, store=store, count=L),
        linear_weight_gradient("mlp_up", N, C, F, bias=c.bias, store=store, count=L),
    ]
    return ops if plan.fused else [*ops, *gelu_pass("gelu", N, F, c.gelu, store=store, count=L)]


def _heads(config: ModelConfig, N: int, store: Storage, plan: StoragePlan) -> list[OpCost]:
    if isinstance(config, LanguageConfig):
        head = _linear("head", N, config.decoder.width, config.vocabulary, False, store)
        return [*head, *cross_entropy("cross_entropy", N, config.vocabulary, form=plan.loss, store=store)]
    ops: list[OpCost] = []
    for inputs, classes in head_widths(config):
        ops += [
            norm_forward("heads.norm", N, inputs, kind="layernorm", bias=True, store=store),
            norm_backward("heads.norm", N, inputs, kind="layernorm", bias=True, store=store),
            *_class_head(N, inputs, inputs // 2, classes, store, plan),
            *cross_entropy("cross_entropy", N, classes, form=plan.loss, store=store),
        ]
    return ops


def _class_head(N: int, inputs: int, half: int, classes: int, store: Storage, plan: StoragePlan) -> list[OpCost]:
    """Linear to half, exact GELU, linear to the classes."""
    gelu, derivative = (gelu_flops("exact"), gelu_gradient_flops("exact")) if plan.fused else (0, 0)
    ops = [
        linear_forward("heads.up", N, inputs, half, bias=True, store=store, writes=1 + plan.fused, element_flops=gelu),
        linear_input_gradient("heads.up", N, inputs, half, store=store),
        linear_weight_gradient("heads.up", N, inputs, half, bias=True, store=store),
        linear_forward("heads.down", N, half, classes, bias=True, store=store),
        linear_input_gradient(
            "heads.down", N, half, classes, store=store, reads=int(plan.fused), element_flops=derivative
        ),
        linear_weight_gradient("heads.down", N, half, classes, bias=True, store=store),
    ]
    return ops if plan.fused else [*ops, *gelu_pass("heads.gelu", N, half, "exact", store=store)]
