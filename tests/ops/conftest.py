"""Fixtures that the tests of several ops share."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from ridgeline.errors import UnsupportedError
from ridgeline.ops._cuda import nvrtc
from ridgeline.ops._cuda.compiler import INCLUDE_DIRECTORY


class EmulatedMap(ctypes.Structure):
    """The emulation's TensorMap."""

    _fields_ = (
        ("base", ctypes.c_void_p),
        ("stride", ctypes.c_uint64 * 4),
        ("extent", ctypes.c_uint32 * 4),
        ("box", ctypes.c_uint32 * 4),
        ("swizzle", ctypes.c_uint32),
        ("unused", ctypes.c_uint8 * 52),
    )


class Emulation:
    """Whole Hopper kernels as host programs: tests/ops/emulation stands in for the headers of the card."""

    def __init__(self, folder: Path, compiler: str) -> None:
        self._folder, self._compiler, self._count = folder, compiler, 0

    def maps(self, *tensors: tuple[Tensor, tuple[int, ...]]) -> ctypes.Array[EmulatedMap]:
        """Maps of 16-bit numbers of rank 2 to 4 with boxes of 128-byte rows, one after another."""
        made = [
            EmulatedMap(
                x.data_ptr(),
                (ctypes.c_uint64 * 4)(*x.stride()[::-1], *[0] * (4 - x.dim())),
                (ctypes.c_uint32 * 4)(*x.shape[::-1], *[1] * (4 - x.dim())),
                (ctypes.c_uint32 * 4)(*box[::-1], *[1] * (4 - x.dim())),
                128,
            )
            for x, box in tensors
        ]
        return (EmulatedMap * len(made))(*made)

    def compile(self, source: str, macros: dict[str, int], *include: Path) -> Callable[..., bytes | None]:
        """The function `run` of C++ text; it returns nothing, or what went wrong."""
        self._count += 1
        file = self._folder / f"kernel{self._count}.cpp"
        library = file.with_suffix(".so")
        file.write_text(source, encoding="utf-8")
        paths = [f"-I{path}" for path in (Path(__file__).parent / "emulation", *include, INCLUDE_DIRECTORY)]
        flags = [f"-D{name}={value}" for name, value in macros.items()]
        options = ["-O1", "-std=c++17", "-shared", "-fPIC", "-w"]
        subprocess.run([self._compiler, *options, *flags, *paths, file, "-o", library], check=True)
        run = ctypes.CDLL(str(library)).run
        run.restype = ctypes.c_char_p
        return run


@pytest.fixture
def emulation(tmp_path: Path) -> Emulation:
    """Compiles and runs whole kernels on the host."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler (g++ or clang++)")
    return Emulation(tmp_path, compiler)


@pytest.fixture
def machine_code(tmp_path: Path) -> Callable[[bytes], str]:
    """The machine code of a cubin as text, by Triton's cuobjdump."""
    triton = pytest.importorskip("triton")
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.is_file():
        pytest.skip("needs Triton's cuobjdump")

    def disassemble(image: bytes) -> str:
        file = tmp_path / "kernel.cubin"
        file.write_bytes(image)
        return subprocess.run([tool, "-sass", file], check=True, capture_output=True, text=True).stdout

    return disassemble


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
