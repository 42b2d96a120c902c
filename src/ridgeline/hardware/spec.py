"""What a card can do at most: dense peaks, bandwidth, memory, and where each figure is from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ridgeline.errors import UnsupportedError

Precision = Literal["bf16", "fp16", "tf32", "fp32"]
PRECISIONS: tuple[Precision, ...] = ("bf16", "fp16", "tf32", "fp32")
NumberFormat = Literal["fp32", "tf32", "fp16", "bf16", "fp8", "fp4"]
Accumulate = Literal["fp32", "fp16"]

TERA = 1e12
GIGA = 1e9
MIB = 2**20
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """One card. Peaks are dense (no 2:4 sparsity); a figure without a source is None or absent, never a guess.

    Attributes:
        key: the name used on the command line.
        name: the card's full name.
        driver_names: what the driver calls it, lower case.
        capability: CUDA compute capability; None for a card that is not NVIDIA's.
        sm_count: streaming multiprocessors (compute units on AMD).
        tflops: 10¹² FLOP/s by number format, products summed in fp32. "fp32" is the vector units' rate.
        tflops_fp16_sum: the same, products summed in fp16, where that is faster (GeForce).
        gb_per_s: device memory bandwidth in 10⁹ bytes/s.
        memory_gib: device memory in GiB.
        l2_mib: level-2 cache in MiB.
        shared_kib: shared memory of a multiprocessor, and the most a block can ask for, in KiB.
        power_w: board power in watts.
        source: where the figures were read.
    """

    key: str
    name: str
    driver_names: tuple[str, ...]
    capability: tuple[int, int] | None
    sm_count: int | None
    tflops: Mapping[NumberFormat, float]
    gb_per_s: float
    memory_gib: float
    l2_mib: float | None
    shared_kib: tuple[int, int] | None
    power_w: int | None
    source: str
    tflops_fp16_sum: Mapping[NumberFormat, float] | None = None

    def peak(self, number: NumberFormat, accumulate: Accumulate = "fp32") -> float:
        """Dense FLOP/s of matrix products in `number`, summed in `accumulate`.

        Raises:
            UnsupportedError: the card has no such rate, or none that could be verified.
        """
        if accumulate == "fp16":
            if self.tflops_fp16_sum is not None and number in self.tflops_fp16_sum:
                return self.tflops_fp16_sum[number] * TERA
            if number not in ("fp16", "fp8"):
                raise UnsupportedError(f"{number} products are never summed in fp16; use accumulate='fp32'")
        if number in self.tflops:
            return self.tflops[number] * TERA
        have = ", ".join(p for p in self.tflops if p in PRECISIONS)
        if self.capability is not None and number in lacking(self.capability):
            raise UnsupportedError(f"{self.name} has no {number}; choose a precision it has: {have}")
        raise UnsupportedError(f"no verified {number} peak is known for {self.name}; choose one of: {have}")

    @property
    def vector_peak(self) -> float | None:
        """FLOP/s of the fp32 vector units; None where it could not be verified."""
        return self.tflops["fp32"] * TERA if "fp32" in self.tflops else None

    @property
    def bandwidth(self) -> float:
        """Device memory bandwidth in bytes/s."""
        return self.gb_per_s * GIGA

    @property
    def memory_bytes(self) -> int:
        """Device memory in bytes."""
        return int(self.memory_gib * GIB)

    @property
    def l2_bytes(self) -> int | None:
        """Level-2 cache in bytes."""
        return None if self.l2_mib is None else int(self.l2_mib * MIB)


def lacking(capability: tuple[int, int]) -> frozenset[NumberFormat]:
    """Number formats for which cards of a compute capability have no matrix units."""
    missing: set[NumberFormat] = set()
    if capability < (10, 0):
        missing.add("fp4")
    if capability < (8, 9):
        missing.add("fp8")
    if capability < (8, 0):
        missing |= {"bf16", "tf32"}
    if capability < (7, 0):
        missing.add("fp16")
    return frozenset(missing)


def default_precision(spec: DeviceSpec) -> Precision:
    """bf16 where the card has it, else fp16, else fp32."""
    for precision in ("bf16", "fp16"):
        if precision in spec.tflops:
            return precision  # type: ignore[return-value]
    return "fp32"


def check_precision(spec: DeviceSpec, precision: str) -> Precision:
    """`precision` itself if training can run in it on this card.

    Raises:
        UnsupportedError: it is not a training precision, or the card lacks it.
    """
    if precision not in PRECISIONS:
        raise UnsupportedError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    spec.peak(precision)  # type: ignore[arg-type]
    return precision  # type: ignore[return-value]
