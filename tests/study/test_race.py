"""Races: the clock, what is taken back, going on, who is strong from when on."""

import dataclasses
import itertools
import json
import time

import pytest
import torch

from ridgeline import checkpoint
from ridgeline.data.loader import Validation
from ridgeline.engine import TrainStep
from ridgeline.errors import ConfigError, RidgelineError, UnsupportedError, WorkerError
from ridgeline.play import GameResult
from ridgeline.records import from_json, read_record, to_json, write_record
from ridgeline.study import clocked, race
from ridgeline.study.clocked import Point, Task, checkpoint_name, grid_until, read_points, train_on_clock
from ridgeline.study.outcome import TARGETS, Standing, crossings, make_record, reached_at, verdict
from ridgeline.study.race import Watcher, open_race, run_race
from ridgeline.study.racers import find_racers
from ridgeline.train.settings import read_toml, to_dict
from ridgeline.train.validate import Evaluation
from study.race_helpers import SMALL, make_race, racers


def test_contenders_carry_engine_and_seed(few_games):
    one, two = racers(few_games, SMALL, f"{SMALL}:compile:7")
    assert (one.config.engine, one.config.seed, two.config.engine, two.config.seed) == ("eager", 0, "compile", 7)
    assert (one.config.model.decoder.width, one.config.minutes, one.config.steps) == (32, 0.02, None)
    assert one.folder != two.folder
    assert "/" not in two.folder + one.folder


@pytest.mark.parametrize(
    ("words", "error", "says"),
    [
        ([], ConfigError, "a race needs contenders"),
        (["boxin"], ConfigError, "unknown preset 'boxin'; did you mean boxing"),
        (["boxing:bset"], ConfigError, "unknown engine 'bset'; did you mean best"),
        (["boxing:eager:x"], ConfigError, "is no contender"),
        (["boxing:eager:1:2"], ConfigError, "is no contender"),
        (["boxing", "boxing"], ConfigError, "boxing takes part twice; give it another seed"),
        (["boxing:graph"], UnsupportedError, "needs a GPU"),
        (["nowhere.toml"], ConfigError, "cannot be read"),
    ],
)
def test_contenders_that_cannot_be(few_games, words, error, says):
    with pytest.raises(error, match=says):
        racers(few_games, *words)


def test_more_cards_than_there_are_are_refused(few_games):
    with pytest.raises(ConfigError, match="gpus must be 1"):
        find_racers(
            ["boxing"], few_games, {"data": str(few_games.path), "minutes": 1.0}, gpus=torch.cuda.device_count() + 2
        )


def test_the_grid_begins_at_zero_and_ends_with_the_training():
    assert grid_until(60.0, (30, 10, 10, 60, 90)) == (0.0, 10.0, 30.0, 60.0)


def test_training_by_the_clock_leaves_checkpoints_and_goes_on(few_games, tmp_path):
    (contender,) = racers(few_games, SMALL)
    task = Task(to_dict(contender.config), str(tmp_path / "one"), (0.0, 0.4, 0.8, 1.2), 1)
    training = train_on_clock(task)
    seen = []
    while len(seen) < 2:  # and then it is stopped
        point = next(training)
        seen += [point] if point else []
    training.close()
    assert [point.at for point in seen] == [0.0, 0.4]
    seen += [point for point in train_on_clock(task) if point]
    assert [point.at for point in seen] == [0.0, 0.4, 0.8, 1.2]
    assert seen == read_points(tmp_path / "one")
    for before, after in itertools.pairwise(seen):
        assert after.at <= after.seconds < after.at + 0.4
        assert before.steps < after.steps
        assert after.tokens == 8 * after.samples == 64 * after.steps
    assert seen[-1].val_loss < seen[0].val_loss
    assert seen[0].train_loss is None
    saved = checkpoint.load(tmp_path / "one" / checkpoint_name(1.2))
    assert (saved.meta["step"], saved.meta["data"]["position"]) == (seen[-1].steps, seen[-1].samples)


def test_the_clock_waits_for_its_turn(few_games, tmp_path):
    (contender,) = racers(few_games, SMALL)
    called = []

    def ready():
        called.append(len(read_points(tmp_path / "one")))
        time.sleep(0.5)

    task = Task(to_dict(contender.config), str(tmp_path / "one"), (0.0, 0.2), 1)
    first, last = (point for point in train_on_clock(task, ready) if point)
    assert called == [1]  # the start is there, nothing else
    assert first.seconds == 0
    assert 0.2 <= last.seconds < 0.6


