"""Choices that need a card: their wiring on the CPU, with the kernels played by plain torch, then on a card."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from models.test_fused import (
    CONFIGS,
    decoder,
    equals_the_reference_to_rounding,
    errs_at_most_one_and_a_half_times_as_pytorch,
)
from ridgeline.models import DecoderConfig, LanguageConfig, LanguageModel
from ridgeline.models.fused import gradients, stack
from ridgeline.models.fused.choices import JOINED, Choices, choose, parted
from ridgeline.ops.linear import doubles, products
from ridgeline.ops.linear.reference import masked
from ridgeline.ops.mlp import Norm, head, kernels, many
from ridgeline.ops.mlp.reference import join_of
from ridgeline.ops.norm.reference import norm_reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS = frozenset(("mlp", "out", "qkv"))


def join(branch_NC: Tensor, j: kernels.Join) -> None:
    norm = Norm(j.kind, j.eps, j.weight_C, j.bias_C)
    r_NC, h_NC = join_of(branch_NC, j.branch_bias_C, j.residual_NC, norm, j.masks)
    j.r_NC.copy_(r_NC)
    j.h_NC.copy_(h_NC)
    if j.mean_N is not None:
        j.mean_N.copy_(r_NC.mean(1))
    centred = r_NC if j.mean_N is None else r_NC - r_NC.mean(1, keepdim=True)
    j.rstd_N.copy_((centred.square().mean(1) + j.eps).rsqrt())


def join_gradient(dh_NC: Tensor, j: kernels.JoinGradient) -> None:
    with torch.enable_grad():
        r_NC, weight_C = j.r_NC.detach().requires_grad_(), j.weight_C.detach().requires_grad_()
        bias_C = torch.zeros_like(weight_C, requires_grad=True)
        h_NC = norm_reference(r_NC, weight_C, bias_C if j.bias else None, eps=1e-5, kind=j.kind)
        wanted = [r_NC, weight_C, *([bias_C] if j.bias else [])]
        dr_NC, *small = torch.autograd.grad(h_NC, wanted, dh_NC)
    dr_NC = dr_NC if j.dresidual_NC is None else dr_NC + j.dresidual_NC
    dbranch_NC = dr_NC if j.masks is None else masked(dr_NC, j.masks)
    j.dr_NC.copy_(dr_NC)
    if j.dbranch_NC is not None:
        j.dbranch_NC.copy_(dbranch_NC)
    sums = [*small, *([dbranch_NC.sum(0)] if j.branch_bias else [])]
    j.partials_PW.zero_()
    j.partials_PW[-1] = torch.cat(sums)


def mlp_forward(
    h_NC: Tensor, up_FC: Tensor, up_bias_F: Any, down_CF: Tensor, kept: Tensor, a_NF: Tensor, j: Any, *, gelu: str
) -> None:
    with torch.enable_grad():
        u_NF = F.linear(h_NC, up_FC, up_bias_F).detach().requires_grad_()
        a = F.gelu(u_NF, approximate="tanh" if gelu == "tanh" else "none")
        kernels.keep(torch.autograd.grad(a.sum(), u_NF)[0], kept)
    a_NF.copy_(a.detach())
    join(a_NF @ down_CF.t(), j)


def mlp_backward(
    dz_NC: Tensor, up_FC: Tensor, down_CF: Tensor, kept: Tensor, du_NF: Tensor, du_sums_PF: Tensor | None, j: Any
) -> None:
    du_NF.copy_(dz_NC @ down_CF * kernels.unkeep(kept, *du_NF.shape))
    if du_sums_PF is not None:
        du_sums_PF.zero_()
        du_sums_PF[0] = du_NF.sum(0)
    join_gradient(du_NF @ up_FC, j)


def mlp_many_backward(
    dz_NC: Tensor, down_CF: Tensor, up_FC: Tensor, slope_NF: Tensor, du_NF: Tensor, j: kernels.JoinGradient
) -> None:
    du_NF.copy_(dz_NC @ down_CF * slope_NF)
    join_gradient(du_NF @ up_FC, j)


def grouped(group: Any, also: Any, room: Any = None) -> None:
    targets = [g.dweight_MK for g in group] + [g.dbias_M for g in group if g.dbias_M is not None]
    targets += [job.dst_RC for job in also]
    assert room is None  # nobody has asked for squares
    assert len({t.data_ptr() for t in targets}) == len(targets)  # a launch's results are written in any order
    results = [(g.dy_NM.t() @ g.x_NK, g.dweight_MK, g.add_weight) for g in group]
    results += [(g.dy_NM.sum(0), g.dbias_M, g.add_bias) for g in group if g.dbias_M is not None]
    results += [(job.shares_SRC.sum(0), job.dst_RC, job.accumulate) for job in also]
    for value, target, add in results:
        target.add_(value) if add else target.copy_(value)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Callable[[Choices], None]:
    """Kernels of whole rows and of grouped gradients played by plain torch; sets a stack's choices."""
    monkeypatch.setattr(kernels, "choose", lambda *_: kernels.Config())
    monkeypatch.setattr(kernels, "project_forward_raw", lambda x, w, j: join(x @ w.t(), j))
    monkeypatch.setattr(kernels, "project_backward_raw", lambda dy, w, j: join_gradient(dy @ w, j))
    monkeypatch.setattr(many, "blocks", lambda *_: 2)
    monkeypatch.setattr(many, "project_many_forward_raw", lambda x, w, j, **_: join(x @ w.t(), j))
    monkeypatch.setattr(many, "project_many_backward_raw", lambda dy, w, j: join_gradient(dy @ w, j))
    monkeypatch.setattr(many, "mlp_many_backward_raw", mlp_many_backward)
    shape = kernels.kept_shape
    monkeypatch.setattr(kernels, "hidden", lambda h, F: (h.new_empty(shape(len(h), F)), h.new_empty(len(h), F)))
    monkeypatch.setattr(kernels, "mlp_forward_raw", mlp_forward)
    monkeypatch.setattr(kernels, "mlp_backward_raw", mlp_backward)
    monkeypatch.setattr(gradients, "weight_gradients_raw", grouped)
    monkeypatch.setattr(gradients, "reduce_raw", lambda sums: grouped([], sums))
    monkeypatch.setattr(doubles, "weight_gradients", grouped)
    return lambda choices: monkeypatch.setattr(stack, "choose", lambda *_: choices)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("rows", [frozenset(), ROWS])
