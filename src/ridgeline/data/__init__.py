"""Data: texts and games as memory-mapped shards, windows over them, and batches that can be resumed."""
