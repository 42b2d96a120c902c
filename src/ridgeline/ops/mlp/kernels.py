"""Launching the Hopper kernels of this folder: forward.cu, backward.cu (the MLP and its joins) and project.cu.

Launched early (ops/early.py), they fetch weights while the kernel before still runs: that must not be one that writes
them.

Where they pay: µs of a whole block, forward and backward in a graph on an H200, 8,192 rows of width 256, F 1,024,
LayerNorm, biases: 146 with all four; 155 with the MLP as products with GELU in their epilogues and joins of their own,
176 with the projections apart too. At 131,072 rows a block takes 2,200 to 2,240 with them, 2,020 without.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ridgeline.ops import _cuda as cuda
from ridgeline.ops._triton.support import processors
from ridgeline.ops.activation.reference import GeluKind
from ridgeline.ops.dropout import quantise
from ridgeline.ops.linear.reference import Masks
from ridgeline.ops.norm.reference import NormKind

FOLDER = Path(__file__).parent
SMEM_LIMIT = 227 * 1024
WIDTHS = (128, 256)
THREADS = 384
CHUNK, SLOT, PANELS, STATISTICS = 128, 128 * 128, 8192, 2048  # the latter three in bytes
Part = Literal["mlp_forward", "mlp_backward", "project_forward", "project_backward"]
_PARTS: dict[Part, tuple[str, str]] = {  # file, and kinds of parameters
    "mlp_forward": ("forward.cu", "MMMMPPPPPPPPPPPiifIIfii"),
    "mlp_backward": ("backward.cu", "MMMMPPPPPPPPPPqPiiIIfii"),
    "project_forward": ("project.cu", "MMPPPPPPPPfPiiIIfii"),
    "project_backward": ("project.cu", "MMPPPPPPPPqPiiIIfii"),
}


class Config(NamedTuple):
    """How a kernel divides its work.

    Attributes:
        split: 2 lets a pair of blocks divide the inner dimension of one tile of 128 rows.
        stages: ring slots of 16 KB; 0 takes as many as fit, up to 12.
    """

    split: int = 1
    stages: int = 0


class Join(NamedTuple):
    """A join's operands and results: r = residual + dropout(branch + bias), h = norm(r).

    Attributes:
        kind, eps: of the norm. `weight_C`, `bias_C`: its scale and shift (None without).
        branch_bias_C: bias of the product that makes the branch; None without.
        residual_NC: the residual to add; None at the stream's beginning. May be `r_NC`.
        r_NC, h_NC, mean_N, rstd_N: written; the statistics are fp32, mean None for RMSNorm.
        masks: the branch's dropout; None for none.
    """

    kind: NormKind
    eps: float
    weight_C: Tensor
    bias_C: Tensor | None
    branch_bias_C: Tensor | None
    residual_NC: Tensor | None
    r_NC: Tensor
    h_NC: Tensor
    mean_N: Tensor | None
    rstd_N: Tensor
    masks: Masks | None


class JoinGradient(NamedTuple):
    """The gradient of a join, seen from dh.

    Attributes:
        kind: of the norm. `weight_C`: its scale. `r_NC`, `mean_N`, `rstd_N`: as the forward pass left them.
        dresidual_NC: gradient that arrives along the residual stream, or None. May be `dr_NC`.
        dr_NC: written. `dbranch_NC`: written where there is dropout (dr behind the mask), else None.
        partials_PW: fp32, `partial_rows` rows, written: columns dweight, then dbias if `bias`, then the branch bias's
            gradient if `branch_bias`. Rows may be strided.
        masks: the branch's dropout, as in the forward pass.
    """

    kind: NormKind
    weight_C: Tensor
    r_NC: Tensor
    mean_N: Tensor | None
    rstd_N: Tensor
    dresidual_NC: Tensor | None
    dr_NC: Tensor
    dbranch_NC: Tensor | None
    partials_PW: Tensor
    bias: bool
    branch_bias: bool
    masks: Masks | None


def source(part: Part) -> str:
    """The .cu file of a kernel."""
    return _PARTS[part][0]


def tile_rows(part: Part) -> int:
    """Rows of the result that a block has."""
    return 64 if part.startswith("project") else 128


def tiles(part: Part, N: int) -> int:
    """Tiles of N rows."""
    return -(-N // tile_rows(part))


def chunks(F: int) -> int:
    """Chunks of 128 inner columns."""
    return -(-F // CHUNK)


def kept_shape(N: int, F: int) -> tuple[int, int]:
    """Shape of the tensor that keeps GELU's derivative: padded, and in the kernels' own order (layout.cuh)."""
    return tiles("mlp_forward", N) * 128, chunks(F) * CHUNK


def hidden(h_NC: Tensor, F: int) -> tuple[Tensor, Tensor]:
    """Memory for what an MLP's forward pass leaves to its backward pass: `kept`, and a (N, F)."""
    kept = h_NC.new_empty(kept_shape(len(h_NC), F), dtype=torch.float16)
    return kept, h_NC.new_empty(len(h_NC), F)


