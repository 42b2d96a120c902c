"""The MLP's forward pass for many rows as one kernel, against the two that it replaces, on a card.

PYTHONPATH=src:dev/gpu OUT=out python dev/gpu/forward_many_gpu.py SECONDS kernels|stress|probes … [WORKLOAD …]
... compile                                                                                           (no card)

kernels   errors over fp64 beside the two kernels', the same bits twice, us in bursts in turns
stress    thousands of launches in bursts, early ones too: the same bits at the end
probes    us of kernels that lack a part (their results are wrong), which say what the kernel waits for
"""

import json
import os
import shutil
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from fused_gpu import WORKLOADS, captured, interleaved

from ridgeline.ops import _cuda as cuda
from ridgeline.ops.early import early_launches
from ridgeline.ops.linear import products
from ridgeline.ops.linear.codes import codes_empty
from ridgeline.ops.mlp import forward_many, many
from ridgeline.ops.mlp.kernels import Join

N, EPS, OUT = 131072, 1e-5, os.environ.get("OUT", "/tmp")
END = time.time() + 3600
ACTIVATE, SOURCE = "slope[i] = activate<GELU_TANH, true>(v0, v1);", forward_many.SOURCE
PIECES = forward_many.DOWN_PIECES
LAYOUT, UP, MAIN = "forward_many.cuh", "forward_many_up.cuh", "forward_many.cu"
OWN = [  # each block fetches all of its weights
    (LAYOUT, "barrier_init(empty(i), 2 * warps);", "barrier_init(empty(i), warps);"),
    (LAYOUT, "    remote_arrive(empty(which), peer);\n", ""),
    (LAYOUT, "      if (piece % 2 == static_cast<int>(rank)) copy(", "      copy("),
    (LAYOUT, "copy_2d_both(target, map, 64 * piece", "copy_2d(target, map, 64 * piece"),
    (LAYOUT, "copy_2d_both(target, map, column + piece", "copy_2d(target, map, column + piece"),
]
NO_GELU = (UP, ACTIVATE, "slope[i] = half_pair(v0, v1);")
LITTLE_UP = (UP, "step < 4; ++step", "step < 1; ++step")
LITTLE_DOWN = (MAIN, "step < 8 / DOWN_PIECES; ++step", "step < 1; ++step")
PROBES = {  # name: changes; the first five are right; "narrow": down's weights in pieces of 8 KB
    "whole": [],
    "narrow": [],
    "own": OWN,
    "own, narrow": OWN,
    "last rows first": [(LAYOUT, "TilesOf<false>", "TilesOf<true>")],
    "without GELU": [NO_GELU],
    "without codes": [(UP, "    if (row >= rows) return;\n", "    if (row >= 0) return;\n")],
    "without rows ahead": [(LAYOUT, "bool AHEAD = true", "bool AHEAD = false")],
    "without a": [(LAYOUT, "      store_2d(map, smem + HIDDEN", "      if (rows < 0) store_2d(map, smem + HIDDEN")],
    "little up": [LITTLE_UP],
    "little down": [LITTLE_DOWN],
    "little of all": [NO_GELU, LITTLE_UP, LITTLE_DOWN],
    "own, without GELU": [*OWN, NO_GELU],
    "own, little of all": [*OWN, NO_GELU, LITTLE_UP, LITTLE_DOWN],
}  # fmt: skip

RIGHT = tuple(PROBES)[:5]


