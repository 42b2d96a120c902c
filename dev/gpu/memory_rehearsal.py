"""What a step allocates on a card of fake tensors (sanitize_rehearsal.py): the most at once, beside the accounting.

    PYTHONPATH=src python3 dev/gpu/memory_rehearsal.py WORKLOAD:BATCH:CONTEXT[:PRECISION[:IMPLEMENTATION]] …

Prints a line of JSON for each: {"case", "peak", "accounting"}, in bytes, then, with WHERE=1, who holds most of the peak.
What PyTorch's allocator has on a card besides: cuBLAS's workspaces, and while a step is captured a second copy of its
state. No card, no kernel, no memory: about two seconds each.
"""

import collections
import json
import os
import sys
import traceback
import warnings

import sanitize_rehearsal as rehearsal  # before torch
import torch

rehearsal.answer_for_card()  # before any kernel is imported

from sanitize_kit import ProductsOnHost
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from ridgeline.bench.workloads import random_batch, workload
from ridgeline.engine import TrainStep
from ridgeline.models import build
from ridgeline.models.memory import memory
from ridgeline.models.plan import fused_plan

BLOCK = 512  # bytes that the allocator gives at least


class Products(ProductsOnHost):
    """Nothing is computed, so nothing lies anywhere on the way to a result that is there already."""

    def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
        out = (kwargs or {}).get("out")
        if out is not None and func.overloadpacket.__name__ in self.PRODUCTS:
            return out
        return super().__torch_dispatch__(func, kinds, args, kwargs)


class Held(rehearsal.values_mode()):
    """Notes every tensor on the card that comes into being; `peak` is the most that was there at once."""

    def __init__(self):
        super().__init__()
        self.there, self.peak, self.at_peak = {}, 0, []

    def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
        result, before = super().__torch_dispatch__(func, kinds, args, kwargs), len(self.there)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cuda":
                storage = tensor.untyped_storage()
                known = self.there.get(storage._cdata)
                if known is None or known[0].expired():
                    self.there.pop(storage._cdata, None)
                    size = -(-storage.nbytes() // BLOCK) * BLOCK
                    self.there[storage._cdata] = (StorageWeakRef(storage), size, caller())
        if len(self.there) > before:
            self.there = {key: known for key, known in self.there.items() if not known[0].expired()}
            total = sum(size for _, size, _ in self.there.values())
            if total > self.peak:
                self.peak, self.at_peak = total, [known[1:] for known in self.there.values()]
        return result


def caller():
    """The package's functions that are running, the innermost first."""
    if "WHERE" not in os.environ:
        return ""
    frames = [f for f in traceback.extract_stack(limit=16) if "/ridgeline/" in f.filename]
    return " < ".join(f"{os.path.basename(f.filename)}:{f.lineno} {f.name}" for f in reversed(frames[-4:]))


def rehearse(case, held):
    """Two steps, of which the first makes what stays; what the accounting says."""
    parts = case.split(":")
    name, batch, context, precision, impl = (*parts, *("bf16", "fused")[len(parts) - 3 :])
    work, device = workload(name, batch=int(batch), context=int(context)), torch.device("cuda")
    step = TrainStep(build(work.model, impl=impl, seed=1).to(device), precision=precision, capture=False)
    given = random_batch(work, device, 0)
    step(given)
    held.peak = 0
    step(given)
    plan = fused_plan(impl)
    return memory(work.model, batch=work.batch, context=work.context, precision=precision, plan=plan).peak


def main(cases):
    warnings.filterwarnings("ignore", "Accessing the data pointer")
    rehearsal.launch_nowhere(lambda *_: None)
    torch.autograd.set_multithreading_enabled(False)
    fake = FakeTensorMode()  # one: plans are kept between cases
    for case in cases:
        held = Held()
        with fake, held, Products():
            accounting = rehearse(case, held)
        print(json.dumps({"case": case, "peak": held.peak, "accounting": accounting}), flush=True)
        by_caller = collections.Counter()
        for size, who in held.at_peak:
            by_caller[who] += size
        for who, size in by_caller.most_common(25 if "WHERE" in os.environ else 0):
            print(f"    {size / 1e6:9.1f} MB  {who}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
