"""Causal attention, with or without a learned relative term and dropout on the probabilities."""
