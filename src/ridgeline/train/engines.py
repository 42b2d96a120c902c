"""How a step is run, by name: the vocabulary that training, benchmark and study share."""

from __future__ import annotations

import dataclasses
from typing import cast

import torch
from torch import nn

from ridgeline.data.loader import Batches
from ridgeline.data.resident import ResidentBatches, fits
from ridgeline.engine import TrainStep
from ridgeline.errors import UnsupportedError, nearest
from ridgeline.models import Model, build
from ridgeline.models.fused.choices import attention_missing
from ridgeline.ops._triton.support import triton_missing
from ridgeline.ops.norm.api import MAX_WIDTH
from ridgeline.optim import OptimizerConfig
from ridgeline.train.config import AUTO, Engine, TrainConfig, engine_called, is_best
from ridgeline.train.step import Step, TorchStep

CARDS = ("gpu", "nvidia", "gpus")  # what people call a CUDA card


def find_device(name: str) -> torch.device:
    """The device called `name`; "auto" is a CUDA card where there is one, else the CPU.

    Raises:
        UnsupportedError: there is no such device here.
    """
    if name == AUTO:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        known = (AUTO, "cpu", "cuda")
        meant = "unknown device {name!r}; did you mean cuda?"
        raise UnsupportedError(meant.format(name=name) if kind in CARDS else nearest(name, known, "device"))
    if kind == "cuda" and not torch.cuda.is_available():
        built = "PyTorch finds no usable card" if torch.version.cuda else "this PyTorch is built without CUDA"
        raise UnsupportedError(f"there is no GPU for device {name} ({built}); use --device cpu")
    if kind == "cuda" and index and int(index) >= torch.cuda.device_count():
        raise UnsupportedError(f"there is no {name}: this machine has {torch.cuda.device_count()} CUDA cards")
    return torch.device(name)


def find_precision(name: str, device: torch.device) -> str:
    """The precision called `name`; "auto" is bf16 where a CUDA card has it, else fp32.

    Raises:
        UnsupportedError: the device lacks it.
    """
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if name == AUTO:
        return "bf16" if has_bf16 else "fp32"
    if name == "tf32" and (device.type == "cpu" or torch.cuda.get_device_capability(device) < (8, 0)):
        raise UnsupportedError(f"{device} has no tf32; use --precision fp32")
    if name.startswith("bf16") and device.type == "cuda" and not has_bf16:
        raise UnsupportedError(f"{torch.cuda.get_device_name(device)} has no bf16; use --precision fp16 or fp32")
    return name


def find_engine(name: str, device: torch.device) -> str:
    """The engine called `name`; "auto" is the one that trains fastest on the device.

    Raises:
        UnsupportedError: it captures CUDA graphs, and the device is none.
    """
    if name == AUTO:
        return "eager" if device.type == "cpu" else "best"
    if device.type == "cpu" and name not in ("eager", "compile"):
        does = "captures CUDA graphs" if engine_called(name).capture else "runs a card's kernels"
        raise UnsupportedError(f"engine {name} {does} and needs a GPU; use eager or compile")
    return name


def fused_missing(config: TrainConfig) -> str | None:
    """Why the fused blocks cannot train a model, or None; device and precision are decided."""
    width = config.model.decoder.width
    if config.precision.endswith("-autocast"):
        return f"{config.precision} casts between PyTorch's operations"
    if width > MAX_WIDTH:
        return f"their norms take rows of at most {MAX_WIDTH} numbers, the width is {width}"
    return triton_missing(torch.device(config.device))


def fused_slower(config: TrainConfig) -> str | None:
    """Where something else trains a model faster than the fused blocks, by measurement on an H200, or None."""
    decoder = config.model.decoder
    if config.precision != "fp32" or decoder.positions == "relative":
        return None
    missing = attention_missing("cuda-fp32", decoder, torch.device(config.device), torch.float32, config.window.context)
    if missing is None:
        return None
    return f"in fp32 torch.compile is faster than they are with attention in Triton, and its fp32 kernel {missing}"


def settle_engine(config: TrainConfig, asked: str) -> TrainConfig:
    """A config whose engine can run its model.

    "auto" on a card is the fused blocks, and where they cannot run or are slower PyTorch's best: torch.compile in a
    captured step, or without Triton, which torch.compile writes its kernels in, the captured step alone.

    Args:
        config: everything decided by `find_engine` and the like.
        asked: the engine as the user named it.

    Raises:
        UnsupportedError: "best", on whatever plan, is asked for by name, and the fused blocks cannot run.
    """
    missing = fused_missing(config)
    if not is_best(config.engine) or (missing is None and (asked != AUTO or fused_slower(config) is None)):
        return config
    if asked != AUTO:
        raise UnsupportedError(f"engine {config.engine} is the fused blocks, and {missing}; use auto or compile+graph")
    compiles = triton_missing(torch.device(config.device)) is None
    return dataclasses.replace(config, engine="compile+graph" if compiles else "graph")


