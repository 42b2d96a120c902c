"""Many rows at width 256 on a card: products with their joins, and weight gradients, against what they replace.

PYTHONPATH=src:dev/gpu OUT=out python dev/gpu/many_gpu.py SECONDS kernels|check|steps|blocks … [gpt2-c256-512 fast-c256-512]

kernels   every form against fp64 and the same bits twice, then us in turns with the product and the join apart, and with
          another revision's kernels where BEFORE names a checkout of it; weight gradients of a layer
stress    thousands of launches in a row
check     two blocks with joined products against fp64 (fused_gpu)
blocks    us a block in turns; steps: ms a step in turns. Alone on a card.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import fused_gpu
import torch
from fused_gpu import WORKLOADS, captured, interleaved

from ridgeline.engine import TrainStep
from ridgeline.models import LanguageConfig, LanguageModel
from ridgeline.models.fused import stack
from ridgeline.models.fused.choices import choose
from ridgeline.ops.early import early_launches
from ridgeline.ops.linear import gemm, products, stationary, wgrad
from ridgeline.ops.linear.reduce import Job
from ridgeline.ops.linear.wgrad import Gradient, weight_gradients_raw
from ridgeline.ops.mlp import many
from ridgeline.ops.mlp.kernels import Join, JoinGradient
from ridgeline.ops.norm import triton as norms

OUT = os.environ.get("OUT", "/tmp")
END = time.time() + 3600
N, EPS = 131072, 1e-5
SOURCE, GRADIENTS = many.SOURCE, wgrad.SOURCE
WEIGHTS = stationary.SOURCE
MACROS = {many: many.macros, wgrad: wgrad.macros}


def before(source):
    """Another revision's kernel, from a checkout in BEFORE; the kernel itself without one."""
    package = many.cuda.__file__.split("src/ridgeline/")[0]
    return Path(os.environ.get("BEFORE", package)).resolve() / source.relative_to(package)


class Variant(NamedTuple):
    """Kernels of many rows, with further macros for a trial."""

    joined: bool = True
    source: Path = SOURCE
    macros: dict = {}
    gradients: Path = GRADIENTS
    gradient_macros: dict = {}
    weights: Path = WEIGHTS  # the product with weights in registers


OLD = Variant(source=before(SOURCE), gradients=before(GRADIENTS), weights=before(WEIGHTS))
PRODUCTS = frozenset(("out", "down", "up", "qkv"))
VARIANTS = {"apart": OLD._replace(joined=False), "before": OLD, "now": Variant()}
BOTH = ("before", "now")


def take(variant):
    """The kernels that are launched from here on."""
    many.SOURCE, wgrad.SOURCE = variant.source, variant.gradients
    stationary.SOURCE = variant.weights
    stationary._kernel.cache_clear()
    many.macros = lambda *a, **k: {**MACROS[many](*a, **k), **variant.macros}
    wgrad.macros = lambda *a, **k: {**MACROS[wgrad](*a, **k), **variant.gradient_macros}


@contextlib.contextmanager
def variant(name):
    """Stacks and steps that are made meanwhile."""
    take(VARIANTS[name])
    joined = PRODUCTS if VARIANTS[name].joined else frozenset()

    def choice(*arguments):
        chosen_here = choose(*arguments)
        return dataclasses.replace(chosen_here, joined=joined & chosen_here.joined)

    stack.choose = choice
    try:
        yield
    finally:
        take(Variant())
        stack.choose = choose


def relative(a, b):
    return float((a.double() - b).norm() / b.norm())


def told(label, got, apart, exact):
    """One line: the worst error as a multiple of what product and join apart err."""
    ratios = {n: relative(got[n], exact[n]) / max(relative(apart[n], exact[n]), 1e-7) for n in exact}
    worst = max(ratios, key=lambda n: ratios[n] if ratios[n] == ratios[n] else float("inf"))
    print(f"{label}: {'right' if ratios[worst] <= 1.5 else 'WRONG'}, {ratios[worst]:.2f} ({worst})", end="", flush=True)
    return ratios[worst] <= 1.5


def normal(*shape, scale=1.0):
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


