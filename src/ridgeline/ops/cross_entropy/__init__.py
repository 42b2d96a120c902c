"""Cross-entropy with its gradient in one pass, and a linear head's without a logits tensor."""

from ridgeline.ops.cross_entropy.api import IMPLEMENTATIONS, available, cross_entropy, linear_cross_entropy
from ridgeline.ops.cross_entropy.reference import IGNORE, cross_entropy_reference, linear_cross_entropy_reference

__all__ = [
    "IGNORE",
    "IMPLEMENTATIONS",
    "available",
    "cross_entropy",
    "cross_entropy_reference",
    "linear_cross_entropy",
    "linear_cross_entropy_reference",
]
