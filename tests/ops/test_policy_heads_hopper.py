"""The heads' Hopper kernel: run on the host by tests/ops/emulation against float64, compiled, and what it takes.

Each head runs under its own seed of the emulation's scheduler, with wgmma early or late, over unwritten (NaN) outputs.
"""

import ctypes
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from ridgeline.ops import _cuda as cuda
from ridgeline.ops.policy_heads import HeadWeights, available, hopper, policy_heads
from ridgeline.ops.policy_heads.layout import HeadPlace, Layout, layout

HAL = layout(512, ((256, 9), (260, 37), (279, 6)), hopper.STEP)
SMALL = layout(40, ((70, 9), (24, 37), (130, 6)), hopper.STEP)
EPS = 1e-5

SOURCE = """#include "heads_sm90.cu"
extern "C" const char* run(const rl::TensorMap* m, void* const* p, const int* n, float eps, int grid, int random,
                           int late) {
  const auto half = [&](int i) { return static_cast<rl::u16*>(p[i]); };
  const auto full = [&](int i) { return static_cast<float*>(p[i]); };
  return emulation::launch(grid, 512, random, late, [=] {
    head(m[0], m[1], m[2], half(0), half(1), full(2), full(3), full(4), full(5), p[6], full(7), full(8), half(9),
         n[0], n[1], n[2], n[3], n[4], eps);
  });
}
"""