@pytest.mark.parametrize("name", ["learned, tanh", "relative, dropout, exact"])
def test_every_choice_is_wired_to_the_same_function(
    played: Callable[[Choices], None], name: str, rows: frozenset[str], grouped: bool
) -> None:
    played(Choices(attention="reference", mlp="torch", rows=rows, grouped=grouped))
    equals_the_reference_to_rounding(decoder(CONFIGS[name], layers=2))


def test_a_block_that_is_used_twice_is_written_once_and_added_to_once(played: Callable[[Choices], None]) -> None:
    played(Choices(attention="reference", mlp="torch", rows=ROWS, grouped=True))
    model = decoder(CONFIGS["learned, tanh"], layers=2)
    model.blocks[1] = model.blocks[0]
    equals_the_reference_to_rounding(model)


@pytest.mark.parametrize("limit", [0, 4000])
def test_gradients_are_launched_as_they_gather(
    monkeypatch: pytest.MonkeyPatch, played: Callable[[Choices], None], limit: int
) -> None:
    monkeypatch.setattr(gradients, "GATHERED_BYTES", limit)
    played(Choices(attention="reference", mlp="torch", rows=ROWS, grouped=True, early=False))
    equals_the_reference_to_rounding(decoder(CONFIGS["learned, tanh"], layers=2))


def test_a_bias_whose_sums_are_there_is_not_summed_again(played: Callable[[Choices], None]) -> None:
    dy, x, sums = torch.randn(6, 4), torch.randn(6, 3), torch.randn(5, 4)
    weight, bias = torch.nn.Parameter(torch.randn(4, 3)), torch.nn.Parameter(torch.randn(4))
    grads = gradients.WeightGradients(DEVICE, Choices(attention="reference", mlp="cuda", grouped=True))
    with torch.no_grad():
        grads.product(weight, dy.to(DEVICE), x.to(DEVICE), bias, sums.to(DEVICE))
        grads.finish()
    torch.testing.assert_close(grads.take(weight), (dy.t() @ x).to(DEVICE))
    torch.testing.assert_close(grads.take(bias), sums.sum(0).to(DEVICE))


@pytest.fixture
def played_products(monkeypatch: pytest.MonkeyPatch, played: Callable[[Choices], None]) -> Callable[[Choices], None]:
    """The Hopper kernels' products played too."""
    for raw in ("forward_raw", "input_gradient_raw"):
        real = getattr(products, raw)
        monkeypatch.setattr(products, raw, lambda *a, real=real, **options: real(*a, **{**options, "impl": "torch"}))
    return played


