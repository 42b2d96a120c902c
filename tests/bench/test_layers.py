"""Kernels of a layer in the article's groups: this package's own as an H200's trace recorded them, scopes, sums."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ridgeline.bench.kernel_map import COPIES, UNMAPPED, KernelMap
from ridgeline.bench.layers import group_of, kernel_groups
from ridgeline.bench.trace import Kernel, read_trace
from ridgeline.ops.linear import products
from ridgeline.presets import preset

HAL, GPT = preset("hal-20m").model, preset("gpt2-c256").model


def kernel(name: str, phase, *shapes, operator: str = "_Stack", kind: str = "kernel", us: float = 1.0) -> Kernel:
    return Kernel(
        name=name, kind=kind, start=0, duration=us, stream=7, operator=operator, shapes=shapes, phase=phase
    )  # fmt: skip


@pytest.mark.parametrize(
    ("found", "group"),
    [
        (kernel("nvjet_sm90", "forward", (1536,), (131072, 512), (512, 1536), operator="aten::addmm"), "QKV"),
        (kernel("nvjet_sm90", "forward", (131072, 512), (512, 512), operator="aten::mm"), "output projection"),
        (kernel("gemm", "forward"), "MLP up"),
        (kernel("gemm", "backward"), "MLP down"),
        (kernel("stationary", "forward"), "MLP up"),
        (kernel("nvjet_sm90", "forward", (131072, 2048), (2048, 512), operator="aten::mm"), "MLP down"),
        (kernel("nvjet_sm90", "backward", (512, 131072), (131072, 2048), operator="aten::mm"), "MLP down"),
        (kernel("mlp_forward", "forward"), "MLP up + MLP down"),
        (kernel("mlp_backward", "backward"), "MLP down + MLP up"),
        (kernel("mlp_many_backward", "backward"), "MLP down + MLP up"),
        (kernel("project_forward", "forward"), "output projection"),
        (kernel("project_backward", "backward"), "QKV"),
        (kernel("weight_gradients", "backward"), "weight gradients"),
        (kernel("gradients_of_floats", "backward"), "weight gradients"),
        (kernel("reduce", "backward"), "pointwise"),
        (kernel("folded_statistics_kernel", "forward"), "norms"),
        (kernel("folded_gradient_kernel", "backward"), "MLP up"),
        (kernel("attention_forward", "forward"), "attention"),
        (kernel("attention_backward", "backward"), "attention"),
        (kernel("table_gradient", "backward"), "relative table"),
        (kernel("norm_backward_kernel", "backward"), "norms"),
        (kernel("Memset (Device)", "forward", operator="aten::addmm", kind="gpu_memset"), "fills and copies"),
        (kernel("nobody_knows_me", "forward"), "not told"),
        # outside the layers
        (kernel("head_kernel", "forward", operator="PolicyHeads"), None),
        (kernel("nvjet_sm90", "forward", (131072, 512), (512, 896), operator="aten::mm"), None),
        (kernel("nvjet_sm90", "backward", (896, 131072), (131072, 512), operator="aten::mm"), None),
        (kernel("input_vector_kernel", "forward", operator="InputLayer"), None),
        (kernel("table_gradient_small_kernel", "backward", operator="InputLayerBackward"), None),
        (kernel("adamw_update_kernel", "optimizer", operator=""), None),
    ],
)
def test_kernels_of_the_fused_path(found, group):
    assert group_of(KernelMap(HAL, 512, 256)(found)) == group


def test_a_fused_loss_has_its_gradients_in_the_forward_pass():
    to_op = KernelMap(GPT, 32, 256)
    assert to_op(kernel("cutlass", "forward", (8192, 256), (256, 65), (8192, 65), operator="aten::mm")) == "head"
    gradient = kernel("cutlass", "forward", (8192, 65), (65, 256), (8192, 256), operator="aten::mm")
    assert to_op(gradient) == "head.input_gradient"
    weights = kernel("cutlass", "forward", (65, 256), (65, 8192), (8192, 256), operator="aten::addmm")
    assert to_op(weights) == "head.weight_gradient"


@pytest.mark.parametrize(
    ("scope", "op"),
    [
        ("product:forward:131072:512:1536", "qkv"),
        ("product:forward:131072:512:2048", "mlp_up"),
        ("product:forward:131072:2048:512", "mlp_down"),
        ("product:input_gradient:131072:512:512", "out.input_gradient"),
        ("product:input_gradient:131072:2048:512", "mlp_down.input_gradient"),
        ("product:input_gradient:131072:512:1536", "qkv.input_gradient"),
        ("product:forward:131072:512:896", "heads.norm or heads.up or heads.down or cross_entropy"),
        ("product:forward:7:512:1536", UNMAPPED),
    ],
)
def test_products_of_our_own_say_their_shape(scope, op):
    assert KernelMap(HAL, 512, 256)(replace(kernel("stationary", "forward"), scope=scope)) == op


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_say_their_shape_to_a_profiler(monkeypatch, dtype):
    x, weight, out = (torch.randn(*shape).to(dtype) for shape in ((4, 8), (3, 8), (4, 3)))
    seen = []
    monkeypatch.setattr(products.stationary, "stationary", lambda *_, **__: seen.append("launched"))
    monkeypatch.setattr(products.doubles, "product", lambda *_, **__: seen.append("launched"))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        products.forward_raw(x, weight, out, impl="cuda")
        products.input_gradient_raw(out, weight, x, impl="cuda")
    names = [event.name for event in profiler.events() if event.name.startswith("ridgeline::")]
    assert names == ["ridgeline::product:forward:4:8:3", "ridgeline::product:input_gradient:4:8:3"]
    assert seen == ["launched"] * 2


def test_what_the_code_says_comes_first():
    to_op = KernelMap(HAL, 512, 256)
    said = replace(kernel("some_tiles_kernel", "backward"), scope="qkv.weight_gradient")
    assert to_op(said) == "qkv.weight_gradient"
    fill = replace(kernel("Memset (Device)", "forward", kind="gpu_memset"), scope=COPIES)
    assert group_of(to_op(fill)) == "fills and copies"
    assert to_op(replace(said, scope="")) == UNMAPPED


def test_scopes_are_read_from_the_thread_that_launched():
    def event(name, cat, ts, dur, tid, **args):
        return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "tid": tid, "args": args}

    events = [
        event("ridgeline::mlp_up", "user_annotation", 10, 20, 1),
        event("ridgeline::gelu", "user_annotation", 12, 4, 1),
        event("ridgeline::qkv", "user_annotation", 10, 20, 2),
        event("cuLaunchKernel", "cuda_driver", 13, 1, 1, correlation=1),
        event("cuLaunchKernel", "cuda_driver", 20, 1, 1, correlation=2),
        event("cuLaunchKernel", "cuda_driver", 40, 1, 1, correlation=3),
        *(event("k", "kernel", 100 + n, 1, 7, correlation=n, stream=7) for n in (1, 2, 3)),
    ]
    assert [k.scope for k in read_trace({"traceEvents": events})] == ["gelu", "mlp_up", ""]


def test_groups_are_a_layers_share_of_a_step_in_a_fixed_order():
    kernels = [
        kernel("norm_forward_kernel", "forward", us=600),
        kernel("gemm", "backward", us=1200),
        kernel("attention_forward", "forward", us=1800),
        kernel("attention_forward", "forward", us=1800),
        kernel("head_kernel", "forward", operator="PolicyHeads", us=9e6),
        replace(kernel("Memset (Device)", "forward", kind="gpu_memset", us=5e5), phase=None),  # a tenth at most
    ]
    found = kernel_groups(kernels, HAL, 512, 256, steps=2)
    assert found is not None
    assert list(found) == ["forward · attention", "forward · norms", "backward · MLP down"]
    assert found == pytest.approx(
        {"forward · attention": 0.3, "forward · norms": 0.05, "backward · MLP down": 0.1}
    )  # two steps of six layers


def test_a_trace_without_phases_has_no_groups():
    assert kernel_groups([], HAL, 512, 256, steps=1) is None
    told = kernel("norm_forward_kernel", "forward", us=80)
    assert kernel_groups([told, kernel("graphed", None, us=20)], HAL, 512, 256, steps=1) is None
