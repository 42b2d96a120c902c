"""What a run does where the disk is full, memory is short or a checkpoint is damaged."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from ridgeline import checkpoint
from ridgeline.data.loader import Batches
from ridgeline.errors import CheckpointError, ConfigError, RidgelineError
from ridgeline.presets import preset
from ridgeline.train import resume, train
from ridgeline.train.metrics import FILE, MetricsFile
from ridgeline.train.sample import sample
from ridgeline.train.settings import override
from ridgeline.train.step import TorchStep

FULL = OSError(28, "No space left on device")


def full(*_, **__):
    raise FULL


def test_a_disk_that_is_full_from_the_start_leaves_nothing(config, monkeypatch, tmp_path):
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(RidgelineError, match=r"cannot write to the run's folder run \(No space left on device\); free"):
        train(config)
    assert not (tmp_path / "run").exists()


def test_a_first_checkpoint_that_fails_leaves_nothing(config, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.safetensors.torch, "save_file", full)
        with pytest.raises(CheckpointError, match="No space left on device"):
            train(config)
    assert not (tmp_path / "run").exists()
    train(config)


def test_a_disk_that_fills_up_later_keeps_the_last_checkpoint(config, monkeypatch):
    files = []
    opened, call = MetricsFile.__init__, TorchStep.__call__

    def opening(self, folder, step):
        opened(self, folder, step)
        files.append(self)

    def filling(self, batch):
        call(self, batch)
        if self._taken == 9:
            files[0]._stream = open("/dev/full", "a")  # noqa: SIM115

    monkeypatch.setattr(MetricsFile, "__init__", opening)
    monkeypatch.setattr(TorchStep, "__call__", filling)
    with pytest.raises(
        RidgelineError, match=r"No space left on device\); .*last checkpoint, where there is one, is kept"
    ):
        train(config)
    assert checkpoint.load("run/last").meta["step"] == 8


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 7.28 TiB"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_too_little_memory_is_one_sentence_and_leaves_no_folder(config, monkeypatch, tmp_path, error):
    def refusing(self, out=None):
        raise error

    monkeypatch.setattr(Batches, "next", refusing)
    with pytest.raises(RidgelineError, match="not enough memory; lower --batch or raise --accumulation"):
        train(config)
    assert not (tmp_path / "run").exists()


def test_a_model_that_no_machine_holds_says_what_it_takes(config, change, tmp_path):
    decoder = dataclasses.replace(config.model.decoder, width=2**22, heads=2)
    large = change(config, model=dataclasses.replace(config.model, decoder=decoder))
    told = r"not enough memory; the model's 211 T parameters take 3145\d\d\d\.\d GiB with .*; take a smaller model"
    with pytest.raises(RidgelineError, match=told):
        train(large)
    assert not (tmp_path / "run").exists()


def test_too_little_memory_later_keeps_what_was_trained(config, change, monkeypatch):
    train(config)
    monkeypatch.setattr(np, "arange", lambda *_, **__: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(RidgelineError, match="lower --batch"):
        resume("run", change(config, steps=20))
    assert checkpoint.load("run/last").meta["step"] == 12


def test_a_batch_that_no_machine_holds(config, change):
    with pytest.raises(ConfigError, match=r"batch must be below 2\^32.*lower --batch"):
        change(config, batch=10**30)


@pytest.mark.parametrize(
    "damage",
    [
        lambda header: header.update(tensors={}),
        lambda header: header.update(tensors=3),
        lambda header: header["tensors"].update(file="../elsewhere"),
        lambda header: header["tensors"].update(bytes="many"),
        lambda header: header.update(schema="x"),
        lambda header: header.update(package=None),
        lambda header: header.update(meta=3),
        *(lambda header, name=name: header["meta"].pop(name) for name in ("threads", "step", "seconds", "val_loss")),
        *(lambda header, name=name: header["meta"].update({name: "x"}) for name in ("threads", "step", "best_loss")),
        *(lambda header, value=value: header["meta"].update(data=value) for value in ({}, 3, None, {"position": "x"})),
        *(lambda header, value=value: header["meta"].update(config=value) for value in (3, [], {"steps": {}})),
        lambda header: header["meta"].pop("data"),
        lambda header: header["meta"].pop("config"),
    ],
)
def test_a_damaged_checkpoint_is_refused_in_one_sentence(config, change, damage):
    train(config)
    file = Path("run/last/checkpoint.json")
    header = json.loads(file.read_text())
    damage(header)
    file.write_text(json.dumps(header))
    with pytest.raises(RidgelineError) as caught:
        resume("run", change(config, steps=20))
    assert isinstance(caught.value, CheckpointError)
    with pytest.raises(CheckpointError):
        resume("run")


@pytest.mark.parametrize("group", ["optimizer", "rng"])
def test_a_checkpoint_without_a_group_of_tensors(config, change, group):
    train(config)
    saved = checkpoint.load("run/last")
    kept = {name: tensor for name, tensor in saved.tensors.items() if not name.startswith(group)}
    checkpoint.save("run/last", kept, saved.meta)
    with pytest.raises(CheckpointError, match="another checkpoint"):
        resume("run", change(config, steps=20))


@pytest.mark.parametrize("value", [3, {}, {"kind": "runes", "size": 9}, {"kind": "characters", "size": 9}])
def test_sampling_with_a_damaged_vocabulary(config, value):
    train(config)
    saved = checkpoint.load("run/last")
    checkpoint.save("damaged", saved.tensors, {**saved.meta, "vocabulary": value})
    with pytest.raises(CheckpointError, match="vocabulary"):
        sample("damaged", "")


def test_sampling_and_starting_from_a_damaged_config(config, change):
    train(config)
    saved = checkpoint.load("run/last")
    checkpoint.save("damaged", saved.tensors, {**saved.meta, "config": 3})
    with pytest.raises(CheckpointError, match="config"):
        sample("damaged", "")
    with pytest.raises(CheckpointError, match="config"):
        train(change(config, out="other"), init_from="damaged")


@pytest.mark.parametrize("line", ["[]", "{", '{"loss": 1}', "\udcff"])
def test_records_that_are_none(config, change, line):
    train(config)
    with Path("run", FILE).open("a", encoding="utf-8", errors="surrogateescape") as stream:
        stream.write(line + "\n")
    with pytest.raises(RidgelineError, match=r"line \d+ of run/metrics.jsonl is no record"):
        resume("run", change(config, steps=20))


@pytest.mark.parametrize("seed", [-1, 2**63, 10**23])
def test_seeds_that_no_generator_takes(config, change, seed):
    with pytest.raises(ConfigError, match="seed must be in"):
        sample("run", "", seed=seed)
    with pytest.raises(ConfigError, match="seed must be in"):
        change(config, seed=seed)


def test_the_smallest_temperatures_are_greedy(config):
    train(config)
    greedy = sample("run", "", tokens=20, temperature=0).text
    assert sample("run", "", tokens=20, temperature=1e-40).text == greedy
    assert sample("run", "", tokens=20, temperature=1e-300).text == greedy


@pytest.mark.parametrize("name", ["steps", "batch", "minutes", "seed", "out", "track"])
def test_a_table_in_place_of_a_plain_setting(config, name):
    with pytest.raises(ConfigError, match=f"{name} must be a"):
        override(config, {name: {"a": 1}})


@pytest.mark.parametrize("name", [3, 1.5, [], {}, True])
def test_a_preset_that_is_no_name(name):
    with pytest.raises(ConfigError, match="preset must be a name in quotes"):
        preset(name)


def test_a_folder_without_a_checkpoint_is_never_said_to_be_a_run(config, change, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"notes.txt exists and holds no run; choose another --out$"):
        train(change(config, out="notes.txt"))
    with pytest.raises(ConfigError, match="null exists and holds no run"):
        train(change(config, out="/dev/null"))
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "config.toml").write_text("")
    with pytest.raises(ConfigError, match="killed before its first checkpoint; choose another --out or delete it"):
        train(change(config, out="killed"))
