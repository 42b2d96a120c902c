"""The step on a card: captured equals uncaptured, nothing allocated, one launch, failures that leave it usable."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from engine.helpers import Stranger, language_batch, stranger_loss
from ridgeline.bench.contenders import TorchStep, find_contender
from ridgeline.bench.timing import summarise, time_steps
from ridgeline.bench.workloads import Workload, random_batch, workload
from ridgeline.engine import TrainStep
from ridgeline.errors import RidgelineError, UnsupportedError
from ridgeline.models import build
from ridgeline.optim import OptimizerConfig

pytestmark = pytest.mark.gpu

SETTINGS = OptimizerConfig(lr=3e-4, warmup=100, clip=0.5)
PRESETS = ("hal-20m", "hal-5m", "gpt2-c256", "fast-c256")
# what a step may fill: semaphores of reductions over several blocks, and tensors that the model's own code makes
FILLS_A_STEP = 40


@pytest.fixture(autouse=True)
def _deterministic():
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def small(name: str) -> Workload:
    """A preset with two layers, dropout on, at a batch that 1,000 uncaptured steps pass through in seconds."""
    case = workload(name, batch=4, context=32)
    decoder = replace(case.model.decoder, layers=2, dropout=0.2)
    return replace(case, model=replace(case.model, decoder=decoder))


def batches(case: Workload, device: str) -> list[dict[str, Tensor]]:
    return [random_batch(case, torch.device(device), seed) for seed in range(5)]


def step_for(case: Workload, steps: int, **rest: Any) -> TrainStep:
    torch.manual_seed(7)
    model = build(case.model, impl=rest.pop("impl", "reference"), seed=1).cuda()
    return TrainStep(model, optimizer=SETTINGS, steps=steps, seed=11, **rest)


def same(a: TrainStep, b: TrainStep) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.update.state(), b.update.state(), strict=True))


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize("name", PRESETS)
def test_a_thousand_captured_steps_equal_the_calls(name, impl):
    case, steps = small(name), 1000
    on_card, on_host = batches(case, "cuda"), batches(case, "cpu")
    calls = step_for(case, steps, capture=False, impl=impl)
    captured = step_for(case, steps, impl=impl)
    torch.manual_seed(7)
    for i in range(steps):
        calls(on_card[i % 5])
    torch.manual_seed(7)
    for i in range(steps):
        captured(on_host[i % 5])
    assert same(calls, captured)
    assert captured.taken == steps
    assert captured.metrics()[-1].lr < 1e-6


@pytest.mark.parametrize("cut", [{"lanes": 2}, {"accumulate": 2}, {"lanes": 2, "accumulate": 2}])
def test_cut_steps_are_repeatable_and_equal_the_calls(cut):
    case = small("hal-5m")
    data = batches(case, "cuda")
    found = [step_for(case, 200, capture=capture, **cut) for capture in (False, True, True)]
    for step in found:
        for i in range(200):
            step(data[i % 5])
    assert same(found[0], found[1])
    assert same(found[1], found[2])


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32", "bf16-autocast"])
def test_resuming_in_the_middle(precision):
    case = small("gpt2-c256")
    data = batches(case, "cuda")
    straight = step_for(case, 60, precision=precision)
    for i in range(60):
        straight(data[i % 5])
    first = step_for(case, 60, precision=precision)
    for i in range(25):
        first(data[i % 5])
    second = step_for(case, 60, precision=precision)
    second.model.load_state_dict(first.model.state_dict())
    second.load_state_dict(first.state_dict())
    for i in range(25, 60):
        second(data[i % 5])
    assert torch.equal(straight.flat.masters, second.flat.masters)
    assert torch.equal(straight.update.second, second.update.second)


def test_nothing_is_allocated_and_one_graph_is_launched():
    case = small("gpt2-c256")
    step = step_for(case, 200, impl="torch")
    data = batches(case, "cpu")
    for i in range(10):
        step(data[i % 5])
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for i in range(100):
        step(data[i % 5])
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert step.memory()["activations and workspace"] > case.tokens * case.model.decoder.width * 2
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for i in range(10):
            step(data[i % 5])
        torch.cuda.synchronize()
    events = list(seen.events())
    assert sum(event.name == "cudaGraphLaunch" for event in events) == 10
    fills = [event.name for event in events if "memset" in event.name.lower() and "CUDA" in str(event.device_type)]
    assert len(fills) <= 10 * FILLS_A_STEP


def test_a_loss_that_waits_is_refused_and_nothing_is_lost():
    torch.manual_seed(0)
    model = Stranger().cuda()
    batch = {name: tensor.cuda() for name, tensor in language_batch().items()}
    stranger_loss(model, batch).backward()  # an earlier pass on the default stream must not matter
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.cuda.get_rng_state()

    def waits(model, batch):
        loss = stranger_loss(model, batch)
        return loss * 2 if loss.item() > 1e9 else loss

    step = TrainStep(model, waits)
    with pytest.raises(UnsupportedError, match="waits for the device"):
        step(batch)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(random, torch.cuda.get_rng_state())
    step._capture.warm_up = lambda program: None  # let a capture fail for real
    with pytest.raises(RidgelineError, match="cannot be captured"):
        step(batch)
    assert torch.rand(4, device="cuda").isfinite().all()
    after = TrainStep(model, stranger_loss)
    for _ in range(3):
        after(batch)
    assert after.metrics()[-1].loss < after.metrics()[0].loss


def test_the_update_kernels_do_what_pytorchs_operations_do():
    case = small("gpt2-c256")
    data = batches(case, "cuda")
    steps = []
    for impl in ("torch", "triton"):
        step = step_for(case, 50, precision="fp32", capture=False)
        step.update = type(step.update)(step.flat, SETTINGS, steps=50, seed=11, impl=impl)
        step.passes.seed_step, step.passes.loss_scale = step.update.seed_step, step.update.loss_scale
        for i in range(20):
            step(data[i % 5])
        steps.append(step)
    a, b = ([m.loss for m in step.metrics()] for step in steps)
    assert a == pytest.approx(b, rel=1e-4)


class NanoBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (y.view(B, T, self.heads, -1).transpose(1, 2) for y in self.c_attn(self.ln_1(x)).split(C, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """Written as people write it, by nobody who knows this package."""

    def __init__(self, vocabulary: int = 65, width: int = 256, heads: int = 8, context: int = 256, layers: int = 6):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.h = nn.ModuleList(NanoBlock(width, heads) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.wte.weight = self.lm_head.weight

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.wte(batch["tokens"]) + self.wpe(torch.arange(batch["tokens"].shape[1], device=self.wte.weight.device))
        for block in self.h:
            x = block(x)
        return F.cross_entropy(self.lm_head(self.ln_f(x)).flatten(0, 1), batch["targets"].flatten())


@pytest.mark.slow
def test_a_strangers_module_is_as_fast_as_pytorch_compiled_and_captured():
    torch.use_deterministic_algorithms(False)
    batch = random_batch(workload("gpt2-c256"), torch.device("cuda"))
    ours = TrainStep(NanoGPT().cuda(), lambda model, batch: model.loss(batch), compile="default")
    pytorch = TorchStep(NanoGPT().cuda(), find_contender("compile+graph"), "bf16-autocast")
    times: dict[str, list[float]] = {"ours": [], "pytorch": []}
    for _ in range(6):
        for name, step in (("ours", ours), ("pytorch", pytorch)):
            times[name] += time_steps(lambda step=step: step(batch), 60, torch.device("cuda"))[20:]
    assert summarise(times["pytorch"]).median_ms / summarise(times["ours"]).median_ms >= 0.97