@pytest.mark.parametrize("joined", [JOINED, parted(JOINED)])
@pytest.mark.parametrize("name", ["learned, tanh", "one key/value head, RMSNorm, no biases"])
def test_joined_products_are_wired_to_the_same_function(
    played_products: Callable[[Choices], None], name: str, joined: frozenset[str]
) -> None:
    played_products(Choices(attention="reference", mlp="cuda", joined=joined, grouped=True))
    equals_the_reference_to_rounding(decoder(CONFIGS[name], layers=2))


def hopper(out: str, *, folded: bool) -> Choices:
    rest = out if not folded else "torch"
    return Choices(attention="reference", mlp="cuda", qkv="cuda", out=out, folded=folded, rest=rest, sums_at_once=True)


@pytest.mark.parametrize(("out", "folded"), [("cuda", False), ("residual", False), ("residual", True)])
@pytest.mark.parametrize(
    "name", ["learned, tanh", "relative, dropout, exact", "one key/value head, RMSNorm, no biases"]
)
def test_products_of_the_hopper_kernels_are_wired_to_the_same_function(
    played_products: Callable[[Choices], None], name: str, out: str, folded: bool
) -> None:
    played_products(hopper(out, folded=folded))
    equals_the_reference_to_rounding(decoder({**CONFIGS[name], "width": 192}, layers=2))


@pytest.mark.parametrize("plan", ["lean", "leanest"])
@pytest.mark.parametrize(
    "choices",
    [
        Choices(attention="reference", mlp="torch", rows=ROWS, grouped=True),
        Choices(attention="reference", mlp="cuda", joined=JOINED, grouped=True),
        hopper("cuda", folded=False),
        hopper("residual", folded=True),
    ],
    ids=["whole rows", "joined", "products", "folded"],
)
def test_what_a_plan_makes_again_is_wired_under_every_choice(
    played_products: Callable[[Choices], None], choices: Choices, plan: str
) -> None:
    played_products(choices)
    equals_the_reference_to_rounding(decoder({**CONFIGS["learned, tanh"], "width": 192}, layers=2), f"fused+{plan}")


