"""The errors a user can meet. Each message is one sentence that names what to change.

RidgelineError            the base; the command line prints it and exits with 2
├─ ConfigError            a setting, preset, key or file of settings that cannot be
├─ DataError              a data set, checksum, shard or demonstration that cannot be used
├─ CheckpointError        a checkpoint that is missing, corrupt, foreign or of another config
├─ UnsupportedError       an implementation, precision or device that cannot run here
├─ MissingExtraError      an optional dependency that is not installed
└─ WorkerError            a worker process that died, hung or refused its work
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType

NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")  # how PyTorch's RuntimeErrors put it


class RidgelineError(Exception):
    """Base of every error that a user can cause or cure."""


class ConfigError(RidgelineError, ValueError):
    """A setting that cannot be."""


class DataError(RidgelineError):
    """A data set that cannot be used."""


class CheckpointError(RidgelineError):
    """A checkpoint that cannot be used."""


class UnsupportedError(RidgelineError, ValueError):
    """An implementation, precision, shape or device that cannot run here, with the reason."""


class DivergedError(RidgelineError):
    """A loss or gradient that is no longer finite."""


class OutOfMemoryError(RidgelineError):
    """What was asked for does not fit the memory of the device or of the machine."""


class MissingExtraError(RidgelineError, ImportError):
    """An optional dependency that is not installed."""


class WorkerError(RidgelineError, RuntimeError):
    """A worker process that died, hung or refused its work."""


def nearest(name: object, known: Iterable[str], kind: str) -> str:
    """The sentence for a mistyped name: `unknown KIND 'name'; did you mean …?`. What is no name at all is told too."""
    options = sorted(known)
    close = difflib.get_close_matches(str(name), options, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(options)}"
    return f"unknown {kind} {name!r}; {hint}"


def reason(error: BaseException) -> str:
    """What went wrong, without the number and the path that the operating system's errors carry."""
    return getattr(error, "strerror", None) or str(error)


def lacks_memory(error: BaseException) -> bool:
    """Whether NumPy, PyTorch on the CPU or CUDA says by an error that there is not enough memory."""
    said = isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)
    return isinstance(error, MemoryError) or (said and not isinstance(error, RidgelineError))


@contextmanager
def enough_memory(cure: str) -> Iterator[None]:
    """Turns the several errors of a device or machine without enough memory into one sentence.

    Args:
        cure: what makes the work smaller.

    Raises:
        OutOfMemoryError: inside the `with` block NumPy, PyTorch on the CPU or CUDA got no memory.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # PyTorch's own OutOfMemoryError is a RuntimeError
        if not lacks_memory(error):
            raise
        raise OutOfMemoryError(f"there is not enough memory; {cure}") from error


def require(module: str, extra: str) -> ModuleType:
    """Import an optional dependency, or say which extra installs it.

    Raises:
        MissingExtraError: the module is not installed, or lacks what it needs itself.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        found = error.name is None or not module.startswith(error.name)
        what = f"{module} cannot be imported: {reason(error)}" if found else f"{module} is not installed"
        raise MissingExtraError(f"{what}; in a clone of ridgeline run: pip install '.[{extra}]'") from error
