"""Where a step's time really goes: profiled kernels, mapped to ops and set beside the floors.

The step is timed first, without a profiler. Then a few steps are profiled, not captured, because a graph's kernels do
not say who launched them; of a contender that runs captured, the captured step is profiled too, for overlap and gaps.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from ridgeline.bench.circumstances import git_revision, versions
from ridgeline.bench.contenders import Contender, build_step, find_contender
from ridgeline.bench.explain import ExplainResult, explain, preset_case
from ridgeline.bench.kernel_map import EITHER, UNMAPPED, KernelMap
from ridgeline.bench.nvml import Clocks, Monitor, course, monitor
from ridgeline.bench.timing import Timing, summarise, time_steps, warm_up
from ridgeline.bench.trace import Kernel, Occupation, occupation, profile, read_trace
from ridgeline.bench.workloads import Workload, random_batch
from ridgeline.cost import PHASES, Phase, Utilisation, step_utilisation
from ridgeline.errors import ConfigError, UnsupportedError
from ridgeline.hardware import Ceilings, load_ceilings, measure_ceilings, read_driver, resolve, save_ceilings
from ridgeline.models import ModelConfig
from ridgeline.records import ContenderResult, OpResult, Record

TIMED_STEPS = 20
PROFILED_STEPS = 4
WARM_UP_S = 10.0
READINGS = 5  # of the clocks under load
LISTED = 8  # unmapped kernels that are listed by name


@dataclass(frozen=True, kw_only=True)
class MeasuredRow:
    """One op in one phase: what its kernels took in a step, and its floor.

    Attributes:
        name, phase: of the op; phase None where the trace does not tell.
        seconds: of all its kernels, added up.
        kernels: how many.
        floor_s: of the op; None for work that the accounting does not have, such as copies.
    """

    name: str
    phase: Phase | None
    seconds: float
    kernels: float
    floor_s: float | None


@dataclass(frozen=True, kw_only=True)
class MeasureResult:
    """What `explain --measure` found.

    Attributes:
        explained: the accounting of the same step.
        card: as the driver calls it.
        engine: how the step was run.
        timing: of the step without a profiler.
        rows: measured beside floor.
        occupation: of the profiled steps' kernels, all steps together.
        steps: how many were profiled.
        unmapped: kernels that no rule knows, with their seconds in a step, the longest first.
        peak_bytes: most memory that tensors held.
        circumstances: versions by name.
        clocks: before, during and after, as in a record; None where the driver does not say.
    """

    explained: ExplainResult
    card: str
    engine: str
    timing: Timing
    rows: tuple[MeasuredRow, ...]
    occupation: Occupation
    steps: int
    unmapped: tuple[tuple[str, float], ...]
    peak_bytes: int
    circumstances: dict[str, str]
    clocks: dict[str, Any] | None = None

    @property
    def seconds(self) -> float:
        """Median seconds of a step."""
        return self.timing.median_ms / 1e3

    @property
    def utilisation(self) -> Utilisation | None:
        """What the measured step used of the card; None where the table does not know the card's peaks."""
        explained = self.explained
        if not explained.spec.tflops:
            return None
        return step_utilisation(explained.cost, self.seconds, explained.spec, explained.case.precision)

    @property
    def bytes_per_s(self) -> float:
        """The step's fewest bytes a second; part of them may never have left the cache."""
        return self.explained.cost.bytes / self.seconds

    @property
    def phases_s(self) -> dict[str, float]:
        """Kernel seconds of a step by phase, where the trace tells it."""
        return {p: sum(row.seconds for row in self.rows if row.phase == p) for p in PHASES}

    def to_json(self) -> dict[str, Any]:
        """The object that `explain --measure --json` prints; seconds and bytes."""
        explained, occupied, steps, used = self.explained.to_json(), self.occupation, self.steps, self.utilisation
        measured = {
            "engine": self.engine,
            "seconds": self.seconds,
            "spread": self.timing.spread,
            "floor_share": self.explained.floor_s / self.seconds,
            "mfu": used.mfu if used else None,
            "bytes_per_s": self.bytes_per_s,
            "bandwidth": used.bandwidth if used else None,
            "peak_memory_bytes": self.peak_bytes,
            "phases_s": self.phases_s,
            "profiled": {
                "steps": steps,
                "elapsed_s": occupied.elapsed / steps / 1e6,
                "busy_s": occupied.busy / steps / 1e6,
                "kernel_s": occupied.kernel_sum / steps / 1e6,
                "kernels": occupied.kernels / steps,
                "overlap": occupied.overlap,
                "idle_s": occupied.idle / steps / 1e6,
                "longest_gap_s": occupied.gaps[0] / 1e6 if occupied.gaps else 0.0,
            },
            "ops": [
                {"name": r.name, "phase": r.phase, "seconds": r.seconds, "kernels": r.kernels, "floor_s": r.floor_s}
                for r in self.rows
            ],
            "unmapped": [{"name": name, "seconds": seconds} for name, seconds in self.unmapped],
            "versions": self.circumstances,
            "clocks": self.clocks,
        }
        return {**explained, "measured": measured}

    def _op(self, row: MeasuredRow) -> OpResult:
        """A row with the rates that it reached: of the FLOPs and bytes of all the ops that share it."""
        parts = [r for r in self.explained.rows if r.phase == row.phase and r.name in row.name.split(EITHER)]
        flops, nbytes = sum(r.executed_flops + r.vector_flops for r in parts), sum(r.bytes for r in parts)
        return OpResult(
            name=row.name,
            shape=row.phase or "",
            impl=self.engine,
            us=row.seconds * 1e6,
            tflops=flops / row.seconds / 1e12 if flops else None,
            tb_per_s=nbytes / row.seconds / 1e12 if nbytes else None,
            # above 1 the op's tensors stayed in the cache, and the share says nothing
            floor_share=row.floor_s / row.seconds if row.floor_s and row.floor_s <= row.seconds else None,
        )

    def to_record(self) -> Record:
        """The same as a record that reports read."""
        case, used = self.explained.case, self.utilisation
        result = ContenderResult(
            name=self.engine,
            tokens_per_s=case.tokens / self.seconds,
            windows_per_s=case.batch / self.seconds,
            step_ms=self.timing.median_ms,
            spread=self.timing.spread,
            mfu=used.mfu if used else None,
            bytes_per_s=self.bytes_per_s,
            bandwidth=used.bandwidth if used else None,
            floor_share=self.explained.floor_s / self.seconds,
            peak_memory_bytes=self.peak_bytes,
            phases_ms={phase: seconds * 1e3 for phase, seconds in self.phases_s.items()},
            overlap=self.occupation.overlap,
        )
        ops = [self._op(row) for row in self.rows if row.seconds > 0]
        work = Workload(
            name=case.name, model=case.model, batch=case.batch, context=case.context, precision=case.precision
        )
        return Record(
            kind="explain",
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            git=git_revision(),
            card=self.card,
            gpus=1,
            versions=self.circumstances,
            clocks=self.clocks,
            workload=work.info(),
            contenders=[result],
            ops=ops,
        )


