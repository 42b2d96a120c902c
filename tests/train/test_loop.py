import io
import json
import math
import signal
from pathlib import Path

import pytest
import torch
from rich.console import Console

from ridgeline import checkpoint
from ridgeline.data.api import load_dataset
from ridgeline.engine import Replicas
from ridgeline.errors import CheckpointError, ConfigError, DataError, UnsupportedError
from ridgeline.train import DivergedError, loop, resume, state, train
from ridgeline.train.metrics import read_metrics
from ridgeline.train.resolve import resolve
from ridgeline.train.settings import from_dict, override, read_toml
from ridgeline.train.step import TorchStep
from ridgeline.train.validate import Evaluation

TIMES = ("seconds",)


def curve(folder):
    return [{key: value for key, value in record.items() if key not in TIMES} for record in read_metrics(folder)]


def test_a_run_learns_and_leaves_config_metrics_and_two_checkpoints(config, change, tmp_path):
    result = train(change(config, steps=60, eval_interval=20))
    steps = [record for record in read_metrics("run") if "loss" in record]
    validations = [record for record in read_metrics("run") if "val_loss" in record]
    assert [record["step"] for record in steps] == list(range(1, 61))
    assert [record["step"] for record in validations] == [20, 40, 60]
    assert validations[-1]["val_loss"] < steps[0]["loss"] - 0.3
    assert from_dict(read_toml("run/config.toml")) == result.config
    assert result.config.model.vocabulary == 9
    last, best = checkpoint.load("run/last"), checkpoint.load("run/best")
    assert last.meta["step"] == 60
    assert best.meta["val_loss"] == min(record["val_loss"] for record in validations)
    summary = result.summary()
    assert list(summary) == [
        *("preset", "steps", "tokens", "seconds", "tokens_per_s", "train_loss", "val_loss", "checkpoint")
    ]
    assert summary["tokens"] == 60 * 4 * 16
    assert summary["train_loss"] == steps[-1]["loss"]
    assert summary["val_loss"] == validations[-1]["val_loss"]
    assert checkpoint.find(summary["checkpoint"]) == result.checkpoint
    json.dumps(summary)


def test_best_is_the_lowest_validation_also_across_a_stop(config, change, monkeypatch):
    losses = iter([3.0, 2.0, 2.5, 2.0, 1.5, 9.0])  # after steps 3, 6, 9, 12; then of the run that goes on, 15 and 18
    monkeypatch.setattr(Evaluation, "__call__", lambda *_: next(losses))
    config = change(config, eval_interval=3, checkpoint_interval=100)
    train(config)
    assert checkpoint.load("run/best").meta["step"] == 6  # equal is not better
    assert checkpoint.load("run/last").meta["best_loss"] == 2.0
    resume("run", change(config, steps=18))
    best, last = checkpoint.load("run/best").meta, checkpoint.load("run/last").meta
    assert (best["step"], best["val_loss"], best["best_loss"]) == (15, 1.5, 1.5)
    assert (last["step"], last["val_loss"], last["best_loss"]) == (18, 9.0, 1.5)


def test_checkpoints_are_no_more_often_than_asked_and_best_is_of_its_own_step(config, change, monkeypatch):
    losses, written = iter([3.0, 2.0, 2.5, 2.0, 3.0, 2.0]), []  # after steps 3, 6, 9, 12; of the short run, 3 and 6
    monkeypatch.setattr(Evaluation, "__call__", lambda *_: next(losses))
    write = state.Content.write

    def noted(self, folder):
        written.append((folder.name, self.meta["step"]))
        write(self, folder)

    monkeypatch.setattr(state.Content, "write", noted)
    config = change(config, optimizer=change(config.optimizer, warmup=0, floor=config.optimizer.lr), eval_interval=3)
    train(change(config, checkpoint_interval=8))
    assert written == [("last", 0), ("best", 6), ("last", 8), ("last", 12)]
    train(change(config, steps=6, out="short"))
    best, short = checkpoint.load("run/best"), checkpoint.load("short/last")
    assert best.tensors.keys() == short.tensors.keys()
    for name, tensor in short.tensors.items():
        assert torch.equal(best.tensors[name], tensor), name


