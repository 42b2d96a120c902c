"""The page as a file: complete in itself, safe, and written by the verb."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from report import samples
from ridgeline.cli import main
from ridgeline.records import write_record
from ridgeline.report.page import CONTENTS, build_page, chapters, write_images
from ridgeline.report.palette import PAGE


class Reader(HTMLParser):
    """Every element's id, every link into the page, every address, and elements left open."""

    VOID = {"meta", "link", "br", "img"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.addresses: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        if "id" in values:
            self.ids.append(values["id"])
        for name in ("href", "src", "srcset", "xlink:href", "data"):
            if name in values:
                (self.links if values[name].startswith("#") else self.addresses).append(values[name])
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_needs_nothing_else(page):
    text = page.read_text(encoding="utf-8")
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    assert len(reader.ids) == len(set(reader.ids))
    assert {link[1:] for link in reader.links} <= set(reader.ids)
    assert reader.addresses == ["data:,"]
    assert "@import" not in text
    assert set(re.findall(r"https?://[^\s\"'<]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"url\((?!#)", text)
    assert "<script" not in text


def test_drawings_take_their_colours_from_the_page(page):
    text = page.read_text(encoding="utf-8")
    assert not [colour for colour in PAGE.values() if colour in text]
    assert {"var(--ink)", "var(--ours)", "var(--article)", "var(--backward)"} <= set(re.findall(r"var\(--\w+\)", text))
    drawings = "".join(re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL))
    # none but the one of clip paths, which is not painted
    assert set(re.findall(r"(?:fill|stroke): (#\w+)", drawings)) <= {"#ffffff", "#000000"}


def test_words_of_a_record_are_words_and_no_markup():
    nasty = replace(samples.smaller(), card='<img src=x onerror="alert(1)">')
    failed = replace(nasty.contenders[2], name="<b>eager</b>", error="<script>alert(1)</script>", step_ms=None)
    text = build_page([replace(nasty, contenders=[*nasty.contenders[:2], failed])])
    assert "<script" not in text
    assert "<img" not in text
    assert "<b>" not in text
    assert "&lt;script&gt;" in text


def test_the_same_records_give_the_same_page():
    records = [samples.smaller()]
    assert build_page(records) == build_page(records)


def test_a_long_list_of_contents_is_closed_and_equal_titles_are_told_apart():
    assert "<details open><summary>Contents" in build_page([samples.smaller()])
    page = build_page([samples.smaller()] * (CONTENTS + 1))
    assert "<details><summary>Contents" in page
    titles = re.findall(r'<li><a href="#chapter-\d+">(.*?)</a>', page)
    assert len(set(titles)) == len(titles) > CONTENTS
    assert "hal-5m, batch 512 × 128, bf16, 2026-11-29, record 2" in titles
    newer = replace(samples.smaller(), date="2026-12-24T00:00:00+00:00")
    told = [chapter.title for chapter in chapters([samples.smaller(), newer])]
    assert told == [f"hal-5m, batch 512 × 128, bf16, {day}" for day in ("2026-11-29", "2026-12-24")]


def test_a_long_name_leaves_room_for_what_stands_beside_it():
    name = "gpt2-c256+optimizer.lr=3e-4+optimizer.floor=3e-4"
    page = build_page([replace(samples.smaller(), contenders=[samples.result(name, 3.0, 512, 128)])])
    parts = "".join(f"<span>{part}</span>" for part in ("gpt2-c256", "+optimizer.lr=3e-4", "+optimizer.floor=3e-4"))
    assert f'<td class=" long">{parts}</td>' in page
    assert 'long">hal-5m' not in page


def test_images(tmp_path):
    files = write_images([samples.smaller()], tmp_path / "png")
    assert [file.name for file in files] == ["speed-0.png", "phases-0.png", "layers-0.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


def test_the_verb_reads_files_and_folders(tmp_path, capsys):
    write_record(samples.smaller(), tmp_path / "card" / "a.json")
    one = write_record(samples.race(), tmp_path / "b.json")
    out = tmp_path / "out" / "report.html"
    assert main(["report", str(tmp_path / "card"), str(one), "-o", str(out), "--json"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said == {"report": str(out), "records": 2, "bytes": out.stat().st_size, "images": []}
    assert "Strength: boxing" in out.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"date": "2026-11-30T00:00:00+00:00"}, "was changed after it was written"),
        ({"schema": 99}, "update ridgeline"),
    ],
)
def test_a_record_that_was_edited_or_is_of_another_version_is_refused(tmp_path, capsys, change, words):
    file = write_record(samples.smaller(), tmp_path / "a.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    assert main(["report", str(file), "-o", str(tmp_path / "r.html")]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "r.html").exists()


def test_a_page_takes_the_place_of_a_page_alone(tmp_path, capsys):
    file = write_record(samples.smaller(), tmp_path / "a.json")
    before, out = file.read_bytes(), tmp_path / "r.html"
    assert main(["report", str(file), "-o", str(file)]) == 2
    assert "a.json is there already and is no page; choose another -o" in capsys.readouterr().err
    assert file.read_bytes() == before
    out.touch()
    for _ in range(2):  # over an empty file, and over a page
        assert main(["report", str(file), "-o", str(out)]) == 0


def test_no_records_is_an_error(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "holds no records" in capsys.readouterr().err
    assert main(["report"]) == 2
    assert main(["report", str(tmp_path / "none.json")]) == 2


def test_without_the_extra_the_cure_is_named(tmp_path, capsys, monkeypatch):
    write_record(samples.smaller(), tmp_path / "a.json")
    for missing in ("matplotlib", "jinja2"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, missing, None)
            assert main(["report", str(tmp_path), "-o", str(tmp_path / "r.html")]) == 2
        assert f"{missing} is not installed" in (said := capsys.readouterr().err)
        assert ".[report]" in said


def test_drawing_is_imported_when_something_is_drawn():
    code = "import sys, ridgeline.report.page, ridgeline.cli.report; print({'matplotlib', 'jinja2'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"
