"""Searches: what may be chosen, what is never trained, what is judged how, and a storage that goes on."""

import itertools
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ridgeline.cli import main
from ridgeline.errors import ConfigError, RidgelineError
from ridgeline.presets import find_config
from ridgeline.records import read_record
from ridgeline.study import search as module
from ridgeline.study import storage
from ridgeline.study.floors import this_machine
from ridgeline.study.space import Range, configure, default_space, narrowed
from ridgeline.study.trials import Trial
from ridgeline.train.settings import override, read_toml
from study.search_helpers import SMALL

IntegrityError = pytest.importorskip("sqlalchemy.exc", reason="the extra search is not installed").IntegrityError
optuna = pytest.importorskip("optuna", reason="the extra search is not installed")
SPACE = ["layers=1", "width=16", "kv_heads=all", "mlp_ratio=2", "context=16", "batch=2", "lr=1e-3:1e-2"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("the cat sat on the mat and the rat ate the hat; " * 60, encoding="utf-8")
    return file


def options(text: Path, out: Path, *more: str, budget: str = "1.6s", trial: str = "0.8s") -> list[str]:
    size = ["--data", str(text), "--device", "cpu", "--eval-windows", "4", "--least-steps", "1"]
    return [
        "study", "search", "--base", SMALL, *size, "--space", *SPACE, "norm=layernorm,rmsnorm",
        "--budget", budget, "--trial", trial, "--out", str(out), *more,
    ]  # fmt: skip


def test_default_space_lies_around_the_base() -> None:
    space = default_space(find_config("gpt2-c256"), games=False)
    assert space["layers"] == (3, 6, 9)
    assert space["width"] == (128, 256, 384)
    assert space["lr"] == Range(2.5e-4, 4e-3)
    assert "stride" not in space
    assert default_space(find_config("boxing"), games=True)["stride"] == (1, 2)


def test_every_choice_of_every_default_space_is_a_model() -> None:
    """Each value is tried once with the others as the base has them."""
    for name in ("gpt2-c256", "fast-c256", "boxing", "hal-5m", "hal-20m"):
        base = find_config(name)
        space = default_space(base, games="boxing" in name or "hal" in name)
        first = {key: v[0] if isinstance(v, tuple) and not isinstance(v, Range) else v.low for key, v in space.items()}
        for key, values in space.items():
            for value in values:
                config = configure(base, {**first, key: value}, 90.0)
                assert config.minutes == 1.5
                assert config.model.decoder.head_dim == base.model.decoder.head_dim


def test_chosen_values_are_those_of_the_config() -> None:
    params = {"layers": 2, "width": 128, "kv_heads": 1, "mlp_ratio": 2, "norm": "rmsnorm", "context": 64, "batch": 8}
    config = configure(find_config("gpt2-c256+stages=[[0.5,64,32]]"), {**params, "lr": 2e-3}, 60.0)
    decoder = config.model.decoder
    assert (decoder.layers, decoder.width, decoder.heads, decoder.kv_heads) == (2, 128, 4, 1)
    assert (decoder.hidden, decoder.norm, decoder.context, config.window.context) == (256, "rmsnorm", 64, 64)
    assert (config.batch, config.optimizer.lr, config.optimizer.floor) == (8, 2e-3, pytest.approx(2e-4))
    assert config.stages == ()  # those of the base are shares of its steps, and a trial goes by the clock


def test_heads_follow_the_width_or_are_chosen() -> None:
    base = find_config("gpt2-c256")
    space = narrowed(default_space(base, games=False), ["heads=2,3,3,4", "width=96"])
    assert space["heads"] == (2, 3, 4)
    params = {name: values[0] for name, values in space.items()}
    heads = [configure(base, {**params, "heads": n}, 60.0).model.decoder for n in (2, 3)]
    assert [(d.heads, d.head_dim, d.groups) for d in heads] == [(2, 48, 2), (3, 32, 3)]
    with pytest.raises(ConfigError, match="kv_heads=2 does not divide heads=3"):
        configure(base, {**params, "heads": 3, "kv_heads": 2}, 60.0)
    with pytest.raises(ConfigError, match="width=48 without heads is no multiple of the base's head width 32"):
        configure(base, {**{k: v for k, v in params.items() if k != "heads"}, "width": 48}, 60.0)


def test_floors_order_candidates_as_their_work_does() -> None:
    """Twice the layers of the same width cost about twice the time; nothing about it is measured on the model."""
    machine = this_machine(override(find_config("gpt2-c256"), {"device": "cpu", "precision": "fp32"}))
    one, two = (machine.floor_s(find_config(f"gpt2-c256+layers={n}")) for n in (6, 12))
    assert 1.8 < two / one < 2.2


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["widths=3"], "setting of a search"),
        (["width="], "nothing to choose from"),
        (["width=wide"], "whole number"),
        (["norm=batchnorm"], "layernorm or rmsnorm"),
        (["lr=fast"], "range of learning rates"),
        (["lr=2:1"], "range of learning rates"),
        (["stride=2"], "games only"),
        (["layers=1", "width=64", "layers=2"], "layers is given twice; give all that it may be at once"),
    ],
)
def test_no_such_space(words: list[str], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        narrowed(default_space(find_config("gpt2-c256"), games=False), words)


def test_search_whole(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Trials, a record, a config that train takes; asked again with more time it goes on with the same trials."""
    out = tmp_path / "out"
    assert main(options(text, out, "--json")) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["trials"]
    assert said["best"]["state"] == "complete"
    assert said["best"]["tokens_per_s"] > 0
    assert said["best"]["predicted_tokens_per_s"] > 0
    assert len(said["best"]["path"]) == module.POINTS
    record = read_record(said["record"])
    rows = {curve["figure"]: curve["rows"] for curve in record.curves if "rows" in curve}
    assert record.kind == "search"
    assert str(out / "trials") not in Path(said["record"]).read_text()  # a record travels
    assert all(row["choice"].startswith("layers 1, width 16") for row in (*rows["trials"], *rows["front"]))
    assert rows["front"][-1]["loss"] == min(loss for row in rows["trials"] for _, loss in row["path"])
    settings = read_toml(said["chosen"])
    assert settings["optimizer"]["lr"] == pytest.approx(said["best"]["params"]["lr"])
    run = ["train", "--config", said["chosen"], "--minutes", "0.005", "--out", str(tmp_path / "run"), "--json"]
    assert main(run) == 0
    capsys.readouterr()
    assert main(options(text, out, "--json", budget="6s")) == 0
    more = json.loads(capsys.readouterr().out.splitlines()[-1])["trials"]
    assert more[: len(said["trials"])] == said["trials"] or len(more) > len(said["trials"])
    assert main(options(text, out, "--target", "loss=1.0")) == 2
    assert "another search (goal differ" in " ".join(capsys.readouterr().err.split())


def test_a_search_that_is_stopped_tells_what_it_has(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, begun = module._Attempt.run, []

    def stopped(attempt: module._Attempt, study: optuna.Study) -> Trial:
        begun.append(attempt)
        if len(begun) == 2:
            raise KeyboardInterrupt
        return run(attempt, study)

    monkeypatch.setattr(module._Attempt, "run", stopped)
    out = tmp_path / "out"
    assert main(options(text, out, "--json", budget="90s")) == 130
    printed = capsys.readouterr()
    assert "the same command goes on" in printed.err
    said = json.loads(printed.out.splitlines()[-1])
    assert [trial["state"] for trial in said["trials"]] == ["complete"]
    assert read_record(out / "record.json").kind == "search"
    assert (out / "chosen.toml").exists()
    begun[:] = [None] * 2
    assert main(options(text, out, "--json", budget="4s")) == 0
    begun[:] = [None]
    assert main(options(text, tmp_path / "other", "--json")) == 130  # and nothing to tell
    assert not (tmp_path / "other" / "record.json").exists()


def test_target_that_is_held_ends_a_trial(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every loss is below 100, so the second point ends the trial, and the first is its time."""
    assert main(options(text, tmp_path / "out", "--target", "loss=100", "--json")) == 0
    best = json.loads(capsys.readouterr().out.splitlines()[-1])["best"]
    assert len(best["path"]) == 2
    assert best["seconds"] == best["path"][0][0]


def test_target_out_of_reach_is_said(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(options(text, tmp_path / "out", "--target", "loss=0.001")) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"loss=0.001 was not held in 0.8 s of training: the best, trial \d+, came to \d\.\d+; it ", said)


def test_what_cannot_be_fast_enough_is_never_trained(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(module, "train_on_clock", lambda task: pytest.fail("trained"))
        assert main(options(text, tmp_path / "out", "--least-steps", "1000000000")) == 2
    assert "even at its floor" in " ".join(capsys.readouterr().err.split())
    assert main(options(text, tmp_path / "out")) == 0  # as the sentence says, of other candidates, in the same place


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--budget", "1s", "--trial", "2s"], "shorter than one trial"),
        (["--budget", "soon"], "no time"),
        (["--target", "ko=0.9"], "knockouts are of games"),
        (["--storage", "mysql://"], "install the database's driver, or give another"),
        (
            ["--space", "width=17,33"],
            "width=17 without heads is no multiple of the base's head width 8; width=33 without heads",
        ),
    ],
)
def test_bad_input(text: Path, tmp_path: Path, more: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*options(text, tmp_path / "out"), *more]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_two_that_make_a_storage_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slower one finds the tables there, and takes them; what is wrong for longer is told."""
    real, calls = optuna.create_study, []

    def slower(*args: object, **named: object) -> object:
        calls.append(named)
        if len(calls) < 3:
            raise IntegrityError("insert", {}, Exception("UNIQUE constraint failed: alembic_version.version_num"))
        return real(*args, **named)

    monkeypatch.setattr(optuna, "create_study", slower)
    monkeypatch.setattr(storage, "PAUSE_SECONDS", 0.0)
    url = f"sqlite:///{tmp_path / 'shared.db'}"
    assert storage.opened(url, {"a": 1}).user_attrs["plan"] == {"a": 1}
    assert len(calls) == 3
    with pytest.raises(ConfigError, match=r"another search \(a differ\)"):
        storage.opened(url, {"a": 2})
    monkeypatch.setattr(storage, "ATTEMPTS", 1)
    calls.clear()
    with pytest.raises(RidgelineError, match="the storage X cannot be used"), storage.storage_errors("X"):
        storage.opened(url, {"a": 1})


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
def test_somebody_elses_study_is_left_alone(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], direction: str
) -> None:
    url = f"sqlite:///{tmp_path / 'theirs.db'}"
    theirs = optuna.create_study(study_name="search", storage=url, direction=direction)
    if direction == "minimize":
        theirs.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=1)
    before = len(theirs.trials)
    assert main([*options(text, tmp_path / "out"), "--storage", url]) == 2
    assert "a study called 'search' of something else; give a new --out or --storage" in capsys.readouterr().err
    assert len(theirs.trials) == before


def test_a_killed_search_goes_on(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SIGKILL in the middle of a trial: its candidate is tried again, and what had ended stays."""
    out = tmp_path / "out"
    long = options(text, out, "--json", budget="60s", trial="1.5s")
    process = subprocess.Popen([sys.executable, "-m", "ridgeline", *long], stdout=subprocess.DEVNULL)
    waited = time.monotonic() + 60
    while not list(out.glob("trials/*/points.jsonl")) and time.monotonic() < waited:
        time.sleep(0.05)
    time.sleep(0.3)
    process.kill()
    process.wait()
    assert main(options(text, out, "--json", budget="4s", trial="1.5s")) == 0
    trials = json.loads(capsys.readouterr().out.splitlines()[-1])["trials"]
    cut = [trial["params"] for trial in trials if trial["state"] == "failed"]
    ended = [trial["params"] for trial in trials if trial["state"] == "complete"]
    assert len(cut) == 1
    assert ended.count(cut[0]) == 1  # once more and no second time: the sampler does not begin anew


def test_a_search_in_which_nothing_is_possible_says_why(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "train_on_clock", lambda task: pytest.fail("trained"))
    impossible = ["--space", "width=16,32,64,128,256,512", "--least-steps", "999999999"]
    assert main([*options(text, tmp_path / "out", budget="10m"), *impossible]) == 2  # before any time has passed
    said = " ".join(capsys.readouterr().err.split())
    assert "nothing in the space can be trained (takes at most" in said
    assert said.endswith("; give other candidates to --space, or a longer --trial and --budget")


def test_a_search_that_meets_refusals_only_ends(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one candidate in very many is possible, refusals end it and not the clock; the first few are told."""
    monkeypatch.setattr(module, "REFUSALS", 8)
    monkeypatch.setattr(module, "_possible", lambda plan, machine: [{}])
    assert main([*options(text, tmp_path / "out", budget="10m"), "--least-steps", "999999999"]) == 2
    said = capsys.readouterr().err
    assert "none of 8 trials came to an end (takes at most" in said
    assert said.count(" refused: ") == 5
    assert "further refusals are only counted" in said


def test_a_refusal_is_followed_by_what_is_possible(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 40 widths one can be trained: the sampler alone would find it in one of 40 trials."""
    widths = ",".join(["16", *(str(17 + 2 * n) for n in range(39))])
    assert (
        main(
            options(text, tmp_path / "out", "--json", "--space", *SPACE[:1], f"width={widths}", *SPACE[2:], budget="6s")
        )
        == 0
    )
    states = [t["state"] for t in json.loads(capsys.readouterr().out.splitlines()[-1])["trials"]]
    assert "complete" in states
    assert ("refused", "refused") not in itertools.pairwise(states)


def test_a_base_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "search"]) == 2
    assert (
        capsys.readouterr().err.strip() == "ridgeline: a search varies a base: ridgeline study search --base gpt2-c256"
    )
