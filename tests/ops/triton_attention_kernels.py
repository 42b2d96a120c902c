"""The launches of attention's Triton kernels that the compile tests look at: those with the most in registers."""

from typing import Any

import torch

from ridgeline.ops._triton.support import Launch


def attention_launches() -> dict[str, tuple[Any, str, dict[str, str], dict[str, Any], Launch]]:
    """Kernel, pointers by dtype, scalars, constants and launch, by name."""
    from ridgeline.ops.attention import triton as kernels
    from ridgeline.ops.attention.long import PART_ROWS, default_launches

    scalars = dict.fromkeys(("site", "sample_offset", "H"), "i32") | dict.fromkeys(("scale", "kept"), "fp32")
    scalars |= {"T": "i32/16"}

    def strides(names: str) -> dict[str, str]:
        return scalars | {f"{name}_{axis}": "i32/16" for name in names.split() for axis in "bth"}

    relative, wide = default_launches(64, True, torch.bfloat16), default_launches(128, False, torch.bfloat16)
    exact = default_launches(64, False, torch.float32)
    constants = {"SHARE": 1, "D": 64, "THRESHOLD": 6554}

    def tile(launch: Launch) -> dict[str, int]:
        return {"QUERIES": launch.rows, "KEYS": launch.columns}

    def keys(launch: Launch, dtype: str, **more: Any) -> tuple[Any, str, dict[str, str], dict[str, Any], Launch]:
        pointers = f"fp32 lse delta; i64 seed_step; {dtype} q k v d_out dk dv" + ("" if "r_ptr" in more else " r")
        names = strides("q k v r do dk dv") | {"part": "i32/16"}
        return kernels.key_gradient_kernel, pointers, names, constants | {"PARTS": 1} | tile(launch) | more, launch

    return {
        "attention forward, relative": (
            kernels.forward_kernel,
            "bf16 q k v out r; fp32 lse; i64 seed_step",
            strides("q k v r o"),
            constants | {"SWEEPS": 1} | tile(relative.forward),
            relative.forward,
        ),
        "attention dQ, relative": (
            kernels.query_gradient_kernel,
            "fp32 lse delta; i64 seed_step; bf16 q k v d_out out dq r dr",
            strides("q k v r o do dq"),
            constants | tile(relative.queries),
            relative.queries,
        ),
        "attention dK dV, relative": keys(relative.keys, "bf16"),
        "attention dK dV, width 128": keys(wide.keys, "bf16", SHARE=8, PARTS=2, D=128, THRESHOLD=0, r_ptr=None),
        "attention dK dV, fp32": keys(exact.keys, "fp32", THRESHOLD=0, r_ptr=None),
        "attention parts of dK dV": (
            kernels.key_parts_kernel,
            "fp32 parts; bf16 dk dv",
            dict.fromkeys(("part", "T", "G", "dk_b", "dk_t", "dk_h", "dv_b", "dv_t", "dv_h"), "i32/16"),
            {"PARTS": 8, "D": 32, "ROWS": PART_ROWS},
            Launch(rows=PART_ROWS, warps=4),
        ),
    }
