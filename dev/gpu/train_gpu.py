"""Trains presets on the card, each in a process of its own, and writes results to $OUT.

PYTHONPATH=src python dev/gpu/train_gpu.py TEXT_FILE [MINUTES]
"""

import json
import os
import subprocess
import sys
from pathlib import Path

RUNS = {  # name: preset, overrides, timeout in seconds
    "gpt2-c256-3000": ("gpt2-c256", {"steps": 3000, "eval_interval": 250}, 150),
    "gpt2-c256-3000-dropout": (
        "gpt2-c256",
        {"steps": 3000, "eval_interval": 250, "model": {"decoder": {"dropout": 0.2}}},
        150,
    ),
    "gpt2-c256-eager": ("gpt2-c256", {"steps": 200, "engine": "eager"}, 60),
    "gpt2-c256-best": ("gpt2-c256", {"steps": 3000, "eval_interval": 250, "engine": "best"}, 150),
    "fast-c256-3000": ("fast-c256", {"steps": 3000, "eval_interval": 250}, 150),
}
ONE = """
import json, sys
from ridgeline.presets import preset
from ridgeline.train import train
from ridgeline.train.settings import override
name, values = json.loads(sys.argv[1])
print("RESULT " + json.dumps(train(override(preset(name), values)).summary()))
"""


def main() -> None:
    out, text = Path(os.environ.get("OUT", "out")), sys.argv[1]
    out.mkdir(parents=True, exist_ok=True)
    chosen = sys.argv[2:] or list(RUNS)
    for name in chosen:
        preset, values, limit = RUNS[name]
        values = {**values, "data": text, "device": "cuda", "out": f"/tmp/ridgeline-runs/{name}"}
        command = [sys.executable, "-c", ONE, json.dumps([preset, values])]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
            lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
            result = json.loads(lines[-1][7:]) if lines else {"error": done.stderr[-1500:]}
            metrics = Path(values["out"]) / "metrics.jsonl"
            if metrics.exists():
                records = [json.loads(line) for line in metrics.read_text().splitlines()]
                result["validations"] = [
                    [r["step"], round(r["val_loss"], 4), r["seconds"]] for r in records if "val_loss" in r
                ]
        except subprocess.TimeoutExpired:
            result = {"error": f"no result within {limit} s"}
        print(name, json.dumps(result), flush=True)
        (out / f"{name}.json").write_text(json.dumps(result))


main()
