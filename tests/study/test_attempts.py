"""One trial of a search: how its points are judged, when it ends, and what it costs in time."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest

from ridgeline.data.api import load_dataset
from ridgeline.errors import RidgelineError
from ridgeline.presets import find_config
from ridgeline.study import clocked
from ridgeline.study import search as module
from ridgeline.study.floors import this_machine
from ridgeline.study.search import Search
from ridgeline.study.space import default_space
from ridgeline.study.trials import Goal
from ridgeline.train.config import TrainConfig
from ridgeline.train.resolve import resolve
from ridgeline.train.settings import override
from study.search_helpers import SMALL, trial


class Told:
    """A trial of Optuna's that would leave every candidate early or none; keeps what it is told."""

    def __init__(self, prunes: bool = False) -> None:
        self.prunes = prunes
        self.said: list[float] = []

    def report(self, value: float, step: int) -> None:
        self.said.append(value)

    def should_prune(self) -> bool:
        return self.prunes

    def set_user_attr(self, key: str, value: object) -> None:
        pass


def point(val_loss: float) -> module.Point:
    return module.Point(
        at=1.0,
        seconds=1.0,
        steps=1,
        samples=1,
        tokens=1,
        train_loss=1.0,
        val_loss=val_loss,
        setup_s=0.0,
        checkpoint="0",
    )


def test_choices_made_before_come_to_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The points that are there already are judged like new ones; and no candidate's lanes are measured."""
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat and the rat ate the hat; " * 60, encoding="utf-8")
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    lanes = []

    def settle(config: TrainConfig, batches: object) -> tuple[TrainConfig, str]:
        lanes.append(config.lanes)
        return config, ""

    monkeypatch.setattr(clocked, "settle_lanes", settle)
    base = resolve(override(find_config(SMALL), {"data": str(text), "device": "cpu"}), load_dataset(str(text)))
    goal = Goal(kind="loss", value=20.0)
    plan = Search(base=base, space=default_space(base, games=False), goal=goal, budget_s=1.0, trial_s=0.5)

    config = dataclasses.replace(base, steps=None, tokens=None, minutes=0.5 / 60, eval_windows=2)
    attempts = [module._Attempt(plan, tmp_path, this_machine(base), Told(), 60.0) for _ in range(2)]  # type: ignore[arg-type]
    assert [attempt._train(config) for attempt in attempts] == [False, False]
    first, again = attempts
    assert first.reached is not None
    assert (again.reached, again.path, again._point) == (first.reached, first.path, first._point)
    assert (base.lanes, lanes) == (0, [1])


def test_time_that_is_not_training_counts(tmp_path: Path) -> None:
    """A trial is not begun where set-up and validations would carry it beyond the budget; the first one always is."""
    base = find_config(SMALL)
    plan = Search(base=base, space={}, goal=Goal(kind="loss"), budget_s=100.0, trial_s=10.0)
    ended = [dataclasses.replace(trial(n, (10.0, 2.0)), wall_s=wall) for n, wall in enumerate((25.0, 30.0, 90.0))]
    assert module._time_for_another(plan, [trial(0, state="refused")], 101.0)
    assert not module._time_for_another(plan, [trial(0, state="failed")], 90.1)
    assert module._time_for_another(plan, ended, 70.0)
    assert not module._time_for_another(plan, ended, 70.1)


def test_a_trial_of_endless_validations_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = override(find_config(SMALL), {"device": "cpu", "precision": "fp32", "engine": "eager"})
    plan = Search(base=base, space={}, goal=Goal(kind="loss"), budget_s=100.0, trial_s=10.0)
    now = iter(float(seconds) for seconds in (0, 5, 20, 36))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(now)))
    attempt = module._Attempt(plan, tmp_path, this_machine(base), None, left=100.0)  # type: ignore[arg-type]
    # ready in 5 s and 15 s a point: 140 s in all, a trial's training and 30 s beyond what was left
    for count in (1, 2):
        attempt.path = [(1.0, 1.0)] * count
        attempt._check_time()
    attempt.path.append((1.0, 1.0))
    with pytest.raises(RidgelineError, match="would take 144 s with its validations, 100 s of the budget were left"):
        attempt._check_time()


@pytest.mark.parametrize(
    ("losses", "ends"), [([1.6], [True]), ([1.4, 1.6], [False, True]), ([1.4, 1.4], [False, True])]
)
def test_what_has_reached_the_target_is_not_left_early(tmp_path: Path, losses: list[float], ends: list[bool]) -> None:
    """Others may be better at that time and yet have come there later; the next point tells whether it is held."""
    base = override(find_config(SMALL), {"device": "cpu", "precision": "fp32", "engine": "eager"})
    goal = Goal(kind="loss", value=1.5)
    plan = Search(base=base, space=default_space(base, games=False), goal=goal, budget_s=10.0, trial_s=5.0)
    attempt = module._Attempt(plan, tmp_path, this_machine(base), Told(prunes=True), 60.0)  # type: ignore[arg-type]
    assert [attempt._judge(point(loss), tmp_path) for loss in losses] == ends
    assert (attempt.reached is not None) == (losses == [1.4, 1.4])


def test_two_points_of_knockouts_hold_a_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Knockout rates are maximised: the study is told the negative, and one lucky point does not count."""
    rates = iter([0.95, 0.5, 0.95, 0.95])
    monkeypatch.setattr(module, "_knockouts", lambda checkpoint, goal: next(rates))
    base = override(find_config("boxing"), {"device": "cpu", "precision": "fp32", "engine": "eager"})
    goal = Goal(kind="ko", value=0.9)
    plan = Search(base=base, space=default_space(base, games=True), goal=goal, budget_s=10.0, trial_s=5.0)
    told = Told()
    attempt = module._Attempt(plan, tmp_path, this_machine(base), told, 60.0)  # type: ignore[arg-type]
    ended = [attempt._judge(point(1.0), tmp_path) for _ in range(4)]
    assert ended == [False, False, False, True]
    assert told.said == [-0.95, -0.5, -0.95]
