"""Train small decoder-only Transformers at the limit of the GPU."""

__version__ = "0.1.0"
