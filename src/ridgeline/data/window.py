"""What a training window is. The specification belongs to the data and is stored in the checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.errors import ConfigError

MAX_DELAY = 30


@dataclass(frozen=True, kw_only=True)
class WindowSpec:
    """T positions of a text or a game, and which target belongs to each.

    Position i of a window that starts at raw frame s shows the state of frame s + stride · i and the controller that
    led to it; its target is the controller chosen there, or, with a delay, the one chosen `delay` frames later: what a
    player whose input takes effect that much later has to send now. With stride 2 a window of T positions spans 2T
    frames, the target still is the controller of the very next frame, and at play one decision is held for 2 frames.
    Text has stride 1 and delay 0: the target is the next token.

    Attributes:
        context: positions in a window (T).
        stride: raw frames from one position to the next.
        delay: raw frames by which the target lies later, 0 to 30.
    """

    context: int
    stride: int = 1
    delay: int = 0

    def __post_init__(self) -> None:
        for field in ("context", "stride", "delay"):
            if type(getattr(self, field)) is not int:
                raise ConfigError(f"{field} must be a whole number, got {getattr(self, field)!r}")
        for field in ("context", "stride"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{field} must be at least 1, got {getattr(self, field)}")
        if not 0 <= self.delay <= MAX_DELAY:
            raise ConfigError(f"delay must be 0 to {MAX_DELAY} frames, got {self.delay}")

    @property
    def span(self) -> int:
        """Raw frames from a window's first position to its last, both counted."""
        return self.stride * (self.context - 1) + 1
