"""The command line: `ridgeline VERB …`. A verb's module, and with it PyTorch, is imported when the verb is used."""

from __future__ import annotations

import errno
import importlib
import io
import os
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType, ModuleType

import ridgeline
from ridgeline.cli.threads import configure_threads
from ridgeline.errors import RidgelineError, nearest

VERBS = {
    "data": "prepare a data set: a text, tinyshakespeare, the Python library, Boxing games, Melee replays",
    "train": "train a preset or a config; go on with a run",
    "sample": "continue a text with a trained language model",
    "play": "judge a trained policy by playing games",
    "explain": "say where a step's time must go on a card, and what would help",
    "doctor": "say what would run here and why, and what is known to go wrong",
    "bench": "measure ways to train a workload against each other, and write a record",
    "report": "draw records into one page: ladders, phases, sweeps, rooflines, losses, strength",
    "study": "answer by many runs: race, compare, search, inversion",
    "demo": "train on the shipped Boxing games, then play 30 games",
}
FLAGS = ("--help", "--version")
INTERRUPTED = 130  # exit code after SIGINT, as shells have it
CUT_OFF = 141  # exit code after SIGPIPE, likewise
REFUSED = 2  # exit code of an error that the user can cure

USAGE = f"""\
usage: ridgeline VERB [...]

{(ridgeline.__doc__ or "").splitlines()[0]}

{chr(10).join(f"  {verb:<9}{about}" for verb, about in VERBS.items())}

`ridgeline VERB --help` explains a verb. Every verb takes --json: the last line of its output is one JSON object.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code.

    Args:
        arguments: without the program's name; None for the process's own.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever called
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    _write_what_can_be_written()
    try:
        return _answer(arguments)
    except BrokenPipeError:  # whoever read the output has read enough
        _drop_output()
        return CUT_OFF
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        _drop_output()
        return _refuse("there is no space left where the output goes; free space or send it elsewhere")


def _write_what_can_be_written() -> None:
    """Let an output that is not UTF-8 show "?" for a sign that it lacks, such as × or ≥, and not end the verb."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def _answer(arguments: list[str]) -> int:
    try:
        return _dispatch(arguments)
    finally:
        sys.stdout.flush()


def _drop_output() -> None:
    """Let go of output that cannot be written, which Python would try to flush again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if arguments else REFUSED
    if arguments[0] == "--version":
        print(ridgeline.__version__)
        return 0
    verb, *rest = arguments
    if verb not in VERBS:
        return _refuse(nearest(verb, FLAGS, "option") if verb.startswith("-") else nearest(verb, VERBS, "verb"))
    odd = next((word for word in rest if not _is_text(word)), None)
    if odd is not None:
        return _refuse(f"the argument {odd!r} is not UTF-8; write it in UTF-8")
    configure_threads()
    try:
        return int(_module(verb).run(rest))
    except RidgelineError as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _module(verb: str) -> ModuleType:
    """A verb's module. Ctrl-C ends the process at once meanwhile: nothing has begun, and PyTorch, interrupted while it
    is imported, raises errors of its own."""
    unhandled = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    if unhandled or threading.current_thread() is not threading.main_thread():
        return importlib.import_module(f"ridgeline.cli.{verb}")
    before = signal.signal(signal.SIGINT, _leave)
    try:
        return importlib.import_module(f"ridgeline.cli.{verb}")
    finally:
        signal.signal(signal.SIGINT, before)


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


def _is_text(word: str) -> bool:
    """Whether an argument is UTF-8; Python hands other bytes over as lone surrogates."""
    try:
        word.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _refuse(reason: str) -> int:
    print(f"ridgeline: {reason}", file=sys.stderr)
    return REFUSED
