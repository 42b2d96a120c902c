"""What stops a run: numbers that are no longer finite, and the user's Ctrl-C."""

from __future__ import annotations

import signal
import threading
from types import FrameType

from ridgeline.errors import RidgelineError


class DivergedError(RidgelineError):
    """A loss or gradient that is not finite.

    Args:
        step: the step that showed it, from 1.
        loss: its loss.
        norm: its gradient norm.
    """

    def __init__(self, step: int, loss: float, norm: float) -> None:
        super().__init__(
            f"training stopped at step {step}: loss {loss:g}, gradient norm {norm:g}; the last good checkpoint is "
            "kept: resume from it or lower optimizer.lr"
        )
        self.step = step


class Interrupt:
    """Turns the first SIGINT inside the `with` block into a request that the loop reads; a second one interrupts.

    Outside the main thread, where Python lets nobody handle signals, it never asks for anything.
    """

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, self._before)
