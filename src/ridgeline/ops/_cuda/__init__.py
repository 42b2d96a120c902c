"""CUDA C++ compiled at run time: no compiler on the user's machine, no build step, no header but our own.

    module = load(Path(__file__).parent / "kernel.cu", {"TILE_M": 128})
    kernel = module.kernel("gemm", "MMPif")             # parameter kinds, see `Kernel`
    kernel.launch(grid, block, smem, (map_a, map_b, out, K, 1.0))

NVRTC turns a .cu file of the package into a cubin for one architecture (kept on disk, keyed by everything that went
into it), the driver loads it, and a launch goes to torch's current stream with plain values, so it can be captured
in a CUDA graph. Only the C interfaces of libnvrtc and libcuda are used, through ctypes: both are what torch's CUDA
wheels bring or need anyway.
"""

from ridgeline.ops._cuda.compiler import Cubin, Resources, build
from ridgeline.ops._cuda.launch import Argument, Kernel, Module, load
from ridgeline.ops._cuda.tensormap import tensor_map

__all__ = ["Argument", "Cubin", "Kernel", "Module", "Resources", "build", "load", "tensor_map"]
