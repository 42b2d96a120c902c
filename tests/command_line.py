"""Running the command line inside a test."""

import json

from ridgeline.cli import main

TINY = [
    *("--model.decoder.layers", "1", "--model.decoder.width", "16"),
    *("--model.decoder.heads", "2", "--model.decoder.context", "16"),
]
SHORT = ["--window.context", "16", "--batch", "4", "--eval-interval", "5", "--eval-windows", "8", "--device", "cpu"]


def run(capsys, *arguments):
    """Exit code, standard output and standard error of a command line."""
    capsys.readouterr()
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as leaving:
        code = leaving.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def last_json(output):
    return json.loads(output.splitlines()[-1])


def refused(capsys, *arguments):
    """The one sentence with which a command line is refused."""
    code, output, complaint = run(capsys, *arguments)
    assert code == 2
    assert output == ""
    lines = [line for line in complaint.splitlines() if line.strip()]
    assert len(lines) == 1
    assert lines[0].startswith("ridgeline: ")
    return lines[0].removeprefix("ridgeline: ")


def train_tiny(capsys, text, *more):
    return run(capsys, "train", "gpt2-c256", "--data", text, *TINY, *SHORT, *more)
