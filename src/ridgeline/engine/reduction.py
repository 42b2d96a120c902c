"""The all-reduce of one step's gradients: in buckets, after the backward pass or under it.

Under it each bucket leaves as soon as its last gradient has been launched. Buckets are ranges of the flat gradient. The
backward pass finishes gradients from the last layer to the first, which is the buffer's order backwards; ops that write
into sinks say when they have (ops/sink.py). Small gradients, which come a few a layer, lie together at the buffer's end
and leave last, with the loss and its weight. On CUDA the all-reduces run on a stream of their own, which a captured
step turns into a parallel branch.

How often a gradient is written before it is final (a shared weight is written twice) is learned in the first pass,
which sends everything at its end. Gradients that autograd hands over are sent at the end too.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ridgeline.engine.distributed import Replicas, connected
from ridgeline.engine.flat import FlatParameters
from ridgeline.errors import ConfigError, RidgelineError


@dataclass
class Bucket:
    """A range of the flat gradient that travels at once.

    Attributes:
        slots: numbers of the parameters in it.
        start: first element. `end`: behind the last one.
        waiting: parameters whose gradients are not final yet, in this pass.
        streams: where those that are were written.
        sent: whether it has left, in this pass.
    """

    slots: list[int]
    start: int
    end: int
    waiting: set[int] = field(default_factory=set)
    streams: set[torch.cuda.Stream] = field(default_factory=set)
    sent: bool = False


def lay_buckets(flat: FlatParameters, least: int) -> list[Bucket]:
    """Buckets of at least `least` elements, except the first one of each group; the buffer's end comes first.

    The layout's groups share none: matrices are finished layer by layer, but one small gradient of every layer, or the
    embedding's, would keep each of their buckets waiting.
    """
    buckets: list[Bucket] = []
    open_end, slots = len(flat.lanes[0].carried), list[int]()
    for index in range(len(flat.slots) - 1, -1, -1):
        slot = flat.slots[index]
        slots.insert(0, index)
        if open_end - slot.offset >= least or slot.offset in (0, flat.start, flat.boundary):
            buckets.append(Bucket(slots, slot.offset, open_end))
            open_end, slots = slot.offset, []
    return buckets


class Reduction:
    """The gradients of one lane on their way to their sum over the processes; one for each program of a step.

    Args:
        replicas: the processes, more than one.
        flat: whose first lane's gradients, loss and weight are summed.
        size: of this process' batch. Where the processes' differ, the step is skipped, and `check` says so.
        unit: what the size counts.

    Attributes:
        uneven: fp32[world], the sizes of the processes' batches in the last step in which they differed, else zeros.
        buckets: in the order in which the backward pass fills them.
        early: elements that left before the backward pass was over, the last time.
    """

    def __init__(self, replicas: Replicas, flat: FlatParameters, size: int = 1, unit: str = "samples") -> None:
        self.replicas, self.lane, self._unit = replicas, flat.lanes[0], unit
        self._size = torch.zeros_like(self.lane.sizes)
        self._size[replicas.rank : replicas.rank + 1] = size
        self.uneven = torch.zeros_like(self.lane.sizes)
        self.buckets = lay_buckets(flat, replicas.bucket)
        self._bucket_of = {slot: bucket for bucket in self.buckets for slot in bucket.slots}
        self._expected: dict[int, int] | None = None  # writes after which a gradient is final, where that is known
        self._stream = torch.cuda.Stream(flat.device) if flat.device.type == "cuda" else None
        self._works: list[dist.Work] = []
        self.early = 0

    def tell(self) -> None:
        """The step begins: notes the size of this process' batch, which leaves with the loss."""
        self.lane.sizes.copy_(self._size)

    @torch.no_grad()
    def _compare(self) -> None:
        """Spoils the loss where sizes differ, so that no process takes the step, and notes them."""
        sizes = self.lane.sizes
        least, most = torch.aminmax(sizes)
        differ = least != most
        self.lane.loss.masked_fill_(differ, torch.nan)
        torch.where(differ, sizes, self.uneven, out=self.uneven)

    def check(self) -> None:
        """That the processes' batches have been of one size. Waits for the device.

        Raises:
            ConfigError: they were not.
        """
        sizes = [int(size) for size in self.uneven.tolist()]
        odd = next((rank for rank, size in enumerate(sizes) if size != sizes[0]), None)
        if odd is not None:
            self.uneven.zero_()
            raise ConfigError(
                f"the processes' batches differ in size: process 0 has {sizes[0]} {self._unit}, process {odd} has "
                f"{sizes[odd]}; give each as many, or say by weight= what share of all its loss is a mean of"
            )

    def begin(self) -> None:
        """The backward pass that completes the gradients is about to begin: send them as they come."""
        if not self.replicas.overlap:
            return
        for bucket in self.buckets:
            bucket.waiting, bucket.sent = set(bucket.slots), False
            bucket.streams.clear()
        for index, sink in enumerate(self.lane.sinks):
            sink.report = functools.partial(self._finished, index)

    def _finished(self, index: int) -> None:
        """A gradient has been written once more."""
        if self._expected is None or self._expected.get(index) != self.lane.sinks[index].finishes:
            return
        bucket = self._bucket_of[index]
        bucket.waiting.discard(index)
        if self._stream is not None:
            bucket.streams.add(torch.cuda.current_stream(self._stream.device))
        if not bucket.waiting:
            self._send(bucket)

    def _send(self, bucket: Bucket) -> None:
        bucket.sent = True
        piece = self.lane.buffer[bucket.start : bucket.end]
        with connected():
            if self._stream is None:
                work = self.replicas.start(piece)
                self._works += [work] if work is not None else []
                return
            for stream in bucket.streams:
                self._stream.wait_stream(stream)
            with torch.cuda.stream(self._stream):
                self.replicas.start(piece)

    def finish(self, *, check: bool = False) -> None:
        """Sends what has not left yet; what follows on the current stream sees the sums.

        Args:
            check: that the batches are of one size, before the update, which waits for the device.

        Raises:
            ConfigError: they are not.
        """
        sinks = self.lane.sinks
        for sink in sinks:
            sink.report = None
        sent = [bucket for bucket in self.buckets if bucket.sent]
        self.early = sum(bucket.end - bucket.start for bucket in sent)
        if self._expected is None:
            self._expected = {i: sink.takes for i, sink in enumerate(sinks) if 0 < sink.takes == sink.finishes}
        late = [i for bucket in sent for i in bucket.slots if sinks[i].takes != self._expected[i]]
        if late:
            raise RidgelineError(
                f"the gradient of {self.lane.slots[late[0]].name} was written again after it had been sent: the "
                "backward pass is not that of the first step; use Replicas(overlap=False)"
            )
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        for bucket in self.buckets:
            if not bucket.sent:
                self._send(bucket)
            bucket.sent = False
        with connected():
            for work in self._works:
                work.wait()
        self._works.clear()
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        if len(self.lane.sizes):
            self._compare()
        if check:
            self.check()
