"""A policy's input layer: embeddings, numbers and one-hots, joined and multiplied."""

from ridgeline.ops.inputs.api import IMPLEMENTATIONS, available, input_layer
from ridgeline.ops.inputs.reference import InputColumns, input_layer_reference

__all__ = ["IMPLEMENTATIONS", "InputColumns", "available", "input_layer", "input_layer_reference"]
