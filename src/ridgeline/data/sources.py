"""Texts that have a name: one that is fetched, and one that every Python brings along."""

from __future__ import annotations

import hashlib
import platform
import sysconfig
import urllib.request
from http.client import HTTPException
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ridgeline.data import text
from ridgeline.errors import DataError

# "tiny Shakespeare" of Andrej Karpathy's char-rnn; the text is in the public domain
TINYSHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
TINYSHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
TIMEOUT = 30.0  # seconds without an answer
NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


def tinyshakespeare(source: Path | None = None) -> NDArray[np.uint8]:
    """The text's bytes, from a file or from its URL.

    Raises:
        DataError: it cannot be had, or is another text than the one that everybody measures on.
    """
    content = text.read_file(source) if source else _fetch(TINYSHAKESPEARE_URL)
    digest = hashlib.sha256(content.data).hexdigest()
    if digest != TINYSHAKESPEARE_SHA256:
        raise DataError(
            f"{source or TINYSHAKESPEARE_URL} is not tinyshakespeare (sha256 {digest[:16]}…, expected "
            f"{TINYSHAKESPEARE_SHA256[:16]}…); give the original file, or use it as a text of its own"
        )
    return content


def pystdlib() -> NDArray[np.uint8]:
    """The source of the running Python's standard library, without its tests, file after file.

    The order is that of the hashes of the files' names: the same on every machine, and the held-out end is a fair
    sample of the library instead of its last letters.

    Raises:
        DataError: this Python comes without its source.
    """
    root = Path(sysconfig.get_path("stdlib"))
    names = [
        name
        for file in root.rglob("*.py")
        if not NOT_LIBRARY.intersection((name := file.relative_to(root)).parts) and file.is_file()
    ]
    if not names:
        raise DataError(f"this Python has no library source in {root}; give a text file instead")
    names.sort(key=lambda name: hashlib.sha256(name.as_posix().encode()).digest())
    try:
        return np.frombuffer(b"".join((root / name).read_bytes() for name in names), dtype=np.uint8)
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read ({error.strerror}); give a text file instead") from error


def pystdlib_source() -> str:
    """Where `pystdlib` comes from, for the record."""
    return f"standard library of Python {platform.python_version()}"


def _fetch(url: str) -> NDArray[np.uint8]:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
            return np.frombuffer(answer.read(), dtype=np.uint8)
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise DataError(
            f"cannot fetch {url} ({reason}); give the text as a file, or train on pystdlib, which is on this disk"
        ) from error
