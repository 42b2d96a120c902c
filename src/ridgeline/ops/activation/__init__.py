"""Bias and GELU as one pass: what runs where no product's epilogue takes them."""

from ridgeline.ops.activation.api import IMPLEMENTATIONS, available, bias_gelu
from ridgeline.ops.activation.reference import GeluKind, bias_gelu_reference

__all__ = ["IMPLEMENTATIONS", "GeluKind", "available", "bias_gelu", "bias_gelu_reference"]
