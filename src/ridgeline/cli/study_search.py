"""`ridgeline study search`."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table
from tyro.conf import arg

from ridgeline.cli.data import replay_shipped
from ridgeline.cli.output import Flag, parse
from ridgeline.data.api import load_dataset
from ridgeline.data.games import GameData
from ridgeline.errors import ConfigError
from ridgeline.presets import find_config
from ridgeline.study.folder import RECORD, keep_record, write_whole
from ridgeline.study.search import Search, SearchStoppedError, chosen_config, search
from ridgeline.study.search_record import search_record
from ridgeline.study.space import SETTINGS, default_space, narrowed
from ridgeline.study.trials import Goal, Trial, best_of, choice, choices_apart, front, rank, states_of
from ridgeline.train.resolve import resolve
from ridgeline.train.settings import override, to_toml

CHOSEN = "chosen.toml"
SHARE = 8  # trials that fit the budget where no trial time is given
INTERRUPTED = 130
UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
SHOWN, REASONS, REFUSED = 12, 3, 5  # trials of the table, reasons of an error, refusals told as they come
ABOUT = """Search for the model that does the job soonest on this machine.

Every trial trains for the same time by the clock, with its schedule over that time, and is validated on a grid. What
could not take enough steps in that time even at its floor by the cost model, or does not fit the card, is never
trained. The result is a table of trials, a front (which was best by when), and the chosen config as a file that
`ridgeline train --config` takes. Needs the extra `search` (Optuna); its dashboard reads the storage. Called again with
the same arguments it goes on; several machines may share a storage.

What --space can set:
{settings}

