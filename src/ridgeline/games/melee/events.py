"""A Slippi file's bytes: the events that a console sent, one after another, as the file keeps them.

For the loopback console, which sends them again, and for making variants of a replay. Reading games is the parser's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ridgeline.errors import DataError

HEAD = b"{U\x03raw[$U#l"  # UBJSON: a map whose first entry, "raw", is an array of bytes with a 32-bit length
PAYLOADS, GAME_START, PRE_FRAME, GAME_END, FRAME_END = 0x35, 0x36, 0x37, 0x39, 0x3C
RANDOM_SEED = 0x13D  # in Game Start, 4 bytes


@dataclass(frozen=True)
class Recording:
    """The events of a .slp.

    Attributes:
        content: the whole file.
        start: where the events begin.
        end: where they end.
        sizes: bytes of each kind of event, its own number included.
    """

    content: bytes
    start: int
    end: int
    sizes: dict[int, int]

    @classmethod
    def read(cls, file: Path) -> Recording:
        """Find a file's events.

        Raises:
            DataError: it is no Slippi replay.
        """
        content = file.read_bytes()
        start = len(HEAD) + 4
        if not content.startswith(HEAD) or len(content) < start + 2 or content[start] != PAYLOADS:
            raise DataError(f"{file} is no Slippi replay; give a .slp file")
        length = int.from_bytes(content[len(HEAD) : start], "big") or len(content) - start
        first = 1 + content[start + 1]
        sizes = {PAYLOADS: first}
        for at in range(start + 2, start + first, 3):
            sizes[content[at]] = 1 + int.from_bytes(content[at + 1 : at + 3], "big")
        return cls(content, start, min(start + length, len(content)), sizes)

    def events(self) -> Iterator[tuple[int, int]]:
        """Where each event lies, as (start, end), in order.

        Raises:
            DataError: an event of an unknown kind, or one that is cut off.
        """
        at = self.start
        while at < self.end:
            size = self.sizes.get(self.content[at])
            if size is None or at + size > self.end:
                raise DataError(f"the replay's events break off at byte {at}; give a whole replay")
            yield at, at + size
            at += size

    def reseeded(self, seed: int) -> bytes:
        """The file as a game that was started with another random seed."""
        at = self.start + self.sizes[PAYLOADS] + RANDOM_SEED
        return self.content[:at] + seed.to_bytes(4, "big") + self.content[at + 4 :]
