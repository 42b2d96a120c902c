"""The fast path of a decoder: blocks with explicit forward and backward over fused kernels."""
