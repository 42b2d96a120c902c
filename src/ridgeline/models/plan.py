"""What a training step keeps for its backward pass, and what it fuses: the parameter of all accounting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ridgeline.cost import Storage
from ridgeline.errors import UnsupportedError, nearest
from ridgeline.models.config import DecoderConfig
from ridgeline.ops.linear.stationary import LARGEST_K
from ridgeline.ops.mlp.head import MOST_CLASSES
from ridgeline.ops.mlp.head import WIDTH as HEAD_WIDTH

Join = Literal["pass", "norm", "product"]
# Where the row-fused kernels serve, whose slopes have 16 bits.
WAVE_WIDTH = 256
WAVE_TOKENS = 8448  # rows up to which they have one tile a multiprocessor; with two they lose 16 %
FEW_TOKENS = 32768  # rows up to which a backward kernel leaves room for another
MANY_TOKENS = 65536  # rows from which narrow blocks gain by groups of weight gradients and lose by early launches, 2 %
GATHERED_BYTES = 1 << 29  # of gradients that wait for their launch: by then there is enough to fill a card


@dataclass(frozen=True, kw_only=True)
class StoragePlan:
    """One way to run a block.

    Attributes:
        name: as the command line says it.
        join: where a branch meets the residual stream: in a "pass" of its own, in the next "norm", or in the
            epilogue of the "product" that makes the branch. Dropout and GELU are passes of their own with "pass"
            and ride along otherwise.
        scores: the (B, H, T, T) attention weights stay in memory; otherwise their row sums, and scores are repeated.
        normalised: norm outputs are kept; otherwise recomputed from the residual and its statistics.
        preactivation: GELU's input (or, beside its output, its derivative) is kept; otherwise its product is repeated.
        activation: GELU's output is kept; otherwise recomputed from its input.
        masks: dropout masks are kept, a byte an element; otherwise drawn again.
        loss: "plain" as PyTorch has it (fp32 logits), or "fused".
    """

    name: str
    join: Join
    scores: bool
    normalised: bool = True
    preactivation: bool = True
    activation: bool = True
    masks: bool = False
    loss: Literal["plain", "fused"] = "fused"

    @property
    def fused(self) -> bool:
        """Whether pointwise work rides in the kernels of products and norms."""
        return self.join != "pass"

    def kept_of_gelu(self, c: DecoderConfig, rows: int, store: Storage) -> int:
        """Bytes a number of what the backward pass takes of GELU: its derivative, or its input where kept alone."""
        if not self.fused or (self.preactivation and not self.activation):
            return store.activation
        whole_rows = self.activation and c.width <= WAVE_WIDTH and rows <= WAVE_TOKENS
        return store.activation if whole_rows else store.slope

    def folds_norm(self, c: DecoderConfig, rows: int, store: Storage) -> bool:
        """Whether no kernel makes the norm before the MLP (models/fused/choices.py, on a Hopper card)."""
        wide = WAVE_WIDTH < max(c.width, c.heads * c.head_dim) <= LARGEST_K
        return self is FUSED and store.activation == 2 and wide and rows > FEW_TOKENS

    def gathers(self, c: DecoderConfig, rows: int, store: Storage) -> bool:
        """Whether weight gradients are made by one launch, and all that they read waits for it (likewise)."""
        narrow = c.width <= WAVE_WIDTH and not FEW_TOKENS < rows <= MANY_TOKENS
        return self.fused and (narrow or store.activation == 4)

    def joins_head(self, c: DecoderConfig, rows: int, store: Storage, classes: int) -> bool:
        """Whether the last norm, a head of few classes and its loss are one kernel (models/fused/language.py)."""
        fits = c.width == HEAD_WIDTH and classes <= MOST_CLASSES and c.dropout == 0
        return fits and store.slope < store.activation and self.gathers(c, rows, store)  # bf16 alone


# what PyTorch's engines do, and what the engines best, best+lean and best+leanest do
PLAIN = StoragePlan(name="plain", join="pass", scores=True, masks=True, loss="plain")
FUSED = StoragePlan(name="fused", join="norm", scores=False)
LEAN = StoragePlan(name="lean", join="norm", scores=False, normalised=False, activation=False)
LEANEST = StoragePlan(
    name="leanest", join="norm", scores=False, normalised=False, preactivation=False, activation=False
)

PLANS: dict[str, StoragePlan] = {plan.name: plan for plan in (PLAIN, FUSED, LEAN, LEANEST)}


def find_plan(name: str) -> StoragePlan:
    """The plan called `name`.

    Raises:
        UnsupportedError: there is none.
    """
    if name not in PLANS:
        raise UnsupportedError(nearest(name, PLANS, "plan"))
    return PLANS[name]


def fused_plan(impl: object) -> StoragePlan | None:
    """What the fused blocks keep as the implementation "fused", "fused+lean" or the like; None for any other.

    Raises:
        UnsupportedError: they have no such plan.
    """
    base, plus, name = str(impl).partition("+")
    if base != FUSED.name or not plus:
        return FUSED if base == FUSED.name else None
    known = [plan.name for plan in PLANS.values() if plan.fused and plan is not FUSED]
    if name not in known:
        raise UnsupportedError(nearest(name, known, "plan of the fused blocks"))
    return PLANS[name]
