"""Boxing (Activision, 1980) on the Arcade Learning Environment: the embedded default game.

The player is the white boxer, the opponent the console's own. A round ends after two minutes of the game's clock, or
when someone has landed 100 blows. The state is the console's 128 bytes of memory; which of them a policy may see is
the business of the features. The emulator is an optional dependency under its own licence; its game file is never
copied.

Without randomness every game of a policy would be the same one, so the emulator repeats the last frame's action with
probability 0.25 instead of taking the new one ("sticky actions", Machado et al. 2018), and a seeded number of idle
frames goes before the first decision.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.errors import ConfigError, require
from ridgeline.games.boxing.actions import HEADS, NEUTRAL, ale_action
from ridgeline.games.env import Controller, Score

LEVELS = (0, 1, 2, 3)
DECISION_FRAMES = 4
FRAMES_PER_SECOND = 60
STICKY = 0.25
IDLE_FRAMES = 30  # fewer than so many go before the first decision
CAP = 2_500  # decisions; a round on the clock takes about 1,780
KNOCKOUT = 100

PLAYER_X, OPPONENT_X, PLAYER_Y, OPPONENT_Y = 32, 33, 34, 35  # bytes of the memory
DEALT, TAKEN = 18, 19
KNOCKOUT_BYTE = 0xC0  # what the score shows instead of 100

Ram = NDArray[np.uint8]


class Boxing:
    """One round against the console; see `ridgeline.games.env.Environment`.

    Args:
        level: the console's difficulty switches, 0 to 3.
        sticky: probability that a frame repeats the last frame's action.

    Raises:
        ConfigError: a level that does not exist.
        MissingExtraError: the emulator is not installed.
    """

    heads = HEADS
    neutral = NEUTRAL
    cap = CAP
    step_seconds = DECISION_FRAMES / FRAMES_PER_SECOND

    def __init__(self, level: int = 0, sticky: float = STICKY) -> None:
        if level not in LEVELS:
            raise ConfigError(f"Boxing has the levels {', '.join(map(str, LEVELS))}, got {level}")
        if not 0 <= sticky < 1:
            raise ConfigError(f"sticky must be in [0, 1), got {sticky}")
        ale_py = require("ale_py", "games")
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        self.level = level
        self.sticky = sticky
        self.emulator = ale_py.ALEInterface()

    def reset(self, seed: int) -> Ram:
        """Start a round and return its first state."""
        self.emulator.setInt("random_seed", seed)
        self.emulator.setFloat("repeat_action_probability", self.sticky)
        self.emulator.loadROM(rom())  # the seed counts only when a game is loaded
        self.emulator.setDifficulty(self.level)
        self.emulator.reset_game()
        for _ in range(int(np.random.default_rng(seed).integers(IDLE_FRAMES))):
            self.emulator.act(0)
        return self.state

    def step(self, controller: Controller) -> Ram:
        """Hold the controller for DECISION_FRAMES frames, fewer if the round ends, and return the next state."""
        self.advance(controller)
        return self.state

    def advance(self, controller: Controller) -> int:
        """`step` without the state: points dealt minus points taken within these frames."""
        action, act = ale_action(controller), self.emulator.act
        return sum(act(action) for _ in range(DECISION_FRAMES))

    def snapshot(self) -> Any:
        """All of the emulator's state, hidden parts included: a privilege that no player has."""
        return self.emulator.cloneState()

    def restore(self, snapshot: Any) -> None:
        """Continue from another instance's snapshot."""
        self.emulator.restoreState(snapshot)

    def screen(self) -> NDArray[np.uint8]:
        """See Drawn: uint8[210, 160, 3]."""
        return self.emulator.getScreenRGB()

    @property
    def state(self) -> Ram:
        """uint8[128], the console's memory."""
        return self.emulator.getRAM()

    @property
    def score(self) -> Score:
        """Blows landed so far."""
        ram = self.state
        return Score(_points(int(ram[DEALT])), _points(int(ram[TAKEN])))

    @property
    def done(self) -> bool:
        """Whether the round has ended."""
        return self.emulator.game_over()

    @property
    def knockout(self) -> int:
        """1 if the player won by knockout, −1 if the console did, else 0."""
        dealt, taken = self.score
        return (dealt >= KNOCKOUT) - (taken >= KNOCKOUT)


def _points(shown: int) -> int:
    """A score's byte, two decimal digits, as a number."""
    return KNOCKOUT if shown == KNOCKOUT_BYTE else 10 * (shown >> 4) + (shown & 15)


def rom() -> Path:
    """The game file inside the emulator's package."""
    require("ale_py", "games")
    from ale_py import roms

    return Path(str(roms.get_rom_path("boxing")))


@cache
def versions() -> dict[str, str]:
    """What a recorded round depends on: the emulator's version and the game file's md5."""
    return {
        "ale_py": require("ale_py", "games").__version__,
        "rom_md5": hashlib.md5(rom().read_bytes(), usedforsecurity=False).hexdigest(),
    }
