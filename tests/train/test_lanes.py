"""Which number of lanes a run takes, and that what was measured is kept for the code and card it was measured on."""

from __future__ import annotations

import pytest

from ridgeline.train import lanes
from ridgeline.train.lanes import settle_lanes


class Positions:
    position = 5


@pytest.fixture
def on_card(config, change, monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "a card")
    return change(config, device="cuda", engine="best", precision="bf16")


def test_what_is_not_measured_is_one_lane(config, change, on_card):
    for fixed in (change(config, engine="eager"), change(on_card, engine="compile+graph"), change(on_card, batch=3)):
        settled, words = settle_lanes(fixed, Positions())
        assert (settled.lanes, words) == (1, "1 lane")
    assert settle_lanes(on_card, Positions(), world=2)[0].lanes == 1
    assert settle_lanes(change(on_card, lanes=2), Positions()) == (change(on_card, lanes=2), "2 lanes")


def test_the_faster_number_is_taken_and_kept(on_card, change, monkeypatch):
    asked = []

    def measure(config, batches):
        asked.append(config)
        return {1: 2.5, 2: 1.25}

    monkeypatch.setattr(lanes, "_measure", measure)
    for _ in range(2):
        settled, words = settle_lanes(on_card, Positions())
        assert settled.lanes == 2
        assert words == "2 lanes of 1 lane 2.5 ms, 2 lanes 1.25 ms"
    assert len(asked) == 1
    settle_lanes(change(on_card, batch=8), Positions())
    monkeypatch.setattr(lanes, "_code", lambda: "other")
    settle_lanes(on_card, Positions())
    assert len(asked) == 3


def test_a_damaged_choice_is_made_again(on_card, monkeypatch):
    monkeypatch.setattr(lanes, "_measure", lambda config, batches: {1: 1.0})
    file = lanes._file(on_card)
    file.parent.mkdir(parents=True)
    for content in ("{", "[]", '{"one": 2}', "{}"):
        file.write_text(content)
        assert settle_lanes(on_card, Positions())[0].lanes == 1
