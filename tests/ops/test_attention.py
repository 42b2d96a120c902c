"""Attention's implementations against fp64, within PyTorch's own error, and what they refuse."""

import pytest
import torch
from torch import Tensor

from error_budget import DEVICE, compare
from ridgeline.errors import UnsupportedError
from ridgeline.ops.attention import IMPLEMENTATIONS, attention, attention_reference, available
from ridgeline.ops.dropout import DropoutState

DROPOUT = DropoutState(torch.tensor([2**40 + 17, 5], device=DEVICE), sample_offset=3)


def draw(
    T: int, H: int, G: int, D: int, rows: int, dtype: torch.dtype = torch.bfloat16, B: int = 2
) -> dict[str, Tensor | None]:
    """Inputs as views of one joint buffer."""
    torch.manual_seed(T + H + D)
    joint = torch.randn(B, T, (H + 2 * G) * D).to(DEVICE, dtype)
    parts = joint.split((H * D, G * D, G * D), -1)
    q, k, v = (x.unflatten(-1, (-1, D)) for x in parts)
    table = (torch.randn(rows, D) / 2).to(DEVICE, dtype) if rows else None
    return {"q": q, "k": k, "v": v, "table": table}


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("shape", "p", "dtype", "impl"),
    [
        ((70, 2, 1, 32, 80), 0.2, torch.bfloat16, "triton"),
        ((100, 2, 2, 64, 0), 0.0, torch.bfloat16, "triton"),
        ((130, 2, 1, 16, 0), 0.3, torch.float16, "triton-two-sweep"),
        ((65, 1, 1, 128, 65), 0.0, torch.float32, "triton-two-sweep"),
        ((17, 2, 2, 32, 40), 0.5, torch.float32, "triton"),
    ],
)
def test_triton(shape: tuple[int, ...], p: float, dtype: torch.dtype, impl: str) -> None:
    pytest.importorskip("triton")
    T, H, G, D, rows = shape
    inputs = draw(T, H, G, D, rows, dtype, B=1)

    def op(q, k, v, table, impl):
        return attention(q, k, v, table, scale=D**-0.5, p=p, dropout=DROPOUT if p else None, site=4, impl=impl)

    compare(op, inputs, impl)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("queries", "keys"), [(32, 16), (16, 32)])
def test_tiles_need_not_be_square(queries: int, keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from ridgeline.ops._triton.support import Launch
    from ridgeline.ops.attention import long

    tile = Launch(rows=queries, columns=keys, warps=4, stages=2)
    monkeypatch.setattr(long, "default_launches", lambda *_: long.Launches(tile, tile, tile))
    # four query heads for one of keys: more programs than heads of keys, so that their gradients are parts to be added
    compare(
        lambda q, k, v, table, impl: attention(q, k, v, table, scale=0.2, impl=impl),
        draw(77, 4, 1, 32, 90, B=1),
        "triton",
    )


def test_no_windows_are_none() -> None:
    q, k, v = (torch.randn(0, 5, heads, 32, device=DEVICE, requires_grad=True) for heads in (2, 1, 1))
    out = attention(q, k, v, scale=0.2, impl="triton")
    assert out.shape == q.shape
    assert [x.shape for x in torch.autograd.grad(out.sum(), [q, k, v])] == [q.shape, k.shape, v.shape]


@pytest.mark.usefixtures("poisoned")
def test_relative_scores_of_a_few_windows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their masks are those of their samples, and the table's gradient is the sum over all."""
    pytest.importorskip("triton")
    from ridgeline.ops.attention import long

    T, H, B = 40, 2, 3
    monkeypatch.setattr(long, "RELATIVE_BYTES", 2 * T * H * T * 2 + 1)  # two windows' in bf16

    def op(q: Tensor, k: Tensor, v: Tensor, table: Tensor, impl: str) -> Tensor:
        return attention(q, k, v, table, scale=0.2, p=0.3, dropout=DROPOUT, site=4, impl=impl)

    compare(op, draw(T, H, 1, 16, 50, B=B), "triton")


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("shape", "p", "dtype", "impl"),
    [
        ((256, 8, 8, 64, 256), 0.2, torch.bfloat16, "cuda"),
        ((128, 4, 4, 64, 200), 0.2, torch.bfloat16, "cuda"),
        ((256, 8, 8, 32, 0), 0.0, torch.bfloat16, "cuda"),
        ((256, 8, 1, 32, 0), 0.0, torch.bfloat16, "cuda"),
        ((177, 4, 2, 64, 177), 0.2, torch.float16, "cuda"),
        ((16, 2, 2, 32, 16), 0.3, torch.bfloat16, "cuda"),
        ((256, 8, 1, 32, 0), 0.0, torch.bfloat16, "cuda-plain"),
        ((1100, 4, 4, 32, 0), 0.0, torch.float16, "cuda-plain"),
        ((777, 6, 2, 64, 0), 0.0, torch.bfloat16, "cuda-plain"),
    ],
)
def test_cuda(shape: tuple[int, ...], p: float, dtype: torch.dtype, impl: str) -> None:
    T, H, G, D, rows = shape
    inputs = draw(T, H, G, D, rows, dtype, B=5)
    reason = available(impl, inputs["q"], inputs["k"], inputs["v"], inputs["table"])
    if reason is not None:
        pytest.skip(reason)

    def op(q, k, v, table, impl):
        return attention(q, k, v, table, scale=D**-0.5, p=p, dropout=DROPOUT if p else None, site=4, impl=impl)

    compare(op, inputs, impl)


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("T", [16, 64, 65])
def test_more_heads_than_a_card_takes_at_a_time(T: int) -> None:
    inputs = draw(T, 4, 2, 64, T, B=250)
    reason = available("cuda", inputs["q"], inputs["k"], inputs["v"], inputs["table"])
    if reason is not None:
        pytest.skip(reason)

    def op(q, k, v, table, impl):
        return attention(q, k, v, table, scale=0.125, p=0.2, dropout=DROPOUT, site=4, impl=impl)

    compare(op, inputs, "cuda")


