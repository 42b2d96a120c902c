"""hal-20m and hal-5m on Melee replays: is the loader ever the bottleneck, and does a run train?

    PYTHONPATH=src python dev/gpu/melee_gpu.py DATA [TRIAL ...]      # DATA by `ridgeline data melee FOLDER -o DATA`

Trials, each in a process of its own, results in $OUT/melee_TRIAL.json:
    loader    windows from the host alone, frames/s
    step-20m  the step of hal-20m on a batch that lies on the card, and fed by the loader, in turns
    step-5m   the same for hal-5m (128 positions of every other frame)
    train     what `ridgeline train hal-20m --data DATA` does, for 400 steps and a validation
    memorise  the same without dropout on SCRIPTED beside DATA (one scripted game twice, the second held out): how well
              it is known by heart, by head
    quick     `train`, then `step-20m`: a short answer, and $OUT/melee-train.json, a record
    heart     `memorise` for half a minute: a short answer, and $OUT/melee-heart.json, a record
DEVICE=cpu tries the script itself, small.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

LIMITS = {"loader": 20, "step-20m": 60, "step-5m": 45, "train": 75, "memorise": 75, "quick": 80, "heart": 110}
CPU = os.environ.get("DEVICE") == "cpu"
SMALL: dict = (
    {"batch": 4, "window": {"context": 32}, "model": {"decoder": {"layers": 1, "width": 64, "heads": 2}}} if CPU else {}
)
TURNS, STEPS = (2, 3) if CPU else (4, 60)


def config_of(name, data, **values):
    from ridgeline.presets import preset
    from ridgeline.train.settings import override

    return override(preset(name), {**SMALL, "data": data, "device": "cpu" if CPU else "cuda", **values})


def loader(data):
    from ridgeline.data.api import load_dataset
    from ridgeline.data.loader import Batches

    found, result = load_dataset(data), {}
    for name in ("hal-20m", "hal-5m"):
        config = config_of(name, data)
        batches = Batches(found, config.window, batch=config.batch)
        out = batches.next()
        for form, kept in (("new tensors", None), ("given tensors", out)):
            times = []
            for _ in range(STEPS):
                started = time.perf_counter()
                batches.next(kept)
                times.append(time.perf_counter() - started)
            median = sorted(times)[len(times) // 2]
            result[f"{name}, {form}"] = {
                "ms": round(1e3 * median, 2),
                "frames_per_s": round(config.step_tokens * config.window.stride / median),
                "positions_per_s": round(config.step_tokens / median),
            }
    return result


def step(data, name, turns=TURNS):
    import torch

    from ridgeline.data.api import load_dataset
    from ridgeline.data.loader import Batches
    from ridgeline.train.engines import build_model, make_step
    from ridgeline.train.resolve import resolve

    found = load_dataset(data)
    config = resolve(config_of(name, data, lanes=1), found)
    model = build_model(config)
    run = make_step(model, config)
    batches = Batches(found, config.window, batch=config.batch)
    fixed = {key: value.to(config.device) for key, value in batches.next().items()}
    wait = (lambda: None) if CPU else torch.cuda.synchronize
    started = time.perf_counter()
    run(batches.next())
    run(fixed)
    wait()
    result: dict = {
        "engine": config.engine,
        "first_steps_s": round(time.perf_counter() - started, 1),
        "fixed": [],
        "loader": [],
    }
    sources = {"fixed": lambda: fixed, "loader": batches.next}
    for _ in range(turns):
        for source, give in sources.items():
            wait()
            started = time.perf_counter()
            for _ in range(STEPS):
                run(give())
            wait()
            result[source].append(round(1e3 * (time.perf_counter() - started) / STEPS, 3))
    fixed_ms, loader_ms = (sorted(result[source])[turns // 2] for source in ("fixed", "loader"))
    result["tokens_per_s"] = {
        "fixed": round(config.step_tokens / fixed_ms * 1e3),
        "loader": round(config.step_tokens / loader_ms * 1e3),
    }
    result["loader_costs"] = round(loader_ms / fixed_ms - 1, 4)
    return result


def settings_of(values, before=""):
    """Options of `ridgeline train` for nested settings."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from settings_of(value, f"{before}{key}.")
        else:
            yield from (f"--{before}{key}".replace("_", "-") if before == "" else f"--{before}{key}", str(value))


