"""`ridgeline explain` and `ridgeline doctor` as a user types them."""

import json

import pytest
import torch

from ridgeline.cli import main

NO_CARD = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA card here")


def test_explain_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "hal-20m", "--device", "h200", "--batch", "512"]) == 0
    assert "what would help" in capsys.readouterr().out
    assert main(["explain", "hal-20m", "--device", "h200", "--batch", "512", "--json"]) == 0
    values = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (values["preset"], values["device"], values["batch"]) == ("hal-20m", "h200", 512)


@NO_CARD
def test_doctor_prints_a_report_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    assert "attention through PyTorch" in capsys.readouterr().out
    assert main(["doctor", "gpt2-c256", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["preset"] == "gpt2-c256"


@NO_CARD
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "hal-20m"], "no CUDA card here; name one of the table"),
        (["explain", "hal-20m", "--device", "t4", "--precision", "bf16"], "NVIDIA T4 has no bf16"),
        (["explain", "hal-20m", "--device", "h200", "--batch", "99999"], "GiB more than the 139.8 GiB of NVIDIA H200"),
        (["explain", "hal-20m", "--measure"], "--measure profiles real steps on a CUDA card"),
        (["explain", "hal-20m", "--measure", "--device", "h200"], "leave out --device"),
        (["explain", "hal-20m", "--device", "h200", "--engine", "eager"], "add --measure"),
        (["explain", "hal-20m", "--device", "h200", "--out", "records"], "add --measure"),
        (["doctor", "hal"], "unknown preset 'hal'"),
    ],
)
def test_mistakes_end_with_2_and_one_sentence(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.strip().splitlines()) == 1
