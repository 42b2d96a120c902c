"""Work spread over processes of which none may fail unnoticed.

Every task brings its results, or the whole call ends with WorkerError: a process that dies, hangs or raises is never a
missing result. Results are handed over as they come, so that what was finished before can be kept.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from ridgeline.errors import ConfigError, RidgelineError, WorkerError

Task = TypeVar("Task")
Result = TypeVar("Result")

ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
GOODBYE_SECONDS = 5.0


def count_processes(wanted: int | None) -> int:
    """How many processes to use: as many as wanted, or as there are processors that this process may use.

    Raises:
        ConfigError: fewer than one.
    """
    if wanted is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if wanted < 1:
        raise ConfigError(f"processes must be at least 1, got {wanted}")
    return wanted


class LostError(WorkerError):
    """A process that died by a signal or went silent over a task, which another one may be spared.

    Attributes:
        task: index of the task.
        how: what became of the process.
    """

    def __init__(self, message: str, task: int, how: str) -> None:
        super().__init__(message)
        self.task, self.how = task, how


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    task: int | None = None
    heard: float = field(default_factory=time.monotonic)


def run_parallel(
    function: Callable[[Task], Iterable[Result]],
    tasks: Sequence[Task],
    *,
    processes: int,
    timeout: float,
    names: Sequence[str] | None = None,
) -> Generator[tuple[int, Result], None, None]:
    """Call `function` on every task and yield (index of the task, result) for each result as soon as there is one.

    Processes are spawned, so function and tasks must be picklable, and each computes with one thread. Closing the
    generator ends them.

    Args:
        function: defined at the top level of a module; what it iterates over are the task's results.
        tasks: its arguments.
        processes: at most so many at a time.
        timeout: seconds that a process may be silent, from its start or its last result.
        names: what to call each task in an error; "task N" without them.

    Raises:
        ConfigError: fewer than one process.
        WorkerError: a process died, raised or went silent (LostError says over which task, if it was that task's
            doing). The others are ended.
        RidgelineError: what the function raised, if it was one of these.
    """
    count_processes(processes)
    labels = names or [f"task {index}" for index in range(len(tasks))]
    waiting = iter(range(len(tasks)))
    workers: list[_Worker] = []
    try:
        with starting():
            for _ in range(min(processes, len(tasks))):
                workers.append(_start(function))
        for worker in workers:
            _give(worker, tasks, waiting, labels)
        while any(worker.task is not None for worker in workers):
            for worker in _ready(workers, timeout, labels):
                index = worker.task
                assert index is not None
                finished, result = _receive(worker, labels)
                if finished:
                    _give(worker, tasks, waiting, labels)
                else:
                    yield index, result
    finally:
        _end(workers)


def _start(function: Callable[[Any], Iterable[Any]]) -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(function, theirs), daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, ours)


def _serve(function: Callable[[Any], Iterable[Any]], pipe: Connection) -> None:
    """A worker's life: tasks in; out come ("result", …) for each result, then ("finished", None) or a failure."""
    ignore_interrupts()  # the user interrupts the caller, which ends its workers
    with contextlib.suppress(EOFError, OSError):
        while True:
            task = pipe.recv()
            try:
                for result in function(task):
                    pipe.send(("result", result))
                pipe.send(("finished", None))
            except RidgelineError as error:
                pipe.send(("refused", _portable(error)))
            except Exception:
                pipe.send(("failed", traceback.format_exc()))


def _portable(error: RidgelineError) -> RidgelineError:
    """The error itself if it survives the way to another process, else its words."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # its constructor wants other arguments than a message
        return WorkerError(str(error))
    return error


def _give(worker: _Worker, tasks: Sequence[Any], waiting: Iterator[int], labels: Sequence[str]) -> None:
    worker.task = next(waiting, None)
    worker.heard = time.monotonic()
    if worker.task is not None:
        try:
            worker.pipe.send(tasks[worker.task])
        except OSError as error:
            raise _died(worker, labels) from error


def _ready(workers: list[_Worker], timeout: float, labels: Sequence[str]) -> list[_Worker]:
    """Busy workers that have something to say, or have died; waits for the first."""
    busy = [worker for worker in workers if worker.task is not None]
    longest = min(busy, key=lambda worker: worker.heard)
    left = longest.heard + timeout - time.monotonic()
    ready = wait([worker.pipe for worker in busy], max(0.0, left))
    if not ready:
        assert longest.task is not None
        how = f"was silent for {timeout:.0f} s and was ended"
        cure = "use fewer processes, or allow it more time"
        raise LostError(f"the process at work on {labels[longest.task]} {how}; {cure}", longest.task, how)
    return [worker for worker in busy if worker.pipe in ready]


def _receive(worker: _Worker, labels: Sequence[str]) -> tuple[bool, Any]:
    """Whether the task is finished, and if it is not, its next result."""
    assert worker.task is not None
    try:
        kind, content = worker.pipe.recv()
    except (EOFError, OSError) as error:
        raise _died(worker, labels) from error
    worker.heard = time.monotonic()
    if kind == "refused":
        raise content
    if kind == "failed":
        raise WorkerError(f"the process at work on {labels[worker.task]} failed:\n{content}")
    return kind == "finished", content


def _died(worker: _Worker, labels: Sequence[str]) -> WorkerError:
    assert worker.task is not None
    worker.process.join(GOODBYE_SECONDS)
    code = worker.process.exitcode
    how = f"died (exit code {code})"
    words = f"the process at work on {labels[worker.task]} {how}"
    if code == 1:
        return WorkerError(
            f'{words}; see its message above (a script has to call this under `if __name__ == "__main__":`)'
        )
    return LostError(f"{words}; look for a lack of memory, or use fewer processes", worker.task, how)


def _end(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.pipe.close()  # an idle one ends by itself
        if worker.task is not None:
            worker.process.kill()
    for worker in workers:
        worker.process.join(GOODBYE_SECONDS)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Every process started within computes with one thread, and hears no SIGINT until it calls `ignore_interrupts`.

    The libraries read the variables when they are loaded; and a Ctrl-C, which a terminal sends to all, would show the
    traceback of a process that is still importing them. The caller hears it afterwards.
    """
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ.update(dict.fromkeys(ONE_THREAD, "1"))
    resource_tracker.ensure_running()  # which would let the signal through again
    try:
        with _later_interrupts():
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # what a process inherits
            try:
                yield
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _later_interrupts() -> Iterator[None]:
    """Put SIGINT off until the end: another thread of a library may receive it although this one blocks it."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python interrupts the main thread alone
        return
    came = []
    before = signal.signal(signal.SIGINT, lambda *_: came.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


def ignore_interrupts() -> None:
    """What a process that was started within `starting` calls first: SIGINT is its caller's matter."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
