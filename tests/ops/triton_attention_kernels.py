"""The launches of attention's Triton kernels that the compile tests look at: those with the most in registers."""

from typing import Any

from ridgeline.ops._triton.support import Launch


def attention_launches() -> dict[str, tuple[Any, str, dict[str, str], dict[str, Any], Launch]]:
    """Kernel, pointers by dtype, scalars, constants and launch, by name."""
    from ridgeline.ops.attention import triton as kernels
    from ridgeline.ops.attention.long import default_launch

    scalars = dict.fromkeys(("site", "sample_offset", "H"), "i32") | dict.fromkeys(("scale", "kept"), "fp32")
    scalars |= {"T": "i32/16", "R": "i32/16"}
    rows = "fp32 lse delta; i64 seed_step; bf16 q k v d_out"

    def strides(names: str) -> dict[str, str]:
        return scalars | {f"{name}_{axis}": "i32/16" for name in names.split() for axis in "bth"}

    relative, wide = default_launch(64, True), default_launch(128, False)
    constants = {"SHARE": 1, "D": 64, "THRESHOLD": 6554, "TILE": relative.rows}
    return {
        "attention forward, relative": (
            kernels.forward_kernel,
            "bf16 q k v out table; fp32 lse; i64 seed_step",
            strides("q k v o"),
            constants | {"SWEEPS": 1},
            relative,
        ),
        "attention dQ, relative": (
            kernels.query_gradient_kernel,
            rows + " out dq table",
            strides("q k v o do dq"),
            constants,
            relative,
        ),
        "attention dK dV, relative": (
            kernels.key_gradient_kernel,
            rows + " dk dv table",
            strides("q k v do dk dv"),
            constants,
            relative,
        ),
        "attention table": (
            kernels.table_gradient_kernel,
            rows + " table; fp32 parts",
            strides("q k v do") | {"units": "i32"},
            constants,
            Launch(rows=relative.rows, warps=relative.warps, stages=1),
        ),
        "attention dK dV, width 128": (
            kernels.key_gradient_kernel,
            rows + " dk dv",
            strides("q k v do dk dv"),
            {"SHARE": 8, "D": 128, "THRESHOLD": 0, "TILE": wide.rows, "table_ptr": None},
            wide,
        ),
    }
