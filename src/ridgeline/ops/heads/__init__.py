"""A policy's heads with their losses: small products of unaligned sizes that had better be planned together."""

from ridgeline.ops.heads.api import IMPLEMENTATIONS, available, heads_losses
from ridgeline.ops.heads.reference import Conditioning, HeadWeights, heads_losses_reference

__all__ = [
    "IMPLEMENTATIONS",
    "Conditioning",
    "HeadWeights",
    "available",
    "heads_losses",
    "heads_losses_reference",
]