def train(data, **values):
    """`ridgeline train hal-20m --data DATA …` as a user calls it."""
    folder = f"/tmp/melee-run-{os.getpid()}"
    steps = 6 if CPU else 400
    given = {
        **SMALL,
        "device": "cpu" if CPU else "cuda",
        "steps": steps,
        "eval_interval": steps // 2,
        "eval_windows": 2048,
    }
    given = {key: value for key, value in {**given, **values}.items() if value is not None}
    command = [sys.executable, "-m", "ridgeline", "train", "hal-20m", "--data", data, "--out", folder]
    command += [*settings_of(given), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-1500:])
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    records = [line for line in lines if "loss" in line]
    looks = list({record["seconds"]: record for record in records}.values())  # a time is that of the last step it tells
    first, last = looks[(len(looks) - 1) // 2], looks[-1]
    rate = (last["tokens"] - first["tokens"]) / (last["seconds"] - first["seconds"])
    config = Path(folder, "config.toml").read_text()
    shutil.rmtree(folder)
    return {
        **json.loads(done.stdout.splitlines()[-1]),
        "command": " ".join(["ridgeline", *command[3:]]).replace(data, "OUT").replace(folder, "RUN"),
        "config": config.replace(str(Path(data).resolve()), "OUT").replace(folder, "RUN"),
        "last_half_tokens_per_s": round(rate),
        "losses": [[record["step"], round(record["loss"], 4)] for record in records[:: max(1, len(records) // 40)]],
        "validations": [
            {k: v for k, v in line.items() if k.startswith("val")} | {"step": line["step"]}
            for line in lines
            if "val_loss" in line
        ],
    }


def keep(file, data, result, rates, **values):
    """A record of a training on replays beside others' rates."""
    from ridgeline.data.api import load_dataset
    from ridgeline.records import ContenderResult, Record, write_record
    from ridgeline.study.circumstances import circumstances
    from ridgeline.train.resolve import resolve

    found = load_dataset(data)
    config = resolve(config_of("hal-20m", data, **values), found)
    tokens = config.step_tokens
    curves = [
        {
            "figure": "loss",
            "name": "training",
            "x": [x for x, _ in result["losses"]],
            "y": [y for _, y in result["losses"]],
        }
    ]
    steps, held = [v["step"] for v in result["validations"]], "held-out games"
    curves.append({"figure": "loss", "name": held, "x": steps, "y": [v["val_loss"] for v in result["validations"]]})
    for curve in curves:
        curve |= {"x_label": "step", "y_label": "loss, nats, all heads"}
    curves.append({"figure": "melee", "name": "validations", "rows": result["validations"]})
    setting = {name: result[name] for name in ("command", "config", "steps", "seconds")}
    curves.append(
        {
            "figure": "setting",
            "name": "setting",
            **setting,
            "data": {k: v for k, v in found.summary().items() if k != "path"},
        }
    )
    contenders = [
        ContenderResult(
            name=name, tokens_per_s=rate, windows_per_s=rate / config.window.context, step_ms=1e3 * tokens / rate
        )
        for name, rate in rates.items()
    ]
    around = circumstances(config)
    around["workload"] = replace(
        around["workload"], name="hal-20m on Melee" + (", one game by heart" if "scripted" in data else "")
    )
    record = Record(kind="study", **around, contenders=contenders, curves=curves)
    write_record(record, Path(os.environ.get("OUT", "out")) / file)


def memorise(data):
    decoder = {**SMALL.get("model", {}).get("decoder", {}), "dropout": 0.0}
    steps = 6 if CPU else 600
    return train(
        str(Path(data).with_name("scripted")), model={"decoder": decoder}, steps=steps, eval_interval=max(2, steps // 6)
    )


def quick(data):
    """`train`, then the same step on one batch that lies on the card and fed by the host, in turns; a record of it."""
    trained, fixed = train(data, eval_windows=1024), step(data, "hal-20m", turns=3)
    rates = {
        "ridgeline train": trained["last_half_tokens_per_s"],
        "the step on one batch": fixed["tokens_per_s"]["fixed"],
        "the step fed by the host": fixed["tokens_per_s"]["loader"],
    }
    keep("melee-train.json", data, trained, rates)
    val = trained["validations"][-1]
    return {
        "tokens_per_s": rates,
        "engine": fixed["engine"],
        "fixed": fixed["fixed"],
        "loader": fixed["loader"],
        "losses": [loss for _, loss in trained["losses"]][:: max(1, len(trained["losses"]) // 8)],
        "val": {name: round(value, 3) for name, value in val.items()},
    }


def heart(data):
    """`memorise` for half a minute of training; what each validation says of the c-stick, and a record of it."""
    values = {"steps": None, "minutes": 0.02 if CPU else 0.45, "eval_interval": 3 if CPU else 240, "eval_windows": 0}
    values["lanes"] = 1  # the measurement of one against two costs more than half a minute can repay
    values["model"] = {"decoder": {**SMALL.get("model", {}).get("decoder", {}), "dropout": 0.0}}
    scripted = str(Path(data).with_name("scripted"))
    result = train(scripted, **values)
    keep("melee-heart.json", scripted, result, {"ridgeline train": result["last_half_tokens_per_s"]}, **values)
    kept = (
        "step",
        "val_loss.c",
        "val_accuracy.c",
        "val_loss.main",
        "val_accuracy.main",
        "val_loss.buttons",
        "val_accuracy.buttons",
    )
    shown = [[round(v[name], 4) for name in kept] for v in result["validations"]]
    return {"tokens_per_s": result["last_half_tokens_per_s"], "validations": shown[-5:]}


TRIALS = {
    "quick": quick,
    "heart": heart,
    "memorise": memorise,
    "loader": loader,
    "step-20m": lambda data: step(data, "hal-20m"),
    "step-5m": lambda data: step(data, "hal-5m"),
    "train": train,
}


def main():
    data, chosen = sys.argv[1], sys.argv[2:] or ["loader", "step-20m", "step-5m", "train", "memorise"]
    out = Path(os.environ.get("OUT", "out"))
    out.mkdir(parents=True, exist_ok=True)
    for name in chosen:
        started = time.perf_counter()
        try:
            command = [sys.executable, __file__, "--one", name, data]
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMITS[name])
            lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
            result = json.loads(lines[-1][7:]) if lines else {"error": done.stderr[-1500:]}
        except subprocess.TimeoutExpired:
            result = {"error": f"no result within {LIMITS[name]} s"}
        result["wall_s"] = round(time.perf_counter() - started, 1)
        print(name, json.dumps(result), flush=True)
        (out / f"melee_{name}.json").write_text(json.dumps(result, indent=1))


if sys.argv[1:2] == ["--one"]:
    print("RESULT " + json.dumps(TRIALS[sys.argv[2]](sys.argv[3])))
else:
    main()
