"""Both ends of a language model with many rows: the embedding with its norm, and ops/mlp/head.cu, on a card.

python3 dev/gpu/ends_gpu.py SECONDS [check] [time] [stress] [model]      (all four; 20 s and stress)

check   errors of both kernels against fp64, in PyTorch's errors in bf16; nothing that fails is timed
time    us of each kernel in bursts of 20, replayed as a graph
stress  launches until the time is over, and how many of them differ in a bit from the first
model   two layers of gpt2-c256 and fast-c256 at 67,584 tokens: loss and every gradient, likewise
"""

import copy
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from fused_gpu import WORKLOADS

from ridgeline.models import LanguageConfig, LanguageModel
from ridgeline.ops._triton.support import Launch
from ridgeline.ops.cross_entropy import triton as losses
from ridgeline.ops.embedding import triton as tables
from ridgeline.ops.mlp import head
from ridgeline.ops.mlp.head_triton import Place, head_gradients_raw

OUT = Path(os.environ.get("OUT", "/tmp"))
N, V, C, EPS = 131072, 65, 256, 1e-5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def relative(got, truth):
    """‖got − truth‖ / ‖truth‖."""
    return float((got.double() - truth).norm() / truth.norm())


class Case:
    """Operands of the head, and its results' memory."""

    def __init__(self, rms, rows=N):
        generator = torch.Generator().manual_seed(1)

        def draw(*shape):
            return torch.randn(*shape, generator=generator).to(DEVICE)

        def nan(*shape):
            return torch.full(shape, float("nan"), device=DEVICE)

        self.rms, self.kind = rms, "rmsnorm" if rms else "layernorm"
        self.r, self.weight = (draw(rows, C) + 0.1).bfloat16(), (draw(V, C) * 0.05).bfloat16()
        self.scale, self.shift = (draw(C) * 0.1 + 1).bfloat16(), None if rms else (draw(C) * 0.1).bfloat16()
        self.targets = torch.randint(0, V, (rows,), generator=generator).to(DEVICE)
        mean = None if rms else self.r.float().mean(1)
        centred = self.r.float() if rms else self.r.float() - mean[:, None]
        self.statistics = head.Statistics(mean, (centred.square().mean(1) + EPS).rsqrt())
        self.norm = head.FinalNorm(self.scale, self.shift, self.kind)
        self.dr, self.counts = torch.empty_like(self.r), torch.zeros(losses.COUNTS, dtype=torch.int32, device=DEVICE)
        blocks = head.blocks(rows, self.r.device)
        self.partials, self.losses = nan(blocks, head.partial_columns(V)), nan(blocks)
        self.places = [Place(nan(*x.shape), False) for x in (self.weight, self.scale)]
        self.places.append(None if rms else Place(nan(C), False))

    def count(self):
        losses.count_valid_raw(self.targets, self.counts)

    def forward(self):
        head.norm_head_raw(
            self.r,
            self.dr,
            self.norm,
            self.statistics,
            self.weight,
            self.targets,
            self.counts,
            self.partials,
            self.losses,
        )

    def gradients(self):
        columns = head.class_columns(V)
        head_gradients_raw(self.partials, self.weight, self.scale, self.shift, None, *self.places, columns=columns)

    def results(self):
        places = [place.target for place in self.places if place is not None]
        return [self.losses.sum() / self.counts.sum(), self.dr, *places]

    def expected(self, dtype):
        """Loss and gradients by PyTorch in `dtype`."""
        leaves = [x.to(dtype).requires_grad_() for x in (self.r, self.weight, self.scale, self.shift) if x is not None]
        norm = F.rms_norm if self.rms else F.layer_norm
        logits = norm(leaves[0], (C,), *leaves[2:], eps=EPS) @ leaves[1].t()
        loss = F.cross_entropy(logits if dtype == torch.float64 else logits.float(), self.targets)
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def check():
    """Whether the head's and the embedding's results are right."""
    fine = True
    for rms in (False, True):
        case = Case(rms)
        case.count(), case.forward(), case.gradients()
        truth, usual = case.expected(torch.float64), case.expected(torch.bfloat16)
        ratios = [
            relative(g, t) / relative(u, t) for g, t, u in zip(case.results()[1:], truth[1:], usual[1:], strict=True)
        ]
        loss = abs(float(case.results()[0].double() - truth[0]))
        fine = fine and max(ratios) < 1.5 and loss < 1e-4
        print(
            f"head {case.kind}: loss off by {loss:.1e}, errors in PyTorch's {[round(x, 2) for x in ratios]}", flush=True
        )
    for rms in (False, True):
        e = embedding(rms)
        e["run"]()
        x = (e["table"][e["ids"]].double() + e["places"].repeat(N // 256, 1).double()).bfloat16()
        scale, shift = e["scale"].double(), None if rms else e["shift"].double()
        norm = F.rms_norm(x.double(), (C,), scale, EPS) if rms else F.layer_norm(x.double(), (C,), scale, shift, EPS)
        error = relative(e["h"], norm)
        fine = fine and torch.equal(e["x"], x) and error < 3e-3
        print(f"embedding rms={rms}: x equal {torch.equal(e['x'], x)}, norm's error {error:.1e}", flush=True)
    place = Places()
    for name, run in place.ways().items():
        run()
        truth = place.expected()
        errors = [relative(got, right) for got, right in zip((place.dtable, place.dplaces), truth, strict=True)]
        fine = fine and max(errors) < 1e-5
        print(f"gradients of table and positions, {name}: errors {[f'{x:.1e}' for x in errors]}", flush=True)
    return fine


class Places:
    """Operands of the gradients of table and positions."""

    def __init__(self):
        generator = torch.Generator().manual_seed(4)
        self.dout = torch.randn(N // 256, 256, C, generator=generator).bfloat16().to(DEVICE)
        self.ids = torch.randint(0, V, (N // 256, 256), generator=generator).to(DEVICE)
        self.dtable, self.dplaces = (torch.full((n, C), float("nan"), device=DEVICE) for n in (V, 256))
        self.partials = torch.full((128, V * C), float("nan"), device=DEVICE)

    def apart(self):
        tables.table_gradient_raw(self.dout.view(-1, C), self.ids.view(-1, 1), self.dtable, accumulate=False)
        tables.position_gradient_raw(self.dout, self.dplaces, accumulate=False)

    def together(self, config=None):
        tables.table_and_place_gradients_raw(
            self.dout, self.ids, self.dtable, self.dplaces, self.partials, add_table=False, add_positions=False,
            config=config,
        )  # fmt: skip

    def ways(self):
        half = Launch(rows=64, warps=8, columns=128, stages=4)
        return {"apart": self.apart, "together": self.together, "two to a processor": lambda: self.together(half)}

    def expected(self):
        dout = self.dout.double()
        table = torch.zeros(V, C, dtype=torch.float64, device=DEVICE)
        return table.index_add_(0, self.ids.flatten(), dout.flatten(0, 1)), dout.sum(0)


def embedding(rms):
    """Operands of the embedding with its norm, and its launch."""
    generator = torch.Generator().manual_seed(2)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).bfloat16().to(DEVICE)

    e = {"table": draw(V, C), "places": draw(256, C), "scale": draw(C), "shift": draw(C)}
    e["ids"] = torch.randint(0, V, (N,), generator=generator).to(DEVICE)
    e["x"], e["h"] = draw(1, C).repeat(N, 1), draw(1, C).repeat(N, 1)
    mean, rstd = (torch.zeros(N, device=DEVICE) for _ in range(2))
    e["run"] = lambda: tables.gather_norm_raw(
        e["ids"], e["table"], e["places"], e["scale"], None if rms else e["shift"], e["x"], e["h"],
        None if rms else mean, rstd, T=256, eps=EPS,
    )  # fmt: skip
    return e


def burst(call, repeats=20):
    """us a call, the median of five replays."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(), graph.replay(), end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / repeats * 1e3)
    return statistics.median(times[1:])


def timed():
    """us of every kernel."""
    found = {}
    for rms in (False, True):
        for rows in (N, 8192):
            case = Case(rms, rows)
            case.count()
            for name in ("count", "forward", "gradients"):
                found[f"{case.kind} {rows} {name}"] = burst(getattr(case, name))
        found[f"embedding {'rmsnorm' if rms else 'layernorm'}"] = burst(embedding(rms)["run"])
    for name, run in Places().ways().items():
        found[f"table and positions {name}"] = burst(run)
    for name, us in found.items():
        print(f"{name}: {us:.1f} us", flush=True)
    return found


def stress(end):
    """Launches until then, in bursts of 50 without a look in between."""
    found = {}
    for rms, share in ((False, 0.5), (True, 1.0)):
        case, until = Case(rms), time.time() + share * (end - time.time())
        case.count(), case.forward(), case.gradients()
        right = [x.clone() for x in (case.dr, case.partials, case.losses)]
        launches = differing = 0
        while time.time() < until:
            case.dr.fill_(float("nan")), case.partials.fill_(float("nan"))
            for _ in range(50):
                case.forward()
            launches += 50
            differing += any(
                not torch.equal(x, y) for x, y in zip((case.dr, case.partials, case.losses), right, strict=True)
            )
        found[case.kind] = launches, differing
        print(f"stress {case.kind}: {launches} launches, {differing} bursts that differ", flush=True)
    return found


def whole_model(name):
    """Ratios of errors, ours over PyTorch's in bf16, of the loss and of every gradient."""
    import dataclasses

    decoder, _, T = WORKLOADS[name]
    config = LanguageConfig(vocabulary=V, decoder=dataclasses.replace(decoder, layers=2))
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(V, (264, T + 1), generator=generator).to(DEVICE)
    batch = {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
    first = LanguageModel(config, impl="torch", seed=0).to(DEVICE).bfloat16()
    results = []
    for impl, dtype in (("fused", torch.bfloat16), ("torch", torch.bfloat16), ("torch", torch.float64)):
        model = LanguageModel(config, impl=impl, seed=0).to(DEVICE).to(dtype)
        model.load_state_dict(copy.deepcopy(first.state_dict()))
        loss = model.loss(batch)
        loss.backward()
        results.append([loss.detach(), *[p.grad for p in model.parameters()]])
        kind = type(loss.grad_fn).__name__
        if impl == "fused":
            print(f"{name}: loss by {kind}", flush=True)
        del model, loss
    ours, usual, truth = results
    ratios = [
        relative(g, t) / max(relative(u, t), 1e-9) for g, u, t in zip(ours[1:], usual[1:], truth[1:], strict=True)
    ]
    off = [abs(float(loss.double() - truth[0])) for loss in (ours[0], usual[0])]
    print(f"{name}: loss off by {off[0]:.1e} (PyTorch {off[1]:.1e}), gradients in PyTorch's errors: worst", end=" ")
    print(f"{max(ratios):.2f}, median {statistics.median(ratios):.2f}", flush=True)
    return max(ratios)


def main(seconds, parts):
    """Runs what is asked for; what has been found is written at every step."""
    end, found = time.time() + seconds, {}
    wanted = parts or ["check", "time", "model", "stress"]
    for part in wanted:
        if part == "check":
            found[part] = check()
            if not found[part]:
                print("WRONG: not timed", flush=True)
                break
        elif part == "time":
            found[part] = timed()
        elif part == "model":
            found[part] = {name: whole_model(name) for name in ("gpt2-c256", "fast-c256")}
        elif part == "stress":
            found[part] = stress(end)
        (OUT / "ends.json").write_text(json.dumps(found))
    (OUT / "ends.json").write_text(json.dumps(found))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    if DEVICE == "cpu":
        sys.exit("no card")
    main(float(sys.argv[1]), sys.argv[2:])
