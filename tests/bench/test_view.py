"""The table of a record, and the sweeps that records are made for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ridgeline.bench.view import against, table
from ridgeline.bench.workloads import vary, workload
from ridgeline.errors import ConfigError
from ridgeline.records import ContenderResult, Record, WorkloadInfo

BASE = ContenderResult(name="compile+graph", tokens_per_s=4e6, windows_per_s=15e3, step_ms=2.0, spread=0.02, mfu=0.1,
                       bytes_per_s=1.18e12, bandwidth=0.246)  # fmt: skip


def record(*contenders: ContenderResult) -> Record:
    return Record(
        kind="bench",
        date="2026-12-01T00:00:00+00:00",
        git="0123456789abc",
        card="H200",
        gpus=1,
        versions={"torch": "2.11.0"},
        clocks={"during": {"sm_mhz": [1755, 1980], "power_w": [300.0, 690.0], "throttle": ["power cap"]}},
        workload=WorkloadInfo(name="gpt2-c256", batch=32, context=256, precision="bf16"),
        contenders=list(contenders),
    )


def test_a_ratio_is_taken_within_its_group_and_only_if_it_says_something():
    fast, noisy = replace(BASE, name="best", step_ms=1.0), replace(BASE, name="eager", step_ms=1.9, spread=0.2)
    other = replace(BASE, name="compile", group=1, step_ms=1.0)
    found = record(BASE, fast, noisy, other)
    assert against(fast, found) == "2.00×"
    assert against(noisy, found) == "≈"
    assert against(other, found) == ""  # it is alone in its group
    assert table(found).endswith("best against PyTorch's best: 1.90× over eager (group 0)")
    pair = record(replace(BASE, name="eager"), replace(BASE, name="compile", step_ms=1.0))
    assert against(pair.contenders[0], pair) == "0.50×"  # without compile+graph, over the fastest of PyTorch
    assert against(BASE, found) == ""


def test_the_table_shows_circumstances_and_failures():
    text = table(record(BASE, ContenderResult(name="best", error="UnsupportedError: no card")))
    assert "gpt2-c256  batch 32  context 256  bf16" in text
    assert "clock 1755–1980 MHz  power 300–690 W  throttled by: power cap" in text
    assert "UnsupportedError: no card" in text
    head, line, failed = text.splitlines()[3:6]
    assert head.split()[:8] == ["contender", "group", "ms", "±", "%", "tokens/s", "windows/s", "MFU"]
    assert "GiB" not in head  # nobody has one
    assert line.split() == ["compile+graph", "0", "2.000", "2.0", "4.00", "M", "15.0", "k", "10.0", "1.18", "24.6"]
    assert len(line) <= len(head) <= 80
    assert failed.split(maxsplit=2) == ["best", "0", "UnsupportedError: no card"]
    assert line.index(" 0 ") == failed.index(" 0 ")


def test_the_table_of_failures_alone():
    text = table(record(ContenderResult(name="best", error="UnsupportedError: no card")))
    assert text.splitlines()[3].split() == ["contender", "group"]
    assert text.endswith("UnsupportedError: no card")


def test_one_contender_is_compared_with_nobody():
    text = table(record(ContenderResult(name="eager", step_ms=2.0, spread=0.01)))
    assert "× ref" not in text
    assert text.splitlines()[3].split()[:3] == ["contender", "group", "ms"]


def test_each_line_says_its_cards_where_there_are_several_numbers():
    one, two = replace(BASE, gpus=1), replace(BASE, group=1, gpus=2, tokens_per_s=7.8e6)
    failed = ContenderResult(name="best", group=1, gpus=2, error="no card")
    head, *lines = table(replace(record(one, two, failed), gpus=2)).splitlines()[3:6]
    assert head.split()[:3] == ["contender", "group", "cards"]
    assert [line.split()[1:3] for line in lines] == [["0", "1"], ["1", "2"]]
    assert "cards" not in table(record(BASE))


def test_sweeps():
    case = workload("gpt2-c256")
    contexts = vary(case, "context=128:2048")
    assert [(c.batch, c.context) for c in contexts] == [(64, 128), (32, 256), (16, 512), (8, 1024), (4, 2048)]
    assert all(c.tokens == 8192 for c in contexts)
    assert [c.batch for c in vary(case, "batch=32:512")] == [32, 64, 128, 256, 512]
    assert [c.context for c in vary(case, "context=512")] == [512]


@pytest.mark.parametrize(
    "sweep", ["width=1:2", "context", "context=a:b", "context=512:128", "context=0:4", "context=8192:16384"]
)
def test_sweeps_that_cannot_be(sweep):
    with pytest.raises(ConfigError):
        vary(workload("gpt2-c256"), sweep)
