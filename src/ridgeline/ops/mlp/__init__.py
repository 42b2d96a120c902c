"""The MLP half of a narrow block, and the two products beside it, each one kernel with the join it meets."""
