"""`ridgeline train`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from ridgeline import checkpoint
from ridgeline.cli.data import replay_shipped
from ridgeline.cli.flags import changes, mirror
from ridgeline.cli.output import HELP, Flag, emit, parse
from ridgeline.errors import ConfigError
from ridgeline.presets import PRESETS, preset
from ridgeline.train import TrainConfig, TrainResult, resume, train
from ridgeline.train.config import STOPS
from ridgeline.train.settings import override, read_toml
from ridgeline.train.state import LAST, config_to_resume

FIXED = {f"--model.{name}": "follows the data; leave it out" for name in ("vocabulary", "numbers")}
FIXED |= {f"--model.{name}": "follow the data; leave them out" for name in ("heads", "categories", "previous")}
FIXED["--preset"] = "is no option; name the preset first: ridgeline train PRESET"
HIDDEN = tuple(name.removeprefix("--") for name in FIXED)
INTERRUPTED = 130

ABOUT = """Train a model: `ridgeline train PRESET [options]`, the preset first.

{presets}

Settings come from the preset, then from the TOML file of --config, then from the options. No preset is needed with
a file that names one (preset = "boxing") or with --resume. The resolved settings are saved in the run's folder as
config.toml, which --config takes. Ctrl-C finishes the step, saves and exits with 130.

With --json the last line is {{"preset", "steps", "tokens", "seconds", "tokens_per_s", "train_loss", "val_loss",
"checkpoint"}}: losses in nats, of the last step and of the last validation."""

OPTIONS = """Where settings and weights come from.

Attributes:
    config: TOML file of settings.
    resume: go on with the run in this folder, or from this checkpoint of it. Only length, intervals, trackers, engine,
        lanes, device and number of processes may change; on the CPU the result is that of a run that never stopped,
        to the bit.
    init_from: start from the weights of this checkpoint or run, and nothing else of it.
    json: print one JSON object as the last line.
    settings: the settings.
"""


def run(arguments: Sequence[str]) -> int:
    """Train, and say what came of it."""
    peeked, named = _peek(arguments)
    base = _base(peeked, named, helping=bool(HELP & set(arguments)))
    flags = mirror(base, hidden=HIDDEN, unset=STOPS)
    rest = arguments[1:] if named else arguments
    presets = "\n".join(f"- {name}: {(make.__doc__ or '').splitlines()[0]}" for name, make in PRESETS.items())
    about = ABOUT.format(presets=presets)
    options: Any = parse(_options(flags), rest, f"train {named or 'PRESET'}", about, FIXED)
    config = override(base, changes(flags, options.settings))
    if config.data in ("boxing", "boxing-visible"):
        replay_shipped(config.data)
    result = resume(options.resume, config) if options.resume else train(config, init_from=options.init_from)
    if result.rank == 0:
        _report(result, as_json=options.json)
    return INTERRUPTED if result.interrupted else 0


def _peek(arguments: Sequence[str]) -> tuple[argparse.Namespace, str | None]:
    """What decides the defaults of all other options: where the settings come from, and the preset's name."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("--config", "--resume", "--init-from"):
        parser.add_argument(name)
    try:
        peeked, _ = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error}; give it a file or folder") from error
    named = arguments[0] if arguments and not arguments[0].startswith("-") else None
    return peeked, named


def _base(peeked: argparse.Namespace, named: str | None, *, helping: bool) -> TrainConfig:
    """The config before any option; for help without a preset, that of the first one."""
    if peeked.resume:
        if peeked.init_from or peeked.config:
            raise ConfigError("--resume goes on with a run's own settings and weights; drop --init-from and --config")
        base = config_to_resume(checkpoint.load(checkpoint.find(peeked.resume, prefer=LAST)))
        if named and named != base.preset:
            raise ConfigError(f"the run in {peeked.resume} is of {base.preset}, not {named}; name that or none")
        return base
    values = read_toml(peeked.config) if peeked.config else {}
    name = named if named is not None else values.get("preset")
    if name is None:
        if helping:
            return preset(next(iter(PRESETS)))
        where = f"{peeked.config} names no preset to build on" if peeked.config else "there is no preset"
        raise ConfigError(f"{where}; give one first: ridgeline train {'|'.join(PRESETS)}")
    values.pop("preset", None)
    return override(preset(name), values)


def _options(flags: Any) -> type:
    path = Path | None
    made = dataclasses.make_dataclass(
        "Options",
        [
            ("config", path, dataclasses.field(default=None)),
            ("resume", path, dataclasses.field(default=None)),
            ("init_from", path, dataclasses.field(default=None)),
            ("json", Flag, dataclasses.field(default=False)),
            ("settings", Annotated[type(flags), tyro.conf.arg(name="")], dataclasses.field(default=flags)),
        ],
        kw_only=True,
    )
    made.__doc__ = OPTIONS
    return made


def _report(result: TrainResult, *, as_json: bool) -> None:
    emit(result.summary(), as_json=as_json, title="interrupted, saved" if result.interrupted else "trained")
