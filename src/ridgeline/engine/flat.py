"""Every weight of a model in one buffer, and every gradient in another.

The module's own `nn.Parameter`s become views of one fp32 buffer, the masters: `state_dict`, checkpoints and any
code that reads a weight see them as before. For the duration of a step the module is handed *leaves* instead:
views of a second buffer in the precision of computation (or of the masters themselves in fp32). The leaves belong
to the step alone, so no autograd node of an earlier pass on another stream hangs on them, which is what makes
whole-step capture fail in ordinary code. The gradients of the leaves are gathered in one flat fp32 buffer. Every lane
has leaves and a gradient buffer of its own; the first lane's buffer receives the sum.

    masters  fp32[N]   [ weights of Muon | weights with decay | weights without decay ], each weight padded to ALIGN, a
              matrix first to a multiple of 64 rows (see ops/known.py)
    copies   compute precision, same layout
    grad     fp32[N + ALIGN]  same layout, then a slot for the loss and one for the weight of the samples behind it,
             so that one all-reduce moves all three
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack, to_dlpack

from ridgeline.engine.demands import device_of, refuse_hooks
from ridgeline.engine.gradients import Gradients
from ridgeline.engine.slots import Decays, lay_out, matrices_decay
from ridgeline.errors import CheckpointError, ConfigError

# the newest flat buffers of a model; those of an earlier step are no longer what its parameters are views of
_OWNERS: weakref.WeakValueDictionary[nn.Module, FlatParameters] = weakref.WeakValueDictionary()


def _refresh_owner(model: nn.Module, _: object) -> None:
    if model in _OWNERS:
        _OWNERS[model].refresh()


def lies_in_a_step(tensor: Tensor) -> bool:
    """Whether a parameter is one that some step, of whatever model, trains."""
    return any(flat.name_at_rest(tensor) is not None or flat.is_leaf(tensor) for flat in list(_OWNERS.values()))


def version(tensor: Tensor) -> int:
    """How often a tensor was written to in place, but for writes to its `data`; 0 where PyTorch keeps no account."""
    return 0 if tensor.is_inference() else tensor._version


def _apart(model: nn.Module, state: dict[str, Tensor], prefix: str, _: object) -> None:
    """Gives each tensor of a model's state dict a storage that ends where the tensor ends; memory stays the weights'.

    What saves tensors looks at storages: torch.save writes them whole, and safetensors refuses parts of larger ones.
    """
    own: dict[tuple[int, torch.Size], Tensor] = {}
    for name, tensor in state.items() if model in _OWNERS else ():
        if name.startswith(prefix) and not isinstance(tensor, nn.Parameter) and _OWNERS[model].holds(tensor):
            place = (tensor.data_ptr(), tensor.shape)
            if place not in own:
                own[place] = from_dlpack(to_dlpack(tensor))
            tensor.data = own[place]  # and not another tensor: writes to it count as writes to the weight


class FlatParameters:
    """The flat buffers of a model and the views between them.

    Args:
        model: any module whose trainable parameters are fp32 and on one device. Its parameters become views.
        compute: dtype of the copies that the model computes with.
        decays: which of AdamW's parameters weight decay applies to.
        orthogonal: names of the matrices that Muon trains, all of which decay.
        lanes: parts of a batch that run beside each other.
        world: processes that train together, each of which has a number of its own to tell the others in every step.

    Attributes:
        masters: fp32[N].
        copies: compute[N]; the masters themselves where compute is fp32.
        lanes: leaves and gradients of each lane.
        start: elements before the first weight of AdamW.
        boundary: elements before the first weight without decay.
        slots: where each parameter lies.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        compute: torch.dtype,
        decays: Decays = matrices_decay,
        orthogonal: Collection[str] = (),
        lanes: int = 1,
        world: int = 1,
    ) -> None:
        named = list(model.named_parameters())
        self.device = device_of(named, list(model.named_buffers()))
        self.compute = compute
        trainable = [(name, p) for name, p in named if p.requires_grad]
        self._model, self._learns = model, {id(p): p.requires_grad for _, p in named}
        self._at_rest = {id(p): name for name, p in trainable}
        by_name = dict(trainable)
        for name in orthogonal:
            if name not in by_name or by_name[name].dim() != 2:
                raise ConfigError(f"Muon trains matrices of the model, and {name} is no trainable one")
        self.slots, self.start, self.boundary, self.size = lay_out(trainable, decays, orthogonal)
        self.masters = torch.zeros(self.size, dtype=torch.float32, device=self.device)
        same = compute == torch.float32
        self.copies = self.masters if same else torch.zeros(self.size, dtype=compute, device=self.device)
        with torch.no_grad():
            for slot in self.slots:
                view = slot.of(self.masters)
                view.copy_(by_name[slot.name])
                by_name[slot.name].data = view
        self.lanes = [Gradients(self.slots, self.copies, world) for _ in range(lanes)]
        positions = {id(by_name[slot.name]): index for index, slot in enumerate(self.slots)}
        self._fixed: list[tuple[Tensor, Tensor]] = []  # (source, copy) of frozen parameters and buffers
        self._sites = self._find_sites(model, positions)
        self._buffers = [(module, name, b) for module in model.modules() for name, b in module._buffers.items()]
        self._sources = [at_rest for _, _, at_rest, _ in self._sites] if compute != torch.float32 else []
        self._lent = False
        self.refresh()
        _OWNERS[model] = self
        model.register_load_state_dict_post_hook(_refresh_owner)
        model.register_state_dict_post_hook(_apart)

    def _find_sites(
        self, model: nn.Module, positions: dict[int, int]
    ) -> list[tuple[nn.Module, str, Tensor, list[Tensor]]]:
        """(module, attribute, tensor at rest, tensor during a step in each lane) of everything that is swapped."""
        stand_ins: dict[int, list[Tensor]] = {
            key: [lane.leaves[index] for lane in self.lanes] for key, index in positions.items()
        }
        sites = []
        for module in model.modules():
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is None:
                    continue
                if id(tensor) not in stand_ins:
                    if self.compute == torch.float32 or not tensor.is_floating_point():
                        continue
                    copy: Tensor = tensor.detach().to(self.compute)
                    if isinstance(tensor, nn.Parameter):
                        copy = nn.Parameter(copy, requires_grad=False)
                    stand_ins[id(tensor)] = [copy] * len(self.lanes)
                    self._fixed.append((tensor, copy))
                sites.append((module, name, tensor, stand_ins[id(tensor)]))
        return sites

    @torch.no_grad()
    def refresh(self, *, captured: bool = False) -> None:
        """Makes the copies equal to what they are copies of, after something other than a step has changed it.

        Raises:
            ConfigError: as `check_views` does.
        """
        self.check_views(captured=captured)
        if self.copies is not self.masters:
            self.copies.copy_(self.masters)
        for source, copy in self._fixed:
            copy.copy_(source)
        self._versions = [version(tensor) for tensor in self._sources]

    def follow(self) -> None:
        """Refreshes the copies where somebody has changed weights, frozen parameters or buffers in place."""
        if [version(tensor) for tensor in self._sources] != self._versions:
            self.refresh()

    def check_views(self, *, captured: bool = False) -> None:
        """That the model's parameters are those that the buffers were made for, and lie in them.

        Args:
            captured: a graph reads the model's buffers where they lay when it was made.

        Raises:
            ConfigError: one was replaced, moved, added, frozen, thawed or given a hook, or the model computes with a
                step's weights at present.
        """
        if self._lent:
            raise ConfigError(
                "the model computes with a step's weights at present (inside weights(), a loss or another thread); "
                "take steps and load weights when that is over"
            )
        for module, name, at_rest, _ in self._sites:
            trained = self._learns.get(id(at_rest), False)
            lies_there = not trained or at_rest.numel() == 0 or self.holds(at_rest)
            if getattr(module, name) is not at_rest or not lies_there:
                raise ConfigError(
                    f"{type(module).__name__}.{name} was replaced or moved after the step was built; move and convert "
                    "the model first, and load weights with load_state_dict(…, assign=False)"
                )
        for module, name, buffer in self._buffers if captured else ():
            if module._buffers.get(name) is not buffer:
                raise ConfigError(
                    f"buffer {type(module).__name__}.{name} was replaced after the step was built, and captured steps "
                    "read the old one; write to it in place (copy_, fill_)"
                )
        for name, parameter in self._model.named_parameters():
            if self._learns.get(id(parameter)) != parameter.requires_grad:
                raise ConfigError(
                    f"parameter {name} was added, frozen or thawed after the step was built; build it anew"
                )
            refuse_hooks(name, parameter)

    @contextlib.contextmanager
    def swapped(self, lane: int = 0) -> Iterator[None]:
        """For the duration the module computes with the copies, as `model.bfloat16()` would, and a lane's leaves."""
        lent, self._lent = self._lent, True
        for module, name, _, during in self._sites:
            setattr(module, name, during[lane])
        try:
            yield
        finally:
            for module, name, at_rest, _ in self._sites:
                setattr(module, name, at_rest)
            self._lent = lent

    def beside(self) -> list[Tensor]:
        """The model's frozen parameters and buffers, of any dtype, but for those that repeat their own memory."""
        frozen = [p for p in self._model.parameters() if not self._learns[id(p)]]
        whole = (t for t in (*frozen, *self._model.buffers()) if t.numel() and all(t.stride()))
        return [t for t in whole if t.device.type == self.device.type]

    def described(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes of what processes that train together must have alike."""
        return [
            *((slot.name, tuple(slot.shape)) for slot in self.slots),
            *(("", tuple(t.shape)) for t in self.beside()),
        ]

    def name_at_rest(self, tensor: Tensor | None) -> str | None:
        """The name of a parameter that learns, as the module holds it between steps; None for any other tensor."""
        return self._at_rest.get(id(tensor))

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is part of the masters."""
        low = self.masters.data_ptr()
        return tensor.device == self.device and low <= tensor.data_ptr() < low + 4 * self.size

    def is_leaf(self, tensor: Tensor) -> bool:
        """Whether a tensor is what the module computes with during a step."""
        return any(leaf is tensor for lane in self.lanes for leaf in lane.leaves)

    def held(self, lane: int) -> list[tuple[str, Tensor]]:
        """What a forward pass in a lane may not write to, by name: copies, and what other lanes read meanwhile."""
        held = {}
        if self.compute != torch.float32 or len(self.lanes) > 1:
            held = {id(d[lane]): (f"{type(m).__name__}.{name}", d[lane]) for m, name, _, d in self._sites}
        for module in self._model.modules() if len(self.lanes) > 1 else ():
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is not None:
                    held.setdefault(id(tensor), (f"{type(module).__name__}.{name}", tensor))
        return list(held.values())

    @property
    def grad(self) -> Tensor:
        """fp32[N + ALIGN]: the first lane's gradients, which receive the sum."""
        return self.lanes[0].buffer

    @torch.no_grad()
    def merge(self) -> None:
        """Adds the other lanes' gradients, losses and weights to the first lane's, in order."""
        for lane in self.lanes[1:]:
            self.lanes[0].carried.add_(lane.carried)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The parameters' views of a buffer of this layout, by name; of one that begins at `start`, AdamW's alone."""
        if len(flat) == self.size - self.start:
            return {slot.name: slot.of(flat, self.start) for slot in self.slots if slot.offset >= self.start}
        return {slot.name: slot.of(flat) for slot in self.slots}

    def demand(self, flat: Tensor, named: dict[str, Tensor], what: str) -> None:
        """Tensors by name fit into a buffer of this layout.

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

    def load(self, flat: Tensor, named: dict[str, Tensor]) -> None:
        """Copies tensors by name, which `demand` has passed, into a buffer of this layout."""
        for name, view in self.views(flat).items():
            view.copy_(named[name])
