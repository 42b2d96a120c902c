"""fp32 on a card: its products and its attention against fp64 and beside the vendor's, then whole steps in turns.

PYTHONPATH=src OUT=$OUT python3 dev/gpu/float_gpu.py [SECONDS] [check|cubes|products|epilogues|attention|step ...]

With RL_FLOAT_BEFORE=FOLDER (an earlier ops/linear) its kernels run beside ours in `epilogues` and `step`.
"""

import collections
import concurrent.futures
import contextlib
import copy
import dataclasses
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from fused_gpu import FAST, GPT2, captured, interleaved

from ridgeline.engine import TrainStep
from ridgeline.models import LanguageConfig, LanguageModel
from ridgeline.models.fused import stack
from ridgeline.models.fused.choices import choose
from ridgeline.ops import _cuda as cuda
from ridgeline.ops.attention import float32
from ridgeline.ops.linear import doubles
from ridgeline.ops.linear.doubles import Tile
from ridgeline.ops.linear.wgrad import MAX_PROBLEMS, Gradient

PARTS = [a for a in sys.argv[1:] if a.isalpha()] or ["check", "cubes", "epilogues", "attention", "step", "products"]
END = time.time() + next((float(a) for a in sys.argv[1:] if a.isdigit()), 60)
OUT, found = os.environ.get("OUT", "/tmp"), {}
torch.backends.cuda.matmul.allow_tf32 = False
TILES = {"128x64 two": Tile(), "128x128 one": Tile(2, 64, 1), "128x32 three": Tile(1, 32, 3)}
KINDS = ((1, doubles.PLAIN, 0, 1), (1, doubles.PLAIN, 0, 0), (1, doubles.GELU, 1, 1), (0, doubles.PLAIN, 0, 0),
         (0, doubles.FACTOR, 0, 0), (1, doubles.RESIDUAL, 0, 1), (1, doubles.GELU, 1, 0), (1, doubles.RESIDUAL, 0, 0))  # fmt: skip
SOURCES = {"": (doubles.PRODUCT, doubles.GRADIENTS)}
if "RL_FLOAT_BEFORE" in os.environ:
    SOURCES["before"] = tuple(Path(os.environ["RL_FLOAT_BEFORE"]) / path.name for path in SOURCES[""])
SHAPES = {"gpt2": (768, 256, 1024), "fast": (320, 256, 512)}  # qkv, out, up
N, C = 8192, 256
normal = lambda *shape: torch.randn(*shape, device="cuda")
nan = lambda *shape: torch.full(shape, float("nan"), device="cuda")
relative = lambda got, right: float((got - right).norm() / right.norm())


def tell(key, value):
    found[key] = value
    print(f"{time.time() - END:6.1f} {key} {value}", flush=True)
    json.dump(found, open(f"{OUT}/float.json", "w"))


def four(step):
    """A graph of four calls."""
    return captured(lambda: [step() for _ in range(4)])


def times(name, graphs):
    tell(f"{name} us", {key: round(us / 4, 1) for key, us in interleaved(graphs, 5, 3).items()})


def warm():
    """All kernels compiled, beside each other."""
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        for tile in TILES.values():
            for b_rows, epilogue, tanh in ((1, 0, 0), (1, 2, 1), (0, 0, 0), (0, 3, 0), (1, 4, 0)):
                layout = {"A_ROWS": 1, "B_ROWS": b_rows, "EPILOGUE": epilogue, "TANH": tanh}
                pool.submit(cuda.build, doubles.PRODUCT, tile.macros() | layout)
        for kernels in KERNELS.values():
            pool.submit(cuda.build, kernels.source)
            pool.submit(cuda.build, doubles.GRADIENTS, tile.macros() | {"MAX_PROBLEMS": MAX_PROBLEMS})


