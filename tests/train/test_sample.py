import pytest
import torch

from ridgeline import checkpoint
from ridgeline.errors import CheckpointError, ConfigError, DataError
from ridgeline.models import DecoderConfig, LanguageConfig, build
from ridgeline.train import train
from ridgeline.train.sample import continue_tokens, sample


@pytest.fixture
def run(config, change):
    train(change(config, steps=80, eval_interval=80))
    return "run"


def test_it_continues_with_words_of_the_text(run, text):
    words = set(text.read_text().split())
    result = sample(run, "", tokens=200, temperature=0)
    assert len(result.text) == result.tokens == 200
    pieces = result.text.split()[1:-1]
    assert pieces
    assert sum(piece in words for piece in pieces) > len(pieces) / 2


def test_a_seed_gives_one_text(run):
    texts = {seed: sample(run, "ab", tokens=60, temperature=1.0, seed=seed).text for seed in (1, 2)}
    assert sample(run, "ab", tokens=60, temperature=1.0, seed=1).text == texts[1]
    assert texts[1] != texts[2]


def test_top_1_is_greedy(run):
    greedy = sample(run, "ab", tokens=50, temperature=0).text
    assert sample(run, "ab", tokens=50, temperature=1.5, top_k=1, seed=3).text == greedy


def test_beyond_the_context_the_newest_tokens_are_seen():
    decoder = DecoderConfig(layers=1, width=16, heads=2, context=4)
    model = build(LanguageConfig(decoder=decoder, vocabulary=50), seed=0).eval()
    generator = torch.Generator().manual_seed(0)
    given = torch.arange(9)
    ids = continue_tokens(model, given, 3, 0.0, 0, generator)
    sequence = given.tolist()
    for chosen in ids.tolist():
        assert chosen == int(model(torch.tensor([sequence[-4:]]))[0, -1].argmax())
        sequence.append(chosen)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tokens": 0}, "tokens must be at least 1"),
        ({"temperature": -1.0}, "temperature must be 0 or more"),
        ({"temperature": float("nan")}, "temperature must be 0 or more"),
        ({"top_k": -1}, "top_k must be 0"),
    ],
)
def test_numbers_that_cannot_be(values, message):
    with pytest.raises(ConfigError, match=message):
        sample("run", "", **values)


def test_a_prompt_beyond_the_vocabulary(run):
    with pytest.raises(DataError, match="vocabulary has no 'z'"):
        sample(run, "abz")


def test_other_things_than_language_models(tmp_path, run):
    saved = checkpoint.load(checkpoint.find(run))
    meta = {key: value for key, value in saved.meta.items() if key != "vocabulary"}
    checkpoint.save(tmp_path / "policy", saved.tensors, meta)
    with pytest.raises(CheckpointError, match="no language model"):
        sample("policy", "")
    with pytest.raises(CheckpointError, match="does not exist"):
        sample("nowhere", "")
