"""Decisions of a policy in several games at once: from whole windows, or from cached keys and values.

On CUDA each of the two is one captured graph, so that a decision costs the host one launch; games that have ended then
stay in the batch, unseen, because a graph's shapes are fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from ridgeline.models import ControllerPolicy
from ridgeline.models.cache import DecoderCache
from ridgeline.play.player import Player
from ridgeline.play.window import Window

Tensors = dict[str, Tensor]
WARM_UP = 3  # calls before a capture, in which libraries allocate what they need


def source(*seed: int) -> torch.Generator:
    """What a game's samples come from, by a seed or several numbers that together are one."""
    (state,) = np.random.SeedSequence(seed).generate_state(1, np.uint64).tolist()
    return torch.Generator().manual_seed(state)


class Captured:
    """A function of tensors as one CUDA graph.

    Args:
        function: from tensors to a tensor, without a wait for the device; may change tensors that it keeps.
        inputs: what it is called with at first; later calls have the same names, shapes and dtypes.
        undo: called after every call that was only made to prepare.
    """

    def __init__(self, function: Callable[[Tensors], Tensor], inputs: Tensors, undo: Callable[[], object]) -> None:
        self._inputs = {name: tensor.clone() for name, tensor in inputs.items()}
        device = next(iter(inputs.values())).device
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                function(self._inputs)
                undo()
        torch.cuda.current_stream(device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            self._output = function(self._inputs)

    def __call__(self, inputs: Tensors) -> Tensor:
        """The function's result; the next call overwrites it."""
        for name, tensor in inputs.items():
            self._inputs[name].copy_(tensor, non_blocking=True)
        self._graph.replay()
        return self._output


class Decider:
    """Chooses a controller in each of several games that began together.

    Args:
        player: the policy, and what it keeps between decisions.
        games: how many at first.
        temperature: 1 samples from the policy, 0 takes the most likely class of each head.
        generators: sources of the samples, one a game, so that a game is the same whichever others are played beside
            it; on the CPU, so that it is the same on every device, but for rounding.
        capture: whether to use CUDA graphs; None for wherever the policy computes on CUDA.
    """

    def __init__(
        self,
        player: Player,
        games: int,
        *,
        temperature: float,
        generators: Iterable[torch.Generator],
        capture: bool | None = None,
    ) -> None:
        self.player, self.temperature, self.generators = player, temperature, list(generators)
        self.capture = player.device.type == "cuda" if capture is None else capture
        self.games = games
        self._rows = list(range(games))  # of the batch, one a game that goes on
        self._places = torch.arange(games, device=player.device)  # the same, on the device
        self._cache: DecoderCache | None = None
        if player.cache != "none":
            rolls = player.cache == "rolling"
            self._cache = DecoderCache(self._policy.decoder, games, player.window.context, rolls=rolls)
        self._captured: dict[str, Captured] = {}
        self._static: dict[str, dict[str, np.ndarray]] = {}

    @property
    def _policy(self) -> ControllerPolicy:
        assert isinstance(self.player.policy, ControllerPolicy)
        return self.player.policy

    @torch.no_grad()
    def __call__(self, windows: Sequence[Window]) -> list[tuple[int, ...]]:
        """A controller for each game.

        Args:
            windows: one a game, with a state more than at the last call; all equally full.
        """
        cached = self._cache is not None and (self.player.cache == "rolling" or not windows[0].rolled)
        if self.capture:
            chosen = self._replay(windows, cached)
        elif cached:
            newest = self._gather(windows, cached)
            chosen = self._advance(newest | self._noise()).tolist()
        else:
            chosen = self._whole(self._gather(windows, cached)).tolist()
        return [tuple(controller) for controller in chosen]

    def keep(self, games: Iterable[int]) -> None:
        """Go on with some of the games only, given by their places among the present ones."""
        places = list(games)
        self.generators = [self.generators[place] for place in places]
        if self.capture:
            self._rows = [self._rows[place] for place in places]
            self._places = torch.tensor(self._rows, dtype=torch.int64, device=self.player.device)
        elif self._cache is not None:
            self._cache.keep(torch.tensor(places, dtype=torch.int64, device=self.player.device))

    def _gather(self, windows: Sequence[Window], cached: bool) -> Tensors:
        """The newest states of the games [B, …], or their windows [B, T, …] as far as they are filled."""
        filled = len(windows[0])
        part = slice(filled - 1, filled) if cached else slice(filled)
        arrays = {name: np.stack([window.rows[name][part] for window in windows]) for name in windows[0].rows}
        tensors = {name: torch.from_numpy(array).to(self.player.device) for name, array in arrays.items()}
        return {name: tensor[:, 0] for name, tensor in tensors.items()} if cached else tensors

    def _whole(self, windows: Tensors) -> Tensor:
        batch, filled = len(windows["previous"]), windows["previous"].shape[1]
        at_B = torch.full((batch,), filled - 1, device=self.player.device)
        return self.player.policy.act(windows, at_B, temperature=self.temperature, generator=self.generators)

    def _noise(self) -> Tensors:
        """Of the games that go on."""
        noise_BV = self._policy.noise(len(self.generators), self.temperature, self.generators)
        return {} if noise_BV is None else {"noise": noise_BV}

    def _advance(self, inputs: Tensors) -> Tensor:
        """One position through the cache."""
        assert self._cache is not None
        policy = self._policy
        state_BC = self._cache.step(policy.input(policy.inputs(inputs)))
        return policy.choose(state_BC, inputs.get("noise"), self.temperature)

    def _reread(self, inputs: Tensors) -> Tensor:
        """Whole windows, of which `at` says where they end."""
        return self._policy.choose(self._policy.state_at(inputs, inputs["at"]), inputs.get("noise"), self.temperature)

    def _replay(self, windows: Sequence[Window], cached: bool) -> list[list[int]]:
        """By a captured graph, whose batch keeps the size it had at first."""
        kind, newest = "step" if cached else "whole", len(windows[0]) - 1
        if kind not in self._static:
            self._static[kind] = {
                name: np.zeros((self.games, *(array.shape[1:] if cached else array.shape)), array.dtype)
                for name, array in windows[0].rows.items()
            }
        for row, window in zip(self._rows, windows, strict=True):
            for name, array in self._static[kind].items():
                array[row] = window.rows[name][newest] if cached else window.rows[name]
        device = self.player.device
        inputs = {name: torch.from_numpy(array).to(device) for name, array in self._static[kind].items()}
        for name, noise_BV in self._noise().items():  # games that have ended get none
            inputs[name] = noise_BV.new_zeros(self.games, noise_BV.shape[1]).index_copy_(0, self._places, noise_BV)
        if not cached:
            inputs["at"] = torch.full((self.games,), newest, device=device)
        if kind not in self._captured:
            self._captured[kind] = Captured(self._advance if cached else self._reread, inputs, self._undo())
        chosen = self._captured[kind](inputs).tolist()
        return [chosen[row] for row in self._rows]

    def _undo(self) -> Callable[[], object]:
        """What takes back a step through the cache: its slot is written again, only the position must be put back."""
        cache = self._cache
        if cache is None:
            return lambda: None
        position = cache.position.clone()
        return lambda: cache.position.copy_(position)