def check():
    """Every product and the grouped gradients over fp64; beside it cuBLAS's error."""
    for tile_name, tile in TILES.items() if {"cubes", "products"} & set(PARTS) else [("128x64 two", Tile())]:
        for rows, K, M in ((N, 256, 1024), (1000, 320, 68)):
            a, w, bias = normal(rows, K), normal(M, K), normal(M)
            exact = a.double() @ w.double().t()
            out, slope = nan(rows, M), nan(rows, M)
            u = (exact + bias.double()).requires_grad_()
            y = F.gelu(u, approximate="tanh")
            (right_slope,) = torch.autograd.grad(y.sum(), u)
            errors = {"cuBLAS": relative(a @ w.t(), exact)}
            doubles.product(a, w, out, tile=tile)
            errors["plain"] = relative(out, exact)
            doubles.product(a, w, out, bias_N=bias, residual_MN=out.clone(), tile=tile)
            errors["residual"] = relative(out, 2 * exact + bias)
            doubles.product(a, w, out, bias_N=bias, gelu="tanh", slope_MN=slope, tile=tile)
            errors["gelu"], errors["slope"] = relative(out, y.detach()), relative(slope, right_slope)
            errors["torch gelu"] = relative(F.gelu(F.linear(a, w, bias), approximate="tanh"), y.detach())
            doubles.product(a, w.t().contiguous(), out, transposed_b=True, factor_MN=slope, tile=tile)
            errors["factor"] = relative(out, exact * slope)
            good = all(e < 1e-6 for e in errors.values())
            tell(
                f"check {tile_name} {rows}x{M}x{K} {'right' if good else 'WRONG'}",
                {k: f"{e:.1e}" for k, e in errors.items()},
            )
        shapes = [(768, 256), (256, 256), (1024, 256), (256, 1024), (320, 256), (36, 132)]
        group = [Gradient(normal(1000, m), normal(1000, k), nan(m, k), nan(m)) for m, k in shapes]
        doubles.weight_gradients(group, tile=tile)
        first = [g.dweight_MK.clone() for g in group]
        worst = max(relative(g.dweight_MK, g.dy_NM.double().t() @ g.x_NK.double()) for g in group)
        bias = max(relative(g.dbias_M, g.dy_NM.double().sum(0)) for g in group)
        doubles.weight_gradients(group, tile=tile)
        same = all(torch.equal(g.dweight_MK, f) for g, f in zip(group, first))
        tell(
            f"check gradients {tile_name} {'right' if max(worst, bias) < 1e-6 and same else 'WRONG'}",
            (worst, bias, same),
        )
    for name, config in (("gpt2", GPT2), ("fast", FAST)):
        model(name, config)


def model(name, config):
    """Two blocks' gradients over fp64, ours and PyTorch's in fp32."""
    import dataclasses

    ref = LanguageModel(
        LanguageConfig(vocabulary=65, decoder=dataclasses.replace(config, layers=2)), impl="reference", seed=0
    )
    for p in ref.parameters():
        p.data += 0.1 * torch.randn_like(p) if p.dim() == 1 else 0
    x, dy = normal(4, 256, C), normal(4, 256, C)

    def run(impl, dtype):
        d = copy.deepcopy(ref.decoder).cuda().to(dtype).train()
        d.impl = impl
        xx = x.to(dtype).requires_grad_()
        names, weights = zip(*[(n, p) for n, p in d.named_parameters() if n != "positions"])
        y = d.transform(xx, None)
        return dict(zip(("y", "x", *names), [y.detach(), *torch.autograd.grad(y, [xx, *weights], dy.to(dtype))]))

    exact, pytorch, ours = run("reference", torch.float64), run("reference", torch.float32), run("fused", torch.float32)
    ratios = {n: relative(ours[n], exact[n]) / max(relative(pytorch[n], exact[n]), 1e-9) for n in exact}
    worst = max(ratios, key=ratios.get)
    tell(f"check blocks {name} {'right' if ratios[worst] < 1.5 else 'WRONG'}", (round(ratios[worst], 2), worst))


def products():
    """Every product of a block by us and by cuBLAS; all weight gradients; both kinds of lanes at once."""
    for name, (Q, C, Fw) in SHAPES.items():
        for what, M, K in (("qkv", Q, C), ("out", C, C), ("up", Fw, C), ("down", C, Fw)):
            x, w, dy, out, dx = normal(N, K), normal(M, K), normal(N, M), nan(N, M), nan(N, K)
            for way, vendor, ours in (
                ("forward", lambda: torch.mm(x, w.t(), out=out), lambda t: doubles.product(x, w, out, tile=t)),
                (
                    "backward",
                    lambda: torch.mm(dy, w, out=dx),
                    lambda t: doubles.product(dy, w, dx, transposed_b=True, tile=t),
                ),
            ):
                graphs = {"cuBLAS": four(vendor), **{k: four(lambda t=t: ours(t)) for k, t in TILES.items()}}
                times(f"{name} {what} {way} ({2 * N * M * K / 60e6:.0f} at 60 TFLOP/s)", graphs)
        layers = [(Q, C), (C, C), (Fw, C), (C, Fw)] * 6
        group = [Gradient(normal(N, m), normal(N, k), nan(m, k), nan(m)) for m, k in layers]
        vendor = lambda: [torch.mm(g.dy_NM.t(), g.x_NK, out=g.dweight_MK) for g in group]
        graphs = {
            "cuBLAS": captured(vendor),
            **{k: captured(lambda t=t: doubles.weight_gradients(group, tile=t)) for k, t in TILES.items()},
        }
        floor = sum(2 * N * m * k for m, k in layers) / 60e6
        tell(
            f"{name} gradients ({floor:.0f} at 60 TFLOP/s) us",
            {k: round(us) for k, us in interleaved(graphs, 5, 2).items()},
        )


