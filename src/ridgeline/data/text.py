"""Text as tokens: bytes, characters, or token ids that another program made (nanoGPT's .bin of uint16)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ridgeline.data import shards
from ridgeline.errors import DataError

Kind = Literal["bytes", "characters", "tokens"]
DIGITS = re.compile("[0-9]+")
KINDS = ("bytes", "characters", "tokens")
HELD_OUT = 10  # one token in so many, from the end of the text, is kept from training
SHORTEST = 2 * HELD_OUT  # tokens; below that the held-out part is nothing to speak of


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """How text becomes token ids and back.

    Attributes:
        kind: "bytes" (UTF-8), "characters", or "tokens" (ids of an unknown tokenizer, written as numbers).
        size: number of ids (V).
        characters: for "characters", the character of every id.
    """

    kind: Kind
    size: int
    characters: str = ""

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt.

        Raises:
            DataError: a character or id that the vocabulary lacks.
        """
        try:
            content = text.encode("utf-8")
        except UnicodeEncodeError as error:  # the command line hands bytes that are no UTF-8 over as lone surrogates
            raise DataError(f"the text is not UTF-8 (character {error.start}); write it in UTF-8") from error
        if self.kind == "bytes":
            return list(content)
        if self.kind == "characters":
            ids = {character: index for index, character in enumerate(self.characters)}
            missing = sorted(set(text) - ids.keys())
            if missing:
                raise DataError(f"the vocabulary has no {', '.join(map(repr, missing[:5]))}; leave it out of the text")
            return [ids[character] for character in text]
        words = text.split()
        longest = len(str(self.size))
        if not all(DIGITS.fullmatch(word) and len(word) <= longest and int(word) < self.size for word in words):
            raise DataError(f"this vocabulary is of token ids; write the text as ids below {self.size} with blanks")
        return [int(word) for word in words]

    def decode(self, ids: list[int]) -> str:
        """The text of ids; bytes that are no UTF-8 become U+FFFD."""
        if self.kind == "bytes":
            return bytes(ids).decode("utf-8", errors="replace")
        if self.kind == "characters":
            return "".join(self.characters[index] for index in ids)
        return " ".join(map(str, ids))

    @property
    def blank(self) -> str:
        """What goes between two texts so that they read as one."""
        return " " if self.kind == "tokens" else ""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"kind": self.kind, "size": self.size, "characters": self.characters}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Vocabulary:
        """From `to_dict`."""
        return cls(**saved)


@dataclass(frozen=True, eq=False)
class TextData:
    """A text to train on.

    Attributes:
        name: what the user called it.
        tokens: uint8 or uint16 [n], the whole text, mapped from the disk.
        train: number of tokens at the start that are trained on; the rest is held out.
        vocabulary: of the tokens.
        fingerprint: checksum of the tokens.
        path: the folder.
    """

    name: str
    tokens: NDArray[Any]
    train: int
    vocabulary: Vocabulary
    fingerprint: str
    path: Path

    @property
    def held_out(self) -> int:
        """Number of tokens that validate."""
        return len(self.tokens) - self.train

    def summary(self) -> dict[str, Any]:
        """What `ridgeline data` prints."""
        return {
            "name": self.name,
            "path": str(self.path),
            "kind": self.vocabulary.kind,
            "vocabulary": self.vocabulary.size,
            "tokens": len(self.tokens),
            "train": self.train,
            "held_out": self.held_out,
            "fingerprint": self.fingerprint,
        }


def split(count: int) -> int:
    """How many of `count` tokens are trained on; the last tenth is held out."""
    return count * (HELD_OUT - 1) // HELD_OUT


def tokenise(content: NDArray[np.uint8], kind: Kind, what: str) -> tuple[NDArray[Any], Vocabulary]:
    """Turn a file's bytes into tokens.

    Args:
        content: uint8[bytes], may be mapped from the disk.
        kind: how to read it.
        what: the text's name in messages.

    Raises:
        DataError: empty, too short, not UTF-8 (characters) or not pairs of bytes (tokens).
    """
    if len(content) == 0:
        raise DataError(f"{what} is empty; give a text of at least {SHORTEST} bytes")
    tokens, vocabulary = {"bytes": _bytes, "characters": _characters, "tokens": _tokens}[kind](content, what)
    if len(tokens) < SHORTEST:
        raise DataError(f"{what} has {len(tokens)} {kind}; give a text of at least {SHORTEST}")
    return tokens, vocabulary


