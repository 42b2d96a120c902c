"""Compile a Triton kernel for a card that is not there, and read what came out.

Needs TRITON_INTERPRET unset when the kernel's module is imported. Two judgements: what the kernel takes of a
multiprocessor, against what the card has; and whether a transposed register result goes through shared memory.
Triton [3.4.0, 3.7.1) emits a wrong stmatrix for the latter on sm_90 (flash-linear-attention #640, #826, #983), so no
kernel may contain it, whatever version compiles it.
"""

# mypy: disallow-untyped-defs=False
# (kernels take Triton values, for which there are no types)
from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
SHARED_LIMIT = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # KiB a program can have


@dataclass(frozen=True)
class Compiled:
    """A kernel compiled for one architecture.

    Attributes:
        registers: of a thread.
        spilled: bytes of stack and local memory of a thread.
        shared: bytes of shared memory of a program.
        ttgir: the layout-annotated intermediate form.
        ptx: the virtual assembly.
        cubin: the binary.
    """

    registers: int
    spilled: int
    shared: int
    ttgir: str
    ptx: str
    cubin: bytes


def compile_kernel(
    kernel: Any,
    pointers: dict[str, str],
    scalars: dict[str, str] | None = None,
    constants: dict[str, Any] | None = None,
    *,
    architecture: int,
    warps: int = 4,
    stages: int = 3,
) -> Compiled:
    """Compile as a launch on 16-byte-aligned tensors would.

    Args:
        kernel: a `triton.jit` function.
        pointers: dtype of each tensor argument, as "*bf16".
        scalars: dtype of each scalar argument, as "i32"; divisible by 16 where it ends in "/16".
        constants: constexpr arguments, and None for absent tensors; EARLY is false unless given.
        architecture: compute capability without its dot.
        warps: warps of a program.
        stages: depth of software pipelines.

    Raises:
        ValueError: an argument of the kernel is in none of the three.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    scalars, constants = scalars or {}, constants or {}
    if "EARLY" in kernel.arg_names:
        constants = {"EARLY": False} | constants
    aligned = [["tt.divisibility", 16]]
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        kind = pointers.get(name) or scalars.get(name) or "constexpr"
        signature[name] = kind.removesuffix("/16")
        if kind.startswith("*") or kind.endswith("/16"):
            attributes[(index,)] = aligned
    missing = [name for name, kind in signature.items() if kind == "constexpr" and name not in constants]
    if missing:
        raise ValueError(f"compile_kernel lacks {', '.join(missing)} of {kernel.__name__}")
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    target = GPUTarget("cuda", architecture, 32)
    result = triton.compile(source, target=target, options={"num_warps": warps, "num_stages": stages})
    usage = _tool("cuobjdump", "--dump-resource-usage", cubin=result.asm["cubin"])
    figures = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", usage)}
    return Compiled(
        registers=figures["REG"],
        spilled=figures["STACK"] + figures["LOCAL"],
        shared=max(figures["SHARED"], result.metadata.shared),
        ttgir=result.asm["ttgir"],
        ptx=result.asm["ptx"],
        cubin=result.asm["cubin"],
    )


def transposed_results(ttgir: str) -> list[str]:
    """Lines that send a transposed register value through shared memory: what no kernel may contain.

    A transpose of registers shows as `tt.trans` of a matrix unit's result, whose layout the compiler then writes as
    `#linear`; the defect is the `local_alloc` (or a store) of a value in such a layout.
    """
    return [
        line.strip()
        for line in ttgir.splitlines()
        if re.search(r"ttg\.local_(alloc|store)\b.*tensor<[^>]*#linear", line)
    ]


def _tool(name: str, *options: str, cubin: bytes) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as file:
        file.write(cubin)
    try:
        return subprocess.run([str(path), *options, file.name], capture_output=True, text=True, check=True).stdout
    finally:
        os.unlink(file.name)