def tabulate(
    kernels: Sequence[Kernel], explained: ExplainResult, steps: int, config: ModelConfig
) -> tuple[tuple[MeasuredRow, ...], tuple[tuple[str, float], ...]]:
    """Kernels of `steps` steps as rows of one step, the longest first within a phase, and what stayed unmapped.

    Every op of the accounting has a row, with no kernels where its work rides in another's. Ops that cannot be told
    apart share one.
    """
    case = explained.case
    to_op = KernelMap(config, case.batch, case.context)
    totals: dict[tuple[str, Phase | None], list[float]] = {(row.name, row.phase): [0, 0] for row in explained.rows}
    strangers: dict[str, float] = {}
    for kernel in kernels:
        name = to_op(kernel)
        total = totals.setdefault((name, kernel.phase), [0, 0])
        total[0] += kernel.duration / 1e6 / steps
        total[1] += 1 / steps
        if name == UNMAPPED:
            strangers[kernel.name] = strangers.get(kernel.name, 0.0) + kernel.duration / 1e6 / steps
    floors: dict[tuple[str, Phase | None], float] = {(row.name, row.phase): row.floor.seconds for row in explained.rows}

    def floor_of_row(key: tuple[str, Phase | None]) -> float | None:
        parts = [floors[(name, key[1])] for name in key[0].split(EITHER) if (name, key[1]) in floors]
        return sum(parts) if parts else None

    rows = [
        MeasuredRow(name=key[0], phase=key[1], seconds=seconds, kernels=count, floor_s=floor_of_row(key))
        for key, (seconds, count) in totals.items()
    ]
    shared = {(name, row.phase) for row in rows for name in row.name.split(EITHER) if EITHER in row.name}
    rows = [row for row in rows if (row.name, row.phase) not in shared or row.seconds > 0]
    order: dict[Phase | None, int] = {phase: index for index, phase in enumerate((*PHASES, None))}
    rows.sort(key=lambda row: (order[row.phase], -row.seconds))
    return tuple(rows), tuple(sorted(strangers.items(), key=lambda item: -item[1]))


