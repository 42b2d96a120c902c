"""Contenders as data, and that all of them compute the same model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ridgeline.bench.contenders import CONTENDERS, build_step, find_contender, is_baseline
from ridgeline.bench.peers import PEERS
from ridgeline.bench.workloads import random_batch, workload
from ridgeline.engine import TrainStep
from ridgeline.errors import ConfigError, UnsupportedError
from ridgeline.models import build
from ridgeline.train.config import ENGINES
from ridgeline.train.step import TorchStep

CPU = torch.device("cpu")


def small(name: str, precision: str = "fp32"):
    case = workload(name, batch=2, context=16, precision=precision)
    decoder = replace(case.model.decoder, layers=1, dropout=0.0)
    return replace(case, model=replace(case.model, decoder=decoder))


def test_one_vocabulary():
    # what `train --engine` knows is what can be measured, under the same names, and peers besides
    assert set(CONTENDERS) == {*ENGINES, *PEERS}
    assert {"eager", "compile", "reduce-overhead", "max-autotune", "graph", "compile+graph", "best"} <= set(ENGINES)
    for name, contender in CONTENDERS.items():
        assert contender.settings is ENGINES[PEERS.get(name, name)]
        assert contender.baseline == is_baseline(name) == (name not in PEERS and ENGINES[name].impl == "torch")
    assert not is_baseline("best")
    assert not is_baseline("m2+reuse")
    assert not is_baseline("m2+nonsense")
    assert not is_baseline("something of a later version")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("compil", "did you mean compile"),
        ("eager:copy", "variant of a contender"),
        ("best:copies", "has no variant 'copies'"),
        ("eager:copies:autocast", "not both"),
    ],
)
def test_unknown_contenders(asked, message):
    with pytest.raises(ConfigError, match=message):
        find_contender(asked)


def test_a_rung_with_single_changes():
    contender = find_contender("m2+capture")
    assert contender.settings.capture
    assert not find_contender("m2").settings.capture
    with pytest.raises(UnsupportedError, match="unknown change"):
        find_contender("m2+nonsense")


def test_variants():
    contender = find_contender("compile+graph:copies:explicit")
    assert contender.variants == {"copies", "explicit"}
    assert contender.settings is ENGINES["compile+graph"]
    assert contender.name == "compile+graph:copies:explicit"
    assert contender.baseline
    assert find_contender("best:host").variants == {"host"}


@pytest.mark.parametrize(
    ("asked", "kind", "precision"),
    [
        ("eager", TorchStep, "bf16"),  # autocast
        ("eager:copies", TrainStep, "bf16"),
        ("compile:copies", TrainStep, "bf16"),
    ],
)
def test_half_precision_is_stored_as_asked(asked, kind, precision):
    step = build_step(find_contender(asked), small("gpt2-c256", "bf16"), CPU)
    assert type(step) is kind
    assert step.precision.name == precision


@pytest.mark.parametrize("name", ["hal-20m", "fast-c256"])
def test_explicit_attention_is_the_same_function(name):
    case = small(name)
    batch = random_batch(case, CPU)
    plain, explicit = (build_step(find_contender(asked), case, CPU) for asked in ("eager", "eager:explicit"))
    assert isinstance(plain, TorchStep)
    assert isinstance(explicit, TorchStep)
    a, b = plain.model.loss(batch), explicit.model.loss(batch)
    torch.testing.assert_close(a, b)
    a.backward()
    b.backward()
    for p, q in zip(plain.model.parameters(), explicit.model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("asked", ["eager", "eager:copies"])
def test_a_step_trains(asked):
    case = small("gpt2-c256", "bf16")
    batch = random_batch(case, CPU)
    step = build_step(find_contender(asked), case, CPU)
    before = build(case.model, seed=0).loss(batch).item()
    for _ in range(5):
        step(batch)
    assert step.model.loss(batch).item() < before


def test_what_cannot_run_here_says_so():
    with pytest.raises(UnsupportedError, match="needs a GPU; use eager or compile"):
        build_step(find_contender("compile+graph"), small("gpt2-c256"), CPU)
    with pytest.raises(UnsupportedError, match="fp32 has no copies"):
        build_step(find_contender("eager:copies"), small("gpt2-c256"), CPU)


def test_workloads_are_the_presets_at_their_usual_sizes():
    hal = workload("hal-20m")
    assert (hal.batch, hal.context, hal.tokens, hal.precision) == (512, 256, 131072, "bf16")
    assert hal.model.decoder.dropout == 0.2
    assert sum(p.numel() for p in build(workload("gpt2-c256").model).parameters()) == 4_837_888
    long = workload("gpt2-c256", batch=4, context=2048)
    assert (long.tokens, long.model.decoder.context) == (8192, 2048)
    assert workload("gpt2-124m").reduced().tokens <= 256
    with pytest.raises(ConfigError, match=r"did you mean .*hal-20m"):
        workload("hal20m")
    with pytest.raises(ConfigError, match="batch ≥ 1"):
        workload("hal-20m", batch=0)


@pytest.mark.parametrize("name", ["hal-20m", "gpt2-c256"])
def test_data_is_random_and_repeatable(name):
    case = small(name)
    first, again = random_batch(case, CPU), random_batch(case, CPU)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert all(tensor.unique().numel() > 1 for tensor in first.values())
    assert all(len(tensor) == case.batch for tensor in first.values())
