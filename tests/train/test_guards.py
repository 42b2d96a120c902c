"""What surrounds the loop: the garbage collector stays out, and a process ended from outside says why."""

from __future__ import annotations

import gc
import subprocess
import sys

from ridgeline.train.guards import without_gc

WAITING = """
import os, signal, threading, time
from ridgeline.train.guards import last_words
with last_words("the last words"):
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    threading.Lock().acquire()
    lock = threading.Lock(); lock.acquire(); lock.acquire()
"""


def test_the_collector_stays_out_and_comes_back():
    assert gc.isenabled()
    with without_gc():
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_process_that_waits_in_a_call_still_says_why_it_was_ended():
    done = subprocess.run([sys.executable, "-c", WAITING], capture_output=True, text=True, timeout=60)
    assert done.returncode == 128 + 15
    assert done.stderr.strip() == "the last words"
