"""`ridgeline study race` on the command line: its output, and mistakes told before anything is trained."""

import json
from pathlib import Path

import pytest

from command_line import last_json, refused, run
from ridgeline.games.boxing import archive
from ridgeline.records import read_record
from study.race_helpers import SMALL


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    shortest = sorted(archive.load(archive.SHIPPED), key=lambda game: len(game.labels))[:3]
    monkeypatch.setattr(archive, "SHIPPED", archive.save(tmp_path / "few.xz", shortest))


def test_a_race_prints_what_its_record_holds(capsys):
    line = ["study", "race", SMALL, "--minutes", 0.01, "--games", 1, "--processes", 1, "--device", "cpu", "--json"]
    code, output, complaint = run(capsys, *line)
    assert code == 0, complaint
    result = last_json(output)
    assert list(result) == ["folder", "record", "contenders", "crossings", "failures"]
    assert result["folder"] == "runs/race"
    (standing,) = result["contenders"][SMALL]
    assert (standing["at"], standing["games"], standing["samples"]) == (0.6, 1, 8 * standing["steps"])
    record = read_record(result["record"])
    assert record.kind == "race"
    assert [row["points"] for row in record.curves if row["figure"] == "race"] == [[standing]]
    assert "at 0.6 s" in complaint
    code, output, complaint = run(capsys, *line[:-1], "--out", "runs/race")  # nothing is left to do
    assert code == 0, complaint
    said = " ".join(output.split())
    for crossing in result["crossings"]:  # how good so few steps are depends on how many this machine takes
        when = "never" if crossing["seconds"] is None else f"from second {crossing['seconds']:.0f}"
        assert f"reaches {crossing['target']} {when}" in said
    assert list(json.loads(Path("runs/race/race.json").read_text())["contenders"]) == [SMALL]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("", "name a study first: ridgeline study race|"),
        ("rac", "unknown study 'rac'; did you mean race"),
        ("race", "CONTENDERS is missing"),
        ("race boxin", "unknown preset 'boxin'; did you mean boxing"),
        ("race boxing:bst", "unknown engine 'bst'"),
        ("race boxing --games 0", "games must be at least 1, got 0"),
        ("race boxing --level 9", "boxing has the levels 0, 1, 2, 3, got 9"),
        ("race boxing --temperature -1", "temperature must be 0 or more and finite, got -1.0"),
        ("race boxing --minutes 0", "minutes must be positive and finite, got 0.0"),
        ("race boxing --grid 3 -5", "times of the grid must be positive seconds of training, got -5"),
        ("race boxing --processes 0", "processes must be at least 1, got 0"),
        ("race boxing --cache none --play-device tpu", "unknown device 'tpu'; use cpu, cuda or cuda:N"),
        ("race boxing --cache all", "unknown cache 'all'"),
        ("race boxing+positions=learned --cache rolling", "learned positions end with the context"),
        ("race boxing --data few.xz.txt", "there is no file or folder few.xz.txt"),
        ("race boxing --data words.txt", "words.txt is a text, and a race is judged by games; give games to --data"),
        ("race boxing --out words.txt", "words.txt exists and holds no race; choose another --out"),
    ],
)
def test_mistakes_are_told_before_anything_is_trained(capsys, tmp_path, line, sentence):
    (tmp_path / "words.txt").write_text("the cat sat on the mat " * 50)
    assert sentence in refused(capsys, "study", *line.split())
    assert not (tmp_path / "runs").exists()
