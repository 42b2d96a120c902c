"""A stand-in for a console that plays back a recorded match: for tests of the live path, without the game.

It speaks what Slippi's Dolphin speaks: spectator messages over ENet, controllers through named pipes, and in lock step
(one FLUSH of every pipe, then one frame). The real libmelee client drives it and cannot tell. It does not react: the
recording goes on as it was played, whatever is pressed. So nobody can win against it, and no rate of winning may be
taken from it; what it shows is that every frame arrives and every input gets through.

`install` writes an executable that libmelee takes for Dolphin; the "ISO" is the replay.
"""

from __future__ import annotations

import argparse
import base64
import configparser
import json
import os
import select
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.errors import require
from ridgeline.games.melee.events import FRAME_END, GAME_END, GAME_START, PAYLOADS, PRE_FRAME, Recording
from ridgeline.games.melee.frames import A, B, L, R, X, Y, Z, final_rows

VERSION = "Slippi (mainline) loopback"  # libmelee looks for the word
MENU_EVENT, CHARACTER_SELECT, STAGE_SELECT, LOADING, AFTER_THE_MATCH = 0x3E, 0x0002, 0x0102, 0x0202, 0x0402
MENU_BYTES = 0x4A
MENU_FRAMES = 3  # of each menu before the match
PATIENCE = 30.0  # seconds without a word from the client
BUTTONS = {"A": A, "B": B, "X": X, "Y": Y, "Z": Z, "L": L, "R": R}


def install(
    file: Path,
    *,
    log: Path | None = None,
    stall: int | None = None,
    disconnect: int | None = None,
    crash: int | None = None,
) -> Path:
    """Write an executable that stands in for Dolphin.

    Args:
        file: to be written.
        log: where it notes every input: JSON lines {"frame", "pads": {port: {main, c, l, r, buttons}}}, frame None in
            menus; sticks in eightieths, triggers in 140ths, buttons as bits.
        stall: frame from which on it says nothing more.
        disconnect: frame at which it hangs up.
        crash: frame at which it ends with exit code 3.
    """
    options = {"log": log, "stall": stall, "disconnect": disconnect, "crash": crash}
    words = [sys.executable, "-m", __name__]
    words += [word for name, value in options.items() if value is not None for word in (f"--{name}={value}",)]
    file.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    file.chmod(0o755)
    return file


class Pad:
    """One controller pipe: the commands that came through it, and the state they make."""

    def __init__(self, pipe: Path) -> None:
        self.descriptor = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        self.flushes = 0
        self._rest = b""
        self._now: dict[str, Any] = {"main": (0, 0), "c": (0, 0), "l": 0, "r": 0, "buttons": 0}
        self._flushed: list[dict[str, Any]] = []

    def read(self) -> None:
        """Take what there is.

        Raises:
            EOFError: the client has closed the pipe.
        """
        try:
            content = os.read(self.descriptor, 1 << 16)
        except BlockingIOError:
            return
        if not content and self.flushes:
            raise EOFError
        *lines, self._rest = (self._rest + content).split(b"\n")
        for line in lines:
            self._take(line.decode().split())

    def next(self) -> dict[str, Any] | None:
        """The state at the next FLUSH that has come."""
        return self._flushed.pop(0) if self._flushed else None

    def _take(self, words: list[str]) -> None:
        match words:
            case ["FLUSH"]:
                self.flushes += 1
                self._flushed.append(dict(self._now))
            case ["PRESS", name]:
                self._now["buttons"] |= BUTTONS.get(name, 0)
            case ["RELEASE", name]:
                self._now["buttons"] &= ~BUTTONS.get(name, 0)
            case ["SET", ("MAIN" | "C") as name, x, y]:
                # what Dolphin makes of it, in the game's own units
                raw = [int(np.floor((float(value) - 0.5) * 254)) for value in (x, y)]
                self._now[name.lower()] = tuple(max(-80, min(80, value)) for value in raw)
            case ["SET", ("L" | "R") as name, value]:
                self._now[name.lower()] = min(140, int(float(value) * 255))


