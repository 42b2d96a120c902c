"""What the driver says of the card that is here: multiprocessors, caches, memory, clocks."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import asdict, dataclass, replace

import torch

from ridgeline.errors import UnsupportedError
from ridgeline.hardware.cards import by_driver_name, card
from ridgeline.hardware.spec import GIB, MIB, DeviceSpec

SMI_FIELDS = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit")
SMI_TIMEOUT_S = 20


@dataclass(frozen=True, kw_only=True)
class DriverReading:
    """One card as its driver describes it. What the driver does not tell is None.

    Attributes:
        name: the driver's name of the card.
        capability: CUDA compute capability.
        sm_count: multiprocessors.
        memory_bytes: device memory that can be used.
        l2_bytes: level-2 cache.
        shared_per_sm: shared memory of a multiprocessor, bytes.
        shared_per_block: the most shared memory a block can ask for, bytes.
        driver: driver version.
        sm_clock_mhz, sm_clock_max_mhz, memory_clock_mhz: clocks now, and the highest the card may take.
        power_limit_w: the power limit in force.
    """

    name: str
    capability: tuple[int, int]
    sm_count: int
    memory_bytes: int
    l2_bytes: int
    shared_per_sm: int
    shared_per_block: int
    driver: str | None = None
    sm_clock_mhz: float | None = None
    sm_clock_max_mhz: float | None = None
    memory_clock_mhz: float | None = None
    power_limit_w: float | None = None

    def to_json(self) -> dict[str, object]:
        """The reading as plain JSON values."""
        return asdict(self)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # "[N/A]" and "[Not Supported]"
        return None


def parse_smi(line: str) -> dict[str, str | float | None]:
    """The fields of DriverReading in one line of `nvidia-smi --query-gpu` in the order of SMI_FIELDS."""
    values = [value.strip() for value in line.split(",")]
    if len(values) != len(SMI_FIELDS):
        return {}
    names = ("sm_clock_mhz", "sm_clock_max_mhz", "memory_clock_mhz", "power_limit_w")
    return {"driver": values[0], **{name: _number(value) for name, value in zip(names, values[1:], strict=True)}}


def _smi(uuid: str) -> dict[str, str | float | None]:
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", f"--id={uuid}", f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=True)
    except (subprocess.SubprocessError, OSError):
        return {}
    return parse_smi(done.stdout.strip().splitlines()[0] if done.stdout.strip() else "")


def read_driver(index: int = 0) -> DriverReading | None:
    """The driver's description of CUDA device `index`; None without a CUDA device."""
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(index)
    uuid = str(getattr(found, "uuid", index))
    return DriverReading(
        name=found.name,
        capability=(found.major, found.minor),
        sm_count=found.multi_processor_count,
        memory_bytes=found.total_memory,
        l2_bytes=found.L2_cache_size,
        shared_per_sm=found.shared_memory_per_multiprocessor,
        shared_per_block=found.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        **_smi(uuid if uuid.startswith("GPU-") or uuid.isdigit() else f"GPU-{uuid}"),  # type: ignore[arg-type]
    )


def refined(spec: DeviceSpec, reading: DriverReading) -> DeviceSpec:
    """`spec` with the driver's figures in place of the table's; the peaks stay the table's."""
    return replace(
        spec,
        capability=reading.capability,
        sm_count=reading.sm_count,
        memory_gib=reading.memory_bytes / GIB,
        l2_mib=reading.l2_bytes / MIB,
        shared_kib=(reading.shared_per_sm // 1024, reading.shared_per_block // 1024),
        source=f"{spec.source}; sizes from the driver",
    )


def unlisted(reading: DriverReading) -> DeviceSpec:
    """A card that the table does not know: sizes from the driver, no peaks (measure its ceilings to get some)."""
    blank = DeviceSpec(
        key=reading.name.lower().replace(" ", "-"),
        name=reading.name,
        driver_names=(),
        capability=reading.capability,
        sm_count=None,
        tflops={},
        gb_per_s=0,
        memory_gib=0,
        l2_mib=None,
        shared_kib=None,
        power_w=None,
        source="not in the table",
    )
    return refined(blank, reading)


def present(index: int = 0) -> DeviceSpec | None:
    """The card that is here: the table's row with the driver's sizes, or `unlisted`; None without a CUDA device."""
    reading = read_driver(index)
    if reading is None:
        return None
    known = by_driver_name(reading.name)
    return unlisted(reading) if known is None else refined(known, reading)


def resolve(device: str | None) -> DeviceSpec:
    """The card a user means: a key of the table, or the one that is here for None, "auto", "cuda" and "cuda:N".

    A key that names the card that is here gets the driver's sizes.

    Raises:
        UnsupportedError: no such card in the table, or none named and none here.
    """
    kind, _, index = (device or "auto").partition(":")
    here = present(int(index) if index.isdecimal() else 0)
    if kind in ("cuda", "auto"):
        if here is None:
            raise UnsupportedError("there is no CUDA card here; name one of the table, for instance --device h200")
        return here
    assert device is not None
    spec = card(device)
    return here if here is not None and here.key == spec.key else spec
