"""Cases of compute-sanitizer that take whole steps of small models, and what lies on the card for them."""

import tempfile
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from sanitize_kit import DEVICE, case  # before any kernel is imported

from ridgeline.bench.workloads import random_batch, workload
from ridgeline.data import shards, text
from ridgeline.data.loader import Batches
from ridgeline.data.resident import ResidentBatches
from ridgeline.data.window import WindowSpec
from ridgeline.engine import TrainStep
from ridgeline.models import build
from ridgeline.models.fused import stack
from ridgeline.models.fused.choices import choose
from ridgeline.optim import OptimizerConfig


def train(
    name,
    impl_name,
    batch=1,
    context=256,
    steps=2,
    taken_for=None,
    precision="bf16",
    algorithm="adamw",
    layers=1,
    **decoder,
):
    """Steps of a preset with few blocks, each a call: no graph hides a launch.

    Args:
        taken_for: a batch whose choice of kernels is made, whatever the batch is.
    """
    case = workload(name, batch=batch, context=context)
    case = replace(case, model=replace(case.model, decoder=replace(case.model.decoder, layers=layers, **decoder)))
    model = build(case.model, impl=impl_name, seed=1).to(DEVICE)
    step = TrainStep(model, optimizer=OptimizerConfig(algorithm=algorithm), precision=precision, capture=False)
    chosen = lambda config, device, dtype, B, T: choose(config, device, dtype, taken_for or B, T)
    with mock.patch.object(stack, "choose", chosen):
        for seed in range(steps):
            step(random_batch(case, torch.device(DEVICE), seed))
    assert all(m.loss == m.loss for m in step.metrics())


@case
def step_gpt2():
    train("gpt2-c256", "fused", context=40, batch=2)
    train("gpt2-c256", "fused", steps=1)


@case
def step_gpt2_many():
    train("gpt2-c256", "fused", taken_for=512, steps=1)


@case
def step_gpt2_float():
    train("gpt2-c256", "fused", precision="fp32", steps=1)


@case
def step_fast():
    train("fast-c256", "fused", steps=1)


@case
def step_fast_long():
    train("fast-c256", "fused", context=300, steps=1)


@case
def step_fast_many():
    train("fast-c256", "fused", taken_for=512, steps=1)


@case
def step_fast_float():
    train("fast-c256", "fused", precision="fp32", steps=1)


@case
def step_124m():
    train("gpt2-124m", "fused", context=300, taken_for=512, steps=1)


@case
def step_hal():
    """Few rows, and as many rows are taken: the norm before the MLP is in the products beside it."""
    train("hal-20m", "fused", batch=2, context=40)
    train("hal-20m", "fused", taken_for=512, steps=1)


@case
def step_hal_small():
    train("hal-5m", "fused", context=128, taken_for=512, steps=1)


@case
def step_muon():
    train("gpt2-c256", "fused", context=40, algorithm="muon", dropout=0.1, steps=1)


@case
def rungs_materialised():
    train("hal-5m", "m0", batch=2, context=40, steps=1)
    train("hal-5m", "m1", batch=2, context=40, steps=1)


@case
def rungs_fused():
    train("hal-5m", "m2", batch=2, context=40, steps=1)
    train("hal-5m", "r16", batch=2, context=40, steps=1)


@case
def windows():
    with tempfile.TemporaryDirectory() as folder:
        letters = np.random.default_rng(0).integers(97, 123, 1000).astype(np.uint8)
        data = text.open_text(shards.read(text.write(Path(folder) / "x", letters, "bytes", name="x", source="random")))
        batches = ResidentBatches(Batches(data, WindowSpec(context=37), batch=6), torch.device(DEVICE))
        for step in range(2):
            batches.draw(torch.tensor([99, step]).to(DEVICE))
        assert all((x.cpu() < 123).all() for x in batches.tensors.values())