class Loopback:
    """One run: connect, menus, match, menu.

    Args:
        replay: the recording, of version 3.0 or later.
        user: Dolphin's user folder, as libmelee has prepared it.
        options: see `install`.
    """

    def __init__(self, replay: Path, user: Path, options: argparse.Namespace) -> None:
        self.enet = require("enet", "melee")
        config = configparser.ConfigParser()
        config.read(user / "Config" / "Dolphin.ini")
        self.blocking = config["Slippi"]["BlockingPipes"] == "True"
        port = int(config["Slippi"]["SpectatorLocalPort"])
        self.options = options
        self.recording = Recording.read(replay)
        self.log = open(options.log, "w") if options.log else None  # noqa: SIM115
        self.pads = {int(pipe.name[-1]): Pad(pipe) for pipe in sorted((user / "Pipes").glob("slippibot*"))}
        self.host = self.enet.Host(self.enet.Address(b"127.0.0.1", port), 8, 1, 0, 0)
        self.peer: Any = None
        self.cursor = 0

    def run(self) -> None:
        """Serve one client to the end of the match.

        Raises:
            EOFError: the client has gone.
            TimeoutError: it says nothing.
        """
        self._connect()
        for scene in (CHARACTER_SELECT, STAGE_SELECT, LOADING):
            for _ in range(MENU_FRAMES):
                self._wait(None)
                self._menu(scene)
        head, frames, tail = self._messages()
        self._wait(None)
        self._event(head)  # upon which libmelee flushes once more, for the first frame
        for number, content in frames:
            self._wait(number)  # the input that leads to this frame
            if number == self.options.crash:
                os._exit(3)
            if number == self.options.disconnect:
                self.peer.disconnect()
                self._serve(2.0)
                return
            if number == self.options.stall:
                self._serve(600.0)
            self._event(content)
        self._wait(None)
        self._event(tail)
        self._menu(AFTER_THE_MATCH)
        self._serve(1.0)

    def _messages(self) -> tuple[bytes, list[tuple[int, bytes]], bytes]:
        """What comes before the first frame, every frame that stands with its number, and what comes after."""
        recording = self.recording
        head, tail, groups, part, number = b"", b"", [], b"", 0
        for start, end in recording.events():
            event = recording.content[start:end]
            if event[0] in (PAYLOADS, GAME_START):
                head += event
            elif event[0] == GAME_END:
                tail = event
            else:
                part += event
                if event[0] == PRE_FRAME:
                    number = int.from_bytes(event[1:5], "big", signed=True)
                if event[0] == FRAME_END:
                    groups.append((number, part))
                    part = b""
        stands = final_rows(np.array([number for number, _ in groups]))
        return head, [groups[row] for row in stands], tail

    def _connect(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while self.peer is None:
            event = self.host.service(50)
            if (
                event.type == self.enet.EVENT_TYPE_RECEIVE
                and json.loads(event.packet.data)["type"] == "connect_request"
            ):
                self.peer = event.peer
            if time.monotonic() > deadline:
                raise TimeoutError
        self._send({"type": "connect_reply", "nick": "loopback", "version": VERSION, "cursor": 0})

    def _menu(self, scene: int) -> None:
        content = bytearray(MENU_BYTES)
        content[0], content[1:3] = MENU_EVENT, scene.to_bytes(2, "big")
        self._send({"type": "menu_event", "payload": base64.b64encode(content).decode()})

    def _event(self, content: bytes) -> None:
        payload = base64.b64encode(content).decode()
        self._send({"type": "game_event", "payload": payload, "cursor": self.cursor, "next_cursor": self.cursor + 1})
        self.cursor += 1

    def _send(self, message: dict[str, Any]) -> None:
        self.peer.send(0, self.enet.Packet(json.dumps(message).encode(), self.enet.PACKET_FLAG_RELIABLE))
        self.host.service(0)

    def _wait(self, frame: int | None) -> None:
        """Until every pad has been flushed once more; notes their states as the inputs of `frame`."""
        if not self.blocking:
            return
        states: dict[int, dict[str, Any]] = {}
        for _ in self._waiting(PATIENCE):
            for port, pad in self.pads.items():
                if port not in states and (state := pad.next()) is not None:
                    states[port] = state
            if len(states) == len(self.pads):
                break
        else:
            raise TimeoutError
        if self.log is not None:
            self.log.write(json.dumps({"frame": frame, "pads": states}) + "\n")
            self.log.flush()

    def _serve(self, seconds: float) -> None:
        """Keep the connection alive."""
        for _ in self._waiting(seconds):
            pass

    def _waiting(self, seconds: float) -> Iterator[None]:
        """Look at pipes and connection again and again for so long."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for pad in self.pads.values():
                pad.read()
            yield
            self.host.service(0)
            select.select([pad.descriptor for pad in self.pads.values()], [], [], 0.001)


def main() -> int:
    """What the executable does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--version", action="version", version=VERSION)
    parser.add_argument("-e", dest="replay", type=Path, required=True)
    parser.add_argument("-u", dest="user", type=Path, required=True)
    parser.add_argument("--log", type=Path)
    for name in ("stall", "disconnect", "crash"):
        parser.add_argument(f"--{name}", type=int)
    options, _ = parser.parse_known_args()
    try:
        Loopback(options.replay, options.user, options).run()
    except EOFError:
        return 0
    except TimeoutError:
        return 4
    return 0


if __name__ == "__main__":
    sys.exit(main())
