"""Train small decoder-only Transformers at the limit of the GPU.

The public names are few, and nothing is imported before one of them is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ridgeline.engine import TrainStep
    from ridgeline.errors import RidgelineError
    from ridgeline.models import ControllerPolicy, Decoder, DecoderConfig, LanguageConfig, LanguageModel, PolicyConfig
    from ridgeline.presets import preset

__version__ = "0.1.0"

_HOMES = {
    "ControllerPolicy": "models",
    "Decoder": "models",
    "DecoderConfig": "models",
    "LanguageConfig": "models",
    "LanguageModel": "models",
    "PolicyConfig": "models",
    "RidgelineError": "errors",
    "TrainStep": "engine",
    "preset": "presets",
}

__all__ = [
    "ControllerPolicy",
    "Decoder",
    "DecoderConfig",
    "LanguageConfig",
    "LanguageModel",
    "PolicyConfig",
    "RidgelineError",
    "TrainStep",
    "preset",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"ridgeline.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'ridgeline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
