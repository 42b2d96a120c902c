"""GELU's derivative in 16 bits and in 8: up and down's gradient alone, error over fp64 beside PyTorch's, then µs in turns
from cold clocks and at the power limit.

    PYTHONPATH=src:dev/gpu OUT=… python3 dev/gpu/slopes_gpu.py [seconds] [case …]      (20 s cold, alone; $OUT/slopes.json)
"""

import json
import os
import statistics
import sys
import time

import torch
from gemm_gpu import graph_of, in_turns

from ridgeline.ops.linear import products
from ridgeline.ops.linear.folded import FoldedNorm

CASES = {  # rows, K, F, gelu, bias, folded
    "hal-20m": (131072, 512, 2048, "exact", True, True),
    "gpt2-c256-512": (131072, 256, 1024, "tanh", True, False),
    "fast-c256-512": (131072, 256, 512, "tanh", False, False),
    "gpt2-124m": (65536, 768, 3072, "tanh", True, False),
}
FORMS = {"half": False, "codes": True}
CHECKED = 4224  # rows


def draw(*shape, scale=1.0):
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


class Case:
    """up and down's gradient with either kind of slopes."""

    def __init__(self, N, K, F, gelu, bias, folded):
        self.gelu, self.K = gelu, K
        self.x, self.dz, self.up, self.down = (
            draw(N, K),
            draw(N, K),
            draw(F, K, scale=K**-0.5),
            draw(K, F, scale=F**-0.5),
        )
        self.bias = draw(F, scale=0.3) if bias else None
        self.a, self.du = torch.empty(2, N, F, device="cuda", dtype=torch.bfloat16)
        self.slopes = {name: products.slope_empty(self.a, N, F, coded=coded) for name, coded in FORMS.items()}
        self.norm = None
        if folded:
            parts = self.x.float().unflatten(1, (-1, 64))
            shares = torch.stack([parts.sum(2), parts.square().sum(2)], 2).transpose(0, 1).contiguous()
            mean, rstd = torch.empty(2, N, device="cuda")
            self.norm = FoldedNorm("layernorm", 1e-5, 1 + draw(K, scale=0.1), draw(K, scale=0.1), shares, mean, rstd)

    def forward(self, form):
        products.forward_raw(
            self.x,
            self.up,
            self.a,
            bias_M=self.bias,
            gelu=self.gelu,
            slope_NM=self.slopes[form],
            norm=self.norm,
            impl="cuda",
        )

    def backward(self, form):
        return products.input_gradient_raw(
            self.dz, self.down, self.du, slope_NK=self.slopes[form], norm=self.norm, impl="cuda"
        )

    def plainly(self, dtype, rows):
        """du of the first rows and its sums over them, by autograd in one precision."""
        x, dz, up, down = (t.to(dtype) for t in (self.x[:rows], self.dz[:rows], self.up, self.down))
        if self.norm is not None:
            x = torch.nn.functional.layer_norm(
                x, (self.K,), self.norm.weight_K.to(dtype), self.norm.bias_K.to(dtype), 1e-5
            )
        u = (
            torch.nn.functional.linear(x, up, None if self.bias is None else self.bias.to(dtype))
            .detach()
            .requires_grad_()
        )
        a = torch.nn.functional.gelu(u, approximate="tanh" if self.gelu == "tanh" else "none")
        (du,) = torch.autograd.grad(a, u, dz @ down)
        return du.double()

    def errors(self):
        """Of du, over PyTorch's in bf16; whether two runs give the same bits."""
        exact = self.plainly(torch.float64, CHECKED)
        of = lambda got: float((got - exact).norm() / exact.norm())
        found = {"pytorch": of(self.plainly(torch.bfloat16, CHECKED))}
        for form in FORMS:
            bits = []
            for _ in range(2):
                self.du.fill_(float("nan"))
                self.slopes[form].fill_(0)
                self.forward(form)
                sums = self.backward(form)
                bits.append((self.du.clone(), sums.sum(0)))
            got = bits[0][0][:CHECKED].double()
            if self.norm is not None:
                got = got / self.norm.rstd_M[:CHECKED, None].double()
            whole = self.du.double() if self.norm is None else self.du.double() / self.norm.rstd_M[:, None].double()
            total = whole.sum(0)
            found[form] = of(got)
            found[f"{form} over pytorch"] = round(found[form] / found["pytorch"], 3)
            found[f"{form} sums off"] = float((sums.sum(0).double() - total).norm() / total.norm())
            found[f"{form} same bits"] = all(torch.equal(p, q) for p, q in zip(*bits))
        return found


def at_the_limit(graphs, segment=0.2, order="ABBAABBA"):
    """Median µs of a graph of each of two in the second halves of segments that follow each other without a pause."""
    (first, second), times = graphs, {key: [] for key in graphs}
    for letter in order:
        key, marks = first if letter == "A" else second, []
        begin = time.time()
        while time.time() < begin + segment:
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
            for _ in range(4):
                graphs[key].replay()
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
            if len(marks) > 4:
                marks[-4].synchronize()
        marks[-1].synchronize()
        late = marks[len(marks) // 4 * 2 :]
        times[key] += [a.elapsed_time(b) / 4 * 1e3 for a, b in zip(late[::2], late[1::2])]
    return {key: statistics.median(values) for key, values in times.items()}


def main(seconds, names):
    end, out = time.time() + seconds, {}
    for name, sizes in CASES.items():
        if names and name not in names:
            continue
        if time.time() > end - 3:
            print(name, "no time left", flush=True)
            continue
        torch.manual_seed(0)
        case = Case(*sizes)
        out[name] = {"errors": case.errors()}
        print(f"{name:14}", out[name]["errors"], flush=True)
        graphs = {}
        for form in FORMS:
            case.forward(form)
            graphs[f"up {form}"] = graph_of(lambda form=form: case.forward(form), 4)
            graphs[f"dgelu {form}"] = graph_of(lambda form=form: case.backward(form), 4)
        for key, us in in_turns(graphs, 4).items():
            out[name][key] = {"us": round(us[len(us) // 2], 1), "best": round(us[0], 1)}
        for kernel in ("up", "dgelu"):
            if time.time() < end - 2:
                pair = {f"{kernel} {form}": graphs[f"{kernel} {form}"] for form in FORMS}
                for key, us in at_the_limit(pair).items():
                    out[name][key]["hot"] = round(us / 4, 1)
        for key in graphs:
            print(f"{name:14} {key:12}", out[name][key], flush=True)
        del case, graphs
        torch.cuda.empty_cache()
        with open(f"{os.environ.get('OUT', '/tmp')}/slopes.json", "w") as file:
            json.dump(out, file)


if __name__ == "__main__":
    main(float(sys.argv[1] if len(sys.argv) > 1 else 40), sys.argv[2:])
