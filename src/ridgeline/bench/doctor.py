"""What would run here and why: versions, card, implementations, attention's backend, known bad combinations."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ridgeline.bench.findings import Facts, Finding, find
from ridgeline.bench.nvml import monitor
from ridgeline.bench.run import versions
from ridgeline.bench.sdpa import SdpaAnswer, ask_sdpa
from ridgeline.errors import UnsupportedError, nearest
from ridgeline.hardware import PRECISIONS, DriverReading, by_driver_name, load_ceilings, read_driver
from ridgeline.hardware.spec import lacking
from ridgeline.models import LanguageConfig, ModelConfig
from ridgeline.models.fused.choices import attention_missing, choose
from ridgeline.ops import (
    activation,
    attention,
    cross_entropy,
    dropout,
    embedding,
    heads,
    inputs,
    linear,
    norm,
    optimizer,
    policy_heads,
)
from ridgeline.ops._cuda import nvrtc
from ridgeline.presets import find_config

FASTEST_FIRST = ("cuda", "triton", "torch", "reference")
PYTORCHS = ("torch", "reference")  # implementations that run wherever PyTorch does
TOOL_TIMEOUT_S = 20
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32}
_VERSION = re.compile(r"V(\d+\.\d+\.\d+)")

Why = Callable[[str], str | None]


@dataclass(frozen=True, kw_only=True)
class OpChoice:
    """One op of the preset.

    Attributes:
        op: its name.
        uses: the implementation that would run here.
        others: why each other one would not.
    """

    op: str
    uses: str
    others: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class DoctorResult:
    """What the doctor found.

    Attributes:
        preset: whose ops and shapes were asked about.
        precision: that training would use here.
        versions: of everything that matters, by name.
        card: key of the card in the table; None for no card or one that the table does not know.
        driver: the card as its driver describes it; None without one.
        ceilings: date of the last measurement of the card's ceilings; None if there was none.
        ops: implementations, in the order in which a step meets them.
        sdpa: PyTorch's attention backends.
        findings: known bad combinations, bad ones first.
    """

    preset: str
    precision: str
    versions: dict[str, str]
    card: str | None
    driver: DriverReading | None
    ceilings: str | None
    ops: tuple[OpChoice, ...]
    sdpa: tuple[SdpaAnswer, ...]
    findings: tuple[Finding, ...]

    def to_json(self) -> dict[str, Any]:
        """The object that `doctor --json` prints."""
        return {
            "preset": self.preset,
            "precision": self.precision,
            "versions": self.versions,
            "card": self.card,
            "driver": None if self.driver is None else self.driver.to_json(),
            "ceilings": self.ceilings,
            "ops": [asdict(choice) for choice in self.ops],
            "sdpa": [asdict(answer) for answer in self.sdpa],
            "findings": [asdict(finding) for finding in self.findings],
        }


def pick(op: str, implementations: Sequence[str], why: Why, *, uses: str | None = None) -> OpChoice:
    """The implementation that runs, and why the others do not.

    Args:
        op: what it is called.
        implementations: all there are.
        why: reason why one cannot run here, or None.
        uses: the one that runs, where the model has decided; None for the fastest that can.
    """
    ordered = sorted(implementations, key=lambda impl: FASTEST_FIRST.index(impl.split("-")[0]))
    reasons = {impl: why(impl) for impl in ordered}
    used = uses or next(impl for impl in ordered if reasons[impl] is None)
    idle = {"reference": "the specification, slower"}
    others = {
        impl: reason or idle.get(impl, f"can run, but {used} is chosen")
        for impl, reason in reasons.items()
        if impl != used
    }
    return OpChoice(op=op, uses=used, others=others)


def _modules(model: ModelConfig) -> list[tuple[str, Any]]:
    """The ops outside attention and the MLP, by what they do in this model."""
    if isinstance(model, LanguageConfig):
        ends: list[tuple[str, Any]] = [("token and position embedding", embedding), ("head and loss", cross_entropy)]
    else:
        together = model.conditioning == "logits"
        ends = [("input layer", inputs), ("heads and losses", policy_heads if together else heads)]
    dropping: list[tuple[str, Any]] = [("dropout, where in no other kernel", dropout)] if model.decoder.dropout else []
    return [
        ends[0],
        ("norm, joined with the residual", norm),
        ("bias and GELU, where in no product", activation),
        *dropping,
        ends[1],
        ("AdamW and global norm", optimizer),
    ]


def choices_of(model: ModelConfig, device: torch.device, dtype: torch.dtype, B: int, T: int) -> list[OpChoice]:
    """The implementation of each op of a model on a device: the fused model's where it runs, else PyTorch's."""
    c = model.decoder
    unfused = f"the fused model needs a CUDA card, got device {device}"
    if device.type == "cuda":
        unfused = norm.available("triton", device) or ""
    fused = None if unfused else choose(c, device, dtype, B=B, T=T)

    def attending(impl: str) -> str | None:
        reason = attention_missing(impl, c, device, dtype, T)
        return reason or (unfused if impl not in PYTORCHS else None)

    def multiplying(impl: str) -> str | None:
        if impl == "cuda" and (c.width % 8 or c.hidden % 8):
            return f"needs widths that are multiples of 8, got {c.width} and {c.hidden}"
        return linear.unavailable(impl, device, dtype)

    def elsewhere(module: Any) -> Why:
        return lambda impl: None if impl in PYTORCHS else module.available(impl, device) or unfused or None

    def where_it_counts(why: Why) -> Why:
        """Without a card that is the reason: to install what a kernel lacks as well would change nothing."""
        return lambda impl: unfused if device.type != "cuda" and impl not in PYTORCHS else why(impl)

    default = "torch" if fused is None else None
    ops = [
        pick(
            name,
            tuple(dict.fromkeys(("torch", *module.IMPLEMENTATIONS))),
            where_it_counts(elsewhere(module)),
            uses=default,
        )
        for name, module in _modules(model)
    ]
    mixing = pick(
        "attention", attention.IMPLEMENTATIONS, where_it_counts(attending), uses=fused.attention if fused else "torch"
    )
    products = pick(
        "MLP products with GELU",
        linear.IMPLEMENTATIONS,
        where_it_counts(multiplying),
        uses=fused.mlp if fused else "torch",
    )
    return [*ops[:2], mixing, products, *ops[2:]]


def ptxas() -> str | None:
    """The version of the assembler that Triton runs: TRITON_PTXAS_PATH's, else the one that comes with it."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return None
    own = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "ptxas"
    try:
        done = subprocess.run(
            [os.environ.get("TRITON_PTXAS_PATH", str(own)), "--version"],
            capture_output=True,
            text=True,
            timeout=TOOL_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found = _VERSION.search(done.stdout)
    return found.group(1) if found else None


def _nvrtc() -> str | None:
    try:
        return nvrtc.version().split("-")[0]
    except UnsupportedError:
        return None


def best_precision(capability: tuple[int, int] | None) -> str:
    """The precision that training takes by itself: bf16 where the card has it, else fp32."""
    return "fp32" if capability is None or "bf16" in lacking(capability) else "bf16"


def doctor(preset: str = "hal-20m", *, precision: str | None = None) -> DoctorResult:
    """`ridgeline doctor`: what would run here, and what is known to go wrong.

    Args:
        preset: whose ops and shapes are asked about, or what else `find_config` takes.
        precision: of training; None for what training would take by itself.

    Raises:
        ConfigError, UnsupportedError: unknown preset, or no such precision here.
    """
    config = find_config(preset)
    reading = read_driver(torch.cuda.current_device() if torch.cuda.is_available() else 0)
    capability = None if reading is None else reading.capability
    chosen = best_precision(capability) if precision is None else precision
    if chosen not in PRECISIONS:
        raise UnsupportedError(nearest(chosen, PRECISIONS, "precision"))
    if reading is None and chosen == "tf32":
        raise UnsupportedError("the CPU has no tf32; use --precision fp32")
    if reading is not None and capability is not None and chosen in lacking(capability):
        have = " or ".join(p for p in ("bf16", "fp16", "fp32") if p not in lacking(capability))
        raise UnsupportedError(f"{reading.name} has no {chosen}; use --precision {have}")
    device = torch.device("cpu") if reading is None else torch.device("cuda", torch.cuda.current_device())
    dtype, T = _DTYPES[chosen], config.window.context
    found = versions(monitor(device))
    assembler, compiler = ptxas(), _nvrtc()
    found |= {name: value for name, value in (("ptxas", assembler), ("nvrtc", compiler)) if value is not None}
    answers = ask_sdpa(config.model.decoder, T, device, dtype)
    facts = Facts(
        torch=torch.__version__,
        cuda=torch.version.cuda,
        triton=found.get("triton"),
        ptxas=assembler,
        nvrtc=compiler,
        capability=capability,
        sdpa=answers,
        T=T,
        tool=shutil.which("nvidia-smi") is not None,
    )
    known = None if reading is None else by_driver_name(reading.name)
    measured = None if reading is None else load_ceilings(reading.name)
    return DoctorResult(
        preset=preset,
        precision=chosen,
        versions=found,
        card=None if known is None else known.key,
        driver=reading,
        ceilings=None if measured is None else measured.date,
        ops=tuple(choices_of(config.model, device, dtype, config.batch // config.accumulation, T)),
        sdpa=tuple(answers),
        findings=tuple(find(facts)),
    )
