"""What would help: the accounting run again with one thing changed, on the same card.

Nothing here is a rule of thumb: each change is a config, a batch or a plan whose whole step is costed like the
original's. What a change does to the model's quality is another question, which a study answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ridgeline.bench.case import Case
from ridgeline.cost import floor_of, table_rates
from ridgeline.cost.roofline import Rates
from ridgeline.hardware import DeviceSpec, Precision
from ridgeline.models import DecoderConfig, PolicyConfig
from ridgeline.models.accounting import parameters
from ridgeline.models.plan import PLANS

WORTH_TIME = 0.01  # of the floor a window
WORTH_MEMORY = 0.05  # of the peak
BIGGER = 4


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change and what it buys.

    Attributes:
        name: what changes, in words.
        floor_s: floor of the changed step.
        saved: part of the floor a window that goes away (negative where it grows).
        tokens_per_s: positions a second at the changed floor.
        windows_per_s: windows a second at the changed floor.
        parameters: of the changed model.
        memory_bytes: peak of the changed step.
        memory_saved: part of the peak that goes away (negative where it grows).
    """

    name: str
    floor_s: float
    saved: float
    tokens_per_s: float
    windows_per_s: float
    parameters: int
    memory_bytes: int
    memory_saved: float


def _with(case: Case, **changes: object) -> Case:
    decoder = replace(case.model.decoder, **changes)  # type: ignore[arg-type]
    return replace(case, model=replace(case.model, decoder=decoder))


def _half_width(c: DecoderConfig) -> dict[str, object] | None:
    """Half the width: half the heads of the same width where they are even in number, else heads of half the width."""
    if c.width % 8 or c.hidden % 2:
        return None
    changes: dict[str, object] = {"width": c.width // 2, "mlp_width": c.hidden // 2}
    if c.heads % 2 == 0:
        groups = max(1, c.groups // 2)
        return {**changes, "heads": c.heads // 2, "kv_heads": groups, "head_width": c.head_dim}
    return {**changes, "head_width": c.head_dim // 2} if c.head_dim % 2 == 0 else None


def _models(case: Case) -> Iterator[tuple[str, Case]]:
    c = case.model.decoder
    if c.hidden > 2 * c.width:
        yield f"MLP of 2× the width (is {c.hidden / c.width:.3g}×)", _with(case, mlp_width=2 * c.width)
    if c.groups > 1:
        yield f"one KV head (are {c.groups})", _with(case, kv_heads=1)
    half = _half_width(c)
    if half is not None:
        yield f"half the width ({c.width // 2})", _with(case, **half)
    if c.layers > 1:
        yield f"half the layers ({c.layers // 2})", _with(case, layers=c.layers // 2)
    if c.norm == "layernorm":
        yield "RMSNorm", _with(case, norm="rmsnorm")
    if c.bias:
        yield "no biases", _with(case, bias=False)
    if c.positions == "relative":
        yield "learned positions instead of the relative term", _with(case, positions="learned", position_table=None)
    if c.dropout > 0:
        yield "no dropout", _with(case, dropout=0.0)


def _steps(case: Case, spec: DeviceSpec) -> Iterator[tuple[str, Case]]:
    if case.context > 1:
        what = "every other frame" if isinstance(case.model, PolicyConfig) else "half the context"
        yield f"{what} ({case.context // 2} positions a window)", replace(case, context=case.context // 2)
    yield f"{BIGGER}× the batch ({BIGGER * case.batch})", replace(case, batch=BIGGER * case.batch)
    for plan in PLANS.values():
        if plan is not case.plan and plan.fused == case.plan.fused:
            yield f"plan {plan.name}", replace(case, plan=plan)
    faster: tuple[Precision, ...] = ("bf16", "fp16", "tf32")
    peak = spec.tflops.get(case.precision, 0)
    better = next((p for p in faster if p in spec.tflops and spec.tflops[p] > peak), None)
    if better is not None:
        yield f"{better} instead of {case.precision}", replace(case, precision=better)


def what_would_help(case: Case, spec: DeviceSpec, rates: Rates) -> list[Change]:
    """Changes that save at least 1 % of the floor a window or 5 % of the peak memory, the largest saving first."""
    floor, peak = floor_of(case.cost().ops, rates).seconds / case.batch, case.memory().peak
    found = []
    for name, changed in (*_models(case), *_steps(case, spec)):
        theirs = rates if changed.precision == case.precision else table_rates(spec, changed.precision)
        seconds, memory = floor_of(changed.cost().ops, theirs).seconds, changed.memory()
        change = Change(
            name=name,
            floor_s=seconds,
            saved=1 - seconds / changed.batch / floor,
            tokens_per_s=changed.tokens / seconds,
            windows_per_s=changed.batch / seconds,
            parameters=parameters(changed.model),
            memory_bytes=memory.peak,
            memory_saved=1 - memory.peak / peak,
        )
        fits = memory.peak <= spec.memory_bytes
        if fits and (change.saved >= WORTH_TIME or change.memory_saved >= WORTH_MEMORY):
            found.append(change)
    return sorted(found, key=lambda change: (-change.saved, -change.memory_saved))
