"""Checkpoints are whole at every moment, verified on load, and say what is wrong with them."""

import dataclasses
import functools
import json
import os
import subprocess
import sys

import pytest
import safetensors
import torch

from ridgeline import checkpoint
from ridgeline.errors import CheckpointError
from ridgeline.models.config import DecoderConfig, LanguageConfig

TENSORS = {
    "model.weight": torch.arange(12, dtype=torch.float32).view(3, 4) / 7,
    "model.half": torch.tensor([1.5, -2.0, float("nan")], dtype=torch.bfloat16),
    "optimizer.step": torch.tensor(7),
    "rng.torch": torch.arange(256).to(torch.uint8),
}
META = {"step": 7, "seconds": 0.1 + 0.2, "window": {"context": 8, "stride": 2, "delay": 0}, "preset": "boxing"}


def test_what_is_saved_comes_back_to_the_bit(tmp_path):
    checkpoint.save(tmp_path / "last", TENSORS, META)
    loaded = checkpoint.load(tmp_path / "last")
    assert loaded.meta == META
    assert loaded.tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert loaded.tensors[name].dtype == tensor.dtype
        assert loaded.tensors[name].shape == tensor.shape
        assert torch.equal(loaded.tensors[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))


def test_groups_join_and_part_again():
    model, rng = {"a.weight": torch.zeros(2)}, {"torch": torch.ones(2)}
    joined = checkpoint.join(model=model, rng=rng)
    assert joined.keys() == {"model.a.weight", "rng.torch"}
    loaded = checkpoint.Checkpoint(path=None, tensors=joined, meta={}, package="")
    assert loaded.group("model") == model
    assert loaded.group("rng") == rng


def test_views_of_one_storage_are_saved_apart(tmp_path):
    flat = torch.arange(8.0)
    views = {"a": flat[:4].view(2, 2), "b": flat[4:], "tied": flat[:4].view(2, 2), "turned": flat.view(2, 4).t()}
    checkpoint.save(tmp_path / "c", views, {})
    for name, tensor in checkpoint.load(tmp_path / "c").tensors.items():
        assert torch.equal(tensor, views[name])


def test_saving_again_replaces_and_leaves_one_tensor_file(tmp_path):
    for step in range(3):
        checkpoint.save(tmp_path / "last", {"w": torch.full((4,), step)}, {"step": step})
    assert checkpoint.load(tmp_path / "last").meta == {"step": 2}
    assert len(list((tmp_path / "last").iterdir())) == 2


def test_what_a_killed_first_save_left_is_no_obstacle(tmp_path):
    folder = tmp_path / "last"
    (folder / "partial").mkdir(parents=True)
    (folder / "partial" / ".tmp6sXa").write_text("the writer's own temporary file")
    (folder / "tensors-0123456789abcdef.safetensors").write_text("a tensor file that no header names yet")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        checkpoint.load(folder)
    checkpoint.save(folder, TENSORS, META)
    assert checkpoint.load(folder).meta == META
    assert len(list(folder.iterdir())) == 2


KILLER = """
import json, os, random, shutil, signal, sys, time
import torch
from ridgeline import checkpoint

torch.set_num_threads(1)
root = sys.argv[1]
old, target = os.path.join(root, "old"), os.path.join(root, "last")

def tensors(step):
    return {"w": torch.full((50_000,), float(step)), "step": torch.tensor(step)}

def forked(work):
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(0)
    return pid

def killed_at_line(number):
    seen = 0
    def trace(frame, event, argument):
        nonlocal seen
        if frame.f_code.co_filename != checkpoint.__file__:
            return None
        if event == "line":
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace
    sys.settrace(trace)
    checkpoint.save(target, tensors(2), {"step": 2})

def step_found():
    found = checkpoint.load(target)
    step = found.meta["step"]
    assert found.tensors["step"].item() == step and (found.tensors["w"] == step).all()
    return step

checkpoint.save(old, tensors(1), {"step": 1})
steps = []
while True:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(old, target)
    _, status = os.waitpid(forked(lambda: killed_at_line(len(steps) + 1)), 0)
    if status == 0:
        break
    assert os.WIFSIGNALED(status)
    steps.append(step_found())

def save_for_ever():
    step = step_found()
    while True:
        step += 1
        checkpoint.save(target, tensors(step), {"step": step})

last, kills = step_found(), 0
for _ in range(12):
    pid = forked(save_for_ever)
    time.sleep(random.uniform(0.02, 0.1))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    kills += 1
    assert step_found() >= last
    last = step_found()
checkpoint.save(target, tensors(0), {"step": 0})
print(json.dumps({"steps": steps, "kills": kills, "last": last, "files": len(os.listdir(target))}))
"""


