"""The reference models: ordinary PyTorch modules that every fast path must equal."""

from ridgeline.models.config import (
    Category,
    DecoderConfig,
    Head,
    LanguageConfig,
    ModelConfig,
    PolicyConfig,
)
from ridgeline.models.decoder import Decoder
from ridgeline.models.language import LanguageModel
from ridgeline.models.policy import ControllerPolicy

Model = LanguageModel | ControllerPolicy

__all__ = [
    "Category",
    "ControllerPolicy",
    "Decoder",
    "DecoderConfig",
    "Head",
    "LanguageConfig",
    "LanguageModel",
    "Model",
    "ModelConfig",
    "PolicyConfig",
    "build",
]


def build(config: ModelConfig, *, impl: str = "torch", seed: int | None = None) -> Model:
    """The model of a config, freshly initialised; `seed` makes the initialisation repeatable."""
    kind = LanguageModel if isinstance(config, LanguageConfig) else ControllerPolicy
    return kind(config, impl=impl, seed=seed)  # type: ignore[arg-type]
