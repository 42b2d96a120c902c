"""The MLP's input gradients for many rows as one kernel (ops/mlp/mlp_many.cu), against the two that it takes the place of.

PYTHONPATH=src:dev/gpu OUT=out python dev/gpu/hidden_gpu.py SECONDS [check] [stress] [clocks] [gpt2-c256-512 fast-c256-512]
                                                        ... build                                (no card: compiles)

check    against fp64, the same bits twice, us in turns with the two kernels; further forms of the kernel by macros (FORMS)
stress   a thousand launches, each compared with the first
clocks   where the warps' cycles go, a tile
A process a model and part, so that one that fails takes no other with it.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import many_trace_gpu as trace
import torch

from ridgeline.ops import _cuda as cuda
from ridgeline.ops.linear import products
from ridgeline.ops.linear.codes import codes_empty
from ridgeline.ops.mlp import many
from ridgeline.ops.mlp.kernels import JoinGradient

OUT = Path(os.environ.get("OUT", "/tmp"))
SOURCE, MACROS = many.MLP_SOURCE, many.mlp_macros
FORMS = {"one": {}}
PARTS = ("check", "stress", "clocks")
CONSUMER = {
    0: "set-up",
    2: "dz and first weights",
    14: "end of pass 2, first da",
    6: "codes",
    7: "du",
    1: "down's weights",
    5: "up's weights",
    3: "dh before",
    8: "du leaves",
    4: "da",
    11: "plain sums, dresidual, r",
    10: "pass 1",
    9: "pass 2",
}


def take(**changes):
    """The form of the kernel that is launched from here on."""
    many.mlp_macros = lambda *a, **k: {**MACROS(*a, **k), **changes}


def decoded(codes, N, F):
    """Slopes of codes [rows / 64, columns / 64, 4096], by rows and columns."""
    x = codes.view(*codes.shape[:2], 4, 2, 8, 4, 4, 2, 2)  # warp half column quad part pair high
    x = x.permute(0, 3, 6, 5, 7, 1, 2, 8, 4).reshape(codes.shape[0] * 64, -1)[:N, :F]
    return ((x.float() - 32) * (42 / 8192)).half()


class Case:
    """Operands of a model's layer, and both ways through them."""

    def __init__(self, name):
        import many_kernels as m
        from fused_gpu import WORKLOADS

        config, B, T = WORKLOADS[name]
        self.name, self.N, self.F, self.rms = name, B * T, config.hidden, config.norm == "rmsnorm"
        N, F, rms = self.N, self.F, self.rms
        self.kinds = 1 if rms else 2
        self.dz, self.r, self.dresidual = m.normal(N, 256), m.normal(N, 256) + 0.3, m.normal(N, 256)
        self.down, self.up = m.normal(256, F, scale=1 / 16), m.normal(F, 256, scale=F**-0.5)
        self.codes = codes_empty(self.dz, N, F).random_(7, 253)
        self.scale = m.normal(256) + 1
        centred = self.r.float()
        self.mean = None if rms else centred.mean(1)
        centred = centred if rms else centred - self.mean[:, None]
        self.rstd = (centred.square().mean(1) + m.EPS).rsqrt()
        nan = lambda *s, dtype=torch.bfloat16: torch.full(s, float("nan"), device="cuda", dtype=dtype)
        rows = (many.mlp_partial_rows(N, self.dz.device), many.blocks(N, self.dz.device))
        self.one, self.two = (
            (nan(N, F), nan(N, 256), nan(count, self.kinds * 256, dtype=torch.float32)) for count in rows
        )

    def join(self, dr, partials):
        kind = "rmsnorm" if self.rms else "layernorm"
        return JoinGradient(
            kind, self.scale, self.r, self.mean, self.rstd, self.dresidual, dr, None, partials, not self.rms, False, None
        )

    def together(self):
        du, dr, partials = self.one
        many.mlp_many_backward_raw(self.dz, self.down, self.up, self.codes, du, self.join(dr, partials))

    def apart(self):
        du, dr, partials = self.two
        products.input_gradient_raw(self.dz, self.down, du, slope_NK=self.codes, impl="cuda")
        many.project_many_backward_raw(du, self.up, self.join(dr, partials))

    def exact(self):
        """In fp64, a part of the rows at a time."""
        import many_kernels as m

        parts, sums = [], 0
        slope = decoded(self.codes, self.N, self.F)
        for at in range(0, self.N, 16384):
            here = slice(at, at + 16384)
            du = self.dz[here].double() @ self.down.double() * slope[here].double()
            leaves = [x.double().requires_grad_() for x in (self.r[here], self.scale, torch.zeros_like(self.scale))]
            h = m.exact_norm(*leaves, rms=self.rms) + (leaves[2] if self.rms else 0)
            dr, *small = torch.autograd.grad(h, leaves, du @ self.up.double())
            parts.append((du, dr + self.dresidual[here].double()))
            sums = sums + torch.stack(small)
        du, dr = (torch.cat(x) for x in zip(*parts))
        return {"du": du, "dr": dr, "dscale": sums[0]} | ({} if self.rms else {"dshift": sums[1]})

    def results(self, which):
        du, dr, partials = which
        return dict(zip(("du", "dr", "dscale", "dshift"), (du, dr, *partials.double().sum(0).split(256))))


