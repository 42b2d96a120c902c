"""Peers compute the same model where they can express it, and say so where they cannot."""

from __future__ import annotations

import sys
import types
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from ridgeline.bench.contenders import build_step, find_contender
from ridgeline.bench.peers import PEERS, peer_model
from ridgeline.bench.workloads import random_batch, workload
from ridgeline.errors import MissingExtraError, UnsupportedError
from ridgeline.models import build

CPU = torch.device("cpu")


def small(name: str):
    case = workload(name, batch=2, context=16)
    decoder = replace(case.model.decoder, layers=2, width=64, heads=2, mlp_width=96)
    return replace(case, model=replace(case.model, decoder=decoder))


def test_transformers_gpt2_is_the_same_function():
    pytest.importorskip("transformers", reason="the extra `peers` is not installed")
    case = small("gpt2-c256")
    ours, theirs = build(case.model, seed=0), peer_model("transformers", case)
    inner = theirs.model.transformer
    ours.tokens.weight.data.copy_(inner.wte.weight)
    ours.decoder.positions.data.copy_(inner.wpe.weight)
    ours.head.weight.data.copy_(theirs.model.lm_head.weight)
    for mine, block in zip(ours.decoder.blocks, inner.h, strict=True):
        for a, b in ((mine.norm_1, block.ln_1), (mine.norm_2, block.ln_2)):
            a.load_state_dict(b.state_dict())
        pairs = (
            (mine.attention.qkv, block.attn.c_attn),
            (mine.attention.out, block.attn.c_proj),
            (mine.mlp.up, block.mlp.c_fc),
            (mine.mlp.down, block.mlp.c_proj),
        )
        for a, b in pairs:  # its linear layers hold the transposed weight
            a.weight.data.copy_(b.weight.t())
            a.bias.data.copy_(b.bias)
    ours.decoder.norm.load_state_dict(inner.ln_f.state_dict())
    batch = random_batch(case, CPU)
    torch.testing.assert_close(theirs.loss(batch), ours.loss(batch))


def waits(*_):
    raise RuntimeError("operation not permitted when stream is capturing")


def test_ligers_loss_can_be_captured(monkeypatch):
    """Its own function asks the card how many targets count; a captured step cannot wait for the answer."""

    def forward(state_NC, weight_VC, targets_N, ignore_index):
        count = (targets_N != ignore_index).sum().item()
        with torch.enable_grad():
            state, weight = state_NC.detach().requires_grad_(), weight_VC.detach().requires_grad_()
            loss = F.cross_entropy(state @ weight.t(), targets_N, reduction="sum") / count
            gradients = torch.autograd.grad(loss, (state, weight))
        return loss.detach(), None, None, None, *gradients, None

    norm = types.SimpleNamespace(apply=lambda x, w, b, eps: F.layer_norm(x, w.shape, w, b, eps))
    fused = types.SimpleNamespace(fused_linear_cross_entropy_forward=forward)
    for name, module in (
        ("", types.ModuleType("liger_kernel")),
        (".ops", types.SimpleNamespace(LigerLayerNormFunction=norm)),
        (".ops.fused_linear_cross_entropy", fused),
    ):
        monkeypatch.setitem(sys.modules, f"liger_kernel{name}", module)
    case = small("gpt2-c256")
    ours, theirs, batch = build(case.model, seed=0), peer_model("liger", case), random_batch(case, CPU)
    with monkeypatch.context() as capturing:
        capturing.setattr(torch.Tensor, "item", waits, raising=False)
        capturing.setattr(torch, "equal", waits)
        with pytest.raises(RuntimeError, match="capturing"):
            ours.loss(batch).item()
        found = theirs.loss(batch)
        (3 * found).backward()
    torch.testing.assert_close(found, ours.loss(batch))
    (3 * ours.loss(batch)).backward()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gpt2-c256", "fast-c256"])
def test_liger_is_the_same_function(name):
    pytest.importorskip("liger_kernel", reason="the extra `peers` is not installed")
    case = small(name)
    ours, theirs = build(case.model, seed=0).cuda(), peer_model("liger", case).cuda()
    batch = random_batch(case, torch.device("cuda"))
    a, b = ours.loss(batch), theirs.loss(batch)
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    a.backward()
    b.backward()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-2, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("peer", "name"), [("liger", "gpt2-c256"), ("liger", "fast-c256"), ("transformers", "gpt2-c256")]
)
def test_peers_train_in_a_captured_step(peer, name):
    pytest.importorskip(peer if peer == "transformers" else "liger_kernel", reason="the extra `peers` is not installed")
    case, device = workload(name, batch=4), torch.device("cuda")
    step, batch = build_step(find_contender(peer), case, device), random_batch(case, device)
    for _ in range(20):
        step(batch)
    first, *_, last = (metric.loss for metric in step.metrics())
    assert last < first - 0.1


@pytest.mark.parametrize(
    ("peer", "name"), [("transformers", "fast-c256"), ("transformers", "hal-20m"), ("liger", "hal-5m")]
)
def test_what_a_peer_cannot_express(peer, name):
    with pytest.raises(UnsupportedError, match=f"{peer}.* cannot express {name}"):
        peer_model(peer, workload(name))


@pytest.mark.parametrize("peer", PEERS)
def test_a_missing_package_is_named_with_its_extra(monkeypatch, peer):
    for module in ("transformers", "liger_kernel"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=r"is not installed; .*\.\[peers\]"):
        peer_model(peer, small("gpt2-c256"))


def test_a_package_that_lacks_another_says_which(monkeypatch, tmp_path):
    (tmp_path / "transformers.py").write_text("import a_package_that_it_needs\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    with pytest.raises(MissingExtraError, match="transformers cannot be imported: No module named 'a_package"):
        peer_model("transformers", small("gpt2-c256"))
