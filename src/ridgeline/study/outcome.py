"""What a race says: strength by time with intervals, and from when on a contender is strong enough."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from ridgeline.play import Evaluation
from ridgeline.records import ContenderResult, Record
from ridgeline.study.circumstances import CPU, machine, workload
from ridgeline.study.clocked import Point
from ridgeline.study.race import Outcome, Race


@dataclass(frozen=True)
class Target:
    """A strength that is good enough: a share of the games that is won, or won by knockout."""

    figure: str
    share: float

    def words(self, games: int) -> str:
        """For people."""
        least = self.least(games)
        return f"{least} of {games} won" if self.figure == "wins" else f"{least} of {games} by knockout"

    def least(self, games: int) -> int:
        """The fewest of so many games that reach it."""
        return -int(-self.share * games // 1)


TARGETS = (Target("wins", 26 / 30), Target("ko", 0.9))


@dataclass(frozen=True, kw_only=True)
class Standing:
    """A contender at a time: how it got there and how it plays.

    Attributes:
        point: how far it was.
        strength: see `ridgeline.play.Evaluation.summary`; of the games that were played.
        missing: games that were not played. Those that were are then no sample of all: quick knockouts end first.
    """

    point: Point
    strength: dict[str, Any]
    missing: int = 0

    def to_json(self) -> dict[str, Any]:
        """For a record."""
        return {**asdict(self.point), **self.strength}


def standings(race: Race, outcome: Outcome) -> dict[str, list[Standing]]:
    """By contender, in order of time, from the first checkpoint behind the start on."""
    found: dict[str, list[Standing]] = {}
    for contender in race.contenders:
        found[contender.name] = []
        for point in outcome.points[contender.name][1:]:  # at the first nothing was trained and nothing played
            results = [g.result for g in outcome.games if (g.contender, g.at) == (contender.name, point.at)]
            strength = Evaluation(level=race.games.level, results=tuple(results)).summary()
            for name in ("seconds", "games_per_s"):  # of the games of one checkpoint alone there is no such time
                del strength[name]
            missing = race.games.count - len(results)
            found[contender.name].append(Standing(point=point, strength=strength, missing=missing))
    return found


def verdict(standing: Standing, target: Target) -> bool | None:
    """Whether a contender is strong enough at a time; None where the games that were not played decide."""
    reached, played = standing.strength[target.figure], standing.strength["games"]
    least = target.least(played + standing.missing)
    return None if reached < least <= reached + standing.missing else reached >= least


def reached_at(path: Sequence[Standing], target: Target) -> float | None:
    """Seconds of training from which on the target is reached at every checkpoint that decides; None for never.

    Between the checkpoint before and this one it was reached at some time that the grid does not tell.
    """
    since = None
    for standing in path:
        enough = verdict(standing, target)
        if enough is False:
            since = None
        elif enough is None:
            continue
        elif since is None:
            since = standing.point.seconds
    return since


def crossings(table: Mapping[str, Sequence[Standing]]) -> list[dict[str, Any]]:
    """For every contender and target from when on it is reached: {"contender", "target", "seconds"}.

    "open" lists the seconds of checkpoints that did not play enough games to tell, where there are any.
    """
    found = []
    for name, path in table.items():
        for target in TARGETS if path else ():
            words = target.words(path[0].strength["games"] + path[0].missing)
            row = {"contender": name, "target": words, "seconds": reached_at(path, target)}
            unknown = [standing.point.seconds for standing in path if verdict(standing, target) is None]
            found.append({**row, "open": unknown} if unknown else row)
    return found


def make_record(race: Race, outcome: Outcome) -> Record:
    """The race as a record: a contender's speed, and curves of its strength."""
    table = standings(race, outcome)
    config = race.contenders[0].config
    curves: list[dict[str, Any]] = []
    for name, path in table.items():
        whole = [standing for standing in path if not standing.missing]
        if whole:
            curves += [_knockouts(name, whole), _margin(name, whole)]
        curves.append({"figure": "race", "name": name, "points": [standing.to_json() for standing in path]})
    curves.append({"figure": "crossings", "name": "crossings", "rows": crossings(table)})
    setting = {**race.to_json(), "machines": outcome.machines, "games_while": "training had ended"}
    curves.append({"figure": "setting", "name": "setting", **setting})
    began = [line for lines in outcome.machines.values() for line in lines] or [machine(config)]
    last = max(began, key=lambda line: datetime.fromisoformat(line["date"]))  # not this one, which may only have played
    return Record(
        kind="race",
        **{name: last[name] for name in ("date", "git", "card", "versions")},
        gpus=0 if last["card"] == CPU else len({contender.config.device for contender in race.contenders}),
        workload=workload(config, race.data),
        contenders=[_speed(name, path, outcome.failures.get(name)) for name, path in table.items()],
        curves=curves,
    )


def _knockouts(name: str, path: Sequence[Standing]) -> dict[str, Any]:
    """Share of the games won by knockout against seconds of training; wins alone say little, see docs/playing.md."""
    rows = [standing.strength for standing in path]
    share = {
        "y": [row["ko"] / row["games"] for row in rows],
        "low": [row["intervals"]["ko"][0] / row["games"] for row in rows],
        "high": [row["intervals"]["ko"][1] / row["games"] for row in rows],
    }
    return _curve("strength", name, path, share, "share won by knockout")


def _margin(name: str, path: Sequence[Standing]) -> dict[str, Any]:
    rows = [standing.strength for standing in path]
    points = {
        "y": [row["margin"] for row in rows],
        "low": [row["intervals"]["margin"][0] for row in rows],
        "high": [row["intervals"]["margin"][1] for row in rows],
    }
    return _curve("margin", name, path, points, "points a game ahead")


def _curve(
    figure: str, name: str, path: Sequence[Standing], values: Mapping[str, list[float]], label: str
) -> dict[str, Any]:
    """A curve in the form that reports draw."""
    x = [standing.point.seconds for standing in path]
    return {"figure": figure, "name": name, "x": x, **values, "x_label": "seconds of training", "y_label": label}


def _speed(name: str, path: Sequence[Standing], failure: str | None) -> ContenderResult:
    if not path:
        return ContenderResult(name=name, error=failure)
    last = path[-1].point
    return ContenderResult(
        name=name,
        tokens_per_s=last.tokens / last.seconds,
        windows_per_s=last.samples / last.seconds,
        step_ms=1e3 * last.seconds / last.steps,
        first_step_s=last.setup_s,
        error=failure,
    )
