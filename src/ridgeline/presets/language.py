"""Presets of language models."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.data.window import WindowSpec
from ridgeline.models import DecoderConfig, LanguageConfig
from ridgeline.optim import OptimizerConfig
from ridgeline.train.config import TrainConfig


def gpt2_c256() -> TrainConfig:
    """Standard GPT-2 at width 256 over characters. 4,837,888 parameters at V = 65 (tinyshakespeare's characters)."""
    decoder = DecoderConfig(layers=6, width=256, heads=8, gelu="tanh", positions="learned", context=256)
    return TrainConfig(
        preset="gpt2-c256",
        model=LanguageConfig(decoder=decoder, vocabulary=65),
        data="tinyshakespeare",
        window=WindowSpec(context=256),
        batch=32,
        optimizer=OptimizerConfig(lr=1e-3, floor=1e-4, warmup=20, betas=(0.9, 0.99), weight_decay=0.1),
        steps=2000,
        eval_interval=250,
        checkpoint_interval=250,
    )


def fast_c256() -> TrainConfig:
    """FastTransformer: GPT-2 with one KV head, 2× MLP, RMSNorm, no biases. 2,559,744 parameters at V = 65.

    The listing in the article on it shows exact GELU and an RMSNorm eps of 1e-6; the code that its figures were
    measured with has tanh GELU and 1e-5. This preset follows the code.
    """
    decoder = DecoderConfig(
        layers=6,
        width=256,
        heads=8,
        kv_heads=1,
        mlp_width=512,
        norm="rmsnorm",
        norm_eps=1e-5,
        bias=False,
        gelu="tanh",
        positions="learned",
        context=256,
    )
    # the rest is GPT-2's recipe, so that a comparison compares the models
    return replace(gpt2_c256(), preset="fast-c256", model=LanguageConfig(decoder=decoder, vocabulary=65))


def shakespeare_fast() -> TrainConfig:
    """The recipe for tinyshakespeare in the shortest time: Muon and relative positions. 4,821,504 parameters.

    Its target is a held-out loss of 1.4697 nats a character, where nanoGPT's model of 10.6 million ends. On the way
    there Muon took 0.6 of AdamW's steps and relative positions 0.8 of learned ones' (one seed each), and nanoGPT's own
    shape longer than this one.
    """
    decoder = DecoderConfig(layers=6, width=256, heads=8, gelu="tanh", positions="relative", dropout=0.1, context=256)
    return replace(
        gpt2_c256(),
        preset="shakespeare-fast",
        model=LanguageConfig(decoder=decoder, vocabulary=65),
        optimizer=OptimizerConfig(algorithm="muon", lr=4e-3, warmup=100, betas=(0.9, 0.99), weight_decay=0.1),
        steps=1200,
        eval_interval=80,
        checkpoint_interval=600,
    )


def gpt2_124m() -> TrainConfig:
    """GPT-2 small (Radford et al. 2019): 124,439,808 parameters, the head shares the embedding's weights.

    Its tokens come as nanoGPT's .bin; another text brings its own vocabulary. The recipe is GPT-3's for this size
    (Brown et al. 2020, table 2.1): learning rate 6e-4 to a tenth of it, batches of half a million tokens.
    """
    decoder = DecoderConfig(layers=12, width=768, heads=12, gelu="tanh", positions="learned", context=1024)
    return TrainConfig(
        preset="gpt2-124m",
        model=LanguageConfig(decoder=decoder, vocabulary=50257, tied=True),
        data="pystdlib",
        window=WindowSpec(context=1024),
        batch=512,
        accumulation=8,
        optimizer=OptimizerConfig(lr=6e-4, floor=6e-5, warmup=700, betas=(0.9, 0.95), weight_decay=0.1),
        steps=20_000,
        eval_interval=500,
        eval_windows=1024,
        checkpoint_interval=1000,
    )
