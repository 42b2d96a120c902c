"""Continue a text with a trained language model."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ridgeline import checkpoint
from ridgeline.checkpoint import Checkpoint
from ridgeline.data.text import KINDS, Vocabulary
from ridgeline.errors import CheckpointError, ConfigError, enough_memory
from ridgeline.models import LanguageConfig, LanguageModel
from ridgeline.train.engines import find_device
from ridgeline.train.state import BEST, config_of, damaged, load_weights


@dataclass(frozen=True)
class Sample:
    """A continuation.

    Attributes:
        prompt: what was given.
        text: what follows it.
        whole: both, as one text.
        tokens: number of tokens in `text`.
        seconds: time that generation took.
        checkpoint: where the weights came from.
    """

    prompt: str
    text: str
    whole: str
    tokens: int
    seconds: float
    checkpoint: Path


def sample(
    path: str | Path,
    prompt: str,
    *,
    tokens: int = 500,
    temperature: float = 0.8,
    top_k: int = 0,
    seed: int = 0,
    device: str = "auto",
) -> Sample:
    """Continue `prompt` by `tokens` tokens.

    Args:
        path: checkpoint, or run, whose best is taken.
        prompt: the beginning; an empty one starts from the vocabulary's first token, which is not shown.
        tokens: length of the continuation.
        temperature: 1 samples from the model, less is bolder, 0 takes the most likely token.
        top_k: only the k most likely tokens are drawn from; 0 for all.
        seed: of the draws.
        device: where to run.

    Raises:
        CheckpointError: there is none, or it is no language model.
        ConfigError: a number that cannot be.
        DataError: the prompt holds what the vocabulary lacks.
    """
    if tokens < 1:
        raise ConfigError(f"tokens must be at least 1, got {tokens}")
    if not temperature >= 0:
        raise ConfigError(f"temperature must be 0 or more and finite, got {temperature}")
    if top_k < 0:
        raise ConfigError(f"top_k must be 0 (all) or more, got {top_k}")
    if not 0 <= seed < 2**63:
        raise ConfigError(f"seed must be in [0, 2^63), got {seed}")
    where = find_device(device)
    saved = checkpoint.load(checkpoint.find(path, prefer=BEST))
    model, vocabulary = load_language_model(saved)
    model.to(where).eval()
    given = vocabulary.encode(prompt) or [0]
    generator = torch.Generator(where).manual_seed(seed)
    started = time.perf_counter()
    with enough_memory("lower --tokens, or use --device cpu"):
        ids = continue_tokens(model, torch.tensor(given, device=where), tokens, temperature, top_k, generator)
    seconds = time.perf_counter() - started
    text = vocabulary.decode(ids.tolist())
    whole = f"{prompt}{vocabulary.blank if prompt else ''}{text}"
    return Sample(prompt, text, whole, tokens, seconds, saved.path)


def load_language_model(saved: Checkpoint) -> tuple[LanguageModel, Vocabulary]:
    """The language model of a checkpoint, on the CPU, and its vocabulary.

    Raises:
        CheckpointError: it holds another kind of model.
    """
    config = config_of(saved).model
    if not isinstance(config, LanguageConfig) or "vocabulary" not in saved.meta:
        raise CheckpointError(f"{saved.path} is no language model; a policy is judged by `ridgeline play`")
    model = LanguageModel(config, seed=0)
    load_weights(saved, model)
    return model, _vocabulary(saved, config.vocabulary)


def _vocabulary(saved: Checkpoint, size: int) -> Vocabulary:
    try:
        vocabulary = Vocabulary.from_dict(saved.meta["vocabulary"])
    except TypeError as error:
        raise damaged(saved, "vocabulary") from error
    sizes = {"bytes": 256, "characters": len(vocabulary.characters) if isinstance(vocabulary.characters, str) else 0}
    # a model over the ids of an unknown tokenizer may know more of them than its text held
    known = vocabulary.kind == "tokens" and type(vocabulary.size) is int and vocabulary.size <= size
    if not known and not (vocabulary.kind in KINDS and vocabulary.size == size == sizes.get(vocabulary.kind)):
        raise damaged(saved, "vocabulary")
    return vocabulary


@torch.inference_mode()
def continue_tokens(
    model: LanguageModel,
    given: Tensor,
    tokens: int,
    temperature: float,
    top_k: int,
    generator: torch.Generator,
) -> Tensor:
    """`tokens` ids, int64[tokens], that follow `given`, int64[n]; beyond its context the model sees the newest ones."""
    context = model.config.decoder.context
    sequence = torch.cat([given, given.new_zeros(tokens)])
    for end in range(len(given), len(sequence)):
        logits_V = model(sequence[None, max(0, end - context) : end])[0, -1].float()
        sequence[end] = _choose(logits_V, temperature, top_k, generator)
    return sequence[len(given) :]


def _choose(logits_V: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits_V.argmax()
    if 0 < top_k < len(logits_V):
        least = logits_V.topk(top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < least, float("-inf"))
    # the largest logit at 0 and a temperature that float32 holds: a small one then makes the others −inf, and no NaN
    scaled_V = (logits_V - logits_V.max()) / max(temperature, torch.finfo(torch.float32).tiny)
    return torch.multinomial(scaled_V.softmax(-1), 1, generator=generator)[0]
