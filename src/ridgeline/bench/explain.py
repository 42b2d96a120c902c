"""Where a training step's time must go on a card, before it is run: FLOPs, bytes, floors, memory, and what would help.

A floor is the least time that the card's paper allows (and, where the card was measured, what it reached): each op
as long as its busiest resource, one op after another. The bytes are those that every op moves when it runs alone;
ops whose tensors all fit in the level-2 cache may beat that, and the result says how many these are.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from ridgeline.bench.case import Case, can_fuse, check_fits, check_plan
from ridgeline.bench.changes import Change, what_would_help
from ridgeline.cost import (
    Floor,
    OpCost,
    Phase,
    Rates,
    StepCost,
    floor_of,
    measured_rates,
    overlapped_floor,
    table_rates,
)
from ridgeline.errors import UnsupportedError
from ridgeline.hardware import (
    Ceilings,
    DeviceSpec,
    Precision,
    check_precision,
    default_precision,
    load_ceilings,
    read_driver,
    resolve,
)
from ridgeline.models.accounting import parameters
from ridgeline.models.memory import Memory
from ridgeline.models.plan import FUSED, PLAIN, StoragePlan, find_plan
from ridgeline.presets import find_config


@dataclass(frozen=True, kw_only=True)
class Row:
    """One op in one phase, all its runs in a step together; units as in OpCost.

    Attributes:
        name, phase: of the op.
        flops, executed_flops, vector_flops, bytes: totals.
        floor: least seconds, and what bounds them.
        share: of the step's floor.
        launches: kernels at least.
    """

    name: str
    phase: Phase
    flops: float
    executed_flops: float
    vector_flops: float
    bytes: float
    floor: Floor
    share: float
    launches: int

    @property
    def intensity(self) -> float:
        """Arithmetic of any kind, FLOP a byte."""
        return (self.executed_flops + self.vector_flops) / self.bytes if self.bytes else 0.0

    def to_json(self) -> dict[str, Any]:
        """The row as plain JSON values."""
        values = {**asdict(self), "floor_s": self.floor.seconds, "bound": self.floor.bound}
        del values["floor"]
        return {**values, "intensity": self.intensity}


@dataclass(frozen=True, kw_only=True)
class ExplainResult:
    """What `explain` found.

    Attributes:
        case: the step.
        spec: the card.
        rates: what the floors were computed with.
        cost: every op.
        rows: the same by op and phase, the longest first within a phase.
        memory: of the step.
        changes: what would help.
        measured: rates that this card reached when it was measured, if it was.
        ceilings: that measurement.
    """

    case: Case
    spec: DeviceSpec
    rates: Rates
    cost: StepCost
    rows: tuple[Row, ...]
    memory: Memory
    changes: tuple[Change, ...]
    measured: Rates | None = None
    ceilings: Ceilings | None = None

    @property
    def floor_s(self) -> float:
        """Least seconds of the step, one op after another."""
        return floor_of(self.cost.ops, self.rates).seconds

    @property
    def overlapped(self) -> Floor:
        """Least seconds if every op could run under every other."""
        return overlapped_floor(self.cost.ops, self.rates)

    @property
    def measured_floor_s(self) -> float | None:
        """The floor at the rates that the card reached."""
        return None if self.measured is None else floor_of(self.cost.ops, self.measured).seconds

    @property
    def launch_s(self) -> float | None:
        """What launching the step's kernels takes at least, where the card's launch time was measured."""
        if self.ceilings is None or self.ceilings.launch_s is None:
            return None
        return self.ceilings.launch_s * self.cost.launches

    @property
    def cached(self) -> int:
        """Ops whose tensors all fit in the level-2 cache: their bytes may not travel to memory."""
        cache = self.spec.l2_bytes
        return 0 if cache is None else sum(op.count for op in self.cost.ops if 0 < op.bytes <= cache)

    def to_json(self) -> dict[str, Any]:
        """The object that `explain --json` prints; seconds, bytes and FLOPs."""
        case, cost = self.case, self.cost
        return {
            "preset": case.name,
            "device": self.spec.key,
            "batch": case.batch,
            "context": case.context,
            "precision": case.precision,
            "accumulation": case.accumulation,
            "plan": case.plan.name,
            "parameters": parameters(case.model),
            "step": {
                "flops": cost.flops,
                "bytes": cost.bytes,
                "floor_s": self.floor_s,
                "tokens_per_s": case.tokens / self.floor_s,
                "dense_flops": cost.dense_flops,
                "executed_flops": cost.executed_flops,
                "vector_flops": cost.total("vector_flops"),
                "overlapped_floor_s": self.overlapped.seconds,
                "measured_floor_s": self.measured_floor_s,
                "launches": cost.launches,
                "launch_s": self.launch_s,
            },
            "memory": self.memory.to_json(),
            "saved": self.memory.saved,
            "rates": asdict(self.rates),
            "ops": [row.to_json() for row in self.rows],
            "changes": [asdict(change) for change in self.changes],
        }


def rows_of(cost: StepCost, rates: Rates) -> tuple[Row, ...]:
    """The step's ops by name and phase, the longest first within a phase."""
    groups: dict[tuple[Phase, str], list[OpCost]] = {}
    for op in cost.ops:
        groups.setdefault((op.phase, op.name), []).append(op)
    total = floor_of(cost.ops, rates).seconds
    rows = []
    for (phase, name), ops in groups.items():
        step, floor = StepCost(tuple(ops)), floor_of(ops, rates)
        if floor.seconds == 0:  # what rides in another op's kernels, such as the fused loss's gradient
            continue
        rows.append(
            Row(
                name=name,
                phase=phase,
                flops=step.flops,
                executed_flops=step.executed_flops,
                vector_flops=step.total("vector_flops"),
                bytes=step.bytes,
                floor=floor,
                share=floor.seconds / total,
                launches=step.launches,
            )
        )
    order = {"forward": 0, "backward": 1, "optimizer": 2}
    return tuple(sorted(rows, key=lambda row: (order[row.phase], -row.floor.seconds)))


