"""Cases of compute-sanitizer that show what a tool sees, and what it takes for a mistake."""

import os
from pathlib import Path

import torch
from sanitize_kit import TOOL, control, draw  # before any kernel is imported

from ridgeline.ops import _cuda as cuda

FOLDER = Path(__file__).parent


@control
def planted():
    """The mistake that the tool at hand is for."""
    kernel = cuda.load(FOLDER / "sanitize_planted.cu").kernel(TOOL, "Pi")
    x = torch.empty(64, device="cuda") if TOOL == "initcheck" else torch.ones(64).cuda()
    kernel.launch((1,), 64, 0, (x, 64))
    torch.cuda.synchronize()


@control
def planted_and_aborted():
    """The same, and an end as some processes have it under the tool: what it saw is told all the same."""
    planted()
    os.abort()


@control
def vendor():
    """A product of cuBLAS, and not a kernel of this package."""
    x = draw(256, 256).detach()
    assert torch.isfinite((x @ x).cpu()).all()


ORDERS = {
    "racecheck": (
        "by_one_lane",
        "by_each_lane",
        "by_arrive",
        "by_sync",
        "by_sync_of_some",
        "by_sync_after_turns",
        "by_sync_within_turn",
    ),
    "synccheck": ("each_phase_waited_for", "one_phase_waited_for"),
    "initcheck": ("write_by_threads read_of_threads", "write_by_copy_engine read_of_copy_engine"),
}


@control
def orders():
    """Rights that the tool at hand may take for mistakes."""
    for names in ORDERS.get(TOOL, ()):
        x = torch.empty(64, device="cuda") if TOOL == "initcheck" else torch.arange(64.0).cuda()
        for name in names.split():
            cuda.load(FOLDER / "sanitize_orders.cu").kernel(name, "P").launch(
                (1,), 96 if name == "by_sync_of_some" else 64, 0, (x,)
            )
        assert (x.cpu()[32:] == -torch.arange(32.0)).all(), names
