"""A console in a process of its own: Dolphin through libmelee on one side, frames and controllers on the other.

The process is there so that one call of a model can serve many consoles: libmelee's own work (a quarter of a
millisecond of Python a frame) then runs beside the others', and a console that hangs can be ended from outside.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ridgeline.errors import ConfigError, WorkerError, nearest, require
from ridgeline.games.melee.frames import CHARACTERS, STAGES, TRIGGER_UNITS, Frames
from ridgeline.games.melee.libmelee import BUTTONS, frame_of
from ridgeline.games.parallel import ignore_interrupts, starting

OWN_PORT, OTHER_PORT = 1, 2
START_SECONDS = 120.0  # until the match begins
FRAME_SECONDS = 30.0  # until a frame follows a controller
MENU_STEPS = 6_000
EMPTY_STEPS = 600
GOODBYE_SECONDS = 15.0


@dataclass(frozen=True, kw_only=True)
class Match:
    """What is played, and on what.

    Attributes:
        dolphin: Slippi's Dolphin, the executable.
        iso: the game, NTSC 1.02.
        character: own.
        opponent: the computer's.
        level: the computer's, 1 to 9.
        stage: name.

    Raises:
        ConfigError: something that does not exist.
    """

    dolphin: Path
    iso: Path
    character: str = "FOX"
    opponent: str = "FOX"
    level: int = 9
    stage: str = "FINAL_DESTINATION"

    def __post_init__(self) -> None:
        for name in ("dolphin", "iso"):
            if not getattr(self, name).is_file():
                raise ConfigError(f"there is no file {getattr(self, name)}; give --{name} a file")
        if not os.access(self.dolphin, os.X_OK):
            raise ConfigError(f"{self.dolphin} is not executable; give --dolphin Slippi's Dolphin")
        playable = CHARACTERS.keys() - {"NANA"}  # who comes with Popo
        for name, known in (("character", playable), ("opponent", playable), ("stage", STAGES.keys())):
            if getattr(self, name) not in known:
                raise ConfigError(nearest(getattr(self, name), known, name))
        if not 1 <= self.level <= 9:
            raise ConfigError(f"opponent_level must be 1 to 9, got {self.level}")


class Console:
    """One match on one console, seen from the caller's process.

    Args:
        match: what is played.
        number: what to call it.

    Attributes:
        home: a folder of its own, removed by `close`.
    """

    def __init__(self, match: Match, number: int = 0) -> None:
        self.number = number
        self._hangs = False
        self.home = Path(tempfile.mkdtemp(prefix="ridgeline-console-"))  # Dolphin's settings and pipes
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        # libmelee starts a process itself, which those of multiprocessing may only do when they are no daemons
        self._process = context.Process(target=_serve, args=(theirs, match, _free_port(), self.home))
        with starting():
            self._process.start()
        theirs.close()

    def send(self, controller: Frames) -> None:
        """Hold a controller, CONTROLLER[1], for the next frame."""
        with contextlib.suppress(OSError):  # it is gone; `receive` says so
            self._pipe.send(controller)

    def receive(self, seconds: float = FRAME_SECONDS) -> Frames | None:
        """The next frame, FRAME[1] with the own player first; None when the match is over.

        Args:
            seconds: to wait for it; the first one takes as long as the menus.

        Raises:
            WorkerError: the console hangs, crashed or cannot be used.
        """
        try:
            if not self._pipe.poll(seconds):
                self._hangs = True
                raise WorkerError(f"console {self.number} gave no frame within {seconds:.0f} s")
            content = self._pipe.recv()
        except (EOFError, OSError) as error:
            self._process.join(GOODBYE_SECONDS)
            raise WorkerError(f"the process of console {self.number} died ({self._process.exitcode})") from error
        if isinstance(content, str):
            raise WorkerError(f"console {self.number}: {content}")
        return content

    def close(self) -> None:
        """End it, and all that it started."""
        self._pipe.close()  # upon which it ends by itself, unless it hangs
        self._process.join(0.0 if self._hangs else GOODBYE_SECONDS)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            assert self._process.pid is not None
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.join()
        shutil.rmtree(self.home, ignore_errors=True)


def _free_port() -> int:
    """A UDP port that nobody has, for Dolphin to be reached at."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _serve(pipe: Connection, match: Match, port: int, home: Path) -> None:
    """The console's process: frames out, controllers in."""
    ignore_interrupts()
    os.setsid()  # so that all it starts can be ended with it
    tempfile.tempdir = str(home)  # where libmelee makes Dolphin's folder
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            with _dolphin(match, port) as (console, controllers):
                for frame in _frames(console, controllers, match):
                    pipe.send(frame)
                    hold(controllers[OWN_PORT], pipe.recv())
                pipe.send(None)
        except _ConsoleError as error:
            pipe.send(str(error))
        except (EOFError, OSError):
            raise
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")
        finally:
            shutil.rmtree(home, ignore_errors=True)  # the caller may have been killed


class _ConsoleError(Exception):
    """What went wrong with a console."""


