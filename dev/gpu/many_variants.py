"""Which kernels of many rows are launched: this revision's, another's from a checkout in BEFORE, product and join apart."""

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import NamedTuple

from ridgeline.models.fused import stack
from ridgeline.models.fused.choices import JOINED, choose, parted
from ridgeline.ops.linear import stationary, wgrad
from ridgeline.ops.mlp import many

SOURCE, GRADIENTS, WEIGHTS = many.SOURCE, wgrad.SOURCE, stationary.SOURCE
MACROS = {many: many.macros, wgrad: wgrad.macros}


def before(source):
    """Another revision's kernel, from a checkout in BEFORE; the kernel itself without one."""
    package = many.cuda.__file__.split("src/ridgeline/")[0]
    return Path(os.environ.get("BEFORE", package)).resolve() / source.relative_to(package)


class Variant(NamedTuple):
    """Kernels of many rows, with further macros for a trial."""

    joined: bool = True
    source: Path = SOURCE
    macros: dict = {}
    gradients: Path = GRADIENTS
    gradient_macros: dict = {}
    weights: Path = WEIGHTS  # the product with weights in registers


OLD = Variant(source=before(SOURCE), gradients=before(GRADIENTS), weights=before(WEIGHTS))
PRODUCTS = JOINED | parted(JOINED)
VARIANTS = {"apart": OLD._replace(joined=False), "before": OLD, "now": Variant()}
BOTH = ("before", "now")


def take(variant):
    """The kernels that are launched from here on."""
    many.SOURCE, wgrad.SOURCE = variant.source, variant.gradients
    stationary.SOURCE = variant.weights
    stationary._kernel.cache_clear()
    many.macros = lambda *a, **k: {**MACROS[many](*a, **k), **variant.macros}
    wgrad.macros = lambda *a, **k: {**MACROS[wgrad](*a, **k), **variant.gradient_macros}


@contextlib.contextmanager
def variant(name):
    """Stacks and steps that are made meanwhile."""
    take(VARIANTS[name])
    joined = PRODUCTS if VARIANTS[name].joined else frozenset()

    def choice(*arguments):
        chosen_here = choose(*arguments)
        return dataclasses.replace(chosen_here, joined=joined & chosen_here.joined)

    stack.choose = choice
    try:
        yield
    finally:
        take(Variant())
        stack.choose = choose
