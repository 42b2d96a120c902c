"""Muon: which weights it trains, and the orthogonalised momentum that it moves them by.

Each update of a matrix is its momentum with all singular values brought near 1, by five Newton–Schulz iterations in
bf16 (Jordan et al. 2024, "Muon: An optimizer for hidden layers"), times 0.2 · √(longer side), so that it is as large as
an update of AdamW and learning rate and weight decay are AdamW's (Liu et al. 2025, "Muon is Scalable for LLM
Training"). In exact arithmetic torch.optim.Muon with adjust_lr_fn="match_rms_adamw".
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from ridgeline.errors import ConfigError

ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of X, X Xᵀ X and (X Xᵀ)² X: steepest at 0 without leaving about [0.7, 1.2]
EPS = 1e-7
RMS = 0.2  # of an update of AdamW, about


def hidden_matrices(model: nn.Module) -> frozenset[str]:
    """Names of the weights that Muon is for: those of linear layers inside a list of blocks (nn.ModuleList).

    Embeddings, heads, norms, biases and tables of positions stay with AdamW, as Muon's authors advise.

    Raises:
        ConfigError: there are none.
    """
    blocks = {id(part) for module in model.modules() if isinstance(module, nn.ModuleList) for part in module.modules()}
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    found = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and id(module) in blocks and id(module.weight) not in tables:
            found |= {f"{name}.weight"} if module.weight.requires_grad else set()
    named = {name for name, _ in model.named_parameters()}  # a shared weight has one name only
    if not found & named:
        raise ConfigError(
            f"{type(model).__name__} has no linear layers in an nn.ModuleList, which Muon trains; use AdamW, or say by "
            "orthogonal= which of its matrices are hidden ones"
        )
    return frozenset(found & named)


def scale_of(rows: int, columns: int) -> float:
    """What an orthogonalised update of a matrix is multiplied by."""
    return RMS * math.sqrt(max(rows, columns))


def orthogonalise(matrices: Sequence[Tensor], streams: Sequence[torch.cuda.Stream] = ()) -> list[Tensor]:
    """Matrices of any shapes with their singular values brought near 1, times `scale_of`: bf16, in the same order.

    Those of one shape, or of its transpose, pass through as one batch. Nothing waits for the device.

    Args:
        matrices: on one device.
        streams: where the batches after the first may run, beside it: a batch is a chain of fifteen products, small
            ones at the widths of this package.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for index, matrix in enumerate(matrices):
        rows, columns = matrix.shape
        groups.setdefault((min(rows, columns), max(rows, columns)), []).append(index)
    found: dict[int, Tensor] = {}
    for number, ((rows, columns), members) in enumerate(groups.items()):
        wide = [matrices[i] if len(matrices[i]) == rows else matrices[i].mT for i in members]
        with _beside(streams[(number - 1) % len(streams)] if number and streams else None):
            result_LRC = _iterate(torch.stack(wide).bfloat16(), scale_of(rows, columns))
        for i, result_RC in zip(members, result_LRC.unbind(), strict=True):
            found[i] = result_RC if len(matrices[i]) == rows else result_RC.mT
    for stream in streams[: len(groups) - 1]:
        torch.cuda.current_stream(stream.device).wait_stream(stream)
    return [found[i] for i in range(len(matrices))]


@contextlib.contextmanager
def _beside(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Work on another stream, after all that the current one has been given; None for the current one itself."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield


def _iterate(x_LRC: Tensor, scale: float) -> Tensor:
    """Newton–Schulz on L matrices of R ≤ C, bf16; the last iteration multiplies by `scale`."""
    a, b, c = COEFFICIENTS
    norms_L = torch.linalg.vector_norm(x_LRC, dim=(1, 2), dtype=torch.float32).clamp(min=EPS)
    x_LRC = x_LRC / norms_L.to(x_LRC.dtype)[:, None, None]
    for iteration in range(ITERATIONS):
        last = scale if iteration == ITERATIONS - 1 else 1.0
        gram_LRR = x_LRC @ x_LRC.mT
        polynomial_LRR = torch.baddbmm(gram_LRR, gram_LRR, gram_LRR, beta=b, alpha=c)
        x_LRC = torch.baddbmm(x_LRC, polynomial_LRR, x_LRC, beta=a * last, alpha=last)
    return x_LRC
