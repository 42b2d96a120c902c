"""Autoregressive classification heads on one state, with their losses and every gradient."""

from ridgeline.ops.policy_heads.api import IMPLEMENTATIONS, available, policy_heads, unsupported
from ridgeline.ops.policy_heads.reference import HeadWeights, policy_heads_reference

__all__ = ["IMPLEMENTATIONS", "HeadWeights", "available", "policy_heads", "policy_heads_reference", "unsupported"]