@pytest.mark.parametrize("rows", [0, 40])
def test_torch_is_the_reference(rows: int) -> None:
    inputs = [None if x is None else x.double() for x in draw(33, 4, 2, 16, rows).values()]
    truth = attention_reference(*inputs, scale=0.25)
    assert torch.allclose(attention(*inputs, scale=0.25, impl="torch"), truth)


def test_torch_drops_what_the_specification_drops() -> None:
    inputs = [None if x is None else x.double() for x in draw(33, 4, 4, 16, 40).values()]
    truth = attention_reference(*inputs, scale=0.25, p=0.4, dropout=DROPOUT, site=2)
    got = attention(*inputs, scale=0.25, p=0.4, dropout=DROPOUT, site=2, impl="torch")
    assert torch.equal(got, truth)
    assert not torch.allclose(truth, attention(*inputs, scale=0.25))


def test_nothing_is_dropped_without_a_state() -> None:
    q, k, v, _ = draw(9, 2, 2, 16, 0).values()
    assert torch.equal(attention(q, k, v, scale=0.25, p=0.5), attention(q, k, v, scale=0.25))


def test_an_implementation_that_cannot_run_says_why() -> None:
    q, k, v, _ = draw(9, 2, 2, 24, 0).values()
    if DEVICE.type == "cpu":
        assert "CUDA" in str(available("cuda", q, k, v))
        with pytest.raises(UnsupportedError, match="cannot run: needs CUDA tensors"):
            attention(q, k, v, scale=1.0, impl="cuda")
    pytest.importorskip("triton")
    with pytest.raises(UnsupportedError, match="head widths"):
        attention(q, k, v, scale=1.0, impl="triton")


def test_the_reference_is_always_available() -> None:
    q, k, v, _ = draw(9, 2, 2, 24, 0).values()
    assert available("reference", q, k, v) is None
    assert "did you mean" in str(available("refrence", q, k, v))
    assert all(isinstance(available(impl, q, k, v), str | None) for impl in IMPLEMENTATIONS)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": torch.zeros(2, 9, 32)}, "q must be"),
        ({"k": torch.zeros(2, 9, 3, 16), "v": torch.zeros(2, 9, 3, 16)}, "divisor of 2 heads"),
        ({"k": torch.zeros(2, 8, 2, 16), "v": torch.zeros(2, 8, 2, 16)}, "k and v must be"),
        ({"table": torch.zeros(8, 16)}, "R at least T = 9"),
        ({"table": torch.zeros(9, 8)}, "table must be"),
        ({"v": torch.zeros(2, 9, 2, 16, dtype=torch.float64)}, "v must be torch.float32"),
        ({"p": 1.0}, "p must be from 0 to"),
        ({"scale": 0.0}, "scale must be positive"),
        ({"impl": "cud"}, "did you mean cuda"),
    ],
)
def test_bad_input_is_named(change: dict[str, object], words: str) -> None:
    arguments: dict[str, object] = {name: torch.zeros(2, 9, 2, 16) for name in "qkv"} | {"table": None} | change
    options = {"scale": 1.0, "p": 0.0, "impl": "reference"}
    options |= {name: arguments.pop(name) for name in set(options) & set(arguments)}
    with pytest.raises(UnsupportedError, match=words):
        attention(*arguments.values(), **options)