@contextlib.contextmanager
def _dolphin(match: Match, port: int) -> Iterator[tuple[Any, dict[int, Any]]]:
    """A running Dolphin with both controllers connected."""
    melee = require("melee", "melee")
    try:
        # a bare name would be looked for where the system keeps its programs
        dolphin = match.dolphin.absolute()
        console = melee.Console(path=str(dolphin), slippi_port=port, **_headless(dolphin))
    except Exception as error:  # libmelee asserts, raises ValueError, RuntimeError and the system's own
        why = str(error) or type(error).__name__
        raise _ConsoleError(f"{match.dolphin} is no Dolphin that libmelee knows ({why})") from error
    reached = False
    try:
        controllers = {port: melee.Controller(console=console, port=port) for port in (OWN_PORT, OTHER_PORT)}
        nogui = "nogui" in match.dolphin.name.lower()
        console.run(iso_path=str(match.iso.absolute()), platform="headless" if nogui else None)
        for controller in controllers.values():
            _plug_in(console, controller)
        reached = console.connect()
        if not reached:
            raise _ConsoleError(f"Dolphin does not answer on port {port}{_exit_code(console)}")
        threading.Thread(target=_watch, args=(console,), daemon=True).start()
        yield console, controllers
    finally:
        if not reached:  # libmelee can only shut down a connection that was made
            console._slippstream._worker = None
        console.stop()


def _watch(console: Any) -> None:
    """Wake a step that waits for a frame when Dolphin is gone; the network takes half a minute to notice."""
    console._process.wait()
    console.interrupt()


def _headless(dolphin: Path) -> dict[str, Any]:
    """Options for a console that nobody watches, as fast as the build allows."""
    from melee.console import DolphinBuild, get_dolphin_version

    version = get_dolphin_version(str(dolphin))
    # only vladfi1's ExiAI build runs faster than it polls: inputs then come through the EXI device
    exi = version.build is DolphinBuild.EXI_AI
    return {
        "tmp_home_directory": True,
        "blocking_input": True,  # a frame waits for its input; without this, inputs are lost
        "polling_mode": True,
        "polling_timeout": FRAME_SECONDS,
        "online_delay": 0,
        "gfx_backend": "Null" if exi or version.mainline else "",
        "disable_audio": True,
        "fullscreen": False,
        "use_exi_inputs": exi,
        "enable_ffw": exi,
        "emulation_speed": 0,
        "save_replays": False,
    }


def _plug_in(console: Any, controller: Any) -> None:
    """Connect a controller's pipe; libmelee would wait for ever for a Dolphin that has died."""
    deadline = time.monotonic() + FRAME_SECONDS
    while True:
        try:
            ready = os.open(controller.pipe_path, os.O_WRONLY | os.O_NONBLOCK)
            break
        except OSError as error:  # nobody reads it yet
            if time.monotonic() > deadline or _exit_code(console):
                raise _ConsoleError(f"Dolphin does not take its controllers{_exit_code(console)}") from error
            time.sleep(0.02)
    controller.connect()
    os.close(ready)


def _frames(console: Any, controllers: dict[int, Any], match: Match) -> Iterator[Frames]:
    """Through the menus, then every frame of the match."""
    state = _through_the_menus(console, controllers, match)
    for controller in controllers.values():
        controller.release_all()
    before, empty = None, 0
    while _in_game(state):
        if _has_players(state):
            if before is not None and state.frame <= before:
                return  # the next match has begun at once
            before, empty = state.frame, 0
            other = next(port for port in state.players if port != OWN_PORT)
            yield frame_of(state, (OWN_PORT, other))
        else:
            empty += 1
            if empty > EMPTY_STEPS:
                raise _ConsoleError(f"the match shows no players for {EMPTY_STEPS} frames")
        state = _step(console)


def _through_the_menus(console: Any, controllers: dict[int, Any], match: Match) -> Any:
    melee = require("melee", "melee")
    stage = melee.Stage[match.stage]
    choices = {
        OWN_PORT: {"character_selected": melee.Character[match.character], "cpu_level": 0, "autostart": True},
        OTHER_PORT: {"character_selected": melee.Character[match.opponent], "cpu_level": match.level},
    }
    helpers = {port: melee.MenuHelper() for port in controllers}
    for _ in range(MENU_STEPS):
        state = _step(console)
        if _in_game(state) and _has_players(state):
            return state
        for port, controller in controllers.items():
            helpers[port].menu_helper_simple(state, controller, stage_selected=stage, costume=port - 1, **choices[port])
    raise _ConsoleError(f"the menus were not left within {MENU_STEPS} frames")


def _in_game(state: Any) -> bool:
    return state.menu_state.name in ("IN_GAME", "SUDDEN_DEATH")


def _has_players(state: Any) -> bool:
    """Whether a state is of a whole frame: while a match loads, and in menus' last words, there are none."""
    return len(state.players) == 2 and all(p.character.name in CHARACTERS for p in state.players.values())


def _step(console: Any) -> Any:
    try:
        state = console.step()
    except Exception as error:  # a broken pipe, the end of the connection, a message that cannot be read
        raise _ConsoleError(f"{type(error).__name__} in the middle of a match{_exit_code(console)}") from error
    if state is None:
        raise _ConsoleError(f"no frame within {FRAME_SECONDS:.0f} s{_exit_code(console)}")
    return state


def _exit_code(console: Any) -> str:
    process = console._process
    ended = None if process is None else process.poll()
    return "" if ended is None else f": Dolphin ended with exit code {ended}"


def hold(controller: Any, inputs: Frames) -> None:
    """Put CONTROLLER[1] on a controller of libmelee's, digital and analog trigger both."""
    melee = require("melee", "melee")
    held = inputs[0]
    button = melee.Button
    for stick, name in ((button.BUTTON_MAIN, "main"), (button.BUTTON_C, "c")):
        controller.tilt_analog_unit(stick, *(held[name] / 80))
    controller.press_shoulder(button.BUTTON_L, held["trigger"] / TRIGGER_UNITS)
    for name, bit in BUTTONS.items():
        if held["buttons"] & bit:
            controller.press_button(button(name))
        else:
            controller.release_button(button(name))