def exact_norm(x, weight, shift, rms):
    if rms:
        return torch.nn.functional.rms_norm(x, (256,), weight, EPS)
    return torch.nn.functional.layer_norm(x, (256,), weight, shift, EPS)


def forward(label, K, rms):
    kind = "rmsnorm" if rms else "layernorm"
    x, weight, residual, scale = normal(N, K), normal(256, K, scale=K**-0.5), normal(N, 256), normal(256) + 1
    shift, bias = (None, None) if rms else (normal(256), normal(256))
    nan = lambda *s, dtype=torch.bfloat16: torch.full(s, float("nan"), device="cuda", dtype=dtype)
    new = lambda: [nan(N, 256), nan(N, 256), None if rms else nan(N, dtype=torch.float32), nan(N, dtype=torch.float32)]
    joined, apart, branch = new(), new(), nan(N, 256)

    def together():
        many.project_many_forward_raw(x, weight, Join(kind, EPS, scale, shift, bias, residual, *joined, None))

    def before():
        r, h, mean, rstd = apart
        if K <= 256:  # as a block does with attention's projection
            products.forward_raw(x, weight, r, bias_M=bias, residual_NM=residual, impl="cuda")
            norms.norm_forward_raw(r, scale, shift, h, mean, rstd, eps=EPS, kind=kind)
        else:
            torch.mm(x, weight.t(), out=branch)
            norms.norm_forward_raw(
                branch,
                scale,
                shift,
                h,
                mean,
                rstd,
                eps=EPS,
                kind=kind,
                r_NC=r,
                residual_NC=residual,
                branch_bias_C=bias,
            )

    together(), before()
    again = [None if t is None else t.clone() for t in joined]
    together()
    same = all(a is None or torch.equal(a, b) for a, b in zip(again, joined))
    r = x.double() @ weight.double().t() + residual.double() + (0 if bias is None else bias.double())
    exact = {"r": r, "h": exact_norm(r, scale.double(), None if shift is None else shift.double(), rms)}
    right = told(label, dict(zip("rh", joined)), dict(zip("rh", apart)), exact)
    return report(right and same, same, together, before)


def backward(label, K, rms):
    kind, kinds = ("rmsnorm", 1) if rms else ("layernorm", 2)
    dy, weight, scale = normal(N, K), normal(K, 256, scale=K**-0.5), normal(256) + 1
    r, dresidual = normal(N, 256) + 0.3, normal(N, 256)
    mean = None if rms else r.float().mean(1)
    rstd = ((r.float() if rms else r.float() - mean[:, None]).square().mean(1) + EPS).rsqrt()
    dr, dr_apart = torch.empty_like(r), torch.empty_like(r)
    partials = torch.full((many.blocks(N, r.device), kinds * 256), float("nan"), device="cuda")
    partials_apart = torch.empty(norms.partial_rows(N, 256, r), kinds * 256, device="cuda")
    join = JoinGradient(kind, scale, r, mean, rstd, dresidual, dr, None, partials, not rms, False, None)

    def together():
        many.project_many_backward_raw(dy, weight, join)

    def before():
        norms.norm_backward_raw(
            dy @ weight,
            r,
            scale,
            mean,
            rstd,
            partials_apart,
            kind=kind,
            bias=not rms,
            branch_bias=False,
            dresidual_NC=dresidual,
            dr_NC=dr_apart,
        )

    together(), before()
    again = [dr.clone(), partials.clone()]
    together()
    same = torch.equal(again[0], dr) and torch.equal(again[1], partials)
    leaves = [t.double().requires_grad_() for t in (r, scale, torch.zeros_like(scale))]
    h = exact_norm(*leaves, rms) + (leaves[2] if rms else 0)
    expected, dscale, dshift = torch.autograd.grad(h, leaves, dy.double() @ weight.double())
    exact = {"dr": expected + dresidual.double(), "dscale": dscale} | ({} if rms else {"dshift": dshift})
    take = lambda d, p: dict(zip(("dr", "dscale", "dshift"), (d, *p.double().sum(0).split(256))))
    right = told(label, take(dr, partials), take(dr_apart, partials_apart), exact)
    return report(right and same, same, together, before)


