"""What a search is after, what its trials came to, and which of them is best."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ridgeline.errors import ConfigError

if TYPE_CHECKING:
    import optuna


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What a search is after: "loss" or "ko", and the value to reach; None for as good as the time allows."""

    kind: str
    value: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("loss", "ko"):
            raise ConfigError(f"a target is loss, ko, loss=NUMBER or ko=SHARE, got {self.kind!r}")
        top, limits = (sys.float_info.max, "above 0") if self.kind == "loss" else (1.0, "above 0, at most 1")
        if self.value is not None and not 0 < self.value <= top:
            raise ConfigError(f"the target {self.kind}={self.value:g} is none; give a finite number {limits}")

    @classmethod
    def parse(cls, text: str) -> Goal:
        """From "loss", "loss=1.6", "ko" or "ko=0.9".

        Raises:
            ConfigError: it is none of these.
        """
        kind, equals, value = text.partition("=")
        try:
            return cls(kind=kind, value=float(value) if equals else None)
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"a target is loss, ko, loss=NUMBER or ko=SHARE, got {text!r}") from error

    def short_of(self, quality: float) -> float:
        """How far a quality is from the target, as a share of it; 0 or less where it is reached."""
        assert self.value is not None
        return (quality - self.value) / self.value if self.kind == "loss" else (self.value - quality) / self.value


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One candidate and what came of it.

    Attributes:
        number: of the trial.
        params: what it chose.
        state: "complete", "pruned" (left early because others were better), "refused" (never trained) or "failed".
        reason: of a refusal or failure.
        predicted_tokens_per_s: at the floor of the cost model; None for a failure before that.
        tokens_per_s: measured.
        seconds: training time until the target was held; None where it was not, or there is none.
        crossing: the same by a straight line between the points around it, which tells trials apart that hold the
            target from the same point on.
        quality: loss or knockout rate at its last point; None before the first.
        path: (training seconds, quality) by point.
        folder: where it was trained, on the machine that did.
        wall_s: seconds from its start to its end, set-up and validations included.
    """

    number: int
    params: Mapping[str, Any]
    state: str
    reason: str | None = None
    predicted_tokens_per_s: float | None = None
    tokens_per_s: float | None = None
    seconds: float | None = None
    crossing: float | None = None
    quality: float | None = None
    path: tuple[tuple[float, float], ...] = ()
    folder: str | None = None
    wall_s: float | None = None


def trials_of(study: optuna.Study) -> list[Trial]:
    """The trials that have ended, by number."""
    found = []
    for frozen in study.get_trials(deepcopy=False):
        if not frozen.state.is_finished():
            continue
        attrs = frozen.user_attrs
        state = {"COMPLETE": "complete", "FAIL": "failed"}.get(frozen.state.name, "pruned")
        state = "refused" if "refused" in attrs else state
        failure = attrs.get("failed", "cut off") if state == "failed" else None
        path = tuple((float(s), float(q)) for s, q in attrs.get("path", ()))
        found.append(
            Trial(
                number=frozen.number,
                params=dict(frozen.params),
                state=state,
                reason=attrs.get("refused", failure),
                predicted_tokens_per_s=attrs.get("predicted"),
                tokens_per_s=attrs.get("measured"),
                seconds=attrs.get("reached"),
                crossing=attrs.get("crossing", attrs.get("reached")),
                quality=path[-1][1] if path else None,
                path=path,
                folder=attrs.get("folder"),
                wall_s=attrs.get("wall_s"),
            )
        )
    return found


def best_of(trials: list[Trial], goal: Goal) -> Trial | None:
    """The complete trial that reached the target soonest, else the one of the best quality; None without any."""
    complete = [trial for trial in trials if trial.state == "complete" and trial.quality is not None]
    return min(complete, key=lambda trial: rank(goal.kind, trial.crossing, trial.quality), default=None)


def rank(kind: str, crossing: float | None, quality: float | None) -> tuple[float, float]:
    """What sorts trials, the best first: when the target was crossed, then quality."""
    return math.inf if crossing is None else crossing, (quality or 0.0) * (1 if kind == "loss" else -1)


def front(trials: list[Trial], goal: Goal) -> list[tuple[float, float, int]]:
    """By training time which trial was best so far: (seconds, quality, number), each better than all before it."""
    sign = 1 if goal.kind == "loss" else -1
    found: list[tuple[float, float, int]] = []
    for seconds, quality, number in sorted((s, q, t.number) for t in trials for s, q in t.path):
        if not found or sign * quality < sign * found[-1][1]:
            found.append((seconds, quality, number))
    return found


def choice(params: Mapping[str, Any]) -> str:
    """What a trial chose, in words."""
    short = {name: f"{value:.2g}" if isinstance(value, float) else value for name, value in params.items()}
    return ", ".join(f"{name} {value}" for name, value in short.items())


def choices_apart(params: Sequence[Mapping[str, Any]]) -> tuple[str, list[str]]:
    """What several trials chose alike, and what each chose besides, in words; of one trial all is its own."""
    first = params[0] if len(params) > 1 else {}
    alike = {name for name, value in first.items() if all(each.get(name) == value for each in params)}
    own = [choice({name: value for name, value in each.items() if name not in alike}) for each in params]
    return choice({name: value for name, value in first.items() if name in alike}), own


def states_of(states: Sequence[str]) -> str:
    """How many trials came to which end, in words."""
    return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)) + " (… was left early)"