def test_kill_9_at_any_moment_leaves_the_old_or_the_new_one_whole(tmp_path):
    run = subprocess.run([sys.executable, "-c", KILLER, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    steps = result["steps"]  # what a process killed before its n-th line left behind
    assert len(steps) > 30
    assert steps[0] == 1
    assert steps[-1] == 2
    assert steps == sorted(steps)  # it changes once, in one rename
    assert result["last"] > 2  # the random kills hit a process that was saving
    assert result["files"] == 2  # what the killed ones left is gone with the next save


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        safetensors.SafetensorError("Error while serializing: I/O error: No space left on device"),
    ],
)
def test_a_failed_write_leaves_the_old_one(tmp_path, monkeypatch, error):
    checkpoint.save(tmp_path / "last", TENSORS, META)

    def full(*_):
        raise error

    monkeypatch.setattr(checkpoint.safetensors.torch, "save_file", full)
    with pytest.raises(CheckpointError, match=r"No space left on device; free space or choose another"):
        checkpoint.save(tmp_path / "last", TENSORS, {"step": 8})
    assert checkpoint.load(tmp_path / "last").meta == META


def test_the_header_takes_its_place_when_all_that_it_names_is_on_the_disk(tmp_path, monkeypatch):
    seen, replace = [], os.replace
    monkeypatch.setattr(checkpoint, "_sync", lambda path: seen.append(("on disk", path.name)))
    monkeypatch.setattr(os, "replace", lambda old, new: (seen.append(("in place", new.name)), replace(old, new)))
    folder = checkpoint.save(tmp_path / "last", TENSORS, META)
    (tensors,) = folder.glob("*.safetensors")
    assert seen == [
        ("on disk", "tensors.safetensors"),
        ("in place", tensors.name),
        ("on disk", "checkpoint.json"),
        ("on disk", "last"),
        ("in place", "checkpoint.json"),
        ("on disk", "last"),
    ]


def test_other_peoples_folder_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(CheckpointError, match=r"holds other files \(thesis.tex\); choose an empty or new folder"):
        checkpoint.save(tmp_path, TENSORS, META)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def edit_header(folder, **changes):
    file = folder / checkpoint.HEADER
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_entry(folder, **changes):
    edit_header(folder, tensors=json.loads((folder / checkpoint.HEADER).read_text())["tensors"] | changes)


def drop_from_header(folder, name):
    file = folder / checkpoint.HEADER
    header = json.loads(file.read_text())
    del header[name]
    file.write_text(json.dumps(header))


