"""How many threads PyTorch computes with on the CPU; to be decided before it is imported.

One a physical core that this process may use. Between parallel regions they sleep instead of spinning: on two busy
cores a small GPT's step took 2.2 s with two spinning threads (9.6 s at worst), 0.65 s with one, 0.49 s with two that
sleep; on idle cores spinning gained nothing. The user's OMP_NUM_THREADS and OMP_WAIT_POLICY have the last word.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
QUOTA = Path("/sys/fs/cgroup/cpu.max")


def configure_threads() -> None:
    """Set OpenMP's environment, unless the user has."""
    os.environ.setdefault("OMP_NUM_THREADS", str(usable_cores()))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def usable_cores() -> int:
    """Physical cores that this process may run on, within its container's quota of processor time."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cores = set()
    for cpu in os.sched_getaffinity(0):
        file = Path(TOPOLOGY.format(cpu))
        cores.add(file.read_text() if file.exists() else cpu)
    return max(1, min(len(cores), _quota()))


def _quota() -> int:
    try:
        quota, period = QUOTA.read_text().split()
    except (OSError, ValueError):
        return len(os.sched_getaffinity(0))
    return len(os.sched_getaffinity(0)) if quota == "max" else math.ceil(int(quota) / int(period))
