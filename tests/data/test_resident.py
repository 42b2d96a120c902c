"""Batches drawn where the data lies are those of the host, to the bit."""

from __future__ import annotations

import pytest
import torch

from data.helpers import make_games, make_text
from ridgeline.data.loader import Batches
from ridgeline.data.resident import ResidentBatches, fits
from ridgeline.data.window import WindowSpec

pytest.importorskip("triton")

CPU = torch.device("cpu")


def check(data, window: WindowSpec, *, batch: int, steps: int, device=CPU, **rest) -> None:
    host = Batches(data, window, batch=batch, **rest)
    resident = ResidentBatches(Batches(data, window, batch=batch, **rest), device)
    for step in range(steps):
        resident.draw(torch.tensor([99, step], device=device))
        expected = host.next()
        assert expected.keys() == resident.tensors.keys()
        for name, tensor in expected.items():
            assert tensor.dtype == resident.tensors[name].dtype
            assert torch.equal(tensor, resident.tensors[name].cpu()), (step, name)


@pytest.mark.parametrize(("length", "context", "seed"), [(1000, 8, 3), (60, 16, 2**63 - 1), (5000, 7, 0)])
def test_text_over_several_epochs(tmp_path, length, context, seed):
    check(make_text(tmp_path / "x", length), WindowSpec(context=context), batch=6, steps=8, seed=seed)


@pytest.mark.parametrize(("stride", "delay"), [(1, 0), (2, 0), (3, 2)])
def test_games_with_stride_and_delay(tmp_path, stride, delay):
    data = make_games(tmp_path / "x", [30, 5, 44, 21, 9])
    check(data, WindowSpec(context=8, stride=stride, delay=delay), batch=8, steps=8, seed=5)


def test_processes_draw_their_shares(tmp_path):
    data = make_games(tmp_path / "x", [30, 5, 44, 21])
    for rank in range(2):
        check(data, WindowSpec(context=8), batch=6, steps=3, rank=rank, world=2)


def test_what_is_too_large_for_the_card_stays_on_the_host(tmp_path, monkeypatch):
    batches = Batches(make_text(tmp_path / "x", 1000), WindowSpec(context=8), batch=2)
    assert ResidentBatches(batches, CPU).nbytes == 1000  # tokens and targets are one array
    for free, enough in ((4000, True), (3999, False)):
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda device, free=free: (free, 10**6))
        assert fits(batches, CPU) is enough
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (10**6, 10**6))
    monkeypatch.setattr("ridgeline.data.resident.LIMIT", 999)
    assert not fits(batches, CPU)
