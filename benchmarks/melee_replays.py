"""How fast Melee replays become a data set: `python benchmarks/melee_replays.py REPLAYS [--frames 1000000]`.

Copies the usable replays of a folder until there are enough frames, each copy with another random seed in its Game
Start (so that none is a duplicate), and prepares them. Prints one JSON object; frames_per_s counts from when the
workers have started to when the data set is whole. frames_per_cpu_s counts the processor time of all processes, their
start included: on a machine that others use too it says what a core can do.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

from ridgeline.data.api import prepare_melee
from ridgeline.data.melee.replay import RefusedError, read_replay
from ridgeline.games.melee.events import Recording


def make_copies(source: Path, folder: Path, frames: int) -> int:
    """Write copies and return how many frames they hold."""
    usable = []
    for file in sorted(source.glob("*.slp")):
        try:
            length = len(read_replay(file).frames)
        except RefusedError:
            continue
        if length > 256:
            usable.append((Recording.read(file), length))
    made = seed = 0
    while made < frames:
        for recording, length in usable:
            seed += 1
            (folder / f"{seed:06}.slp").write_bytes(recording.reseeded(seed))
            made += length
    return made


def processor_seconds() -> float:
    """Of this process and of those that it has ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("replays", type=Path)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "replays")
        folder.mkdir()
        frames = make_copies(options.replays, folder, options.frames)
        started, worked = time.perf_counter(), processor_seconds()
        report = prepare_melee(folder, Path(name, "out"), processes=options.processes)
        seconds, worked = time.perf_counter() - started, processor_seconds() - worked
    result = {key: report[key] for key in ("games", "frames", "windows", "frames_per_s")}
    result |= {"frames_made": frames, "refused": len(report["refused"]), "processes": options.processes}
    result |= {"seconds": round(seconds, 2), "frames_per_cpu_s": round(frames / worked)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
