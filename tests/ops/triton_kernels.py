"""The launches that the compile tests look at. Run as a script, it compiles them all and prints what came out as JSON.

Separate from the tests because the interpreter, which they run in, and the compiler exclude each other in a process.
"""

import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from ridgeline.ops._triton.compiled import ARCHITECTURES, SHARED_LIMIT, compile_kernel, transposed_results
from ridgeline.ops._triton.support import Launch


class Case(NamedTuple):
    """One launch: kernel, dtype of each pointer ("" where absent) and scalar, constants, launch (by shared memory)."""

    kernel: Any
    pointers: dict[str, str]
    scalars: dict[str, str]
    constants: dict[str, Any]
    launch: Launch | Callable[[int], Launch]


def pointers(text: str) -> dict[str, str]:
    """`"bf16 x y; fp32 mean"` as a dtype for each `x_ptr`, `y_ptr`, `mean_ptr`."""
    groups = [group.split() for group in text.split(";")]
    return {f"{name}_ptr": f"*{group[0]}" for group in groups for name in group[1:]}


MASK = {"site": "i32", "sample_offset": "i32", "N": "i32", "T": "i32/16", "scale": "fp32"}


def norm_cases() -> dict[str, Case]:
    from ridgeline.ops.norm import triton as norm

    cases = {}
    for C in (1024, 512, 256):
        forward, backward = norm.forward_config(131072 * 512 // C // 4, C), norm.backward_config(131072, C)
        shared = {"C": C, "W": C, "X_STRIDE": C, "BLOCK_C": C, "RMS": False, "THRESHOLD": 6554}
        cases[f"norm forward {C}"] = Case(
            norm.norm_forward_kernel,
            pointers("bf16 branch branch_bias residual weight bias r h; fp32 mean rstd; i64 seed_step"),
            {**MASK, "eps": "fp32"},
            {**shared, "R_STRIDE": C, "H_STRIDE": C, "ROWS": forward.rows},
            forward,
        )
        cases[f"norm backward {C}"] = Case(
            norm.norm_backward_kernel,
            pointers("bf16 dh r weight dresidual dr dbranch; fp32 mean rstd partials; i64 seed_step"),
            {**MASK, "partials_stride": "i32/16"},
            {
                **shared,
                "OUT": C,
                "DH_STRIDE": C,
                "DR_STRIDE": C,
                "BIAS": True,
                "BRANCH_BIAS": True,
                "ROWS": backward.rows,
                "STAGES": backward.stages,
                "DIVIDED": False,
            },
            backward,
        )
    return cases


def folded_cases() -> dict[str, Case]:
    from ridgeline.ops.linear import folded_triton as folded

    return {
        "gradient behind a folded norm": Case(
            folded.folded_gradient_kernel,
            pointers("fp32 product sums weight bias; bf16 scale shift"),
            {"P": "i32", "M": "i32/16"},
            {
                "K": 512,
                "ADD_WEIGHT": True,
                "ADD_BIAS": True,
                "MEANS": True,
                "ROWS": folded.ROWS,
                "SLOTS": folded.SLOTS,
                "BLOCK_K": 512,
            },
            Launch(rows=folded.ROWS, warps=4),
        ),
        "folded statistics": Case(
            folded.folded_statistics_kernel,
            pointers("fp32 shares mean rstd"),
            {"N": "i32", "eps": "fp32"},
            {"PARTS": 8, "C": 512, "MEANS": True, "ROWS": 256},
            Launch(rows=256, warps=4),
        ),
        "folded weights": Case(
            folded.folded_weights_kernel,
            pointers("bf16 weight bias scale shift scaled; fp32 out_bias"),
            {"M": "i32/16"},
            {"K": 512, "CENTRED": True, "ROWS": folded.ROWS, "BLOCK_K": 512},
            Launch(rows=folded.ROWS, warps=4),
        ),
    }


def activation_cases() -> dict[str, Case]:
    from ridgeline.ops.activation import triton as activation

    F, cases = 2048, {}
    forward, backward = activation.forward_config(131072, F), activation.backward_config(131072, F)
    for kind in ("exact", "tanh"):
        shared = {"F": F, "TANH": kind == "tanh", "PRECISE": False}
        cases[f"gelu {kind} forward"] = Case(
            activation.bias_gelu_forward_kernel,
            pointers("bf16 x bias out"),
            {"N": "i32"},
            {**shared, "ROWS": forward.rows, "BLOCK_F": forward.columns},
            forward,
        )
        cases[f"gelu {kind} backward"] = Case(
            activation.bias_gelu_backward_kernel,
            pointers("bf16 dout x bias dx; fp32 partials"),
            {"N": "i32", "partials_stride": "i32/16"},
            {**shared, "ROWS": backward.rows, "BLOCK_F": backward.columns, "STAGES": backward.stages},
            backward,
        )
    return cases


def cross_entropy_cases() -> dict[str, Case]:
    from ridgeline.ops.cross_entropy import triton as loss

    scalars = {"N": "i32", "stride": "i32/16", "dstride": "i32/16", "targets_stride": "i32"}
    kinds = pointers("bf16 logits dlogits; i64 targets; fp32 losses; i32 counts")
    absent = {"gradient_scale_ptr": None, "COUNTS": loss.COUNTS}
    whole = {"partials_ptr": None, "partials_stride": None}
    small, wide = loss.config(8192, 65), loss.config(4096, 50257)
    return {
        "cross-entropy 65": Case(
            loss.cross_entropy_kernel,
            kinds,
            scalars,
            {**absent, **whole, "V": 65, "WIDTH": 72, "ROWS": small.rows, "BLOCK_V": 128},
            small,
        ),
        "cross-entropy 50257": Case(
            loss.cross_entropy_wide_kernel,
            kinds,
            scalars,
            {**absent, "V": 50257, "WIDTH": 50304, "DEPTH": wide.rows, "BLOCK_V": wide.columns},
            wide,
        ),
    }


def embedding_cases() -> dict[str, Case]:
    from ridgeline.ops._triton.columns import column_sums_kernel
    from ridgeline.ops._triton.columns import config as sums_config
    from ridgeline.ops.embedding import sorted as by_order
    from ridgeline.ops.embedding import triton as embedding

    C = 256
    small, sums = embedding.small_config(8192, 65, C), sums_config(1056, 1536)
    return {
        "gather": Case(
            embedding.gather_kernel,
            pointers("bf16 table positions out; i64 ids seed_step"),
            {**MASK, "K": "i32", "out_stride": "i32/16"},
            {"C": C, "V": 65, "THRESHOLD": 6554, "ROWS": 8, "BLOCK_C": C},
            Launch(rows=8, warps=4),
        ),
        "table gradient, one-hot": Case(
            embedding.table_gradient_small_kernel,
            pointers("bf16 dout; i64 ids; fp32 partials"),
            {"partials_stride": "i32/16", "N": "i32", "K": "i32", "stride": "i32/16", "ids_stride": "i32", "V": "i32"},
            {"C": C, "ROWS": small.rows, "BLOCK_V": 128, "BLOCK_C": small.columns},
            small,
        ),
        "table gradient, sorted": Case(
            by_order.table_gradient_sorted_kernel,
            pointers("bf16 dout; i64 order sorted; fp32 dtable ends"),
            {"N": "i32", "K": "i32", "stride": "i32/16", "V": "i32"},
            {"C": C, "CHUNK": by_order.CHUNK, "BLOCK_C": by_order.SORTED.columns},
            by_order.SORTED,
        ),
        "table gradient, ends": Case(
            by_order.table_gradient_ends_kernel,
            pointers("i64 sorted; fp32 dtable ends"),
            {"N": "i32", "V": "i32"},
            {"C": C, "CHUNK": by_order.CHUNK, "ROWS": 16, "BLOCK_C": 64},
            Launch(rows=1, warps=4),
        ),
        "column sums": Case(
            column_sums_kernel,
            pointers("fp32 partials out"),
            {"stride": "i32/16", "P": "i32", "W": "i32"},
            {
                "index_ptr": None,
                "ACCUMULATE": True,
                "BLOCK_P": sums.rows,
                "BLOCK_W": sums.columns,
                "STAGES": sums.stages,
            },
            sums,
        ),
    }


def input_cases() -> dict[str, Case]:
    from ridgeline.ops.dropout.triton import dropout_kernel
    from ridgeline.ops.inputs.triton import input_vector_kernel

    return {
        "input vector": Case(
            input_vector_kernel,
            pointers("i16 categories; fp32 numbers; u8 previous; bf16 tables out; i32 columns"),
            {"N": "i32"},
            {"K": 5, "M": 18, "H": 3, "W": 168, "EMBEDDED": 92, "ROWS": 8, "BLOCK_E": 128, "BLOCK_W": 128},
            Launch(rows=8, warps=4),
        ),
        "dropout": Case(
            dropout_kernel,
            pointers("bf16 x out; i64 seed_step"),
            MASK,
            {"C": 512, "THRESHOLD": 6554, "ROWS": 4, "BLOCK_C": 512},
            Launch(rows=4, warps=4),
        ),
    }


def gather_norm_cases() -> dict[str, Case]:
    from ridgeline.ops.embedding import triton as embedding
    from ridgeline.ops.norm.triton import forward_config

    launch = forward_config(8192, 256)
    return {
        "embedding with its norm": Case(
            embedding.gather_norm_kernel,
            pointers("i64 ids; bf16 table positions weight bias out h; fp32 mean rstd"),
            {"N": "i32", "T": "i32/16", "eps": "fp32"},
            {"C": 256, "V": 65, "RMS": False, "ROWS": launch.rows, "BLOCK_C": 256},
            launch,
        )
    }


def place_gradients_cases() -> dict[str, Case]:
    from ridgeline.ops.embedding import triton as embedding

    return {
        "gradients of table and positions": Case(
            embedding.table_and_place_gradients_kernel,
            pointers("bf16 dout; i64 ids; fp32 partials dplaces"),
            {"partials_stride": "i32/16", "B": "i32", "T": "i32/16"},
            {
                "C": 256, "V": 65, "PLACES": embedding.PLACES, "ROWS": embedding.BESIDE.rows, "BLOCK_V": 128,
                "BLOCK_C": 256, "ACCUMULATE": False,
            },
            embedding.beside,
        )
    }  # fmt: skip


def head_gradients_cases() -> dict[str, Case]:
    from ridgeline.ops.mlp import head_triton

    return {
        "gradients of a narrow head": Case(
            head_triton.head_gradients_kernel,
            pointers("fp32 partials; bf16 weight scale shift; fp32 factor dweight dscale dshift"),
            {"stride": "i32/16", "P": "i32"},
            {
                "C": 256, "V": 65, "COLUMNS": 72, "ADD_WEIGHT": False, "ADD_SCALE": False, "ADD_SHIFT": True,
                "BLOCK_P": head_triton.LAUNCH.rows, "BLOCK_V": 128,
            },
            head_triton.LAUNCH,
        )
    }  # fmt: skip


def planted_cases() -> dict[str, Case]:
    """dk += (q kᵀ)ᵀ q with a transposed register result, which the lint must catch, and without."""
    import triton
    import triton.language as tl

    @triton.jit
    def transposed(q_ptr, k_ptr, out_ptr, N, BLOCK: tl.constexpr, D: tl.constexpr):
        row, column = tl.arange(0, BLOCK), tl.arange(0, D)
        k = tl.load(k_ptr + row[:, None] * D + column[None, :])
        total = tl.zeros((BLOCK, D), tl.float32)
        for first in range(0, N, BLOCK):
            q = tl.load(q_ptr + (first + row)[:, None] * D + column[None, :])
            scores = (tl.dot(q, tl.trans(k)) * 0.5).to(q.dtype)
            total += tl.dot(tl.trans(scores), q)
        tl.store(out_ptr + row[:, None] * D + column[None, :], total)

    @triton.jit
    def direct(q_ptr, k_ptr, out_ptr, N, BLOCK: tl.constexpr, D: tl.constexpr):
        row, column = tl.arange(0, BLOCK), tl.arange(0, D)
        k = tl.load(k_ptr + row[:, None] * D + column[None, :])
        total = tl.zeros((BLOCK, D), tl.float32)
        for first in range(0, N, BLOCK):
            q = tl.load(q_ptr + (first + row)[:, None] * D + column[None, :])
            scores = (tl.dot(k, tl.trans(q)) * 0.5).to(q.dtype)
            total += tl.dot(scores, q)
        tl.store(out_ptr + row[:, None] * D + column[None, :], total)

    kinds, sizes = pointers("bf16 q k; fp32 out"), {"BLOCK": 64, "D": 64}
    launch = Launch(rows=64, warps=4, stages=2)
    return {
        name: Case(kernel, kinds, {"N": "i32"}, sizes, launch)
        for name, kernel in (("transposed result", transposed), ("no transpose", direct))
    }


def other_cases() -> dict[str, Case]:
    """Those of attention, the ladder and the optimiser, which have modules of their own."""
    from triton_attention_kernels import attention_launches
    from triton_rung_kernels import rung_launches
    from triton_update_kernels import update_launches

    launches = attention_launches() | rung_launches() | update_launches()
    return {name: Case(kernel, pointers(text), *more) for name, (kernel, text, *more) in launches.items()}


def window_cases() -> dict[str, Case]:
    from ridgeline.ops.windows import triton as windows

    numbers = ("count", "rows", "columns", "batch", "offset", "context", "stride", "offsets", "games")
    scalars = {"seed": "i64", **dict.fromkeys(numbers, "i32")}
    one_warp, gather = Launch(rows=1, warps=1), Launch(rows=1, warps=windows.GATHER_WARPS)
    drawn = "i64 seed_step start count"
    rows = {"context": "i32/16", "stride": "i32", "shift": "i32"}
    return {
        "text windows": Case(
            windows.place_kernel, pointers(drawn), scalars,
            dict.fromkeys(("ends_ptr", "frames_ptr", "first_ptr")), one_warp,
        ),
        "game windows": Case(windows.place_kernel, pointers(f"{drawn} ends frames first"), scalars, {}, one_warp),
        "gather": Case(
            windows.gather_kernel, pointers("u16 data; i64 out start count"), rows,
            {"INNER": 3, "TARGETS": True, "BLOCK": windows.GATHER_BLOCK}, gather,
        ),
    }  # fmt: skip


def all_cases() -> dict[str, Case]:
    """Every launch by name."""
    return (
        norm_cases()
        | folded_cases()
        | activation_cases()
        | cross_entropy_cases()
        | gather_norm_cases()
        | place_gradients_cases()
        | head_gradients_cases()
        | embedding_cases()
        | input_cases()
        | other_cases()
        | window_cases()
    )


def measure(name: str, case: Case, architecture: int) -> dict[str, Any]:
    """One row of the report."""
    launch = case.launch if isinstance(case.launch, Launch) else case.launch(SHARED_LIMIT[architecture] * 1024)
    result = compile_kernel(
        case.kernel,
        case.pointers,
        case.scalars,
        case.constants,
        architecture=architecture,
        warps=launch.warps,
        stages=launch.stages,
    )
    return {
        "name": name,
        "architecture": architecture,
        "warps": launch.warps,
        "registers": result.registers,
        "spilled": result.spilled,
        "shared": result.shared,
        "transposed": transposed_results(result.ttgir),
    }


def main(arguments: list[str]) -> None:
    """Compile on two threads (the compiler releases the lock) and print a list of rows."""
    if arguments == ["--planted"]:
        jobs = [(name, case, 90) for name, case in planted_cases().items()]
    else:
        jobs = [(name, case, int(architecture)) for architecture in arguments for name, case in all_cases().items()]
    with ThreadPoolExecutor(2) as pool:
        print(json.dumps(list(pool.map(lambda job: measure(*job), jobs))))


if __name__ == "__main__":
    main(sys.argv[1:] or list(map(str, ARCHITECTURES)))
