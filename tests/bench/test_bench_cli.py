"""`ridgeline bench`: what it writes, what it says, and what it refuses before anything is measured."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from ridgeline.bench import run
from ridgeline.bench.usual import record_file, usual_contenders
from ridgeline.bench.workloads import workload
from ridgeline.cli import bench as cli_bench
from ridgeline.cli import main
from ridgeline.records import read_record


class Fake:
    """A team that answers at once; `graph` fails as it does on a CPU."""

    def __init__(self, case, contender, device, plan, gpus):
        self.name, self.error, self.first_step_s = contender, "", None
        self.times_ms: list[float] = []
        self.peak = self.phases_ms = self.groups_ms_per_layer = self.overlap = None
        self.out_of_memory, self.command = False, {}

    def send(self, command):
        self.command = command

    def wait(self, limit_s, watch=None, seen=None):
        if self.name == "graph":
            self.error = "UnsupportedError: engine graph captures CUDA graphs"
            return {}
        if "phases" in self.command:
            return {"phases_ms": {"forward": 1.0, "backward": 2.0, "optimizer": 0.5}}
        return {"first_step_s": 1.0, "times_ms": [4.0] * self.command.get("time", 0), "peak_memory_bytes": None}

    def dismiss(self):
        pass

    def close(self):
        pass


@pytest.fixture(autouse=True)
def _fakes(monkeypatch):
    monkeypatch.setattr(run, "Team", Fake)


def bench(*words: str, out) -> int:
    return main(["bench", *words, "--device", "cpu", "--out", str(out)])


def test_a_record_is_written_and_printed(tmp_path, capsys):
    assert bench("gpt2-c256", "--contenders", "eager,graph", out=tmp_path) == 0
    said = capsys.readouterr()
    (file,) = tmp_path.rglob("*.json")
    assert file.parent.name.startswith("cpu-")
    assert file.name.endswith("-bench-gpt2-c256-b4-t64-fp32.json")
    record = read_record(file)
    assert [c.error is None for c in record.contenders] == [True, False]
    assert "engine graph captures CUDA graphs" in said.out  # the reason stands beside the other's result
    assert str(file) in said.out
    assert "round 1 of" in said.err


def test_json_is_one_object_on_the_last_line(tmp_path, capsys):
    assert bench("gpt2-c256", "--contenders", "eager", "--json", out=tmp_path) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [c["name"] for c in said["records"][0]["contenders"]] == ["eager"]
    assert read_record(said["files"][0]).contenders[0].step_ms == 4.0


def test_a_sweep_writes_a_record_a_value(tmp_path, capsys):
    assert bench("gpt2-c256", "--contenders", "eager", "--vary", "batch=1:4", "--json", out=tmp_path) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [r["workload"]["batch"] for r in said["records"]] == [1, 2, 4]
    assert len(set(said["files"])) == 3


def test_numbers_of_cards_stand_in_one_record(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli_bench, "find_device", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    for name in ("monitor", "present"):
        monkeypatch.setattr(run, name, lambda device: None)
    words = ("gpt2-c256", "--contenders", "eager", "--precision", "fp32")
    assert bench(*words, "--gpus", "1,2", out=tmp_path) == 0
    (file,) = tmp_path.rglob("*-2gpus.json")
    record = read_record(file)
    assert [(c.name, c.group, c.gpus) for c in record.contenders] == [("eager", 0, 1), ("eager", 1, 2)]
    assert len(list(tmp_path.rglob("*.json"))) == 1
    assert "  cards" in capsys.readouterr().out
    assert bench(*words, "--gpus", "2,3", out=tmp_path) == 2
    assert "2 CUDA cards here, and 3 were asked for" in capsys.readouterr().err


def test_a_record_is_never_overwritten_but_can_be_gone_on_with(tmp_path, capsys):
    assert bench("gpt2-c256", "--contenders", "eager", out=tmp_path) == 0
    assert bench("gpt2-c256", "--contenders", "eager", out=tmp_path) == 0
    first, second = sorted(tmp_path.rglob("*.json"), key=lambda file: len(file.name))
    assert second.stem == f"{first.stem}-2"
    assert bench("gpt2-c256", "--contenders", "compile", "--append", str(first), out=tmp_path) == 0
    assert [(c.name, c.group) for c in read_record(first).contenders] == [("eager", 0), ("compile", 1)]
    assert len(list(tmp_path.rglob("*.json"))) == 2


def test_where_nobody_could_be_timed_the_exit_code_says_so(tmp_path):
    assert bench("gpt2-c256", "--contenders", "graph", out=tmp_path) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gpt2-c265"], "did you mean gpt2-c256"),
        (["gpt2-c256", "--contenders", "eagre"], "did you mean eager"),
        (["gpt2-c256", "--contenders", "m2+colour"], "unknown change"),
        (["gpt2-c256", "--contenders", ""], "--contenders needs a value after it, got an empty one"),
        (["gpt2-c256", "--contenders", "eager,,compile"], "the name of a contender is empty"),
        (["gpt2-c256", "--vary", ""], "--vary needs a value"),
        (["gpt2-c256", "--out", ""], "--out needs a value"),
        (["gpt2-c256", "--batch", "99999999"], "batch must be at most 16,777,216, got 99999999"),
        (["gpt2-c256", "--vary", "batch=1:99999999"], "batch must be at most 16,777,216"),
        (["gpt2-c256", "--context", "0"], "needs batch ≥ 1 and context ≥ 1, got 32 and 0"),
        (["gpt2-c256", "--contenders", "eager,eager"], "different contenders"),
        (["gpt2-c256", "--vary", "width=1:2"], "a sweep reads"),
        (["gpt2-c256", "--gpus", "1,2"], "the device is the CPU"),
        (["gpt2-c256", "--gpus", "two"], "different numbers of cards"),
        (["gpt2-c256", "--rounds", "3"], "even number of rounds"),
        (["gpt2-c256", "--append", "none.json"], "cannot be read as a record"),
        (["gpt2-c256", "--precision", "tf32"], "has no tf32"),
        (["gpt2-c256", "--precision", "bf15"], "did you mean bf16"),
        ([], "WORKLOAD is missing"),
    ],
)
def test_mistakes_end_with_2_and_one_sentence(tmp_path, capsys, words, said):
    assert bench(*words, out=tmp_path) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.json"))


def test_a_record_of_something_else_is_not_gone_on_with(tmp_path, capsys):
    assert bench("gpt2-c256", "--contenders", "eager", out=tmp_path) == 0
    (file,) = tmp_path.rglob("*.json")
    assert bench("fast-c256", "--contenders", "eager", "--append", str(file), out=tmp_path) == 2
    assert "has workload gpt2-c256 4 × 64 fp32, this run fast-c256 4 × 64 fp32; write a record of its own" in (
        capsys.readouterr().err
    )
    assert bench("gpt2-c256", "--vary", "batch=1:2", "--append", str(file), out=tmp_path) == 2


def test_a_folder_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert bench("gpt2-c256", "--contenders", "eager", out=tmp_path / "file") == 2
    said = capsys.readouterr().err
    assert "choose another folder" in said
    assert "round" not in said  # before anything is measured


def test_spaces_in_a_list_do_no_harm(tmp_path, capsys):
    assert bench("gpt2-c256", "--contenders", "eager, compile", "--json", out=tmp_path) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [c["name"] for c in said["records"][0]["contenders"]] == ["eager", "compile"]


def test_what_is_measured_unless_told_otherwise():
    case, cuda = workload("hal-20m"), torch.device("cuda")
    assert usual_contenders(case, torch.device("cpu")) == ["eager", "compile"]
    usual = usual_contenders(case, cuda)
    assert {"m0", "m1", "m2", "m3", "r16", "best", "eager", "compile+graph", "compile+graph:explicit"} <= set(usual)
    assert "liger" not in usual
    assert "compile+graph:explicit" not in usual_contenders(workload("gpt2-c256"), cuda)


def test_names_of_records(tmp_path):
    record = run.run_bench(workload("gpt2-c256", precision="fp32").reduced(), ["eager"], torch.device("cpu"))
    file = record_file(replace(record, card="NVIDIA H200", gpus=2, date="2026-11-29T00:00:00+00:00"), tmp_path)
    assert file == tmp_path / "nvidia-h200" / "2026-11-29-bench-gpt2-c256-b4-t64-fp32-2gpus.json"
    own = replace(
        record, date="2026-11-29T00:00:00+00:00", workload=replace(record.workload, name="../my runs/a.toml+norm=x")
    )
    assert record_file(own, tmp_path).name == "2026-11-29-bench-my-runs-a.toml+norm=x-b4-t64-fp32.json"
