"""`ridgeline study compare`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich import box
from rich.console import Console
from rich.table import Table
from tyro.conf import Positional, arg

from ridgeline.bench.explain_view import amount
from ridgeline.cli.data import replay_shipped
from ridgeline.cli.output import Flag, parse
from ridgeline.data.api import load_dataset
from ridgeline.errors import ConfigError
from ridgeline.presets import find_config
from ridgeline.study.compare import Comparison, Plan, compare
from ridgeline.study.comparison_record import comparison_record, rows
from ridgeline.study.contenders import distinct, own_recipes, same_recipe, single_changes, spread
from ridgeline.study.folder import RECORD, keep_record
from ridgeline.study.runs import StoppedError
from ridgeline.train.resolve import resolve
from ridgeline.train.settings import override

FACTORS = (0.5, 1.0, 2.0)  # of the first contender's learning rate, where no rates are given
QUICK: dict[str, Any] = {"steps": 60, "eval_interval": 20, "batch": 8, "window": {"context": 64}, "eval_windows": 64}
QUICK_SEEDS = 2
INTERRUPTED = 130
NAME_WIDTH = 12  # of a column of contenders at least


@dataclass(frozen=True, kw_only=True)
class Options:
    """Compare models: one recipe, the learning rate tuned alike for each, several seeds, held-out loss.

    A contender is a preset, a TOML file of settings, or either with settings changed: gpt2-c256+norm=rmsnorm. Only
    its model counts: data, windows, batch, optimiser, schedule and length are the first one's for all; with --recipes
    each keeps its own, data and windows excepted. A difference counts where it is larger than the spread between seeds
    explains (95 % interval over pairs of equal seeds). Called again with the same arguments, and --out, it goes on
    where it was stopped; with more seeds or other rates it trains what it lacks.

    With --json the last line is {"folder", "record", "ngrams", "contenders": [{"contender", "parameters",
    "learning_rate", "at_edge", "tried", "best_loss", "best_spread", "final_loss", "final_spread", "tokens_per_s",
    "difference", …}]}: losses in nats, means over seeds; with --target also "reached", "target_steps",
    "target_s", "target_spread_s" and "target_difference_s".

    Attributes:
        contenders: who is compared, the first against all others.
        each_change: also the first with each single setting of the second's decoder.
        recipes: compare whole recipes: each contender keeps its batch, optimiser, schedule, length and learning rate.
        seeds: how often each is trained.
        rates: learning rates each is tried with; without it half, once and twice the first contender's, with --recipes
            each one's own. One: no tuning.
        target: held-out loss; the time to hold it over two validations is reported.
        steps: length of every run.
        data: what all train on; without it the first contender's.
        batch: windows in a step.
        context: positions in a window.
        eval_interval: steps between validations.
        processes: contenders that are trained at a time, each in a process of its own. A step of each is timed alone at
            the end, so that no seconds are of a shared machine.
        gpus: cards over which the contenders are spread.
        device: where to train: cpu, cuda, cuda:N or auto.
        engine: how a step is run; see `ridgeline train --help`.
        precision: of training.
        quick: a few short runs, to see that everything works.
        out: folder of the study; without it runs/compare.
        json: print one JSON object as the last line.
    """

    contenders: Annotated[tuple[str, ...], Positional, arg(metavar="CONTENDER…")] = ("gpt2-c256", "fast-c256")
    each_change: Flag = False
    recipes: Flag = False
    seeds: int | None = None
    rates: tuple[float, ...] | None = None
    target: float | None = None
    steps: int | None = None
    data: str | None = None
    batch: int | None = None
    context: int | None = None
    eval_interval: int | None = None
    processes: int = 1
    gpus: int = 1
    device: str | None = None
    engine: str | None = None
    precision: str | None = None
    quick: Flag = False
    out: Path = Path("runs/compare")
    json: Flag = False


def run(arguments: Sequence[str]) -> int:
    """Compare and print."""
    options = parse(Options, arguments, "study compare")
    plan = plan_of(options)
    said = Console(stderr=True)
    try:
        result = compare(plan, options.out, said, options.processes)
    except StoppedError as stopped:
        said.print(str(stopped), highlight=False)
        return INTERRUPTED
    file = keep_record(comparison_record(result, next(iter(plan.configs.values()))), options.out / RECORD)
    if options.json:
        contenders = rows(result)
        print(
            json.dumps(
                {"folder": str(options.out), "record": str(file), "ngrams": result.ngrams, "contenders": contenders}
            )
        )
    else:
        _print(result, file)
    return 0


def plan_of(options: Options) -> Plan:
    """The comparison that the options ask for; what cannot be is told before anything is trained."""
    names = list(options.contenders)
    if options.each_change:
        if len(names) != 2:
            raise ConfigError("--each-change lies between two contenders; name exactly two")
        names[1:1] = [name for name in single_changes(*names) if name not in names]
    settings = _settings(options)
    first, *others = distinct(names)
    if options.recipes:
        configs = own_recipes({name: override(find_config(name), settings) for name in (first, *others)})
    else:
        found = {first: override(find_config(first), settings), **{name: find_config(name) for name in others}}
        configs = same_recipe(found)
    recipe = configs[first]
    for name, config in configs.items():
        if config.total_steps is None:
            raise ConfigError(f"{name} trains for minutes, and a comparison counts steps; set --steps")
    if recipe.data in ("boxing", "boxing-visible"):
        replay_shipped(recipe.data)
    data = load_dataset(recipe.data)
    configs = spread(configs, options.gpus)
    return Plan(
        configs={name: resolve(config, data) for name, config in configs.items()},
        rates=_rates(options, recipe.optimizer.lr),
        seeds=options.seeds if options.seeds is not None else QUICK_SEEDS if options.quick else 3,
        target=options.target,
    )


def _rates(options: Options, usual: float) -> tuple[float, ...]:
    """Learning rates that every contender is tried with; none where each keeps its own."""
    if options.rates or options.recipes:
        return options.rates or ()
    return (usual,) if options.quick else tuple(usual * factor for factor in FACTORS)


def _settings(options: Options) -> Mapping[str, Any]:
    names = ("steps", "data", "batch", "eval_interval", "device", "engine", "precision")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    if options.context is not None:
        given["window"] = {"context": options.context}
    settings = {**(QUICK if options.quick else {"eval_windows": 0}), **given}
    steps = settings.get("steps")
    # checkpoints are most of a short run's time, and go with the run: one half-way. One lane: to measure whether two
    # are faster takes as long as such a run
    return {**settings, "lanes": 1, "track": [], **({"checkpoint_interval": max(1, steps // 2)} if steps else {})}


def _print(result: Comparison, file: Path) -> None:
    title = "held-out loss in nats: mean over seeds ± standard deviation; difference beyond or within the spread (95 %)"
    table = _table(title, ("weights", "rate", "lowest", "final", "tokens/s", "against the first"))
    first = result.standings[0].name
    for row in rows(result):
        edge = "*" if row["at_edge"] else ""  # explained below
        table.add_row(
            _change(row["contender"], first),
            amount(row["parameters"]),
            f"{row['learning_rate']:g}{edge}",
            _loss(row["best_loss"], row["best_spread"]),
            f"{row['final_loss']:.3f}",
            amount(row["tokens_per_s"]),
            _verdict(row.get("difference")),
        )
    console = Console()
    console.print(table)
    if any(row["at_edge"] for row in rows(result)):
        console.print("* the best rate tried lies at an end of the list: a rate beyond it may be better still")
    if result.plan.target is not None:
        console.print(_held(result, result.plan.target))
        if missed := _missed(result, result.plan.target):
            console.print(missed, highlight=False, soft_wrap=True)
    if result.ngrams:
        lines = ", ".join(f"{order}-gram {loss:.4f}" for order, loss in result.ngrams.items())
        console.print(f"what counting achieves: {lines}", highlight=False)
    console.print(f"the record is in {file}", highlight=False, soft_wrap=True)


def _table(title: str, headings: Sequence[str]) -> Table:
    """A table whose first column names contenders, however narrow the terminal is."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("contender", overflow="fold", min_width=NAME_WIDTH)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=heading != headings[-1])  # verdicts are words
    return table


