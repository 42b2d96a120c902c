"""Records: round trip, and everything that must be refused."""

from __future__ import annotations

import copy
import json

import pytest

from ridgeline.records import (
    SCHEMA,
    ContenderResult,
    OpResult,
    Record,
    RecordError,
    WorkloadInfo,
    checksum,
    from_json,
    read_record,
    to_json,
    write_record,
)

READING = {"sm_mhz": 345, "memory_mhz": 3201, "power_w": 80.5, "temperature_c": None, "throttle": ["idle"]}


def record(**changes) -> Record:
    values = {
        "kind": "bench",
        "date": "2026-11-29T16:55:00+00:00",
        "git": "abc",
        "card": "card",
        "gpus": 1,
        "versions": {"torch": "2.11.0"},
        "clocks": {"before": READING, "during": None, "after": READING},
        "workload": WorkloadInfo(name="hal-20m", batch=512, context=256, precision="bf16"),
        "contenders": [
            ContenderResult(
                name="eager", tokens_per_s=1e6, step_ms=131.0, spread=0.01, mfu=0.3, phases_ms={"forward": 40.0}
            ),
            ContenderResult(name="best", group=1, error="no kernel"),
        ],
        "ops": [OpResult(name="norm", shape="131072×512", impl="triton", us=70.0, floor_share=0.9)],
        "curves": [{"name": "loss", "y": [1.0, 2.0]}],
    }
    return Record(**{**values, **changes})


def test_round_trip(tmp_path):
    file = write_record(record(), tmp_path / "card" / "a.json")
    assert read_record(file) == record()
    assert [f.name for f in file.parent.iterdir()] == ["a.json"]
    values = json.loads(file.read_text())
    assert {"schema", "kind", "date", "git", "card", "gpus", "versions", "clocks", "workload", "contenders", "ops",
            "curves"} <= values.keys()  # fmt: skip
    assert values["contenders"][1]["tokens_per_s"] is None


@pytest.mark.parametrize(
    ("clocks", "words"),
    [
        ({}, "record.clocks must have before, during and after, got nothing"),
        ({"before": READING, "after": READING}, "got before, after"),
        ({"before": None, "during": None, "after": READING}, "clocks.before must hold sm_mhz"),
        ({"before": READING, "during": [1, 2], "after": READING}, r"clocks.during must hold .* got \[1, 2\]"),
        ({"before": READING, "during": {"sm_mhz": [1, 2]}, "after": READING}, "clocks.during must hold sm_mhz"),
        ({"before": READING, "during": READING, "after": READING}, "during.sm_mhz must be the lowest and the highest"),
        ({"before": {**READING, "sm_mhz": "fast"}, "during": None, "after": READING}, "must be a number, got 'fast'"),
        ({"before": {**READING, "throttle": "idle"}, "during": None, "after": READING}, "must be a list of reasons"),
        ({"before": {**READING, "power_w": -1.0}, "during": None, "after": READING}, r"power_w\[0\] is -1.0"),
    ],
)
def test_clocks_are_what_a_report_reads(clocks, words):
    with pytest.raises(RecordError, match=words):
        to_json(record(clocks=clocks))


def test_a_contender_is_once_in_a_group():
    twice = [ContenderResult(name="best", step_ms=1.0), ContenderResult(name="best", step_ms=2.0)]
    with pytest.raises(RecordError, match=r"contenders\[1\] is a second best in group 0"):
        to_json(record(contenders=twice))
    to_json(record(contenders=[twice[0], ContenderResult(name="best", group=1, step_ms=2.0)]))


def test_an_edited_file_is_refused(tmp_path):
    file = write_record(record(), tmp_path / "a.json")
    values = json.loads(file.read_text())
    values["contenders"][0]["tokens_per_s"] = 2e6
    file.write_text(json.dumps(values))
    with pytest.raises(RecordError, match="changed after it was written"):
        read_record(file)


def test_a_later_schema_is_refused(tmp_path):
    values = to_json(record())
    values["schema"] = SCHEMA + 1
    values["new"] = 1
    file = tmp_path / "a.json"
    file.write_text(json.dumps({**values, "checksum": checksum(values)}))
    with pytest.raises(RecordError, match="update ridgeline"):
        read_record(file)


def first(values: dict) -> dict:
    """The same record as schema 1 had it."""
    contenders = [
        {k: v for k, v in c.items() if k not in ("bytes_per_s", "bandwidth", "gpus")} for c in values["contenders"]
    ]
    return {**values, "schema": 1, "contenders": contenders}


def test_a_record_of_the_first_schema_is_read(tmp_path):
    values, file = first(to_json(record())), tmp_path / "a.json"
    sealed = {**values, "checksum": checksum(values)}
    file.write_text(json.dumps(sealed))
    assert read_record(file) == record()
    file.write_text(json.dumps({**sealed, "gpus": 2}))
    with pytest.raises(RecordError, match="changed after it was written"):
        read_record(file)
    values["contenders"][1]["bandwidth"] = 0.4
    with pytest.raises(RecordError, match=r"contenders\[1\] differs from schema 1 in its keys: bandwidth"):
        from_json(values)


