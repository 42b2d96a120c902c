"""Several processes on parts of a batch train as one process on the whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from engine.helpers import LANGUAGE, language_batch
from ridgeline.engine import FlatParameters, Replicas, TrainStep
from ridgeline.engine.distributed import connected, together
from ridgeline.engine.reduction import Reduction, lay_buckets
from ridgeline.errors import ConfigError, RidgelineError, WorkerError
from ridgeline.models import build
from ridgeline.ops.sink import sink_of
from ridgeline.optim import OptimizerConfig

STEPS, BATCH = 6, 8
SETTINGS = OptimizerConfig(lr=1e-2, clip=0.5)


def batch_of(step: int) -> dict[str, torch.Tensor]:
    batch = language_batch(step, batch=BATCH)
    batch["targets"][0] = -100  # so that the processes have unequal numbers of targets
    return batch


def train(rank: int, world: int, accumulate: int, bucket: int) -> TrainStep:
    model = build(LANGUAGE, impl="reference", seed=3 + rank)  # only the first process' weights may count
    model.decoder.positions.requires_grad_(False)  # frozen ones too
    step = TrainStep(
        model, optimizer=SETTINGS, precision="fp32", seed=7, accumulate=accumulate, replicas=Replicas(bucket=bucket)
    )
    size = BATCH // world
    for i in range(STEPS):
        step({name: tensor[rank * size : (rank + 1) * size] for name, tensor in batch_of(i).items()})
    return step


def worker(rank: int, world: int, accumulate: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    step = train(rank, world, accumulate, bucket=1000)
    torch.save((step.flat.masters, step.metrics()), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize(("world", "accumulate"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_processes_equal_one(tmp_path: Path, world: int, accumulate: int):
    mp.spawn(worker, args=(world, accumulate, str(tmp_path)), nprocs=world)
    alone = train(0, 1, 1, bucket=1000)
    results = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(world)]
    for masters, metrics in results:
        assert torch.equal(masters, results[0][0])  # the replicas never drift apart
        torch.testing.assert_close(masters, alone.flat.masters, rtol=1e-3, atol=1e-4)
        for one, many in zip(alone.metrics(), metrics, strict=True):
            assert many.loss == pytest.approx(one.loss, rel=1e-5)
            assert many.norm == pytest.approx(one.norm, rel=1e-4)


class Sunk(torch.autograd.Function):
    """x Wᵀ whose weight gradient goes to the weight's sink, which hears when it is written."""

    @staticmethod
    def forward(ctx, x_NK, weight_MK):
        ctx.save_for_backward(x_NK)
        ctx.weight = weight_MK
        return x_NK @ weight_MK.t()

    @staticmethod
    def backward(ctx, dy_NM):
        (x_NK,) = ctx.saved_tensors
        sink = sink_of(ctx.weight)
        target, add = sink.take()
        gradient = dy_NM.t() @ x_NK
        target.add_(gradient) if add else target.copy_(gradient)
        sink.finished()
        return dy_NM @ ctx.weight, None