def test_lanes_are_settled_before_the_clock_starts_and_kept_from_then_on(few_games, tmp_path, monkeypatch):
    (contender,) = racers(few_games, SMALL)
    asked = []

    def measure(config, batches):
        asked.append((config.lanes, batches.position))
        if config.lanes == 0:
            time.sleep(0.5)
        return dataclasses.replace(config, lanes=1), "1 lane of 1 lane 1.25 ms, 2 lanes 2.5 ms"

    monkeypatch.setattr(clocked, "settle_lanes", measure)
    task = Task(to_dict(contender.config), str(tmp_path / "one"), (0.0, 0.2, 0.4), 1)
    training = train_on_clock(task)
    start, point = itertools.islice((point for point in training if point), 2)
    training.close()
    assert min(start.setup_s, point.setup_s) >= 0.5
    assert 0.2 <= point.seconds < 0.5
    assert read_toml(tmp_path / "one" / "config.toml")["lanes"] == 1
    assert checkpoint.load(tmp_path / "one" / checkpoint_name(0.2)).meta["config"]["lanes"] == 1
    list(train_on_clock(task))
    assert asked == [(0, 0), (1, 0)]
    machines = clocked.read_machines(tmp_path / "one")
    assert [line["lanes"] for line in machines] == ["1 lane of 1 lane 1.25 ms, 2 lanes 2.5 ms"] * 2
    assert [line["from"] for line in machines] == [0, point.seconds]


def test_a_training_that_began_before_lanes_were_settled_goes_on_with_one(few_games, tmp_path):
    (contender,) = racers(few_games, SMALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clocked, "settle_lanes", lambda config, batches: (config, ""))
        clocked._Clocked(contender.config, tmp_path).leave(0.0)
    begin = tmp_path / checkpoint_name(0.0)
    assert checkpoint.load(begin).meta["config"]["lanes"] == 0
    assert clocked._as_begun(contender.config, begin).lanes == 1
    two = dataclasses.replace(contender.config, lanes=2)
    assert clocked._as_begun(two, begin) == two


def test_the_steps_that_prepare_are_taken_back(few_games, tmp_path):
    (contender,) = racers(few_games, f"{SMALL}:eager:3")
    run = clocked._Clocked(contender.config, tmp_path)
    run.leave(0.0)
    before = checkpoint.load(tmp_path / checkpoint_name(0.0))
    run.prepare(before.path)
    assert run.setup_s > 0
    assert run.batches.position == 0
    for name, tensor in before.group("model").items():
        assert (run.model.state_dict()[name] == tensor).all()
    assert not run.step.metrics() or run.progress.step == 0
    run.leave(0.0)
    again = checkpoint.load(before.path)
    assert again.tensors.keys() == before.tensors.keys()
    assert all((again.tensors[name] == tensor).all() for name, tensor in before.tensors.items())


@pytest.mark.slow
def test_a_race_goes_on_where_games_were_lost(few_games, tmp_path, monkeypatch):
    ours = make_race(few_games, SMALL, f"{SMALL}:eager:1", grid=())
    open_race(ours, tmp_path)

    def dies(jobs, ledger, **settings):
        result = GameResult(seed=5_000, level=0, dealt=3, taken=1, knockout=0, steps=9, decision_s=0.1)
        ledger.add(jobs[0].key, result)
        yield 0, result
        raise WorkerError("the process died")

    monkeypatch.setattr(race, "play_jobs", dies)
    with pytest.raises(WorkerError, match="died"):
        run_race(ours, tmp_path, threads=1, processes=1, timeout=60)
    monkeypatch.undo()
    counts, points = [], []
    watcher = Watcher(lambda name, point: points.append(point), lambda done, total: counts.append((done, total)))
    open_race(ours, tmp_path)
    outcome = run_race(ours, tmp_path, threads=1, processes=1, timeout=60, watcher=watcher)
    assert counts == [(0, 2), (1, 2), (2, 2)]
    assert len(points) == 4
    assert [(game.contender, game.at, game.result.seed) for game in outcome.games] == [
        (contender.name, 1.2, 5_000) for contender in sorted(ours.contenders, key=lambda c: c.name)
    ]
    assert outcome.games[0].result.dealt == 3  # the game that was finished before the other was lost
    again = run_race(ours, tmp_path, threads=1, processes=1, timeout=60)
    assert again == outcome
    record = read_record(write_record(make_record(ours, outcome), tmp_path / "record.json"))
    assert from_json(to_json(record)) == record
    assert [entry.name for entry in record.contenders] == [contender.name for contender in ours.contenders]
    names = [contender.name for contender in ours.contenders]
    for figure in ("strength", "margin"):
        drawn = [curve for curve in record.curves if curve["figure"] == figure]
        assert [curve["name"] for curve in drawn] == names
        for curve in drawn:
            assert len(curve["x"]) == 1
            assert curve["low"] <= curve["y"] <= curve["high"]


