"""Which op of the model a kernel works for.

Matrix products are told by the shapes of the operator that launched them: a linear layer's forward product, input
gradient and weight gradient have shapes of their own, and where two layers share one, the phase tells them apart.
Other kernels are told by the names of their operator and of the kernel itself, in which torch.compile lists what it
fused; a kernel that fuses several goes to the first of the rules that matches. What no rule knows stays unmapped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ridgeline.bench.trace import Kernel, Shape
from ridgeline.cost import Phase
from ridgeline.models import LanguageConfig, ModelConfig
from ridgeline.models.accounting import head_widths
from ridgeline.ops.scope import PRODUCT

UNMAPPED = "unmapped"
COPIES = "copies and fills"
EITHER = " or "  # between the names of layers whose products have one shape in one phase
PADDING = 16  # torch.compile pads unaligned product sizes to a multiple of up to this

# operator → where its two factors stand among its tensors; with out=, the result follows them
_PRODUCTS = {"aten::mm": 0, "aten::addmm": 1, "aten::addmm_": 1, "aten::_addmm_activation": 1}
_UPDATE = re.compile(r"adam\w*_update|fused_?adam|FusedAdam", re.IGNORECASE)
_BATCHED = re.compile(r"aten::(bmm|baddbmm)")
_RULES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), name)
    for pattern, name in (
        (r"log_?softmax|nll_loss|cross_entropy|log_?sum_?exp|count_valid|mean_loss", "cross_entropy"),
        (r"(?<![a-z])table_gradient(_kernel)?$", "relative_table"),
        (r"flash|fmha|sdpa|scaled_dot_product|attention|attn|softmax|(query|key)_gradient_kernel", "attention"),
        (r"(?<![a-z_])forward_kernel$|key_parts_kernel|group_gradients", "attention"),
        (r"layer_?norm|rms_?norm|norm_(forward|backward)_kernel|GammaBeta", "norm"),
        (r"gelu", "gelu"),
        (r"embedding|index_put|index_select|indexing_backward|sum_and_scatter|grad_weight|gather_kernel", "embedding"),
        (r"table_gradient_", "embedding"),
        (r"dropout|bernoulli|philox|rand", "dropout"),
        # the relative term's skew, the causal mask, the division of the joint projection
        (r"constant_pad_nd|masked_fill|triu|split_with_sizes", "attention"),
    )
)
# tried only on what nothing above knows: an addition, a sum over rows and a change of type can belong to anything
_WEAK_RULES: tuple[tuple[str, Phase | None, str], ...] = (
    (r"one_hot|(?<![a-z])cat(?![a-z])|CatArray", "forward", "input"),
    (r"(?<![a-z])cat(?![a-z])|CatArray", "backward", "attention"),  # the gradients of q, k and v, joined
    (r"aten::sum|reduce_kernel|fused_sum|column_sums|fused__to_copy_sum", "backward", "bias gradients"),
    (r"aten::(copy_|_to_copy|to|clone|contiguous|zeros|zero_|fill_)|direct_copy|fused__to_copy|fused_mm", None, COPIES),
    (r"aten::add|CUDAFunctor_add|fused_add", None, "residual"),
)

# this package's own kernels: what they work for in the forward and in the backward pass
_HEADS = (
    EITHER.join(("heads.norm", "heads.up", "heads.down", "cross_entropy")),
    EITHER.join(
        ("heads.norm", *(f"heads.{part}.{side}_gradient" for part in ("up", "down") for side in ("input", "weight")))
    ),
)
_WEIGHTS = EITHER.join(f"{name}.weight_gradient" for name in ("qkv", "out", "mlp_up", "mlp_down"))
_OWN: dict[str, tuple[str, str]] = {
    "gemm": ("mlp_up", "mlp_down.input_gradient"),
    "stationary": ("mlp_up", "mlp_down.input_gradient"),
    "mlp_forward": (f"mlp_up{EITHER}mlp_down",) * 2,
    **dict.fromkeys(
        ("mlp_backward", "mlp_many_backward"), (f"mlp_down.input_gradient{EITHER}mlp_up.input_gradient",) * 2
    ),
    "project_forward": ("out", "out"),
    "project_backward": ("qkv.input_gradient",) * 2,
    "norm_head": (EITHER.join(("norm", "head", "cross_entropy", "head.input_gradient", "head.weight_gradient")),) * 2,
    "head_gradients_kernel": (f"norm{EITHER}head.weight_gradient",) * 2,
    "product_of_floats": ("mlp_up", "mlp_down.input_gradient"),
    "weight_gradients": (_WEIGHTS, _WEIGHTS),
    "gradients_of_floats": (_WEIGHTS, _WEIGHTS),
    "gather_norm_kernel": (f"embedding{EITHER}norm",) * 2,
    "reduce": ("bias gradients", "bias gradients"),
    "folded_statistics_kernel": ("norm", "norm"),
    "folded_weights_kernel": ("mlp_up", "mlp_up"),
    "folded_gradient_kernel": ("mlp_up.weight_gradient",) * 2,
    "input_vector_kernel": ("input", "input"),
    "tables": ("embedding", "embedding"),
    **dict.fromkeys(
        ("pack_kernel", "head_kernel", "head", "scale_kernel", "state_gradient_kernel", "weight_gradients_kernel"),
        _HEADS,
    ),
}

Same = Callable[[int, int], bool]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A linear layer as products show it: x (N, inputs) → y (N, outputs)."""

    name: str
    inputs: int
    outputs: int


