"""How fast Melee replays become a data set: `python benchmarks/melee_replays.py REPLAYS [--frames 1000000]`.

Copies the usable replays of a folder until there are enough frames, each copy with another random seed in its Game
Start (so that none is a duplicate), and prepares them. Prints one JSON object; frames_per_s counts from when the
workers have started to when the data set is whole.
"""

from __future__ import annotations

import argparse
import json
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
        started = time.perf_counter()
        report = prepare_melee(folder, Path(name, "out"), processes=options.processes)
        seconds = time.perf_counter() - started
    result = {key: report[key] for key in ("games", "frames", "windows", "frames_per_s")}
    print(
        json.dumps({**result, "frames_made": frames, "refused": len(report["refused"]), "seconds": round(seconds, 2)})
    )


if __name__ == "__main__":
    main()
