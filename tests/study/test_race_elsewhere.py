"""Races that go on in another folder, with other contenders, or on another machine."""

import dataclasses
import json
import shutil

import pytest

from ridgeline.errors import ConfigError, RidgelineError
from ridgeline.play.ledger import Ledger
from ridgeline.study import clocked, race
from ridgeline.study.clocked import checkpoint_name
from ridgeline.study.outcome import make_record
from ridgeline.study.race import open_race, read_outcome, run_race
from study.race_helpers import SMALL, keep_games, make_race, train


@pytest.fixture
def finished(few_games, tmp_path):
    """A race of one contender in its folder, trained and played."""
    ours = make_race(few_games, SMALL, minutes=0.005, grid=())
    open_race(ours, tmp_path)
    (contender,) = ours.contenders
    train(ours, contender, tmp_path)
    keep_games(ours, contender, tmp_path)
    return ours, tmp_path, tmp_path / contender.folder


def without_checkpoints(folder):
    for saved in folder.glob("*/at-*"):
        shutil.rmtree(saved)


def test_what_is_done_needs_no_checkpoints(finished, monkeypatch):
    ours, folder, _ = finished
    without_checkpoints(folder)
    monkeypatch.setattr(race, "train_on_clock", None)
    outcome = run_race(ours, folder, threads=1, processes=1, timeout=60)
    (name,) = outcome.points
    assert [point.at for point in outcome.points[name]] == [0.0, 0.3]
    assert [(game.at, game.result.seed, game.result.dealt) for game in outcome.games] == [(0.3, 5_000, 5)]
    assert [(line["from"], line["card"]) for line in outcome.machines[name]] == [(0.0, "CPU")]
    record = make_record(ours, outcome)
    (setting,) = (curve for curve in record.curves if curve["figure"] == "setting")
    assert setting["machines"] == outcome.machines


def test_a_record_tells_where_training_was_and_not_where_the_record_was_written(finished):
    ours, folder, place = finished
    line = {"from": 0.0, "date": "2026-01-01T00:00:00+00:00", "git": "abc", "card": "NVIDIA H200", "versions": {}}
    later = {**line, "from": 0.1, "date": "2026-01-02T01:00:00+01:00", "git": "def"}
    (place / clocked.MACHINES).write_text("".join(f"{json.dumps(one)}\n" for one in (later, line)))
    record = make_record(ours, run_race(ours, folder, threads=1, processes=1, timeout=60))
    assert (record.card, record.gpus, record.git, record.date) == ("NVIDIA H200", 1, "def", later["date"])
    (place / clocked.MACHINES).write_text('{"card": "NVIDIA H200"}\n')
    with pytest.raises(RidgelineError, match=r"machines\.jsonl is damaged"):
        clocked.read_machines(place)


def test_a_checkpoint_that_is_still_needed_is_asked_for_before_anything_is_trained(finished, monkeypatch):
    ours, folder, place = finished
    monkeypatch.setattr(race, "train_on_clock", None)
    last = checkpoint_name(0.3)
    aside = shutil.move(place / last, folder / "aside")
    (folder / race.GAMES).unlink()
    with pytest.raises(ConfigError, match=rf"at 0.3 s has games left to play, .*{last}, which is not there; bring it"):
        run_race(ours, folder, threads=1, processes=1, timeout=60)
    shutil.copytree(place / checkpoint_name(0.0), place / last)
    with pytest.raises(ConfigError, match=rf"{last}, but what lies there is another one"):
        run_race(ours, folder, threads=1, processes=1, timeout=60)
    shutil.rmtree(place / last)
    shutil.move(aside, place / last)
    points = (place / clocked.POINTS).read_text().splitlines(keepends=True)
    (place / clocked.POINTS).write_text(points[0])
    shutil.rmtree(place / checkpoint_name(0.0))
    with pytest.raises(ConfigError, match=r"goes on from the checkpoint .*at-000000.0s, which is not there"):
        run_race(ours, folder, threads=1, processes=1, timeout=60)


def test_games_that_cannot_be_played_any_more_are_missing_in_the_record(finished):
    ours, folder, _ = finished
    without_checkpoints(folder)
    more = dataclasses.replace(ours, games=dataclasses.replace(ours.games, count=2))
    record = make_record(more, read_outcome(more, folder))
    figures = [curve["figure"] for curve in record.curves]
    assert figures == ["race", "crossings", "setting"]  # one quick game of two draws no curve
    (raced, crossed, setting) = record.curves
    assert (raced["points"][0]["games"], setting["games"]["count"]) == (1, 2)
    assert [(row["target"], row["seconds"], row["open"]) for row in crossed["rows"]] == [
        ("2 of 2 won", None, [raced["points"][0]["seconds"]]),
        ("2 of 2 by knockout", None, [raced["points"][0]["seconds"]]),
    ]
    assert (
        make_record(ours, read_outcome(ours, folder)).curves
        == make_record(ours, run_race(ours, folder, threads=1, processes=1, timeout=60)).curves
    )
    (folder / race.GAMES).unlink()
    with pytest.raises(ConfigError, match=r"at 0\.3 s has played no game"):
        read_outcome(ours, folder)


