"""`ridgeline train shakespeare-fast` as a user calls it: where its seconds go, alone on its card.

PYTHONPATH=src:SITE OUT=$OUT python dev/gpu/starts_gpu.py TINYSHAKESPEARE [cold] [SETTING VALUE…]

Three seeds one after another in one process, of which the first imports, compiles and captures; training seconds are by
the run's own clock, validations and checkpoints by this file's. With `cold` every cache is empty, and it ends after the
first step. Writes $OUT/starts.json, a record, after every seed.
"""

import time

BEGUN = time.monotonic()

import contextlib  # noqa: E402
import io  # noqa: E402
import itertools  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import re  # noqa: E402
import shutil  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from datetime import UTC, datetime  # noqa: E402
from pathlib import Path  # noqa: E402

FAST, TARGET, SEEDS = "shakespeare-fast", 1.4697, 3
OUT = Path(os.environ.get("OUT", "out"))


@contextlib.contextmanager
def counted(owner, name, spent):
    """Adds the seconds of every call of a method to `spent`."""
    method = getattr(owner, name)

    def timed(*given, **more):
        begun = time.perf_counter()
        try:
            return method(*given, **more)
        finally:
            spent.append(time.perf_counter() - begun)

    setattr(owner, name, timed)
    try:
        yield
    finally:
        setattr(owner, name, method)


def once(seed, words):
    """A run, and where its seconds went."""
    import gc

    import torch

    from ridgeline.cli import main as ridgeline
    from ridgeline.engine.capture import CudaCapture
    from ridgeline.train.metrics import read_metrics
    from ridgeline.train.state import Content
    from ridgeline.train.validate import Evaluation

    begun, home = time.monotonic(), OUT / f"start-{seed}"
    shutil.rmtree(home, ignore_errors=True)
    validations, copies, writes, said = [], [], [], io.StringIO()
    collections, freed, warm_ups, captures = [], [], [], []
    with (
        counted(gc, "collect", collections),
        counted(torch.cuda, "empty_cache", freed),
        counted(CudaCapture, "warm_up", warm_ups),
        counted(CudaCapture, "__call__", captures),
        counted(Evaluation, "__call__", validations),
        counted(Content, "apart", copies),
        counted(Content, "write", writes),
        contextlib.redirect_stderr(said),
    ):
        code = ridgeline(["train", FAST, "--lanes", "1", "--seed", str(seed), "--out", str(home), *words])
    call_s = time.monotonic() - begun
    print(said.getvalue()[-600:], flush=True)
    if code:
        raise SystemExit(code)
    points = [(row["step"], row["seconds"], row["val_loss"]) for row in read_metrics(home) if "val_loss" in row]
    held = [one for one, other in itertools.pairwise(points) if max(one[2], other[2]) <= TARGET]
    first = re.search(r"first step ([0-9.]+) s", said.getvalue())
    shutil.rmtree(home)
    return {
        "seed": seed,
        "call_s": round(call_s, 2),
        "training_s": points[-1][1],
        "first_step_s": float(first[1]) if first else None,
        # of the first step: what an earlier run left goes with collections and with memory given back to the card
        "parts_of_first_step_s": {
            "warm-up": round(warm_ups[0], 3) if warm_ups else None,
            "capture": round(captures[0], 3) if captures else None,
            "first four collections": [round(s, 3) for s in collections[:4]],
            "memory given back": [round(s, 3) for s in freed[:4]],
        },
        "validations_s": round(sum(validations), 3),
        "first_validation_s": round(validations[0], 3),
        "copies_s": round(sum(copies), 3),
        "checkpoints_s": round(sum(writes), 3),
        "checkpoints": len(writes),
        "held_at_step": held[0][0] if held else None,
        "held_s": held[0][1] if held else None,
        "validations": points,
    }


def write(rows):
    """The record, as far as it goes."""
    import torch

    from ridgeline.bench.circumstances import git_revision, versions
    from ridgeline.bench.nvml import monitor
    from ridgeline.records import ContenderResult, Record, WorkloadInfo, write_record

    cuda = torch.cuda.is_available()
    device = torch.device("cuda:0" if cuda else "cpu")
    contenders = [ContenderResult(name=f"{FAST}, seed {row['seed']}", first_step_s=row["first_step_s"]) for row in rows]
    record = Record(
        kind="study",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        git=git_revision(),
        card=torch.cuda.get_device_name(device) if cuda else "CPU",
        gpus=int(cuda),
        versions=versions(monitor(device)),
        workload=WorkloadInfo(name="tinyshakespeare", batch=32, context=256, precision="bf16" if cuda else "fp32"),
        contenders=contenders,
        curves=[{"figure": "starts", "name": FAST, "target": TARGET, "rows": rows}],
    )
    write_record(record, OUT / "starts.json")


def prepared(text):
    """Seconds to read the data, which are prepared first where they are not yet; the latter do not count."""
    from ridgeline.data.api import load_dataset, prepare_tinyshakespeare
    from ridgeline.errors import DataError

    preparing = time.monotonic()
    try:
        load_dataset("tinyshakespeare")
        preparing = time.monotonic()
    except DataError:
        prepare_tinyshakespeare(source=text)
    begun = time.monotonic()
    load_dataset("tinyshakespeare")
    return time.monotonic() - begun, begun - preparing


def main():
    """The runs, and after each the record."""
    text, *words = sys.argv[1:]
    cold = words[:1] == ["cold"]
    words = [*words[cold:], *(["--steps", "2"] if cold else [])]
    empty = tempfile.mkdtemp()
    if cold:
        folders = ("RIDGELINE_CACHE", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
        os.environ.update({name: f"{empty}/{name.lower()}" for name in folders})
    import ridgeline.cli.train  # noqa: F401

    imported = time.monotonic()
    data_s, preparing_s = prepared(text)
    OUT.mkdir(parents=True, exist_ok=True)
    rows = []
    for seed in range(1 if cold else SEEDS):
        row = {"caches": "empty" if cold else "full", **once(seed, words)}
        row |= dict.fromkeys(("imports_s", "data_s", "in_all_s"))
        if not rows:
            row |= {"imports_s": round(imported - BEGUN, 2), "data_s": round(data_s, 3)}
            row["in_all_s"] = round(time.monotonic() - BEGUN - preparing_s, 2)
        rows.append(row)
        print(json.dumps(row), flush=True)
        write(rows)
    shutil.rmtree(empty)


if __name__ == "__main__":
    main()
