"""Peers: other packages' models and kernels for the workloads that they can express.

transformers   its GPT-2, for a decoder with LayerNorm, biases, learned positions and as many KV heads as heads
liger          this package's PyTorch model with Liger's norms and its loss joined with the head, for language models
"""

from __future__ import annotations

import types
from typing import Any, cast
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.bench.workloads import Workload
from ridgeline.errors import UnsupportedError, require
from ridgeline.models import LanguageConfig, Model, build
from ridgeline.models.language import IGNORE, LanguageModel
from ridgeline.ops.dropout import DropoutState

PEERS = {"transformers": "compile+graph", "liger": "graph"}
"""The engine that runs each of them: Liger's kernels are Triton already, the other is compiled."""


def _language(case: Workload, peer: str) -> LanguageConfig:
    if not isinstance(case.model, LanguageConfig):
        raise UnsupportedError(f"{peer} cannot express {case.name}: it is no language model")
    return case.model


class _TransformersGPT2(nn.Module):
    """transformers' GPT-2 with the loss of this package's language models."""

    def __init__(self, case: Workload) -> None:
        super().__init__()
        config = _language(case, "transformers")
        c = config.decoder
        if c.norm != "layernorm" or not c.bias or c.positions != "learned" or c.groups != c.heads:
            raise UnsupportedError(
                f"transformers' GPT-2 cannot express {case.name}: it has LayerNorm, biases, learned positions and as "
                "many KV heads as heads"
            )
        library = require("transformers", "peers")
        settings = library.GPT2Config(
            vocab_size=config.vocabulary,
            n_positions=c.table_rows,
            n_embd=c.width,
            n_layer=c.layers,
            n_head=c.heads,
            n_inner=c.hidden,
            activation_function="gelu_new" if c.gelu == "tanh" else "gelu",
            layer_norm_epsilon=c.norm_eps,
            resid_pdrop=c.dropout,
            embd_pdrop=c.dropout,
            attn_pdrop=c.dropout,
            tie_word_embeddings=config.tied,
            bos_token_id=0,
            eos_token_id=0,
        )
        self.model = library.GPT2LMHeadModel(settings)

    def loss(self, batch: dict[str, Tensor], dropout: DropoutState | None = None) -> Tensor:
        """Mean cross-entropy in nats a token."""
        logits_BTV = self.model(batch["tokens"].long(), use_cache=False).logits
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), batch["targets"].long().flatten(), ignore_index=IGNORE)


def _liger_norm(norm: nn.Module, ops: Any) -> None:
    """Lets a norm of the model compute with Liger's function on the same weights."""

    def layer_norm(self: nn.LayerNorm, x: Tensor) -> Tensor:
        return ops.LigerLayerNormFunction.apply(x, self.weight, self.bias, self.eps)

    def rms_norm(self: nn.RMSNorm, x: Tensor) -> Tensor:
        # offset 0; in fp32 within, as PyTorch's RMSNorm does; not in place
        return ops.LigerRMSNormFunction.apply(x, self.weight, self.eps, 0.0, "gemma", False)

    norm.forward = types.MethodType(rms_norm if isinstance(norm, nn.RMSNorm) else layer_norm, norm)  # type: ignore[method-assign]


class _LigerLoss(torch.autograd.Function):
    """Liger's product with the head and cross-entropy in one, which makes the gradients in the forward pass.

    As Liger has it, it waits for the card twice, which a captured step cannot: forward it asks how many targets count
    (in a benchmark all do), backward whether the loss' gradient is one (here it is multiplied by, whatever it is).
    """

    @staticmethod
    def forward(ctx: Any, state_NC: Tensor, weight_VC: Tensor, targets_N: Tensor) -> Tensor:
        """Mean cross-entropy in nats."""
        ops = require("liger_kernel.ops.fused_linear_cross_entropy", "peers")
        with mock.patch.object(torch.Tensor, "item", return_value=targets_N.numel(), create=True):
            loss, *_, d_state_NC, d_weight_VC, _ = ops.fused_linear_cross_entropy_forward(
                state_NC, weight_VC, targets_N, ignore_index=IGNORE
            )
        ctx.save_for_backward(d_state_NC, d_weight_VC)
        return loss

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        """The gradients that the forward pass made."""
        d_state_NC, d_weight_VC = ctx.saved_tensors
        return d_state_NC * d_loss, d_weight_VC * d_loss, None


def _liger(case: Workload) -> Model:
    _language(case, "liger")
    require("liger_kernel", "peers")
    ops = require("liger_kernel.ops", "peers")
    model = cast(LanguageModel, build(case.model, seed=0))
    for module in model.modules():
        if isinstance(module, nn.RMSNorm) or (isinstance(module, nn.LayerNorm) and module.bias is not None):
            _liger_norm(module, ops)

    def loss(self: LanguageModel, batch: dict[str, Tensor], dropout: DropoutState | None = None) -> Tensor:
        state_NC = self.decoder(self.tokens(batch["tokens"].long()), dropout).flatten(0, 1)
        return cast(Tensor, _LigerLoss.apply(state_NC, self.head.weight, batch["targets"].long().flatten()))

    model.loss = types.MethodType(loss, model)  # type: ignore[method-assign]
    return model


def peer_model(peer: str, case: Workload) -> nn.Module:
    """The peer's model of a workload, with a `loss(batch)`.

    Raises:
        UnsupportedError: it cannot express the model.
        MissingExtraError: its package is not installed.
    """
    return _TransformersGPT2(case) if peer == "transformers" else _liger(case)