def check(name, end):
    import many_kernels as m
    from fused_gpu import captured, interleaved

    case = Case(name)
    case.apart()
    case.together()
    first = [x.clone() for x in case.one]
    case.together()
    torch.cuda.synchronize()
    same = all(torch.equal(a, b) for a, b in zip(first, case.one))
    right = m.told(name, case.results(case.one), case.results(case.two), case.exact())
    print(", the same bits" if same else ", REPEATS DIFFER", flush=True)
    if not (right and same):
        return
    graphs = {"two": captured(case.apart)}
    for key, changes in FORMS.items():
        if time.time() > end - 4:
            break
        take(**changes)
        case.together()
        if all(torch.equal(a, b) for a, b in zip(first, case.one)):
            graphs[key] = captured(case.together)
        else:
            print(f"{name} {key}: OTHER BITS", flush=True)
    take()
    us = m.told_us(interleaved(graphs, 5, 8))
    (OUT / f"hidden_{name}.json").write_text(json.dumps(us))


def stress(name, end):
    case = Case(name)
    case.together()
    first = [x.clone() for x in case.one]
    differ, launches = torch.zeros((), dtype=torch.int64, device="cuda"), 0
    while launches < 1000 and time.time() < end - 2:
        for _ in range(20):
            for x in case.one:
                x.zero_()
            case.together()
            differ += 1 - torch.stack([(a == b).all() for a, b in zip(first, case.one)]).all().long()
        torch.cuda.synchronize()
        launches += 20
    for _ in range(2000):  # one behind the other
        case.together()
    torch.cuda.synchronize()
    print(f"{name} stress: {int(differ)} of {launches} launches differ; 2,000 more in a row", flush=True)


def clocks(name, end):
    import many_kernels as m
    sources()
    words = torch.zeros(trace.SIZE, dtype=torch.int32, device="cuda")
    many.MLP_SOURCE = trace.FOLDER / "mlp/mlp_many.cu"
    case = Case(name)
    for key, changes in FORMS.items():
        take(**changes, TRACE=f"{words.data_ptr()}ull")
        graph = m.captured(case.together)
        us = m.interleaved({"": graph}, 3, 20)[""]
        words.zero_()
        graph.replay()
        torch.cuda.synchronize()
        trace.told(f"{name}, {key}", words, us, "tile", CONSUMER)


