"""Data parallel training over any number of processes: who they are, and what they tell each other.

The gradients' way is `reduction.py`'s. Here are the processes themselves: torchrun starts them, `together` joins them,
and `Replicas` holds the few things that they say to each other outside a step.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ridgeline.errors import ConfigError, UnsupportedError, WorkerError

BUCKET = 4 * 1024 * 1024  # elements of an all-reduce: 16 MiB of fp32
BACKENDS = {"cuda": "cpu:gloo,cuda:nccl", "cpu": "gloo"}  # numbers of the host go through gloo everywhere

T = TypeVar("T")


@contextlib.contextmanager
def connected() -> Iterator[None]:
    """Around an exchange with other processes, in which nothing else can fail.

    Raises:
        WorkerError: one of them is gone.
    """
    try:
        yield
    except RuntimeError as error:  # every error of torch.distributed is one
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = textwrap.shorten(lines[0], 160, placeholder=" …")
        raise WorkerError(f"another process of this run is gone ({reason}); see its own last words") from error


class Replicas:
    """The processes that train copies of one model on different samples.

    Args:
        group: a process group; None for the default one, or for a single process where there is none.
        bucket: elements of fp32 in one all-reduce.
        overlap: send gradients off while the backward pass goes on, and not after it. On two H200s that lost for the
            fused blocks (hal-20m 38.5 against 37.7 ms): their products have a block on every processor and wait for
            the few that NCCL's kernels sit on. Copies by the copy engines in NCCL's place, which take none, came to
            37.7 ms too: the cards are at their power cap, and each alone takes 37.2 ms.

    Attributes:
        rank: this process' number.
        world: how many there are.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, bucket: int = BUCKET, overlap: bool = False) -> None:
        if bucket < 1:
            raise ConfigError(f"a bucket needs at least one element, got {bucket}")
        self.group, self.bucket, self.overlap = group, bucket, overlap
        alone = not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if alone else dist.get_rank(group)
        self.world = 1 if alone else dist.get_world_size(group)

    @torch.no_grad()
    def agree(self, settings: Mapping[str, object], device: torch.device) -> None:
        """All processes have the same settings; exchanged by way of `device`.

        Raises:
            ConfigError: one differs, in every process.
        """
        if self.world == 1:
            return
        digests = (hashlib.sha256(repr(value).encode()).digest()[:8] for value in settings.values())
        own = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8).to(device)
        first = own.clone()
        with connected():
            dist.broadcast(first, group=self.group, group_src=0)
        differ = self.sum((own != first).view(-1, 8).any(1).float())
        odd = [name for name, number in zip(settings, differ.tolist(), strict=True) if number]
        if odd:
            raise ConfigError(
                f"the processes do not train alike: {odd[0]} of process 0 and of another one differ, here "
                f"{textwrap.shorten(repr(settings[odd[0]]), 200, placeholder=' …')}; start all of them with the same"
            )

    @torch.no_grad()
    def same(self, tensors: Iterable[Tensor]) -> None:
        """Gives every process the first one's values; no memory may be named twice in a tensor."""
        for tensor in tensors if self.world > 1 else ():
            values = tensor.detach().contiguous()
            with connected():
                dist.broadcast(values.flatten().view(torch.uint8), group=self.group, group_src=0)  # any dtype
            if values.data_ptr() != tensor.data_ptr():
                tensor.copy_(values)

    @torch.no_grad()
    def start(self, flat: Tensor) -> dist.Work | None:
        """Begins to replace `flat` by its sum over the processes.

        On CUDA the sum is ordered on the current stream like a kernel; on the CPU it is there after `wait` on what is
        returned.
        """
        return dist.all_reduce(flat, group=self.group, async_op=not flat.is_cuda)

    def sum(self, flat: Tensor) -> Tensor:
        """Replaces `flat`, of any device, by its sum over the processes, and returns it."""
        if self.world > 1:
            with connected():
                work = self.start(flat)
                if work is not None:
                    work.wait()
        return flat

    def exchange(self, flag: bool, number: float) -> tuple[bool, float]:
        """Whether any process raises its flag, and the first one's number; between hosts, whatever the devices do.

        Raises:
            WorkerError: a process is gone.
        """
        said = torch.tensor([float(flag), number if self.rank == 0 else 0.0], dtype=torch.float64)
        flags, first = self.sum(said).tolist()
        return flags > 0, first

    def first(self, make: Callable[[], T]) -> T:
        """`make()` in the first process and then in all others, so that they find what it has left on the disk."""
        if self.world == 1:
            return make()
        made = make() if self.rank == 0 else None
        self.exchange(False, 0.0)
        return made if self.rank == 0 else make()  # type: ignore[return-value]

    def told(self, text: str) -> str:
        """The first process' text."""
        if self.world == 1:
            return text
        found = [text]
        with connected():
            dist.broadcast_object_list(found, group=self.group, group_src=0, device=torch.device("cpu"))
        return found[0]


def launched() -> int:
    """How many processes torchrun has started for this run; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextlib.contextmanager
def together(device: str) -> Iterator[Replicas]:
    """Joins the processes that torchrun has started, one card each on CUDA; alone without torchrun.

    A step that was built inside must be gone before the end: NCCL waits for the graphs that hold its operations.

    Args:
        device: "cuda" or "cpu".

    Raises:
        UnsupportedError: a device of another name, or fewer cards than processes.
        ConfigError: torchrun's environment is incomplete.
    """
    if launched() == 1 or dist.is_initialized():
        yield Replicas()
        return
    if device not in BACKENDS:
        raise UnsupportedError(f"device {device} is one device for all {launched()} processes; use cuda or cpu")
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(f"WORLD_SIZE is set, but {', '.join(missing)} not; start the processes with torchrun")
    if device == "cuda":
        local, cards = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local >= cards:
            cure = f"use --nproc-per-node {cards}" if cards else "there is none here; use --device cpu"
            raise UnsupportedError(f"torchrun's process {local} has no card; {cure}")
        torch.cuda.set_device(local)
    with connected():
        dist.init_process_group(BACKENDS[device])
    yield Replicas()
    # not in a finally: after an error some process may be gone, and to take leave of it would wait for it
    gc.collect()
    dist.destroy_process_group()
