"""The page as a browser shows it: whole, quiet, alone, and no wider than a phone."""

from __future__ import annotations

import re

import pytest

from report import browser as chromium
from report import samples
from ridgeline.report.page import chapters

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium.find() is None, reason="there is no Chromium here (Debian: apt-get install chromium)"),
]
PHONE, DESK = 390, 1280
# for every figure: its heading, whether a drawing of it can be seen, how wide that is, and how many marks it has
FIGURES = """[...document.querySelectorAll('.card')].filter(card => card.querySelector('figure')).map(card => {
  const seen = [...card.querySelectorAll('figure svg')].filter(svg => svg.getBoundingClientRect().width > 0);
  return {title: card.querySelector('h3').textContent, seen: seen.length,
          width: seen.length ? seen[0].getBoundingClientRect().width : 0,
          marks: seen.length ? seen[0].querySelectorAll('path,use').length : 0,
          table: card.querySelectorAll('table tbody tr').length};
})"""


@pytest.fixture(scope="module")
def browser():
    with chromium.browser() as opened:
        yield opened


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [PHONE, DESK])
def test_every_figure_is_there_and_nothing_goes_wrong(browser, page, width, dark):
    browser.open(page, width=width, dark=dark)
    browser.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true })")
    drawn = [s for chapter in chapters(samples.everything()) for s in chapter.sections if s.chart is not None]
    figures = browser.evaluate(FIGURES)
    assert [figure["title"] for figure in figures] == [section.title for section in drawn]
    for figure in figures:
        assert figure["seen"] == 1, figure  # the wide drawing or the narrow one
        assert figure["width"] > 0.75 * min(width, 700), figure
        assert figure["marks"] > 5, figure
        assert figure["table"] > 0, figure
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    assert browser.complaints() == []
    assert browser.requests() == [page.resolve().as_uri()]


def test_letters_in_drawings_can_be_read_on_a_phone(browser, page):
    browser.open(page, width=PHONE)
    sizes = browser.evaluate(
        "[...document.querySelectorAll('.card .narrow svg')].filter(s => s.getBoundingClientRect().width).map(s => "
        "[...s.querySelectorAll('text')].map(t => parseFloat(getComputedStyle(t).fontSize) * "
        "s.getBoundingClientRect().width / s.viewBox.baseVal.width))"
    )
    assert min(size for drawing in sizes for size in drawing) > 9


def _luminance(colour: str) -> float:
    parts = [int(value) / 255 for value in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("dark", [False, True])
def test_words_stand_out_from_their_ground(browser, page, dark):
    browser.open(page, width=DESK, dark=dark)
    ground = _luminance(browser.evaluate("getComputedStyle(document.querySelector('.card')).backgroundColor"))
    assert (ground < 0.2) == dark
    for selector, attribute in (("h3", "color"), (".lead", "color"), ("figure text", "fill"), (".card a", "color")):
        found = browser.evaluate(
            f"getComputedStyle(document.querySelector('.card {selector}, {selector}')).{attribute}"
        )
        light, deep = sorted((ground, _luminance(found)), reverse=True)
        assert (light + 0.05) / (deep + 0.05) > 4.5, (selector, found)
    browser.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true })")
    fills = browser.evaluate(
        "[...new Set([...document.querySelectorAll('figure text')].map(t => getComputedStyle(t).fill))]"
    )
    for fill in fills:
        light, deep = sorted((ground, _luminance(fill)), reverse=True)
        assert (light + 0.05) / (deep + 0.05) > 4.5, fill


def test_a_folded_chapter_opens(browser, page):
    browser.open(page, width=DESK)
    assert browser.evaluate("[...document.querySelectorAll('details.chapter')].every(d => !d.open)")
    click = "d.querySelector('summary').click()"
    assert browser.evaluate(
        f"(() => {{ const d = document.querySelector('details.chapter'); {click}; return d.open }})()"
    )
