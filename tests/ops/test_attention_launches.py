"""What short-window attention launches, recorded without a card: arguments, grids, shared memory, refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.errors import UnsupportedError
from ridgeline.ops.attention import hopper, plain, short, spans

PROCESSORS = 132


class Recorder:
    """Stands for loaded modules and their kernels."""

    def __init__(self) -> None:
        self.launches: dict[str, dict[str, Any]] = {}

    def load(self, path: Path, defines: dict[str, int]) -> "Recorder":
        self.defines = defines
        return self

    def kernel(self, name: str, kinds: str, *, patient: bool = False) -> "Recorder":
        self.launches[name] = {"kinds": kinds, "defines": self.defines}
        self.latest = self.launches[name]
        return self

    def launch(self, grid: tuple[int, ...], block: int, smem: int, arguments: tuple[object, ...]) -> None:
        self.latest.update(grid=grid, block=block, smem=smem, arguments=arguments)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(hopper.cuda, "load", recorder.load)
    monkeypatch.setattr(hopper.cuda, "tensor_map", lambda *_, **__: b"")
    for module in (short, plain, spans):
        monkeypatch.setattr(module, "processors", lambda _: PROCESSORS)
    return recorder


def tensors(B: int, T: int, H: int, G: int, D: int) -> tuple[torch.Tensor, ...]:
    """q, k and v as views of one buffer, and what the forward pass writes."""
    joint = torch.zeros(B, T, (H + 2 * G) * D, dtype=torch.bfloat16)
    q, k, v = (x.unflatten(-1, (-1, D)) for x in joint.split((H * D, G * D, G * D), -1))
    return q, k, v, torch.zeros(B, T, H, D, dtype=torch.bfloat16), torch.zeros(B, H, T)


def launch(B: int, T: int, H: int, G: int, D: int, rows: int, sums: bool = False) -> None:
    q, k, v, out, lse = tensors(B, T, H, G, D)
    table = torch.zeros(rows, D, dtype=torch.bfloat16) if rows else None
    drop = short.dropping(0.0, None, 0)
    short.forward(q, k, v, table, out, lse, scale=1.0, drop=drop)
    short.backward(
        out, q, k, v, table, out, lse, q, k, v, torch.zeros(rows, D) if rows else None,
        torch.zeros(short.workspace_size(q, k, table)), scale=1.0, drop=drop,
        column_sums=torch.zeros(short.column_sum_rows(q), (H + 2 * G) * D) if sums else None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "grouping", "kernels"),
    [
        ((2, 256, 8, 8, 64, 256), 0, {"table_gradient"}),
        ((3, 100, 4, 2, 32, 0), 1, {"group_gradients"}),
        ((400, 16, 4, 1, 32, 0), 2, set()),
        ((2, 130, 4, 2, 64, 200), 1, {"table_gradient", "group_gradients"}),
    ],
)
def test_launches(shape: tuple[int, ...], grouping: int, kernels: set[str], recorder: Recorder) -> None:
    launch(*shape, sums=True)
    assert set(recorder.launches) == {"attention_forward", "attention_backward"} | kernels
    for name, made in recorder.launches.items():
        assert len(made["kinds"]) == len(made["arguments"]), name
        assert made["smem"] <= 227 * 1024
    backward = recorder.launches["attention_backward"]
    assert backward["defines"]["RL_GROUPED"] == grouping
    assert backward["grid"] == (min(PROCESSORS, shape[0] * shape[2]),)


@pytest.mark.parametrize(
    ("shape", "parts"),
    [((4, 2048, 8, 8, 64), 1), ((4, 2048, 8, 1, 64), 8), ((512, 256, 8, 1, 64), 1), ((2, 1000, 4, 2, 64), 2)],
)
def test_plain_launches(shape: tuple[int, ...], parts: int, recorder: Recorder) -> None:
    q, k, v, out, lse = tensors(*shape)
    plain.forward(q, k, v, out, lse, scale=1.0)
    plain.backward(out, q, k, v, out, lse, q, k, v, scale=1.0)
    sums = {"group_gradients"} if parts > 1 else set()
    assert set(recorder.launches) == {f"attention_plain_{name}" for name in ("forward", "queries", "keys")} | sums
    for name, made in recorder.launches.items():
        assert len(made["kinds"]) == len(made["arguments"]), name
        blocks = made["defines"].get("BLOCKS_PER_PROCESSOR", 1)
        assert blocks * (made["smem"] + 1024) <= 228 * 1024
        assert made["grid"][0] <= blocks * PROCESSORS or name == "group_gradients"
    assert recorder.launches["attention_plain_keys"]["arguments"][13] == parts


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((4, 2048, 8, 8, 32), (1, 4, 128)),
        ((4, 2048, 8, 1, 32), (8, 4, 128)),
        ((512, 256, 8, 1, 32), (1, 1, 512)),
        ((32, 256, 8, 1, 32), (4, 1, 128)),
        ((64, 1024, 12, 12, 32), (1, 1, 768)),
    ],
)
def test_launches_in_spans(shape: tuple[int, ...], expected: tuple[int, ...], recorder: Recorder) -> None:
    q, k, v, out, lse = tensors(*shape)
    found = spans.split(q, k)
    assert found == expected
    plain.backward(out, q, k, v, out, lse, q, k, v, scale=1.0)
    names = {"attention_plain_backward"}
    names |= {"attention_plain_sum"} if found.key_parts > 1 else set()
    names |= {"group_gradients"} if found.parts > 1 and found.key_parts == 1 else set()
    assert set(recorder.launches) == names
    for name, made in recorder.launches.items():
        assert len(made["kinds"]) == len(made["arguments"]), name
        assert made["smem"] <= 227 * 1024
    assert recorder.launches["attention_plain_backward"]["grid"] == (min(PROCESSORS, found.units),)


def test_a_workspace_that_is_too_small_is_refused(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short, "workspace_size", lambda *_: 3)
    with pytest.raises(UnsupportedError, match="workspace must have"):
        launch(2, 64, 2, 2, 64, 64)


def test_gradients_that_are_not_rows_of_neighbouring_heads_are_refused(recorder: Recorder) -> None:
    x = torch.zeros(2, 4, 16, 64, dtype=torch.bfloat16).transpose(1, 2)
    with pytest.raises(UnsupportedError, match="out must be rows of neighbouring heads"):
        short.forward(x, x, x, None, x, torch.zeros(2, 4, 16), scale=1.0, drop=short.dropping(0.0, None, 0))


def test_outputs_at_odd_places_are_refused(recorder: Recorder) -> None:
    q, k, v, _, lse = tensors(2, 300, 2, 2, 32)
    out = torch.zeros(2, 300, 68, dtype=torch.bfloat16)[..., :64].unflatten(-1, (2, 32))
    with pytest.raises(UnsupportedError, match="out must begin at a multiple of 16 bytes"):
        plain.backward(q, q, k, v, out, lse, q, k, v, scale=1.0)
