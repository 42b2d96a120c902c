"""Matrix products with what surrounds them in a block: bias, GELU, dropout and residual, and their derivatives."""
