"""How a step is run, by name: the vocabulary that training, benchmark and study share."""

from __future__ import annotations

import torch

from ridgeline.engine import TrainStep
from ridgeline.errors import UnsupportedError, nearest
from ridgeline.models import Model, build
from ridgeline.train.config import AUTO, ENGINES, TrainConfig
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
    """The engine called `name`; "auto" is the one that trains fastest on the device without more ado.

    Raises:
        UnsupportedError: it captures CUDA graphs, and the device is none.
    """
    if name == AUTO:
        return "eager" if device.type == "cpu" else "compile+graph"
    if device.type == "cpu" and name not in ("eager", "compile"):
        raise UnsupportedError(f"engine {name} captures CUDA graphs and needs a GPU; use eager or compile")
    return name


def build_model(config: TrainConfig) -> Model:
    """The model of a config whose engine and device are decided, freshly initialised from its seed."""
    return build(config.model, impl=ENGINES[config.engine].impl, seed=config.seed).to(config.device)


def make_step(model: Model, config: TrainConfig) -> Step:
    """The step of a config whose engine, precision and device are decided.

    Raises:
        UnsupportedError: the engine cannot run here; says why.
    """
    engine = ENGINES[config.engine]
    if engine.capture:
        return TrainStep(
            model,
            optimizer=config.optimizer,
            steps=config.total_steps,
            precision=config.precision,
            accumulate=config.accumulation,
            capture=True,
            compile=engine.compile,
            seed=config.seed,
        )
    return TorchStep(
        model,
        config.optimizer,
        steps=config.total_steps,
        compile=engine.compile,
        precision=config.precision,
        accumulate=config.accumulation,
        seed=config.seed,
    )
