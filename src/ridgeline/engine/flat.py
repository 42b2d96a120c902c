"""Every weight of a model in one buffer, and every gradient in another.

The module's own `nn.Parameter`s become views of one fp32 buffer, the masters: `state_dict`, checkpoints and any
code that reads a weight see them as before. For the duration of a step the module is handed *leaves* instead:
views of a second buffer in the precision of computation (or of the masters themselves in fp32). The leaves belong
to the step alone, so no autograd node of an earlier pass on another stream hangs on them, which is what makes
whole-step capture fail in ordinary code. The gradients of the leaves are gathered in one flat fp32 buffer.

    masters  fp32[N]   [ weights with decay | pad | weights without decay | pad ]
    copies   compute precision, same layout
    grad     fp32[N + ALIGN]  same layout, then a slot for the loss and one for the weight of the samples behind it,
             so that one all-reduce moves all three
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ridgeline.errors import CheckpointError, ConfigError

ALIGN = 128  # elements; 512 bytes of fp32 and 256 of bf16, enough for every vector load and tensor map

Decays = Callable[[str, nn.Parameter], bool]


def matrices_decay(name: str, parameter: nn.Parameter) -> bool:
    """The usual rule: tensors of two or more dimensions decay, biases and norm scales do not."""
    return parameter.dim() >= 2


@dataclass(frozen=True)
class Slot:
    """A parameter's place in the flat buffers, in elements."""

    name: str
    offset: int
    shape: torch.Size
    decays: bool

    @property
    def size(self) -> int:
        """Elements of the parameter."""
        return self.shape.numel()

    def of(self, flat: Tensor) -> Tensor:
        """The parameter's view of a flat buffer."""
        return flat[self.offset : self.offset + self.size].view(self.shape)


