"""What every study's record says of where it was run."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import torch

from ridgeline.bench.nvml import monitor
from ridgeline.bench.run import git_revision, versions
from ridgeline.records import WorkloadInfo
from ridgeline.train.config import TrainConfig


def circumstances(config: TrainConfig) -> dict[str, Any]:
    """Date, revision, card, versions and workload of a Record; `config` has device and precision decided."""
    device = torch.device(config.device)
    cuda = device.type == "cuda"
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "git": git_revision(),
        "card": torch.cuda.get_device_name(device) if cuda else "CPU",
        "gpus": 1 if cuda else 0,
        "versions": versions(monitor(device)),
        "workload": WorkloadInfo(
            name=config.data, batch=config.batch, context=config.window.context, precision=config.precision
        ),
    }
