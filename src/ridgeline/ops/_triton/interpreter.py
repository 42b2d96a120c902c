"""Repairs of Triton's interpreter (TRITON_INTERPRET=1), so that kernels for bf16 can be run and tested on a CPU.

The interpreter keeps bf16 as raw 16-bit integers. Left as it is, a bf16 dot multiplies bit patterns, a cast to bf16
may truncate, and arithmetic on bf16 is silent garbage; before Triton 3.7 a loop whose bound is a kernel argument
fails with numpy ≥ 2.4; and whatever asks for the current device fails without a driver. `repair()` makes casts round
to nearest even, dots right, other bf16 arithmetic an error, and installs a driver that answers for a CPU. It also takes
away work that the interpreter does anew at every call of a device function, a quarter of its time.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

ARITHMETIC = ("create_fadd", "create_fsub", "create_fmul", "create_fdiv", "create_frem", "create_precise_divf")
FUNCTIONS = ("exp", "exp2", "log", "log2", "sqrt", "precise_sqrt", "rsqrt", "sin", "cos", "erf", "fma", "clampf")

_repaired = False


def enable() -> bool:
    """Switch the interpreter on for this process, unless it has a CUDA card or no Triton. Call before any kernel loads.

    Returns whether kernels will be interpreted.
    """
    if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return os.environ.get("TRITON_INTERPRET") == "1"
    os.environ["TRITON_INTERPRET"] = "1"
    repair()
    return True


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """Raw bf16 bits (uint16) as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Float32 as raw bf16 bits (uint16), rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + ((bits >> 16) & 1) + 0x7FFF) >> 16).astype(np.uint16)
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, np.uint16(0x7FC0), rounded).astype(np.uint16)


def repair() -> None:
    """Apply the repairs once."""
    global _repaired
    if _repaired:
        return
    _repaired = True
    _repair_casts()
    _repair_dot()
    _forbid_bfloat16_arithmetic()
    _repair_scalars()
    _patch_once()
    _install_driver()


def _repair_casts() -> None:
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    handle, builder = interpreter.TensorHandle, interpreter.InterpreterBuilder
    original = builder.create_fp_to_fp

    def cast(self: Any, source: Any, target: Any) -> Any:
        from_type, to_type = source.dtype.scalar, target.scalar
        if from_type == to_type:
            return handle(source.data, to_type)
        data = from_bfloat16(source.data) if from_type == tl.bfloat16 else source.data
        if to_type == tl.bfloat16:
            return handle(to_bfloat16(data), to_type)
        return handle(data.astype(interpreter._get_np_dtype(to_type)), to_type)

    def convert(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        types = (source.dtype.scalar, target.scalar)
        if tl.bfloat16 in types and all(kind.primitive_bitwidth >= 16 for kind in types):
            return cast(self, source, target)
        return original(self, source, target, rounding)

    builder.cast_impl = cast
    builder.create_fp_to_fp = convert


def _repair_dot() -> None:
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    original = interpreter.InterpreterBuilder.create_dot

    def widen(operand: Any) -> Any:
        if operand.dtype.scalar == tl.bfloat16:
            return interpreter.TensorHandle(from_bfloat16(operand.data), tl.float32)
        return operand

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return original(self, widen(a), widen(b), *rest)

    interpreter.InterpreterBuilder.create_dot = dot


def _forbid_bfloat16_arithmetic() -> None:
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    builder = interpreter.InterpreterBuilder

    def guarded(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def operation(self: Any, *operands: Any) -> Any:
            for operand in operands:
                if isinstance(operand, interpreter.TensorHandle) and operand.dtype.scalar == tl.bfloat16:
                    raise TypeError(f"{name} on bf16: the interpreter cannot; cast to fp32 first")
            return original(self, *operands)

        return operation

    names = [*ARITHMETIC, *(f"create_{name}" for name in FUNCTIONS)]
    names += [name for name in dir(builder) if name.startswith(("create_fcmp", "create_max", "create_min"))]
    for name in names:
        if hasattr(builder, name):
            setattr(builder, name, guarded(name, getattr(builder, name)))


def _repair_scalars() -> None:
    """A one-element array as a loop bound: numpy ≥ 2.4 refuses what Triton ≤ 3.6 does with it."""
    import triton.runtime.interpreter as interpreter

    original = interpreter._patch_lang_tensor

    def patch(tensor: Any, *scope: Any) -> Any:
        result = original(tensor, *scope)
        tensor.__index__ = lambda self: int(np.asarray(self.handle.data).reshape(-1)[0])
        return result

    interpreter._patch_lang_tensor = patch


def _patch_once() -> None:
    """A device function finds the language patched by its kernel, and the NumPy dtype of a Triton dtype is kept."""
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    find, found = interpreter._get_np_dtype, dict[str, np.dtype[Any]]()
    original, patched = interpreter._patch_lang, set[int]()

    def dtype_of(kind: Any) -> np.dtype[Any]:
        name = kind.scalar.name  # pointers cannot be hashed
        if name not in found:
            found[name] = find(kind)
        return found[name]

    def patch(function: Any) -> Any:
        modules = {id(value) for value in function.__globals__.values() if value is tl or value is tl.core}
        if modules and modules <= patched:
            return interpreter._LangPatchScope()  # nothing to take back
        scope, new = original(function), modules - patched
        patched.update(new)
        take_back = scope.restore

        def restore() -> None:
            take_back()
            patched.difference_update(new)

        scope.restore = restore
        return scope

    interpreter._get_np_dtype, interpreter._patch_lang = dtype_of, patch


def _install_driver() -> None:
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class CpuDriver:
        """Answers what Triton asks of a driver while it interprets."""

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

        def get_device_interface(self) -> Any:
            return torch.cpu

        def get_benchmarker(self) -> Callable[..., Any]:
            def bench(call: Callable[[], Any], quantiles: Any = None, **_: Any) -> list[float]:
                call()
                return [0.0] * len(quantiles or (0.5,))

            return bench

    driver.set_active(CpuDriver())
