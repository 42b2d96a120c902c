"""`ridgeline study`: a study's own module is imported when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from ridgeline.cli.output import HELP
from ridgeline.errors import ConfigError, nearest

STUDIES = {  # name → module with run(arguments), what it answers
    "race": ("ridgeline.cli.study_race", "which contender plays well soonest: strength over training time"),
    "compare": ("ridgeline.cli.study_compare", "which model learns more: one recipe, tuned alike, several seeds"),
    "search": ("ridgeline.cli.study_search", "which sizes and settings reach a target soonest on this machine"),
    "inversion": ("ridgeline.cli.study_inversion", "is one model eagerly faster than another compiled"),
}

USAGE = f"""\
usage: ridgeline study STUDY [...]

{chr(10).join(f"  {name:<10}{about}" for name, (_, about) in STUDIES.items())}

`ridgeline study STUDY --help` explains one; --json prints its result as one JSON object.
"""


def run(arguments: Sequence[str]) -> int:
    """Hand over to the study that is named first."""
    if not arguments:
        raise ConfigError(f"name a study first: ridgeline study {'|'.join(STUDIES)}")
    name, *rest = arguments
    if name in HELP:
        print(USAGE, end="")
        return 0
    if name not in STUDIES:
        raise ConfigError(nearest(name, STUDIES, "study"))
    return importlib.import_module(STUDIES[name][0]).run(rest)
