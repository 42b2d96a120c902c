"""What every study's record says of where it was run."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import torch

from ridgeline.bench.nvml import monitor
from ridgeline.bench.run import git_revision, versions
from ridgeline.records import WorkloadInfo
from ridgeline.train.config import TrainConfig

CPU = "CPU"


def card(config: TrainConfig) -> str:
    """Name of what a config with a decided device computes on; all CPUs are one."""
    device = torch.device(config.device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else CPU


def machine(config: TrainConfig) -> dict[str, Any]:
    """Date, revision, card and versions of what a config with a decided device runs on."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "git": git_revision(),
        "card": card(config),
        "versions": versions(monitor(torch.device(config.device))),
    }


def circumstances(config: TrainConfig) -> dict[str, Any]:
    """Date, revision, card, versions and workload of a Record; `config` has device and precision decided."""
    return {
        **machine(config),
        "gpus": 1 if torch.device(config.device).type == "cuda" else 0,
        "workload": workload(config, config.data),
    }


def workload(config: TrainConfig, name: str) -> WorkloadInfo:
    """What a config trains on, under a name."""
    return WorkloadInfo(name=name, batch=config.batch, context=config.window.context, precision=config.precision)
