"""The flat optimiser step against torch.optim.AdamW and clip_grad_norm_, and its counters."""

import math

import pytest
import torch

from error_budget import DEVICE
from ridgeline.errors import ConfigError, UnsupportedError
from ridgeline.ops.optimizer import AdamWSettings, AdamWState, KnownSquares, adamw

SIZES, DECAYING = (700, 324, 512, 64), 2  # the first two parameters decay
M, BOUNDARY = sum(SIZES), sum(SIZES[:DECAYING])
IMPLS = ["reference", "triton"]


def make_state(**changes: object) -> AdamWState:
    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, device=DEVICE)

    weights = torch.randn(M, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    state = AdamWState(
        weights=weights,
        gradient=zeros(M + 128),
        moment_1=zeros(M),
        moment_2=zeros(M),
        copy=torch.full((M,), float("nan"), dtype=torch.bfloat16, device=DEVICE),
        boundary=BOUNDARY,
        rates=torch.tensor([1e-3 * (1 + math.cos(step)) for step in range(20)], device=DEVICE),
        seed_step=torch.tensor([5, 0], device=DEVICE),
        applied=zeros(1),
        skipped=zeros(2, dtype=torch.int64),
        ring=torch.full((8, 4), float("nan"), device=DEVICE),
        loss=torch.ones(1, device=DEVICE),
    )
    return state._replace(**changes)


def gradient_of(step: int) -> torch.Tensor:
    """Large steps that are clipped, and small ones that are not."""
    gradient = torch.randn(M, generator=torch.Generator().manual_seed(step + 1))
    return (gradient * (2.0 if step % 3 else 0.003)).to(DEVICE)


@pytest.mark.parametrize("impl", IMPLS)
def test_twenty_steps_equal_torchs(impl: str) -> None:
    pytest.importorskip("triton")
    state, settings = make_state(), AdamWSettings(weight_decay=0.1)
    parameters = [torch.nn.Parameter(part.clone()) for part in state.weights.split(SIZES)]
    groups = [
        {"params": parameters[:DECAYING], "weight_decay": 0.1},
        {"params": parameters[DECAYING:], "weight_decay": 0.0},
    ]
    optimiser = torch.optim.AdamW(groups, lr=1.0)
    for step in range(20):
        gradient = gradient_of(step)
        for parameter, part in zip(parameters, gradient.split(SIZES), strict=True):
            parameter.grad = part.clone()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in optimiser.param_groups:
            group["lr"] = float(state.rates[step])
        optimiser.step()
        state.gradient[:M] = gradient
        adamw(state, settings, impl=impl)
        expected = torch.cat([parameter.detach() for parameter in parameters])
        torch.testing.assert_close(state.weights, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(state.ring[step % 8, 1], norm, rtol=1e-5, atol=0)
    # the moved distance, not only the place: 20 updates of about 1e-3 on weights of about 1
    start = make_state().weights
    assert ((state.weights - expected).norm() / (expected - start).norm()) < 2e-5
    assert state.applied.item() == 20
    assert state.seed_step.tolist() == [5, 20]
    assert state.skipped.tolist() == [0, 0]
    assert torch.equal(state.copy, state.weights.bfloat16())


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("where", ["gradient", "loss"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_changes_nothing(impl: str, where: str, bad: float) -> None:
    pytest.importorskip("triton")
    state, settings = make_state(), AdamWSettings()
    state.gradient[:M] = gradient_of(0)
    adamw(state, settings, impl=impl)
    kept = [tensor.clone() for tensor in (state.weights, state.moment_1, state.moment_2, state.copy)]
    for skipped in (1, 2):
        state.gradient[:M] = gradient_of(1)
        (state.gradient if where == "gradient" else state.loss)[0] = bad
        adamw(state, settings, impl=impl)
        assert state.skipped.tolist() == [skipped, skipped]
    for tensor, before in zip((state.weights, state.moment_1, state.moment_2, state.copy), kept, strict=True):
        assert torch.equal(tensor, before)
    assert state.applied.item() == 1
    assert state.seed_step.tolist() == [5, 3]
    assert state.ring[:3, 3].tolist() == [0, 1, 1]
    state.gradient[:M], state.loss[0] = gradient_of(1), 1.0
    adamw(state, settings, impl=impl)
    assert state.skipped.tolist() == [2, 0]
    assert state.applied.item() == 2


def test_scale_weight_and_schedule_end() -> None:
    """fp16's loss scale and sample weights are divided out; the scale moves as torch's; the last rate holds."""
    pytest.importorskip("triton")
    states = []
    for impl in IMPLS:
        state = make_state(
            weight=torch.full((1,), 3.0, device=DEVICE),
            loss_scale=torch.full((1,), 1024.0, device=DEVICE),
            growth=torch.zeros(1, dtype=torch.int32, device=DEVICE),
            rates=torch.tensor([1e-2, 1e-3], device=DEVICE),
        )
        scales = []
        for step in range(7):
            state.gradient[:M] = gradient_of(step) * 3.0 * state.loss_scale
            if step == 4:
                state.gradient[7] = float("inf")
            adamw(state, AdamWSettings(interval=2), impl=impl)
            scales.append(state.loss_scale.item())
        assert scales == [1024, 2048, 2048, 4096, 2048, 2048, 4096]
        states.append(state)
    for name in ("weights", "moment_1", "moment_2", "ring"):
        both = [getattr(state, name)[:7] if name == "ring" else getattr(state, name) for state in states]
        torch.testing.assert_close(*both, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(states[1].ring[:7, 0], torch.full((7,), 1 / 3, device=DEVICE))
    assert states[1].ring[:7, 2].tolist() == pytest.approx([1e-2] + [1e-3] * 6)


def test_two_runs_agree_bit_for_bit() -> None:
    pytest.importorskip("triton")
    from ridgeline.ops.optimizer.triton import workspace

    results = []
    for _ in range(2):
        state, work = make_state(), workspace(DEVICE)
        for step in range(3):
            state.gradient[:M] = gradient_of(step)
            adamw(state, AdamWSettings(), work=work, impl="triton")
        results.append(state.weights)
    assert torch.equal(*results)


@pytest.mark.parametrize("programs", [1, 3, 1000])
@pytest.mark.parametrize("bad", [None, "known", "rest"])
def test_known_squares_stand_for_gradients_that_are_not_read(bad: str | None, programs: int) -> None:
    pytest.importorskip("triton")
    from ridgeline.ops._triton.support import Launch
    from ridgeline.ops.optimizer.triton import adamw_raw, workspace

    both = [make_state() for _ in range(2)]
    for state in both:
        state.gradient[:M] = gradient_of(1)
    rest = ((0, 300), (896, 897), (1024, M - 5))
    gradient = both[0].gradient[:M].clone()
    for first, end in rest:
        gradient[first:end] = 0
    partials = torch.zeros(1000, device=DEVICE)
    partials[3], partials[999] = gradient[:700].square().sum(), gradient[700:].square().sum()
    if bad == "known":
        partials[999] = float("nan")
    elif bad == "rest":
        both[0].gradient[M - 6] = float("inf")
    launch = Launch(rows=1, columns=128, warps=4, per_processor=programs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ridgeline.ops.optimizer.triton.processors", lambda _: 1)
        known = KnownSquares(partials, rest)
        adamw_raw(both[0], AdamWSettings(), workspace(DEVICE), known=known, plan=launch)
    if bad is not None:
        assert both[0].skipped.tolist() == [1, 1]
        assert torch.equal(both[0].weights, make_state().weights)
        return
    adamw(both[1], AdamWSettings(), impl="reference")
    torch.testing.assert_close(both[0].ring[0], both[1].ring[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(both[0].weights, both[1].weights, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moment_1": torch.zeros(M, device=DEVICE).double()}, "moment_1 must be torch.float32, got torch.float64"),
        ({"moment_2": torch.zeros(M - 1, device=DEVICE)}, "moment_2 must have shape"),
        ({"gradient": torch.zeros(M - 1, device=DEVICE)}, f"gradient must have at least {M} elements"),
        ({"copy": torch.zeros(M, device=DEVICE)}, "copy must be bfloat16 or float16"),
        ({"boundary": M + 1}, f"boundary must be between 0 and {M}"),
        ({"growth": torch.zeros(1, dtype=torch.int32, device=DEVICE)}, "loss_scale=None"),
        ({"loss": torch.zeros(1, device="meta")}, "loss must be on"),
    ],
)
def test_bad_state(changes: dict, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        adamw(make_state(**changes), AdamWSettings())


@pytest.mark.parametrize("setting", [{"beta_1": 1.0}, {"eps": 0.0}, {"max_norm": 0.0}, {"weight_decay": -1.0}])
def test_bad_settings(setting: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        AdamWSettings(**setting)


def test_without_clipping_and_momentum() -> None:
    pytest.importorskip("triton")
    states = [make_state(copy=None) for _ in IMPLS]
    for state, impl in zip(states, IMPLS, strict=True):
        state.gradient[:M] = gradient_of(1)
        adamw(state, AdamWSettings(beta_1=0.0, max_norm=float("inf")), impl=impl)
        torch.testing.assert_close(state.moment_1, gradient_of(1))
    torch.testing.assert_close(states[0].weights, states[1].weights, rtol=1e-6, atol=1e-6)
