"""Clocks, power, temperature and throttle reasons of a card, asked from NVIDIA's management library."""

from __future__ import annotations

import ctypes
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ridgeline.records import READINGS

_REASONS = {  # nvml.h, nvmlClocksThrottleReason*
    0x1: "idle",
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
    0x100: "display clocks",
}


@dataclass(frozen=True, kw_only=True)
class Clocks:
    """One reading; None where the driver does not say.

    Attributes:
        sm_mhz, memory_mhz: clocks.
        power_w: power drawn.
        temperature_c: of the chip.
        throttle: reasons why the clock is below its highest, "idle" among them.
    """

    sm_mhz: int | None = None
    memory_mhz: int | None = None
    power_w: float | None = None
    temperature_c: int | None = None
    throttle: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The reading as plain JSON values."""
        return {**asdict(self), "throttle": list(self.throttle)}


def reasons(bits: int) -> tuple[str, ...]:
    """Names of the throttle reasons in a bit mask."""
    return tuple(name for bit, name in _REASONS.items() if bits & bit)


class Monitor:
    """A card under NVML.

    Args:
        index: CUDA device index in this process.

    Raises:
        OSError: the library or the card is not there.
    """

    def __init__(self, index: int = 0) -> None:
        self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if self._nvml.nvmlInit_v2() != 0:
            raise OSError("nvmlInit failed")
        uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}".replace("GPU-GPU-", "GPU-")
        self._handle = ctypes.c_void_p()
        if self._nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(self._handle)) != 0:
            raise OSError(f"NVML does not know {uuid}")

    def _uint(self, function: str, *before: int) -> int | None:
        value = ctypes.c_uint()
        status = getattr(self._nvml, function)(self._handle, *before, ctypes.byref(value))
        return value.value if status == 0 else None

    def read(self) -> Clocks:
        """The card now."""
        bits = ctypes.c_ulonglong()
        known = self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle, ctypes.byref(bits)) == 0
        milliwatts = self._uint("nvmlDeviceGetPowerUsage")
        return Clocks(
            sm_mhz=self._uint("nvmlDeviceGetClockInfo", 1),
            memory_mhz=self._uint("nvmlDeviceGetClockInfo", 2),
            power_w=None if milliwatts is None else milliwatts / 1e3,
            temperature_c=self._uint("nvmlDeviceGetTemperature", 0),
            throttle=reasons(bits.value) if known else (),
        )

    def driver(self) -> str:
        """Version of the driver."""
        text = ctypes.create_string_buffer(96)
        self._nvml.nvmlSystemGetDriverVersion(text, 96)
        return text.value.decode()


def monitor(device: torch.device) -> Monitor | None:
    """The monitor of a CUDA device; None where there is no device or no NVML (a container without it)."""
    if device.type != "cuda":
        return None
    try:
        return Monitor(device.index or 0)
    except OSError:
        return None


def extremes(readings: list[Clocks]) -> dict[str, Any] | None:
    """Lowest and highest clock, power and temperature of readings under load, and every throttle reason seen."""
    if not readings:
        return None
    found: dict[str, Any] = {"throttle": sorted({reason for r in readings for reason in r.throttle})}
    for field in READINGS:
        values = [value for r in readings if (value := getattr(r, field)) is not None]
        found[field] = [min(values), max(values)] if values else None
    return found


def course(before: Clocks, load: list[Clocks], after: Clocks) -> dict[str, Any]:
    """The clocks of a run, as a record holds them."""
    return {"before": before.to_json(), "during": extremes(load), "after": after.to_json()}


def merged(earlier: dict[str, Any] | None, later: dict[str, Any]) -> dict[str, Any]:
    """The clocks of two runs as those of one: before the first, after the second, and the extremes of both."""
    if not earlier:
        return later
    a, b = earlier.get("during"), later.get("during")
    if not a or not b:
        return {**later, "before": earlier["before"], "during": a or b}
    during: dict[str, Any] = {"throttle": sorted({*a["throttle"], *b["throttle"]})}
    for field in READINGS:
        ends = [*(a[field] or []), *(b[field] or [])]
        during[field] = [min(ends), max(ends)] if ends else None
    return {"before": earlier["before"], "during": during, "after": later["after"]}