def current_ceilings() -> Ceilings:
    """The stored ceilings of the card that is here under its present driver; measured and stored if there are none."""
    reading = read_driver()
    stored = None if reading is None else load_ceilings(reading.name)
    if stored is not None and reading is not None and stored.driver == reading.driver:
        return stored
    ceilings = measure_ceilings()
    save_ceilings(ceilings)
    return ceilings


def _explain_here(preset: str, batch: int | None, context: int | None, precision: str | None) -> ExplainResult:
    if not torch.cuda.is_available():
        raise UnsupportedError("--measure profiles real steps on a CUDA card, and there is none here; leave it out")
    spec, ceilings = resolve(None), current_ceilings()
    case = preset_case(
        preset, spec, batch=batch, context=context, precision=precision, accumulation=1, measured=not spec.tflops
    )
    return explain(case, spec, ceilings=ceilings)


def _under_load(step: Callable[[], object], watch: Monitor, device: torch.device) -> list[Clocks]:
    """Readings while the card works: steps are queued, and the card is asked before it is done with them."""
    seen = []
    for _ in range(READINGS):
        step()
        step()
        seen.append(watch.read())
    torch.cuda.synchronize(device)
    return seen


def _ready(
    contender: Contender, work: Workload, data: dict[str, Tensor], device: torch.device, *, capture: bool
) -> Callable[[], object]:
    """The contender's warm step on `data`.

    Raises:
        ConfigError: there is not enough device memory.
    """
    try:
        run = build_step(contender, work, device, capture=capture)
        warm_up(lambda: run(data), device, limit_s=WARM_UP_S)
    except torch.OutOfMemoryError as error:
        card = torch.cuda.get_device_name(device)
        reason = f"batch={work.batch} does not fit {card} under the engine {contender.name}; make the batch smaller"
        raise ConfigError(reason) from error
    return lambda: run(data)


def measure_preset(
    preset: str,
    *,
    engine: str = "compile",
    batch: int | None = None,
    context: int | None = None,
    precision: str | None = None,
    steps: int = PROFILED_STEPS,
) -> MeasureResult:
    """`ridgeline explain PRESET --measure`: run, time and profile a preset's step on the CUDA card that is here.

    Args:
        preset: its name, or what else `find_config` takes.
        engine: a contender of the benchmark.
        batch, context, precision: as for `explain_preset`; the whole batch is run in one part.
        steps: how many are profiled.

    Raises:
        ConfigError, UnsupportedError: unknown names, no CUDA card, a batch that does not fit.
    """
    contender = find_contender(engine)
    explained = _explain_here(preset, batch, context, precision)
    case = explained.case
    work = Workload(name=preset, model=case.model, batch=case.batch, context=case.context, precision=case.precision)
    device = torch.device("cuda", torch.cuda.current_device())
    data = random_batch(work, device)
    watch = monitor(device)
    before = watch.read() if watch else None
    torch.cuda.reset_peak_memory_stats(device)
    step = _ready(contender, work, data, device, capture=True)
    timing = summarise(time_steps(step, TIMED_STEPS, device))
    clocks = course(before, _under_load(step, watch, device), watch.read()) if watch and before else None
    peak = torch.cuda.max_memory_allocated(device)
    kernels = read_trace(profile(step, steps))
    used = occupation(kernels)
    if contender.settings.capture:
        del step  # its memory first: two steps beside each other may not fit
        gc.collect()
        torch.cuda.empty_cache()
        step = _ready(contender, work, data, device, capture=False)
        kernels = read_trace(profile(step, steps))
    rows, unmapped = tabulate(kernels, explained, steps, case.model)
    return MeasureResult(
        explained=explained,
        card=torch.cuda.get_device_name(device),
        engine=engine,
        timing=timing,
        rows=rows,
        occupation=used,
        steps=steps,
        unmapped=unmapped,
        peak_bytes=peak,
        circumstances=versions(watch),
        clocks=clocks,
    )