def cubes():
    """4096 cubed."""
    square = normal(4096, 4096)
    wide = square.double()
    ceiling = {"cuBLAS fp32": captured(lambda: square @ square), "cuBLAS fp64": captured(lambda: wide @ wide)}
    out = torch.empty_like(square)
    for key, t in TILES.items():
        ceiling[key] = captured(lambda t=t: doubles.product(square, square, out, transposed_b=True, tile=t))
    tell("4096 cubed TFLOP/s", {k: round(2 * 4096**3 / us / 1e6, 1) for k, us in interleaved(ceiling, 3, 3).items()})
    exact = square[:256].double() @ wide
    for key, t in TILES.items():
        doubles.product(square, square, out.fill_(float("nan")), transposed_b=True, tile=t)
        tell(f"check cube {key}", f"{relative(out[:256], exact):.1e}")


def attention():
    """The short-window kernels over fp64, repeatable, and their times."""
    for name, B, T, H, G in (("gpt2", 32, 256, 8, 8), ("fast", 32, 256, 8, 1), ("odd", 3, 177, 8, 2)):
        D, scale = 32, 32**-0.5
        joint = normal(B, T, (H + 2 * G) * D)
        gradient = torch.empty_like(joint)
        split = lambda x: [y.unflatten(-1, (-1, D)) for y in x.split((H * D, G * D, G * D), -1)]
        (q, k, v), (dq, dk, dv) = split(joint), split(gradient)
        d_out, out, lse = normal(B, T, H, D), nan(B, T, H, D), nan(B, H, T)
        exact = [x.double().requires_grad_() for x in (q, k, v)]
        wide = [x.transpose(1, 2).repeat_interleave(1 if n == 0 else H // G, 1) for n, x in enumerate(exact)]
        future = torch.ones(T, T, device="cuda", dtype=torch.bool).triu(1)
        weights = (wide[0] @ wide[1].mT * scale).masked_fill(future, float("-inf")).softmax(-1)
        right = (weights @ wide[2]).transpose(1, 2)
        wanted = [right.detach(), *torch.autograd.grad(right, exact, d_out.double())]
        forward = lambda: float32.forward(q, k, v, out, lse, scale=scale)
        backward = lambda: float32.backward(d_out, q, k, v, out, lse, dq, dk, dv, scale=scale)
        graphs = {}
        for key, kernels in KERNELS.items():
            with on(kernels):
                for x in (gradient, out, lse):
                    x.fill_(float("nan"))
                forward()
                backward()
                first = gradient.clone()
                backward()
                errors = [relative(a, b) for a, b in zip((out, dq, dk, dv), wanted)]
                good = max(errors) < 1e-6 and torch.equal(first, gradient)
                tell(f"check {name} attention {key} {'right' if good else 'WRONG'}", [f"{e:.1e}" for e in errors])
                graphs |= {f"forward {key}": four(forward), f"backward {key}": four(backward)}
        times(f"{name} attention", graphs)


@contextlib.contextmanager
def on(kernels):
    """Attention by one of its two kinds of kernels."""
    before, float32.choose = float32.choose, lambda device: kernels
    try:
        yield
    finally:
        float32.choose = before


@contextlib.contextmanager
def chosen(product="", gradients="", attention=float32.DOUBLES, **changes):
    """Another version's kernels, attention's other kind, other choices of the stack than its own."""
    now = doubles.PRODUCT, doubles.GRADIENTS, stack.choose
    doubles.PRODUCT, doubles.GRADIENTS = SOURCES[product][0], SOURCES[gradients][1]
    stack.choose = lambda *a: dataclasses.replace(choose(*a), **changes)
    try:
        with on(attention):
            yield
    finally:
        doubles.PRODUCT, doubles.GRADIENTS, stack.choose = now


def epilogues():
    """The products of a block with what follows them, and all weight gradients with and without column sums."""
    for name, (Q, C, Fw) in SHAPES.items():
        biased = name == "gpt2"
        bias = lambda width: normal(width) if biased else None
        x, h, w_qkv, w_up, w_down = normal(N, C), normal(N, Fw), normal(Q, C), normal(Fw, C), normal(C, Fw)
        qkv, up, slope, stream, out = nan(N, Q), nan(N, Fw), nan(N, Fw), normal(N, C), nan(N, C)
        b_qkv, b_up, b_down = bias(Q), bias(Fw), bias(C)
        jobs = {
            "qkv": lambda: doubles.product(x, w_qkv, qkv, bias_N=b_qkv),
            "up": lambda: doubles.product(x, w_up, up, bias_N=b_up, gelu="tanh", slope_MN=slope),
            "down": lambda: doubles.product(h, w_down, out, bias_N=b_down),
            "down + residual": lambda: doubles.product(h, w_down, out, bias_N=b_down, residual_MN=stream),
            "down's gradient": lambda: doubles.product(x, w_down, up, transposed_b=True, factor_MN=slope),
            "up's gradient": lambda: doubles.product(h, w_up, out, transposed_b=True),
        }
        for what, job in jobs.items():
            graphs = {}
            for version in SOURCES:
                with chosen(version, version):
                    graphs[version or "now"] = four(job)
            times(f"{name} {what}", graphs)
        layers = [(Q, C), (C, C), (Fw, C), (C, Fw)] * 6
        group = [Gradient(normal(N, m), normal(N, k), nan(m, k), nan(m)) for m, k in layers]
        graphs = {}
        for version in SOURCES:
            for sums in (True, False):
                own = group if sums else [g._replace(dbias_M=None) for g in group]
                with chosen(version, version):
                    key = f"{version or 'now'}{'' if sums else ', without sums'}"
                    graphs[key] = captured(lambda: doubles.weight_gradients(own))
        tell(f"{name} gradients us", {k: round(us) for k, us in interleaved(graphs, 5, 2).items()})


KERNELS = {"doubles": float32.DOUBLES, "lanes": float32.LANES}
CHOICES = {"chosen": {}, "joins apart": {"out": "cuda", "rest": "cuda"}}
if "before" in SOURCES:
    apart = CHOICES["joins apart"]
    CHOICES["before"] = {"product": "before", "gradients": "before", **apart}
    CHOICES["before, new gradients"] = {"product": "before", **apart}


def step(name, config):
    """Whole steps with several choices in turns, and two choices' kernels."""
    runs, tokens = {}, torch.randint(65, (32, 257), device="cuda")
    batch = {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
    for key, changes in CHOICES.items():
        m = LanguageModel(LanguageConfig(vocabulary=65, decoder=config), impl="fused", seed=0).cuda()
        runs[key] = TrainStep(m, precision="fp32")
        with chosen(**changes):
            for _ in range(3):
                runs[key](batch)
    torch.cuda.synchronize()
    spent = collections.defaultdict(list)
    for turn in range(6):
        for key in list(runs) if turn % 2 else list(runs)[::-1]:
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            runs[key](batch)
            a.record()
            for _ in range(10):
                runs[key](batch)
            b.record()
            torch.cuda.synchronize()
            spent[key].append(a.elapsed_time(b) / 10)
    tell(f"{name} step ms", {key: [round(sorted(ms)[n], 3) for n in (3, 0, 5)] for key, ms in spent.items()})
    for key in [k for k in ("chosen", "before") if k in runs and time.time() < END - 6]:
        kernels_of(f"{name} {key}", runs[key], batch)


def kernels_of(name, run, batch):
    """A step's kernels by their own time: one launched early also counts its wait for the one before."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(3):
            run(batch)
        torch.cuda.synchronize()
    own, count, reach = collections.Counter(), collections.Counter(), 0
    on_card = [e for e in prof.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    for e in sorted(on_card, key=lambda e: e.time_range.start):
        own[e.name[:60]] += max(0, e.time_range.end - max(e.time_range.start, reach)) / 3
        count[e.name[:60]] += 1
        reach = max(reach, e.time_range.end)
    for kernel, us in own.most_common(12):
        tell(f"  {name} {kernel}", f"{us:.0f} us {count[kernel] / 3:.0f} x")


warm()
tell("compiled", "")
for part in PARTS:
    for job in [(step, "gpt2-c256", GPT2), (step, "fast-c256", FAST)] if part == "step" else [(globals()[part],)]:
        if time.time() < END - 5:
            with contextlib.suppress(KeyboardInterrupt):
                job[0](*job[1:])
