"""From a config as asked for to one as run: device, precision and engine decided, the model fitted to the data."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ridgeline.data.games import GameData
from ridgeline.data.text import TextData, Vocabulary
from ridgeline.models import Category, Head, LanguageConfig, ModelConfig, PolicyConfig
from ridgeline.train.config import TrainConfig
from ridgeline.train.engines import find_device, find_engine, find_precision, settle_engine

EMBEDDING_WIDTH = 16  # of a category that the preset does not know


def resolve(config: TrainConfig, data: TextData | GameData) -> TrainConfig:
    """The config with nothing left open but the run's folder.

    Raises:
        UnsupportedError: a device, precision or engine that cannot run here.
    """
    device = find_device(config.device)
    path = Path(config.data)
    resolved = dataclasses.replace(
        config,
        device=str(device),
        precision=find_precision(config.precision, device),
        engine=find_engine(config.engine, device),
        data=str(path.resolve()) if path.exists() else config.data,
        model=fit_model(config.model, data),
    )
    return settle_engine(resolved, config.engine)


def fit_model(model: ModelConfig, data: TextData | GameData) -> ModelConfig:
    """The model with its trunk kept, and the inputs and outputs that the data asks for."""
    if isinstance(data, TextData):
        return _fit_language(model, data.vocabulary)
    return _fit_policy(model, data)


def _fit_language(model: ModelConfig, vocabulary: Vocabulary) -> LanguageConfig:
    if not isinstance(model, LanguageConfig):
        return LanguageConfig(decoder=model.decoder, vocabulary=vocabulary.size)
    if vocabulary.kind == "tokens" and model.vocabulary >= vocabulary.size:
        return model  # ids of an unknown tokenizer: those that the text lacks exist all the same
    return dataclasses.replace(model, vocabulary=vocabulary.size)


def _fit_policy(model: ModelConfig, data: GameData) -> PolicyConfig:
    """Heads in the data's order; embedding widths are the preset's where it knows the category."""
    names = [name for name, _ in data.heads]
    widths, previous, conditioning = {}, tuple(names), PolicyConfig.conditioning
    if isinstance(model, PolicyConfig):
        widths = {category.name: category.width for category in model.categories}
        conditioning = model.conditioning
        if set(model.previous) <= set(names):
            previous = model.previous
    return PolicyConfig(
        decoder=model.decoder,
        heads=tuple(Head(name=name, classes=classes) for name, classes in data.heads),
        categories=tuple(
            Category(name=name, rows=rows, width=widths.get(name, min(rows, EMBEDDING_WIDTH)), columns=columns)
            for name, rows, columns in data.groups
        ),
        numbers=data.numbers.shape[1],
        previous=previous,
        conditioning=conditioning,
    )
