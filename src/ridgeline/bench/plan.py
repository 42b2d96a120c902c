"""How long a benchmark takes, and for what."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long a run takes.

    Attributes:
        rounds: turns of each contender; even, so that each order occurs equally often.
        steps: timed steps of a turn, at least.
        turn_s: shortest turn, in seconds: quick steps are timed until it is full.
        warm_s: longest warm-up of a contender, in seconds.
        build_s: longest time until a contender is ready, in seconds, compilation included.
        group_s: longest time of a group, in seconds; contenders that would take it beyond run in a further one.
        phases: steps over which phases are measured, in a program of its own after the turns; 0 to leave them out.
        profile: steps that are profiled for overlap and kernel times, last of all; 0 to leave them out.
        together: start all contenders at once. Quicker, but first-step times are then not measured.
    """

    rounds: int = 6
    steps: int = 20
    turn_s: float = 0.4
    warm_s: float = 10.0
    build_s: float = 300.0
    group_s: float = 600.0
    phases: int = 10
    profile: int = 3
    together: bool = False

    def __post_init__(self) -> None:
        if self.rounds < 2 or self.rounds % 2 or self.steps < 2:
            raise ConfigError(f"a run needs an even number of rounds and ≥ 2 steps, got {self.rounds} and {self.steps}")


CPU_PLAN = Plan(rounds=4, steps=5, turn_s=0.0, warm_s=5.0, phases=3, profile=0)
