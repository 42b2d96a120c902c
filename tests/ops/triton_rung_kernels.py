"""The launches of the ladder's Triton kernels that the compile tests look at, at hal-20m's sizes."""

from typing import Any

from ridgeline.ops._triton.support import Launch

Launches = dict[str, tuple[Any, str, dict[str, str], dict[str, Any], Launch]]


def _products() -> Launches:
    from ridgeline.models.rungs.products import TILES
    from ridgeline.ops.linear.tiled import product_kernel

    strides = dict.fromkeys(("a_u", "b_u", "out_u", "out_s", "out_m", "more_m"), "i32/16")
    scalars = strides | dict.fromkeys(("M", "N", "K", "segment", "T"), "i32/16") | {"kept": "fp32"}
    scalars |= {"site": "i32", "sample_offset": "i32"}
    absent = dict.fromkeys(
        ("bias_ptr", "residual_ptr", "pre_ptr", "gelu_input_ptr", "sums_ptr", "seed_step_ptr"), None
    )  # fmt: skip
    plain = {"ACCUMULATE": False, "THRESHOLD": 0, "C": 4, "GELU": False, "TANH": False, "PRECISE": False, "EVEN": True}
    forward = ({"a_k": 1, "b_k": 1}, {"a_m": "i32/16", "b_n": "i32/16"})
    backward = ({"a_k": 1, "b_n": 1}, {"a_m": "i32/16", "b_k": "i32/16"})
    weights = ({"a_m": 1, "b_n": 1}, {"a_k": "i32/16", "b_k": "i32/16"})
    epilogues: dict[str, tuple[str, tuple[dict[str, Any], dict[str, str]], dict[str, Any]]] = {
        "gelu": ("bf16 a b out bias pre", forward, {"GELU": True}),
        "residual": ("bf16 a b out bias residual; i64 seed_step", forward, {"THRESHOLD": 6554, "C": 512}),
        "derivative": ("bf16 a b out gelu_input; fp32 sums", backward, {}),
    }
    cases: Launches = {}
    for name, tile in TILES.items():
        launch = Launch(rows=tile.rows, warps=tile.warps, stages=tile.stages)
        sizes = {"ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth, "STAGES": tile.stages}
        kinds = {
            "forward": ("bf16 a b out", forward, {}),
            "input gradient": ("bf16 a b out", backward, {}),
            "weight gradient": ("bf16 a b; fp32 out", weights, {"ACCUMULATE": True}),
        }
        for kind, (pointers, (units, pitches), more) in (kinds | (epilogues if name == "pipelined" else {})).items():
            missing = {key: None for key in absent if key.removesuffix("_ptr") not in pointers.split()}
            constants = plain | sizes | units | missing | more
            cases[f"product {name} {kind}"] = (product_kernel, pointers, scalars | pitches, constants, launch)
    return cases


def rung_launches() -> Launches:
    """Kernel, pointers by dtype, scalars, constants and launch, by name."""
    from ridgeline.ops.attention import materialised

    launch = Launch(rows=8, warps=materialised.WARPS)
    sizes, scalars = {"ROWS": 8, "BLOCK_T": 256}, {"N": "i32", "T": "i32/16", "scale": "fp32"}
    dropping = {"site": "i32", "sample_offset": "i32", "kept": "fp32", "T": "i32/16", "B": "i32/16", "H": "i32"}
    return _products() | {
        "attention softmax": (materialised.softmax_kernel, "bf16 s r p", scalars, sizes, launch),
        "attention softmax gradient": (materialised.softmax_gradient_kernel, "bf16 p dp ds", scalars, sizes, launch),
        "attention weights dropped": (
            materialised.drop_kernel,
            "bf16 x out; i64 seed_step",
            dropping,
            sizes | {"THRESHOLD": 6554},
            launch,
        ),
        "attention unskew": (materialised.unskew_kernel, "bf16 ds dr", scalars, sizes, launch),
    }
