"""Work spread over processes of which none may fail unnoticed.

Every task brings a result, or the whole call ends with WorkerError: a process that dies, hangs or raises is never a
missing result. Results are handed over as they come, so that what was finished before can be kept.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from ridgeline.errors import RidgelineError, WorkerError

Task = TypeVar("Task")
Result = TypeVar("Result")

ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    task: int | None = None
    since: float = field(default_factory=time.monotonic)


def run_parallel(
    function: Callable[[Task], Result],
    tasks: Sequence[Task],
    *,
    processes: int,
    timeout: float,
    names: Sequence[str] | None = None,
) -> Generator[tuple[int, Result], None, None]:
    """Call `function` on every task and yield (index of the task, result) in the order of completion.

    Processes are spawned, so function and tasks must be picklable, and each works with one thread.

    Args:
        function: defined at the top level of a module.
        tasks: its arguments.
        processes: at most so many at a time.
        timeout: seconds that one task may take, the start of its process included.
        names: what to call each task in an error; "task N" without them.

    Raises:
        WorkerError: a process died, raised or went silent. The others are ended.
        RidgelineError: what the function raised, if it was one of these.
    """
    labels = names or [f"task {index}" for index in range(len(tasks))]
    waiting = iter(range(len(tasks)))
    workers: list[_Worker] = []
    try:
        with _environment():
            workers += [_start(function) for _ in range(min(processes, len(tasks)))]
        for worker in workers:
            _give(worker, tasks, waiting, labels)
        while any(worker.task is not None for worker in workers):
            for worker in _ready(workers, timeout, labels):
                index = worker.task
                assert index is not None
                result = _receive(worker, labels[index])
                _give(worker, tasks, waiting, labels)
                yield index, result
    finally:
        _end(workers)


def _start(function: Callable[[Any], Any]) -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(function, theirs), daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, ours)


def _serve(function: Callable[[Any], Any], pipe: Connection) -> None:
    """A worker's life: tasks in, (failure, result) out, until the pipe closes."""
    with contextlib.suppress(EOFError, KeyboardInterrupt, BrokenPipeError):
        while True:
            task = pipe.recv()
            try:
                answer: tuple[Any, Any] = (None, function(task))
            except RidgelineError as error:
                answer = (error, None)
            except Exception:
                answer = (traceback.format_exc(), None)
            pipe.send(answer)


def _give(worker: _Worker, tasks: Sequence[Any], waiting: Iterator[int], labels: Sequence[str]) -> None:
    worker.task = next(waiting, None)
    if worker.task is not None:
        worker.since = time.monotonic()
        try:
            worker.pipe.send(tasks[worker.task])
        except OSError as error:
            raise _died(worker, labels[worker.task]) from error


def _ready(workers: list[_Worker], timeout: float, labels: Sequence[str]) -> list[_Worker]:
    """Busy workers that have something to say, or have died; waits for the first."""
    busy = {worker.pipe: worker for worker in workers if worker.task is not None}
    deadline = min(worker.since for worker in busy.values()) + timeout
    ready = [busy[pipe] for pipe in wait(list(busy), max(0.0, deadline - time.monotonic()))]  # type: ignore[index]
    if not ready:
        slow = min(busy.values(), key=lambda worker: worker.since)
        assert slow.task is not None
        raise WorkerError(
            f"the process at work on {labels[slow.task]} was silent for {timeout:.0f} s and was ended; "
            "use fewer processes, or allow it more time"
        )
    return ready


def _receive(worker: _Worker, label: str) -> Any:
    try:
        failure, result = worker.pipe.recv()
    except (EOFError, OSError) as error:
        raise _died(worker, label) from error
    if isinstance(failure, RidgelineError):
        raise failure
    if failure is not None:
        raise WorkerError(f"the process at work on {label} failed:\n{failure}")
    return result


def _died(worker: _Worker, label: str) -> WorkerError:
    worker.process.join(5)
    return WorkerError(
        f"the process at work on {label} died (exit code {worker.process.exitcode}); "
        "look for a lack of memory, or use fewer processes"
    )


def _end(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.pipe.close()
        if worker.task is not None:
            worker.process.kill()
    for worker in workers:
        worker.process.join(5)
        if worker.process.is_alive():
            worker.process.kill()


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """One thread for every process started within: the libraries read these variables when they are loaded."""
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ.update(dict.fromkeys(ONE_THREAD, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
