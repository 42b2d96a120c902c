"""Dropout whose mask is a function of (seed, step, site, sample, element), not of a generator's history."""

from ridgeline.ops.dropout.api import IMPLEMENTATIONS, available, dropout
from ridgeline.ops.dropout.reference import DropoutState, attention_keep, check_dropping, hidden_keep, quantise

__all__ = [
    "IMPLEMENTATIONS",
    "DropoutState",
    "attention_keep",
    "available",
    "check_dropping",
    "dropout",
    "hidden_keep",
    "quantise",
]