class Problem:
    """Random operands of all heads, the padding of the packed ones zero, and what the kernels write (NaN)."""

    def __init__(self, plan: Layout, rows: int, blocks: int) -> None:
        self.plan, self.rows, self.blocks = plan, rows, blocks
        W = plan.inner
        unwritten = lambda *shape: torch.full(shape, float("nan"))  # noqa: E731
        self.x = (torch.randn(rows, plan.width) + 0.5).bfloat16()
        self.a, self.b, self.down = torch.zeros(W, plan.width), torch.zeros(plan.rows_e, W), torch.zeros(plan.rows_v, W)
        self.s, self.c = torch.zeros(W), torch.zeros(W)
        for place in plan.heads:
            real = slice(place.at, place.at + place.inner)
            self.a[real] = torch.randn(place.inner, plan.width) * plan.width**-0.5
            self.b[: place.earlier, real] = torch.randn(place.earlier, place.inner) / 4
            self.down[: place.classes, real] = torch.randn(place.classes, place.inner) / 4
            self.s[real], self.c[real] = torch.randn(place.inner) / 4, torch.randn(place.inner)
        self.a, self.b, self.down = (x.bfloat16() for x in (self.a, self.b, self.down))
        self.bias = [torch.randn(place.classes).bfloat16() for place in plan.heads]
        self.p = (self.x.float() @ self.a.float().t()).bfloat16()
        self.q = self.p.clone()
        self.heard = unwritten(rows, 48).bfloat16()
        self.state, self.slopes = unwritten(2, rows), unwritten(len(plan.heads), 2, rows)
        self.partials = unwritten(blocks * hopper.WARPS, plan.sums)
        self.narrow = unwritten(blocks, W, hopper.NARROW)
        self.targets = torch.stack([torch.randint(place.classes, (rows,)) for place in plan.heads], 1).to(torch.int16)
        self.targets[torch.rand(self.targets.shape) < 0.2] = -100

    def run(self, place: HeadPlace, emulation: Any, seed: int) -> None:
        at = slice(place.at, place.at + place.padded)
        macros = hopper.defines(self.plan, place, torch.bfloat16, self.targets.dtype)
        maps = emulation.maps(
            (self.q[:, at], (64, 64)),
            (self.down[:, at], (-(-place.classes // 16) * 16, 64)),
            (self.b[:, at], (max(-(-place.earlier // 16) * 16, 16), 64)),
        )
        pointers = [
            x.data_ptr()
            for x in (
                self.x, self.heard, self.state, self.slopes[place.index], self.partials, self.narrow[:, place.at],
                self.targets[:, place.index], self.s[at], self.c[at], self.bias[place.index],
            )
        ]  # fmt: skip
        numbers = (self.rows, len(self.plan.heads), 48, self.plan.sums, self.plan.inner * hopper.NARROW)
        fault = emulation.compile(SOURCE, macros, hopper.SOURCE.parent)(
            ctypes.byref(maps), (ctypes.c_void_p * len(pointers))(*pointers), (ctypes.c_int * 5)(*numbers),
            ctypes.c_float(EPS), self.blocks, seed, seed % 2,
        )  # fmt: skip
        assert fault is None

    def expected(self, place: HeadPlace) -> dict[str, Tensor]:
        """In float64, from the logits that the heads before have left."""
        at = slice(place.at, place.at + place.padded)
        heard, E = self.heard[:, : place.earlier].double(), place.earlier
        z = torch.cat([self.x.double(), heard], 1)
        mean = z.mean(1, keepdim=True)
        scale = (z.var(1, unbiased=False, keepdim=True) + EPS).rsqrt()
        v = (self.p[:, at].double() + heard @ self.b[:E, at].double() - mean * self.s[at].double()) * scale
        u = (v + self.c[at].double()).requires_grad_()
        a = torch.nn.functional.gelu(u)
        down = self.down[: place.classes, at].double()
        logits = a @ down.t() + self.bias[place.index].double()
        target = self.targets[:, place.index].long()
        loss = torch.nn.functional.cross_entropy(logits, target, ignore_index=-100, reduction="sum")
        dl, du = torch.autograd.grad(loss, [logits, u])
        q, sums = du * scale, (du @ self.s[at].double(), (du * v).sum(1))
        beta = -(scale[:, 0] ** 2) * sums[1] / z.shape[1]
        alpha = -scale[:, 0] * sums[0] / z.shape[1] - mean[:, 0] * beta
        side = torch.cat([heard, mean, 1 / scale], 1)
        found = {"logits": logits, "q": q, "slopes": torch.stack([alpha, beta]), "side": q.t() @ side}
        found |= {"down": (a.t() @ dl)[: place.inner], "classes": dl.sum(0)}
        return {k: x.detach() for k, x in found.items()} | {"loss": torch.stack([loss.detach(), (target >= 0).sum()])}

    def found(self, place: HeadPlace) -> dict[str, Tensor]:
        """The same from the kernel's outputs."""
        at = slice(place.at, place.at + place.padded)
        E, V = place.earlier, place.classes
        (products,) = (hopper.narrow_products(self.plan, self.narrow.sum(0))[i] for i in (place.index,))
        sums, loss_at = self.partials.sum(0), self.plan.classes + 2 * place.index
        return {
            "logits": self.heard[:, E : E + V], "q": self.q[:, at], "slopes": self.slopes[place.index],
            "side": products.side_HX[:, : E + 2], "down": products.down_VH[:, : place.inner].t(),
            "classes": sums[place.class_at : place.class_at + V], "loss": sums[loss_at : loss_at + 2],
        }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "blocks", "seed"), [(300, 1, 1), (70, 1, 2), (410, 2, 3)])
def test_whole_kernel_matches_float64(rows: int, blocks: int, seed: int, emulation: Any) -> None:
    torch.manual_seed(seed)
    problem = Problem(SMALL, rows, blocks)
    for place in SMALL.heads:
        problem.run(place, emulation, seed + place.index)
        expected, found = problem.expected(place), problem.found(place)
        if place.index + 1 == len(SMALL.heads):
            del expected["logits"]  # nobody hears them
        for name, right in expected.items():
            error = (found[name].double() - right).norm() / right.norm()
            assert error < (1e-3 if name == "loss" else 5e-3), (place.index, name, float(error))


@pytest.mark.usefixtures("needs_nvrtc")
@pytest.mark.parametrize("place", HAL.heads, ids=lambda place: f"{place.inner}x{place.classes}")
def test_compiles_for_hopper_in_registers(place: HeadPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    cubin = cuda.build(hopper.SOURCE, hopper.defines(HAL, place, torch.bfloat16, torch.int64))
    usage = cubin.resources()["head"]
    assert usage.spill_loads <= 48  # what outlives a tile
    assert not {"C7510", "C7515"} & set(re.findall(r"C\d+", cubin.log))  # wgmma serialised
    assert hopper.smem(place) <= hopper.SMEM_LIMIT
    assert hopper.unfit(HAL, torch.bfloat16) is None


def test_heads_that_do_not_fit_are_refused_in_words() -> None:
    wide, chatty = layout(512, ((400, 9),), hopper.STEP), layout(512, ((64, 40), (64, 40)), hopper.STEP)
    assert "up to 320" in str(hopper.unfit(wide, torch.bfloat16))
    assert "classes and heard logits" in str(hopper.unfit(chatty, torch.bfloat16))
    assert "float32" in str(hopper.unfit(HAL, torch.float32))
    assert "CUDA device" in str(available("cuda", torch.device("cpu")))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("width", "shapes", "rows"),
    [
        (512, ((256, 9), (260, 37), (279, 6)), 20_011),
        (256, ((128, 9), (132, 37), (151, 6)), 8_192),
        (64, ((320, 40),), 65),
        (40, ((16, 3), (17, 2), (18, 5), (23, 7)), 1_000),
    ],
)
def test_kernel_on_a_card_is_as_near_to_fp64_as_pytorch(
    width: int, shapes: tuple[tuple[int, int], ...], rows: int, dtype: torch.dtype
) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    torch.manual_seed(rows)
    draw = lambda *shape: torch.randn(*shape, device="cuda")  # noqa: E731
    heads, seen = [], width
    for inner, classes in shapes:
        norm, up = (1 + draw(seen) / 4, draw(seen) / 4), (draw(inner, seen) * seen**-0.5, draw(inner) / 4)
        heads.append(HeadWeights(*norm, *up, draw(classes, inner) * inner**-0.5, draw(classes) / 4))
        seen += classes
    given = [w.to(dtype) for w in (draw(rows, width), *(w for head in heads for w in head))]
    targets = torch.stack([torch.randint(classes, (rows,), device="cuda") for _, classes in shapes], 1)
    targets[torch.rand(targets.shape, device="cuda") < 0.1] = -100

    def run(impl: str, precision: torch.dtype) -> list[Tensor]:
        x, *flat = (w.to(precision).requires_grad_() for w in given)
        size = len(HeadWeights._fields)
        weights = [HeadWeights(*flat[at : at + size]) for at in range(0, len(flat), size)]
        losses = policy_heads(x, weights, targets, impl=impl)
        return [losses.detach(), *torch.autograd.grad(losses.sum(), [x, *flat])]

    exact, plain, got, again = (
        run(impl, precision)
        for impl, precision in (("reference", torch.float64), ("reference", dtype), ("cuda", dtype), ("cuda", dtype))
    )
    assert all(map(torch.equal, got, again))

    def errors(results: list[Tensor]) -> Tensor:
        return torch.stack(
            [(x.double() - right).norm() / right.norm() for x, right in zip(results, exact, strict=True)]
        )

    # A vector of 17 numbers may come out nearly exact in PyTorch by luck: fields are judged over all heads.
    fields = len(HeadWeights._fields)
    for places in ([0], [1], *(list(range(2 + field, len(exact), fields)) for field in range(fields))):
        error, allowed = (errors(results)[places].square().mean().sqrt() for results in (got, plain))
        assert error <= 1.5 * allowed + 2e-4, (places, float(error), float(allowed))
