"""Known bad combinations of card, driver and libraries, each with its cure. Facts in, findings out: nothing is probed.

Where each was reported:
    Triton 3.4.0 up to 3.7.1 on Hopper      flash-linear-attention issue 640, PRs 826 and 983
    ptxas older than 13.1.80 on Hopper      flash-linear-attention PR 1262
    cuDNN attention's backward pass         PyTorch issue 196678; preferred on Hopper since PyTorch 2.10
    mix-order reduction in PyTorch 2.10     PyTorch issues 190796 and 193061, fixed in 2.11
    Triton on Turing                        no matrix instruction is emitted for compute capability 7.5
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ridgeline.bench.sdpa import SdpaAnswer

Severity = Literal["bad", "watch"]
HOPPER = (9, 0)
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What findings are drawn from; None where there is no such thing here.

    Attributes:
        torch: PyTorch's version. cuda: the CUDA version it was built for.
        triton: Triton's version. ptxas: version of the assembler that Triton would run.
        nvrtc: version of the run-time CUDA compiler.
        capability: of the card.
        sdpa: answers of PyTorch's attention dispatcher.
        T: positions of a window.
        tool: nvidia-smi is there, so there is a driver.
    """

    torch: str
    cuda: str | None = None
    triton: str | None = None
    ptxas: str | None = None
    nvrtc: str | None = None
    capability: tuple[int, int] | None = None
    sdpa: Sequence[SdpaAnswer] = ()
    T: int = 256
    tool: bool = False


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong here ("bad") or could go wrong ("watch"), and what to do about it."""

    name: str
    severity: Severity
    detail: str
    cure: str


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "3.7.1.post1+cu130" → (3, 7, 1)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def _no_cuda_build(f: Facts) -> Finding | None:
    if not f.tool or f.capability is not None:
        return None
    reason = "is built without CUDA" if f.cuda is None else f"(CUDA {f.cuda}) cannot use it"
    return Finding(
        name="card not usable",
        severity="bad",
        detail=f"a driver is installed, but PyTorch {f.torch} {reason}",
        cure="install a CUDA build of PyTorch that the driver supports: see pytorch.org/get-started",
    )


def _triton_range(f: Facts) -> Finding | None:
    if f.triton is None or f.capability != HOPPER or not (3, 4) <= numbers(f.triton) < (3, 7, 1):
        return None
    return Finding(
        name="Triton miscompiles transposed results on Hopper",
        severity="watch",
        detail=f"Triton {f.triton} stores a transposed result of tl.dot wrongly when another tl.dot reads it; this "
        "package's kernels avoid the pattern, torch.compile's templates and your own kernels may not",
        cure="check such kernels against fp64, or install Triton 3.7.1 with the PyTorch that goes with it",
    )


def _ptxas(f: Facts) -> Finding | None:
    if f.ptxas is None or f.capability != HOPPER or numbers(f.ptxas) >= (13, 1, 80):
        return None
    fixed = "fixes one of two known cases" if numbers(f.ptxas) >= (13, 0, 88) else "has both known cases"
    return Finding(
        name="ptxas miscompiles some Hopper kernels",
        severity="watch",
        detail=f"Triton would run ptxas {f.ptxas}, which {fixed}",
        cure="set TRITON_PTXAS_PATH to the ptxas of CUDA 13.1 or newer",
    )


def _no_nvrtc(f: Facts) -> Finding | None:
    if f.capability != HOPPER or f.nvrtc is not None:
        return None
    return Finding(
        name="no run-time CUDA compiler",
        severity="bad",
        detail="the kernels in CUDA C++ are compiled on the spot by libnvrtc, which was not found",
        cure="install a CUDA build of PyTorch from its own index, or: pip install nvidia-cuda-nvrtc",
    )


def _cudnn_backward(f: Facts) -> Finding | None:
    calls = [answer for answer in f.sdpa[:1] if answer.backend == "cudnn"]
    if not calls:
        return None
    worst = calls[0].masked and f.T % 128 == 64
    return Finding(
        name="cuDNN attention's backward pass",
        severity="bad" if worst else "watch",
        detail="PyTorch picks cuDNN for this attention; its backward pass gives NaN with a mask when T % 128 = 64 and "
        f"a row's log-sum-exp is below -88.7 (here T = {f.T}, {'with' if calls[0].masked else 'without'} a mask)",
        cure="torch.backends.cuda.enable_cudnn_sdp(False) if gradients become NaN",
    )


def _mix_order(f: Facts) -> Finding | None:
    if f.capability is None or not (2, 9, 1) < numbers(f.torch)[:3] < (2, 11):
        return None
    return Finding(
        name="torch.compile's mix-order reduction",
        severity="bad",
        detail=f"PyTorch {f.torch} gives wrong gradients of LayerNorm and RMSNorm at 4,096 rows and more",
        cure="install PyTorch 2.11 or newer, or set TORCHINDUCTOR_MIX_ORDER_REDUCTION=0",
    )


def _old_torch(f: Facts) -> Finding | None:
    if numbers(f.torch) >= (2, 11):
        return None
    return Finding(
        name="PyTorch too old",
        severity="bad",
        detail=f"PyTorch {f.torch} is older than 2.11",
        cure="install PyTorch 2.11 or newer",
    )


def _turing(f: Facts) -> Finding | None:
    if f.capability is None or f.capability >= (8, 0):
        return None
    return Finding(
        name="a card before compute capability 8.0",
        severity="watch",
        detail="Triton emits no matrix instructions for this card, and it has neither bf16 nor tf32: the fused block "
        "is not used, training runs on PyTorch's own ops",
        cure="train in fp16 (--precision fp16); attention goes to the efficient backend, never to flash or cuDNN",
    )


def _math(f: Facts) -> Finding | None:
    calls = [answer for answer in f.sdpa if answer.backend == "math"]
    if not calls or f.capability is None:
        return None
    first = calls[0]
    mine = first is f.sdpa[0]
    return Finding(
        name="attention falls to the MATH backend",
        severity="bad" if mine else "watch",
        detail=f"{first.call}: PyTorch holds the scores in memory, {first.score_bytes / MIB:.1f} MiB a layer and "
        "window",
        cure="expand the KV heads before the call"
        if "KV heads" in first.call
        else "train in bf16 or fp16, or with the fused block, whose attention holds no scores",
    )


CHECKS: tuple[Callable[[Facts], Finding | None], ...] = (
    _no_cuda_build,
    _old_torch,
    _mix_order,
    _no_nvrtc,
    _math,
    _cudnn_backward,
    _triton_range,
    _ptxas,
    _turing,
)


def find(facts: Facts) -> list[Finding]:
    """Every known bad combination that the facts show, bad ones first."""
    found = [finding for check in CHECKS if (finding := check(facts)) is not None]
    return sorted(found, key=lambda finding: finding.severity != "bad")
