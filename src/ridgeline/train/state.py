"""A run's state in its folder: what a checkpoint holds, and how a run goes on from one to the bit.

RUN/config.toml      the resolved configuration
RUN/metrics.jsonl    see metrics.py
RUN/last, RUN/best   checkpoints: of the last step saved, and of the lowest validation loss
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ridgeline import checkpoint, files
from ridgeline.checkpoint import Checkpoint
from ridgeline.data.games import GameData
from ridgeline.data.loader import Batches
from ridgeline.data.text import TextData
from ridgeline.errors import CheckpointError, ConfigError, RidgelineError
from ridgeline.train.config import AUTO, STOPS, TrainConfig
from ridgeline.train.guards import alone_in, writing
from ridgeline.train.settings import from_dict, to_dict, to_toml
from ridgeline.train.step import Step

LAST, BEST = "last", "best"
CONFIG = "config.toml"
FREE = {
    *STOPS,
    "data",
    "eval_interval",
    "eval_windows",
    "checkpoint_interval",
    "track",
    "engine",
    "lanes",
    "device",
    "out",
}


@dataclass
class Progress:
    """How far a run is.

    Attributes:
        step: optimisation steps done.
        tokens: positions learned from.
        seconds: training time, validation and checkpoints not counted.
        train_loss: loss of the last step; None before the first.
        val_loss: newest validation loss; None before the first.
        best_loss: lowest validation loss; None before the first.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    train_loss: float | None = None
    val_loss: float | None = None
    best_loss: float | None = None


@contextmanager
def open_folder(config: TrainConfig) -> Iterator[Path]:
    """Make the folder of a new run, which no other run enters before the `with` block is over.

    Raises:
        ConfigError: the folder holds something, or cannot be made.
    """
    folder = _make(Path(config.out)) if config.out != AUTO else _next_folder(config.preset)
    with alone_in(folder):
        if any(folder.iterdir()):
            raise ConfigError(_taken(folder))
        yield folder


def _next_folder(preset: str) -> Path:
    """A folder of the preset's name, with the first number that is free."""
    number = 1
    while True:
        folder = Path("runs") / (preset if number == 1 else f"{preset}-{number}")
        try:
            return _make(folder, exist_ok=False)
        except FileExistsError:
            number += 1


def _taken(folder: Path) -> str:
    """Why a run cannot start in what exists, and what to do about it."""
    if any((folder / name / checkpoint.HEADER).is_file() for name in (LAST, BEST)):
        return f"{folder} exists; choose another --out, or go on with the run by --resume {folder}"
    if (folder / CONFIG).is_file():
        return f"{folder} holds a run that was killed before its first checkpoint; choose another --out or delete it"
    return f"{folder} exists and holds no run; choose another --out"


def _make(folder: Path, *, exist_ok: bool = True) -> Path:
    """Makes a folder; a FileExistsError where it is there and should not be."""
    if exist_ok and folder.exists() and not folder.is_dir():
        raise ConfigError(_taken(folder))
    try:
        folder.mkdir(parents=True, exist_ok=exist_ok)
    except OSError as error:
        if isinstance(error, FileExistsError) and folder.exists() and not exist_ok:
            raise
        raise ConfigError(f"cannot make the run's folder {folder} ({error.strerror}); choose another --out") from error
    return folder


@contextmanager
def go_on_in(saved: Checkpoint) -> Iterator[Path]:
    """The folder of the run that a checkpoint is of, which no other run enters before the `with` block is over.

    Raises:
        ConfigError: another run is in it.
        CheckpointError: one was, and has gone on since the checkpoint was read.
    """
    with alone_in(saved.path.parent):
        if checkpoint.meta(saved.path) != saved.meta:
            raise CheckpointError(f"another run has just gone on in {saved.path.parent}; try --resume again")
        yield saved.path.parent


def write_config(folder: Path, config: TrainConfig) -> None:
    """Save the resolved config beside the run.

    Raises:
        RidgelineError: it cannot be written; one that is there stays.
    """
    with writing(folder):
        files.replace(folder / CONFIG, to_toml(config))


def discard(folder: Path) -> None:
    """Empty the folder of a run that ended before its first step, and remove it: `open_folder` found it empty."""
    shutil.rmtree(folder, ignore_errors=True)


class Content(NamedTuple):
    """What a checkpoint of a run holds."""

    tensors: dict[str, Tensor]
    meta: dict[str, Any]

    def apart(self) -> Content:
        """The same in memory of the host that no later step changes."""
        return Content({name: tensor.detach().to("cpu", copy=True) for name, tensor in self.tensors.items()}, self.meta)

    def write(self, folder: Path) -> None:
        """Write it to `folder`, in place of the checkpoint that is there."""
        checkpoint.save(folder, self.tensors, self.meta)