class Trial:
    """Operands and results of a workload's MLP."""

    def __init__(self, name):
        torch.manual_seed(1)
        config = WORKLOADS[name][0]
        normal = lambda *shape, scale=1.0: (torch.randn(*shape, device="cuda") * scale).bfloat16()
        F, self.rms, self.gelu = config.hidden, config.norm == "rmsnorm", config.gelu
        self.h, self.residual, self.scale = normal(N, 256), normal(N, 256), normal(256) + 1
        self.up, self.down = normal(F, 256, scale=1 / 16), normal(256, F, scale=F**-0.5)
        biased = config.bias
        self.up_bias, self.bias = (normal(F), normal(256)) if biased else (None, None)
        self.shift = normal(256) if biased and not self.rms else None
        self.results = {key: self.fresh(F) for key in ("two", "one")}

    def fresh(self, F):
        nan = lambda *shape: torch.full(shape, float("nan"), device="cuda")
        mean = None if self.rms else nan(N)
        codes = codes_empty(self.h, N, F).fill_(255)
        return {
            "a": nan(N, F).bfloat16(),
            "codes": codes,
            "r": nan(N, 256).bfloat16(),
            "h": nan(N, 256).bfloat16(),
            "mean": mean,
            "rstd": nan(N),
        }

    def join(self, out):
        kind = "rmsnorm" if self.rms else "layernorm"
        return Join(
            kind,
            EPS,
            self.scale,
            self.shift,
            self.bias,
            self.residual,
            out["r"],
            out["h"],
            out["mean"],
            out["rstd"],
            None,
        )

    def one(self):
        out = self.results["one"]
        forward_many.mlp_many_forward_raw(
            self.h, self.up, self.up_bias, self.down, out["codes"], out["a"], self.join(out), gelu=self.gelu
        )

    def two(self):
        out = self.results["two"]
        products.forward_raw(
            self.h, self.up, out["a"], bias_M=self.up_bias, gelu=self.gelu, slope_NM=out["codes"], impl="cuda"
        )
        many.project_many_forward_raw(out["a"], self.down, self.join(out))

    def errors(self, out):
        """Relative to fp64, a few rows of every part of them."""
        rows = torch.arange(0, N, 37, device="cuda")
        take = lambda x: x[rows].double()
        u = take(self.h) @ self.up.double().t() + (0 if self.up_bias is None else self.up_bias.double())
        a = torch.nn.functional.gelu(u, approximate="tanh" if self.gelu == "tanh" else "none")
        r = a @ self.down.double().t() + take(self.residual) + (0 if self.bias is None else self.bias.double())
        shift = None if self.shift is None else self.shift.double()
        scale = self.scale.double()
        norms = torch.nn.functional
        h = norms.rms_norm(r, (256,), scale, EPS) if self.rms else norms.layer_norm(r, (256,), scale, shift, EPS)
        return {k: float((take(out[k]) - x).norm() / x.norm()) for k, x in {"a": a, "r": r, "h": h}.items()}

    def same(self, first, second):
        return all(x is None or torch.equal(x, second[key]) for key, x in first.items())


def copied(out):
    return {key: None if x is None else x.clone() for key, x in out.items()}


def kernels(names):
    told = {}
    for name in names:
        trial = Trial(name)
        trial.two(), trial.one()
        first = copied(trial.results["one"])
        trial.one()
        same = trial.same(first, trial.results["one"])
        one, two = trial.errors(trial.results["one"]), trial.errors(trial.results["two"])
        worst = max(one[k] / two[k] for k in one)
        codes = (first["codes"].int() - trial.results["two"]["codes"].int()).abs()
        right = worst <= 1.2 and same and int(codes.max()) <= 1
        print(
            f"{name}: {'right' if right else 'WRONG'}, {worst:.3f} of the two kernels' error {one}; codes differ at most"
            f" {int(codes.max())}, {float((codes > 0).double().mean()):.2e} of them; a equal"
            f" {torch.equal(first['a'], trial.results['two']['a'])}; the same bits twice {same}",
            flush=True,
        )
        if not right:
            continue
        out = {"two": trial.results["two"], "one": trial.results["one"]}
        graphs = {
            "up": captured(
                lambda: products.forward_raw(
                    trial.h,
                    trial.up,
                    out["two"]["a"],
                    bias_M=trial.up_bias,
                    gelu=trial.gelu,
                    slope_NM=out["two"]["codes"],
                    impl="cuda",
                )
            ),
            "down": captured(
                lambda: many.project_many_forward_raw(out["two"]["a"], trial.down, trial.join(out["two"]))
            ),
            "two": captured(trial.two),
            "one": captured(trial.one),
        }
        told[name] = interleaved(graphs, 5, 8)
        print("   us in bursts", {k: round(v, 1) for k, v in told[name].items()}, flush=True)
        hot = {key: captured(lambda run=run: [run() for _ in range(100)]) for key, run in
               {"two": trial.two, "one": trial.one}.items()}  # fmt: skip
        us = {k: round(v / 100, 1) for k, v in interleaved(hot, 3, 2).items()}
        print("   us, a hundred in a row", us, flush=True)
        keep("kernels", told)
        torch.cuda.empty_cache()


