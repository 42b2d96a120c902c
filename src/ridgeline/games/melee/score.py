"""What a match came to, counted frame by frame: the last frame alone shows a reset, or nothing."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.games.melee.frames import Frames


@dataclass(frozen=True, kw_only=True)
class MatchResult:
    """How one match ended, as the own player sees it.

    Attributes:
        game: number of the match.
        winner: 1 for the own player, −1 for the other one, 0 for nobody: more stocks, or as many and less damage.
        stocks_taken: of the other player.
        stocks_lost: own.
        dealt: damage in percent.
        taken: damage in percent.
        frames: that were seen.
    """

    game: int
    winner: int
    stocks_taken: int
    stocks_lost: int
    dealt: int
    taken: int
    frames: int


class Tally:
    """Counts a match. It is shown every frame, own player first, and none that comes after the match.

    Attributes:
        frames: that it was shown.
    """

    def __init__(self) -> None:
        self.frames = 0
        self._damage = [0, 0]
        self._lost = [0, 0]
        self._before: tuple[tuple[int, int], ...] | None = None

    def count(self, frame: Frames) -> None:
        """Take note of the next frame, FRAME[1]."""
        now = tuple((int(player["percent"]), int(player["stocks"])) for player in frame[0]["players"])
        for seat, (percent, stocks) in enumerate(now):
            percent_before, stocks_before = self._before[seat] if self._before else (percent, stocks)
            self._damage[seat] += max(0, percent - percent_before)
            self._lost[seat] += max(0, stocks_before - stocks)
        self._before = now
        self.frames += 1

    def result(self, game: int) -> MatchResult:
        """What it came to so far."""
        own, other = self._before or ((0, 0), (0, 0))
        standing = [(stocks, -percent) for percent, stocks in (own, other)]
        return MatchResult(
            game=game,
            winner=(standing[0] > standing[1]) - (standing[0] < standing[1]),
            stocks_taken=self._lost[1],
            stocks_lost=self._lost[0],
            dealt=self._damage[1],
            taken=self._damage[0],
            frames=self.frames,
        )
