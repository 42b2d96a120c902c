"""What is explained: a model at a batch, a context and a precision, on a storage plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ridgeline.cost import StepCost
from ridgeline.errors import ConfigError, UnsupportedError
from ridgeline.hardware import DeviceSpec, Precision
from ridgeline.hardware.spec import GIB, MIB
from ridgeline.models import ModelConfig
from ridgeline.models.accounting import check_context, part_of, step_cost
from ridgeline.models.memory import Memory, memory
from ridgeline.models.plan import LEAN, LEANEST, PLAIN, PLANS, StoragePlan

FUSED_FROM = (8, 0)  # compute capability from which the fused block runs
MOST_PARTS = 1024  # parts of a batch that are worth naming


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training step to account for.

    Attributes:
        name: preset that the model comes from.
        model: its config.
        batch: windows in a step.
        context: positions of a window.
        precision: of products and activations.
        plan: what is kept and what is fused.
        accumulation: parts that the batch is cut into.
        algorithm: of the preset's optimizer; the update is costed as AdamW's, which benchmarks take too.
    """

    name: str
    model: ModelConfig
    batch: int
    context: int
    precision: Precision
    plan: StoragePlan
    accumulation: int = 1
    algorithm: str = "adamw"

    def __post_init__(self) -> None:
        part_of(self.batch, self.accumulation)
        check_context(self.model, self.context)

    @property
    def tokens(self) -> int:
        """Positions that a step learns from."""
        return self.batch * self.context

    def cost(self) -> StepCost:
        """Every op of the step."""
        return step_cost(
            self.model,
            batch=self.batch,
            context=self.context,
            precision=self.precision,
            plan=self.plan,
            accumulation=self.accumulation,
        )

    def memory(self) -> Memory:
        """Device memory of the step."""
        return memory(
            self.model,
            batch=self.batch,
            context=self.context,
            precision=self.precision,
            plan=self.plan,
            accumulation=self.accumulation,
        )

    def fits(self, spec: DeviceSpec) -> bool:
        """Whether the step's peak is below the card's memory."""
        return self.memory().peak <= spec.memory_bytes


def can_fuse(spec: DeviceSpec) -> bool:
    """Whether the card can run the fused block's kernels."""
    return spec.capability is not None and spec.capability >= FUSED_FROM


def check_plan(plan: StoragePlan, spec: DeviceSpec) -> StoragePlan:
    """`plan` itself if the card can run it.

    Raises:
        UnsupportedError: it fuses, and the card cannot.
    """
    if plan.fused and not can_fuse(spec):
        raise UnsupportedError(
            f"the plan {plan.name} needs a card of compute capability {FUSED_FROM[0]}.{FUSED_FROM[1]} or newer, "
            f"and {spec.name} is none; use the plan {PLAIN.name}"
        )
    return plan


def largest_batch(case: Case, spec: DeviceSpec) -> int:
    """The most windows that fit the card in one part; 0 if not even one does."""
    low, high = 0, case.batch
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if replace(case, batch=middle, accumulation=1).fits(spec) else (low, middle - 1)
    return low


def check_fits(case: Case, spec: DeviceSpec) -> None:
    """Refuse a step that the card cannot hold.

    Raises:
        ConfigError: says by how much, and what would fit.
    """
    peak, have = case.memory().peak, spec.memory_bytes
    if peak <= have:
        return
    most = largest_batch(case, spec)
    what, parts_now = ("part", f" in {case.accumulation} parts") if case.accumulation > 1 else ("batch", "")
    ways = [f"the largest {what} that fits is {most}" if most else "not even one window fits"]
    if 0 < most < case.batch:
        least = -(-case.batch // most)
        parts = next((n for n in range(least, min(case.batch, MOST_PARTS) + 1) if case.batch % n == 0), None)
        if parts is not None:
            ways.append(f"or cut it by accumulation={parts}")
    leaner = [
        name
        for name, plan in PLANS.items()
        if (can_fuse(spec) or not plan.fused) and replace(case, plan=plan).fits(spec)
    ]
    if leaner:
        engine = f" (engine best+{leaner[0]})" if PLANS[leaner[0]] in (LEAN, LEANEST) else ""
        ways.append(f"or use the plan {leaner[0]}{engine}")
    over = peak - have
    more = f"{over / GIB:.1f} GiB" if over > GIB / 10 else f"{max(1, round(over / MIB))} MiB"
    raise ConfigError(
        f"batch={case.batch}{parts_now} needs {peak / GIB:.1f} GiB on the plan {case.plan.name}, "
        f"{more} more than the {have / GIB:.1f} GiB of {spec.name}: {', '.join(ways)}"
    )
