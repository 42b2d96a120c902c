"""Which backend PyTorch's scaled_dot_product_attention would really take: asked, with the shapes of a model.

Asked of PyTorch's own dispatcher, not inferred from the card: which fused kernel takes a call depends on dtype, mask,
dropout, head counts and PyTorch's version, and the MATH backend, which holds the (B, H, T, T) scores in memory, takes
whatever the others refuse, without a word.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from ridgeline.models import DecoderConfig

WINDOWS = 2  # the dispatcher looks at shapes, not at how many windows there are
_FUSED: dict[str, str] = {
    "flash": "can_use_flash_attention",
    "efficient": "can_use_efficient_attention",
    "cudnn": "can_use_cudnn_attention",
}


@dataclass(frozen=True, kw_only=True)
class SdpaAnswer:
    """What the dispatcher said to one call.

    Attributes:
        call: the call in words.
        backend: cudnn, flash, efficient, math or overrideable.
        refused: why each fused backend would not take it, as PyTorch words it; empty on the CPU.
        score_bytes: what one layer's (B, H, T, T) scores take for each window, if they are held in memory; else 0.
        masked: the call has an explicit mask, which carries a gradient.
    """

    call: str
    backend: str
    refused: dict[str, str]
    score_bytes: int
    masked: bool = False


def _ask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, grouped: bool) -> str:
    choice = torch._fused_sdp_choice(q, k, v, mask, p, mask is None, scale=None, enable_gqa=grouped)
    return SDPBackend(choice).name.lower().removesuffix("_attention")


def _refusals(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, grouped: bool) -> dict[str, str]:
    if q.device.type != "cuda":
        return {}
    found = {}
    parameters = torch.backends.cuda.SDPAParams(q, k, v, mask, p, mask is None, grouped)
    for name, function in _FUSED.items():
        can_use: Callable[[object, bool], bool] = getattr(torch.backends.cuda, function)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            if not can_use(parameters, True):
                words = (str(warning.message).split(" (Triggered")[0].strip() for warning in said)
                found[name] = "; ".join(word for word in words if not word.endswith("because:")) or "refused, no reason"
    return found


def ask_sdpa(c: DecoderConfig, T: int, device: torch.device, dtype: torch.dtype) -> list[SdpaAnswer]:
    """The backend of every way in which this decoder's attention could be written for SDPA, in training.

    The first answer is for the call that impl="torch" makes: heads expanded, the relative term as a mask.
    """

    def tensor(heads: int) -> Tensor:
        return torch.zeros(WINDOWS, heads, T, c.head_dim, device=device, dtype=dtype, requires_grad=True)

    def answer(call: str, heads: int, masked: bool, p: float, grouped: bool = False) -> SdpaAnswer:
        q, k, v = tensor(c.heads), tensor(heads), tensor(heads)
        shape = (WINDOWS, c.heads, T, T)
        mask = torch.zeros(shape, device=device, dtype=dtype, requires_grad=True) if masked else None
        backend = _ask(q, k, v, mask, p, grouped)
        held = backend == "math" or masked
        return SdpaAnswer(
            call=call,
            backend=backend,
            refused=_refusals(q, k, v, mask, p, grouped),
            score_bytes=c.heads * T * T * dtype.itemsize if held else 0,
            masked=masked,
        )

    relative, p = c.positions == "relative", c.dropout
    dropped = f", dropout {p:g}" if p else ""
    answers = [answer(f"as impl='torch' calls it{': relative term as mask' if relative else ''}{dropped}",
                      c.heads, relative, p)]  # fmt: skip
    if relative or p:
        answers.append(answer("causal, without relative term and dropout", c.heads, False, 0.0))
    if c.groups < c.heads:
        answers.append(answer(f"{c.groups} KV heads not expanded", c.groups, False, p))
        answers.append(answer(f"{c.groups} KV heads with enable_gqa=True", c.groups, False, p, grouped=True))
    return answers
