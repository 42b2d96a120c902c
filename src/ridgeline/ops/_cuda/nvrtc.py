"""NVRTC through ctypes: CUDA C++ text in, cubin and compiler log out. Needs no GPU."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from ridgeline.errors import UnsupportedError

_SONAME = re.compile(r"libnvrtc\.so\.(\d+)(?:\.(\d+))?")


def _directories() -> Iterator[Path]:
    """Where wheels and toolkits keep libnvrtc, the wheels beside torch first."""
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or [] if spec else []:
        yield from sorted(Path(root).glob("*/lib"), reverse=True)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if variable in os.environ:
            yield Path(os.environ[variable]) / "lib64"
    yield Path("/usr/local/cuda/lib64")


def _candidates() -> Iterator[str]:
    """Library names to try: torch's own CUDA major version first, since the driver must accept what it makes."""
    major = (torch.version.cuda or "").split(".")[0]
    found = [
        (match.group(1), str(path))
        for directory in _directories()
        if directory.is_dir()
        for path in directory.iterdir()
        if (match := _SONAME.fullmatch(path.name))
    ]
    if major:
        yield from (path for version, path in found if version == major)
        yield f"libnvrtc.so.{major}"
    else:
        yield from (path for _, path in sorted(found, key=lambda item: -int(item[0])))


@functools.cache
def _library() -> tuple[ctypes.CDLL, str]:
    """The NVRTC library and the path it was found at."""
    for name in _candidates():
        try:
            for builtins in Path(name).parent.glob("libnvrtc-builtins.so.*") if os.path.isabs(name) else ():
                ctypes.CDLL(str(builtins))  # libnvrtc opens it by name, which finds a loaded one
            return ctypes.CDLL(name), name
        except OSError:
            continue
    raise UnsupportedError(
        "the CUDA run-time compiler (libnvrtc) was not found; install a CUDA build of torch, or nvidia-cuda-nvrtc"
    )


def _check(code: int, call: str) -> None:
    if code:
        library, _ = _library()
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(f"{call} failed: {library.nvrtcGetErrorString(code).decode()}")


@functools.cache
def version() -> str:
    """Identity of the compiler: `major.minor` and, where its file is known, the file's size in bytes."""
    library, path = _library()
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
    size = os.path.getsize(path) if os.path.isabs(path) else 0
    return f"{major.value}.{minor.value}-{size}"


def _text(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    """The bytes that nvrtcGet`what` returns for a compiled program."""
    size = ctypes.c_size_t()
    _check(getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), f"nvrtcGet{what}Size")
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(library, f"nvrtcGet{what}")(program, buffer), f"nvrtcGet{what}")
    return buffer.raw


def _strings(texts: Iterable[str]) -> ctypes.Array[ctypes.c_char_p]:
    """Texts as C has them."""
    encoded = [text.encode() for text in texts]
    return (ctypes.c_char_p * len(encoded))(*encoded)


def compile_cubin(source: str, name: str, options: Sequence[str], headers: Mapping[str, str]) -> tuple[bytes, str]:
    """Compile one source text.

    Args:
        source: CUDA C++.
        name: what the compiler's messages call it.
        options: NVRTC options, among them `--gpu-architecture=sm_…`.
        headers: what `source` and they themselves include, by name; nothing is read from the disk.

    Returns:
        The cubin and the compiler's log.

    Raises:
        UnsupportedError: NVRTC is not installed.
        RuntimeError: the source does not compile; the message holds the compiler's log.
    """
    library, _ = _library()
    program = ctypes.c_void_p()
    _check(
        library.nvrtcCreateProgram(
            ctypes.byref(program),
            source.encode(),
            name.encode(),
            len(headers),
            _strings(headers.values()),
            _strings(headers),
        ),
        "nvrtcCreateProgram",
    )
    try:
        code = library.nvrtcCompileProgram(program, len(options), _strings(options))
        log = _text(library, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
        if code:
            raise RuntimeError(f"{name} does not compile:\n{log}")
        return _text(library, program, "CUBIN"), log
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