class Layers(nn.Module):
    """A shared matrix, two more, a bias of autograd's own, and a weight that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared, self.middle, self.last = (nn.Parameter(torch.randn(16, 16) / 4) for _ in range(3))
        self.bias, self.spare = nn.Parameter(torch.zeros(16)), nn.Parameter(torch.zeros(3))

    def loss(self, x):
        for weight in (self.shared, self.middle, self.shared, self.last):
            x = Sunk.apply(x, weight).tanh()
        return (x + self.bias).square().mean()


def train_layers(rank: int, world: int, replicas: Replicas, cut: dict[str, int]) -> TrainStep:
    step = TrainStep(Layers(), lambda model, x: model.loss(x), SETTINGS, precision="fp32", replicas=replicas, **cut)
    size = BATCH // world
    for i in range(STEPS):
        batch = torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(i))
        step(batch[rank * size : (rank + 1) * size])
    return step


def overlapping(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    found = {}
    for name, overlap, cut in (("after", False, {}), ("under", True, {}), ("parts", True, {"accumulate": 2})):
        step = train_layers(rank, world, Replicas(bucket=300, overlap=overlap), cut)
        found[name] = (step.flat.masters, [m.loss for m in step.metrics()], step._last.reduction.early)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_gradients_leave_under_the_backward_pass(tmp_path: Path):
    mp.spawn(overlapping, args=(2, str(tmp_path)), nprocs=2)
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)]
    alone = train_layers(0, 1, Replicas(), {})
    after, under, parts = (found[0][name] for name in ("after", "under", "parts"))
    assert torch.equal(after[0], under[0])
    assert after[1] == under[1]
    matrices = 3 * 64 * 16  # padded to 64 rows; the shared one leaves after its second write
    assert (after[2], under[2], parts[2]) == (0, matrices, matrices)
    for name in ("after", "under", "parts"):
        assert torch.equal(found[0][name][0], found[1][name][0])
        torch.testing.assert_close(found[0][name][0], alone.flat.masters, rtol=1e-4, atol=1e-5)


def test_buckets_cover_the_buffer_from_its_end():
    flat = FlatParameters(Layers(), compute=torch.float32)
    buckets = lay_buckets(flat, 300)
    assert [bucket.end for bucket in buckets[1:]] == [bucket.start for bucket in buckets[:-1]]
    assert (buckets[0].end, buckets[-1].start) == (flat.size + 2, 0)
    assert buckets[0].start == flat.boundary
    assert sorted(slot for bucket in buckets for slot in bucket.slots) == list(range(len(flat.slots)))


def test_a_gradient_that_comes_after_it_was_sent_is_an_error():
    replicas = Replicas(overlap=True)
    replicas.start = lambda flat: None
    flat = FlatParameters(Layers(), compute=torch.float32)
    reduction = Reduction(replicas, flat)

    def run(times: int) -> None:
        reduction.begin()
        flat.lanes[0].begin(add=False)
        for sink in flat.lanes[0].sinks * times:
            sink.put(torch.ones_like(sink.target))
        reduction.finish()

    run(1)
    run(1)
    assert reduction.early == flat.size + 2
    with pytest.raises(RidgelineError, match="written again after it had been sent"):
        run(2)


@pytest.mark.parametrize(
    ("environment", "device", "message"),
    [
        ({"RANK": "0"}, "cpu", "LOCAL_RANK, MASTER_ADDR, MASTER_PORT not"),
        ({}, "cuda:1", "use cuda or cpu"),
        (dict.fromkeys(("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"), "7"), "cuda", "process 7 has no card"),
    ],
)
def test_processes_that_cannot_be_joined(monkeypatch, environment, device, message):
    for name, value in {"WORLD_SIZE": "8", **environment}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RidgelineError, match=message), together(device):
        pass


@pytest.mark.parametrize(
    ("cards", "cure"), [(0, "there is none here; use --device cpu"), (3, "use --nproc-per-node 3")]
)
def test_a_process_without_a_card_is_told_what_would_do(monkeypatch, cards, cure):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(RidgelineError, match=f"process 7 has no card; (use )?{cure}"), together("cuda"):
        pass


def test_without_torchrun_a_process_is_alone(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with together("cpu") as replicas:
        assert (replicas.rank, replicas.world) == (0, 1)
        assert replicas.exchange(True, 3.5) == (True, 3.5)
        assert replicas.told("here") == "here"
        assert replicas.first(lambda: 4) == 4


def test_a_bucket_holds_something():
    with pytest.raises(ConfigError, match="bucket"):
        Replicas(bucket=0)


@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        ("Connection reset\nby a trace", "Connection reset"),
        ("word " * 80, ("word " * 31).strip() + " …"),
        ("", "RuntimeError"),
    ],
)
def test_a_lost_process_is_told_in_whole_words(cause: str, reason: str) -> None:
    with pytest.raises(WorkerError) as told, connected():
        raise RuntimeError(cause)
    assert str(told.value) == f"another process of this run is gone ({reason}); see its own last words"
