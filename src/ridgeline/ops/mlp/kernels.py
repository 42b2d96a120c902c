"""Launching the Hopper kernels of this folder: forward.cu, backward.cu (the MLP and its joins) and project.cu.

Launched early (ops/early.py), they fetch weights while the kernel before still runs: that must not be one that writes
them.

Where they pay: µs of a whole block, forward and backward in a graph on an H200, 8,192 rows of width 256, F 1,024,
LayerNorm, biases: 129 with all four, 154 with the MLP as products with GELU in their epilogues and joins of their own,
176 with the projections apart too. At 131,072 rows a step with the MLP's takes 8 % longer than without.
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
        abreast: 2 lets both warpgroups of a block finish half of the columns of 64 rows each. With 1 each has 64 of a
            tile's 128 rows, and one's join runs under the other one's products.
        stages: ring slots; 0 takes as many as fit, up to 12.
    """

    abreast: int = 2
    stages: int = 0


ABREAST, WHOLE = Config(), Config(abreast=1)


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


def tiles(N: int, config: Config = ABREAST) -> int:
    """Tiles of N rows."""
    return -(-N // (128 // config.abreast))


def chunks(F: int) -> int:
    """Chunks of 128 inner columns."""
    return -(-F // CHUNK)


def kept_shape(N: int, F: int) -> tuple[int, int]:
    """Shape of the tensor that keeps GELU's derivative: padded, and in the kernels' own order (layout.cuh)."""
    return tiles(N, WHOLE) * 128, chunks(F) * CHUNK


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


def partial_rows(N: int, config: Config) -> int:
    """Rows of the join's partial sums."""
    return tiles(N, config) * 2 // config.abreast


def inner_partial_rows(N: int) -> int:
    """Rows of the partial sums of du."""
    return tiles(N)


def smem(part: Part, width: int, config: Config, stages: int, F: int = 0, sums: int = 3, up_bias: bool = True) -> int:
    """Bytes of dynamic shared memory of a kernel (the layout is written in the .cu files)."""
    apart = config.abreast == 1
    rows, vectors = (1 + apart) * width * 128, 3 * width * 2
    branch_sums, statistics = sums * 4 * width * 4, 0 if apart else 2 * STATISTICS
    staging = 2 * (max(PANELS, branch_sums) if apart else PANELS)
    size = {
        "mlp_forward": rows + 2 * PANELS + statistics + vectors + chunks(F) * 256,
        "mlp_backward": rows + staging + statistics + (2 * CHUNK * 4 if up_bias else 0) + width * 2,
        "project_forward": statistics + vectors,
        "project_backward": statistics + (1 + apart) * branch_sums + vectors,
    }[part]
    project = part.startswith("project")
    return size + stages * ((64 + width) * 128 if project else SLOT) + 512


def fitted(part: Part, width: int, config: Config, F: int = 0, sums: int = 3, up_bias: bool = True) -> Config:
    """The configuration with as many ring slots as fit, at most 12."""
    if config.stages:
        return config
    fitting = [n for n in range(2, 13) if smem(part, width, config, n, F, sums, up_bias) <= SMEM_LIMIT]
    return config._replace(stages=fitting[-1])


def choose(N: int) -> Config:
    """The configuration for N rows on the current device."""
    few = tiles(N) <= processors(torch.device("cuda"))
    return ABREAST if few else WHOLE


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
        "ABREAST": config.abreast,
        "STAGES": config.stages,
        "RL_FP16": int(dtype == torch.float16),
    }


def _rows_map(x_NK: Tensor, rows: int = 64) -> bytes:
    return cuda.tensor_map(x_NK, (rows, 64))


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
    programs = min(tiles(N, config), processors(torch.device("cuda")))
    kernel.launch((programs,), THREADS, size, arguments)


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
    config = fitted("mlp_forward", C, config or choose(N), F)
    macros = {
        **tile_macros(C, h_NC.dtype, config),
        **join_macros(join),
        "GELU_TANH": int(gelu == "tanh"),
        "UP_BIAS": int(up_bias_F is not None),
    }
    state, mask = _mask_arguments(join.masks)
    arguments = (
        _rows_map(h_NC), _rows_map(up_FC), _owned_map(down_CF), _rows_map(a_NF, 16), up_bias_F, join.branch_bias_C,
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
    config = fitted("mlp_backward", C, config or choose(N), F, sums, du_sums_PF is not None)
    macros = {
        **tile_macros(C, dz_NC.dtype, config),
        **gradient_macros(join),
        "UP_BIAS": int(du_sums_PF is not None),
    }
    state, mask = _mask_arguments(join.masks)
    arguments = (
        _rows_map(dz_NC), _rows_map(up_FC), _rows_map(down_CF), _rows_map(du_NF, 16), kept, du_sums_PF,
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
    config = fitted("project_forward", C, config or choose(N))
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
    config = fitted("project_backward", C, config or choose(N), sums=sums)
    macros = {**tile_macros(C, dy_NK.dtype, config), **gradient_macros(join), "BACKWARD": 1}
    state, mask = _mask_arguments(join.masks)
    arguments = (
        _rows_map(dy_NK), _rows_map(weight_KC), *_gradient_arguments(join), state, N, -(-K // 64), *mask,
    )  # fmt: skip
    size = smem("project_backward", C, config, config.stages, sums=sums)
    _launch("project_backward", macros, N, config, size, arguments)
