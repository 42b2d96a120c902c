"""Causal attention, with or without a learned relative term and dropout on the probabilities."""

from ridgeline.ops.attention.api import IMPLEMENTATIONS, attention, available
from ridgeline.ops.attention.reference import attention_reference, skew

__all__ = ["IMPLEMENTATIONS", "attention", "attention_reference", "available", "skew"]
