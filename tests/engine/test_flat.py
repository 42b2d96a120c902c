"""Flat buffers: views, shared and frozen parameters, copies, gradients, checkpoints."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from engine.helpers import Stranger, gather, language_batch, stranger, stranger_loss
from ridgeline.engine import FlatParameters
from ridgeline.engine.slots import ALIGN
from ridgeline.errors import CheckpointError, ConfigError
from ridgeline.ops.known import padded_rows


def test_parameters_keep_names_values_and_identity():
    model = stranger()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    shared = model.wte.weight
    flat = FlatParameters(model, compute=torch.bfloat16)
    assert model.wte.weight is shared
    assert model.lm_head.weight is shared
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) and after[name].dtype == torch.float32 for name in before)
    for slot in flat.slots:
        assert slot.offset % ALIGN == 0
        assert torch.equal(slot.of(flat.masters), before[slot.name])
    flat.masters.add_(1)
    assert torch.equal(model.attn.bias, before["attn.bias"] + 1)


def test_shared_once_frozen_never_decay_first():
    flat = FlatParameters(stranger(), compute=torch.float32)
    names = [slot.name for slot in flat.slots]
    assert names.count("wte.weight") == 1
    assert "lm_head.weight" not in names
    assert "wpe.weight" not in names
    decays = [slot.decays for slot in flat.slots]
    assert decays == sorted(decays, reverse=True)
    assert all((slot.offset < flat.boundary) == slot.decays for slot in flat.slots)
    chosen = FlatParameters(stranger(), compute=torch.float32, decays=lambda name, parameter: name == "ln.bias")
    assert [slot.name for slot in chosen.slots if slot.decays] == ["ln.bias"]


def test_the_module_computes_as_model_bfloat16_would():
    model = stranger()
    expected = copy.deepcopy(model).bfloat16()
    flat = FlatParameters(model, compute=torch.bfloat16)
    batch = language_batch()
    with flat.swapped():
        assert model.wte.weight is model.lm_head.weight
        assert {t.dtype for t in (*model.parameters(), *model.buffers())} == {torch.bfloat16}
        assert not model.wpe.weight.requires_grad
        loss = stranger_loss(model, batch)
    assert loss.dtype == torch.bfloat16
    assert torch.equal(loss, stranger_loss(expected, batch))
    assert model.bias.dtype == torch.float32
    assert model.wte.weight.dtype == torch.float32


def test_swapped_puts_the_module_back_after_an_error():
    model = stranger()
    flat = FlatParameters(model, compute=torch.bfloat16)
    at_rest = model.wte.weight
    with pytest.raises(RuntimeError, match="inside"), flat.swapped():
        raise RuntimeError("inside")
    assert model.wte.weight is at_rest


def test_gather_writes_and_adds_in_fp32():
    model = nn.Linear(3, 2)
    flat = FlatParameters(model, compute=torch.bfloat16)
    weight, bias = torch.randn(3, 2).bfloat16().t(), torch.randn(2).bfloat16()  # one transposed, as products give it
    gather(flat, [weight, bias])
    gather(flat, [weight, bias], add=True)
    views = flat.views(flat.grad)
    assert torch.equal(views["weight"], 2 * weight.float())
    assert torch.equal(views["bias"], 2 * bias.float())
    gather(flat, [weight, None], add=True)
    assert torch.equal(views["bias"], 2 * bias.float())
    gather(flat, [weight, None])
    assert torch.equal(views["bias"], torch.zeros(2))
    inside = torch.zeros(flat.size, dtype=torch.bool)
    for slot in flat.slots:
        inside[slot.offset : slot.offset + slot.size] = True
    assert not flat.grad[: flat.size][~inside].any()


def test_loading_a_state_dict_refreshes_the_copies():
    model, other = stranger(), Stranger()
    flat = FlatParameters(model, compute=torch.bfloat16)
    model.load_state_dict(other.state_dict())
    assert torch.equal(flat.copies, flat.masters.bfloat16())
    with flat.swapped():
        assert torch.equal(model.wpe.weight, other.wpe.weight.bfloat16())


def test_replaced_or_moved_parameters_are_noticed():
    model = stranger()
    kept = FlatParameters(model, compute=torch.float32)
    with pytest.raises(ConfigError, match="assign=False"):
        model.load_state_dict(Stranger().state_dict(), assign=True)
    assert kept.size
    moved = stranger()
    flat = FlatParameters(moved, compute=torch.float32)
    moved.double().float()
    with pytest.raises(ConfigError, match="replaced or moved"):
        flat.check_views()


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_what_learns_is_settled_when_the_buffers_are_made(compute):
    def thaw(model):
        model.wpe.weight.requires_grad_(True)

    def freeze(model):
        model.attn.bias.requires_grad_(False)

    def add(model):
        model.more = nn.Linear(2, 2)

    for change, name in ((thaw, "wpe.weight"), (freeze, "attn.bias"), (add, "more.weight")):
        model = stranger()
        flat = FlatParameters(model, compute=compute)
        flat.check_views()
        change(model)
        with pytest.raises(ConfigError, match=f"parameter {name} was added, frozen or thawed"):
            flat.check_views()


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_gradients_are_refused(register):
    model = stranger()
    flat = FlatParameters(model, compute=torch.float32)
    getattr(model.attn.weight, register)(lambda gradient: None)
    for check in (flat.check_views, lambda: FlatParameters(model, compute=torch.float32)):
        with pytest.raises(ConfigError, match=r"attn\.weight has a hook on its gradient"):
            check()


def test_a_parameter_without_elements():
    model = nn.Module()
    model.linear, model.none = nn.Linear(2, 2), nn.Parameter(torch.empty(0, 4))
    flat = FlatParameters(model, compute=torch.float32)
    flat.check_views()
    assert flat.views(flat.masters)["none"].shape == (0, 4)


def test_models_that_cannot_be():
    with pytest.raises(ConfigError, match="nothing to train"):
        FlatParameters(nn.LayerNorm(4, elementwise_affine=False), compute=torch.float32)
    with pytest.raises(ConfigError, match=r"weight is torch.bfloat16.*model.float"):
        FlatParameters(nn.Linear(2, 2).bfloat16(), compute=torch.bfloat16)
    with pytest.raises(ConfigError, match="weight has no values; call the model once"):
        FlatParameters(nn.LazyLinear(2), compute=torch.float32)
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ConfigError, match="move the model to one device"):
        FlatParameters(mixed, compute=torch.float32)


def test_what_does_not_fit_is_named():
    flat = FlatParameters(nn.Linear(3, 2), compute=torch.float32)
    with pytest.raises(CheckpointError, match="differs in bias"):
        flat.demand(flat.grad, {"weight": torch.zeros(2, 3)}, "the moment")
    with pytest.raises(CheckpointError, match="of weight has shape"):
        flat.demand(flat.grad, {"weight": torch.zeros(3, 2), "bias": torch.zeros(2)}, "the moment")
    with pytest.raises(CheckpointError, match="of bias has shape"):
        flat.demand(flat.grad, {"weight": torch.ones(2, 3), "bias": torch.ones(3)}, "the moment")


def test_a_second_step_takes_the_model_over():
    model = stranger()
    first = FlatParameters(model, compute=torch.bfloat16)
    second = FlatParameters(model, compute=torch.bfloat16)
    model.load_state_dict(Stranger().state_dict())  # would be refused if the first still watched over it
    assert torch.equal(second.copies, second.masters.bfloat16())
    assert not torch.equal(first.masters, second.masters)


def test_a_model_can_be_copied_and_saved(tmp_path):
    model = stranger()
    flat = FlatParameters(model, compute=torch.bfloat16)
    other = copy.deepcopy(model)
    other.load_state_dict(Stranger().state_dict())
    torch.save(model, tmp_path / "model.pt")
    assert torch.equal(flat.copies, flat.masters.bfloat16())
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


def test_matrices_are_followed_by_zeros_up_to_whole_blocks_of_rows():
    model = nn.Sequential(nn.Linear(8, 65), nn.Linear(65, 64))
    flat = FlatParameters(model, compute=torch.bfloat16)
    places = {slot.name: slot for slot in flat.slots}
    assert places["0.weight"].padded == (128, 8)
    assert places["1.weight"].padded == places["1.weight"].shape
    with flat.swapped():
        wide = padded_rows(model[0].weight)
        assert wide is not None
        assert torch.equal(wide[:65], model[0].weight)
        assert wide.shape == (128, 8)
        assert not wide[65:].any()
        assert padded_rows(model[1].weight) is None
    assert padded_rows(model[0].weight) is None
