"""`ridgeline sample`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional, arg

from ridgeline.cli.output import Flag, parse
from ridgeline.train.sample import sample


@dataclass(frozen=True, kw_only=True)
class Options:
    """Continue a text with a trained language model.

    With --json the last line is {"prompt", "text", "tokens", "seconds", "tokens_per_s", "checkpoint"}.

    Attributes:
        checkpoint: folder of a checkpoint, or of a run, whose best is taken.
        prompt: the beginning of the text.
        tokens: length of the continuation in tokens.
        temperature: 1 samples from the model, less is bolder, 0 takes the most likely token.
        top_k: draw from the k most likely tokens only; 0 for all.
        seed: of the draws.
        device: cpu, cuda, cuda:N or auto.
        json: print one JSON object as the last line.
    """

    checkpoint: Annotated[str, Positional, arg(metavar="CHECKPOINT")]
    prompt: str = ""
    tokens: int = 500
    temperature: float = 0.8
    top_k: int = 0
    seed: int = 0
    device: str = "auto"
    json: Flag = False


def run(arguments: Sequence[str]) -> int:
    """Sample and print."""
    options = parse(Options, arguments, "sample")
    result = sample(
        options.checkpoint,
        options.prompt,
        tokens=options.tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        seed=options.seed,
        device=options.device,
    )
    if not options.json:
        print(result.whole)
        return 0
    rate = result.tokens / result.seconds
    values = {"prompt": result.prompt, "text": result.text, "tokens": result.tokens}
    times = {"seconds": round(result.seconds, 3), "tokens_per_s": round(rate, 1)}
    print(json.dumps({**values, **times, "checkpoint": str(result.checkpoint)}))
    return 0
