"""Small races for tests."""

import torch

from ridgeline.play import GameResult
from ridgeline.play.ledger import Ledger
from ridgeline.study import race
from ridgeline.study.clocked import Task, grid_until, train_on_clock
from ridgeline.study.race import Games, Race
from ridgeline.study.racers import find_racers
from ridgeline.train.settings import to_dict

SMALL = "boxing+layers=1+width=32+heads=2+window.context=8+context=8+batch=8"


def racers(data, *words, minutes=0.02, gpus=1):
    settings = {"data": str(data.path), "minutes": minutes, "device": "cpu", "precision": "auto"}
    return find_racers(words, data, settings, gpus)


def make_race(data, *words, count=1, minutes=0.02, grid=(0.5,)):
    games = Games(count=count, level=0, temperature=1.0, first_seed=5_000, device="cpu", cache="exact")
    contenders = racers(data, *words, minutes=minutes)
    return Race(
        contenders=contenders,
        grid=grid_until(60 * minutes, grid),
        games=games,
        data=data.name,
        fingerprint=data.fingerprint,
    )


def train(ours, contender, folder):
    """Train here what a race trains in processes of their own."""
    threads = torch.get_num_threads()
    for _ in train_on_clock(Task(to_dict(contender.config), str(folder / contender.folder), ours.grid, threads)):
        pass


def keep_games(ours, contender, folder):
    """Games as if they had been played."""
    ledger = Ledger(folder / race.GAMES)
    for job in race._jobs(ours, folder, contender):
        for seed in job.seeds:
            ledger.add(job.key, GameResult(seed=seed, level=0, dealt=seed % 9, taken=0, knockout=1, steps=9))
