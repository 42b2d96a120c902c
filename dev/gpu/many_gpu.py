"""Many rows at width 256 on a card: products with their joins, and weight gradients, against what they replace.

PYTHONPATH=src:dev/gpu OUT=out python dev/gpu/many_gpu.py SECONDS kernels|check|steps|blocks … [gpt2-c256-512 fast-c256-512]

kernels   every form against fp64 and the same bits twice, then us in turns with the product and the join apart, and with
          another revision's kernels where BEFORE names a checkout of it; weight gradients of a layer
stress    thousands of launches in a row
check     two blocks with joined products against fp64 (fused_gpu)
blocks    us a block in turns; steps: ms a step in turns. Alone on a card.
"""

import contextlib
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

import fused_gpu
import many_kernels
import torch
from fused_gpu import WORKLOADS, captured, interleaved
from many_kernels import N, backward, forward, gradients, normal, told_us
from many_variants import BOTH, OLD, VARIANTS, Variant, take, variant

from ridgeline.engine import TrainStep
from ridgeline.models import LanguageConfig, LanguageModel
from ridgeline.ops.early import early_launches
from ridgeline.ops.linear import gemm, products, stationary, wgrad
from ridgeline.ops.mlp import many

OUT = os.environ.get("OUT", "/tmp")
END = time.time() + 3600


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

    many_kernels.report = many_times
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
            turned = gemm.Form(transposed_b=True)
            for form in (up, turned._replace(factor=True), turned, gemm.Form(bias=bias)):
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
