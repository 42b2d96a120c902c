import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from command_line import SHORT, TINY, last_json, refused, run, train_tiny
from ridgeline.cli import VERBS, main
from ridgeline.cli.flags import changes, mirror
from ridgeline.cli.threads import usable_cores
from ridgeline.games.boxing import archive
from ridgeline.presets import PRESETS, preset
from ridgeline.train.settings import merge, read_toml


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # so that what the command line sets is undone
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "words.txt"
    file.write_text("the cat sat on the mat and the rat ran at the cat; " * 60)
    return str(file)


def test_help_names_every_verb(capsys):
    code, output, _ = run(capsys, "--help")
    assert code == 0
    assert all(verb in output for verb in VERBS)
    assert run(capsys)[0] == 2


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself_and_takes_json(capsys, verb):
    code, output, _ = run(capsys, verb, "--help")
    assert code == 0
    assert "--json" in output


def test_help_of_train_lists_the_presets_and_their_settings(capsys):
    _, output, _ = run(capsys, "train", "--help")
    assert all(name in output for name in PRESETS)
    _, output, _ = run(capsys, "train", "hal-20m", "--help")
    assert "--model.decoder.position-table" in output
    assert "(default: 1024)" in output


def test_mistyped_verbs_presets_and_settings_meet_their_neighbours(capsys, text, tmp_path):
    assert refused(capsys, "trian") == "unknown verb 'trian'; did you mean train?"
    assert "did you mean gpt2-c256" in refused(capsys, "train", "gpt2-c265")
    code, _, complaint = train_tiny(capsys, text, "--batsch", 3)
    assert code == 2
    assert "--batch" in complaint
    file = tmp_path / "settings.toml"
    file.write_text("[optimizer]\nwarmupp = 3\n")
    assert "unknown setting 'warmupp'; did you mean warmup" in refused(capsys, "train", "gpt2-c256", "--config", file)
    assert "did you mean pystdlib" in refused(capsys, "data", "pystlib")
    assert "did you mean hal-5m" in refused(capsys, "explain", "hal-5", "--device", "h200")


def test_train_then_sample(capsys, text, tmp_path):
    code, output, complaint = train_tiny(capsys, text, "--steps", 6, "--out", "run", "--json")
    assert code == 0, complaint
    summary = last_json(output)
    assert list(summary) == [
        *("preset", "steps", "tokens", "seconds", "tokens_per_s", "train_loss", "val_loss", "checkpoint")
    ]
    assert (summary["preset"], summary["steps"], summary["tokens"]) == ("gpt2-c256", 6, 6 * 4 * 16)
    assert Path(summary["checkpoint"]) == Path("run/last")
    code, output, _ = run(
        capsys, "sample", "run", "--prompt", "the ", "--tokens", 9, "--temperature", 0.5, "--top-k", 3, "--json"
    )
    assert code == 0
    assert len(last_json(output)["text"]) == 9
    code, output, _ = run(capsys, "sample", "run", "--prompt", "the ", "--tokens", 9)
    assert (code, output.startswith("the ")) == (0, True)


def test_without_json_a_table_is_printed(capsys, text):
    code, output, _ = train_tiny(capsys, text, "--steps", 2)
    assert code == 0
    assert "runs/gpt2-c256/last" in output
    assert "val loss" in output