def clocks_in(folder):
    """Clocks for mlp_many."""
    trace.edit(
        folder / "mlp_many.cuh",
        ("Ring ring) {\n  // Half", "Ring ring) {\n  ring.clock.start();\n  // Half"),
        (
            "    ring.begin();\n    if (elected()) {\n      ring.announce(SLOT_BYTES);\n",
            "    ring.begin();\n    ring.clock.mark(0);\n    if (elected()) {\n      ring.announce(SLOT_BYTES);\n"
            "      Clock::issued(ring.slot);\n",
        ),
        ("    }\n    ring.advance();\n", "    }\n    ring.clock.mark(1);\n    ring.advance();\n"),
        ("      ring.begin();\n      if (!elected()) continue;\n", "      ring.begin();\n      ring.clock.mark(2);\n      if (!elected()) continue;\n"),
    )
    trace.edit(
        folder / "mlp_many.cu",
        ("  differentiate(du, da,", "  me.clock.mark(6);\n  differentiate(du, da,"),
        ("  stage(du, w, me);\n", "  stage(du, w, me);\n  me.clock.mark(7);\n"),
        (
            "    multiply_down(da, w.dz, w.address(down));\n",
            "    me.clock.mark_filled(1, down % 4);\n    multiply_down(da, w.dz, w.address(down));\n",
        ),
        ("  multiply_up(dh, du, w", "  me.clock.mark(5);\n  multiply_up(dh, du, w"),
        ("  wgmma_touch(old);\n", "  wgmma_touch(old);\n  me.clock.mark(3);\n"),
        ("  if (NEXT) {\n    wgmma_wait<1>();\n", "  me.clock.mark(8);\n  if (NEXT) {\n    wgmma_wait<1>();\n    me.clock.mark(4);\n"),
        (
            "  if (valid) {\n    barrier_wait(w.bar.dz_full",
            "  me.clock.mark(9);\n  if (valid) {\n    barrier_wait(w.bar.dz_full",
        ),
        (
            "  multiply_down(da, w.dz, afresh(w.address(use)));\n",
            "  me.clock.mark(2);\n  multiply_down(da, w.dz, afresh(w.address(use)));\n",
        ),
        ("  w.release(w.use, me);\n", "  w.release(w.use, me);\n  me.clock.mark(14);\n"),
        ("  wgmma_touch(dh);\n", "  wgmma_touch(dh);\n  me.clock.mark(3);\n"),
        ("  const Line line = sum", "  me.clock.mark(11);\n  const Line line = sum"),
        ("  w.release(other, me);\n", "  w.release(other, me);\n  me.clock.mark(10);\n"),
        ("      tiles.advance();\n", "      tiles.advance();\n      Clock::add(15, 1);\n"),
        ("  const Place me = Place::here();\n", "  Clock::clear();\n  const Place me = Place::here();\n"),
        ("  const Ring ring(smem, bar, me.rank);\n", "  me.clock.mark(0);\n  const Ring ring(smem, bar, me.rank);\n"),
        ("  sync_warp();\n  cluster_leave();", "  sync_warp();\n  Clock::dump();\n  cluster_leave();"),
    )


def sources():
    """Copies of the kernel that makes both of the MLP's input gradients, with clocks."""
    root = Path(many.__file__).parents[1]
    shutil.rmtree(trace.FOLDER, ignore_errors=True)
    for name in ("mlp", "linear"):
        shutil.copytree(root / name, trace.FOLDER / name)
    trace.edit_shared(trace.FOLDER / "mlp")
    clocks_in(trace.FOLDER / "mlp")


def build():
    """Every form, as it is and with clocks."""
    sources()
    for rms in (False, True):
        for key, changes in FORMS.items():
            for source, more in ((SOURCE, {}), (trace.FOLDER / "mlp/mlp_many.cu", {"TRACE": "140000000100ull"})):
                macros = MACROS(torch.bfloat16, rms=rms, norm_bias=not rms) | changes | more
                cubin = cuda.build(source, macros, "sm_90a")
                print(rms, key, bool(more), cubin.resources(), "C75" in cubin.log, flush=True)


def main(seconds, words):
    end = time.time() + seconds
    parts = [w for w in words if w in PARTS] or PARTS
    names = [w for w in words if w not in PARTS] or ["gpt2-c256-512", "fast-c256-512"]
    for part in parts:
        for name in names:
            left = end - time.time()
            if left < 5:
                return print("no time left", flush=True)
            command = [sys.executable, "-u", __file__, "--part", part, name, str(left - 1)]
            try:
                subprocess.run(command, timeout=left)
            except subprocess.TimeoutExpired:
                print(f"{part} {name}: cut after {left:.0f} s", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "build":
        build()
    elif sys.argv[1] == "--part":
        {"check": check, "stress": stress, "clocks": clocks}[sys.argv[2]](sys.argv[3], time.time() + float(sys.argv[4]))
    else:
        main(float(sys.argv[1]), sys.argv[2:])
