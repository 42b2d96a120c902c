"""The fused stack against the reference decoder: outputs and every gradient, masks included."""

import copy

import pytest
import torch
from torch import Tensor

from ridgeline.cost import storage
from ridgeline.errors import ConfigError, UnsupportedError
from ridgeline.models import Decoder, DecoderConfig, LanguageConfig, LanguageModel
from ridgeline.models.init import initialise
from ridgeline.models.memory import block_saved
from ridgeline.models.plan import FUSED, LEAN, LEANEST, StoragePlan
from ridgeline.ops.dropout import DropoutState
from ridgeline.ops.sink import ATTRIBUTE, GradientSink, join

pytest.importorskip("triton")

CONFIGS = {
    "relative, dropout, exact": {"positions": "relative", "position_table": 21, "dropout": 0.2},
    "learned, tanh": {"gelu": "tanh"},
    "one key/value head, RMSNorm, no biases": {
        "norm": "rmsnorm", "bias": False, "kv_heads": 1, "gelu": "tanh", "mlp_width": 40,
    },
    "attention in tiles, grouped heads, relative, dropout": {
        "heads": 2, "head_width": 16, "kv_heads": 1, "positions": "relative", "dropout": 0.2,
    },
    "no positions, layer norm without bias, dropout": {"positions": "none", "bias": False, "dropout": 0.1},
}  # fmt: skip


