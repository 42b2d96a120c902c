"""Contenders as data, and that all of them compute the same model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ridgeline.bench.contenders import CONTENDERS, TorchStep, build_step, find_contender
from ridgeline.bench.workloads import random_batch, workload
from ridgeline.errors import ConfigError, UnsupportedError
from ridgeline.models import build

CPU = torch.device("cpu")


def small(name: str, precision: str = "fp32"):
    case = workload(name, batch=2, context=16, precision=precision)
    decoder = replace(case.model.decoder, layers=1, dropout=0.0)
    return replace(case, model=replace(case.model, decoder=decoder))


def test_the_vocabulary_of_the_issue():
    assert {"eager", "compile", "reduce-overhead", "max-autotune", "graph", "compile+graph", "best"} <= set(CONTENDERS)
    assert [name for name, contender in CONTENDERS.items() if not contender.baseline] == [
        "transformers",
        "liger",
        "best",
    ]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("compil", "did you mean compile"),
        ("eager:copy", "variant of a contender"),
        ("best:copies", "has no variants"),
    ],
)
def test_unknown_contenders(asked, message):
    with pytest.raises(ConfigError, match=message):
        find_contender(asked)


def test_variants():
    contender = find_contender("compile+graph:copies:explicit")
    assert (contender.compile, contender.capture, contender.copies, contender.explicit) == ("default", True, True, True)
    assert contender.name == "compile+graph:copies:explicit"


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
    with pytest.raises(UnsupportedError, match="needs a CUDA device"):
        build_step(find_contender("compile+graph"), small("gpt2-c256"), CPU)
    with pytest.raises(UnsupportedError, match="fp32 has no copies"):
        build_step(find_contender("eager:copies"), small("gpt2-c256"), CPU)
    with pytest.raises(UnsupportedError, match="eager:copies"):
        build_step(find_contender("eager"), small("gpt2-c256", "fp16"), CPU)


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
