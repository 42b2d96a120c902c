"""Mistakes on the command line: one sentence each, that names what to change."""

import errno
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from command_line import SHORT, TINY, refused, run, train_tiny
from ridgeline.cli import VERBS, main
from ridgeline.cli.mistakes import find_mistake
from ridgeline.cli.study import STUDIES
from ridgeline.cli.train import FIXED
from ridgeline.presets import PRESETS


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "words.txt"
    file.write_text("the cat sat on the mat and the rat ran at the cat; " * 60)
    return str(file)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("train boxing --steps abc", "--steps must be a whole number, got 'abc'"),
        ("train boxing --steps=1.5", "--steps must be a whole number, got '1.5'"),
        ("train boxing --minutes soon", "--minutes must be a number, got 'soon'"),
        ("train boxing --steps", "--steps needs a whole number after it, got nothing"),
        ("train boxing --steps --json", "--steps needs a whole number after it, got nothing"),
        ("train boxing --optimizer.betas 0.9", "--optimizer.betas needs 2 values after it, got 0.9"),
        ("train boxing --optimizer.betas 0.9 x", "--optimizer.betas must be a number, got 'x'"),
        ("train boxing --model.decoder.norm foo", "--model.decoder.norm must be layernorm or rmsnorm, got 'foo'"),
        ("train boxing --model.decoder.kv-heads x", "--model.decoder.kv-heads must be a whole number, got 'x'"),
        ("train boxing --model.decoder.bias=yes", "--model.decoder.bias takes no value; leave it out"),
        ("train boxing --bacth 3", "unknown option --bacth; did you mean --batch?"),
        ("train boxing --lr 3", "unknown option --lr; did you mean --optimizer.lr?"),
        ("train boxing --zzzzzzz 3", "unknown option --zzzzzzz; see ridgeline train boxing --help"),
        ("train boxing extra", "unexpected argument 'extra'; leave it out or name its option"),
        ("train boxing --json 3", "unexpected argument '3'; leave it out or name its option"),
        ("train gpt2-c256 --model.vocabulary 5", "--model.vocabulary follows the data; leave it out"),
        ("train boxing --model.heads.0.name x", "--model.heads follow the data; leave them out"),
        ("train --config", "expected one argument; give it a file or folder"),
        ("data", "SOURCE is missing; give it first: ridgeline data SOURCE"),
        ("sample", "CHECKPOINT is missing; give it first: ridgeline sample CHECKPOINT"),
        ("sample a b", "unexpected argument 'b'"),
        ("play R --games two", "--games must be a whole number, got 'two'"),
        ("explain", "PRESET is missing"),
        ("report ", "RECORDS is empty; see ridgeline report --help"),
        ("report r.json --png ", "--png needs a value after it, got an empty one"),
        ("doctor a b", "unexpected argument 'b'"),
        ("demo --minuts 1", "unknown option --minuts; did you mean --minutes?"),
        ("demo --games 0", "games must be at least 1, got 0"),
        ("demo --level 9", "boxing has the levels 0, 1, 2, 3, got 9"),
        ("demo --minutes 0", "minutes must be positive and finite, got 0"),
        ("--vresion", "unknown option '--vresion'; did you mean --version"),
        ("trian", "unknown verb 'trian'; did you mean train?"),
        ("train boxing --data \udcff", "the argument '\\udcff' is not UTF-8; write it in UTF-8"),
        ("sample r --prompt a\udcff", "the argument 'a\\udcff' is not UTF-8"),
        (
            "train gpt2-124m --batch 4",
            "accumulation=8, which gpt2-124m sets unless you do, does not divide batch=4; set",
        ),
        ("sample r --seed 99999999999999999999999", "seed must be in [0, 2^63)"),
    ],
)
def test_a_mistake_is_one_sentence(capsys, monkeypatch, line, sentence):
    monkeypatch.setattr("ridgeline.cli.demo.train", None)  # what is wrong is said before anything is trained
    assert sentence in refused(capsys, *line.split(" "))


def test_what_is_right_is_no_mistake():
    from ridgeline.cli import play, sample
    from ridgeline.cli.flags import mirror
    from ridgeline.cli.train import HIDDEN, _options

    def mistake(kind, *arguments):
        return find_mistake(kind, arguments, "verb", FIXED)

    assert mistake(play.Options, "R", "--first-seed", "-5", "--temperature=-1e-3", "--processes", "None") is None
    assert mistake(sample.Options, "--prompt=--x", "R", "--prompt", "", "--top_k", "3", "--json") is None
    for make in PRESETS.values():
        kind = _options(mirror(make(), hidden=HIDDEN))
        arguments = ["--track", "wandb", "tensorboard", "--optimizer.betas", "0.9", "1", "--model.decoder.no-bias"]
        assert mistake(kind, *arguments, "--model.decoder.kv-heads", "None", "--config", "x.toml") is None


def test_what_only_the_parser_finds_is_one_sentence_too(capsys, monkeypatch):
    monkeypatch.setattr("ridgeline.cli.output.find_mistake", lambda *_: None)
    assert "abc" in refused(capsys, "train", "boxing", "--steps", "abc")


