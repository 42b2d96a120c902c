"""PyTorch's AdamW with decay groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from ridgeline.errors import CheckpointError


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """The trainable parameters in two groups: those with two or more dimensions decay, the others do not.

    A shared parameter is listed once, under its first name. Each group holds "params", "names" and "weight_decay".
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups: list[dict[str, object]] = []
    for decays in (True, False):
        members = [(name, parameter) for name, parameter in named if (parameter.dim() >= 2) == decays]
        if members:
            groups.append(
                {
                    "params": [parameter for _, parameter in members],
                    "names": [name for name, _ in members],
                    "weight_decay": weight_decay if decays else 0.0,
                }
            )
    return groups


def build_adamw(
    model: nn.Module, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> torch.optim.AdamW:
    """AdamW over the model's decay groups; one fused kernel a group on CUDA."""
    fused = next(model.parameters()).is_cuda
    groups = parameter_groups(model, weight_decay)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=fused)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every parameter group the same learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def optimizer_tensors(optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """The optimiser's state by parameter name: `first.NAME` and `second.NAME` moments, and `applied` updates, fp32[1].

    The names are those of the step engine's state, so that a run can change its engine.
    """
    tensors, applied = {}, torch.zeros(1)
    for name, parameter in _named(optimizer):
        state = optimizer.state.get(parameter)
        if state:
            tensors[f"first.{name}"], tensors[f"second.{name}"] = state["exp_avg"], state["exp_avg_sq"]
            applied = state["step"].view(1)
    return {**tensors, "applied": applied}


def load_optimizer_tensors(optimizer: torch.optim.AdamW, tensors: Mapping[str, Tensor]) -> None:
    """Put back what `optimizer_tensors` gave.

    Raises:
        CheckpointError: the state of a parameter is missing or has another shape.
    """
    state: dict[int, dict[str, Tensor]] = {}
    if int(tensors["applied"]):
        for index, (name, parameter) in enumerate(_named(optimizer)):
            moments = {"exp_avg": tensors.get(f"first.{name}"), "exp_avg_sq": tensors.get(f"second.{name}")}
            for moment in moments.values():
                if moment is None or moment.shape != parameter.shape:
                    found = "none" if moment is None else f"shape {list(moment.shape)}"
                    raise CheckpointError(
                        f"the optimiser state of {name} should have shape {list(parameter.shape)}, got {found}; "
                        "start from the weights alone"
                    )
            state[index] = {**moments, "step": tensors["applied"].clone().view(())}  # type: ignore[dict-item]
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _named(optimizer: torch.optim.Optimizer) -> Iterable[tuple[str, nn.Parameter]]:
    for group in optimizer.param_groups:
        yield from zip(group["names"], group["params"], strict=True)