def build_model(config: TrainConfig) -> Model:
    """The model of a config whose engine and device are decided, freshly initialised from its seed."""
    return build(config.model, impl=engine_called(config.engine).impl, seed=config.seed).to(config.device)


def make_step(model: Model, config: TrainConfig, *, world: int = 1) -> Step:
    """The step of a config whose engine, precision, lanes and device are decided.

    Args:
        model: on its device.
        config: the run.
        world: processes that train together.

    Raises:
        UnsupportedError: the engine cannot run here; says why.
    """
    return engine_step(
        engine_called(config.engine),
        model,
        config.optimizer,
        steps=config.total_steps,
        precision=config.precision,
        accumulate=config.accumulation,
        lanes=config.lanes or None,
        seed=config.seed,
        world=world,
    )


def engine_step(
    engine: Engine,
    model: nn.Module,
    optimizer: OptimizerConfig,
    *,
    steps: int | None,
    precision: str,
    accumulate: int = 1,
    lanes: int | None = None,
    seed: int = 0,
    world: int = 1,
    own: bool = False,
    capture: bool | None = None,
) -> TrainStep | TorchStep:
    """A step on `model` as `engine` runs it.

    Args:
        engine: from `engine_called`.
        model: built with `engine.impl`, on its device.
        optimizer: AdamW or Muon, clipping and schedule.
        steps: length of the schedule; None for none.
        precision: a name of engine.PRECISIONS that is decided.
        accumulate: parts of a batch.
        lanes: pieces of a part that run beside each other, in the step engine alone; None for `engine.lanes`.
        seed: of the run.
        world: processes that train together. Several of them, and Muon, always run the step engine; an engine of
            PyTorch's own optimiser is then the same program call by call.
        own: the step engine takes the step also where `engine` would leave it to PyTorch; half precision then means
            copies of the weights.
        capture: whether the step engine captures it; None for `engine.capture`.

    Raises:
        UnsupportedError: it cannot run here; says why.
    """
    if not (own or engine.own) and (world > 1 or optimizer.algorithm == "muon"):
        _refuse_own_graphs(engine, f"an all-reduce over {world} processes" if world > 1 else "Muon")
        own, precision = True, f"{precision}-autocast" if precision in ("bf16", "fp16") else precision
    if own or engine.own:
        return TrainStep(
            model,
            optimizer=optimizer,
            steps=steps,
            precision=precision,
            accumulate=accumulate,
            lanes=engine.lanes if lanes is None else lanes,
            prefetch=engine.prefetch,
            capture=engine.capture if capture is None else capture,
            compile=engine.compile,
            seed=seed,
        )
    _refuse_lanes(lanes)
    return TorchStep(
        cast(Model, model),
        optimizer,
        steps=steps,
        compile=engine.compile,
        precision=precision,
        accumulate=accumulate,
        seed=seed,
    )


def _refuse_own_graphs(engine: Engine, what: str) -> None:
    """Raise where the step engine cannot stand in for `engine`, whose graphs have no place for `what`."""
    if engine.compile not in (None, "default"):
        raise UnsupportedError(
            f"engine {engine.compile} captures graphs of its own, which have no place for {what}; use best, "
            "compile+graph, graph, compile or eager"
        )


def _refuse_lanes(lanes: int | None) -> None:
    """Raise for several lanes under PyTorch's own step."""
    if lanes is not None and lanes > 1:
        raise UnsupportedError(
            f"lanes={lanes} is the step engine's, and PyTorch's own step has one; set lanes to 1 or 0"
        )


def resident_batches(config: TrainConfig, step: Step, batches: Batches) -> ResidentBatches | None:
    """The batches as the card draws them inside the step; None where the host has to bring them.

    That is on the CPU, under PyTorch's own step, under a rung that does without prefetching, without Triton, and for
    data sets that are too large for the card (see `fits`).
    """
    if not isinstance(step, TrainStep) or step.device.type == "cpu" or not engine_called(config.engine).prefetch:
        return None
    if triton_missing(step.device) or not fits(batches, step.device):
        return None
    return ResidentBatches(batches, step.device)
