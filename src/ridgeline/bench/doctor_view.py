"""`doctor` for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ridgeline.bench.doctor import DoctorResult
from ridgeline.hardware.spec import GIB, MIB


def _circumstances(result: DoctorResult) -> list[str]:
    lines = ["versions  " + ", ".join(f"{name} {version}" for name, version in result.versions.items())]
    card = result.driver
    if card is None:
        return [*lines, "card      none that PyTorch can use: training runs on the CPU"]
    clocks = "" if card.sm_clock_mhz is None else f", {card.sm_clock_mhz:.0f} of {card.sm_clock_max_mhz:.0f} MHz"
    power = "" if card.power_limit_w is None else f", at most {card.power_limit_w:.0f} W"
    lines.append(
        f"card      {card.name}, compute capability {card.capability[0]}.{card.capability[1]}, {card.sm_count} "
        f"multiprocessors, {card.memory_bytes / GIB:.1f} GiB, L2 {card.l2_bytes / MIB:.0f} MiB, shared memory "
        f"{card.shared_per_block // 1024} KiB a block{clocks}{power}"
    )
    known = "not in the table of cards" if result.card is None else f"{result.card} in the table of cards"
    measured = "never measured here" if result.ceilings is None else f"ceilings measured {result.ceilings}"
    return [*lines, f"          {known}; {measured}"]


def _by_reason(others: Mapping[str, str], numbers: Mapping[str, int]) -> str:
    """What cannot be used, those with the same reason together: a line each, but numbered ones, all in the first."""
    named: dict[str, list[str]] = {}
    for name, reason in others.items():
        named.setdefault(reason, []).append(name)
    short = [f"{', '.join(names)} ({numbers[reason]})" for reason, names in named.items() if reason in numbers]
    lines = [f"{', '.join(names)}: {reason}" for reason, names in named.items() if reason not in numbers]
    return "\n".join([*(["; ".join(short)] if short else []), *lines])


def _often(result: DoctorResult) -> dict[str, int]:
    """The reasons that are told of several ops, numbered: told once."""
    rows = Counter(reason for choice in result.ops for reason in set(choice.others.values()))
    reasons = dict.fromkeys(reason for choice in result.ops for reason in choice.others.values())
    return {reason: number for number, reason in enumerate((r for r in reasons if rows[r] > 1), 1)}


def _ops(result: DoctorResult) -> Table:
    numbers = _often(result)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left", caption_justify="left")
    table.title = f"ops of {result.preset} in {result.precision}"
    table.caption = "".join(f"({number}) {reason}\n" for reason, number in numbers.items())
    for header in ("op", "uses", "and not"):
        table.add_column(header, overflow="fold")
    for choice in result.ops:
        table.add_row(choice.op, choice.uses, _by_reason(choice.others, numbers))
    return table


def _sdpa(result: DoctorResult) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="attention through PyTorch", title_justify="left")
    for header in ("call", "backend", "scores in memory", "and not"):
        table.add_column(header, overflow="fold")
    for answer in result.sdpa:
        held = f"{answer.score_bytes / MIB:.2f} MiB a window and layer" if answer.score_bytes else "no"
        table.add_row(answer.call, answer.backend, held, _by_reason(answer.others, {}))
    return table


def render_doctor(result: DoctorResult) -> RenderableType:
    """The whole report for a terminal."""
    shown: list[RenderableType] = [*(Text(line) for line in _circumstances(result)), _ops(result), _sdpa(result)]
    if not result.findings:
        shown.append(Text("no known bad combination", style="bold"))
    for finding in result.findings:
        style = "bold red" if finding.severity == "bad" else "bold yellow"
        shown.append(Text(f"{finding.severity}: {finding.name}", style=style))
        shown.append(Text(f"  {finding.detail}\n  cure: {finding.cure}"))
    return Group(*shown)