def stress(names):
    for name in names:
        trial = Trial(name)
        trial.one()
        first = copied(trial.results["one"])
        for early in (False, True):
            with early_launches(early):
                graph = captured(lambda: [trial.one() for _ in range(100)])
            done = 0
            for done in range(100, 6001, 100):
                graph.replay()
                torch.cuda.synchronize()
                if time.time() > END - 3:
                    break
            same = trial.same(first, trial.results["one"])
            print(f"{name} stress, early {early}: {done} launches, the same bits {same}", flush=True)
        differ = 0
        for _ in range(20):
            trial.one()
            differ += not trial.same(first, trial.results["one"])
        print(f"   of 20 launches {differ} differ", flush=True)
        torch.cuda.empty_cache()


def sources(changes):
    """The kernel in a folder of its own, changed."""
    folder = Path(tempfile.mkdtemp(prefix="forward_many")) / "ops"
    for part in ("mlp", "linear"):
        shutil.copytree(SOURCE.parents[1] / part, folder / part)
    for file, there, instead in changes:
        path = folder / "mlp" / file
        text = path.read_text()
        assert text.count(there) == 1, there
        path.write_text(text.replace(there, instead))
    return folder / "mlp" / SOURCE.name


def pieces(key):
    return 4 if "narrow" in key else PIECES


def probes(names):
    told = {}
    compile_only(names)
    for name in names:
        trial, graphs = Trial(name), {}
        trial.two()
        for key, changes in PROBES.items():
            forward_many.SOURCE = sources(changes)
            forward_many.DOWN_PIECES = pieces(key)
            graphs[key] = captured(trial.one)
            if key in RIGHT:
                trial.one()
                one, two = trial.results["one"], trial.results["two"]
                same = all(one[k].equal(two[k]) for k in ("a", "codes"))
                off = max(float((one[k].float() - two[k].float()).abs().max()) for k in ("r", "h"))
                print(f"{name} {key}: {'right' if same and off < 0.1 else 'WRONG'}", flush=True)
        forward_many.SOURCE, forward_many.DOWN_PIECES = SOURCE, PIECES
        told[name] = interleaved(graphs, 3, 6)
        print(f"{name} us", {k: round(v, 1) for k, v in told[name].items()}, flush=True)
        keep("probes", told)
        torch.cuda.empty_cache()


def ends_in(seconds):
    """Whatever hangs by then is over."""
    timer = threading.Timer(seconds, os._exit, [3])
    timer.daemon = True
    timer.start()


def keep(name, told):
    with open(f"{OUT}/forward_many_{name}.json", "w") as file:
        json.dump(told, file)


def compile_only(names):
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for line in pool.map(compiled, [(key, rms) for key in PROBES for rms in (False, True)]):
            print(*line, flush=True)


def compiled(form):
    """A probe's name, and what its compiler says."""
    key, rms = form
    macros = forward_many.macros(rms=rms, norm_bias=not rms, up_bias=not rms, branch_bias=not rms, gelu="tanh")
    cubin = cuda.build(sources(PROBES[key]), {**macros, "DOWN_PIECES": pieces(key)}, "sm_90a")
    return key, rms, cubin.resources()["forward_many"], "C75" in cubin.log


TRIALS = {"kernels": kernels, "stress": stress, "probes": probes, "compile": compile_only}

if __name__ == "__main__":
    END = time.time() + float(sys.argv[1])
    ends_in(float(sys.argv[1]) + 2)
    for what in (a for a in sys.argv[2:] if a in TRIALS):
        start = time.time()
        TRIALS[what]([a for a in sys.argv[2:] if a in WORKLOADS] or ["gpt2-c256-512", "fast-c256-512"])
        print(f"   ({what} took {time.time() - start:.1f} s)", flush=True)