With --json the last line is {{"folder", "record", "chosen", "best", "trials", "front"}}."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Search for the model that does the job soonest on this machine.

    Attributes:
        base: preset or TOML file that candidates vary, with changes behind it: boxing+dropout=0.2. Must be given.
        data: what they train on; without it the base's.
        target: loss=1.6 or ko=0.9 to search for the shortest time to it; loss or ko for the best at a trial's end.
            Knockouts are of 30 games with seeds that no evaluation uses.
        budget: time of the whole search: 90s, 10m or 2h. One trial is always begun.
        trial: training time of a trial; without it an eighth of the budget.
        space: what to choose from, as NAME=VALUE,VALUE or lr=LOW:HIGH; without it around the base.
        least_steps: a candidate that cannot take so many steps in a trial is never trained.
        eval_windows: held-out windows a validation looks at, spread evenly, the same in every trial; 0 for all.
        storage: SQLAlchemy URL of a database that several machines share; without it a file in the folder.
        seed: of the search; machines that share a storage take different ones.
        device: where to train: cpu, cuda, cuda:N or auto.
        engine: how a step is run; see `ridgeline train --help`.
        precision: of training.
        out: folder of the search.
        json: print one JSON object as the last line.
    """

    base: str | None = None
    data: str | None = None
    target: str = "loss"
    budget: str = "10m"
    trial: str | None = None
    space: Annotated[tuple[str, ...], arg(metavar="NAME=VALUES…")] = ()
    least_steps: int = 100
    eval_windows: int = 128
    storage: str | None = None
    seed: int = 0
    device: str = "auto"
    engine: str = "auto"
    precision: str = "auto"
    out: Path = Path("runs/search")
    json: Flag = False


def run(arguments: Sequence[str]) -> int:
    """Search and print."""
    settings = "\n".join(f"- {name}: {about}" for name, about in SETTINGS.items())
    options = parse(Options, arguments, "study search", ABOUT.format(settings=settings))
    plan = _plan(options)
    said = Console(stderr=True)
    try:
        trials, code = search(plan, options.out, _Teller(said)), 0
    except (SearchStoppedError, KeyboardInterrupt) as stop:
        trials, code = stop.trials if isinstance(stop, SearchStoppedError) else [], INTERRUPTED
        said.print("stopped; the same command goes on from here")
    best = best_of(trials, plan.goal)
    if best is None and code:
        return code
    if best is None:
        raise ConfigError(_nothing(trials, plan.goal.kind))
    _tell(options, plan, trials, best)
    return code


def _tell(options: Options, plan: Search, trials: list[Trial], best: Trial) -> None:
    """Write the record and the chosen config, and print what came of it."""
    chosen = options.out / CHOSEN
    write_whole(chosen, to_toml(chosen_config(plan, best)))
    file = keep_record(search_record(plan, trials, best), options.out / RECORD)
    if options.json:
        made: dict[str, Any] = {"folder": str(options.out), "record": str(file), "chosen": str(chosen)}
        made |= {"best": dataclasses.asdict(best), "trials": [dataclasses.asdict(trial) for trial in trials]}
        print(json.dumps({**made, "front": front(trials, plan.goal)}))
    else:
        _print(plan, trials, best, file, chosen)


def _plan(options: Options) -> Search:
    """The search that the options ask for; what cannot be is told before anything is trained."""
    if options.base is None:
        raise ConfigError("a search varies a base: ridgeline study search --base gpt2-c256")
    goal, budget = Goal.parse(options.target), _seconds(options.budget)
    given = {name: getattr(options, name) for name in ("device", "engine", "precision", "eval_windows")}
    if options.data is not None:
        given["data"] = options.data
    base = override(find_config(options.base), given)
    if base.data in ("boxing", "boxing-visible"):
        replay_shipped(base.data)
    data = load_dataset(base.data)
    games = isinstance(data, GameData)
    if goal.kind == "ko" and not games:
        raise ConfigError(f"{base.data} is a text, and knockouts are of games; set --target loss=NUMBER")
    base = resolve(base, data)
    return Search(
        base=base,
        space=narrowed(default_space(base, games=games), options.space),
        goal=goal,
        budget_s=budget,
        trial_s=budget / SHARE if options.trial is None else _seconds(options.trial),
        storage=options.storage,
        least_steps=options.least_steps,
        seed=options.seed,
    )


class _Teller:
    """Tells of trials as they end; of those that were refused the first few."""

    def __init__(self, console: Console) -> None:
        self._console, self._refused = console, 0

    def __call__(self, trial: Trial) -> None:
        self._refused += trial.state == "refused"
        if trial.state != "refused" or self._refused <= REFUSED:
            self._console.print(_line(trial), highlight=False, soft_wrap=True)
            if trial.state == "refused" and self._refused == REFUSED:
                self._console.print("further refusals are only counted", highlight=False)


def _nothing(trials: Sequence[Trial], kind: str) -> str:
    """Why none of the trials came to an end, and what to change."""
    reasons = list(dict.fromkeys(trial.reason for trial in trials if trial.reason))
    said = "; ".join(reasons[:REASONS]) or "no time"
    more = f"; and {len(reasons) - REASONS} more reasons" if len(reasons) > REASONS else ""
    cure = "give other candidates to --space, or a longer --trial and --budget"
    if not all(trial.state == "refused" for trial in trials):
        cure = "raise --budget, or lower --eval-windows" if kind == "loss" else "raise --budget"
    return f"none of {len(trials)} trials came to an end ({said}{more}); {cure}"


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if not found:
        raise ConfigError(f"{text!r} is no time; write 90s, 10m or 2h")
    return float(found[1]) * UNITS[found[2]]


def _line(trial: Trial) -> str:
    if trial.reason is not None or trial.quality is None:
        return f"trial {trial.number} {trial.state}: {trial.reason} ({choice(trial.params)})"
    reached = f", target held from second {trial.seconds:.1f}" if trial.seconds is not None else ""
    return f"trial {trial.number} {trial.state}: {trial.quality:.4f}{reached} ({choice(trial.params)})"


def _print(plan: Search, trials: list[Trial], best: Trial, file: Path, chosen: Path) -> None:
    goal = plan.goal
    table = Table(title=f"trials of {plan.trial_s:g} s of training, the best first", title_justify="left")
    for heading in ("trial", "choice", goal.kind, "held from s", "tokens/s", "predicted"):
        table.add_column(heading, justify="left" if heading == "choice" else "right")
    judged = [trial for trial in trials if trial.quality is not None]
    judged.sort(key=lambda trial: (trial is not best, rank(goal.kind, trial.crossing, trial.quality)))
    alike, own = choices_apart([trial.params for trial in judged[:SHOWN]])
    if alike:
        table.title = f"{table.title}; all with {alike}"
    for trial, chosen_alone in zip(judged[:SHOWN], own, strict=True):
        table.add_row(
            str(trial.number),
            chosen_alone,
            f"{trial.quality:.4f}{'' if trial.state == 'complete' else ' …'}",
            "" if trial.seconds is None else f"{trial.seconds:.1f}",
            "" if trial.tokens_per_s is None else f"{trial.tokens_per_s:,.0f}",
            "" if trial.predicted_tokens_per_s is None else f"{trial.predicted_tokens_per_s:,.0f}",
        )
    console = Console()
    console.print(table)
    counts = states_of([trial.state for trial in trials])
    console.print(f"{len(trials)} trials: {counts}", highlight=False)
    if goal.value is not None and best.seconds is None:
        console.print(_missed(plan, best), highlight=False, soft_wrap=True)
    leader = None
    for seconds, quality, number in front(trials, goal):
        if number != leader:
            console.print(f"from second {seconds:.1f} trial {number} leads with {quality:.4f}", highlight=False)
        leader = number
    said = f"the chosen config is {chosen}: ridgeline train --config {chosen}; the record is in {file}"
    console.print(said, highlight=False, soft_wrap=True)


def _missed(plan: Search, best: Trial) -> str:
    """That no trial held the target, how near the best came, and what that was for."""
    goal, last = plan.goal, best.path[-1][1]
    improving = last == (min if goal.kind == "loss" else max)(quality for _, quality in best.path)
    reason = "it was still improving, so raise --trial" if improving else "it no longer improved, so widen --space"
    return (
        f"the target {goal.kind}={goal.value:g} was not held in {plan.trial_s:g} s of training: the best, trial "
        f"{best.number}, came to {last:.4f}; {reason}"
    )