def test_checkpoints_before_the_first_that_played_are_left_out_of_a_record(few_games, tmp_path):
    ours = make_race(few_games, SMALL, minutes=0.005, grid=(0.1, 0.2))
    open_race(ours, tmp_path)
    (contender,) = ours.contenders
    train(ours, contender, tmp_path)
    keep_games(ours, contender, tmp_path)
    lines = (tmp_path / race.GAMES).read_text().splitlines(keepends=True)
    for played, told in (([0, 1, 2], [0.1, 0.2, 0.3]), ([1, 2], [0.2, 0.3]), ([2], [0.3])):
        (tmp_path / race.GAMES).write_text("".join(lines[number] for number in played))
        (raced,) = (one for one in make_record(ours, read_outcome(ours, tmp_path)).curves if one["figure"] == "race")
        assert [point["at"] for point in raced["points"]] == told
    for played, late in (([0, 2], 0.2), ([0, 1], 0.3), ([], 0.1)):
        (tmp_path / race.GAMES).write_text("".join(lines[number] for number in played))
        with pytest.raises(ConfigError, match=f"at {late} s has played no game"):
            read_outcome(ours, tmp_path)


def test_games_are_spread_over_the_cards_of_a_race(finished):
    ours, folder, _ = finished
    (contender,) = ours.contenders
    many = dataclasses.replace(ours.games, count=30, device="auto")
    for gpus, devices in ((1, ["cpu"] * 4), (2, ["cuda:0", "cuda:1"] * 2)):
        jobs = race._jobs(dataclasses.replace(ours, games=many, gpus=gpus), folder, contender)
        assert [job.load.args[1] for job in jobs] == devices


def test_the_last_checkpoints_play_first(few_games, tmp_path, monkeypatch):
    ours = make_race(few_games, SMALL, f"{SMALL}:eager:1", count=9, minutes=0.005, grid=(0.1, 0.2))
    open_race(ours, tmp_path)
    for contender in ours.contenders:
        train(ours, contender, tmp_path)
    given = []
    monkeypatch.setattr(race, "play_jobs", lambda jobs, **settings: given.extend(jobs) or iter(()))
    run_race(ours, tmp_path, threads=1, processes=1, timeout=60)
    whose = [contender.name for contender in ours.contenders for _ in range(2)]  # nine games are two calls of the model
    order = [(name, at) for at in (0.3, 0.2, 0.1) for name in whose]
    assert [(job.key["contender"], job.key["at"]) for job in given] == order


def test_games_of_an_earlier_training_are_not_taken_for_those_of_a_new_one(finished):
    ours, folder, place = finished
    shutil.rmtree(place)
    (contender,) = ours.contenders
    train(ours, contender, folder)
    (job,) = race._jobs(ours, folder, contender)
    assert len((folder / race.GAMES).read_text().splitlines()) == 1
    assert Ledger(folder / race.GAMES).find(job.key, job.level, job.seeds) == {}


def test_contenders_join_a_race(few_games, finished):
    ours, folder, _ = finished
    without_checkpoints(folder)
    more = make_race(few_games, SMALL, f"{SMALL}:eager:1", minutes=0.005, grid=())
    open_race(more, folder)
    open_race(ours, folder)  # which takes nobody out
    _, joined = more.contenders
    train(more, joined, folder)
    keep_games(more, joined, folder)
    outcome = run_race(more, folder, threads=1, processes=1, timeout=60)
    assert [curve["name"] for curve in make_record(more, outcome).curves if curve["figure"] == "race"] == [
        contender.name for contender in more.contenders
    ]
    assert len(outcome.games) == 2
    other = make_race(few_games, f"{SMALL}:eager:1", minutes=0.005, grid=())
    (odd,) = other.contenders
    odd = dataclasses.replace(odd, config=dataclasses.replace(odd.config, batch=16))
    with pytest.raises(ConfigError, match=r"another race \(contenders\.boxing.*\.batch expected 16, got 8\)"):
        open_race(dataclasses.replace(other, contenders=(odd,)), folder)
    odd = dataclasses.replace(odd, name=odd.name.replace(":", "-"))
    with pytest.raises(ConfigError, match=r"has the folder of boxing.*-eager-1; choose another --out"):
        open_race(dataclasses.replace(other, contenders=(odd,)), folder)


def test_a_race_goes_on_under_another_device_but_not_on_another_kind_of_card(finished, monkeypatch):
    ours, folder, place = finished
    (contender,) = ours.contenders
    elsewhere = dataclasses.replace(contender, config=dataclasses.replace(contender.config, device="cuda:1"))
    moved = dataclasses.replace(ours, contenders=(elsewhere,))
    open_race(moved, folder)
    monkeypatch.setattr(race, "card", lambda config: "NVIDIA H200")
    points = (place / clocked.POINTS).read_text().splitlines(keepends=True)
    (place / clocked.POINTS).write_text(points[0])
    with pytest.raises(ConfigError, match=r"not those of another \(boxing.* on CPU, boxing.* on NVIDIA H200\)"):
        run_race(moved, folder, threads=1, processes=1, timeout=60)
