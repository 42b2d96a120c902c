"""The ladder: one model under growing sets of implementation choices, each rung and each single change measurable.

ladder      the rungs as data, and their names
buffers     where a result goes: a fresh buffer or one that was allocated before, filled with zeros first or not
run         what one pass over a stack carries: config, rung, shape, buffers
products    matrix products and the gradients of weights
joins       residual, dropout and norm between two products; bias and GELU inside the MLP
attention   scores and weights in memory, or swept over in tiles
stack       all blocks as one autograd function
ends        the model's input and heads on the rungs that fuse nothing
"""

from ridgeline.models.rungs.ladder import RUNGS, Rung, find_rung, is_rung

__all__ = ["RUNGS", "Rung", "find_rung", "is_rung"]
