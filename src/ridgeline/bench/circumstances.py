"""What a measurement depends on besides the code that is measured: revision and versions."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import torch

import ridgeline
from ridgeline.bench.nvml import Monitor


def git_revision() -> str | None:
    """Revision of the code that runs, with "+" if files were changed; None outside a repository of its own.

    A copy of the files without their repository says which revision they are by RIDGELINE_REVISION. Installed into an
    environment that lies in someone's repository, the code is no part of that: its files are not tracked there.
    """
    if os.environ.get("RIDGELINE_REVISION"):
        return os.environ["RIDGELINE_REVISION"]
    folder = Path(ridgeline.__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True, timeout=20
        ).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def versions(watch: Monitor | None) -> dict[str, str]:
    """Versions of everything that a time depends on."""
    found = {"ridgeline": ridgeline.__version__, "python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
        found["cudnn"] = str(torch.backends.cudnn.version())
    try:
        from triton import __version__ as triton_version

        found["triton"] = triton_version
    except ImportError:
        pass
    if watch is not None:
        found["driver"] = watch.driver()
    return found
