"""Turning a step into one CUDA graph, and saying why where that cannot be."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from ridgeline.errors import ConfigError, UnsupportedError, lacks_memory

Program = Callable[[], None]
Capture = Callable[[Program], Program]
"""Takes a program that has been warmed up and returns its replay."""

WARM_UP = 3

_CURES = (
    ("synchroniz", "the model or loss waits for the device (.item(), .tolist(), bool(tensor), nonzero, a print)"),
    ("legacy stream", "something in the model runs on the default stream"),
    ("capture", "the model or loss does what a CUDA graph cannot hold"),
)


def reason(error: BaseException) -> str:
    """What a failed warm-up or capture was about, in one sentence, with PyTorch's own first line."""
    text = str(error)
    cure = next((cure for sign, cure in _CURES if sign in text.lower()), "the step failed")
    return f"{cure}: {text.strip().splitlines()[0] if text.strip() else type(error).__name__}"


class CudaCapture:
    """Captures programs on a side stream into graphs that share one memory pool.

    Nothing of a program ever runs on the default stream before it is captured: warm-up and capture use the same
    side stream. The last warm-up run forbids synchronisation, so that what cannot be captured shows itself before
    a capture begins, while the process is still whole.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def warm_up(self, program: Program) -> None:
        """Runs the program on the side stream until everything lazy has happened."""
        mode = torch.cuda.get_sync_debug_mode()
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.stream(self.stream):
                for run in range(WARM_UP):
                    if run == WARM_UP - 1:
                        torch.cuda.set_sync_debug_mode("error")
                    program()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def __call__(self, program: Program) -> Program:
        """Captures the program. On failure the random generator is made usable again and the error raised."""
        graph = torch.cuda.CUDAGraph()
        gc.collect()
        try:
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                program()
        except Exception as error:
            self._free_generator()
            if lacks_memory(error):
                raise  # the step knows what needs how much
            raise UnsupportedError(f"the step cannot be captured: {reason(error)}") from error
        return graph.replay

    def _free_generator(self) -> None:
        """After a failed capture PyTorch leaves the generator in its capturing state; a fresh one takes its place."""
        generator = torch.cuda.default_generators[self.device.index or 0]
        fresh = torch.Generator(self.device)
        fresh.manual_seed(generator.initial_seed())
        generator.graphsafe_set_state(fresh.graphsafe_get_state())


def choose_capture(capture: bool | Capture | None, device: torch.device) -> Capture | None:
    """How a step on `device` is captured: None for not at all.

    Raises:
        ConfigError: it is neither a truth value nor a function.
        UnsupportedError: a CUDA graph is asked for and there is no CUDA device.
    """
    if capture is None:
        capture = device.type == "cuda"
    if not isinstance(capture, bool) and not callable(capture):
        raise ConfigError(f"capture must be True, False, None or a function of a program, got {capture!r}")
    if not isinstance(capture, bool):
        return capture
    if capture and device.type != "cuda":
        raise UnsupportedError(f"a step on {device} cannot be captured in a CUDA graph; pass capture=False")
    return CudaCapture(device) if capture else None
