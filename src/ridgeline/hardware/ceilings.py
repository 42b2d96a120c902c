"""Ceilings measured on the spot: what this card reaches, beside what its paper promises.

Kept in $RIDGELINE_CACHE/ceilings.json (or ~/.cache/ridgeline), one entry a card, with date, driver and clock.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch

from ridgeline import files
from ridgeline.errors import UnsupportedError, reason
from ridgeline.hardware.driver import read_driver
from ridgeline.hardware.spec import GIB, PRECISIONS, Precision, lacking

PRODUCT_SIZE = 8192  # rows, columns and depth: large enough that one wave of blocks more or less does not show
COPY_BYTES = GIB
GRAPH_LAUNCHES = 256


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """What one card reached.

    Attributes:
        card: the driver's name of the card.
        copy_bytes_per_s: device-to-device copy, read and write both counted.
        products: FLOP/s of a square matrix product on random data, by precision.
        launch_s: seconds from one tiny kernel to the next inside a CUDA graph.
        date: when, ISO 8601 in UTC.
        driver: driver version; None where it was not told.
        sm_clock_mhz: clock of the multiprocessors right after the last product; None where it was not told.
        torch: PyTorch's version.
    """

    card: str
    copy_bytes_per_s: float
    products: dict[str, float] = field(default_factory=dict)
    launch_s: float | None = None
    date: str = ""
    driver: str | None = None
    sm_clock_mhz: float | None = None
    torch: str = torch.__version__

    def __post_init__(self) -> None:
        launch = {} if self.launch_s is None else {"launch_s": self.launch_s}
        for name, value in {"copy_bytes_per_s": self.copy_bytes_per_s, **self.products, **launch}.items():
            if not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"{name} must be a positive number, got {value!r}")


def ceilings_file() -> Path:
    """Where measured ceilings are kept."""
    return files.cache() / "ceilings.json"


def _stored() -> dict[str, Ceilings]:
    path = ceilings_file()
    if not path.exists():
        return {}
    try:
        return {card: Ceilings(**entry) for card, entry in files.parsed(path.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise UnsupportedError(
            f"{path} is not a list of ceilings ({reason(error)}); delete it and measure again"
        ) from error


def load_ceilings(card: str) -> Ceilings | None:
    """The ceilings last measured on a card, by the driver's name of it; None if there are none."""
    return _stored().get(card)


def save_ceilings(ceilings: Ceilings) -> Path:
    """Keep `ceilings` for the next `explain`; replaces the card's older ones. Returns the file.

    Raises:
        UnsupportedError: the list of ceilings cannot be read or written.
    """
    path = ceilings_file()
    entries = {card: asdict(entry) for card, entry in {**_stored(), ceilings.card: ceilings}.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return files.replace(path, json.dumps(entries, indent=1))
    except OSError as error:
        raise UnsupportedError(f"cannot write {path} ({reason(error)}); set RIDGELINE_CACHE to a folder") from error


def _seconds(call: Callable[[], object], repeats: int = 20, warm_up: int = 5) -> float:
    """Median seconds of one call on the current stream, by CUDA events."""
    for _ in range(warm_up):
        call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks)) / 1e3


def _product(precision: Precision, size: int) -> float:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        # random data: constant operands toggle fewer wires, draw less power and clock higher than real training
        a, b = (torch.randn(size, size, device="cuda", dtype=dtype) for _ in range(2))
        out = torch.empty(size, size, device="cuda", dtype=dtype)
        return 2 * size**3 / _seconds(lambda: torch.mm(a, b, out=out))
    finally:
        torch.set_float32_matmul_precision(before)


def _copy(nbytes: int) -> float:
    source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * nbytes / _seconds(lambda: target.copy_(source))


def _launch() -> float:
    value = torch.zeros(32, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        value.add_(1)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(GRAPH_LAUNCHES):
                value.add_(1)
        return _seconds(graph.replay) / GRAPH_LAUNCHES


def measure_ceilings() -> Ceilings:
    """Measure copy, matrix products and kernel launch on the current CUDA device (a few seconds).

    Raises:
        UnsupportedError: there is no CUDA device.
    """
    reading = read_driver(torch.cuda.current_device() if torch.cuda.is_available() else 0)
    if reading is None:
        raise UnsupportedError("ceilings are measured on a CUDA card, and there is none here")
    small = reading.memory_bytes < 8 * GIB
    size = PRODUCT_SIZE // 2 if small else PRODUCT_SIZE
    precisions = [p for p in PRECISIONS if p not in lacking(reading.capability)]
    products: dict[str, float] = {p: _product(p, size // 2 if p == "fp32" else size) for p in precisions}
    after = read_driver(torch.cuda.current_device())
    copy = _copy(COPY_BYTES // 4 if small else COPY_BYTES)
    return Ceilings(
        card=reading.name,
        copy_bytes_per_s=copy,
        products=products,
        launch_s=_launch(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        driver=reading.driver,
        sm_clock_mhz=after.sm_clock_mhz if after else None,
    )