def test_equal_seeds_give_equal_runs_and_others_do_not(config, change):
    train(config)
    train(change(config, out="again"))
    train(change(config, out="other", seed=1))
    assert curve("run") == curve("again")
    assert curve("run") != curve("other")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_resume_from_any_checkpoint_gives_the_same_bits(config, change, precision):
    config = change(config, precision=precision)
    train(config)
    expected = checkpoint.load("run/last")
    _stopped_at(config, "half", 8)
    resume("half")
    assert curve("half") == curve("run")
    actual = checkpoint.load("half/last")
    assert actual.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert torch.equal(actual.tensors[name], tensor), name
    skipped = {"config", "seconds"}
    assert {k: v for k, v in actual.meta.items() if k not in skipped} == {
        k: v for k, v in expected.meta.items() if k not in skipped
    }


def _stopped_at(config, folder, step):
    """Run `config` in `folder` and let it die in the step after `step`."""
    call = TorchStep.__call__

    def dying(self, batch):
        if self._taken == step + 1:
            raise RuntimeError("died")
        call(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchStep, "__call__", dying)
        with pytest.raises(RuntimeError, match="died"):
            train(override(config, {"out": folder}))
    assert checkpoint.load(checkpoint.find(folder, prefer="last")).meta["step"] == step


def test_resume_drops_what_the_stopped_run_had_done_since_its_checkpoint(config, tmp_path):
    _stopped_at(config, "half", 8)
    with (tmp_path / "half" / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 9, "loss": 99.0}\n{"step": 10, "lo')
    resume("half")
    train(config)
    assert curve("half") == curve("run")


def test_accumulation_changes_memory_and_not_the_run(config, change):
    config = change(config, model=change(config.model, decoder=change(config.model.decoder, dropout=0.0)))
    train(config)
    train(change(config, accumulation=2, out="parts"))
    for one, other in zip(curve("run"), curve("parts"), strict=True):
        for key, value in one.items():
            assert math.isclose(value, other[key], rel_tol=2e-4), key


def test_the_clock_can_decide_the_length(config, change):
    result = train(change(config, steps=None, minutes=0.02, eval_interval=10**6))
    assert 1.2 <= result.progress.seconds < 10
    rates = [record["lr"] for record in read_metrics("run") if "lr" in record]
    assert rates[-1] < 0.2 * max(rates)


def test_tokens_decide_the_length(config, change):
    assert train(change(config, steps=None, tokens=4 * 16 * 3)).progress.step == 3


def test_first_interrupt_finishes_the_step_and_saves(config, change):
    call = TorchStep.__call__

    def interrupted(self, batch):
        call(self, batch)
        if self._taken == 7:
            signal.raise_signal(signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchStep, "__call__", interrupted)
        result = train(config)
    assert result.interrupted
    assert checkpoint.load("run/last").meta["step"] == 7
    assert not resume("run").interrupted
    train(change(config, out="whole"))
    assert curve("run") == curve("whole")


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_checkpoint(config, change, monkeypatch):
    call = TorchStep.__call__

    def poisoned(self, batch):
        if self._taken == 6:
            with torch.no_grad():
                self.model.head.weight[0, 0] = math.inf
        call(self, batch)

    monkeypatch.setattr(TorchStep, "__call__", poisoned)
    with pytest.raises(DivergedError, match=r"stopped at step 7: loss .*; first bad tensor: output of head; the last"):
        train(config)
    losses = {record["step"]: record["loss"] for record in read_metrics("run") if "loss" in record}
    assert losses[6] is not None
    assert losses[7] is None
    saved = checkpoint.load("run/last")
    assert saved.meta["step"] == 4
    assert all(tensor.isfinite().all() for tensor in saved.group("model").values())
    best = checkpoint.load("run/best")
    assert best.meta["step"] == 5
    assert all(tensor.isfinite().all() for tensor in best.group("model").values())


def test_init_from_takes_weights_alone(config, change):
    train(change(config, steps=30))
    result = train(change(config, out="tuned", steps=1, optimizer=change(config.optimizer, lr=2e-3)), init_from="run")
    records = read_metrics("tuned")
    assert result.progress.step == 1
    assert records[0]["lr"] == pytest.approx(2e-3 / 3)
    assert records[0]["loss"] < read_metrics("run")[0]["loss"] - 0.2


def test_init_from_another_model_is_refused_before_a_folder_is_made(config, change, tmp_path):
    train(config)
    wider = change(config, out="wide", model=change(config.model, decoder=change(config.model.decoder, width=32)))
    with pytest.raises(CheckpointError, match=r"another model: decoder.width expected 32, got 16"):
        train(wider, init_from="run")
    assert not (tmp_path / "wide").exists()


def test_processes_draw_masks_of_their_own_also_after_a_stop(config):
    """Of PyTorch's own generator: with equal ones, all would drop the same elements of their samples."""

    def first_numbers(rank, saved=None):
        replicas, data = Replicas(), load_dataset(config.data)
        replicas.rank, replicas.world = rank, 4
        run = loop._Run(resolve(config, data), data, replicas, Console(file=io.StringIO()))
        if saved is not None:
            run.restore(saved)
        return tuple(torch.rand(4).tolist())

    for step in (4, 8):
        _stopped_at(config, f"stop{step}", step)
    stops = [checkpoint.load(f"stop{step}/last") for step in (4, 8)]
    drawn = [first_numbers(rank, saved) for saved in (None, *stops) for rank in (0, 1, 2)]
    assert len(set(drawn)) == len(drawn)
    assert first_numbers(1) == drawn[1]


def test_resume_refuses_another_config_and_takes_another_length(config, change):
    train(config)
    done = change(config, batch=8)
    with pytest.raises(CheckpointError, match="batch expected 8, got 4"):
        resume("run", done)
    with pytest.raises(ConfigError, match="complete at step 12; give it a larger --steps"):
        resume("run")
    assert resume("run", change(config, steps=15)).progress.step == 15


def test_another_number_of_threads_is_told(config):
    _stopped_at(config, "half", 8)
    said = io.StringIO()
    torch.set_num_threads(2)
    try:
        resume("half", console=Console(file=said, width=200))
    finally:
        torch.set_num_threads(1)
    assert "saved with 1 threads, going on with 2" in said.getvalue()
    assert "tiny: " in said.getvalue()


def test_resume_refuses_changed_data(config, text):
    _stopped_at(config, "half", 8)
    text.write_text(text.read_text()[::-1])
    with pytest.raises(DataError, match="other data"):
        resume("half")


def test_folders_with_something_in_them_are_left_alone(config, change, tmp_path):
    folder = tmp_path / "full"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="exists and holds no run; choose another --out"):
        train(change(config, out=str(folder)))
    assert [file.name for file in folder.iterdir()] == ["notes.txt"]


