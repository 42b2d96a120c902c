"""Kernels with some of their orders said in other words, which racecheck follows.

Where one lane arrives at a barrier for its warp, all lanes do; where one warpgroup says by `bar.arrive` what the other
waits for, both wait. A twin that is clean shows that nothing but those two orders was reported of the kernel.
"""

import contextlib
import shutil
import tempfile
from pathlib import Path
from unittest import mock

from ridgeline import ops
from ridgeline.ops._cuda import compiler, launch

OPS = Path(ops.__file__).parent
ARRIVE = 'asm volatile("mbarrier.arrive.shared.b64 _, [%0], 31;" ::"r"(barrier) : "memory");\n  '
ROWS_AND_SUMS = {  # of attention and the MLP
    "_cuda/include/ridgeline/hopper.cuh": (
        ('"r"(barrier), "r"(arrivals)', '"r"(barrier), "r"(32 * arrivals)'),
        ('asm volatile("mbarrier.arrive.expect_tx', ARRIVE + 'asm volatile("mbarrier.arrive.expect_tx'),
    ),
    "attention/cuda/schedule.cuh": (("if (lane == 0) barrier_arrive(", "barrier_arrive("),),
    "attention/cuda/plain_spans.cuh": (("if (lane == 0) barrier_arrive(", "barrier_arrive("),),
    "attention/cuda/plain.cuh": (("if (lane == 0) barrier_arrive(", "barrier_arrive("),),
    "attention/cuda/forward.cu": (
        (" && p.lane == 0) barrier_arrive(", ") barrier_arrive("),
        ("if (p.lane == 0) barrier_arrive(", "barrier_arrive("),
    ),
    "mlp/tile.cuh": (
        ("if (me.lane == 0) barrier_arrive(", "barrier_arrive("),
        ("named_arrive<256>(7)", "named_barrier<256>(7)"),
        ("named_arrive<256>(8)", "named_barrier<256>(8)"),
    ),
    "mlp/machine.cuh": (("if (me.lane == 0) barrier_arrive(", "barrier_arrive("),),
    "mlp/forward.cu": (
        ("if (APART && me.lane == 0) barrier_arrive(", "if (APART) barrier_arrive("),
        ("named_arrive<256>(6)", "named_barrier<256>(6)"),
    ),
    "mlp/backward.cu": (
        ("if (APART && me.lane == 0) barrier_arrive(", "if (APART) barrier_arrive("),
        ("named_arrive<256>(6)", "named_barrier<256>(6)"),
    ),
}
ROW_NUMBERS = {  # of products with their weights in registers
    "linear/stationary_sm90.cu": (
        ("barrier_init(bar.rows_full(i), 1)", "barrier_init(bar.rows_full(i), 32)"),
        ("if (lane == 0) barrier_arrive(bar.rows_full(", "barrier_arrive(bar.rows_full("),
    ),
}


def rewrite(folder, changes_of):
    """The package's CUDA C++ in `folder`, with these changes of files."""
    for file in [*OPS.rglob("*.cu"), *OPS.rglob("*.cuh")]:
        place = folder / file.relative_to(OPS)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, place)
    for name, changes in changes_of.items():
        text = (folder / name).read_text()
        for old, new in changes:
            if old not in text:
                raise RuntimeError(f"{name} has no {old!r} any more: its twin is to be written anew")
            text = text.replace(old, new)
        (folder / name).write_text(text)


@contextlib.contextmanager
def twins(changes_of):
    """Kernels that are loaded meanwhile are twins, with these changes; the process should load no others."""
    build = launch.build
    with tempfile.TemporaryDirectory() as folder:
        rewrite(Path(folder), changes_of)
        include = Path(folder) / compiler.INCLUDE_DIRECTORY.relative_to(OPS)
        of_twin = lambda path, *rest: build(Path(folder) / path.relative_to(OPS), *rest)
        with mock.patch.object(compiler, "INCLUDE_DIRECTORY", include), mock.patch.object(launch, "build", of_twin):
            yield