def guess_kind(file: Path, content: NDArray[np.uint8]) -> Kind:
    """How a file is read when nobody says: .bin as tokens, UTF-8 with few characters as characters, else bytes."""
    if file.suffix == ".bin":
        return "tokens"
    try:
        few = len(set(content.tobytes().decode("utf-8"))) <= 256
    except UnicodeDecodeError:
        few = False
    return "characters" if few else "bytes"


def read_file(file: Path) -> NDArray[np.uint8]:
    """Map a file's bytes.

    Raises:
        DataError: it cannot be read or is empty.
    """
    try:
        if file.is_dir():
            raise DataError(f"{file} is a folder; give a text file (a prepared data set is trained on by --data)")
        if file.stat().st_size == 0:
            raise DataError(f"{file} is empty; give a text of at least {SHORTEST} bytes")
        return np.memmap(file, dtype=np.uint8, mode="r")
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}); give a readable file") from error


def write(folder: Path, content: NDArray[np.uint8], kind: Kind, *, name: str, source: str, once: bool = False) -> Path:
    """Tokenise a text and write it as a data set.

    Args:
        folder: the data set's folder.
        content: uint8[bytes], the text.
        kind: how to read it.
        name: what to call it.
        source: where it comes from, for the record.
        once: for the cache: a folder that exists holds this very text and stays.

    Raises:
        DataError: the text or the folder cannot be used.
    """
    tokens, vocabulary = tokenise(content, kind, source)
    meta = {
        "name": name,
        "source": {"from": source, "bytes": len(content), "sha256": hashlib.sha256(content.data).hexdigest()},
        "vocabulary": vocabulary.to_dict(),
        "tokens": len(tokens),
        "train": split(len(tokens)),
        "held_out": len(tokens) - split(len(tokens)),
    }
    return (shards.write_once if once else shards.write)(folder, "text", {"tokens": tokens}, meta)


def open_text(data: shards.Shards) -> TextData:
    """A text from its data set; see `shards.vouched` for the errors of a damaged one."""
    meta = data.meta
    vocabulary = Vocabulary.from_dict(meta["vocabulary"])
    if type(meta["train"]) is not int or not 0 < meta["train"] < len(data.arrays["tokens"]):
        raise ValueError(f"train is {meta['train']}")
    return TextData(meta["name"], data.arrays["tokens"], meta["train"], vocabulary, data.fingerprint, data.path)


def _bytes(content: NDArray[np.uint8], what: str) -> tuple[NDArray[Any], Vocabulary]:
    return content, Vocabulary(kind="bytes", size=256)


def _characters(content: NDArray[np.uint8], what: str) -> tuple[NDArray[Any], Vocabulary]:
    try:
        text = content.tobytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{what} is not UTF-8 (byte {error.start}); read it as bytes") from error
    points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    present = np.unique(points)
    if len(present) > 1 << 16:
        raise DataError(f"{what} has {len(present)} different characters, over {1 << 16}; read it as bytes")
    ids = np.zeros(int(present.max(initial=0)) + 1, dtype=np.uint8 if len(present) <= 256 else np.uint16)
    ids[present] = np.arange(len(present))
    characters = present.tobytes().decode("utf-32-le")
    return ids[points], Vocabulary(kind="characters", size=len(characters), characters=characters)


def _tokens(content: NDArray[np.uint8], what: str) -> tuple[NDArray[Any], Vocabulary]:
    if len(content) % 2:
        raise DataError(f"{what} has an odd number of bytes; a file of tokens holds uint16 numbers")
    tokens = content.view("<u2")
    return tokens, Vocabulary(kind="tokens", size=int(tokens.max()) + 1)
