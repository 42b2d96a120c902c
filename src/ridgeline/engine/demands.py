"""What a step asks of the model, the loss and the numbers it is made of: one sentence for each that cannot be."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ridgeline.errors import ConfigError
from ridgeline.optim import OptimizerConfig


def demand(model: object, loss: object, optimizer: object, weight: object, decays: object) -> None:
    """What a step is made of is of the right kind.

    Raises:
        ConfigError: with what was expected and what came.
    """
    demand_training_mode()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be an nn.Module, got {model!r}")
    own = getattr(model, "loss", None)
    if loss is None and not callable(own):
        raise ConfigError(f"{type(model).__name__} has no method loss(batch, dropout); pass loss=")
    if loss is not None and not callable(loss):
        raise ConfigError(f"loss must be a function of the model and a batch, got {loss!r}")
    instance(optimizer, OptimizerConfig, "optimizer")
    if weight is not None and not callable(weight):
        raise ConfigError(f"weight must be a function of a part of a batch, got {weight!r}")
    if not callable(decays):
        raise ConfigError(f"decays must be a function of a parameter's name and the parameter, got {decays!r}")
    if loss is None and not _takes_two(own):
        raise ConfigError(
            f"{type(model).__name__}.loss is called as loss(batch, dropout), which it does not take; pass loss= for a "
            "function of model and batch"
        )
    if loss is not None and not _takes_two(loss):
        raise ConfigError(f"loss is called as loss(model, batch); {getattr(loss, '__name__', loss)} cannot be")


def _takes_two(function: object) -> bool:
    """Whether a function can be called with two arguments, as far as Python knows."""
    try:
        inspect.signature(function).bind(None, None)  # type: ignore[arg-type]
    except TypeError:
        return False
    except ValueError:  # one that is written in C
        return True
    return True


def demand_training_mode() -> None:
    """Nothing learns under torch.inference_mode.

    Raises:
        ConfigError: it is on.
    """
    if torch.is_inference_mode_enabled():
        raise ConfigError("nothing can be trained under torch.inference_mode(); leave it before the step")


def scalar(value: object, what: str) -> Tensor:
    """What a user's function gave, if it is one real number in a tensor.

    Raises:
        ConfigError: it is something else; `what` says what it ought to be.
    """
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return value.view(())
    got = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    raise ConfigError(f"{what}; got {got}")


def device_of(named: Sequence[tuple[str, nn.Parameter]], buffers: Sequence[tuple[str, Tensor]] = ()) -> torch.device:
    """The one device of a model's parameters, if those that train can be masters.

    Raises:
        ConfigError: one cannot; says why.
    """
    trainable = [(name, p) for name, p in named if p.requires_grad]
    if not trainable:
        raise ConfigError("the model has no parameter that requires a gradient; there is nothing to train")
    device = trainable[0][1].device
    if device.type == "meta":
        raise ConfigError(f"parameter {trainable[0][0]} is on meta and has no values; build the model on a real device")
    for name, parameter in named:
        if parameter.device != device:
            raise ConfigError(
                f"parameter {name} is on {parameter.device}, {trainable[0][0]} on {device}; move the model to one "
                "device"
            )
    for name, parameter in trainable:
        if isinstance(parameter, nn.UninitializedParameter):
            raise ConfigError(f"parameter {name} has no values; call the model once, so that lazy modules get theirs")
        if parameter.dtype != torch.float32:
            raise ConfigError(
                f"parameter {name} is {parameter.dtype}; hand over an fp32 model (model.float()) and choose the "
                "precision of the step instead"
            )
        if parameter.is_inference():
            raise ConfigError(f"parameter {name} was made under torch.inference_mode(); build the model outside it")
        if device.type == "cpu" and parameter.is_shared():
            raise ConfigError(
                f"parameter {name} lies in memory that processes share, and a step moves it; call share_memory() when "
                "the step is built"
            )
        refuse_hooks(name, parameter)
    _refuse_shared_memory([*named, *buffers], {id(parameter) for _, parameter in trainable})
    return device


def refuse_hooks(name: str, parameter: nn.Parameter) -> None:
    """No code waits for a parameter's gradient.

    Raises:
        ConfigError: some does.
    """
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        raise ConfigError(
            f"parameter {name} has a hook on its gradient, which a step does not call; put what it does into the loss"
        )


def _extent(tensor: Tensor) -> tuple[int, int] | None:
    """First byte and the one behind the last of a strided tensor without gaps; None for any other."""
    if isinstance(tensor, nn.UninitializedParameter) or tensor.layout != torch.strided or not tensor.numel():
        return None
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if span > tensor.numel():
        return None
    start = tensor.data_ptr()  # 0 where there is no memory to share: a fake tensor's
    return (start, start + span * tensor.element_size()) if start else None


def _refuse_shared_memory(named: Sequence[tuple[str, Tensor]], trainable: set[int]) -> None:
    """Tensors of which one trains share no memory: a move into the flat buffer would part them in silence."""
    spans = [(*extent, name, id(t) in trainable) for name, t in named if (extent := _extent(t)) is not None]
    furthest: tuple[int, int, str, bool] | None = None
    for span in sorted(spans):
        if furthest is not None and span[0] < furthest[1] and (span[3] or furthest[3]):
            raise ConfigError(
                f"{furthest[2]} and {span[2]} share memory, which a step cannot keep; share one parameter instead "
                "(module.weight = other.weight)"
            )
        if furthest is None or span[1] > furthest[1]:
            furthest = span


def instance(value: object, kind: type, name: str) -> None:
    """An argument that may be left out is of its class.

    Raises:
        ConfigError: it is not.
    """
    if value is not None and not isinstance(value, kind):
        raise ConfigError(f"{name} must be of class {kind.__name__}, got {type(value).__name__}")


def numbers(accumulate: object, lanes: object, bad_steps: object, steps: object, seed: object) -> None:
    """Counts are counts.

    Raises:
        ConfigError: one is none.
    """
    counts = (accumulate, lanes, bad_steps)
    if not all(isinstance(count, int) and count >= 1 for count in counts):
        raise ConfigError(f"accumulate, lanes and bad_steps must be integers of at least 1, got {counts}")
    if steps is not None and not (isinstance(steps, int) and steps >= 1):
        raise ConfigError(f"a schedule needs a whole number of steps, at least one, got {steps!r}")
    if not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
        raise ConfigError(f"a seed is an integer of 64 bits, got {seed!r}")
