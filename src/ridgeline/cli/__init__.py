"""The command line: `ridgeline VERB …`. A verb's module, and with it PyTorch, is imported when the verb is used."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

import ridgeline
from ridgeline.cli.threads import configure_threads
from ridgeline.errors import RidgelineError, nearest

VERBS = {
    "data": "prepare a data set: a text, tinyshakespeare, the Python library, Boxing games",
    "train": "train a preset or a config; go on with a run",
    "sample": "continue a text with a trained language model",
    "play": "judge a trained policy by playing games",
    "explain": "say where a step's time must go on a card, and what would help",
    "doctor": "say what would run here and why, and what is known to go wrong",
    "demo": "train on the shipped Boxing games, then play 30 games",
}
INTERRUPTED = 130  # exit code after SIGINT, as shells have it
CUT_OFF = 141  # exit code after SIGPIPE, likewise
REFUSED = 2  # exit code of an error that the user can cure

USAGE = f"""\
usage: ridgeline VERB [...]

{ridgeline.__doc__}

{chr(10).join(f"  {verb:<9}{about}" for verb, about in VERBS.items())}

`ridgeline VERB --help` explains a verb. Every verb takes --json: the last line of its output is one JSON object.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code.

    Args:
        arguments: without the program's name; None for the process's own.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if arguments else REFUSED
    if arguments[0] == "--version":
        print(ridgeline.__version__)
        return 0
    verb, *rest = arguments
    if verb not in VERBS:
        return _refuse(nearest(verb, VERBS, "verb"))
    configure_threads()
    try:
        return _run(verb, rest)
    except RidgelineError as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # whoever read the output has read enough; Python must not flush it again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CUT_OFF


def _run(verb: str, arguments: list[str]) -> int:
    try:
        return importlib.import_module(f"ridgeline.cli.{verb}").run(arguments)
    finally:
        sys.stdout.flush()


def _refuse(reason: str) -> int:
    print(f"ridgeline: {reason}", file=sys.stderr)
    return REFUSED
