"""Norm, clip and AdamW over flat buffers, with every counter on the device."""

from ridgeline.ops.optimizer.api import IMPLEMENTATIONS, adamw, available
from ridgeline.ops.optimizer.reference import AdamWSettings, AdamWState, KnownSquares, adamw_reference

__all__ = ["IMPLEMENTATIONS", "AdamWSettings", "AdamWState", "KnownSquares", "adamw", "adamw_reference", "available"]
