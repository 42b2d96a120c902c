"""Matplotlib drawings as inline SVG that follows the page's theme, and as PNG."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ridgeline.errors import require
from ridgeline.report.palette import LIGHT, PAGE, Palette, themed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Chart = Callable[[Palette, bool], "Figure"]
"""Draws itself in a palette, narrow or wide."""

WIDE_IN, NARROW_IN = 7.4, 3.7  # a phone gets a drawing of its own, with letters that it can read
PNG_DPI = 200
STYLE = {
    "svg.fonttype": "none",  # text stays text: it can be searched, and takes the page's font
    "text.parse_math": False,  # names are no formulas, whatever is in them
    "font.size": 8.5,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
}


def new_figure(height: float, *, narrow: bool) -> Figure:
    """An empty figure of the page's width, `height` inches high; pyplot's global state is not touched."""
    from matplotlib.figure import Figure

    return Figure(figsize=(NARROW_IN if narrow else WIDE_IN, height), layout="constrained")


def inline_svg(chart: Chart, name: str, title: str, *, narrow: bool) -> str:
    """The chart as an SVG element whose ids begin with `name` and whose colours are the page's variables.

    Raises:
        MissingExtraError: Matplotlib is not installed.
    """
    matplotlib = require("matplotlib", "report")
    out = io.StringIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        chart(PAGE, narrow).savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    opening, rest = text.split(">", 1)
    opening = re.sub(r' (width|height|version|xmlns(:xlink)?)="[^"]*"', "", opening)
    label = html.escape(title, quote=True)
    text = f'{opening} xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{label}">{rest}'
    text = text.replace("xlink:href=", "href=")
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'href="#', f'href="#{name}-', text)
    text = re.sub(r"url\(#", f"url(#{name}-", text)
    text = re.sub(r"font: (?:bold |700 )?([\d.]+px) [^;\"]*", r"font-size: \1", text)  # the page's own font
    return themed(text)


def write_png(chart: Chart, file: Path) -> Path:
    """The chart in light colours on white, as wide as a README.

    Raises:
        MissingExtraError: Matplotlib is not installed.
    """
    matplotlib = require("matplotlib", "report")
    file.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        chart(LIGHT, False).savefig(file, format="png", dpi=PNG_DPI, facecolor="white", metadata={"Software": None})
    return file
