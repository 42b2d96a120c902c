"""Records as the measuring verbs would write them, with made-up numbers: one of everything that a report can show."""

from __future__ import annotations

import math

from ridgeline.records import ContenderResult, OpResult, Record, WorkloadInfo

CLOCKS = {
    "before": {"sm_mhz": 1980, "memory_mhz": 3201, "power_w": 130.0, "temperature_c": 45, "throttle": []},
    "during": {
        "sm_mhz": [1710, 1980],
        "memory_mhz": [3201, 3201],
        "power_w": [672.0, 693.0],
        "temperature_c": [62, 64],
        "throttle": ["power cap"],
    },
    "after": {"sm_mhz": 1980, "memory_mhz": 3201, "power_w": 129.0, "temperature_c": 43, "throttle": []},
}
GROUPS = (
    "QKV", "attention", "output projection", "MLP up", "MLP down", "norms", "relative table", "pointwise",
    "fills and copies",
)  # fmt: skip


def record(kind: str, name: str, batch: int, context: int, **fields) -> Record:
    return Record(
        kind=kind,
        date="2026-11-29T20:15:00+00:00",
        git="0123456789abcdef0123456789abcdef01234567",
        card="NVIDIA H200",
        gpus=1,
        versions={"ridgeline": "0.1.0", "python": "3.12.3", "torch": "2.11.0+cu130", "driver": "580.159.04"},
        clocks=CLOCKS,
        workload=WorkloadInfo(name=name, batch=batch, context=context, precision="bf16"),
        **fields,
    )


def result(name: str, step_ms: float, batch: int, context: int, group: int = 0, spread: float = 0.01):
    return ContenderResult(
        name=name,
        group=group,
        tokens_per_s=batch * context / step_ms * 1e3,
        windows_per_s=batch / step_ms * 1e3,
        step_ms=step_ms,
        spread=spread,
        mfu=min(0.9, 16 / step_ms),
        bytes_per_s=76.5e12 / step_ms,
        bandwidth=min(0.9, 16 / step_ms),
        floor_share=min(0.95, 21 / step_ms),
        peak_memory_bytes=int(2e10),
        first_step_s=12.5,
        phases_ms={"forward": 0.33 * step_ms, "backward": 0.66 * step_ms, "optimizer": 0.17},
        groups_ms_per_layer={
            f"{phase} · {group}": step_ms / 6 * share * (0.3 + 0.1 * index % 0.7)
            for phase, share in (("forward", 0.03), ("backward", 0.06))
            for index, group in enumerate(GROUPS)
        },
        overlap=0.12,
    )


def ladder() -> Record:
    times = {"m0": 610.0, "m1": 430.0, "m2": 190.0, "m3": 110.0, "r16": 58.0, "best": 36.9, "compile+graph": 75.6,
             "compile": 77.0, "max-autotune": 75.2, "reduce-overhead": 78.4, "graph": 148.0,
             "eager": 153.0}  # fmt: skip
    contenders = [result(name, ms, 512, 256) for name, ms in times.items()]
    contenders[-1] = result("eager", 153.0, 512, 256, group=1, spread=0.2)
    contenders += [
        result("best", 37.0, 512, 256, group=1),
        result("compile+graph", 75.8, 512, 256, group=1),
        ContenderResult(
            name="transformers",
            group=1,
            error="UnsupportedError: transformers cannot express hal-20m: it is no language model",
        ),
    ]
    return record("bench", "hal-20m", 512, 256, contenders=contenders)


def smaller() -> Record:
    times = {"best": 6.6, "compile+graph": 13.1, "eager": 35.7}
    return record("bench", "hal-5m", 512, 128, contenders=[result(n, ms, 512, 128) for n, ms in times.items()])


def sweep() -> list[Record]:
    found = []
    for context in (128, 256, 512, 1024, 2048):
        slower = 1 + math.log2(context / 128) / 3
        times = {"best": 1.2 * slower, "compile+graph": 1.8 * slower, "eager": 13.0}
        batch = 8192 // context
        contenders = [result(name, ms, batch, context, spread=0.03) for name, ms in times.items()]
        found.append(record("bench", "gpt2-c256", batch, context, contenders=contenders))
    return found


def explained() -> Record:
    ops = [
        OpResult(name=name, shape=phase, impl="best", us=us, tflops=tflops, tb_per_s=tb, floor_share=0.5)
        for name, phase, us, tflops, tb in (
            ("qkv", "forward", 2400.0, 560.0, 1.4),
            ("attention", "forward", 1800.0, 90.0, 1.8),
            ("mlp_up", "forward", 3400.0, 520.0, 1.7),
            ("norm", "forward", 1700.0, 0.2, 3.3),
            ("heads.norm or heads.up or heads.down or cross_entropy", "forward", 1300.0, 92.0, 1.4),
            ("attention", "backward", 5400.0, 75.0, 1.0),
            ("mlp_up.weight_gradient", "backward", 2600.0, 620.0, 1.1),
            ("norm", "backward", 2200.0, 0.2, 3.2),
            ("adamw", "optimizer", 170.0, 0.3, 3.4),
        )
    ]
    return record("explain", "hal-20m", 512, 256, contenders=[result("best", 37.0, 512, 256)], ops=ops)


def study() -> Record:
    steps = list(range(0, 1001, 100))
    curves = [
        {
            "name": name,
            "figure": "loss",
            "x": steps,
            "y": [start * math.exp(-s / 400) + 1.6 for s in steps],
            "low": [start * math.exp(-s / 400) + 1.55 for s in steps],
            "high": [start * math.exp(-s / 400) + 1.65 for s in steps],
            "x_label": "step",
            "y_label": "validation loss, nats",
        }
        for name, start in (("gpt2-c256", 2.6), ("fast-c256", 2.4))
    ]
    for curve in curves:
        curve["seconds"] = [s * 0.0013 for s in steps]
    curves.append({"name": "2-gram", "figure": "loss", "x": [0, 1000], "y": [2.482, 2.482], "line": True})
    standings = [{"contender": "gpt2-c256", "parameters": 4_837_888, "best_loss": 1.61, "tried": {"0.001": 1.6}}]
    curves.append({"name": "standings", "figure": "standings", "rows": standings})
    return record("study", "gpt2-c256", 32, 256, curves=curves)


def race() -> Record:
    minutes = [1.0, 2.0, 4.0, 8.0, 16.0]
    curve = {
        "name": "boxing",
        "figure": "strength",
        "x": minutes,
        "y": [3, 12, 22, 28, 29],
        "low": [1, 8, 17, 24, 26],
        "high": [6, 17, 26, 30, 30],
        "x_label": "minutes",
        "y_label": "games won of 30",
    }
    return record("race", "boxing", 64, 64, curves=[curve])


def everything() -> list[Record]:
    return [ladder(), smaller(), *sweep(), explained(), study(), race()]
