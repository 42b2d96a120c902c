"""Texts become tokens, are split, and are refused with a cure where they cannot be used."""

import numpy as np
import pytest

from ridgeline.data import shards, text
from ridgeline.data.text import Vocabulary
from ridgeline.errors import DataError

SENTENCE = "Größe: 3 µm, naïve — “ok”\r\n" * 3


def as_bytes(content):
    return np.frombuffer(content if isinstance(content, bytes) else content.encode(), dtype=np.uint8)


def test_characters_round_trip_in_code_point_order():
    tokens, vocabulary = text.tokenise(as_bytes(SENTENCE), "characters", "x")
    assert vocabulary.characters == "".join(sorted(set(SENTENCE)))
    assert tokens.dtype == np.uint8
    assert vocabulary.decode(tokens.tolist()) == SENTENCE
    assert vocabulary.encode(SENTENCE) == tokens.tolist()
    with pytest.raises(DataError, match="the vocabulary has no 'q', 'z'; leave it out"):
        vocabulary.encode("zq")


def test_bytes_round_trip_and_survive_broken_utf8():
    tokens, vocabulary = text.tokenise(as_bytes(SENTENCE), "bytes", "x")
    assert vocabulary.size == 256
    assert vocabulary.decode(tokens.tolist()) == SENTENCE
    assert vocabulary.encode(SENTENCE) == tokens.tolist()
    assert vocabulary.decode([0xE2, 0x80]) == "\ufffd"


def test_token_files_hold_uint16():
    ids = np.arange(50_200, 50_257, dtype="<u2")
    tokens, vocabulary = text.tokenise(as_bytes(ids.tobytes()), "tokens", "x.bin")
    assert (tokens == ids).all()
    assert vocabulary.size == 50_257
    assert vocabulary.encode("7 50256") == [7, 50256]
    assert vocabulary.decode([7, 50256]) == "7 50256"
    for prompt in ("50257", "hello"):
        with pytest.raises(DataError, match="write the text as ids below 50257"):
            vocabulary.encode(prompt)


def test_many_characters_take_two_bytes():
    characters = "".join(map(chr, range(0x4E00, 0x4E00 + 300)))
    tokens, vocabulary = text.tokenise(as_bytes(characters), "characters", "x")
    assert tokens.dtype == np.uint16
    assert vocabulary.decode(tokens.tolist()) == characters


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        (b"", "bytes", "x is empty; give a text of at least 20 bytes"),
        (b"too short", "bytes", "x has 9 bytes; give a text of at least 20"),
        (b"\x00\x01" * 19, "tokens", "x has 19 tokens; give a text of at least 20"),
        (b"\x00\x01" * 20 + b"\x00", "tokens", "odd number of bytes; a file of tokens holds uint16"),
        (b"fine until here \xff and on", "characters", r"not UTF-8 \(byte 16\); read it as bytes"),
        ("".join(map(chr, range(0xE000, 0x20000))).encode(), "characters", "different characters, over 65536"),
    ],
)
def test_unusable_texts_name_the_cure(content, kind, message):
    with pytest.raises(DataError, match=message):
        text.tokenise(as_bytes(content), kind, "x")


def test_unreadable_files_name_the_cure(tmp_path):
    with pytest.raises(DataError, match=r"cannot be read \(No such file or directory\); give a readable file"):
        text.read_file(tmp_path / "missing.txt")
    with pytest.raises(DataError, match="is a folder; give a text file"):
        text.read_file(tmp_path)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match="is empty; give a text"):
        text.read_file(tmp_path / "empty.txt")


def test_kinds_are_guessed_by_the_documented_rule(tmp_path):
    assert text.guess_kind(tmp_path / "train.bin", as_bytes("whatever")) == "tokens"
    assert text.guess_kind(tmp_path / "a.txt", as_bytes(SENTENCE)) == "characters"
    assert text.guess_kind(tmp_path / "a.txt", as_bytes(b"\xff\xfe")) == "bytes"
    assert text.guess_kind(tmp_path / "a.txt", as_bytes("".join(map(chr, range(0x4E00, 0x4F01))))) == "bytes"


def test_a_written_text_opens_with_its_split_and_vocabulary(tmp_path):
    content = as_bytes("".join(chr(97 + i % 26) for i in range(1007)))
    text.write(tmp_path / "abc", content, "characters", name="abc", source="here")
    data = text.open_text(shards.read(tmp_path / "abc"))
    assert (data.train, data.held_out) == (906, 101)
    assert data.vocabulary == Vocabulary.from_dict(data.vocabulary.to_dict())
    assert data.vocabulary.decode(data.tokens[:3].tolist()) == "abc"
    assert data.summary()["tokens"] == 1007


@pytest.mark.parametrize("prompt", ["٣", "²", "1 x", "-1", "+1", "1_0", "300", "9" * 5000])
def test_a_token_is_a_number_in_ascii_below_the_size(prompt):
    vocabulary = text.Vocabulary(kind="tokens", size=300)
    with pytest.raises(DataError, match="write the text as ids below 300"):
        vocabulary.encode(prompt)
    assert vocabulary.encode("299 0 7") == [299, 0, 7]


def test_a_continuation_joins_its_prompt():
    for kind, characters, prompt, more in (("tokens", "", "1 2", [3]), ("bytes", "", "ab", [99])):
        vocabulary = text.Vocabulary(kind=kind, size=256, characters=characters)
        whole = prompt + vocabulary.blank + vocabulary.decode(more)
        assert vocabulary.encode(whole) == vocabulary.encode(prompt) + more


@pytest.mark.parametrize("kind", text.KINDS)
def test_what_is_not_utf8_is_no_prompt(kind):
    with pytest.raises(DataError, match=r"is not UTF-8 \(character 1\); write it in UTF-8"):
        text.Vocabulary(kind=kind, size=256, characters="a").encode("a\udcff")
