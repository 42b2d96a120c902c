"""The emulation tells accesses to shared memory that nothing orders, whatever schedule it happens to take."""

from pathlib import Path
from typing import Any

ORDERS = Path(__file__).parent / "emulation" / "orders.cu"
KERNELS = {  # as in orders.cu, and what is said without the order
    "one lane arrives for a warp that wrote": "of shared byte",
    "one lane arrives for a warp that read": "of shared byte",
    "bar.arrive": "of shared byte",
    "bar.sync": "of shared byte",
    "a shuffle is no order": "of shared byte",
    "wgmma after the writer's fence": "by the tensor core of warp",
    "wgmma after the reader's fence": "by the tensor core of warp",
    "wgmma under way": "is not ordered after a read by the tensor core of warp",
    "a copy into shared memory": "copies of barrier",
    "a copy over what is read": "by copies of barrier",
    "a copy from shared memory": "is not ordered after a read by copies of thread 0",
    "an arrival at a block that leaves": "may come when block",
}


def test_unordered_accesses_are_told_under_every_schedule(emulation: Any) -> None:
    run = emulation.compile(ORDERS.read_text(), {})
    for number, (name, expected) in enumerate(KERNELS.items()):
        for seed in range(6):
            assert run(number, 1, seed) is None, name
            assert expected in (run(number, 0, seed) or b"").decode(), name
