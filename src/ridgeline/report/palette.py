"""Colours by role. An inline SVG takes them from the page, so that one drawing serves light and dark."""

from __future__ import annotations

from collections.abc import Mapping

ROLES = ("ink", "muted", "grid", "ours", "rung", "pytorch", "peer", "article", "forward", "backward", "optimizer",
         "line0", "line1", "line2", "line3", "line4", "line5")  # fmt: skip

Palette = Mapping[str, str]

LIGHT: Palette = {
    "ink": "#1c2127", "muted": "#5c6670", "grid": "#dfe3e8", "ours": "#c2540a", "rung": "#2f6fbd",
    "pytorch": "#8b95a1", "peer": "#7a5ea8", "article": "#9a7b1f", "forward": "#27877f", "backward": "#7a5ea8",
    "optimizer": "#b08a1e", "line0": "#c2540a", "line1": "#2f6fbd", "line2": "#3d8a5f", "line3": "#7a5ea8",
    "line4": "#9a7b1f", "line5": "#5c6670",
}  # fmt: skip
DARK: Palette = {
    "ink": "#e7eaee", "muted": "#a3adb8", "grid": "#30363d", "ours": "#f59a4f", "rung": "#6ea6ee",
    "pytorch": "#7d8894", "peer": "#b59be0", "article": "#d6b75a", "forward": "#55b8ae", "backward": "#b59be0",
    "optimizer": "#d6b75a", "line0": "#f59a4f", "line1": "#6ea6ee", "line2": "#62b98a", "line3": "#b59be0",
    "line4": "#d6b75a", "line5": "#a3adb8",
}  # fmt: skip
PAGE: Palette = {role: f"#fe{index:02x}fd" for index, role in enumerate(ROLES)}
"""Colours that occur in no drawing otherwise; `themed` replaces them by the page's variables."""


def themed(svg: str) -> str:
    """A drawing in PAGE's colours as one that takes its colours from the page around it."""
    for role, colour in PAGE.items():
        svg = svg.replace(colour, f"var(--{role})")
    return svg


def variables(palette: Palette) -> str:
    """The palette as CSS."""
    return "".join(f"--{role}:{colour};" for role, colour in palette.items())
