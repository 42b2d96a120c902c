"""The command line's work from Python: take a preset, change it, train, go on, continue a text.

python examples/from_python.py TEXT_FILE OUT_FOLDER
"""

import dataclasses
import sys

from ridgeline.presets import preset
from ridgeline.train import resume, train
from ridgeline.train.sample import sample
from ridgeline.train.settings import override


def main() -> None:
    """Train a small model on a text for 40 steps, then 20 more, and let it write."""
    text, out = sys.argv[1:]
    config = override(
        preset("fast-c256"),
        {
            "model": {"decoder": {"layers": 2, "width": 64, "heads": 4, "mlp_width": 128, "context": 64}},
            "window": {"context": 64},
            "data": text,
            "batch": 16,
            "steps": 40,
            "eval_windows": 64,
            "out": out,
        },
    )
    first = train(config)
    second = resume(first.folder, dataclasses.replace(first.config, steps=60))
    print(f"validation loss {first.progress.val_loss:.3f}, then {second.progress.val_loss:.3f}")
    print(sample(second.checkpoint, "", tokens=80).text)


if __name__ == "__main__":
    main()
