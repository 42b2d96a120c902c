"""A bot for the Computer Melee Championship: a policy behind the Universal Melee Interface.

The arena holds the games. It sends a frame of each and takes a controller for each; it delays the controllers itself,
by what the policy was trained for (the window's `delay`).
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ridgeline.errors import ConfigError, DataError, nearest, require
from ridgeline.games.melee.controls import Held
from ridgeline.games.melee.features import encoding_of, features
from ridgeline.games.melee.frames import CHARACTERS
from ridgeline.games.melee.umi import controller_rows, frames_of
from ridgeline.play.player import Player


class Memory:
    """The windows of many games, each in a slot of its own, filled from the left.

    Args:
        player: a policy for Melee.
        slots: games at a time.
        temperature: 1 samples from the policy, 0 takes the most likely class of each head.
        seed: of the samples.
    """

    def __init__(self, player: Player, slots: int, *, temperature: float = 1.0, seed: int = 0) -> None:
        self.player, self.temperature = player, temperature
        self.encoding = encoding_of(player.features)
        self.generator = torch.Generator(player.device).manual_seed(seed)
        self._released = self.encoding.released(slots)
        self._groups, self._label = self._released.groups.copy(), self._released.label.copy()
        self._seen = np.zeros(slots, np.int64)  # frames
        self._filled = np.zeros(slots, np.int64)  # positions of the window
        self._windows: dict[str, NDArray[Any]] = {}
        self._chosen = np.tile(np.array(self.encoding.neutral, np.int64), (slots, 1))

    def act(self, frames: NDArray[Any], slots: NDArray[np.int64], first: NDArray[np.bool_]) -> NDArray[np.float32]:
        """A controller for each game.

        Args:
            frames: the protocol's FRAME[N].
            slots: of the games.
            first: which of them are at their first frame.

        Returns:
            The protocol's rows, float32[N, 13].
        """
        self._forget(slots[first])
        ours = frames_of(frames)
        held = Held(self._groups[slots], self._label[slots])
        previous, held = self.encoding.encode_next(ours["players"][:, 0]["controller"], held)
        self._groups[slots], self._label[slots] = held
        due = self._seen[slots] % self.player.window.stride == 0
        if due.any():
            self._append(slots[due], *features(ours[due]), previous[due])
            self._chosen[slots[due]] = self._decide(slots[due])
        self._seen[slots] += 1
        return controller_rows(self.encoding.decode(self._chosen[slots]))

    def _forget(self, slots: NDArray[np.int64]) -> None:
        self._groups[slots], self._label[slots] = self._released.groups[slots], self._released.label[slots]
        self._seen[slots] = self._filled[slots] = 0

    def _append(self, slots: NDArray[np.int64], *parts: NDArray[Any]) -> None:
        """The newest position of some windows; the oldest leaves those that are full."""
        rows = dict(zip(("categories", "numbers", "previous"), parts, strict=True))
        context = self.player.window.context
        if not self._windows:
            shape = (len(self._seen), context)
            self._windows = {name: np.zeros((*shape, part.shape[1]), part.dtype) for name, part in rows.items()}
        full = slots[self._filled[slots] == context]
        self._filled[slots] = np.minimum(self._filled[slots] + 1, context)
        for name, array in self._windows.items():
            array[full, :-1] = array[full, 1:]
            array[slots, self._filled[slots] - 1] = rows[name]

    def _decide(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        at_B = self._filled[slots] - 1
        device, longest = self.player.device, int(at_B.max()) + 1
        batch = {}
        for name, array in self._windows.items():
            part = array[slots, :longest]
            batch[name] = torch.from_numpy(part if name == "numbers" else part.astype(np.int64)).to(device)
        chosen = self.player.policy.act(
            batch, torch.from_numpy(at_B).to(device), temperature=self.temperature, generator=self.generator
        )
        return chosen.cpu().numpy()


def make_bot(player: Player, *, name: str, characters: str = "ALL", temperature: float = 1.0) -> Any:
    """The protocol library's bot.

    Args:
        player: a policy for Melee.
        name: of the bot, for logs.
        characters: that it plays: ALL, or a name.
        temperature: see Memory.

    Raises:
        ConfigError: an unknown character.
        DataError: a policy for another game.
        MissingExtraError: the protocol's library is not installed.
    """
    protocol = require("umi", "melee")
    if player.game != "melee":
        raise DataError(f"a policy for {player.game} cannot play in the championship; give one for melee")
    if characters != "ALL" and characters not in protocol.CHARACTERS:
        raise ConfigError(nearest(characters, ("ALL", *protocol.CHARACTERS.keys() & CHARACTERS.keys()), "character"))

    class PolicyBot(protocol.Bot):  # type: ignore[name-defined, misc]
        pad = False  # nothing is compiled for a size

        def setup(self, session: Any) -> None:
            self.memory = Memory(player, session.num_slots, temperature=temperature, seed=session.rng_seed)

        def act(self, batch: Any) -> Any:
            return protocol.Actions(ctrl=self.memory.act(batch.frames, batch.slots, batch.first))

    # the protocol reads these from the class
    PolicyBot.name, PolicyBot.characters, PolicyBot.delay = name, characters, player.window.delay
    return PolicyBot()


def serve(bot: Any) -> None:
    """Connect to the arena that UMI_SOCKET names and play until it says that it is over.

    Raises:
        ConfigError: there is no arena, or something else in its place.
    """
    protocol, coding = require("umi.protocol", "melee"), require("msgpack", "melee")
    if not os.environ.get("UMI_SOCKET"):
        raise ConfigError("there is no arena: UMI_SOCKET is not set; the arena, or umi-conform, sets it")
    try:
        require("umi", "melee").serve(bot, [])
    except OSError as error:
        raise ConfigError(f"the arena cannot be reached or has gone ({error}); start it first") from error
    except (protocol.ProtocolError, coding.UnpackException, coding.ExtraData) as error:
        raise ConfigError(
            f"what answers at UMI_SOCKET does not speak the championship's protocol ({error}); start its arena there"
        ) from error
