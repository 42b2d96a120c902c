"""Rows of a table by index, with an optional learned position and dropout."""

from ridgeline.ops.embedding.api import IMPLEMENTATIONS, Normed, NormOf, available, embedding, embedding_norm
from ridgeline.ops.embedding.reference import embedding_reference

__all__ = ["IMPLEMENTATIONS", "NormOf", "Normed", "available", "embedding", "embedding_norm", "embedding_reference"]
