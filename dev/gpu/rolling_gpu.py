"""How far a rolling cache is from the whole window: the distributions of every head over the states of exact play.

PYTHONPATH=src:SITE python dev/gpu/rolling_gpu.py CHECKPOINT DEVICE [GAMES [FIRST_SEED [LEVEL [SECONDS]]]]

GAMES games in lock step are played from whole windows at temperature 1 while a rolling cache sees the same states; once
the window is full, each decision gives KL(exact ‖ rolling) in nats by head, and whether the likeliest class is the same.
Prints one line of JSON.
"""

import json
import sys
import time

import torch

from ridgeline.games import game
from ridgeline.models import ControllerPolicy
from ridgeline.models.cache import DecoderCache
from ridgeline.play.player import load_player
from ridgeline.play.rollout import Seat


def logits_of(policy, state_BC):
    """Logits of every head, each given the earlier heads' logits."""
    found, seen_BC = {}, state_BC
    for head in policy.config.heads:
        found[head.name] = policy.heads[head.name](seen_BC)
        seen_BC = torch.cat([seen_BC, found[head.name]], dim=-1)
    return found


@torch.no_grad()
def main():
    path, device, *rest = sys.argv[1:]
    games, first, level, seconds = (int(given) for given in [*rest, *["8", "5000", "0", "60"][len(rest) :]])
    player, begun = load_player(path, device, "rolling"), time.monotonic()
    policy: ControllerPolicy = player.policy
    adapter = game(player.game)
    generator = torch.Generator(player.device).manual_seed(first)
    seats = [Seat(adapter, player, seed, level) for seed in range(first, first + games)]
    cache = DecoderCache(policy.decoder, games, player.window.context, rolls=True)
    kl, same, decisions = {}, {}, 0
    while seats and time.monotonic() - begun < seconds:
        windows = [seat.window for seat in seats]
        filled = len(windows[0])
        batch = {
            name: torch.stack([torch.from_numpy(window.rows[name][:filled]) for window in windows]).to(player.device)
            for name in windows[0].rows
        }
        at_B = torch.full((len(seats),), filled - 1, device=player.device)
        exact_BC = policy.state_at(batch, at_B)
        rolling_BC = cache.step(policy.input(policy.inputs({name: rows[:, -1] for name, rows in batch.items()})))
        if windows[0].rolled:
            decisions += len(seats)
            theirs = logits_of(policy, rolling_BC)
            for name, logits in logits_of(policy, exact_BC).items():
                exact, rolling = logits.double().log_softmax(-1), theirs[name].double().log_softmax(-1)
                kl.setdefault(name, []).append((exact.exp() * (exact - rolling)).sum(-1).cpu())
                same.setdefault(name, []).append((exact.argmax(-1) == rolling.argmax(-1)).double().cpu())
        noise_BV = policy.noise(len(seats), 1.0, generator)
        for seat, chosen in zip(seats, policy.choose(exact_BC, noise_BV, 1.0).tolist(), strict=True):
            seat.hold(tuple(chosen))
        going = [place for place, seat in enumerate(seats) if not seat.environment.done]
        if len(going) < len(seats):
            seats = [seats[place] for place in going]
            cache.keep(torch.tensor(going, dtype=torch.int64, device=player.device))
    result = {"checkpoint": path, "games": games, "left": len(seats), "decisions": decisions}
    for name, parts in kl.items():
        values = torch.cat(parts)
        result[name] = {
            "kl_mean": float(values.mean()),
            "kl_p99": float(values.quantile(0.99)),
            "kl_max": float(values.max()),
            "same_likeliest": float(torch.cat(same[name]).mean()),
        }
    print(json.dumps(result), flush=True)


main()
