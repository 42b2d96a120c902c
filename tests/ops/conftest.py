"""Fixtures that the tests of several ops share."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ridgeline.errors import UnsupportedError
from ridgeline.ops._cuda import nvrtc
from ridgeline.ops._cuda.compiler import INCLUDE_DIRECTORY


@pytest.fixture
def compile_host(tmp_path: Path) -> Callable[..., ctypes.CDLL]:
    """A function from C++ text (with `extern "C"` functions) and include folders to a loaded library.

    The parts of CUDA C++ headers that are plain C++ run this way without a GPU.
    """
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler (g++ or clang++)")

    def compile_source(source: str, *include: Path) -> ctypes.CDLL:
        file, library = tmp_path / "host.cpp", tmp_path / "host.so"
        file.write_text(source, encoding="utf-8")
        paths = [f"-I{path}" for path in (INCLUDE_DIRECTORY, *include)]
        subprocess.run([compiler, "-O2", "-std=c++17", "-shared", "-fPIC", *paths, file, "-o", library], check=True)
        return ctypes.CDLL(str(library))

    return compile_source


@pytest.fixture
def needs_nvrtc() -> None:
    """Skips where CUDA C++ cannot be compiled."""
    try:
        nvrtc.version()
    except UnsupportedError:
        pytest.skip("needs libnvrtc (pip install nvidia-cuda-nvrtc)")
