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


class _Sources(NamedTuple):
    """What a .cu file consists of, read once: what is hashed is what is compiled, whoever edits the files meanwhile.

    Attributes:
        texts: of the file and of every file that it includes in quotes, each once, in the order of first mention.
        headers: text by the name in the quotes.
    """

    texts: dict[Path, str]
    headers: dict[str, str]


def _read(path: Path) -> _Sources:
    found, headers = _Sources({}, {}), dict[str, Path]()
    queue = [path]
    while queue:
        current = queue.pop(0)
        if current in found.texts:
            continue
        found.texts[current] = text = current.read_text(encoding="utf-8")
        for name in _INCLUDE.findall(text):
            choices = [current.parent / name, INCLUDE_DIRECTORY / name]
            header = next((choice for choice in choices if choice.is_file()), choices[-1])
            if headers.setdefault(name, header).resolve() != header.resolve():
                raise ConfigError(f"{path} includes two files by the one name {name}: {headers[name]} and {header}")
            queue.append(header)
    found.headers.update((name, found.texts[header]) for name, header in headers.items())
    return found


def _options(defines: Defines, arch: str) -> list[str]:
    return [
        f"--gpu-architecture={arch}",
        "--std=c++17",
        "--extra-device-vectorization",
        "--ptxas-options=-v",
        *(f"--define-macro={name}={value}" for name, value in sorted(defines.items())),
    ]


def _key(path: Path, sources: _Sources, options: list[str], arch: str) -> str:
    digest = hashlib.sha256(nvrtc.version().encode())
    for source, text in sources.texts.items():
        digest.update(source.name.encode() + b"\0" + text.encode() + b"\0")
    digest.update("\0".join(options).encode())
    return f"{path.stem}-{arch}-{digest.hexdigest()[:24]}"


def build(path: Path, defines: Defines | None = None, arch: str = "sm_90a") -> Cubin:
    """Compile a .cu file for one architecture, or take it from the cache on disk.

    Args:
        path: the .cu file; files that it includes in quotes lie beside it or under `_cuda/include`.
        defines: macros, name to value; a configuration of a kernel is a set of them.
        arch: `sm_80`, `sm_90a`, …; the `a` gives wgmma and setmaxnreg.

    Raises:
        UnsupportedError: NVRTC is not installed.
        ConfigError: the cache folder cannot be written, or two headers have one name.
        RuntimeError: the source does not compile.
    """
    defines = defines or {}
    folder, sources, options = cache_directory(), _read(path), _options(defines, arch)
    image_path = folder / f"{_key(path, sources, options, arch)}.cubin"
    log_path = image_path.with_suffix(".log")
    if image_path.is_file() and log_path.is_file():
        return Cubin(image_path.read_bytes(), log_path.read_text(encoding="utf-8"), arch)
    image, log = nvrtc.compile_cubin(sources.texts[path], path.name, options, sources.headers)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files.replace(log_path, log)
        files.replace(image_path, image)
    except OSError as error:
        raise ConfigError(f"cannot keep compiled kernels in {folder} ({reason(error)}); set RIDGELINE_CACHE") from error
    return Cubin(image, log, arch)
