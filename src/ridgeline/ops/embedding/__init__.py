"""Rows of a table by index, with an optional learned position and dropout."""

from ridgeline.ops.embedding.api import IMPLEMENTATIONS, available, embedding
from ridgeline.ops.embedding.reference import embedding_reference

__all__ = ["IMPLEMENTATIONS", "available", "embedding", "embedding_reference"]
