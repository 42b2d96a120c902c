"""Losses of other precisions beside those of fp32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ridgeline.bench.agreement import agreement, batch_of, chain
from ridgeline.bench.workloads import workload
from ridgeline.errors import ConfigError
from ridgeline.optim import OptimizerConfig

CPU = torch.device("cpu")


def small():
    case = workload("gpt2-c256", batch=4, context=16)
    decoder = replace(case.model.decoder, layers=1, width=32, heads=2, dropout=0.1)
    return replace(case, model=replace(case.model, decoder=decoder, vocabulary=16))


def test_the_chain_can_be_learned_and_is_repeatable():
    tokens = chain(16, 5000, seed=1)
    assert torch.equal(tokens, chain(16, 5000, seed=1))
    pairs = torch.zeros(16, 16)
    pairs.index_put_((tokens[:-1], tokens[1:]), torch.ones(len(tokens) - 1), accumulate=True)
    assert ((pairs > 0).sum(1) <= 4).all()
    case = small()
    assert torch.equal(batch_of(tokens, case, 1, 2)["tokens"], batch_of(tokens, case, 1, 2)["tokens"])
    assert not torch.equal(batch_of(tokens, case, 1, 2)["tokens"], batch_of(tokens, case, 1, 3)["tokens"])


def test_precisions_train_alike_and_the_reference_agrees_with_itself():
    results = agreement(
        small(),
        chain(16, 2000, seed=1),
        variants=("fp32", "copies", "autocast"),
        seeds=2,
        steps=60,
        last=10,
        device=CPU,
        optimizer=OptimizerConfig(lr=1e-2, warmup=10),
    )
    found = {result.variant: result for result in results}
    assert found["fp32"].distance == 0
    for name in ("copies", "autocast"):
        assert 0 < found[name].distance < 0.05
        assert found[name].worst >= found[name].distance
    for run in found["copies"].losses:
        assert len(run) == 60
        assert run[-1] < run[0] - 0.5


def test_what_cannot_be_compared():
    with pytest.raises(ConfigError, match="no language model"):
        agreement(workload("hal-20m"), chain(9, 300, 0), device=CPU)
    for wrong in ({"last": 0}, {"last": 600}, {"seeds": 0}, {"variants": ("copies",)}):
        with pytest.raises(ConfigError, match="needs seeds"):
            agreement(small(), chain(9, 300, 0), device=CPU, **wrong)