def test_a_record_from_before_contenders_had_cards_of_their_own_is_read(tmp_path):
    values, file = to_json(record()), tmp_path / "a.json"
    for contender in values["contenders"]:
        del contender["gpus"]
    file.write_text(json.dumps({**values, "checksum": checksum(values)}))
    assert read_record(file) == record()
    file.write_text(json.dumps({**to_json(record()), "checksum": checksum(values)}))
    with pytest.raises(RecordError, match="changed after it was written"):
        read_record(file)
    old = first(values)
    old["contenders"][0]["gpus"] = 1
    with pytest.raises(RecordError, match=r"contenders\[0\] differs from schema 1 in its keys: gpus"):
        from_json(old)


def test_parts_hold_one_number_of_cards_each():
    assert record().parts() == [record()]
    made = record(
        gpus=2,
        contenders=[
            ContenderResult(name="best", group=1, step_ms=2.1),
            ContenderResult(name="best", gpus=1, step_ms=2.0),
            ContenderResult(name="eager", gpus=1, error="no"),
        ],
    )
    one, two = made.parts()
    assert (one.gpus, [c.name for c in one.contenders]) == (1, ["best", "eager"])
    assert (two.gpus, [c.step_ms for c in two.contenders]) == (2, [2.1])
    assert (one.parts(), two.parts()) == ([one], [two])
    begun = record(gpus=2, contenders=made.contenders[1:])  # before the second number was measured
    assert [part.gpus for part in begun.parts()] == [1]
    from_json(to_json(made))


@pytest.mark.parametrize(
    ("group", "gpus", "message"),
    [(1, 0, "from 1 to the record's 2"), (1, 3, "from 1 to the record's 2"), (0, 1, "one number of cards")],
)
def test_cards_that_cannot_be(group, gpus, message):
    results = [ContenderResult(name="best", gpus=2), ContenderResult(name="eager", group=group, gpus=gpus)]
    with pytest.raises(RecordError, match=message):
        to_json(record(gpus=2, contenders=results))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"checksum": "x"}', '{"kind": "bench", "checksum": ""}', "{"])
def test_foreign_files_are_refused(tmp_path, text):
    file = tmp_path / "a.json"
    file.write_text(text)
    with pytest.raises(RecordError, match=r"a\.json"):
        read_record(file)


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(RecordError, match="cannot be read"):
        read_record(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("contenders", 0, "mfu"), 1.04, "above 1"),
        (("contenders", 0, "bandwidth"), 1.04, "above 1"),
        (("contenders", 0, "tokens_per_s"), 0.0, "leave it null"),
        (("contenders", 0, "step_ms"), -1.0, "0 or more"),
        (("contenders", 0, "spread"), float("nan"), "finite"),
        (("contenders", 0, "spread"), 10**400, "is too large"),
        (("contenders", 0, "phases_ms", "forward"), "40", r"phases_ms\.forward must be a number, got '40'"),
        (("contenders", 0, "phases_ms", "forward"), -1, "0 or more"),
        (("contenders", 0, "name"), 3, "must be str"),
        (("contenders", 0, "group"), True, "must be int"),
        (("ops", 0, "floor_share"), 1.5, "above 1"),
        (("workload", "batch"), 0, "leave it null"),
        (("curves",), [1.5], r"record\.curves must hold objects alone"),
        (("workload", "batch"), "512", "must be int"),
        (("kind",), "poem", "must be one of"),
        (("date",), "yesterday", "ISO 8601"),
        (("date",), "2026-11-29T16:55:00", "time zone"),
        (("gpus",), -1, "0 or more"),
        (("versions", "torch"), 2, "hold strings"),
        (("schema",), "1", "whole number from 1 on"),
        (("schema",), 0, "whole number from 1 on"),
    ],
)
def test_values_that_cannot_be(path, value, message):
    values = copy.deepcopy(to_json(record()))
    place = values
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(RecordError, match=message):
        from_json(values)


@pytest.mark.parametrize("change", ["drop", "add"])
def test_keys_are_exactly_the_schemas(change):
    values = to_json(record())
    if change == "drop":
        del values["contenders"][0]["error"]
    else:
        values["contenders"][0]["colour"] = "red"
    with pytest.raises(RecordError, match=r"contenders\[0\] differs from the schema in its keys: (error|colour)"):
        from_json(values)


def test_a_wrong_record_is_not_written(tmp_path):
    bad = record(contenders=[ContenderResult(name="eager", mfu=1.2)])
    with pytest.raises(RecordError, match="above 1"):
        write_record(bad, tmp_path / "a.json")
    assert not list(tmp_path.iterdir())
