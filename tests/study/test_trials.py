"""Trials: what is asked of them, and which of them is best."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from ridgeline.errors import ConfigError
from ridgeline.presets import find_config
from ridgeline.study import search as module
from ridgeline.study.clocked import Point
from ridgeline.study.floors import this_machine
from ridgeline.study.search import Search, _Attempt
from ridgeline.study.trials import Goal, best_of, choices_apart, front, rank
from ridgeline.train.settings import override
from study.search_helpers import trial


def test_goals() -> None:
    assert Goal.parse("loss=1.6") == Goal(kind="loss", value=1.6)
    assert Goal.parse("ko") == Goal(kind="ko")
    assert Goal(kind="loss", value=2.0).short_of(2.5) == pytest.approx(0.25)
    assert Goal(kind="ko", value=0.8).short_of(0.6) == pytest.approx(0.25)
    for wrong in ("ko=1.5", "loss=-1", "loss=low", "wins=0.5", "loss=", "loss=inf", "loss=nan"):
        with pytest.raises(ConfigError):
            Goal.parse(wrong)


def test_what_all_trials_chose_alike_is_told_once() -> None:
    first, second = {"layers": 2, "width": 64, "lr": 0.0012}, {"layers": 3, "width": 64, "lr": 0.0012}
    assert choices_apart([first, second]) == ("width 64, lr 0.0012", ["layers 2", "layers 3"])
    assert choices_apart([first, {"width": 64}]) == ("width 64", ["layers 2, lr 0.0012", ""])
    assert choices_apart([first]) == ("", ["layers 2, width 64, lr 0.0012"])
    assert choices_apart([]) == ("", [])


def test_best_reached_the_target_soonest() -> None:
    goal = Goal(kind="loss", value=2.0)
    trials = [trial(0, (9.0, 1.2)), trial(1, (9.0, 1.9), seconds=8.0), trial(2, (9.0, 1.95), seconds=5.0)]
    assert best_of([*trials, trial(3, (9.0, 1.0), seconds=1.0, state="pruned")], goal) is trials[2]
    assert best_of(trials[:1], goal) is trials[0]
    assert best_of([], goal) is None
    assert best_of([trial(0, (9.0, 0.2)), trial(1, (9.0, 0.8))], Goal(kind="ko")).number == 1  # type: ignore[union-attr]


def test_front_is_who_leads_by_when() -> None:
    trials = [trial(0, (1.0, 3.0), (2.0, 2.0), (3.0, 1.0)), trial(1, (1.0, 2.5), (2.0, 2.4), (3.0, 2.3))]
    assert front(trials, Goal(kind="loss")) == [(1.0, 2.5, 1), (2.0, 2.0, 0), (3.0, 1.0, 0)]


def point(seconds: float, loss: float) -> Point:
    return Point(
        at=seconds, seconds=seconds, steps=round(10 * seconds), samples=1, tokens=1, train_loss=None, val_loss=loss,
        setup_s=0.0, checkpoint="",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("losses", "crossed"),
    [
        ((4.0, 1.0, 0.9), 0.1 * 2 / 3),  # two thirds of the way from 4 to 1
        ((4.0, 1.9, 0.9), 0.1 * 2 / 2.1),
        ((4.0, 3.0, 1.0, 0.9), 0.15),
        ((4.0, 1.0, 3.0, 2.0, 1.9), 0.3),  # the first time it was held for one point only
        ((1.9, 1.8, 1.7), 0.1),
    ],
)
def test_trials_that_hold_the_target_from_one_point_are_told_apart(
    tmp_path: Path, losses: tuple[float, ...], crossed: float
) -> None:
    base = override(find_config("gpt2-c256"), {"device": "cpu", "precision": "fp32"})
    plan = Search(base=base, space={}, goal=Goal(kind="loss", value=2.0), budget_s=10.0, trial_s=1.0)
    attempt = _Attempt(plan, tmp_path, this_machine(base), None, 10.0)  # type: ignore[arg-type]
    points = [point(n / 10, loss) for n, loss in enumerate(losses)]
    assert attempt._begins(points[0])
    assert not any(attempt._begins(one) for one in points[1:])
    assert [attempt._reaches(one, one.val_loss) for one in points[1:]] == [False] * (len(points) - 2) + [True]
    assert attempt._value() == attempt.crossing == pytest.approx(crossed)
    assert attempt.reached == pytest.approx((len(losses) - 2) / 10)
    assert rank("loss", 0.5, 1.9) < rank("loss", 0.6, 1.0) < rank("loss", None, 0.5)


@pytest.mark.parametrize(
    ("target", "won", "lots", "rate"),
    [(0.9, [13, 14], [16, 14], 0.9), (0.9, [12], [16], 0.75), (0.4, [0], [16, 14], 0.0), (None, [3, 6], [16, 14], 0.3)],
)
def test_games_that_cannot_change_the_verdict_are_not_played(
    monkeypatch: pytest.MonkeyPatch, target: float | None, won: list[int], lots: list[int], rate: float
) -> None:
    """27 of 30 are asked for: three losses among the first 16 leave that open, four do not."""
    asked: list[tuple[int, int]] = []

    def played(checkpoint: Path, games: int, *, first_seed: int, processes: int) -> SimpleNamespace:
        asked.append((first_seed, games))
        return SimpleNamespace(summary=lambda: {"ko": [*won, 0][len(asked) - 1]})

    monkeypatch.setattr(module, "evaluate", played)
    assert module._knockouts(Path(), Goal(kind="ko", value=target)) == pytest.approx(rate)
    assert asked == [(5_000, 16), (5_016, 14)][: len(lots)]