def _change(name: str, first: str) -> str:
    """A contender that is the first one with something changed, by the change alone."""
    return name.removeprefix(first) if name.startswith(f"{first}+") else name


def _held(result: Comparison, target: float) -> Table:
    """Who held the target when."""
    title = f"training seconds until {target:g} was held"
    table = _table(title, ("seeds", "from step", "seconds", "later than the first by"))
    first = result.standings[0].name
    for row in rows(result):
        seconds = "never by all" if row["target_s"] is None else _loss(row["target_s"], row["target_spread_s"])
        reached = f"{row['reached']} of {result.plan.seeds}"
        step = "" if row["target_steps"] is None else f"{row['target_steps']:,.0f}"
        name = _change(row["contender"], first)
        table.add_row(name, reached, step, seconds, _verdict(row.get("target_difference_s")))
    return table


def _missed(result: Comparison, target: float) -> str | None:
    """Where no run held the target: how near the best came, and what that was for."""
    if any(row["reached"] for row in rows(result)):
        return None
    finite = [(one.name, run) for one in result.standings for run in one.runs if run.points and math.isfinite(run.best)]
    if not finite:
        return f"the loss {target:g} was not held: no run has a loss that is finite; lower --rates"
    name, run = min(finite, key=lambda pair: pair[1].best)
    if run.best <= target:
        reason = "it was not there at two validations in a row, so raise --steps"
    elif run.final == run.best:
        reason = "it was still falling, so raise --steps"
    else:
        reason = "it no longer fell, so change the models or the recipe"
    return f"the loss {target:g} was not held: the best, {name}, came to {run.best:.4f}; {reason}"


def _loss(mean: float, spread: float | None) -> str:
    return f"{mean:.3f}" if spread is None else f"{mean:.3f} ± {spread:.3f}"


def _verdict(difference: Mapping[str, Any] | None) -> str:
    if difference is None:
        return ""
    words = {True: "beyond", False: "within", None: "one seed"}[difference["beyond_spread"]]
    return f"{difference['mean']:+.4f} {words}"
