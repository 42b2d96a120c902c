"""One lane or two, by measurement: what was found for a model on a card is kept in the cache.

A choice counts for the package's own code as it was when it was made, so a new kernel is measured anew.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from pathlib import Path

import torch

import ridgeline
from ridgeline import files
from ridgeline.data.loader import Batches
from ridgeline.engine import TrainStep, choose_lanes
from ridgeline.models.plan import fused_plan
from ridgeline.train.config import Engine, TrainConfig, engine_called
from ridgeline.train.engines import build_model, make_step
from ridgeline.train.settings import to_dict

FOLDER = "lanes"
CANDIDATES = (1, 2)


def measures_lanes(engine: Engine, world: int) -> bool:
    """Whether one lane is measured against two on a card, so that a benchmark does what a run would.

    Only the fused blocks on a card alone are. Under torch.compile a second candidate would cost minutes, and
    several processes would have to agree on what each has measured.
    """
    return fused_plan(engine.impl) is not None and world == 1


def settle_lanes(config: TrainConfig, batches: Batches, world: int = 1) -> tuple[TrainConfig, str]:
    """The config with its number of lanes decided, and in words how that came about.

    Args:
        config: resolved; lanes of 0 are to be decided.
        batches: of the run, for one batch, which is not used up.
        world: processes of the run.
    """
    if config.lanes:
        return config, _count(config.lanes)
    engine = engine_called(config.engine)
    measured = config.device.startswith("cuda") and measures_lanes(engine, world)
    if not measured or config.batch % (2 * config.accumulation):
        return dataclasses.replace(config, lanes=engine.lanes), _count(engine.lanes)
    file = _file(config)
    times = _read(file) or _measure(config, batches)
    _keep(file, times)
    best = min(times, key=lambda lanes: times[lanes])
    words = ", ".join(f"{_count(lanes)} {ms:.3g} ms" for lanes, ms in times.items())
    return dataclasses.replace(config, lanes=best), f"{_count(best)} of {words}"


def _count(lanes: int) -> str:
    return "1 lane" if lanes == 1 else f"{lanes} lanes"


def _measure(config: TrainConfig, batches: Batches) -> dict[int, float]:
    """Milliseconds a step by number of lanes."""

    def make(lanes: int) -> TrainStep:
        candidate = dataclasses.replace(config, lanes=lanes)
        step = make_step(build_model(candidate), candidate)
        assert isinstance(step, TrainStep)
        return step

    return choose_lanes(make, batches.peek(), CANDIDATES)


def _file(config: TrainConfig) -> Path:
    """Where the choice for this model, shape and card is kept."""
    settings = to_dict(config)
    told = {name: settings[name] for name in ("model", "window", "batch", "accumulation", "precision", "engine")}
    told |= {"card": torch.cuda.get_device_name(config.device), "torch": torch.__version__, "code": _code()}
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
    return files.cache() / FOLDER / f"{digest[:32]}.json"


@functools.cache
def _code() -> str:
    """Checksum of the package's own code."""
    digest = hashlib.sha256()
    for file in sorted(Path(ridgeline.__file__).parent.rglob("*.[pc]*")):
        if file.suffix in (".py", ".cu", ".cuh"):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _read(file: Path) -> dict[int, float] | None:
    try:
        return {int(lanes): float(ms) for lanes, ms in files.parsed(file.read_text(encoding="utf-8")).items()} or None
    except (OSError, ValueError, AttributeError, TypeError):
        return None  # not there, or damaged: it is only a measurement, and is made again


def _keep(file: Path, times: dict[int, float]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        files.replace(file, json.dumps(times))
    except OSError:
        return  # a cache that cannot be written costs the next run a measurement, not this one