def test_folders_are_numbered_by_default(config, change):
    names = [train(change(config, steps=1, out="auto")).folder.name for _ in range(3)]
    assert names == ["tiny", "tiny-2", "tiny-3"]


def test_the_vocabulary_follows_the_data(config, change):
    result = train(change(config, steps=1, model=change(config.model, vocabulary=500)))
    assert result.config.model.vocabulary == 9


def test_a_missing_gpu_is_said_before_a_folder_is_made(config, change, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(UnsupportedError, match=r"no GPU for device cuda .*use --device cpu"):
        train(change(config, device="cuda"))
    with pytest.raises(UnsupportedError, match="unknown device 'cpuu'; did you mean cpu"):
        train(change(config, device="cpuu"))
    for engine in ("reduce-overhead", "max-autotune", "graph", "compile+graph", "best"):
        with pytest.raises(UnsupportedError, match="needs a GPU"):
            train(change(config, engine=engine))
    assert not (tmp_path / "run").exists()


def test_foreign_and_missing_checkpoints(config, change, tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        resume("nowhere")
    checkpoint.save(tmp_path / "foreign", {"x": torch.zeros(1)}, {})
    with pytest.raises(CheckpointError, match="says nothing of its config"):
        resume("foreign")
    with pytest.raises(CheckpointError, match="says nothing of its config"):
        train(config, init_from="foreign")


def test_a_checkpoint_from_before_a_setting_existed_goes_on(config, change):
    train(config)
    file = Path("run/last/checkpoint.json")
    header = json.loads(file.read_text())
    for name in ("algorithm", "momentum"):
        del header["meta"]["config"]["optimizer"][name]
    del header["meta"]["config"]["lanes"]
    file.write_text(json.dumps(header))
    assert resume("run", change(config, steps=14)).progress.step == 14
    with pytest.raises(CheckpointError, match=r"optimizer\.momentum expected 0\.5, got 0\.95"):
        resume("run", change(config, steps=16, optimizer=change(config.optimizer, momentum=0.5)))
