"""Trials of a search for tests."""

from ridgeline.study.trials import Trial

SMALL = "gpt2-c256+layers=1+width=16+heads=2+context=16+window.context=16+batch=2"


def trial(number: int, *path: tuple[float, float], seconds: float | None = None, state: str = "complete") -> Trial:
    quality = path[-1][1] if path else None
    return Trial(number=number, params={}, state=state, path=path, quality=quality, seconds=seconds, crossing=seconds)