@pytest.mark.parametrize("verb", [*(name for name in VERBS if name != "study"), *(f"study {name}" for name in STUDIES)])
@pytest.mark.parametrize("width", [60, 100])
def test_help_fills_the_terminal_and_says_nothing_of_the_parser(capsys, monkeypatch, verb, width):
    monkeypatch.setenv("COLUMNS", str(width))
    code, output, _ = run(capsys, *verb.split(), "--help")
    assert code == 0
    assert max(map(len, output.splitlines())) <= width
    assert "{None}" not in output
    assert "(default: )" not in output
    prose = output[
        output.index("\n\n") + 2 : output.index("\n positional" if "\n positional" in output else "\n options")
    ]
    for line, following in itertools.pairwise(prose.splitlines()):
        if line and following and not following.startswith("- "):
            assert len(line) + 1 + len(following.split()[0]) > width, "a line is broken before it is full"


def test_help_in_a_terminal_of_a_few_columns_comes_to_an_end(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "3")
    code, output, _ = run(capsys, "sample", "--help")
    assert code == 0
    assert max(map(len, output.splitlines())) == 40
    assert os.environ["COLUMNS"] == "3"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_finds_no_space_is_one_sentence(monkeypatch, unbuffered):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "ridgeline", "--help"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 2
    assert done.stderr == "ridgeline: there is no space left where the output goes; free space or send it elsewhere\n"


def test_a_file_that_finds_no_space_is_not_taken_for_the_output(monkeypatch):
    full = OSError(errno.ENOSPC, "No space left on device", "run/metrics.jsonl")

    def write(arguments):
        raise full

    monkeypatch.setattr("ridgeline.cli._dispatch", write)
    with pytest.raises(OSError, match=r"metrics\.jsonl") as caught:
        main(["doctor"])
    assert caught.value is full


def test_output_that_is_closed_harms_nothing():
    closed = "import os, sys; os.close(1); os.execv(sys.executable, [sys.executable, '-m', 'ridgeline', '--help'])"
    done = subprocess.run([sys.executable, "-c", closed], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_option_can_be_unset_by_a_word(capsys, tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text('preset = "gpt2-c256"\nminutes = 3\n[model.decoder]\nkv_heads = 1\n')
    for word in ("none", "None"):
        words = ["--config", file, "--model.decoder.kv-heads", word, "--minutes", "3", "--data", tmp_path / "nothing"]
        assert "nothing" in refused(capsys, "train", *words)
    assert "must be a whole number, got 'nil'" in refused(
        capsys, "train", "gpt2-c256", "--model.decoder.kv-heads", "nil"
    )


def test_help_of_train_says_how_long_the_preset_runs(capsys):
    output = " ".join(run(capsys, "train", "gpt2-c256", "--help")[1].replace("│", " ").split())
    assert "one of steps, tokens and minutes is set. (default: 2000)" in output
    assert "(default: )" not in output
    assert "article" not in output


@pytest.mark.parametrize("name", ["3", "[1]", "{ a = 1 }", "true"])
def test_a_preset_in_a_file_that_is_no_name(capsys, tmp_path, name):
    file = tmp_path / "settings.toml"
    file.write_text(f"preset = {name}\n")
    assert "preset must be a name in quotes" in refused(capsys, "train", "--config", file)
    assert "preset must be a name in quotes" in refused(capsys, "train", "--config", file, "--steps", 3)


def test_a_table_in_a_file_for_a_plain_setting(capsys, tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text('preset = "gpt2-c256"\n[steps]\na = 1\n')
    assert "steps must be a whole number, got {'a': 1}" in refused(capsys, "train", "--config", file)


def test_a_batch_without_memory_leaves_no_folder(capsys, text, tmp_path):
    complaint = refused(capsys, "train", "gpt2-c256", "--data", text, *TINY, *SHORT, "--batch", 10**12)
    assert "lower --batch" in complaint
    assert not (tmp_path / "runs").exists()


def test_an_unknown_setting_in_a_checkpoint_tells_sample_what_helps_it(capsys, text):
    train_tiny(capsys, text, "--steps", 1, "--out", "run")
    for header in Path("run").rglob("checkpoint.json"):
        header.write_text(header.read_text().replace('"seed"', '"sead"', 1))
    assert "unknown setting 'sead'" in (complaint := refused(capsys, "sample", "run"))
    assert complaint.endswith("use a checkpoint that this version of ridgeline wrote")
    assert refused(capsys, "train", "--resume", "run", "--steps", 2).endswith("--init-from")


def test_token_ids_are_joined_with_a_blank(capsys, tmp_path):
    (tmp_path / "ids.bin").write_bytes(bytes(range(0, 200)) * 8)
    train_tiny(capsys, "ids.bin", "--model.decoder.layers", 1, "--steps", 1, "--out", "run")
    _, output, _ = run(capsys, "sample", "run", "--prompt", "257 771", "--tokens", 3)
    assert output.startswith("257 771 ")
    assert len(output.split()) == 5
    _, output, _ = run(capsys, "sample", "run", "--tokens", 3)
    assert not output.startswith(" ")


def test_an_interrupt_while_pytorch_is_imported():
    code = """
import importlib, os, signal, sys, types
from ridgeline.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are born deaf to it
def importing(name):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(10**6): pass
    except KeyboardInterrupt:
        raise RuntimeError("as PyTorch does")
importlib.import_module = importing
sys.exit(main(["doctor"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")