def report(right, same, together, before):
    if not right:
        print("" if same else ", REPEATS DIFFER", flush=True)
        return None
    graphs = {"apart": captured(before)}
    for key in BOTH:
        take(VARIANTS[key])
        graphs[key] = captured(together)
    take(Variant())
    return told_us(interleaved(graphs, 5, 8))


def told_us(us):
    print(", us", {key: round(value, 1) for key, value in us.items()}, flush=True)
    return us


def gradients(label, shapes, biases, rows=N):
    made = [
        Gradient(
            normal(rows, M),
            normal(rows, K),
            torch.empty(M, K, device="cuda"),
            torch.empty(M, device="cuda") if biased else None,
        )
        for (M, K), biased in zip(shapes, biases)
    ]
    sums = 512 if any(biases) else 256
    also = [Job(torch.randn(132, 1, sums, device="cuda"), torch.empty(1, sums, device="cuda")) for _ in range(2)]

    def errors():
        truths = [(g.dweight_MK, g.dy_NM.double().t() @ g.x_NK.double()) for g in made]
        return max(relative(got, truth) for got, truth in truths)

    weight_gradients_raw(made, also=also)
    ours, first = errors(), [g.dweight_MK.clone() for g in made]
    weight_gradients_raw(made, also=also)
    same = all(torch.equal(a, g.dweight_MK) for a, g in zip(first, made))
    cublas(made)
    graphs = {"cuBLAS": captured(lambda: cublas(made))}
    for key in BOTH:
        take(VARIANTS[key])
        graphs[key] = captured(lambda: weight_gradients_raw(made, also=also))
    take(Variant())
    # wgmma rounds towards zero: half of 4.5e-8 a step of 16 rows that a share has, 2,000 of them at most.
    right = "right" if ours < 5e-5 and same else "WRONG"
    print(f"{label}: {right}, error {ours:.2g} (cuBLAS {errors():.2g}), same bits {same}", end="", flush=True)
    return told_us(interleaved(graphs, 5, 8))


def cublas(made):
    for g in made:
        products.weight_gradient_raw(g.dy_NM, g.x_NK, g.dweight_MK, accumulate=False)


def kernels(names):
    out = {}
    for name in names:
        config = WORKLOADS[name][0]
        if config.width != many.WIDTH:
            continue
        F, Q = config.hidden, config.qkv_width
        rms = config.norm == "rmsnorm"
        trials = {
            "gradients": lambda: gradients(
                f"{name} weight gradients", [(256, F), (F, 256), (256, 256), (Q, 256)], 4 * [config.bias]
            ),
            "gradients, up's bias apart": lambda: gradients(
                f"{name} weight gradients, up's bias apart",
                [(256, F), (F, 256), (256, 256), (Q, 256)],
                [config.bias, False, config.bias, config.bias],
            ),
            "gradients of six layers, few rows": lambda: gradients(
                f"{name} six layers, 8,192 rows",
                6 * [(256, F), (F, 256), (256, 256), (Q, 256)],
                24 * [config.bias],
                8192,
            ),
            "up": lambda: backward(f"{name} up's gradient", F, rms),
            "qkv": lambda: backward(f"{name} qkv's gradient", Q, rms),
            "down": lambda: forward(f"{name} down", F, rms),
            "out": lambda: forward(f"{name} out", 256, rms),
        }
        for key, trial in trials.items():
            if time.time() > END - 3:
                return out
            try:
                out[f"{name} {key}"] = trial()
            except Exception as error:
                print(f"{name} {key} FAILED {error!r}"[:300], flush=True)
            torch.cuda.empty_cache()
            keep("kernels", out)
    return out