def content(
    config: TrainConfig,
    progress: Progress,
    model: nn.Module,
    step: Step,
    batches: Batches,
    data: TextData | GameData,
) -> Content:
    """The state of a run; its tensors are those that training goes on to change."""
    tensors = checkpoint.join(model=model.state_dict(), optimizer=step.state_dict(), rng=random_state(config.device))
    meta = {
        "preset": config.preset,
        "config": to_dict(config),
        "window": to_dict(config.window),
        **describe(data),
        "data": batches.state_dict(),
        **vars(progress),
        "threads": torch.get_num_threads(),
    }
    return Content(tensors, meta)


def describe(data: TextData | GameData) -> dict[str, Any]:
    """What a checkpoint says of its data: the vocabulary of a text, the features of a game."""
    return {"vocabulary": data.vocabulary.to_dict()} if isinstance(data, TextData) else {"features": data.features}


def random_state(device: str) -> dict[str, Tensor]:
    """State of PyTorch's generators that training draws from."""
    state = {"cpu": torch.get_rng_state()}
    if device.startswith("cuda"):
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore(saved: Checkpoint, config: TrainConfig, model: nn.Module, step: Step, batches: Batches) -> Progress:
    """Take up a run where a checkpoint left it.

    Raises:
        CheckpointError: it lacks what a run needs.
        DataError: the data is another one.
    """
    progress = progress_of(saved)
    load_weights(saved, model)
    try:
        step.load_state_dict(saved.group("optimizer"))
        batches.load_state_dict(saved.meta["data"])
        state = saved.group("rng")
        torch.set_rng_state(state["cpu"])
        if config.device.startswith("cuda") and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], config.device)
    except RidgelineError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
        raise damaged(saved, f"the state of the optimizer, of the data or of the generators ({error})") from error
    return progress


def progress_of(saved: Checkpoint) -> Progress:
    """How far the run of a checkpoint was.

    Raises:
        CheckpointError: it does not say.
    """
    for name in ("step", "tokens", "threads"):
        if type(saved.meta.get(name)) is not int or saved.meta[name] < 0:
            raise damaged(saved, f"{name} (a whole number)")
    if not _is_number(saved.meta.get("seconds")):
        raise damaged(saved, "seconds (a number)")
    for name in ("train_loss", "val_loss", "best_loss"):
        if name not in saved.meta or not (saved.meta[name] is None or _is_number(saved.meta[name])):
            raise damaged(saved, f"{name} (a number or null)")
    return Progress(**{name: saved.meta[name] for name in vars(Progress())})


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def damaged(saved: Checkpoint, what: str) -> CheckpointError:
    """The error of a checkpoint in which `what` is missing or is not what it should be."""
    return CheckpointError(f"{saved.path} lacks or garbles {what}; use another checkpoint of the run")


def load_weights(saved: Checkpoint, model: nn.Module) -> None:
    """Give a model the weights of a checkpoint of the same model config.

    Raises:
        CheckpointError: names or shapes differ.
    """
    try:
        model.load_state_dict(saved.group("model"))
    except RuntimeError as error:
        raise CheckpointError(
            f"the weights in {saved.path} are of another model: {str(error).splitlines()[-1]}"
        ) from error


def settings_of(saved: Checkpoint) -> dict[str, Any]:
    """The config of the run that wrote a checkpoint, as it was saved.

    Raises:
        CheckpointError: no training run wrote it, or it is damaged.
    """
    if "config" not in saved.meta:
        raise CheckpointError(f"{saved.path} says nothing of its config; use one that a run wrote")
    settings = saved.meta["config"]
    if not isinstance(settings, dict):
        raise damaged(saved, "config (a table of settings)")
    return settings


def config_of(saved: Checkpoint, cure: str = "use a checkpoint that this version of ridgeline wrote") -> TrainConfig:
    """The config of the run that wrote a checkpoint.

    Args:
        saved: the checkpoint.
        cure: what helps where the settings are those of another version.

    Raises:
        CheckpointError: no training run wrote it, or this version has other settings.
    """
    try:
        return from_dict(settings_of(saved))
    except ConfigError as error:
        raise CheckpointError(f"the settings in {saved.path} cannot be used: {error}; {cure}") from error


def config_to_resume(saved: Checkpoint) -> TrainConfig:
    """`config_of`, for a run that is to go on."""
    return config_of(saved, "start a new run from its weights with --init-from")


def check_resumable(saved: Checkpoint, config: TrainConfig) -> None:
    """Refuse to go on under a config in which more differs than length, intervals, engine and device.

    Raises:
        CheckpointError: names the settings that differ.
    """

    def bound(settings: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in settings.items() if key not in FREE}

    # read as a config first: settings that an earlier version did not have are what they are by default
    before = config_to_resume(saved)
    checkpoint.check_config(bound(to_dict(before)), bound(to_dict(config)))
    if config.stages and config.steps != before.steps:
        raise CheckpointError(f"stages are shares of the run's {before.steps} steps, which cannot change; keep --steps")
