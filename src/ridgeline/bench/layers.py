"""Where a layer's kernel time goes, in the first article's groups."""

from __future__ import annotations

from collections.abc import Iterable

from ridgeline.bench.kernel_map import COPIES, EITHER, UNMAPPED, KernelMap
from ridgeline.bench.trace import Kernel
from ridgeline.models import ModelConfig

GROUPS = {
    "qkv": "QKV",
    "attention": "attention",
    "kv_expand": "attention",
    "relative_table": "relative table",
    "out": "output projection",
    "mlp_up": "MLP up",
    "mlp_down": "MLP down",
    "norm": "norms",
    "gelu": "pointwise",
    "dropout": "pointwise",
    "residual": "pointwise",
    "bias gradients": "pointwise",
    COPIES: "fills and copies",
    UNMAPPED: "not told",
}
"""The group of each op inside a layer; "attention" is scores, softmax and values. What is not here lies outside the
layers: embedding, input, heads, loss, update."""
SEPARATOR = " · "  # between phase and group
PHASES = ("forward", "backward")
UNTOLD = 0.1  # share of kernel time without a phase from which a table would mislead


def group_of(op: str) -> str | None:
    """The group of an op's name as the kernel map gives it; None for what lies outside the layers.

    A kernel that works for several groups has their names joined; one for all weight gradients has a group of its own.
    """
    names = op.split(EITHER)
    groups = list(dict.fromkeys(GROUPS.get(name) or GROUPS.get(name.split(".")[0]) for name in names))
    if None in groups:
        return None
    if len(groups) > 2 and all(name.endswith(".weight_gradient") for name in names):
        return "weight gradients"
    return " + ".join(group for group in groups if group is not None)


def kernel_groups(
    kernels: Iterable[Kernel], config: ModelConfig, batch: int, context: int, steps: int
) -> dict[str, float] | None:
    """Milliseconds of a layer's kernels in a step, by "phase · group", in the order of the groups.

    Args:
        kernels: of a profile of `steps` steps that ran call by call.
        config, batch, context: what was run.
        steps: how many steps.

    Returns:
        None if the trace does not tell the phases, as on a CPU or of graphs that torch.compile captures by itself.
    """
    to_op = KernelMap(config, batch, context)
    totals: dict[str, float] = {}
    kernels = list(kernels)
    if sum(k.duration for k in kernels if k.phase is None) > UNTOLD * sum(k.duration for k in kernels):
        return None
    for kernel in kernels:
        group = group_of(to_op(kernel))
        if kernel.phase in PHASES and group is not None:
            key = f"{kernel.phase}{SEPARATOR}{group}"
            totals[key] = totals.get(key, 0.0) + kernel.duration / 1e3 / steps / config.decoder.layers
    order = {group: place for place, group in enumerate(dict.fromkeys(GROUPS.values()))}

    def place(key: str) -> tuple[int, int]:
        phase, group = key.split(SEPARATOR)
        return PHASES.index(phase), order.get(group.split(" + ")[0], len(order))

    return {key: totals[key] for key in sorted(totals, key=place)} or None
