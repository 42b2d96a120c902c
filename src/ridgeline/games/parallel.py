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
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
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
        WorkerError: a process died, raised or went silent. The others are ended.
        RidgelineError: what the function raised, if it was one of these.
    """
    count_processes(processes)
    labels = names or [f"task {index}" for index in range(len(tasks))]
    waiting = iter(range(len(tasks)))
    workers: list[_Worker] = []
    try:
        with one_thread():
            for _ in range(min(processes, len(tasks))):
                workers.append(_start(function))
        for worker in workers:
            _give(worker, tasks, waiting, labels)
        while any(worker.task is not None for worker in workers):
            for worker in _ready(workers, timeout, labels):
                index = worker.task
                assert index is not None
                finished, result = _receive(worker, labels[index])
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the user interrupts the caller, which ends its workers
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
            raise _died(worker, labels[worker.task]) from error


def _ready(workers: list[_Worker], timeout: float, labels: Sequence[str]) -> list[_Worker]:
    """Busy workers that have something to say, or have died; waits for the first."""
    busy = [worker for worker in workers if worker.task is not None]
    longest = min(busy, key=lambda worker: worker.heard)
    left = longest.heard + timeout - time.monotonic()
    ready = wait([worker.pipe for worker in busy], max(0.0, left))
    if not ready:
        assert longest.task is not None
        raise WorkerError(
            f"the process at work on {labels[longest.task]} was silent for {timeout:.0f} s and was ended; "
            "use fewer processes, or allow it more time"
        )
    return [worker for worker in busy if worker.pipe in ready]


def _receive(worker: _Worker, label: str) -> tuple[bool, Any]:
    """Whether the task is finished, and if it is not, its next result."""
    try:
        kind, content = worker.pipe.recv()
    except (EOFError, OSError) as error:
        raise _died(worker, label) from error
    worker.heard = time.monotonic()
    if kind == "refused":
        raise content
    if kind == "failed":
        raise WorkerError(f"the process at work on {label} failed:\n{content}")
    return kind == "finished", content


def _died(worker: _Worker, label: str) -> WorkerError:
    worker.process.join(GOODBYE_SECONDS)
    code = worker.process.exitcode
    cure = (
        'see its message above (a script has to call this under `if __name__ == "__main__":`)'
        if code == 1
        else "look for a lack of memory, or use fewer processes"
    )
    return WorkerError(f"the process at work on {label} died (exit code {code}); {cure}")


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
def one_thread() -> Iterator[None]:
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