def _kept_view(kept: Tensor) -> Tensor:
    """What is kept as [64 rows: group, warp, half, row 8] × [128 columns: chunk, step, half, quad, pair] (a view)."""
    rows, width = kept.shape
    view = kept.view(rows // 64, width // CHUNK, 8, 4, 8, 4, 2, 2, 2)  # group chunk step warp row quad | half half pair
    return view.permute(0, 3, 7, 4, 1, 2, 6, 5, 8)


def keep(slope_NF: Tensor, kept: Tensor) -> None:
    """Put GELU's derivative into the kernels' order: what a forward pass by other means would have kept."""
    N, F = slope_NF.shape
    padded = kept.new_zeros(kept.shape)
    padded[:N, :F] = slope_NF
    view = _kept_view(kept)
    view.copy_(padded.view(view.shape))


def unkeep(kept: Tensor, N: int, F: int) -> Tensor:
    """GELU's derivative (N, F) of what a forward pass kept."""
    return _kept_view(kept).reshape(kept.shape)[:N, :F]


def partial_rows(part: Part, N: int, config: Config) -> int:
    """Rows of the join's partial sums."""
    return tiles(part, N) * (1 if part.startswith("project") else 2 * config.split)


def inner_partial_rows(N: int) -> int:
    """Rows of the partial sums of du."""
    return tiles("mlp_backward", N) * 2


def smem(part: Part, width: int, config: Config, stages: int, F: int = 0, sums: int = 3, up_bias: bool = True) -> int:
    """Bytes of dynamic shared memory of a kernel (the layout is written in the .cu files)."""
    rows, branch_sums, vectors = 2 * width * 128, sums * 4 * width * 4, 3 * width * 2
    size = {
        "mlp_forward": rows + 2 * PANELS + vectors + chunks(F) * 256,
        "mlp_backward": rows + 4 * PANELS + (2 * 2 * CHUNK * 4 if up_bias else 0) + width * 2,
        "project_forward": 2 * STATISTICS + vectors,
        "project_backward": 2 * STATISTICS + branch_sums + vectors,
    }[part]
    slot = (64 + width) * 128 if part.startswith("project") else SLOT
    return size + stages * slot + 512


def fitted(part: Part, width: int, config: Config, F: int = 0, sums: int = 3, up_bias: bool = True) -> Config:
    """The configuration with as many ring slots as fit, at most 12."""
    if config.stages:
        return config
    fitting = [n for n in range(2, 13) if smem(part, width, config, n, F, sums, up_bias) <= SMEM_LIMIT]
    return config._replace(stages=fitting[-1])


def choose(part: Part, N: int, inner: int) -> Config:
    """The configuration for N rows and F (or K) inner columns on the current device. Projections know but one.

    Pairs of blocks divide the inner dimension while there are too few tiles to fill the card; measured on an H200 at
    8,192 rows, a pair against a whole tile a block: MLP forward 29 against 42 µs, backward 48 against 78.
    """
    if part.startswith("project"):
        return Config()
    few = 2 * tiles(part, N) <= processors(torch.device("cuda"))
    return Config(split=2 if few and chunks(inner) > 1 else 1)


def join_macros(join: Join) -> dict[str, int]:
    """What a join asks of the compiler."""
    return {
        "RMS": int(join.kind == "rmsnorm"),
        "DROPOUT": int(join.masks is not None),
        "RESIDUAL": int(join.residual_NC is not None),
        "NORM_BIAS": int(join.bias_C is not None),
        "BRANCH_BIAS": int(join.branch_bias_C is not None),
    }


def gradient_macros(join: JoinGradient) -> dict[str, int]:
    """What a join's gradient asks of the compiler."""
    return {
        "RMS": int(join.kind == "rmsnorm"),
        "DROPOUT": int(join.masks is not None),
        "RESIDUAL": int(join.dresidual_NC is not None),
        "NORM_BIAS": int(join.bias),
        "BRANCH_BIAS": int(join.branch_bias),
    }


def tile_macros(width: int, dtype: torch.dtype, config: Config) -> dict[str, int]:
    """The macros of tile.cuh."""
    return {
        "WIDTH": width,
        "SPLIT": config.split,
        "STAGES": config.stages,
        "RL_FP16": int(dtype == torch.float16),
    }


def _rows_map(x_NK: Tensor, rows: int = 64) -> bytes:
    return cuda.tensor_map(x_NK, (rows, 64))


def _panel_map(x_NF: Tensor) -> bytes:
    return cuda.tensor_map(x_NF, (16, 32), swizzle=64)


def _owned_map(weight_CK: Tensor) -> bytes:
    """Rows in the order in which a lane owns eight neighbouring columns of the result: tile.cuh, fetch_owned_rows."""
    C, K = weight_CK.shape
    pitch = weight_CK.stride(0)
    view = weight_CK.as_strided((C // 32, 4, 4, 2, K), (32 * pitch, 2 * pitch, 8 * pitch, pitch, 1))
    return cuda.tensor_map(view, (4, 4, 4, 2, 64))


def _mask_arguments(masks: Masks | None) -> tuple[Tensor | None, tuple[cuda.Argument, ...]]:
    """The state's tensor, and site, threshold, scale, rows a sample and first sample."""
    if masks is None:
        return None, (0, 0, 1.0, 1, 0)
    threshold, scale = quantise(masks.p)
    return masks.state.seed_step, (masks.site, threshold, scale, masks.T, masks.state.sample_offset)


def _launch(
    part: Part,
    macros: dict[str, int],
    N: int,
    config: Config,
    size: int,
    arguments: Sequence[cuda.Argument],
    *,
    patient: bool = True,
) -> None:
    kernel = cuda.load(FOLDER / source(part), macros).kernel(part, _PARTS[part][1], patient=patient)
    programs = min(tiles(part, N), processors(torch.device("cuda")) // config.split)
    kernel.launch((programs * config.split,), THREADS, size, arguments)


def mlp_forward_raw(
    h_NC: Tensor, up_FC: Tensor, up_bias_F: Tensor | None, down_CF: Tensor, kept: Tensor, a_NF: Tensor, join: Join,
    *, gelu: GeluKind, config: Config | None = None,
) -> None:  # fmt: skip
    """u = h Wupᵀ + b, a = gelu(u), z = a Wdownᵀ, then the join. Writes gelu'(u), a, and the join's results.

    Args:
        h_NC, up_FC, up_bias_F, down_CF: bf16 or fp16, contiguous; C one of `WIDTHS`, F a multiple of 8.
        kept, a_NF: written; see `hidden`.
        join: what follows; its branch bias is Wdown's.
        gelu: "exact" or "tanh".
        config: how the work is divided; None for `choose`.
    """
    N, C = h_NC.shape
    F = up_FC.shape[0]
    config = fitted("mlp_forward", C, config or choose("mlp_forward", N, F), F)
    macros = {
        **tile_macros(C, h_NC.dtype, config),
        **join_macros(join),
        "GELU_TANH": int(gelu == "tanh"),
        "UP_BIAS": int(up_bias_F is not None),
    }
    state, mask = _mask_arguments(join.masks)
    arguments = (
        _rows_map(h_NC), _rows_map(up_FC, CHUNK), _owned_map(down_CF), _panel_map(a_NF), up_bias_F, join.branch_bias_C,
        kept, join.residual_NC, join.weight_C, join.bias_C, join.r_NC, join.h_NC, join.mean_N,
        join.rstd_N, state, N, F, join.eps, *mask,
    )  # fmt: skip
    size = smem("mlp_forward", C, config, config.stages, F)
    _launch("mlp_forward", macros, N, config, size, arguments)


def mlp_backward_raw(
    dz_NC: Tensor, up_FC: Tensor, down_CF: Tensor, kept: Tensor, du_NF: Tensor, du_sums_PF: Tensor | None,
    join: JoinGradient, *, config: Config | None = None,
) -> None:  # fmt: skip
    """From the gradient of z to du, and through the join before the MLP.

    Args:
        dz_NC: gradient of the branch's output. `kept`: the forward pass's.
        du_NF: written: the gradient of u.
        du_sums_PF: fp32, `inner_partial_rows` rows, written: partial column sums of du; None where no bias wants them.
        join: the join whose h the MLP read.
        config: as in the forward pass.
    """
    N, C = dz_NC.shape
    F = up_FC.shape[0]
    sums = 1 + join.bias + join.branch_bias
    config = fitted("mlp_backward", C, config or choose("mlp_backward", N, F), F, sums, du_sums_PF is not None)
    macros = {
        **tile_macros(C, dz_NC.dtype, config),
        **gradient_macros(join),
        "UP_BIAS": int(du_sums_PF is not None),
    }
    state, mask = _mask_arguments(join.masks)
    arguments = (
        _rows_map(dz_NC), _rows_map(up_FC), _rows_map(down_CF), _panel_map(du_NF), kept, du_sums_PF,
        *_gradient_arguments(join), state, N, F, *mask,
    )  # fmt: skip
    size = smem("mlp_backward", C, config, config.stages, F, sums, du_sums_PF is not None)
    _launch("mlp_backward", macros, N, config, size, arguments)


def _gradient_arguments(join: JoinGradient) -> tuple[cuda.Argument, ...]:
    return (
        join.r_NC, join.weight_C, join.mean_N, join.rstd_N, join.dresidual_NC, join.dr_NC, join.dbranch_NC,
        join.partials_PW, join.partials_PW.stride(0),
    )  # fmt: skip


def project_forward_raw(
    x_NK: Tensor, weight_CK: Tensor, join: Join, *, config: Config | None = None, patient: bool = True
) -> None:
    """y = x Wᵀ, then the join (which adds the bias): attention's output projection.

    `patient` is to be False where the kernel launched before may be one that writes weights.
    """
    N, K = x_NK.shape
    C = weight_CK.shape[0]
    config = fitted("project_forward", C, config or choose("project_forward", N, K))
    macros = {**tile_macros(C, x_NK.dtype, config), **join_macros(join), "BACKWARD": 0}
    state, mask = _mask_arguments(join.masks)
    arguments = (
        _rows_map(x_NK), _owned_map(weight_CK), join.branch_bias_C, join.residual_NC,
        join.weight_C, join.bias_C, join.r_NC, join.h_NC, join.mean_N, join.rstd_N, join.eps, state, N, -(-K // 64),
        *mask,
    )  # fmt: skip
    size = smem("project_forward", C, config, config.stages)
    _launch("project_forward", macros, N, config, size, arguments, patient=patient)


def project_backward_raw(dy_NK: Tensor, weight_KC: Tensor, join: JoinGradient, *, config: Config | None = None) -> None:
    """dh = dy W, then the gradient of the join that made h: the input gradient of the joint QKV projection."""
    N, K = dy_NK.shape
    C = weight_KC.shape[1]
    sums = 1 + join.bias + join.branch_bias
    config = fitted("project_backward", C, config or choose("project_backward", N, K), sums=sums)
    macros = {**tile_macros(C, dy_NK.dtype, config), **gradient_macros(join), "BACKWARD": 1}
    state, mask = _mask_arguments(join.masks)
    arguments = (
        _rows_map(dy_NK), _rows_map(weight_KC), *_gradient_arguments(join), state, N, -(-K // 64), *mask,
    )  # fmt: skip
    size = smem("project_backward", C, config, config.stages, sums=sums)
    _launch("project_backward", macros, N, config, size, arguments)