def weights(names):
    """Products with weights in registers: the same bits as before, and us in turns."""
    out = {}
    for name in names:
        config = WORKLOADS[name][0]
        C, F, Q = config.width, config.hidden, config.qkv_width
        h, dz, dh = normal(N, C), normal(N, C), normal(N, C)
        a, du, qkv = (torch.empty(N, width, device="cuda", dtype=torch.bfloat16) for width in (F, F, Q))
        up, down, out_of, project = normal(F, C, scale=C**-0.5), normal(C, F), normal(C, C), normal(Q, C)
        bias, bias_Q = (normal(F), normal(Q)) if config.bias else (None, None)
        slope = products.slope_empty(h, N, F, coded=True)
        forward, back = products.forward_raw, products.input_gradient_raw
        trials = {
            "up": lambda: forward(h, up, a, bias_M=bias, gelu=config.gelu, slope_NM=slope, impl="cuda"),
            "down's gradient": lambda: back(dz, down, du, slope_NK=slope, impl="cuda"),
            "qkv": lambda: forward(h, project, qkv, bias_M=bias_Q, impl="cuda"),
            "out's gradient": lambda: back(dz, out_of, dh, impl="cuda"),
        }
        for key, trial in trials.items():
            if time.time() > END - 3:
                return out
            results, graphs = {}, {}
            for which in BOTH:
                take(VARIANTS[which])
                for result in (a, du, qkv, dh):
                    result.fill_(float("nan"))
                sums = trial()
                left = {"up": (a, slope), "down's gradient": (du, sums), "qkv": (qkv,), "out's gradient": (dh,)}[key]
                results[which] = [t.clone() for t in left]
                graphs[which] = captured(trial)
            take(Variant())
            same = all(torch.equal(x, y) and not x.isnan().any() for x, y in zip(*results.values()))
            print(f"{name} {key}: {'the same bits' if same else 'OTHER BITS'}", end="", flush=True)
            out[f"{name} {key}"] = told_us(interleaved(graphs, 5, 8))
            keep("weights", out)
        torch.cuda.empty_cache()
    return out


@contextlib.contextmanager
def chosen(early, changes):
    """`fused_gpu.chosen` for the variants here."""
    with variant(changes["name"]), early_launches(early):
        yield


def lent(what, run, keys, names):
    """fused_gpu's trials with these variants, as far as there is time."""
    fused_gpu.variants = lambda name: {key: (False, {"name": key}) for key in keys}
    fused_gpu.chosen = chosen
    out = {}
    for name in names:
        if time.time() < END - 6:
            out[name] = run(name)
            keep(what, out)
            torch.cuda.empty_cache()


def check(names):
    lent("check", fused_gpu.check, ["now"], names)


def blocks(names):
    lent("blocks", fused_gpu.block, VARIANTS, names)


