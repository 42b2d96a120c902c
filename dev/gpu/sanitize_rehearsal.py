"""The cases of compute-sanitizer on a card that does not exist: which kernels each launches, and which products.

    PYTHONPATH=src python3 dev/gpu/sanitize_rehearsal.py [CASE …]

Tensors are fake (shapes without memory), nothing is compiled, and no kernel runs; all else is what happens on a
Hopper card: the choice of routes, buffers, tensor maps, parameters packed for each launch. Prints a line of JSON a
case: {"case", "launched": [kernel …], "forms": [kernel of CUDA C++ with its macros …], "products": how many the host
would compute}; then, unless cases are named, one for a step of two blocks of each row of benchmarks/goals.toml. Needs
a C++ compiler. COMPILE=1 compiles the CUDA C++ all the same, into $RIDGELINE_CACHE.
"""

import contextlib
import ctypes
import functools
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import tempfile
import tomllib
import types
import warnings
from pathlib import Path

HERE = Path(__file__).resolve().parent
OPS = HERE.parents[1] / "src/ridgeline/ops"


def make_card():
    """Loads sanitize_card.cpp, before torch is imported: hooks are looked up once."""
    torch_folder = Path(importlib.util.find_spec("torch").origin).parent
    libraries = torch_folder / "lib"
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "card.so"
        subprocess.run(
            [
                os.environ.get("CXX", "g++"), "-O0", "-std=c++20", "-w", "-shared", "-fPIC", HERE / "sanitize_card.cpp",
                f"-I{torch_folder / 'include'}", "-o", made, f"-L{libraries}", "-lc10", "-ltorch_cpu",
            ],
            check=True,
        )  # fmt: skip
        for name in (libraries / "libc10.so", libraries / "libtorch_cpu.so", made):
            ctypes.CDLL(str(name), ctypes.RTLD_GLOBAL)


class Stream:
    """Every stream is the same, and nothing waits."""

    device, stream_id, cuda_stream = None, 0, 0

    def __init__(self, *_, **__):
        pass

    wait_stream = wait_event = synchronize = record = __init__


def answer_for_card():
    """What is asked of torch.cuda, the driver and the compilers."""
    properties = types.SimpleNamespace(
        multi_processor_count=132,
        total_memory=141 << 30,
        L2_cache_size=50 << 20,
        shared_memory_per_block_optin=227 << 10,
    )
    answers = {
        "is_available": True, "current_device": 0, "device_count": 1, "get_device_capability": (9, 0),
        "get_device_name": "a card that is none", "get_device_properties": properties, "init": None,
        "synchronize": None, "max_memory_allocated": 0, "memory_allocated": 0, "reset_peak_memory_stats": None,
        "empty_cache": None, "mem_get_info": (1 << 37, 1 << 37), "get_sync_debug_mode": 0,
        "is_current_stream_capturing": False,
    }  # fmt: skip
    for name, value in answers.items():
        setattr(torch.cuda, name, lambda *_, value=value, **__: value)
    torch.cuda.Stream = torch.cuda.Event = Stream
    torch.cuda.current_stream = Stream
    torch.cuda.stream = lambda _: contextlib.nullcontext()
    torch._C._cuda_getCurrentRawStream = lambda _: 0

    make = torch.tensor

    def tensor(data, *, device="cpu", **rest):  # a fake one with values would be moved to the card for real
        known = make(data, **rest)
        return torch.empty(known.shape, dtype=known.dtype, device=device)

    torch.tensor = tensor
    torch.nn.Module._apply = move


def move(module, function):
    """Module._apply, which cannot exchange a fake parameter that a fake mode knows."""
    moved = {}
    for part in module.modules():
        for tensors, kind in ((part._parameters, torch.nn.Parameter), (part._buffers, lambda x: x)):
            for name, x in tensors.items():
                if x is not None:
                    with torch.no_grad():
                        tensors[name] = moved.setdefault(id(x), kind(function(x)))
    return module


def launch_nowhere(tell):
    """No kernel is compiled or run; `tell` is called with the file, name and macros of each that is launched."""
    from triton.runtime.jit import JITFunction

    from ridgeline.ops._cuda import driver, launch
    from ridgeline.ops._cuda.compiler import Cubin

    def launch_cuda(config, kernel, parameters, extra):
        (file, macros), name = kernel
        tell(file, name, macros)
        return 0

    def launch_triton(kernel, *args, grid, warmup, **named):
        options = ("num_warps", "num_stages", "launch_pdl", "num_ctas", "maxnreg")
        inspect.signature(kernel.fn).bind(*args, **{k: v for k, v in named.items() if k not in options})
        tell(kernel.fn.__code__.co_filename, kernel.fn.__name__, None)

    driver.library = lambda: types.SimpleNamespace(cuLaunchKernelEx=launch_cuda, cuTensorMapEncodeTiled=lambda *_: 0)
    driver.load_library = lambda image: image
    driver.get_kernel = lambda image, name: (image, name)
    driver.allow_dynamic_smem = lambda *_: None
    compile = launch.build if "COMPILE" in os.environ else lambda *_: None
    launch.build = lambda path, defines, arch: (compile(path, defines, arch), Cubin((path, defines), "", arch))[1]
    JITFunction.run = launch_triton


def values_mode():
    """The class of a mode: what the host asks of a tensor that has no values is one, or true; lengths that depend on
    them are some."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Values(TorchDispatchMode):
        def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
            if func is torch.ops.aten._local_scalar_dense.default:
                return True if args[0].dtype == torch.bool else 1
            if func is torch.ops.aten.repeat_interleave.Tensor:
                return args[0].new_empty(999)
            return func(*args, **(kwargs or {}))

    return Values


def goals():
    """{name: a step of it} for the rows of benchmarks/goals.toml."""
    from sanitize_steps import train

    rows = tomllib.loads((HERE.parents[1] / "benchmarks/goals.toml").read_text())["goal"]
    sizes = sorted({tuple(row[key] for key in ("workload", "batch", "context", "precision")) for row in rows})
    return {
        f"goal {name} {batch} x {context} {precision}": functools.partial(
            train, name, "fused", batch, context, steps=1, precision=precision, layers=2
        )
        for name, batch, context, precision in sizes
    }


def main(names):
    warnings.filterwarnings("ignore", "Accessing the data pointer")
    answer_for_card()
    launched, forms = set(), set()

    def tell(file, kernel, macros):
        launched.add(f"{Path(file).relative_to(OPS)}:{kernel}")
        if macros is not None:
            forms.add(f"{Path(file).relative_to(OPS)}:{kernel} {sorted(macros.items())}")

    launch_nowhere(tell)
    import sanitize_cases  # noqa: F401  (registers them)
    from sanitize_kit import CASES, CONTROLS, ProductsOnHost
    from torch._subclasses.fake_tensor import FakeTensorMode

    values = values_mode()
    torch.autograd.set_multithreading_enabled(False)
    fake = FakeTensorMode()  # one: plans are kept between cases
    cases = {name: case for name, case in CASES.items() if name not in CONTROLS} | ({} if names else goals())
    for name in names or cases:
        launched.clear()
        forms.clear()
        with fake, values(), ProductsOnHost() as products:
            cases[name]()
        told = {"case": name, "launched": sorted(launched), "forms": sorted(forms), "products": products.calls}
        print(json.dumps(told), flush=True)


make_card()
import torch

if __name__ == "__main__":
    main(sys.argv[1:])
