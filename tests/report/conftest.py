"""The page that records become, drawn once."""

from __future__ import annotations

from pathlib import Path

import pytest

from report import samples


@pytest.fixture(scope="session")
def page(tmp_path_factory) -> Path:
    from ridgeline.report.page import build_page

    file = tmp_path_factory.mktemp("report") / "report.html"
    file.write_text(build_page(samples.everything()), encoding="utf-8")
    return file
