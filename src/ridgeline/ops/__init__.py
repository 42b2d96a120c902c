"""The operations of a decoder. One folder an op: reference, kernels, cost, and one public function with `impl=`.

Shape suffixes used throughout:
    B batch (samples), T positions, C width, H query heads, G key/value heads, D head width,
    F MLP width, R rows of a position table, V vocabulary or classes, N rows of a flattened (B·T) tensor.
"""
