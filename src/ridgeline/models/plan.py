"""What a training step keeps for its backward pass, and what it fuses: the parameter of all accounting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ridgeline.errors import UnsupportedError, nearest

Join = Literal["pass", "norm", "product"]


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
