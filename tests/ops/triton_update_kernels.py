"""The launches of the optimiser's Triton kernels that the compile tests look at, at 20 million weights."""

from typing import Any

from ridgeline.ops._triton.support import Launch

Launches = dict[str, tuple[Any, str, dict[str, str], dict[str, Any], Launch]]
M = 20_000_000


def _plans() -> Launches:
    from ridgeline.ops.optimizer import triton as optimizer

    plan = optimizer.plan_config(M)
    text = (
        "fp32 gradient partials plan rates applied ring loss weight scale; i32 arrivals growth; i64 seed_step skipped"
    )
    scalars = {"M": "i32/16"} | dict.fromkeys(("known", "pieces", "rates", "interval"), "i32")
    scalars |= dict.fromkeys(("max_norm", "growth", "backoff"), "fp32")
    sizes = {"RING": 1024, "BLOCK_P": 1024, "BLOCK": plan.columns, "STAGES": plan.stages}
    constants: dict[str, Any] = {"LOG_BETA_1": -0.1, "LOG_BETA_2": -0.001, **sizes}
    absent = {"known_ptr": None, "pieces_ptr": None}
    kernel = optimizer.adamw_plan_kernel
    return {
        "adamw plan": (kernel, text, scalars, constants | absent, plan),
        "adamw plan, squares known": (kernel, f"{text}; fp32 known; i64 pieces", scalars, constants, plan),
    }


def update_launches() -> Launches:
    """The plan of a step, AdamW's update and what stands before and after Muon's iteration."""
    from ridgeline.ops.optimizer import triton as optimizer
    from ridgeline.ops.optimizer import triton_muon as muon

    update = optimizer.update_config(M)
    at_muon = Launch(rows=1, columns=muon.BLOCK, warps=muon.WARPS)
    floats = dict.fromkeys(("weight_decay", "complement_1", "beta_2", "complement_2", "eps"), "fp32")
    return {
        **_plans(),
        "adamw update": (
            optimizer.adamw_update_kernel,
            "fp32 weights gradient moment_1 moment_2 plan; bf16 copy",
            {"M": "i32/16", "start": "i32/16", "boundary": "i32/16"} | floats,
            {"BLOCK": update.columns},
            update,
        ),
        "muon before": (
            muon.muon_before_kernel,
            "fp32 gradient momentum coefficient counts; bf16 direction",
            {"M": "i32/16", "mu": "fp32", "complement": "fp32"},
            {"BLOCK": muon.BLOCK},
            at_muon,
        ),
        "muon after": (
            muon.muon_after_kernel,
            "fp32 weights rate counts; bf16 direction copy",
            {"M": "i32/16", "weight_decay": "fp32"},
            {"BLOCK": muon.BLOCK},
            at_muon,
        ),
    }