def test_settings_come_from_preset_then_file_then_options(capsys, text, tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text(f'preset = "fast-c256"\ndata = "{text}"\nsteps = 3\nseed = 5\n[optimizer]\nlr = 0.25\nwarmup = 7\n')
    code, _, complaint = run(
        capsys, "train", "--config", file, *TINY, *SHORT, "--optimizer.warmup", 2, "--tokens", 100, "--out", "run"
    )
    assert code == 0, complaint
    saved = read_toml("run/config.toml")
    assert (saved["preset"], saved["seed"], saved["optimizer"]["lr"]) == ("fast-c256", 5, 0.25)
    assert (saved["optimizer"]["warmup"], saved["steps"], saved["tokens"]) == (2, "none", 100)
    assert saved["model"]["decoder"]["kv_heads"] == 1
    assert saved["optimizer"]["betas"] == [0.9, 0.99]
    code, _, complaint = run(capsys, "train", "--config", "run/config.toml", "--out", "again")
    assert code == 0, complaint
    assert {**read_toml("again/config.toml"), "out": "run"} == saved


def test_resume_by_the_command_line(capsys, text):
    train_tiny(capsys, text, "--steps", 6, "--out", "run")
    assert "complete at step 6" in refused(capsys, "train", "--resume", "run")
    code, output, _ = run(capsys, "train", "--resume", "run", "--steps", 8, "--json")
    assert (code, last_json(output)["steps"]) == (0, 8)
    assert "batch expected 8, got 4" in refused(capsys, "train", "--resume", "run", "--batch", 8, "--steps", 9)
    assert "of gpt2-c256, not fast-c256" in refused(capsys, "train", "fast-c256", "--resume", "run")
    assert "drop --init-from" in refused(capsys, "train", "--resume", "run", "--init-from", "run")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--model.decoder.heads", 3], "heads=3 does not divide width=16; set head_width"),
        (["--model.decoder.kv-heads", 3], "kv_heads=3 does not divide heads=2"),
        (["--model.decoder.position-table", 8], "context=16 is longer than position_table=8"),
        (["--window.context", 17], "window.context=17 is longer than the model's context=16"),
        (["--steps", 5, "--minutes", 1], "set exactly one of steps, tokens and minutes"),
        (["--device", "cpux"], "unknown device 'cpux'"),
        (["--device", "gpu"], "unknown device 'gpu'; did you mean cuda?"),
        (["--engine", "best-of-all"], "unknown engine"),
        (["--data", "no/such/file.txt"], "there is no file or folder no/such/file.txt"),
        (["--init-from", "nowhere"], "nowhere does not exist"),
        (["--resume", "nowhere"], "nowhere does not exist"),
        (["--config", "no.toml"], "no.toml cannot be read"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(capsys, text, tmp_path, flags, sentence):
    assert sentence in refused(capsys, "train", "gpt2-c256", "--data", text, *TINY, *SHORT, *flags)
    assert not (tmp_path / "runs").exists()


def test_empty_and_short_texts(capsys, tmp_path):
    empty, short = tmp_path / "empty.txt", tmp_path / "short.txt"
    empty.write_text("")
    short.write_text("too short for a window")
    assert "is empty" in refused(capsys, "train", "gpt2-c256", "--data", empty)
    assert "a context of 256 needs" in refused(capsys, "train", "gpt2-c256", "--data", short)
    assert "is not tinyshakespeare" in refused(capsys, "data", "tinyshakespeare", "--file", short)


def test_no_gpu_for_cuda(capsys, text):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert "use --device cpu" in refused(
        capsys, "train", "gpt2-c256", "--data", text, *TINY, *SHORT[:-2], "--device", "cuda"
    )


def test_an_existing_run_is_never_overwritten(capsys, text):
    train_tiny(capsys, text, "--steps", 1, "--out", "run")
    before = {file: file.read_bytes() for file in Path("run").rglob("*") if file.is_file()}
    complaint = refused(capsys, "train", "gpt2-c256", "--data", text, *TINY, *SHORT, "--steps", 2, "--out", "run")
    assert "run exists; choose another --out, or go on with the run by --resume run" in complaint
    assert {file: file.read_bytes() for file in Path("run").rglob("*") if file.is_file()} == before


def test_corrupt_and_foreign_checkpoints(capsys, text):
    train_tiny(capsys, text, "--steps", 1, "--out", "run")
    file = next(Path("run/last").glob("tensors-*"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert "is corrupt" in refused(capsys, "train", "--resume", "run", "--steps", 2)
    Path("run/last/checkpoint.json").write_text('{"format": "another"}')
    assert "is not a ridgeline checkpoint" in refused(capsys, "train", "--resume", "run", "--steps", 2)
    assert "is not a policy" in refused(capsys, "play", "run/best")


def test_a_missing_extra_names_its_installation(capsys, text, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    complaint = refused(
        capsys, "train", "gpt2-c256", "--data", text, *TINY, *SHORT, "--steps", 1, "--track", "tensorboard"
    )
    assert "pip install '.[track]'" in complaint
    monkeypatch.setitem(sys.modules, "ale_py", None)
    assert "pip install '.[games]'" in refused(capsys, "demo")


def test_data_describes_what_it_prepared(capsys, text):
    code, output, _ = run(capsys, "data", text, "--kind", "bytes", "--out", "prepared", "--json")
    assert code == 0
    assert last_json(output)["kind"] == "bytes"
    assert "prepared exists" in refused(capsys, "data", text, "--out", "prepared")
    assert "--kind means nothing to the source pystdlib" in refused(capsys, "data", "pystdlib", "--kind", "bytes")
    assert "--demonstrate needs --file" in refused(capsys, "data", "boxing", "--demonstrate", 4)


@pytest.fixture
def few_demonstrations(tmp_path, monkeypatch):
    """The three shortest of the shipped games, so that replaying takes a moment."""
    shipped = sorted(archive.load(archive.SHIPPED), key=lambda game: len(game.labels))[:3]
    monkeypatch.setattr(archive, "SHIPPED", archive.save(tmp_path / "few.xz", shipped))


def test_demo_trains_plays_and_ends_with_its_json(capsys, few_demonstrations):
    code, output, complaint = run(capsys, "demo", "--minutes", 0.02, "--games", 1)
    assert code == 0, complaint
    assert "won by knockout" in output
    result = last_json(output)
    played = ["games", "wins", "ties", "ko", "ko_against", "margin", "dealt", "taken", "intervals", "level"]
    played += ["seconds", "games_per_s", "decision_ms"]
    assert list(result) == [*played, "checkpoint", "ko_rate"]
    assert result["games"] == 1
    assert result["ko_rate"] == result["ko"]
    assert result["checkpoint"] in output.splitlines()[-2]


def test_hal_trains_on_boxing(capsys, few_demonstrations):
    settings = ["--model.decoder.layers", 1, "--batch", 2, "--steps", 1, "--eval-windows", 2, "--device", "cpu"]
    code, _, complaint = run(capsys, "train", "hal-20m", "--data", "boxing", *settings, "--out", "run", "--json")
    assert code == 0, complaint
    model = read_toml("run/config.toml")["model"]
    assert [head["name"] for head in model["heads"]] == ["direction", "fire"]
    assert (model["decoder"]["width"], model["decoder"]["position_table"]) == (512, 1024)
    assert run(capsys, "play", "run", "--games", 0)[0] == 2


def test_explain_prints_one_object(capsys):
    code, output, _ = run(capsys, "explain", "gpt2-c256", "--device", "h200", "--json")
    assert code == 0
    assert last_json(output)["parameters"] == 4_837_888
    assert "mlp_up" in run(capsys, "explain", "gpt2-c256", "--device", "h200")[1]


def test_doctor_says_what_each_op_uses(capsys):
    code, output, _ = run(capsys, "doctor", "gpt2-c256", "--json")
    assert code == 0
    assert last_json(output)["preset"] == "gpt2-c256"
    assert run(capsys, "doctor")[0] == 0


def test_flags_mirror_a_config():
    config = preset("hal-5m")
    flags = mirror(config, hidden=("preset", "model.heads", "model.categories"), unset=("steps",))
    assert not hasattr(flags, "preset")
    assert not hasattr(flags.model, "heads")
    assert flags.model.decoder.width == 256
    assert flags.steps is None
    other = type(flags)(model=type(flags.model)(numbers=3), steps=4, track=("wandb",))
    assert changes(flags, other) == {"model": {"numbers": 3}, "steps": 4, "track": ["wandb"]}


def test_merge_joins_tables_and_replaces_values():
    assert merge({"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"c": 3}, "d": [2]}) == {"a": {"b": 1, "c": 3}, "d": [2]}


def test_cores_are_at_least_one_and_at_most_all():
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)


def python(code):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)


def test_importing_the_package_is_quick_and_brings_nothing_heavy():
    code = """
import sys, time
import torch
start = time.process_time()
import ridgeline, ridgeline.cli, ridgeline.errors
spent = time.process_time() - start
heavy = {"triton", "matplotlib", "ale_py", "melee", "peppi_py", "tensorboard", "wandb"} & set(sys.modules)
assert not heavy, heavy
assert spent < 0.3, spent
"""
    result = python(code)
    assert result.returncode == 0, result.stderr


def test_training_and_playing_import_no_triton_plots_or_game():
    code = """
import sys
import ridgeline.train, ridgeline.presets
import ridgeline.cli.train, ridgeline.cli.play, ridgeline.cli.data, ridgeline.cli.demo
heavy = {"triton", "matplotlib", "ale_py", "melee", "peppi_py", "tensorboard", "wandb"} & set(sys.modules)
assert not heavy, heavy
"""
    result = python(code)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("line", [["--help"], ["train", "--help"]])
def test_output_that_nobody_reads_to_the_end_is_no_error(monkeypatch, unbuffered, line):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    command = [sys.executable, "-m", "ridgeline", *line]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=120) == 141


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_an_output_that_lacks_a_sign_shows_another(encoding):
    command = [sys.executable, "-m", "ridgeline", "explain", "gpt2-c256", "--device", "h200"]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, b"")
    assert "≥ 132 kernels".encode(encoding, "replace") in done.stdout


def test_help_needs_no_torch():
    code = """
import sys
from ridgeline.cli import main
assert main(["--help"]) == 0
assert "torch" not in sys.modules
"""
    result = python(code)
    assert result.returncode == 0, result.stderr


def test_a_verb_is_imported_when_its_threads_are_decided(monkeypatch):
    decided = []

    def module(verb):
        decided.append(os.environ.get("OMP_NUM_THREADS"))
        return SimpleNamespace(run=lambda arguments: 0)

    monkeypatch.setattr("ridgeline.cli._module", module)
    assert main(["doctor"]) == 0
    assert decided == [str(usable_cores())]


def test_an_interrupted_verb_says_so_and_exits_as_shells_expect(capsys, monkeypatch):
    def run(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("ridgeline.cli._module", lambda verb: SimpleNamespace(run=run))
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_threads_are_decided_before_torch_and_the_user_has_the_last_word():
    code = """
import os, sys
from ridgeline.cli.threads import configure_threads, usable_cores
configure_threads()
assert "torch" not in sys.modules
import torch
assert torch.get_num_threads() == usable_cores(), torch.get_num_threads()
assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
os.environ["OMP_NUM_THREADS"] = "7"
configure_threads()
assert os.environ["OMP_NUM_THREADS"] == "7"
"""
    result = python(code)
    assert result.returncode == 0, result.stderr