def layers_of(config: ModelConfig) -> Iterator[Layer]:
    """Every linear layer of a model, once for each shape."""
    c = config.decoder
    yield Layer(name="qkv", inputs=c.width, outputs=c.qkv_width)
    yield Layer(name="out", inputs=c.heads * c.head_dim, outputs=c.width)
    yield Layer(name="mlp_up", inputs=c.width, outputs=c.hidden)
    yield Layer(name="mlp_down", inputs=c.hidden, outputs=c.width)
    if isinstance(config, LanguageConfig):
        yield Layer(name="head", inputs=c.width, outputs=config.vocabulary)
        return
    yield Layer(name="input", inputs=config.input_width, outputs=c.width)
    for inputs, classes in head_widths(config):
        yield Layer(name="heads.up", inputs=inputs, outputs=inputs // 2)
        yield Layer(name="heads.down", inputs=inputs // 2, outputs=classes)


def _exactly(found: int, wanted: int) -> bool:
    return found == wanted


def _padded(found: int, wanted: int) -> bool:
    return wanted <= found < wanted + PADDING and (found == wanted or found % 4 == 0)


class KernelMap:
    """Maps kernels of one model at one batch to its ops.

    Args:
        config: the model.
        batch, context: windows and positions of the step that was profiled.
    """

    def __init__(self, config: ModelConfig, batch: int, context: int) -> None:
        self.config, self.T, self.N = config, context, batch * context
        self.layers = tuple(layers_of(config))
        self.head_widths = (
            set()
            if isinstance(config, LanguageConfig)
            else {w for inputs, _ in head_widths(config) for w in (inputs, inputs // 2)} - {config.decoder.width}
        )

    def __call__(self, kernel: Kernel) -> str:
        """The name of the op, as the accounting has it; UNMAPPED where no rule knows it."""
        if kernel.update:
            return "adamw"
        if kernel.scope.startswith(PRODUCT):
            return self._named_product(kernel.scope)
        if kernel.scope:
            return kernel.scope
        if kernel.kind != "kernel":
            return COPIES
        if kernel.phase == "optimizer":
            return "adamw" if _UPDATE.search(kernel.name) else "grad_norm"
        if kernel.operator in _PRODUCTS:
            return self._product(kernel)
        if kernel.name in _OWN:
            return _OWN[kernel.name][kernel.phase == "backward"]
        if _BATCHED.match(kernel.operator) or self._has_scores(kernel.shapes):
            return "attention"
        text = f"{kernel.operator} {kernel.name}"
        name = next((name for rule, name in _RULES if rule.search(text)), None)
        if name in ("norm", "gelu") and any(shape[-1] in self.head_widths for shape in kernel.shapes):
            return f"heads.{name}"
        return name or self._weakly(text, kernel.phase)

    @staticmethod
    def _weakly(text: str, phase: Phase | None) -> str:
        for rule, only, name in _WEAK_RULES:
            if only in (None, phase) and re.search(rule, text, re.IGNORECASE):
                return name
        return UNMAPPED

    def _has_scores(self, shapes: tuple[Shape, ...]) -> bool:
        """Whether an input is (B, H, T, T), or (B · H, T, T), give or take the skew's one column or row."""
        sides, heads = (self.T, self.T + 1), self.config.decoder.heads
        return any(
            shape[-1] in sides and shape[-2] in sides
            for shape in shapes
            if (len(shape) == 4 and shape[1] == heads) or (len(shape) == 3 and shape[0] * self.T == self.N * heads)
        )

    def _product(self, kernel: Kernel) -> str:
        first = _PRODUCTS[kernel.operator]
        factors = kernel.shapes[first : first + 2]
        if [len(shape) for shape in factors] != [2, 2]:
            return UNMAPPED
        (rows, depth), (_, columns) = factors
        if self.N * self.config.decoder.heads in (rows, depth) and self.config.decoder.positions == "relative":
            return "attention"  # the relative product, folded to two dimensions
        name = self._by_shape(rows, depth, columns, kernel.phase)
        if name is not None:
            return name
        return self._packed_heads(kernel.phase == "backward") if self.N in (rows, depth) else UNMAPPED

    def _packed_heads(self, backward: bool) -> str:
        """A policy's product that is no layer's: all heads' weights side by side."""
        return UNMAPPED if isinstance(self.config, LanguageConfig) else _HEADS[backward]

    def _named_product(self, scope: str) -> str:
        """A product that says what it is; see ops/scope.py."""
        kind, *sizes = scope.removeprefix(PRODUCT).split(":")
        rows, inputs, outputs = map(int, sizes)
        backward = kind == "input_gradient"
        if rows != self.N:
            return UNMAPPED
        depth, columns = (outputs, inputs) if backward else (inputs, outputs)
        phase: Phase = "backward" if backward else "forward"
        return self._by_shape(rows, depth, columns, phase) or self._packed_heads(backward)

    def _by_shape(self, rows: int, depth: int, columns: int, phase: Phase | None) -> str | None:
        """The layers that have such a product, (rows, depth) × (depth, columns); None where none does."""
        for same in (_exactly, _padded):
            roles = ((layer, self._role(layer, rows, depth, columns, phase, same)) for layer in self.layers)
            names = dict.fromkeys(f"{layer.name}{role}" for layer, role in roles if role is not None)
            if names:
                return EITHER.join(names)
        return None

    def _role(self, layer: Layer, rows: int, depth: int, columns: int, phase: Phase | None, same: Same) -> str | None:
        backward = phase == "backward" or layer.name == "head"  # a fused loss has its gradients in the forward pass
        if rows == self.N:
            if phase == "forward" and same(depth, layer.inputs) and same(columns, layer.outputs):
                return ""
            if backward and same(depth, layer.outputs) and same(columns, layer.inputs):
                return ".input_gradient"
        # PyTorch computes dyᵀ x; the transpose of it is tried only by layers whose shape no other one has
        if depth == self.N and backward:
            if same(rows, layer.outputs) and same(columns, layer.inputs):
                return ".weight_gradient"
            alone = not any((o.outputs, o.inputs) == (layer.inputs, layer.outputs) for o in self.layers)
            if alone and same(rows, layer.inputs) and same(columns, layer.outputs):
                return ".weight_gradient"
        return None