@pytest.mark.slow
def test_a_training_that_diverges_ends_and_the_race_goes_on(few_games, tmp_path, monkeypatch):
    ours = make_race(few_games, f"{SMALL}+optimizer.lr=1e30", SMALL, grid=())
    open_race(ours, tmp_path)
    odd, sound = ours.contenders
    outcome = run_race(ours, tmp_path, threads=1, processes=1, timeout=60)
    assert set(outcome.failures) == {odd.name}
    assert [point.at for point in outcome.points[odd.name]] == [0.0]
    assert {(game.contender, game.at) for game in outcome.games} == {(sound.name, 1.2)}
    record = read_record(write_record(make_record(ours, outcome), tmp_path / "record.json"))
    assert record.result(odd.name).error == outcome.failures[odd.name]
    assert record.result(sound.name).error is None
    monkeypatch.setattr(race, "train_on_clock", None)  # it is not tried again
    assert run_race(ours, tmp_path, threads=1, processes=1, timeout=60) == outcome


def test_a_folder_of_something_else_is_refused(few_games, tmp_path):
    ours = make_race(few_games, SMALL)
    open_race(ours, tmp_path / "a")
    open_race(ours, tmp_path / "a")
    assert str(few_games.path) not in (tmp_path / "a" / "race.json").read_text()
    other = dataclasses.replace(ours, games=dataclasses.replace(ours.games, level=3))
    with pytest.raises(ConfigError, match=r"holds another race \(games.level expected 3, got 0\)"):
        open_race(other, tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "letter.txt").write_text("dear")
    with pytest.raises(ConfigError, match="holds no race"):
        open_race(ours, tmp_path / "b")
    (tmp_path / "a" / "race.json").write_text("{")
    with pytest.raises(ConfigError, match="is damaged"):
        open_race(ours, tmp_path / "a")


DAMAGED = ("3", "null", '"x"', "[1]", "[[]]", "{}", "{", 200_000 * "[")


@pytest.mark.parametrize("line", [*DAMAGED, '{"at": 0.0}', '{"at": "x"}'])
def test_damaged_points_are_named(tmp_path, line):
    (tmp_path / clocked.POINTS).write_text(f"{line}\n")
    with pytest.raises(RidgelineError, match=r"points\.jsonl is damaged \(.*; delete .* and train this contender anew"):
        read_points(tmp_path)


@pytest.mark.parametrize("line", [*DAMAGED, {"date": 3}, {"date": "today"}, {"date": "2026-01-01"}, {"card": []}])
def test_damaged_machines_are_named(tmp_path, line):
    whole = {"date": "2026-01-01T00:00:00+00:00", "git": None, "card": "CPU", "versions": {}}
    text = line if isinstance(line, str) else json.dumps({**whole, **line})
    (tmp_path / clocked.MACHINES).write_text(f"{json.dumps(whole)}\n{text}\n")
    with pytest.raises(RidgelineError, match=r"machines\.jsonl is damaged \(.*; delete .* and train this contender"):
        clocked.read_machines(tmp_path)


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_race_is_named(few_games, tmp_path, text):
    (tmp_path / race.RACE).write_text(text)
    with pytest.raises(ConfigError, match=r"race\.json is damaged \(.*; choose another --out"):
        open_race(make_race(few_games, SMALL), tmp_path)


