"""From a .cu file of the package to a cubin: includes, options, the cache on disk, and what each kernel uses."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ridgeline import files
from ridgeline.errors import ConfigError, reason
from ridgeline.ops._cuda import nvrtc

INCLUDE_DIRECTORY = Path(__file__).parent / "include"
Defines = Mapping[str, int | float | str]

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_USAGE = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers(?:[^\n]*?(\d+) bytes smem)?",
    re.DOTALL,
)


class Resources(NamedTuple):
    """What ptxas reports of one kernel: registers a thread, bytes of stack and spills a thread, static shared bytes."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    static_smem: int


class Cubin(NamedTuple):
    """Machine code for one architecture, with the compiler's log."""

    image: bytes
    log: str
    arch: str

    def resources(self) -> dict[str, Resources]:
        """Resource use of every kernel in the image, by name."""
        report = {}
        for part in re.split(r"(?=Compiling entry function)", self.log):
            entry, usage = _ENTRY.search(part), _USAGE.search(part)
            if entry and usage:
                stack, stores, loads, registers, smem = usage.groups()
                report[entry.group(1)] = Resources(int(registers), int(stack), int(stores), int(loads), int(smem or 0))
        return report


def cache_directory() -> Path:
    """Where compiled kernels are kept: $RIDGELINE_CACHE, or ~/.cache/ridgeline."""
    return files.cache() / "cubin"


def _sources(path: Path) -> list[Path]:
    """The file and every file that it includes in quotes, each once, in the order of first mention."""
    found: list[Path] = []
    queue = [path]
    while queue:
        current = queue.pop(0)
        if current in found:
            continue
        found.append(current)
        for name in _INCLUDE.findall(current.read_text(encoding="utf-8")):
            choices = [current.parent / name, INCLUDE_DIRECTORY / name]
            queue.append(next((choice for choice in choices if choice.is_file()), choices[-1]))
    return found


def _options(path: Path, defines: Defines, arch: str) -> list[str]:
    return [
        f"--gpu-architecture={arch}",
        "--std=c++17",
        "--extra-device-vectorization",
        "--ptxas-options=-v",
        f"--include-path={path.parent}",
        f"--include-path={INCLUDE_DIRECTORY}",
        *(f"--define-macro={name}={value}" for name, value in sorted(defines.items())),
    ]


def _key(path: Path, defines: Defines, arch: str) -> str:
    digest = hashlib.sha256(nvrtc.version().encode())
    for source in _sources(path):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    digest.update(
        "\0".join(option for option in _options(path, defines, arch) if "include-path" not in option).encode()
    )
    return f"{path.stem}-{arch}-{digest.hexdigest()[:24]}"


def build(path: Path, defines: Defines | None = None, arch: str = "sm_90a") -> Cubin:
    """Compile a .cu file for one architecture, or take it from the cache on disk.

    Args:
        path: the .cu file; files that it includes in quotes lie beside it or under `_cuda/include`.
        defines: macros, name to value; a configuration of a kernel is a set of them.
        arch: `sm_80`, `sm_90a`, …; the `a` gives wgmma and setmaxnreg.

    Raises:
        UnsupportedError: NVRTC is not installed.
        ConfigError: the cache folder cannot be written.
        RuntimeError: the source does not compile.
    """
    defines = defines or {}
    folder = cache_directory()
    image_path = folder / f"{_key(path, defines, arch)}.cubin"
    log_path = image_path.with_suffix(".log")
    if image_path.is_file() and log_path.is_file():
        return Cubin(image_path.read_bytes(), log_path.read_text(encoding="utf-8"), arch)
    image, log = nvrtc.compile_cubin(path.read_text(encoding="utf-8"), path.name, _options(path, defines, arch))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files.replace(log_path, log)
        files.replace(image_path, image)
    except OSError as error:
        raise ConfigError(f"cannot keep compiled kernels in {folder} ({reason(error)}); set RIDGELINE_CACHE") from error
    return Cubin(image, log, arch)