def steps(names):
    """Whole steps in turns, and their losses after as many of them."""
    out = {}
    for name in names:
        if time.time() > END - 6:
            break
        config, B, T = WORKLOADS[name]
        tokens = torch.randint(65, (B, T + 1), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
        batch = {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
        made = {}
        large = B * T > 65536
        for key in VARIANTS if large and config.width == many.WIDTH else BOTH:
            if time.time() > END - 8:
                break
            m = LanguageModel(LanguageConfig(vocabulary=65, decoder=config), impl="fused", seed=0).cuda()
            train = TrainStep(m, precision="bf16")
            with variant(key):
                for _ in range(5):
                    train(batch)
                torch.cuda.synchronize()
            made[key] = SimpleNamespace(replay=functools.partial(train, batch), train=train)
        us = interleaved(made, *((6, 6) if large else (8, 50)))
        out[name] = {key: value / 1000 for key, value in us.items()}
        print(name, "ms a step", {key: round(value, 3) for key, value in out[name].items()}, flush=True)
        losses = {key: run.train.metrics()[-1].loss for key, run in made.items()}
        print("   loss after as many steps", {key: round(float(x), 5) for key, x in losses.items()}, flush=True)
        keep("steps", out)
        made.clear()
        torch.cuda.empty_cache()
    return out


STRESSED = {  # which kernels, and whether they end as they did: without waiting for arrivals under way
    "before": (OLD, False),
    "before, ending as it did": (OLD, True),
    "now": (Variant(), False),
    "now, ending as before": (Variant(), True),
}


def stress(names):
    """Thousands of launches of each form of each kernel, a process each: which of them fails?"""
    if "STRESS" not in os.environ:
        command = [sys.executable, "-u", __file__, str(END - time.time()), "stress"]
        children = [
            subprocess.Popen(command, env=os.environ | {"STRESS": key}, stderr=subprocess.DEVNULL) for key in STRESSED
        ]
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(END - time.time(), 1))
            child.kill()
        return
    global report
    key = os.environ["STRESS"]
    kernels_here, hasty = STRESSED[key]
    folder = Path(tempfile.mkdtemp()) / "ops"
    for part in ("mlp", "linear"):
        shutil.copytree(kernels_here.source.parents[1] / part, folder / part)
    source = folder / "mlp/project_many.cu"
    if hasty:
        assert source.read_text().count("cluster_leave();") == 1
        source.write_text(source.read_text().replace("cluster_leave();", "cluster_sync();"))
    label = [""]

    def many_times(right, same, together, before):
        graph = captured(lambda: [together() for _ in range(100)])
        for done in range(60):
            graph.replay()
            try:
                torch.cuda.synchronize()
            except Exception as error:
                print(f"\nSTRESS {key}, {label[0]}: FAILED after {100 * done} launches {str(error)[:60]}", flush=True)
                os._exit(1)
        print(f"\nSTRESS {key}, {label[0]}: 6,000 launches, right {right and same}", flush=True)

    report = many_times
    take(kernels_here._replace(source=source))
    for label[0], trial, K in (("down", forward, 1024), ("out", forward, 256), ("up's gradient", backward, 1024)):
        trial(label[0], K, False)


def keep(name, out):
    with open(f"{OUT}/many_{name}.json", "w") as file:
        json.dump(out, file)


def compile_only(names):
    """Fills the cache; no card is asked."""
    for chosen_here in VARIANTS.values():
        take(chosen_here)
        for rms, back in itertools.product((False, True), repeat=2):
            branch_bias = not rms and not back
            macros = many.macros(torch.bfloat16, backward=back, rms=rms, norm_bias=not rms, branch_bias=branch_bias)
            many.cuda.build(many.SOURCE, macros)
        for K, bias, gelu in ((256, True, "tanh"), (256, False, "tanh"), (512, True, "erf")):
            up = gemm.Form(bias=bias, gelu=gelu, slope=True)
            back = gemm.Form(transposed_b=True)
            for form in (up, back._replace(factor=True), back, gemm.Form(bias=bias)):
                many.cuda.build(stationary.SOURCE, stationary.defines(K, form))
        many.cuda.build(wgrad.SOURCE, wgrad.macros(wgrad.Plan([], True, 0, []), 256, torch.bfloat16))


TRIALS = {
    "compile": compile_only,
    "weights": weights,
    "kernels": kernels,
    "stress": stress,
    "check": check,
    "blocks": blocks,
    "steps": steps,
}


def main():
    """The trials in a process, and what one that dies leaves in another."""
    end = time.time() + float(sys.argv[1])
    names = [a for a in sys.argv[2:] if a in WORKLOADS] or ["gpt2-c256-512", "fast-c256-512"]
    trials = [a for a in sys.argv[2:] if a in TRIALS]
    while trials and end - time.time() > 5:
        left = end - time.time()
        command = [sys.executable, "-u", __file__, str(left - 2), *trials, *names]
        try:
            done = subprocess.run(command, env=os.environ | {"MANY_GPU": "1"}, timeout=left).returncode == 0
        except subprocess.TimeoutExpired:
            print(f"cut after {left:.0f} s", flush=True)
            return
        begun = open(f"{OUT}/many_begun").read().split()
        trials = [] if done else trials[trials.index(begun[-1]) + 1 :]


def trials_of_a_process():
    """What `main` asks of this process."""
    global END
    END = time.time() + float(sys.argv[1])
    names = [a for a in sys.argv[2:] if a in WORKLOADS]
    for trial in (a for a in sys.argv[2:] if a in TRIALS):
        with open(f"{OUT}/many_begun", "w") as file:
            file.write(trial)
        start = time.time()
        TRIALS[trial](names)
        torch.cuda.empty_cache()
        print(f"   ({trial} took {time.time() - start:.1f} s, {END - time.time():.0f} left)", flush=True)


if __name__ == "__main__":
    trials_of_a_process() if os.environ.get("MANY_GPU") else main()