def flip_a_byte(folder):
    file = next(folder.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def cut(folder):
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-3])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip_a_byte, "is corrupt .*use another checkpoint"),
        (cut, "is corrupt .*use another checkpoint"),
        (lambda folder: next(folder.glob("*.safetensors")).unlink(), "cannot be read .*use another checkpoint"),
        *(
            (lambda folder, text=text: (folder / checkpoint.HEADER).write_text(text), "cannot be read .*use another")
            for text in ("{", 200_000 * "[")
        ),
        (lambda folder: (folder / checkpoint.HEADER).unlink(), "holds no checkpoint .*give another folder"),
        (lambda folder: edit_header(folder, format="other"), "is not a ridgeline checkpoint"),
        (lambda folder: (folder / checkpoint.HEADER).write_text("[]"), "is not a ridgeline checkpoint"),
        (lambda folder: edit_header(folder, schema=checkpoint.SCHEMA + 1, package="9.9"), "ridgeline 9.9 .*upgrade"),
        (lambda folder: edit_header(folder, schema=99, tensors=None, package="9.9"), "written by ridgeline 9.9"),
        (lambda folder: drop_from_header(folder, "meta"), "is not a ridgeline checkpoint"),
        *(
            (functools.partial(edit_header, **{name: value}), "is damaged; use another checkpoint")
            for name, value in [
                ("schema", "1"),
                ("schema", 0),
                ("package", 3),
                ("meta", []),
                ("tensors", []),
                ("tensors", {}),
            ]
        ),
        *((functools.partial(edit_entry, file=name), "is damaged") for name in ("../other/tensors", "..", "", 3)),
    ],
)
def test_a_damaged_or_foreign_one_is_refused_with_its_cure(tmp_path, damage, message):
    folder = checkpoint.save(tmp_path / "best", TENSORS, META)
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(folder)


def test_a_run_folder_means_its_best_or_last(tmp_path):
    with pytest.raises(CheckpointError, match="holds no checkpoint; give the folder of a run"):
        checkpoint.find(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        checkpoint.find(tmp_path / "nowhere")
    last = checkpoint.save(tmp_path / "last", TENSORS, META)
    assert checkpoint.find(tmp_path) == last
    best = checkpoint.save(tmp_path / "best", TENSORS, META)
    assert checkpoint.find(tmp_path) == best
    assert checkpoint.find(tmp_path, prefer="last") == last
    assert checkpoint.find(last) == last


def test_checkpoints_have_the_same_digest_if_their_tensors_are_the_same(tmp_path):
    one = checkpoint.save(tmp_path / "one", TENSORS, META)
    same = checkpoint.save(tmp_path / "same", TENSORS, {})
    other = checkpoint.save(tmp_path / "other", {**TENSORS, "optimizer.step": torch.tensor(8)}, META)
    assert checkpoint.digest(one) == checkpoint.digest(same) != checkpoint.digest(other)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        checkpoint.digest(tmp_path)


def test_another_config_is_named_field_by_field():
    wanted = LanguageConfig(decoder=DecoderConfig(layers=2, width=64, heads=4), vocabulary=65)
    saved = json.loads(json.dumps(dataclasses.asdict(wanted)))
    checkpoint.check_config(saved, wanted)
    saved["decoder"]["layers"] = 6
    saved["vocabulary"] = 97
    with pytest.raises(CheckpointError, match=r"decoder.layers expected 2, got 6, vocabulary expected 65, got 97; "):
        checkpoint.check_config(saved, wanted)
    with pytest.raises(CheckpointError, match=r"another window: stride expected 2, got None"):
        checkpoint.check_config({"context": 4}, {"context": 4, "stride": 2}, "window")


def test_config_tuples_survive_json():
    checkpoint.check_config({"heads": [{"name": "main", "classes": 9}]}, {"heads": ({"name": "main", "classes": 9},)})
    with pytest.raises(CheckpointError, match=r"heads\[0\].classes expected 5, got 9"):
        checkpoint.check_config({"heads": [{"classes": 9}]}, {"heads": [{"classes": 5}]})
    with pytest.raises(CheckpointError, match=r"heads expected \[1, 2\], got \[1\]"):
        checkpoint.check_config({"heads": [1]}, {"heads": [1, 2]})


def test_three_differences_are_named_and_the_others_counted():
    assert checkpoint.differences({}, dict.fromkeys("abc", 1)).count("expected") == 3
    words = checkpoint.differences({"a": 1}, {"a": 2, "b": 1, "c": 1, "d": 1, "e": 1})
    assert words.startswith("a expected 2, got 1, b expected 1, got None, c expected")
    assert words.endswith(" and 2 more")
    assert checkpoint.differences({"a": (1,)}, {"a": [1]}) == ""
