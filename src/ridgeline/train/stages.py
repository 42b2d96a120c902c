"""Stages of a run: batch and context may change on the way, each with windows of its own and, on a card, its own graph.

Everything about a stage is a function of the step's number: which one it is, and which samples the step learns from
(those from step · batch on in the shuffle of the stage's windows). So a run can stop and go on anywhere.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import NamedTuple

from ridgeline.data.games import GameData
from ridgeline.data.loader import Batches
from ridgeline.data.resident import ResidentBatches
from ridgeline.data.text import TextData
from ridgeline.engine import TrainStep
from ridgeline.errors import ConfigError
from ridgeline.train.config import TrainConfig
from ridgeline.train.engines import resident_batches
from ridgeline.train.step import Step


class Stage(NamedTuple):
    """Steps of one batch and context: those before step `end` that no earlier stage has."""

    end: int
    batch: int
    context: int


def stages_of(config: TrainConfig) -> tuple[Stage, ...]:
    """The stages of a run in order; the last one has the config's own batch and context."""
    last = Stage(config.total_steps or sys.maxsize, config.batch, config.window.context)
    earlier = [Stage(round(share * last.end), batch, context) for share, batch, context in config.stages]
    return (*earlier, last)


def tokens_until(config: TrainConfig, steps: int) -> int:
    """Positions that the first `steps` steps of a run learn from."""
    tokens = done = 0
    for stage in stages_of(config):
        taken = min(steps, stage.end) - done
        if taken <= 0:
            break
        tokens, done = tokens + taken * stage.batch * stage.context, done + taken
    return tokens


class Course:
    """A run's batches, stage by stage.

    Args:
        config: the run, resolved.
        data: what it trains on.
        rank: number of this process.
        world: processes that train together.
    """

    def __init__(self, config: TrainConfig, data: TextData | GameData, *, rank: int = 0, world: int = 1) -> None:
        self.stages = stages_of(config)
        self._batches = [
            Batches(
                data,
                dataclasses.replace(config.window, context=stage.context),
                batch=stage.batch,
                seed=config.seed,
                rank=rank,
                world=world,
            )
            for stage in self.stages
        ]
        for batches in self._batches:
            if batches.share % config.accumulation:
                raise ConfigError(
                    f"accumulation={config.accumulation} does not divide the {batches.share} windows of a process"
                )
        self._residents: list[ResidentBatches | None] = [None] * len(self.stages)
        self._now = 0

    @property
    def stage(self) -> Stage:
        """The stage of the next step."""
        return self.stages[self._now]

    @property
    def batches(self) -> Batches:
        """The batches of the stage."""
        return self._batches[self._now]

    @property
    def resident(self) -> ResidentBatches | None:
        """The same, as the card draws them; None where the host brings them."""
        return self._residents[self._now]

    @property
    def last(self) -> Batches:
        """The batches of the last stage."""
        return self._batches[-1]

    def enter(self, step: int) -> bool:
        """Make ready for step number `step`, which only ever rises, and say whether its stage is a new one."""
        before = self._now
        while step >= self.stage.end and self._now + 1 < len(self.stages):
            self._now += 1
            self.batches.position = step * self.batches.batch
        return self._now > before

    def settle(self, config: TrainConfig, step: Step, done: int) -> None:
        """Put the data of what is left of a run on the card, where it can lie there, and make the step ready for it.

        Args:
            config: of the run.
            step: which learns from the batches.
            done: steps that the run has taken.
        """
        drawn = self.batches.position == done * self.batches.batch  # the card draws by the number of the step
        for index in range(self._now, len(self.stages)):
            batches = self._batches[index]
            resident = self._residents[index] = resident_batches(config, step, batches) if drawn else None
            if isinstance(step, TrainStep):
                step.prepare(resident or batches.peek())
