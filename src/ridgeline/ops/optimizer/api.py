"""The public function of the optimiser's step.

reference   plain torch, waits for the device (reference.py)
triton      two kernels, never waits
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.errors import UnsupportedError
from ridgeline.ops import checks
from ridgeline.ops._triton.support import availability, demand
from ridgeline.ops.optimizer.reference import AdamWSettings, AdamWState, adamw_reference

IMPLEMENTATIONS = ("reference", "triton")
_FP32 = ("weights", "gradient", "moment_1", "moment_2", "rates", "applied", "ring", "loss", "weight", "loss_scale")
_INT64 = ("seed_step", "skipped")


def available(impl: str, device: torch.device) -> str | None:
    """Why `impl` cannot run on `device`, or None when it can."""
    return availability(impl, IMPLEMENTATIONS, device)


def check_state(state: AdamWState) -> None:
    """The state's buffers have the dtypes, shapes and device that a step needs.

    Raises:
        UnsupportedError: with the buffer's name, what was expected and what came.
    """
    tensors = {name: value for name, value in state._asdict().items() if isinstance(value, Tensor)}
    checks.devices(state.weights.device, **tensors)
    for names, dtype in ((_FP32, torch.float32), (_INT64, torch.int64), (("growth",), torch.int32)):
        for name in names:
            if name in tensors and tensors[name].dtype != dtype:
                raise UnsupportedError(f"{name} must be {dtype}, got {tensors[name].dtype}")
    if state.copy is not None and state.copy.dtype not in (torch.bfloat16, torch.float16):
        raise UnsupportedError(f"copy must be bfloat16 or float16, got {state.copy.dtype}")
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise UnsupportedError(f"{name} must be contiguous, got strides {tensor.stride()}")
    M = state.weights.numel()
    if not 0 <= state.start <= state.boundary:
        raise UnsupportedError(f"start must be between 0 and boundary={state.boundary}, got {state.start}")
    for name in ("weights", "moment_1", "copy"):
        checks.shape(name, tensors.get(name), (M,))
    checks.shape("moment_2", state.moment_2, (M - state.start,))
    if state.gradient.dim() != 1 or state.gradient.numel() < M:
        raise UnsupportedError(f"gradient must have at least {M} elements, got shape {tuple(state.gradient.shape)}")
    if not 0 <= state.boundary <= M:
        raise UnsupportedError(f"boundary must be between 0 and {M}, got {state.boundary}")
    if state.growth is not None and state.loss_scale is None:
        raise UnsupportedError("growth counts the steps of a loss scale, got loss_scale=None")


def adamw(
    state: AdamWState,
    settings: AdamWSettings,
    *,
    work: Tensor | None = None,
    impl: str = "reference",
) -> None:
    """One step in place: norm, clip, AdamW, 16-bit copy, counters, loss scale.

    Args:
        state: the flat buffers and device-side scalars; see `AdamWState`.
        settings: what stays the same over the run.
        work: memory of `optimizer.triton.workspace`, which "triton" needs at a fixed address inside a CUDA graph; None
            to allocate it anew.
        impl: "reference" or "triton".

    Raises:
        UnsupportedError: the implementation cannot run here, or a buffer it does not take.
    """
    demand(impl, IMPLEMENTATIONS, state.weights.device)
    check_state(state)
    with torch.no_grad():
        if impl == "triton":
            from ridgeline.ops.optimizer.triton import adamw_raw, workspace

            adamw_raw(state, settings, workspace(state.weights.device) if work is None else work)
            return
        adamw_reference(state, settings)
