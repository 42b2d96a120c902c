"""LayerNorm and RMSNorm, alone and joined with the residual stream."""

from ridgeline.ops.norm.api import IMPLEMENTATIONS, available, norm, residual_norm
from ridgeline.ops.norm.reference import NormKind, norm_reference, residual_norm_reference

__all__ = [
    "IMPLEMENTATIONS",
    "NormKind",
    "available",
    "norm",
    "norm_reference",
    "residual_norm",
    "residual_norm_reference",
]
