"""Melee's controller as classes: exact, reversible, and the same from wherever one begins to look."""

import itertools

import numpy as np
import pytest

from ridgeline.errors import ConfigError
from ridgeline.games.melee.controls import C_STICK, LABELS, MAIN, Encoding
from ridgeline.games.melee.frames import CONTROLLER, A, B, L, R, X, Y, Z, stick, trigger
from ridgeline.presets.hal import FOUR_HEADS, THREE_HEADS

ENCODINGS = [Encoding(*choice) for choice in itertools.product(LABELS, (False, True))]


def controllers(buttons, *, main=(0, 0), c=(0, 0), trigger=0):
    made = np.zeros(len(buttons), CONTROLLER)
    made["buttons"], made["main"], made["c"], made["trigger"] = buttons, main, c, trigger
    return made


def labels(buttons, count=6):
    encoding = Encoding(count)
    return [LABELS[count][label] for label in encoding.encode(controllers(buttons))[:, -1]]


def random_controllers(count, seed=0):
    rng = np.random.default_rng(seed)
    made = np.zeros(count, CONTROLLER)
    made["buttons"] = np.where(rng.random(count) < 0.3, rng.integers(0, 128, count), 0)
    made["buttons"] = np.repeat(made["buttons"][::3], 3)[:count]  # held for a while
    for name in ("main", "c"):
        made[name] = rng.integers(-80, 81, (count, 2))
    made["trigger"] = rng.integers(0, 141, count)
    return made


def test_the_tables_have_the_sizes_of_the_presets():
    assert len(set(MAIN)) == len(MAIN) == 37
    assert len(set(C_STICK)) == len(C_STICK) == 9
    assert Encoding().heads == tuple((head.name, head.classes) for head in THREE_HEADS)
    assert Encoding(5, True).heads == tuple((head.name, head.classes) for head in FOUR_HEADS)
    for x, y in MAIN:
        assert (-x, y) in MAIN
        assert (x, -y) in MAIN
        assert x * x + y * y <= 80.5**2  # nothing that the game would clamp


def test_every_position_gets_its_nearest_class_and_ties_the_lower_one():
    grid = np.array([(x, y) for x in range(-80, 81) for y in range(-80, 81)])
    made = np.zeros(len(grid), CONTROLLER)
    made["main"] = made["c"] = grid
    classes = Encoding().encode(made)
    for column, points in ((1, MAIN), (0, C_STICK)):
        away = np.stack([((grid - point) ** 2).sum(-1) for point in points], axis=1)
        assert (classes[:, column] == away.argmin(1)).all()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_what_is_pressed_for_a_class_is_seen_as_that_class(encoding):
    for chosen in itertools.product(*(range(size) for _, size in encoding.heads)):
        if "shoulder" in dict(encoding.heads) and encoding.buttons > 5:
            chosen = (0, *chosen[1:])  # L belongs to the buttons then, and presses the shoulder
        held = encoding.decode(np.array([chosen]))
        (seen,) = encoding.encode(held)
        expected = dict(zip(dict(encoding.heads), chosen, strict=True))
        label = LABELS[encoding.buttons][expected["buttons"]]
        if label in ("L", "A+L") and encoding.shoulder:
            expected["shoulder"] = 2
        if encoding.shoulder and encoding.buttons == 5 and label == "Z" and expected["shoulder"] == 0:
            assert held["trigger"] == 0
        assert dict(zip(dict(encoding.heads), seen.tolist(), strict=True)) == expected


def test_l_is_pressed_to_the_click():
    """Techs, air dodges and wavedashes read the digital bit, which an analog press alone does not set."""
    for encoding, chosen, pressed, analog in [
        (Encoding(6), (0, 0, 4), L, 140),
        (Encoding(7), (0, 0, 5), A | L, 140),
        (Encoding(5, True), (2, 0, 0, 4), L, 140),
        (Encoding(5, True), (1, 0, 0, 4), 0, 56),
    ]:
        (held,) = encoding.decode(np.array([chosen]))
        assert (held["buttons"], held["trigger"]) == (pressed, analog)


def test_the_newest_press_wins_and_a_release_is_none():
    assert labels([0, A, A | B, A | B, B, B, 0]) == ["NONE", "A", "B", "B", "NONE", "NONE", "NONE"]
    assert labels([B, B | X, B]) == ["B", "JUMP", "NONE"]
    assert labels([A | B]) == ["A"]  # both new: the lower class
    assert labels([X, X | Y, Y]) == ["JUMP"] * 3  # either is the jump
    assert labels([L, L | R, R, R | Z]) == ["L", "L", "L", "Z"]


def test_a_and_l_together_are_a_class_of_their_own():
    assert labels([L, L | A, L, A, A | L], 7) == ["L", "A+L", "NONE", "A", "A+L"]
    assert labels([L, L | B], 7) == ["L", "B"]
    assert labels([L, L | A, 0], 5) == ["NONE", "A", "NONE"]


def test_a_held_mask_without_change_keeps_its_label():
    assert labels([A, A | L, A, A, A]) == ["A", "L", "NONE", "NONE", "NONE"]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_labels_do_not_depend_on_where_one_begins_to_look(encoding):
    made = random_controllers(300)
    whole, held = encoding.encode(made), encoding.released()
    for t in range(len(made)):
        (label,), held = encoding.encode_next(made[t : t + 1], held)
        assert np.array_equal(label, whole[t])


def test_several_games_at_once_are_as_each_by_itself():
    encoding = Encoding(7, True)
    games = np.stack([random_controllers(60, seed) for seed in range(4)])
    held = encoding.released(4)
    for t in range(60):
        seen, held = encoding.encode_next(games[:, t], held)
        assert np.array_equal(seen, [encoding.encode(game)[t] for game in games])


def test_cutting_a_window_out_first_would_change_labels():
    """Why whole games are encoded: held buttons look newly pressed at a window's start."""
    made = controllers([A, A | B, A, A])
    encoding = Encoding()
    assert encoding.encode(made)[2, 2] == encoding.none
    assert encoding.encode(made[2:])[0, 2] != encoding.none


def test_z_alone_is_no_light_shield():
    encoding = Encoding(5, True)
    pressed = [(Z, 49, 0), (Z, 60, 1), (0, 49, 1), (0, 27, 0), (0, 28, 0), (0, 29, 1), (0, 99, 2), (R, 0, 2)]
    for buttons, analog, expected in pressed:
        assert encoding.encode(controllers([buttons], trigger=analog))[0, 0] == expected


def test_units_survive_rounding_on_their_way():
    """libmelee halves and shifts stick values in 32 bits, the protocol too: the eightieths come back."""
    exact = np.arange(-80, 81)
    shifted = (exact / 80).astype(np.float32) / 2 + np.float32(0.5)
    assert (stick(2 * shifted - 1) == exact).all()
    assert (stick((exact / 80).astype(np.float32)) == exact).all()
    assert (trigger((np.arange(141) / 140).astype(np.float32)) == np.arange(141)).all()


def test_an_unknown_number_of_buttons_is_refused():
    with pytest.raises(ConfigError, match="buttons must be 5, 6, 7, got 4"):
        Encoding(4)
