"""Parallel work: every result, or an error that says which task lost one."""

import os
import signal
import subprocess
import sys
import time

import pytest

from ridgeline.errors import DataError, RidgelineError, WorkerError
from ridgeline.games.parallel import run_parallel


class OddError(RidgelineError):
    def __init__(self, step, loss):
        super().__init__(f"step {step}: loss {loss}")


def work(task):
    kind, value = task
    if kind == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "exit":
        os._exit(1)
    if kind == "hang":
        time.sleep(600)
    if kind == "raise":
        raise ValueError("a mistake inside")
    if kind == "refuse":
        raise DataError("not this one")
    if kind == "diverge":
        raise OddError(3, 0.5)
    for index in range(value):
        yield kind, index, os.environ["OMP_NUM_THREADS"]


def run(tasks, timeout=60.0, processes=2):
    return list(run_parallel(work, tasks, processes=processes, timeout=timeout))


def test_every_task_brings_all_its_results_in_its_order():
    results = run([("a", 3), ("b", 0), ("c", 2)])
    by_task = {index: [result[:2] for at, result in results if at == index] for index in range(3)}
    assert by_task == {0: [("a", 0), ("a", 1), ("a", 2)], 1: [], 2: [("c", 0), ("c", 1)]}
    assert {result[2] for _, result in results} == {"1"}
    assert run([]) == []


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("die", WorkerError, r"at work on task 1 died \(exit code -9\)"),
        ("exit", WorkerError, r"at work on task 1 died \(exit code 1\); see its message above"),
        ("raise", WorkerError, "at work on task 1 failed:(?s:.*)ValueError: a mistake inside"),
        ("refuse", DataError, "not this one"),
        ("diverge", WorkerError, "step 3: loss 0.5"),
    ],
)
def test_a_lost_result_is_an_error_and_earlier_ones_are_kept(kind, error, words):
    results = run_parallel(work, [("a", 1), (kind, 1)], processes=1, timeout=60)
    assert next(results)[1][:2] == ("a", 0)
    with pytest.raises(error, match=words):
        next(results)


def test_a_silent_process_is_ended():
    start = time.monotonic()
    with pytest.raises(WorkerError, match="task 0 was silent for 3 s"):
        run([("hang", 1)], timeout=3)
    assert time.monotonic() - start < 30


def test_leaving_early_ends_the_processes():
    results = run_parallel(work, [("a", 1), ("hang", 1)], processes=2, timeout=60)
    next(results)
    start = time.monotonic()
    results.close()
    assert time.monotonic() - start < 20


INTERRUPTED = """
import signal
from ridgeline.games.parallel import run_parallel
from games.test_parallel import work

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are born deaf to it
    print("starting", flush=True)
    try:
        for result in run_parallel(work, [("hang", 1)] * 2, processes=2, timeout=60):
            print(result)
    except KeyboardInterrupt:
        print("stopped")
"""


@pytest.mark.parametrize("seconds", [0.02, 0.3, 1.5])
def test_an_interrupt_shows_no_process_traceback(tmp_path, seconds):
    """A terminal sends it to all, also to processes that are still importing."""
    (tmp_path / "x.py").write_text(INTERRUPTED)
    paths = os.pathsep.join(path for path in sys.path if path)
    caller = subprocess.Popen(
        [sys.executable, "x.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert caller.stdout.readline() == "starting\n"
    time.sleep(seconds)
    os.killpg(caller.pid, signal.SIGINT)
    said, errors = caller.communicate(timeout=60)
    assert said == "stopped\n"
    assert errors == ""