def _round_up(n: int) -> int:
    return -(-n // ALIGN) * ALIGN


def _lay_out(named: Sequence[tuple[str, nn.Parameter]], decays: Decays) -> tuple[list[Slot], int, int]:
    """Slots in buffer order, elements before the first weight without decay, elements in all."""
    slots, offset, boundary = [], 0, 0
    for group in (True, False):
        for name, parameter in named:
            if decays(name, parameter) is group:
                slots.append(Slot(name, offset, parameter.shape, group))
                offset = _round_up(offset + parameter.numel())
        if group:
            boundary = offset
    return slots, boundary, offset


def _check(named: Sequence[tuple[str, nn.Parameter]]) -> torch.device:
    """The one device of the parameters; a clear error for those that cannot be masters."""
    trainable = [(name, p) for name, p in named if p.requires_grad]
    if not trainable:
        raise ConfigError("the model has no parameter that requires a gradient; there is nothing to train")
    device = trainable[0][1].device
    for name, parameter in named:
        if parameter.device != device:
            raise ConfigError(
                f"parameter {name} is on {parameter.device}, {trainable[0][0]} on {device}; move the model to one "
                "device"
            )
    for name, parameter in trainable:
        if parameter.dtype != torch.float32:
            raise ConfigError(
                f"parameter {name} is {parameter.dtype}; hand over an fp32 model (model.float()) and choose the "
                "precision of the step instead"
            )
    return device


class FlatParameters:
    """The flat buffers of a model and the views between them.

    Args:
        model: any module whose trainable parameters are fp32 and on one device. Its parameters become views.
        compute: dtype of the copies that the model computes with.
        decays: which parameters weight decay applies to.

    Attributes:
        masters: fp32[N].
        copies: compute[N]; the masters themselves where compute is fp32.
        grad: fp32[N + ALIGN].
        boundary: elements before the first weight without decay.
        slots: where each parameter lies.
    """

    def __init__(self, model: nn.Module, *, compute: torch.dtype, decays: Decays = matrices_decay) -> None:
        named = list(model.named_parameters())
        self.device = _check(named)
        self.compute = compute
        trainable = [(name, p) for name, p in named if p.requires_grad]
        self.slots, self.boundary, self.size = _lay_out(trainable, decays)
        by_name = dict(trainable)
        self.masters = torch.zeros(self.size, device=self.device)
        self.grad = torch.zeros(self.size + ALIGN, device=self.device)
        same = compute == torch.float32
        self.copies = self.masters if same else torch.zeros(self.size, dtype=compute, device=self.device)
        self._scratch: Tensor | None = None
        leaf_of: dict[int, nn.Parameter] = {}
        self.leaves: list[nn.Parameter] = []
        with torch.no_grad():
            for slot in self.slots:
                parameter = by_name[slot.name]
                view = slot.of(self.masters)
                view.copy_(parameter)
                parameter.data = view
                self.leaves.append(nn.Parameter(slot.of(self.copies)))
                leaf_of[id(parameter)] = self.leaves[-1]
        self._fixed: list[tuple[Tensor, Tensor]] = []  # (source, copy) of frozen parameters and buffers
        self._sites = self._find_sites(model, leaf_of)
        self.refresh()
        model.register_load_state_dict_post_hook(lambda *_: self.refresh())

    def _find_sites(
        self, model: nn.Module, leaf_of: dict[int, nn.Parameter]
    ) -> list[tuple[nn.Module, str, Tensor, Tensor]]:
        """(module, attribute, tensor at rest, tensor during a step) of everything that is swapped."""
        stand_in: dict[int, Tensor] = dict(leaf_of)
        sites = []
        for module in model.modules():
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is None:
                    continue
                if id(tensor) not in stand_in:
                    if self.compute == torch.float32 or not tensor.is_floating_point():
                        continue
                    copy = tensor.detach().to(self.compute)
                    frozen = isinstance(tensor, nn.Parameter)
                    stand_in[id(tensor)] = nn.Parameter(copy, requires_grad=False) if frozen else copy
                    self._fixed.append((tensor, stand_in[id(tensor)]))
                sites.append((module, name, tensor, stand_in[id(tensor)]))
        return sites

    @torch.no_grad()
    def refresh(self) -> None:
        """Makes the copies equal to the masters, after something other than a step has changed these."""
        self.check_views()
        if self.copies is not self.masters:
            self.copies.copy_(self.masters)
        for source, copy in self._fixed:
            copy.copy_(source)

    def check_views(self) -> None:
        """Raises ConfigError if something has replaced a parameter or moved it out of the flat buffer."""
        low, high = self.masters.data_ptr(), self.masters.data_ptr() + 4 * self.size
        for module, name, at_rest, _ in self._sites:
            trained = isinstance(at_rest, nn.Parameter) and at_rest.requires_grad
            if getattr(module, name) is not at_rest or (trained and not low <= at_rest.data_ptr() < high):
                raise ConfigError(
                    f"{type(module).__name__}.{name} was replaced or moved after the step was built; move and convert "
                    "the model first, and load weights with load_state_dict(…, assign=False)"
                )

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """For the duration the module computes with the copies, as `model.bfloat16()` would."""
        for module, name, _, during in self._sites:
            setattr(module, name, during)
        try:
            yield
        finally:
            for module, name, at_rest, _ in self._sites:
                setattr(module, name, at_rest)

    def written_buffers(self) -> list[str]:
        """Buffers whose copies the model has written to since the last refresh; the model's own stay as they were."""
        written = {id(copy) for source, copy in self._fixed if not torch.equal(copy, source.to(self.compute))}
        return [f"{type(module).__name__}.{name}" for module, name, _, during in self._sites if id(during) in written]

    @torch.no_grad()
    def gather(self, gradients: Sequence[Tensor | None], *, accumulate: bool) -> None:
        """Writes the leaves' gradients into the flat buffer, or adds them to it, in fp32.

        Args:
            gradients: in the order of `leaves`, any dtype; None for a leaf that the loss does not depend on.
            accumulate: add to what is there instead of replacing it.
        """
        target = self.grad
        if accumulate:
            if self._scratch is None:
                self._scratch = torch.zeros_like(self.grad)
            target = self._scratch
        plain, others = [], []
        for slot, gradient in zip(self.slots, gradients, strict=True):
            view = slot.of(target)
            if gradient is None:
                view.zero_()
            elif gradient.is_contiguous():
                plain.append((view, gradient))
            else:
                others.append((view, gradient))
        if plain:
            torch._foreach_copy_([view for view, _ in plain], [gradient for _, gradient in plain])
        for view, gradient in others:  # one strided tensor would send the whole list down the slow path
            view.copy_(gradient)
        if accumulate:
            self.grad[: self.size].add_(target[: self.size])

    @property
    def loss(self) -> Tensor:
        """fp32[1]: the slot behind the gradients that carries the loss."""
        return self.grad[self.size : self.size + 1]

    @property
    def weight(self) -> Tensor:
        """fp32[1]: the slot that carries what loss and gradients are to be divided by."""
        return self.grad[self.size + 1 : self.size + 2]

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The parameters' views of a buffer of this layout, by name."""
        return {slot.name: slot.of(flat) for slot in self.slots}

    def load(self, flat: Tensor, named: dict[str, Tensor], what: str) -> None:
        """Copies tensors by name into a buffer of this layout.

        Raises:
            CheckpointError: a name is missing or too many, or a shape differs.
        """
        views = self.views(flat)
        if views.keys() != named.keys():
            odd = sorted(views.keys() ^ named.keys())
            raise CheckpointError(f"{what} does not belong to this model: it differs in {', '.join(odd[:3])}")
        for name, view in views.items():
            if view.shape != named[name].shape:
                raise CheckpointError(
                    f"{what} of {name} has shape {tuple(named[name].shape)}, the model wants {tuple(view.shape)}"
                )
            view.copy_(named[name])
