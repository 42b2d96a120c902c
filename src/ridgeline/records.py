"""The one record that benchmarks, studies and races write and reports read.

A record is a JSON object with a fixed set of keys, null where something does not apply. It carries the
circumstances of its numbers, the version of its schema, and a checksum over everything else in it: a file that was
edited by hand, cut short, or written by a later version is refused and not half understood.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from ridgeline import files
from ridgeline.errors import RidgelineError, reason

SCHEMA = 2
ADDED = {2: ("bytes_per_s", "bandwidth", "gpus")}  # what a contender's result has since a schema
LATE = ("gpus",)  # of those, what some records of that schema lack: null
KINDS = ("bench", "ops", "explain", "study", "race", "search")
READINGS = ("sm_mhz", "memory_mhz", "power_w", "temperature_c")  # of clocks, with the reasons why they are throttled


class RecordError(RidgelineError):
    """A record that is edited, foreign, of a later version, or wrong in itself."""


@dataclass(frozen=True, kw_only=True)
class WorkloadInfo:
    """What was run: name of the workload, samples a step, positions a sample, precision."""

    name: str
    batch: int
    context: int
    precision: str


@dataclass(frozen=True, kw_only=True)
class ContenderResult:
    """One way to run the workload, and what came out. None where it does not apply or was not measured.

    Attributes:
        name: the contender.
        group: number of the group whose members were interleaved with it; ratios are taken within a group.
        tokens_per_s, windows_per_s: positions and samples trained on in a second, from the median step.
        step_ms: median milliseconds of a step.
        spread: distance from the 10th to the 90th percentile of the step times, as a share of the median.
        mfu: model FLOPs a second as a share of the card's dense peak.
        bytes_per_s: the step's fewest bytes a second, all cards together.
        bandwidth: those bytes as a share of the card's bandwidth; None where most can have stayed in its cache.
        floor_share: the step's floor time as a share of the measured time.
        peak_memory_bytes: most device memory that tensors held.
        first_step_s: seconds of the first step in a fresh process with empty caches.
        phases_ms: measured milliseconds by phase.
        groups_ms_per_layer: measured kernel milliseconds a layer, by group of kernels.
        overlap: share of the busy time in which more than one kernel ran.
        gpus: cards, or on the CPU processes, that trained together; None: the record's. One number a group.
        error: why there is no result.
    """

    name: str
    group: int = 0
    tokens_per_s: float | None = None
    windows_per_s: float | None = None
    step_ms: float | None = None
    spread: float | None = None
    mfu: float | None = None
    bytes_per_s: float | None = None
    bandwidth: float | None = None
    floor_share: float | None = None
    peak_memory_bytes: int | None = None
    first_step_s: float | None = None
    phases_ms: dict[str, float] | None = None
    groups_ms_per_layer: dict[str, float] | None = None
    overlap: float | None = None
    gpus: int | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class OpResult:
    """One implementation of one op at one shape. Units as in the names; ratios are shares of 1."""

    name: str
    shape: str
    impl: str
    us: float | None = None
    tflops: float | None = None
    tb_per_s: float | None = None
    floor_share: float | None = None
    vs_pytorch: float | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Record:
    """A measurement with its circumstances.

    Attributes:
        kind: what wrote it, one of KINDS.
        date: ISO 8601 with time zone.
        git: revision of the code, with "+" behind it if files were changed; None outside a repository.
        card: name of the device.
        gpus: how many of them; the most where contenders have numbers of their own.
        versions: package and driver versions by name.
        clocks: READINGS and "throttle", a list of reasons, "before", "during" (each the lowest and the highest; None
            where nothing was read) and "after"; None where there is no card.
        workload: what was run.
        contenders: results by contender.
        ops: results by op.
        curves: named series that a report draws.
        schema: version of this layout.
    """

    kind: str
    date: str
    git: str | None
    card: str
    gpus: int
    versions: dict[str, str]
    clocks: dict[str, Any] | None = None
    workload: WorkloadInfo | None = None
    contenders: list[ContenderResult] = field(default_factory=list)
    ops: list[OpResult] = field(default_factory=list)
    curves: list[dict[str, Any]] | dict[str, Any] | None = None
    schema: int = SCHEMA

    def result(self, name: str, group: int | None = None) -> ContenderResult | None:
        """The contender called `name`, in `group` or in the first group that has it."""
        return next((c for c in self.contenders if c.name == name and group in (None, c.group)), None)

    def cards(self, result: ContenderResult) -> int:
        """How many cards one of its contenders had."""
        return self.gpus if result.gpus is None else result.gpus

    def parts(self) -> list[Record]:
        """A record for each number of cards that its contenders have, the fewest first; itself where all have the same.

        What compares contenders looks at one part, so that no number of cards is taken for another.
        """
        if all(result.gpus is None for result in self.contenders):
            return [self]
        return [
            dataclasses.replace(
                self,
                gpus=number,
                contenders=[dataclasses.replace(c, gpus=None) for c in self.contenders if self.cards(c) == number],
            )
            for number in sorted({self.cards(result) for result in self.contenders})
        ]


_SHARES = {"mfu", "bandwidth", "floor_share", "overlap"}
_POSITIVE = {"tokens_per_s", "windows_per_s", "bytes_per_s", "step_ms", "us", "batch", "context"}


def _check_numbers(values: dict[str, Any], where: str) -> None:
    for key, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        finite = math.isfinite(value) if isinstance(value, float) else value.bit_length() < 64
        if not finite or value < 0:
            shown = value if isinstance(value, float) or finite else "too large"
            raise RecordError(f"{where}.{key} is {shown}; a record holds finite numbers of 0 or more")
        if key in _SHARES and value > 1:
            raise RecordError(f"{where}.{key} is {value}, above 1: FLOPs, bytes, peak or time behind it is wrong")
        if key in _POSITIVE and value == 0:
            raise RecordError(f"{where}.{key} is 0; leave it null where nothing was measured")


_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "dict[str, str]": (dict,),
    "dict[str, float]": (dict,),
    "dict[str, Any]": (dict,),
    "list[dict[str, Any]]": (list,),
    "list[ContenderResult]": (list,),
    "list[OpResult]": (list,),
    "WorkloadInfo": (dict,),
    "None": (type(None),),
}


def _check_by_name(values: dict[str, Any], where: str) -> None:
    for key, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RecordError(f"{where}.{key} must be a number, got {value!r}")
    _check_numbers(values, where)


def _build(cls: type, values: Any, where: str) -> Any:
    """A dataclass from a JSON object with exactly its keys and types."""
    if not isinstance(values, dict):
        raise RecordError(f"{where} must be an object, got {type(values).__name__}")
    known = {f.name: str(f.type) for f in dataclasses.fields(cls)}
    odd = sorted(known.keys() ^ values.keys())
    if odd:
        raise RecordError(f"{where} differs from the schema in its keys: {', '.join(odd)}")
    for name, kind in known.items():
        allowed = tuple(t for part in kind.split(" | ") for t in _TYPES[part])
        if not isinstance(values[name], allowed) or (isinstance(values[name], bool)):
            raise RecordError(f"{where}.{name} must be {kind}, got {values[name]!r}")
        if isinstance(values[name], list) and not all(isinstance(value, dict) for value in values[name]):
            raise RecordError(f"{where}.{name} must hold objects alone")
        if "dict[str, float]" in kind and values[name] is not None:
            _check_by_name(values[name], f"{where}.{name}")
    _check_numbers(values, where)
    return cls(**values)


def _upgraded(values: dict[str, Any]) -> dict[str, Any]:
    """A record of an earlier schema in the layout of this one: what was not measured then is null.

    Raises:
        RecordError: it has what its schema did not.
    """
    if not isinstance(values.get("contenders"), list):
        return values
    new = [key for schema, keys in ADDED.items() if schema > values["schema"] for key in keys]
    for place, contender in enumerate(values["contenders"]):
        odd = sorted(contender.keys() & new) if isinstance(contender, dict) else ()
        if odd:
            raise RecordError(
                f"contenders[{place}] differs from schema {values['schema']} in its keys: {', '.join(odd)}"
            )
    missing = dict.fromkeys((*new, *LATE))
    contenders = [{**missing, **c} if isinstance(c, dict) else c for c in values["contenders"]]
    return {**values, "contenders": contenders, "schema": SCHEMA}


def _check_groups(record: Record) -> None:
    seen = set()
    for place, result in enumerate(record.contenders):
        if result.gpus is not None and (result.gpus < 1 or 0 < record.gpus < result.gpus):
            raise RecordError(
                f"contenders[{place}].gpus must be from 1 to the record's {record.gpus}, got {result.gpus}"
            )
        if (result.name, result.group) in seen:
            raise RecordError(f"contenders[{place}] is a second {result.name} in group {result.group}")
        seen.add((result.name, result.group))
    found = {(result.group, record.cards(result)) for result in record.contenders}
    if len(found) > len({group for group, _ in found}):
        raise RecordError("contenders of one group must have one number of cards, for ratios are taken within it")


def _check_clocks(clocks: dict[str, Any] | None) -> None:
    if clocks is None:
        return
    if clocks.keys() != {"before", "during", "after"}:
        raise RecordError(f"record.clocks must have before, during and after, got {', '.join(clocks) or 'nothing'}")
    for when, reading in clocks.items():
        where = f"record.clocks.{when}"
        if when == "during" and reading is None:
            continue
        if not isinstance(reading, dict) or reading.keys() != {*READINGS, "throttle"}:
            raise RecordError(f"{where} must hold {', '.join(READINGS)} and throttle, got {reading!r}")
        if not isinstance(reading["throttle"], list) or not all(isinstance(r, str) for r in reading["throttle"]):
            raise RecordError(f"{where}.throttle must be a list of reasons, got {reading['throttle']!r}")
        for name in READINGS:
            if reading[name] is None:
                continue
            values = reading[name] if when == "during" else [reading[name]]
            if not isinstance(values, list) or len(values) != (2 if when == "during" else 1):
                raise RecordError(f"{where}.{name} must be the lowest and the highest, got {values!r}")
            _check_by_name({f"{name}[{place}]": value for place, value in enumerate(values)}, where)


def from_json(values: Any) -> Record:
    """The record in a JSON object without its checksum; one of an earlier schema comes back in this one.

    Raises:
        RecordError: a later schema, a missing or unknown key, a wrong type, an impossible number.
    """
    if not isinstance(values, dict) or "schema" not in values or "kind" not in values:
        raise RecordError("this is no Ridgeline record: it has no schema and kind")
    if type(values["schema"]) is not int or values["schema"] < 1:
        raise RecordError(f"a record's schema is a whole number from 1 on, this one says {values['schema']!r}")
    if values["schema"] > SCHEMA:
        raise RecordError(
            f"the record has schema {values['schema']}, this version reads up to {SCHEMA}; update ridgeline"
        )
    record = _build(Record, _upgraded(values), "record")
    if record.kind not in KINDS:
        raise RecordError(f"record.kind must be one of {', '.join(KINDS)}, got {record.kind!r}")
    try:
        when = datetime.fromisoformat(record.date)
    except ValueError as error:
        raise RecordError(f"record.date must be ISO 8601, got {record.date!r}") from error
    if when.tzinfo is None:
        raise RecordError(f"record.date needs a time zone, got {record.date!r}")
    if record.gpus < 0 or not all(isinstance(v, str) for v in record.versions.values()):
        raise RecordError("record.gpus must be 0 or more and record.versions must hold strings")
    workload = None
    if record.workload is not None:
        workload = _build(WorkloadInfo, record.workload, "record.workload")
    whole = dataclasses.replace(
        record,
        workload=workload,
        contenders=[_build(ContenderResult, c, f"contenders[{i}]") for i, c in enumerate(record.contenders)],
        ops=[_build(OpResult, o, f"ops[{i}]") for i, o in enumerate(record.ops)],
    )
    _check_groups(whole)
    _check_clocks(whole.clocks)
    return whole


def to_json(record: Record) -> dict[str, Any]:
    """The record as a JSON object, checked, without its checksum."""
    values = dataclasses.asdict(record)
    from_json(json.loads(json.dumps(values)))
    return values


def checksum(values: dict[str, Any]) -> str:
    """SHA-256 over the canonical JSON of a record."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def write_record(record: Record, file: str | Path) -> Path:
    """Write the record with its checksum, whole or not at all.

    Raises:
        RecordError: the record is not what the schema says.
        OSError: it cannot be written.
    """
    values = to_json(record)
    target = Path(file)
    target.parent.mkdir(parents=True, exist_ok=True)
    return files.replace(target, json.dumps({**values, "checksum": checksum(values)}, indent=1) + "\n")


def read_record(file: str | Path) -> Record:
    """The record in a file.

    Raises:
        RecordError: it cannot be read, is no record, was edited, or has another schema.
    """
    try:
        values = files.parsed(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecordError(f"{file} cannot be read as a record: {reason(error)}") from error
    if not isinstance(values, dict) or "checksum" not in values:
        raise RecordError(f"{file} is no Ridgeline record: it has no checksum")
    claimed = values.pop("checksum")
    try:
        record = from_json(values)
    except RecordError as error:
        raise RecordError(f"{file}: {error}") from error
    if claimed != checksum(values):
        raise RecordError(f"{file} was changed after it was written: its checksum does not fit; measure again")
    return record
