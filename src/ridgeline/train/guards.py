"""What a run is kept from: another run in its folder, a full disk, Python's collector; and how it is stopped."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from ridgeline.errors import ConfigError, RidgelineError, reason

_LOCKLESS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF)  # what file systems without locks say


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turns what the operating system says inside the `with` block into one sentence about a run's folder.

    Raises:
        RidgelineError: a file could not be written.
    """
    try:
        yield
    except OSError as error:
        raise RidgelineError(
            f"cannot write to the run's folder {folder} ({reason(error)}); free space or choose another "
            "folder: the last checkpoint, where there is one, is kept"
        ) from error


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """A folder for one run at a time: until the `with` block is over, or the process, however it ends.

    A file system that has no locks cannot tell of another run.

    Raises:
        ConfigError: another run is in it.
    """
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"cannot enter the run's folder {folder} ({reason(error)}); choose another --out") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"another run is training in {folder}; wait for its end, or start one in another --out"
            ) from error
        except OSError as error:
            if error.errno not in _LOCKLESS:
                raise
        yield
    finally:
        os.close(handle)


@contextmanager
def without_gc() -> Iterator[None]:
    """Python's garbage collector kept out of the `with` block; what exists by then is never looked at again.

    A collection in the middle of a step would keep the device waiting. The loop collects where it waits anyway.
    """
    enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()


@contextmanager
def last_words(text: str) -> Iterator[None]:
    """Inside the `with` block this process says `text` before torchrun's SIGTERM ends it, in whatever call it waits.

    torchrun ends all processes of a run as soon as one has failed. The others wait for that one in the middle of a
    step, in calls during which Python handles no signal; so a thread does, which a byte in a pipe wakes up.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    source, sink = os.pipe()
    os.set_blocking(sink, False)
    threading.Thread(target=_speak, args=(source, text.encode()), daemon=True).start()
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    woken = signal.set_wakeup_fd(sink, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(woken)
        signal.signal(signal.SIGTERM, before)
        os.close(sink)  # which ends the thread


def _speak(source: int, text: bytes) -> None:
    while number := os.read(source, 1):
        if number[0] == signal.SIGTERM:
            os.write(2, text + b"\n")
            os._exit(128 + signal.SIGTERM)
    os.close(source)


class Interrupt:
    """Turns the first SIGINT inside the `with` block into a request that the loop reads; a second one interrupts.

    Outside the main thread, where Python lets nobody handle signals, it never asks for anything.
    """

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, self._before)