def path_of(*wins):
    point = Point(
        at=0.0, seconds=0.0, steps=1, samples=1, tokens=1, train_loss=0.5, val_loss=0.5, setup_s=0.0, checkpoint="0"
    )
    return [
        Standing(
            point=dataclasses.replace(point, at=10.0 * place, seconds=10.0 * place + 1),
            strength={"wins": won, "ko": won // 2, "games": 30},
        )
        for place, won in enumerate(wins, start=1)
    ]


def test_a_target_is_reached_from_when_on_it_holds():
    wins, ko = TARGETS
    assert (wins.least(30), ko.least(30), wins.least(10), ko.least(1)) == (26, 27, 9, 1)
    assert reached_at(path_of(3, 26, 30), wins) == 21
    assert reached_at(path_of(27, 25, 26), wins) == 31  # it had fallen back
    assert reached_at(path_of(30, 30, 25), wins) is None
    rows = crossings({"a": path_of(3, 26, 30)})
    assert rows == [
        {"contender": "a", "target": "26 of 30 won", "seconds": 21},
        {"contender": "a", "target": "27 of 30 by knockout", "seconds": None},
    ]


def test_games_that_were_not_played_are_neither_won_nor_lost():
    wins, _ = TARGETS
    path = path_of(27, 28, 13, 29)
    for standing, played in zip(path, (30, 29, 13, 30), strict=True):
        standing.strength["games"] = played
    path = [dataclasses.replace(standing, missing=30 - standing.strength["games"]) for standing in path]
    assert [verdict(standing, wins) for standing in path] == [True, True, None, True]
    assert reached_at(path, wins) == 11
    assert crossings({"a": path})[0]["open"] == [31]
    path[2].strength["wins"] = 8  # all of the other seventeen would not be enough
    assert (verdict(path[2], wins), reached_at(path, wins)) == (False, 41)


def test_a_captured_validation_sees_what_the_clock_does(few_games, tmp_path, monkeypatch):
    """It is captured at the start, before any step is, and the steps that prepare are taken back behind it."""
    (contender,) = racers(few_games, SMALL)
    length = dataclasses.replace(contender.config, minutes=None, steps=12)
    monkeypatch.setattr(
        clocked,
        "make_step",
        lambda model, config: TrainStep(
            model, optimizer=config.optimizer, steps=12, precision="bf16", capture=lambda run: run
        ),
    )
    run = clocked._Clocked(length, tmp_path)
    plain = Evaluation(run.step, Validation(run.data, length.window, batch=length.batch), run.device, capture=False)
    found = [run.leave(0.0).val_loss]
    run.prepare(tmp_path / checkpoint_name(0.0))
    found += [run.evaluation(), plain()]
    assert len(set(found)) == 1
    for _ in range(2):
        run._learn()
        found.append(run.evaluation())
        assert found[-1] == plain()
    assert len(set(found)) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["eager", "best"])
def test_on_a_card_the_batches_are_the_hosts_and_preparing_is_taken_back(few_games, tmp_path, engine):
    wide = SMALL.replace("width=32", "width=64")
    settings = {"data": str(few_games.path), "minutes": 0.02, "device": "cuda", "precision": "fp32"}
    (contender,) = find_racers([f"{wide}:{engine}"], few_games, settings)
    losses = []
    for drawn in (True, False):
        run = clocked._Clocked(contender.config, tmp_path / str(drawn))
        assert run.resident is not None
        assert (run.config.lanes in (1, 2), " ms" in run.lanes) == (True, engine == "best")
        if not drawn:
            run.resident = None
        run.leave(0.0)
        run.prepare(tmp_path / str(drawn) / checkpoint_name(0.0))
        for _ in range(3):
            run._learn()
            run.progress.step += 1
        losses.append([entry.loss for entry in run.step.metrics(0)[-3:]])
        assert run.batches.position == 24
    assert len(losses[0]) == 3
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("model", [SMALL, "hal-20m+layers=1+window.context=64+context=64+batch=16"])
@pytest.mark.parametrize("engine", ["best", "graph"])
def test_on_a_card_a_policy_is_validated_captured_as_call_by_call(few_games, tmp_path, model, engine):
    """Before the first step, behind those that are taken back, and while it trains."""
    wide = model.replace("width=32", "width=64")
    settings = {"data": str(few_games.path), "minutes": 0.02, "device": "cuda", "precision": "bf16"}
    (contender,) = find_racers([f"{wide}:{engine}"], few_games, settings)
    run = clocked._Clocked(contender.config, tmp_path)
    validation = Validation(run.data, run.config.window, batch=run.config.batch)
    plain = Evaluation(run.step, validation, run.device, capture=False)
    captured = Evaluation(run.step, validation, run.device)
    pairs = [(captured(), plain())]
    run.leave(0.0)
    run.prepare(tmp_path / checkpoint_name(0.0))
    pairs.append((captured(), plain()))
    for _ in range(3):
        run._learn()
        run.progress.step += 1
        pairs.append((captured(), plain()))
    assert all(one == other for one, other in pairs)
    assert pairs[0] == pairs[1]
    assert len({one for one, _ in pairs}) == 4
    assert run.progress.step == run.step.taken