WIDE = {
    "gpt2-c256": {"width": 256, "heads": 8, "gelu": "tanh", "context": 256},
    "fast-c256": {
        "width": 256, "heads": 8, "kv_heads": 1, "mlp_width": 512, "norm": "rmsnorm", "bias": False, "gelu": "tanh",
        "context": 256,
    },
    "dropout": {
        "width": 256, "heads": 4, "context": 256, "positions": "relative", "position_table": 1024, "dropout": 0.2,
    },
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("side_stream", [False, True])
@pytest.mark.parametrize(
    ("rows", "grouped", "out"),
    [
        (frozenset(), False, "cuda"),
        (frozenset(), False, "residual"),
        (ROWS, False, "cuda"),
        (frozenset(), True, "cuda"),
        (ROWS, True, "cuda"),
    ],
)
@pytest.mark.parametrize("name", WIDE)
def test_every_choice_on_the_card(
    monkeypatch: pytest.MonkeyPatch, name: str, rows: frozenset[str], grouped: bool, out: str, side_stream: bool
) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    model = decoder(WIDE[name], layers=2).cuda()
    chosen = choose(model.config, DEVICE, torch.bfloat16, 4, 256)
    chosen = dataclasses.replace(chosen, out=out, rows=rows, grouped=grouped, side_stream=side_stream)
    monkeypatch.setattr(stack, "choose", lambda *_: chosen)
    errs_at_most_one_and_a_half_times_as_pytorch(model)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gpt2-c256", "fast-c256"])
def test_joined_products_on_the_card(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    model = decoder(WIDE[name], layers=2).cuda()
    chosen = choose(model.config, DEVICE, torch.bfloat16, 257, 256)
    assert chosen.joined == JOINED
    monkeypatch.setattr(stack, "choose", lambda *_: chosen)
    errs_at_most_one_and_a_half_times_as_pytorch(model)


@pytest.mark.parametrize(
    ("B", "rows", "grouped"),
    [
        (32, ROWS, True),
        (33, ROWS, True),
        (34, frozenset(), True),
        (128, frozenset(), True),
        (129, frozenset(), False),
        (257, frozenset(), True),
    ],
)
def test_narrow_blocks_hold_whole_rows_while_each_multiprocessor_has_one_tile(
    monkeypatch: pytest.MonkeyPatch, B: int, rows: frozenset[str], grouped: bool
) -> None:
    """Beyond, a second tile would double the time; weight gradients stay one launch while that pays."""
    from ridgeline.models.config import DecoderConfig
    from ridgeline.models.fused import choices

    monkeypatch.setattr(choices, "attention_missing", lambda *_: None)
    monkeypatch.setattr(choices, "rows_missing", lambda *_: None)
    monkeypatch.setattr(choices.linear, "unavailable", lambda *_: None)
    config = DecoderConfig(layers=6, width=256, heads=8)
    chosen = choose.__wrapped__(config, torch.device("cuda"), torch.bfloat16, B, 256)
    assert (chosen.rows, chosen.grouped, chosen.side_stream) == (rows, grouped, False)
    assert chosen.joined == (JOINED if B > 256 else frozenset())
    coded = [choose.__wrapped__(config, torch.device("cuda"), d, B, 256).coded for d in (torch.bfloat16, torch.float16)]
    for dtype, T in ((torch.float16, 256), (torch.bfloat16, 301)):  # "hidden" takes codes, and 32 rows at a time
        other = choose.__wrapped__(config, torch.device("cuda"), dtype, B, T)
        assert other.joined == (parted(JOINED) if B > 256 else frozenset())
    assert coded == [True, False]  # fp16 errs an eighth as much as bf16, less than codes


def whole_head(
    r_NC: Tensor, dr_NC: Tensor, norm: Any, statistics: Any, weight_VC: Tensor, targets_N: Tensor, counts: Tensor,
    partials_PS: Tensor, losses_P: Tensor,
) -> None:  # fmt: skip
    """`norm_head_raw` by plain torch: the sums of all rows in the first block's place."""
    n_NC = r_NC if statistics.mean_N is None else r_NC - statistics.mean_N[:, None]
    n_NC = n_NC * statistics.rstd_N[:, None]
    with torch.enable_grad():
        z_NV = (norm_reference(r_NC, norm.weight_C, norm.bias_C, eps=1e-5, kind=norm.kind) @ weight_VC.t()).detach()
        losses_N = F.cross_entropy(z_NV.requires_grad_(), targets_N, ignore_index=-100, reduction="sum")
        g_NV = torch.autograd.grad(losses_N, z_NV)[0] / counts.sum()
        leaf_NC = r_NC.detach().requires_grad_()
        h_NC = norm_reference(leaf_NC, norm.weight_C, norm.bias_C, eps=1e-5, kind=norm.kind)
        dr_NC.copy_(torch.autograd.grad(h_NC, leaf_NC, g_NV @ weight_VC)[0])
    V, (C, columns) = len(weight_VC), (r_NC.shape[1], head.class_columns(len(weight_VC)))
    partials_PS.zero_()
    partials_PS[0, : C * columns].view(C, columns)[:, :V] = n_NC.t() @ g_NV
    partials_PS[0, C * columns :][:V] = g_NV.sum(0)
    losses_P.zero_()
    losses_P[0] = losses_N.detach()


@pytest.mark.parametrize("name", ["learned, tanh", "one key/value head, RMSNorm, no biases"])
def test_the_whole_head_is_wired_to_the_same_function(
    played: Callable[[Choices], None], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    played(Choices(attention="reference", mlp="torch", joined=parted(JOINED), grouped=True))
    monkeypatch.setattr(head, "missing", lambda *_: None)
    monkeypatch.setattr(head, "WIDTH", 24)
    monkeypatch.setattr(head, "norm_head_raw", whole_head)
    sizes: Any = {"layers": 2, "width": 24, "heads": 3, "context": 13, **CONFIGS[name]}
    config = LanguageConfig(decoder=DecoderConfig(**sizes), vocabulary=11)
    models = [LanguageModel(config, impl=impl, seed=5) for impl in ("reference", "fused")]
    for model in models:
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    tokens = torch.randint(0, 11, (2, 13), generator=torch.Generator().manual_seed(1))
    batch = {"tokens": tokens, "targets": tokens.roll(1, 1)}
    losses = [model.loss(batch) for model in models]
    assert type(losses[1].grad_fn).__name__.startswith("_NormHead")
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-5)
    for times in (1, 3):
        losses = [times * model.loss(batch) for model in models]
        gradients = [
            torch.autograd.grad(loss, list(model.parameters())) for loss, model in zip(losses, models, strict=True)
        ]
        for right, got in zip(*gradients, strict=True):
            torch.testing.assert_close(got, right, rtol=2e-4, atol=1e-5)
