"""What `ridgeline bench` measures unless it is told otherwise, and where records go."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import torch

from ridgeline.bench.contenders import CONTENDERS
from ridgeline.bench.workloads import Workload
from ridgeline.errors import ConfigError
from ridgeline.records import Record, write_record

CPU = ("eager", "compile")


def usual_contenders(case: Workload, device: torch.device) -> list[str]:
    """Every engine and rung on a card, with attention written out where that is PyTorch's faster way; on the CPU what
    runs there."""
    if device.type == "cpu":
        return list(CPU)
    engines = [name for name, contender in CONTENDERS.items() if contender.peer is None]
    return [*engines, *(["compile+graph:explicit"] if case.model.decoder.positions == "relative" else [])]


def record_file(record: Record, folder: str | Path) -> Path:
    """A file for the record that is not there yet: FOLDER/CARD/DATE-KIND-WORKLOAD-bB-tT-PRECISION.json."""
    info = record.workload
    assert info is not None
    card = re.sub(r"[^a-z0-9]+", "-", record.card.lower()).strip("-")
    cards = f"-{record.gpus}gpus" if record.gpus > 1 else ""
    name = re.sub(r"[^A-Za-z0-9_.+=-]+", "-", info.name).strip("-.")  # the name of a file of settings has a path
    stem = f"{record.date[:10]}-{record.kind}-{name}-b{info.batch}-t{info.context}-{info.precision}{cards}"
    file, number = Path(folder) / card / f"{stem}.json", 1
    while file.exists():
        number += 1
        file = file.with_name(f"{stem}-{number}.json")
    return file


def check_folder(folder: str | Path) -> None:
    """Makes a folder for records, and tries it before anything is measured in vain.

    Raises:
        ConfigError: nothing can be written there.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _unwritten(folder, error) from error


def store(record: Record, file: Path) -> Path:
    """Write a record.

    Raises:
        ConfigError: it cannot be written there.
    """
    try:
        return write_record(record, file)
    except OSError as error:
        raise _unwritten(file, error) from error


def _unwritten(place: str | Path, error: OSError) -> ConfigError:
    return ConfigError(f"{place} cannot be written: {error.strerror}; choose another folder")
