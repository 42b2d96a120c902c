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
from ridgeline.bench.timing import summarise, time_steps
from ridgeline.bench.workloads import Workload, random_batch, workload
from ridgeline.engine import TrainStep
from ridgeline.engine.capture import CudaCapture
from ridgeline.errors import OutOfMemoryError, RidgelineError, UnsupportedError
from ridgeline.models import build
from ridgeline.models.memory import memory
from ridgeline.models.plan import FUSED, PLANS
from ridgeline.ops.dropout import DropoutState
from ridgeline.optim import OptimizerConfig
from ridgeline.presets import PRESETS

pytestmark = pytest.mark.gpu

SETTINGS = OptimizerConfig(lr=3e-4, warmup=100, clip=0.5)
# what the captured step of a preset may fill, by a part of the kernel's name: how often a step, and what that is
FILLS = {
    "Memset": (48, "counters by which cuBLAS's products share their tiles, in its own workspace: seven a layer"),
    "FillFunctor": (13, "sums that several blocks add to, one a layer and one a table"),
}


@pytest.fixture(autouse=True)
def _deterministic():
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # fills of the test's own would be counted
    yield
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(False)


def small(name: str) -> Workload:
    """A preset with two layers, at a batch that 1,000 uncaptured steps pass through in seconds.

    Dropout is on but for fast-c256, whose ends then are kernels that have none.
    """
    case = workload(name, batch=4, context=16 if name == "boxing" else 32)
    decoder = replace(case.model.decoder, layers=2, dropout=0.0 if name == "fast-c256" else 0.2)
    return replace(case, model=replace(case.model, decoder=decoder))


def batches(case: Workload, device: str) -> list[dict[str, Tensor]]:
    return [random_batch(case, torch.device(device), seed) for seed in range(5)]


def step_for(case: Workload, steps: int, **rest: Any) -> TrainStep:
    torch.manual_seed(7)
    model = build(case.model, impl=rest.pop("impl", "fused"), seed=1).cuda()
    return TrainStep(model, optimizer=rest.pop("optimizer", SETTINGS), steps=steps, seed=11, **rest)


def same(a: TrainStep, b: TrainStep) -> bool:
    """Whether everything that a step changes is the same to the bit, a loss that is not a number included."""
    pairs = zip(a.update.state(), b.update.state(), strict=True)
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in pairs)


@pytest.mark.parametrize(
    ("name", "impl"), [*((name, "fused") for name in PRESETS), ("gpt2-c256", "torch"), ("hal-5m", "torch")]
)
def test_a_thousand_captured_steps_equal_the_calls(name, impl):
    case, steps = small(name), 1000 if impl == "fused" else 300  # PyTorch's calls take the host ten times as long
    on_card, on_host = batches(case, "cuda"), batches(case, "cpu")
    optimizer = replace(SETTINGS, algorithm=PRESETS[name]().optimizer.algorithm)
    calls = step_for(case, steps, capture=False, impl=impl, optimizer=optimizer)
    captured = step_for(case, steps, impl=impl, optimizer=optimizer)
    torch.manual_seed(7)
    for i in range(steps):
        calls(on_card[i % 5])
    torch.manual_seed(7)
    for i in range(steps):
        captured(on_host[i % 5])
    assert same(calls, captured)
    assert captured.taken == steps
    assert captured.metrics()[-1].lr < 1e-6


@pytest.mark.parametrize("name", ["hal-5m", "fast-c256"])
@pytest.mark.parametrize("cut", [{"lanes": 2}, {"accumulate": 2}, {"lanes": 2, "accumulate": 2}])
def test_cut_steps_are_repeatable_and_equal_the_calls(cut, name):
    case = small(name)
    data = batches(case, "cuda")
    found = [step_for(case, 200, capture=capture, **cut) for capture in (False, True, True)]
    for step in found:
        for i in range(200):
            step(data[i % 5])
    assert same(found[0], found[1])
    assert same(found[1], found[2])


