"""Muon: which weights it trains, and PyTorch's own beside it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ridgeline.errors import ConfigError
from ridgeline.models import build
from ridgeline.optim import OptimizerConfig, hidden_matrices, orthogonalise
from ridgeline.optim.muon import scale_of
from ridgeline.presets import preset


def test_the_matrices_of_the_blocks_and_nothing_else():
    model = build(preset("hal-20m").model)
    names = hidden_matrices(model)
    assert len(names) == 6 * 4
    assert {name.split(".", 3)[3] for name in names} == {
        "attention.qkv.weight",
        "attention.out.weight",
        "mlp.up.weight",
        "mlp.down.weight",
    }


def test_a_shared_or_frozen_matrix_is_none():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(4, 4), nn.Linear(4, 4)
            self.h = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)])
            self.h[0].weight = self.table.weight
            self.h[1].weight.requires_grad_(False)

    assert hidden_matrices(Model()) == {"h.2.weight"}
    with pytest.raises(ConfigError, match=r"no linear layers in an nn\.ModuleList"):
        hidden_matrices(nn.Linear(3, 3))


def test_singular_values_come_near_one():
    torch.manual_seed(0)
    matrices = [torch.randn(shape) * size for shape, size in (((24, 40), 1e-4), ((40, 24), 1e3), ((16, 16), 1.0))]
    for matrix, found in zip(matrices, orthogonalise(matrices), strict=True):
        assert found.shape == matrix.shape
        values = torch.linalg.svdvals(found.float()) / scale_of(*matrix.shape)
        assert values.min() > 0.3
        assert values.max() < 1.3
        u, _, v = torch.linalg.svd(matrix, full_matrices=False)
        assert torch.nn.functional.cosine_similarity((u @ v).flatten(), found.float().flatten(), 0) > 0.95


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"algorithm": "muonn"}, "did you mean muon"), ({"momentum": 1.0}, r"momentum must be in \[0, 1\)")],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ConfigError, match=message):
        OptimizerConfig(**settings)