def decoder(overrides: dict[str, object], layers: int = 1) -> Decoder:
    config = DecoderConfig(**{"layers": layers, "width": 24, "heads": 3, "context": 13, **overrides})  # type: ignore[arg-type]
    model = Decoder(config, impl="reference")
    initialise(model, layers, seed=0)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # biases of 0 and scales of 1 would hide mistakes
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def run(model: Decoder, impl: str, dtype: torch.dtype, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    model = copy.deepcopy(model).to(dtype)
    model.impl = impl
    x = x.to(dtype).requires_grad_()
    y = model(x, DropoutState(torch.tensor([3, 4], device=x.device), sample_offset=2))
    parameters = dict(model.named_parameters())
    grads = torch.autograd.grad(y, [x, *parameters.values()], dy.to(dtype))
    return {"y": y.detach(), "x": grads[0], **dict(zip(parameters, grads[1:], strict=True))}


def relative_error(result: Tensor, exact: Tensor) -> float:
    return float((result.double() - exact).norm() / exact.norm())


def inputs(model: Decoder, samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    shape = (samples, model.config.context, model.config.width)
    x, dy = (torch.randn(shape, generator=generator).bfloat16().float() for _ in range(2))
    device = next(model.parameters()).device
    return x.to(device), dy.to(device)


def equals_the_reference_to_rounding(model: Decoder, impl: str = "fused") -> None:
    x, dy = inputs(model, 3)
    exact = run(model, "reference", torch.float64, x, dy)
    fused = run(model, impl, torch.float32, x, dy)
    for key, value in exact.items():
        assert relative_error(fused[key], value) < 2e-6, key


def errs_at_most_one_and_a_half_times_as_pytorch(model: Decoder) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    x, dy = inputs(model, 4)
    exact = run(model, "reference", torch.float64, x, dy)
    fused = run(model, "fused", torch.bfloat16, x, dy)
    torch_bf16 = run(model, "reference", torch.bfloat16, x, dy)
    for key, value in exact.items():
        assert relative_error(fused[key], value) <= 1.5 * relative_error(torch_bf16[key], value), key


@pytest.mark.parametrize("name", CONFIGS)
def test_fp32_equals_the_reference_to_rounding(name: str) -> None:
    equals_the_reference_to_rounding(decoder(CONFIGS[name], layers=2))


@pytest.mark.parametrize("name", CONFIGS)
def test_bf16_error_is_at_most_one_and_a_half_times_pytorchs(name: str) -> None:
    errs_at_most_one_and_a_half_times_as_pytorch(decoder(CONFIGS[name]))


@pytest.mark.parametrize("plan", ["lean", "leanest"])
@pytest.mark.parametrize("name", ["relative, dropout, exact", "one key/value head, RMSNorm, no biases"])
def test_what_is_made_again_is_what_was_not_kept(name: str, plan: str) -> None:
    model = decoder(CONFIGS[name], layers=2)
    x, dy = inputs(model, 3)
    kept, again = (run(model, impl, torch.float32, x, dy) for impl in ("fused", f"fused+{plan}"))
    for key, value in kept.items():
        torch.testing.assert_close(again[key], value, rtol=1e-6, atol=1e-6, msg=key)


@pytest.mark.parametrize("plan", [FUSED, LEAN, LEANEST], ids=lambda plan: plan.name)
def test_the_blocks_keep_what_the_accounting_says(plan: StoragePlan) -> None:
    """Every tensor that the stack's node holds besides weights, by the memory that it keeps alive."""
    model, _ = language("fused" if plan is FUSED else f"fused+{plan.name}", layers=3)
    decoder = model.decoder
    node = decoder(torch.randn(2, 13, 48, requires_grad=True)).grad_fn.next_functions[0][0]
    held: dict[int, int] = {}

    def hold(value: object) -> None:
        if isinstance(value, Tensor):
            held[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, (list, tuple)):
            for item in value:
                hold(item)
        elif hasattr(value, "__dict__"):
            hold(list(vars(value).values()))

    hold([node.saved, node.joined])
    c, rows = decoder.config, 2 * 13
    block = sum(block_saved(c, 13, storage("fp32"), plan).values())
    final = (2 * c.width + 2) * 4  # the last join's stream, norm and statistics
    assert sum(held.values()) == rows * (3 * block + final)


def test_evaluation_draws_no_masks() -> None:
    model = decoder(CONFIGS["relative, dropout, exact"]).eval()
    x = torch.randn(2, 13, 24)
    fused = copy.deepcopy(model)
    fused.impl = "fused"
    torch.testing.assert_close(fused(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["relative, dropout, exact", "one key/value head, RMSNorm, no biases"])
def test_sinks_receive_what_autograd_would(name: str) -> None:
    model = decoder(CONFIGS[name])
    generator = torch.Generator().manual_seed(2)
    x, dy = (torch.randn(3, 13, 24, generator=generator) for _ in range(2))
    expected = run(model, "fused", torch.float32, x, dy)
    model.impl = "fused"
    own = {key: p for key, p in model.named_parameters() if key != "positions"}
    flat = torch.full((sum(p.numel() for p in own.values()),), float("nan"))
    views = dict(zip(own, flat.split([p.numel() for p in own.values()]), strict=True))
    sinks = {key: GradientSink(views[key].view(p.shape)) for key, p in own.items()}
    for key, p in own.items():
        setattr(p, ATTRIBUTE, sinks[key])
    state = DropoutState(torch.tensor([3, 4]), sample_offset=2)
    for repeat in (1, 2):  # written, then added
        for sink in sinks.values():
            sink.begin(add=repeat == 2)
        grads = torch.autograd.grad(model(x.requires_grad_(), state), list(own.values()), dy, allow_unused=True)
        assert all(gradient is None for gradient in grads)
        join(list(sinks.values()))
        for key, sink in sinks.items():
            torch.testing.assert_close(sink.target, repeat * expected[key], rtol=1e-5, atol=1e-6, msg=key)


def language(impl: str, **trunk: object) -> tuple[LanguageModel, dict[str, Tensor]]:
    """A model of width 48, whose attention runs in tiles, and a batch of its context."""
    config = DecoderConfig(**{"layers": 1, "width": 48, "heads": 3, "context": 13, **trunk})  # type: ignore[arg-type]
    model = LanguageModel(LanguageConfig(vocabulary=11, decoder=config), impl=impl, seed=0)
    return model, {name: torch.randint(11, (2, config.context)) for name in ("tokens", "targets")}


@pytest.mark.parametrize("impl", ["fused", "m0"])
def test_a_backward_pass_that_cannot_be_right_is_refused(impl: str) -> None:
    model, batch = language(impl)
    loss = model.loss(batch)
    loss.backward(retain_graph=True)
    with pytest.raises(UnsupportedError, match="differentiated once a forward pass"):
        loss.backward()
    loss = model.loss(batch)
    with torch.no_grad():
        model.decoder.blocks[0].mlp.up.weight.mul_(2)
    with pytest.raises(UnsupportedError, match="changed in place between a forward and its backward pass"):
        loss.backward()


@pytest.mark.parametrize("positions", ["learned", "relative", "none"])
@pytest.mark.parametrize("impl", ["reference", "torch", "fused", "r16"])
def test_a_sequence_beyond_the_context_is_refused(impl: str, positions: str) -> None:
    model, _ = language(impl, positions=positions, position_table=None if positions == "none" else 20)
    longer = {name: torch.zeros(2, 14, dtype=torch.int64) for name in ("tokens", "targets")}
    with pytest.raises(ConfigError, match="14 positions is longer than the model's context=13"):
        model.loss(longer)


@pytest.mark.parametrize("impl", ["fused", "r16"])
def test_autocast_is_not_ignored(impl: str) -> None:
    model, batch = language(impl)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(UnsupportedError, match=r"torch\.float32, and autocast would cast.*model\.bfloat16"):
            model.loss(batch)
        model.bfloat16().loss(batch).backward()


@pytest.mark.parametrize("tied", [False, True])
def test_language_models_loss_and_gradients(tied: bool) -> None:
    trunk = DecoderConfig(layers=1, width=24, heads=3, context=13, dropout=0.2)
    model = LanguageModel(LanguageConfig(vocabulary=11, decoder=trunk, tied=tied), impl="reference", seed=0)
    generator = torch.Generator().manual_seed(2)
    tokens, targets = (torch.randint(11, (3, 13), generator=generator) for _ in range(2))
    targets[1, 5:] = -100
    state = DropoutState(torch.tensor([3, 4]))
    results = []
    for impl in ("reference", "fused"):
        model.decoder.impl = impl
        loss = model.loss({"tokens": tokens, "targets": targets}, state)
        results.append((loss.detach(), torch.autograd.grad(loss, list(model.parameters()))))
    torch.testing.assert_close(results[1], results[0], rtol=2e-5, atol=1e-6)
