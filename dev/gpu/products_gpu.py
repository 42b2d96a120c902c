"""Products of a hal-20m block that cuBLAS does, by all that its library offers and by the Hopper GEMM: µs, and µs at the power limit.

    PYTHONPATH=src:dev/gpu OUT=… python3 dev/gpu/products_gpu.py [seconds] [case …]      ($OUT/products.json)
"""

import ctypes
import json
import os
import re
import sys
import time
from pathlib import Path

import torch
from gemm_gpu import graph_of, hot, in_turns

N, C, F, Q, BF = 131072, 512, 2048, 1536, torch.bfloat16
CHOICES, WORKSPACE = 8, 64 << 20
CASES = {  # name: (kind, K or rows of the gradient)
    "dx up": ("NN", F),
    "down": ("NT", F),
    "dx qkv": ("NN", Q),
    "wgrad up": ("TN", F),
    "wgrad down": ("TN wide", F),
    "wgrad qkv": ("TN", Q),
}


class Result(ctypes.Structure):
    _fields_ = [("algo", ctypes.c_uint64 * 8), ("workspace", ctypes.c_size_t), ("state", ctypes.c_int), ("waves", ctypes.c_float), ("rest", ctypes.c_int * 4)]


class Lt:
    """cuBLASLt as PyTorch has loaded it: products whose algorithm one can choose."""

    def __init__(self):
        paths = set(re.findall(r"/\S*libcublasLt\.so\S*", Path("/proc/self/maps").read_text()))
        self.lib, self.handle = ctypes.CDLL(sorted(paths)[0]), ctypes.c_void_p()
        self.call("Create", ctypes.byref(self.handle))
        self.workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device="cuda")
        self.numbers = (ctypes.c_float * 2)(1.0, 0.0)

    def call(self, name, *arguments):
        status = getattr(self.lib, "cublasLt" + name)(*arguments)
        if status:
            raise RuntimeError(f"cublasLt{name}: status {status}")

    def layout(self, dtype, rows, columns):
        made = ctypes.c_void_p()
        self.call("MatrixLayoutCreate", ctypes.byref(made), 14 if dtype == BF else 0, ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows))
        return made

    def prepare(self, a, ta, b, tb, d):
        """Column-major D = op(A) op(B), of row-major tensors whose last axis is the column-major one's first."""
        desc, preference, found = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
        self.call("MatmulDescCreate", ctypes.byref(desc), 68, 0)
        for attribute, value in ((3, ta), (4, tb)):
            self.call("MatmulDescSetAttribute", desc, attribute, ctypes.byref(ctypes.c_int32(value)), ctypes.c_size_t(4))
        layouts = [self.layout(x.dtype, x.shape[1], x.shape[0]) for x in (a, b, d, d)]
        self.call("MatmulPreferenceCreate", ctypes.byref(preference))
        self.call("MatmulPreferenceSetAttribute", preference, 1, ctypes.byref(ctypes.c_uint64(WORKSPACE)), ctypes.c_size_t(8))
        results = (Result * CHOICES)()
        self.call("MatmulAlgoGetHeuristic", self.handle, desc, *layouts, preference, CHOICES, results, ctypes.byref(found))

        def run(result):
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            one, zero = (ctypes.byref(self.numbers, 4 * i) for i in range(2))
            pointer = lambda x: ctypes.c_void_p(x.data_ptr())
            self.call(
                "Matmul", self.handle, desc, one, pointer(a), layouts[0], pointer(b), layouts[1], zero, pointer(d), layouts[2], pointer(d), layouts[3],
                ctypes.byref(result), pointer(self.workspace), ctypes.c_size_t(WORKSPACE), stream)

        return [lambda r=results[i]: run(r) for i in range(found.value)]


def kernel_names(step):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    return " + ".join(e.name[:60] for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA and "Mem" not in e.name)


def steps_of(kind, K, lt):
    """name: what to call; and the result that all write."""
    from ridgeline.ops.linear import gemm

    draw = lambda *s, scale=1.0: (torch.randn(*s, device="cuda") * scale).to(BF)
    if kind.startswith("TN"):
        dy, x = draw(N, K, scale=1e-2), draw(N, C)
        dy, x = (x, dy) if "wide" in kind else (dy, x)
        out = torch.empty(dy.shape[1], x.shape[1], device="cuda")
        steps = {"cuBLAS": lambda: torch.mm(dy.t(), x, out_dtype=torch.float32, out=out)}
        choices = lt.prepare(x, 0, dy, 1, out)
    else:
        dy, w, out = draw(N, K), draw(K, C, scale=K**-0.5), torch.empty(N, C, device="cuda", dtype=BF)
        turned = w.t().contiguous()
        steps = {"cuBLAS": lambda: torch.mm(dy, w if kind == "NN" else turned.t(), out=out)}
        choices = lt.prepare(*((w, 0) if kind == "NN" else (turned, 1)), dy, 0, out)
        for name, config in {"Hopper 128x128": gemm.Config(128, 128), "Hopper 64x256": gemm.Config(64, 256)}.items():
            steps[name] = lambda config=config: gemm.gemm(dy, w if kind == "NN" else turned, out, config, transposed_b=kind == "NN")
    return steps | {f"Lt {i}": step for i, step in enumerate(choices)}, out


def run_case(name, lt, end):
    torch.manual_seed(0)
    steps, out = steps_of(*CASES[name], lt)
    found: dict = {}
    graphs, right = {}, None
    for key, step in steps.items():
        try:
            out.fill_(float("nan"))
            step()
            torch.cuda.synchronize()
            right = out.double() if right is None else right
            off = float((out.double() - right).norm() / right.norm())
            found[key] = {"off": f"{off:.1e}"}
            if off < 5e-3:
                graphs[key] = graph_of(step, 4)
                found[key]["kernel"] = kernel_names(step)
        except Exception as error:
            found[key] = {"error": repr(error)[:200]}
    names = {}
    for key in list(graphs):  # an algorithm that is there twice is timed once
        if key.startswith("Lt") and names.setdefault(found[key]["kernel"], key) != key:
            del graphs[key]
    for key, us in in_turns(graphs, 4).items():
        found[key] |= {"us": round(us[2], 1), "best": round(us[0], 1)}
    for turn in range(2):  # the limit's control drifts: twice, in turns
        for key, graph in graphs.items():
            if time.time() < end:
                found[key].setdefault("hot", []).append(round(hot(graph, 0.12)[0] / 4 * 1e3, 1))
    print(name)
    for key, row in found.items():
        print(f"    {key:16}", row, flush=True)
    return found


if __name__ == "__main__":
    end = time.time() + float(sys.argv.pop(1) if sys.argv[1:] and sys.argv[1].isdigit() else 60)
    torch.mm(torch.ones(64, 64, device="cuda", dtype=BF), torch.ones(64, 64, device="cuda", dtype=BF))
    library, results = Lt(), {}
    for case in sys.argv[1:] or CASES:
        if time.time() < end - 4:
            results[case] = run_case(case, library, end)
            Path(os.environ.get("OUT", "/tmp"), "products.json").write_text(json.dumps(results))
