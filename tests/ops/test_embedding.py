"""Embedding against fp64, and its deterministic gradients."""

import pytest
import torch

from error_budget import DEVICE, DTYPES, compare
from ridgeline.errors import UnsupportedError
from ridgeline.ops.dropout import DropoutState
from ridgeline.ops.embedding import NormOf, embedding, embedding_norm
from ridgeline.ops.norm.reference import NormKind, norm_reference
from ridgeline.ops.sink import ATTRIBUTE, GradientSink

pytest.importorskip("triton")
DROPOUT = DropoutState(torch.tensor([99, 3], device=DEVICE), sample_offset=7)


def draw(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def draw_ids(*shape: int, V: int) -> torch.Tensor:
    """Skewed: few indices are frequent, many never come."""
    return (torch.rand(*shape, generator=torch.Generator().manual_seed(V)) ** 3 * V).long().to(DEVICE)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("B", "T", "V", "C", "positions", "p"),
    [
        (3, 50, 20, 36, True, 0.2),
        (5, 61, 7, 20, True, 0.0),
        (4, 50, 600, 20, False, 0.2),
        (2, 65, 140, 8, False, 0.0),
    ],
)
def test_embedding(B: int, T: int, V: int, C: int, positions: bool, p: float, dtype: torch.dtype) -> None:
    ids = draw_ids(B, T, V=V)
    inputs = {
        "table": draw(V, C, dtype=dtype, seed=1),
        "positions": draw(T + 3, C, dtype=dtype, seed=2) if positions else None,
    }

    def op(table, positions, impl):
        return embedding(ids, table, positions, p=p, dropout=DROPOUT, site=4, impl=impl)

    compare(op, inputs, "triton")


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("V", [1, 3, 40, 3000])
@pytest.mark.parametrize("items", [64, 130, 700])
def test_runs_of_every_length(items: int, V: int) -> None:
    """Runs inside a chunk of 64, across two, across many, and the whole of it; two columns that share a table."""
    from ridgeline.ops.embedding import triton as kernels
    from ridgeline.ops.embedding.sorted import CHUNK, table_gradient_sorted_raw

    ids = draw_ids(items // 2, 2, V=V)
    C = 12
    dout = draw(items // 2, 2 * C + 5, dtype=torch.bfloat16, seed=1)  # rows strided, as in a concatenated input
    flat = dout[:, : 2 * C].reshape(-1, C).double()
    truth = torch.zeros(V, C, dtype=torch.float64, device=DEVICE).index_add_(0, ids.flatten(), flat)
    start = draw(V, C, dtype=torch.float32, seed=2)
    table = start.clone()
    ends = torch.empty(-(-items // CHUNK), 2, C, device=DEVICE)
    table_gradient_sorted_raw(dout[:, : 2 * C], ids, table, ends)
    torch.testing.assert_close(table.double(), truth + start, rtol=1e-5, atol=1e-5)
    if V <= kernels.ONE_HOT_ROWS:
        table = start.clone()
        partials = torch.empty(kernels.small_partials(items, V, C, dout), V * C, device=DEVICE)
        kernels.table_gradient_small_raw(dout[:, : 2 * C], ids, table, partials)
        torch.testing.assert_close(table.double(), truth + start, rtol=1e-5, atol=1e-5)


def test_gather_into_a_slice() -> None:
    from ridgeline.ops.embedding.triton import gather_raw

    ids, table = draw_ids(9, 3, V=11), draw(11, 6, dtype=torch.bfloat16, seed=1)
    joint = torch.zeros(9, 30, dtype=torch.bfloat16, device=DEVICE)
    gather_raw(ids, table, joint[:, 4:22])
    assert torch.equal(joint[:, 4:22], table[ids].flatten(1))
    assert not joint[:, :4].any()
    assert not joint[:, 22:].any()


def test_an_index_out_of_range_is_loud() -> None:
    table = draw(5, 8, dtype=torch.float32, seed=1)
    out = embedding(torch.tensor([[0, 5, -1, 4]], device=DEVICE), table, impl="triton")
    assert out.isnan().all(-1).tolist() == [[False, True, True, False]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ids_BT": torch.zeros(2, 3, device=DEVICE)}, "ids_BT must be int64 or int32"),
        ({"ids_BT": torch.zeros(3, dtype=torch.int64, device=DEVICE)}, "must have 2 axes"),
        ({"positions_RC": torch.ones(2, 8, device=DEVICE)}, "positions_RC must have at least 3 rows, got 2"),
        ({"positions_RC": torch.ones(4, 7, device=DEVICE)}, "positions_RC must have shape"),
        ({"table_VC": torch.ones(8, 5, device=DEVICE).t()}, "table_VC must be contiguous"),
        ({"impl": "gather"}, "unknown implementation"),
    ],
)
def test_bad_input(arguments: dict, message: str) -> None:
    ids = torch.zeros(2, 3, dtype=torch.int64, device=DEVICE)
    with pytest.raises(UnsupportedError, match=message):
        embedding(**({"ids_BT": ids, "table_VC": torch.ones(5, 8, device=DEVICE), "impl": "triton"} | arguments))


@pytest.mark.gpu
@pytest.mark.parametrize(("B", "T", "V", "C"), [(32, 256, 65, 256), (512, 256, 400, 32), (32, 1024, 50257, 512)])
def test_real_shapes(B: int, T: int, V: int, C: int) -> None:
    ids = draw_ids(B, T, V=V)
    inputs = {
        "table": draw(V, C, dtype=torch.bfloat16, seed=1),
        "positions": draw(T, C, dtype=torch.bfloat16, seed=2),
    }

    def op(table, positions, impl):
        return embedding(ids, table, positions, p=0.1, dropout=DROPOUT, site=4, impl=impl)

    compare(op, inputs, "triton")


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize(("C", "positions", "shift"), [(24, True, True), (64, False, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_a_norm_it_is_the_embedding_and_the_norm_of_what_is_stored(
    dtype: torch.dtype, C: int, positions: bool, shift: bool, kind: NormKind
) -> None:
    generator = torch.Generator().manual_seed(C)
    table, places, scale, moved = (
        torch.randn(*shape, generator=generator).to(DEVICE, dtype) for shape in ((9, C), (7, C), (C,), (C,))
    )
    ids = torch.randint(0, 9, (3, 5), generator=generator).to(DEVICE)
    table.requires_grad_()
    places.requires_grad_()
    place, bias = places if positions else None, moved if shift else None
    normed = embedding_norm(ids, table, place, NormOf(scale, bias, 1e-5, kind))
    alone = embedding(ids, table, place, impl="triton")
    assert torch.equal(normed.x_BTC, alone)
    expected = norm_reference(
        alone.double(), scale.double(), None if bias is None else bias.double(), eps=1e-5, kind=kind
    )
    error = 1e-6 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(normed.h_NC.double(), expected.flatten(0, 1), rtol=error, atol=error)
    rows = alone.detach().double().flatten(0, 1)
    mean = rows.mean(1) if kind == "layernorm" else torch.zeros_like(rows[:, 0])
    rstd = ((rows - mean[:, None]).square().mean(1) + 1e-5).rsqrt()
    torch.testing.assert_close(normed.rstd_N.double(), rstd, rtol=1e-5, atol=0)
    if normed.mean_N is not None:
        torch.testing.assert_close(normed.mean_N.double(), mean, rtol=1e-5, atol=1e-6)
    assert (normed.mean_N is None) == (kind == "rmsnorm")
    assert not normed.h_NC.requires_grad
    wanted, start = [table, *([places] if positions else [])], torch.ones_like(alone)
    for one, other in zip(
        torch.autograd.grad(normed.x_BTC, wanted, start), torch.autograd.grad(alone, wanted, start), strict=True
    ):
        assert torch.equal(one, other)


def test_with_a_norm_it_refuses_what_it_refuses_alone() -> None:
    norm = NormOf(torch.ones(8, device=DEVICE), None, 1e-5, "rmsnorm")
    with pytest.raises(UnsupportedError, match="at least 5 rows, got 4"):
        embedding_norm(
            torch.zeros(2, 5, dtype=torch.int64, device=DEVICE), torch.ones(3, 8, device=DEVICE),
            torch.ones(4, 8, device=DEVICE), norm,
        )  # fmt: skip


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("B", "T", "V", "C", "R"), [(5, 7, 9, 24, 7), (70, 3, 65, 16, 5)])
@pytest.mark.parametrize("add", [False, True])
def test_table_and_positions_in_one_pass(
    add: bool, B: int, T: int, V: int, C: int, R: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(B)
    table, places = (torch.randn(n, C, generator=generator).to(DEVICE).requires_grad_() for n in (V, R))
    ids = torch.randint(0, V, (B, T), generator=generator).to(DEVICE)
    dout = torch.randn(B, T, C, generator=generator).to(DEVICE)
    right = torch.autograd.grad(embedding(ids, table, places), (table, places), dout)
    monkeypatch.setattr("ridgeline.ops.embedding.triton.MANY_ITEMS", 0)
    targets = [torch.full_like(x, 2.0) for x in right]
    for weight, target in zip((table, places), targets, strict=True):
        sink = GradientSink(target)
        sink.begin(add=add)
        setattr(weight, ATTRIBUTE, sink)
    out = embedding(ids, table, places, impl="triton")
    assert torch.autograd.grad(out, (table, places), dout, allow_unused=True) == (None, None)
    for target, expected in zip(targets, right, strict=True):
        torch.testing.assert_close(target - 2 * add, expected, rtol=1e-5, atol=1e-5)