@pytest.mark.parametrize(
    ("precision", "impl"), [("bf16", "fused"), ("fp16", "fused"), ("fp32", "fused"), ("bf16-autocast", "reference")]
)
def test_resuming_in_the_middle(precision, impl):
    case = small("gpt2-c256")
    data = batches(case, "cuda")
    straight = step_for(case, 60, precision=precision, impl=impl)
    for i in range(60):
        straight(data[i % 5])
    first = step_for(case, 60, precision=precision, impl=impl)
    for i in range(25):
        first(data[i % 5])
    second = step_for(case, 60, precision=precision, impl=impl)
    second.model.load_state_dict(first.model.state_dict())
    second.load_state_dict(first.state_dict())
    for i in range(25, 60):
        second(data[i % 5])
    assert torch.equal(straight.flat.masters, second.flat.masters)
    assert torch.equal(straight.update.second, second.update.second)


@pytest.mark.parametrize("name", ["gpt2-c256", "hal-20m"])
def test_nothing_is_allocated_and_one_graph_is_launched(name):
    case = workload(name, batch=32 if name == "gpt2-c256" else 64)
    step = step_for(case, 200)
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
    on_card = [event.name for event in events if "CUDA" in str(event.device_type)]
    filling = [name for name in on_card if "memset" in name.lower() or "fill" in name.lower() or "zero" in name.lower()]
    found = {part: sum(part in name for name in filling) for part in FILLS}
    assert sum(found.values()) == len(filling), {name: filling.count(name) for name in filling}
    assert all(count <= 10 * FILLS[part][0] for part, count in found.items()), found


@pytest.mark.parametrize("name", ["gpt2-c256", "fast-c256"])
def test_the_norm_by_squares_that_kernels_leave_is_that_of_all_gradients(name):
    case = workload(name, batch=32)
    step = step_for(case, 20)
    lane, seen = step.flat.lanes[0], []
    taken = lane.known_squares
    lane.known_squares = lambda: seen.append(taken()) or seen[-1]
    for data in batches(case, "cuda"):
        step(data)
        norm = float(step.flat.grad[: step.flat.size].double().norm())
        assert step.metrics()[-1].norm == pytest.approx(norm, rel=1e-5)
    assert all(known is not None and sum(end - first for first, end in known.rest) < 200_000 for known in seen)
    with torch.no_grad():
        step.model.decoder.blocks[0].mlp.up.weight[0, 0] = float("nan")
    step.flat.refresh()
    step(data)
    assert step.update.skipped.tolist() == [1, 1]


@pytest.mark.parametrize("name", ["gpt2-c256", "fast-c256", "hal-5m"])
def test_gradients_written_beside_each_other_are_autograds(name):
    case = workload(name, batch=8)
    case = replace(case, model=replace(case.model, decoder=replace(case.model.decoder, dropout=0.0)))
    batch = random_batch(case, torch.device("cuda"))
    plain = build(case.model, impl="fused", seed=1).cuda().bfloat16().train()
    halves = {key: x.bfloat16() if x.is_floating_point() else x for key, x in batch.items()}
    plain.loss(halves).backward()
    step = step_for(case, 10)
    for _ in range(2):  # the second time where the first one's gradients lie, at other weights
        step.model.load_state_dict(build(case.model, impl="fused", seed=1).state_dict())
        step(batch)
    found = step.flat.views(step.flat.grad)
    for key, parameter in plain.named_parameters():
        expected = parameter.grad.float()
        assert (found[key] - expected).norm() <= 0.01 * expected.norm() + 1e-6, key


