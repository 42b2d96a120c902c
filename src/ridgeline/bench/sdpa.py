"""Which backend PyTorch's scaled_dot_product_attention would really take: asked, with the shapes of a model.

Asked of PyTorch's own dispatcher, not inferred from the card: which fused kernel takes a call depends on dtype, mask,
dropout, head counts and PyTorch's version, and the MATH backend, which holds the (B, H, T, T) scores in memory, takes
whatever the others refuse, without a word.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from ridgeline.models import DecoderConfig

WINDOWS = 2  # the dispatcher looks at shapes, not at how many windows there are
MATH = "math"
STANDARD_ERROR = 2  # file descriptor
_FUSED: dict[str, str] = {
    "flash": "can_use_flash_attention",
    "efficient": "can_use_efficient_attention",
    "cudnn": "can_use_cudnn_attention",
}
_WARNING = re.compile(r"Warning: (.*?)\s*(?:\(function \w+\)|\(Triggered .*)?$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class SdpaAnswer:
    """What the dispatcher said to one call.

    Attributes:
        call: the call in words.
        backend: cudnn, flash, efficient, math or overrideable.
        others: why each other backend would not run, where it refuses as PyTorch words it; empty on the CPU.
        score_bytes: what one layer's (B, H, T, T) scores take for each window, if they are held in memory; else 0.
        masked: the call has an explicit mask, which carries a gradient.
    """

    call: str
    backend: str
    others: dict[str, str]
    score_bytes: int
    masked: bool = False


def _ask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, grouped: bool) -> str:
    choice = torch._fused_sdp_choice(q, k, v, mask, p, mask is None, scale=None, enable_gqa=grouped)
    return SDPBackend(choice).name.lower().removesuffix("_attention")


@contextlib.contextmanager
def _said() -> Iterator[list[str]]:
    """Every warning of PyTorch's meanwhile, those that its C++ code writes to standard error included."""
    heard: list[str] = []
    always = torch.is_warn_always_enabled()
    if sys.stderr is not None:
        sys.stderr.flush()
    kept = None
    with contextlib.suppress(OSError):  # it may be closed
        kept = os.dup(STANDARD_ERROR)
    with tempfile.TemporaryFile() as file, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            torch.set_warn_always(True)
            if kept is not None:
                os.dup2(file.fileno(), STANDARD_ERROR)
            yield heard
        finally:
            if kept is not None:
                os.dup2(kept, STANDARD_ERROR)
                os.close(kept)
            torch.set_warn_always(always)
        file.seek(0)
        text = "\n".join([*(f"Warning: {w.message}" for w in caught), file.read().decode(errors="replace")])
        heard += (words for words in _WARNING.findall(text) if not words.endswith("because:"))


def _refusal(can_use: Callable[[object, bool], bool], given: dict[str, Any]) -> str | None:
    """Why a fused backend would not take a call; None if it would.

    PyTorch refuses some calls without a word: then the call is changed, one thing at a time, until it is taken.
    """

    def takes(**changes: Any) -> bool:
        call = {**given, **changes}
        return can_use(torch.backends.cuda.SDPAParams(*call.values()), True)

    with _said() as heard:
        if takes():
            return None
    if heard:
        return "; ".join(dict.fromkeys(heard))
    mask = given["mask"]
    changes: dict[str, dict[str, Any]] = {"dropout": {"p": 0.0}}
    if mask is not None:
        changes = {"a gradient of the mask": {"mask": mask.detach()}, "a mask": {"mask": None}, **changes}
    with _said():
        thing = next((name for name, change in changes.items() if takes(**change)), None)
    return "refused without a word" if thing is None else f"does not take {thing}, by trial"


def _others(backend: str, given: dict[str, Any]) -> dict[str, str]:
    """Every backend but the one that is taken, with the reason."""
    if given["q"].device.type != "cuda":
        return {}
    found = {}
    for name, function in _FUSED.items():
        if name != backend:
            found[name] = _refusal(getattr(torch.backends.cuda, function), given) or f"would take it, after {backend}"
    if backend != MATH:
        found[MATH] = "takes what all others refuse"
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
        held = backend == MATH or masked
        given = {"q": q, "k": k, "v": v, "mask": mask, "p": p, "causal": mask is None, "grouped": grouped}
        return SdpaAnswer(
            call=call,
            backend=backend,
            others=_others(backend, given),
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
