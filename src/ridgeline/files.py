"""Files that are whole at every moment, and the folder for what can be made again."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ridgeline.errors import ConfigError


def cache() -> Path:
    """The folder for what can be made again, which may not exist yet: RIDGELINE_CACHE, or ~/.cache/ridgeline.

    Raises:
        ConfigError: there is no home folder and the variable is not set.
    """
    named = os.environ.get("RIDGELINE_CACHE")
    if named:
        return Path(named)
    try:
        return Path.home() / ".cache" / "ridgeline"
    except RuntimeError as error:
        raise ConfigError("there is no home folder to keep caches in; set RIDGELINE_CACHE to a folder") from error


def parsed(text: Any, loads: Callable[[Any], Any] = json.loads) -> Any:
    """What a text says that was kept or typed in, by default in JSON.

    Args:
        text: the text, or bytes that `loads` takes.
        loads: reads it; raises ValueError where it cannot.

    Raises:
        ValueError: it cannot be read, or is nested too deeply.
    """
    try:
        return loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def replace(file: Path, content: str | bytes) -> Path:
    """Write a file beside its place and rename it, so that nobody ever finds a part of it there.

    Several threads and processes may replace one file at the same time; the last one's content stays. It is not
    waited for the disk, so that after a loss of power an older content may be back.

    Args:
        file: what is made or replaced; its folder must exist.
        content: bytes, or text, which is written as UTF-8.

    Raises:
        OSError: it cannot be written; what was there stays, and nothing else is left.
    """
    data = content.encode() if isinstance(content, str) else content
    aside = file.with_name(f".{file.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        aside.write_bytes(data)
        os.replace(aside, file)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise
    return file