@pytest.mark.parametrize("plan", ["lean", "leanest"])
@pytest.mark.parametrize(
    ("name", "batch"),  # whole rows, few rows, products with their joins, folded norms
    [("gpt2-c256", 32), ("gpt2-c256", 64), ("fast-c256", 264), ("gpt2-c256", 264), ("hal-20m", 136), ("gpt2-124m", 8)],
)
def test_a_plan_that_keeps_less_gives_the_same_gradients_in_less_memory(name, batch, plan):
    case = workload(name, batch=batch)
    data = {
        key: x.bfloat16() if x.is_floating_point() else x for key, x in random_batch(case, torch.device("cuda")).items()
    }
    state, kept, gradients = DropoutState(torch.tensor([3, 4], device="cuda"), 5), [], []
    for impl in ("fused", f"fused+{plan}"):
        model = build(case.model, impl=impl, seed=1).cuda().bfloat16().train()
        before = torch.cuda.memory_allocated()
        loss = model.loss(data, state)
        kept.append(torch.cuda.memory_allocated() - before)
        loss.backward()
        gradients.append({key: parameter.grad.float() for key, parameter in model.named_parameters()})
        del model, loss
    all_of_it, some = (
        memory(case.model, batch=batch, context=case.context, plan=each).activations for each in (FUSED, PLANS[plan])
    )
    assert kept[0] - kept[1] > 0.6 * (all_of_it - some)  # a folded norm is never kept
    for key, expected in gradients[0].items():
        assert (gradients[1][key] - expected).norm() <= 0.02 * expected.norm() + 1e-6, key


def test_a_batch_too_large_says_what_needs_how_much_and_a_smaller_one_trains():
    case = workload("gpt2-c256", batch=2048)
    step = step_for(case, 10)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 4 * 2**30) / total)
    try:
        with pytest.raises(OutOfMemoryError, match=r"out of memory on a batch of \(2048, 256\) .*lower the batch"):
            step(random_batch(case, torch.device("cpu")))
        step(random_batch(replace(case, batch=4), torch.device("cpu")))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert step.taken == 1
    assert not step.metrics()[0].skipped


def test_the_first_bad_tensor_of_fused_blocks_is_named():
    case = small("gpt2-c256")
    step = step_for(case, 10, bad_steps=2)
    step(batches(case, "cuda")[0])
    with torch.no_grad():
        step.model.decoder.blocks[1].mlp.up.weight[0, 0] = float("nan")
        step.flat.refresh()
    for _ in range(2):
        step(batches(case, "cuda")[0])
    with pytest.raises(RidgelineError, match=r"first bad tensor: output of decoder\.blocks\.1\.mlp\.up"):
        step.check()
    assert step.model.decoder.impl == "fused"


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
        step = step_for(case, 50, precision="fp32", capture=False, impl="reference")
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


class Expert:
    """The whole step in one graph as a PyTorch expert writes it: autocast, foreach clip, fused AdamW, torch.compile."""

    def __init__(self, model: NanoGPT) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True, capturable=True)
        self.loss = torch.compile(model.loss, dynamic=False)

    def _step(self) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = self.loss(self.batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def capture(self, batch: dict[str, Tensor]) -> Any:
        self.batch = batch
        capture = CudaCapture(torch.device("cuda", 0))
        capture.warm_up(self._step)
        return capture(self._step)


@pytest.mark.slow
def test_a_strangers_module_is_as_fast_as_pytorch_compiled_and_captured():
    torch.use_deterministic_algorithms(False)
    batch = random_batch(workload("gpt2-c256"), torch.device("cuda"))
    ours = TrainStep(NanoGPT().cuda(), lambda model, batch: model.loss(batch), compile="default")
    expert = Expert(NanoGPT().cuda())  # whose compiled kernels the graph launches
    calls = {"ours": lambda: ours(batch), "pytorch": expert.capture(batch)}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(6):
        for name, call in calls.items():
            times[name] += time_steps(call, 60, torch.device("cuda"))[20:]
    ratio = summarise(times["pytorch"]).median_ms / summarise(times["ours"]).median_ms
    assert ratio >= 0.97, ratio