def default_plan(spec: DeviceSpec) -> StoragePlan:
    """The fused block where the card can run it, else PyTorch's own ops."""
    return FUSED if can_fuse(spec) else PLAIN


def rates_for(spec: DeviceSpec, precision: Precision, ceilings: Ceilings | None) -> tuple[Rates, Rates | None]:
    """The rates to compute floors with, and the measured ones beside them: a card that the table does not know has
    no others.

    Raises:
        UnsupportedError: neither a table nor a measurement has the precision on this card.
    """
    measured = None
    if ceilings is not None and precision in ceilings.products:
        measured = measured_rates(spec, ceilings, precision)
    if spec.tflops or measured is None:
        return table_rates(spec, check_precision(spec, precision)), measured
    return measured, measured


def explain(case: Case, spec: DeviceSpec, *, ceilings: Ceilings | None = None) -> ExplainResult:
    """Account for a step on a card.

    Args:
        case: the step.
        spec: the card.
        ceilings: what the card reached when it was measured, if it was.

    Raises:
        ConfigError: the step does not fit the card's memory; says by how much.
        UnsupportedError: the card lacks the precision.
    """
    rates, measured = rates_for(spec, case.precision, ceilings)
    check_fits(case, spec)
    cost = case.cost()
    return ExplainResult(
        case=case,
        spec=spec,
        rates=rates,
        cost=cost,
        rows=rows_of(cost, rates),
        memory=case.memory(),
        changes=tuple(what_would_help(case, spec, rates)),
        measured=measured,
        ceilings=ceilings if measured is not None else None,
    )


def preset_case(
    preset: str,
    spec: DeviceSpec,
    *,
    batch: int | None = None,
    context: int | None = None,
    precision: str | None = None,
    plan: str | None = None,
    accumulation: int | None = None,
    measured: bool = False,
) -> Case:
    """The step of a preset on a card; what is None is the preset's own, or follows from the card.

    Args:
        preset: its name, or what else `find_config` takes.
        spec: the card.
        batch: windows a step; naming one drops the preset's accumulation.
        context: positions of a window; may be longer than the preset's where its position table allows.
        precision: bf16, else fp16, else fp32 by what the card has.
        plan: a name of PLANS.
        accumulation: parts of a batch.
        measured: the card's rates are measured, so that a precision may be missing from the table.

    Raises:
        ConfigError, UnsupportedError: a name or size that cannot be.
    """
    config = find_config(preset)
    length = config.window.context if context is None else context
    decoder = replace(config.model.decoder, context=max(length, config.window.context))
    parts = accumulation
    if parts is None:
        parts = config.accumulation if batch is None else 1
    if precision is None:
        precision = default_precision(spec)
    elif not measured:
        check_precision(spec, precision)
    return Case(
        name=preset,
        model=replace(config.model, decoder=decoder),
        batch=config.batch if batch is None else batch,
        context=length,
        precision=precision,  # type: ignore[arg-type]
        plan=default_plan(spec) if plan is None else check_plan(find_plan(plan), spec),
        accumulation=parts,
        algorithm=config.optimizer.algorithm,
    )


def explain_preset(
    preset: str,
    *,
    device: str | None = None,
    batch: int | None = None,
    context: int | None = None,
    precision: str | None = None,
    plan: str | None = None,
    accumulation: int | None = None,
) -> ExplainResult:
    """`ridgeline explain PRESET`: account for a preset's step on a card of the table or on the one that is here.

    Args:
        preset: its name, or what else `find_config` takes.
        device: a key of the table; None for the card that is here.
        batch, context, precision, plan, accumulation: as for `preset_case`.

    Raises:
        ConfigError, UnsupportedError: unknown names, a card that is neither here nor in the table, a precision that
            it lacks, a batch that it cannot hold.
    """
    config = find_config(preset)  # a mistyped preset is reported before a missing card
    spec = resolve(device)
    ceilings = present_ceilings(spec)
    if not spec.tflops and ceilings is None:
        raise UnsupportedError(
            f"{spec.name} is not in the table of cards and was not measured; "
            f"run: ridgeline explain {config.preset} --measure"
        )
    if precision is None and not spec.tflops:
        precision = _best_measured(ceilings)
    case = preset_case(
        preset,
        spec,
        batch=batch,
        context=context,
        precision=precision,
        plan=plan,
        accumulation=accumulation,
        measured=not spec.tflops,
    )
    return explain(case, spec, ceilings=ceilings)


def _best_measured(ceilings: Ceilings | None) -> Precision:
    order: tuple[Precision, ...] = ("bf16", "fp16")
    return next((p for p in order if ceilings is not None and p in ceilings.products), "fp32")


def present_ceilings(spec: DeviceSpec) -> Ceilings | None:
    """The stored ceilings of `spec`, if that is the card that is here."""
    reading = read_driver()
    if reading is None or (spec.driver_names and reading.name.lower().removeprefix("nvidia ") not in spec.driver_names):
        return None
    return load_ceilings(reading.name)
