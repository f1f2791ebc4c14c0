from __future__ import annotations

import pytest
import torch

from xsalab.eval.generate import generate, pick, stream_text
from xsalab.model import GPT, ModelConfig, VariantChoice


@pytest.fixture(scope="module")
def model() -> GPT:
    """A small model with windows, grouped heads, XSA and weights that make every part count."""
    config = ModelConfig(
        depth=3, width=32, heads=4, kv_heads=2, context=8, vocab_size=50, window_block=4,
        value_gate_channels=4, smear_channels=8,
    )  # fmt: skip
    model, random = GPT(config, VariantChoice("xsa")), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3, generator=random)
    return model


def argmax_by_full_passes(model: GPT, prompt: list[int], tokens: int) -> list[int]:
    sequence = list(prompt)
    for _ in range(tokens):
        with torch.no_grad():
            sequence.append(int(model(torch.tensor([sequence]))[0, -1].argmax()))
    return sequence[len(prompt) :]


@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no-cache"])
def test_temperature_0_takes_the_likeliest(model: GPT, cache: bool) -> None:
    prompt = [3, 14, 15]
    assert list(generate(model, prompt, 5, temperature=0, cache=cache)) == argmax_by_full_passes(model, prompt, 5)


def test_the_cache_changes_no_draw(model: GPT) -> None:
    with_cache, without = (list(generate(model, [1, 2], 6, seed=5, cache=cache)) for cache in (True, False))
    assert with_cache == without


def test_the_cache_works_beyond_its_first_size(model: GPT) -> None:
    """F016, F018: 100 tokens, past the context of 8, the cache's first 64 rows and the rotary table."""
    config = ModelConfig(
        depth=3, width=32, heads=4, kv_heads=2, context=256, vocab_size=50, window_block=4,
        value_gate_channels=4, smear_channels=8,
    )  # fmt: skip
    wide = GPT(config, VariantChoice("xsa"))
    wide.load_state_dict(model.state_dict())
    wide._tabulate(4)
    assert list(generate(wide, [1], 100, temperature=0)) == list(generate(wide, [1], 100, temperature=0, cache=False))


def test_a_seed_is_one_text_and_the_global_stream_is_left_alone(model: GPT) -> None:
    before = torch.get_rng_state()
    first, again, other = (list(generate(model, [1], 20, seed=seed)) for seed in (0, 0, 1))
    assert first == again != other
    assert torch.equal(torch.get_rng_state(), before)


def test_it_ends_before_the_stop_token(model: GPT) -> None:
    tokens = list(generate(model, [1], 20, seed=0))
    stop = tokens[7]
    assert list(generate(model, [1], 20, seed=0, stop=stop)) == tokens[: tokens.index(stop)]


def test_gradients_stay_on_between_tokens(model: GPT) -> None:
    """A generator that held no_grad open would switch its caller's gradients off."""
    for _ in generate(model, [1], 2):
        assert torch.is_grad_enabled()


def test_training_goes_on_after_the_rotary_table_grew(model: GPT) -> None:
    list(generate(model, [1], 40))
    model.token_nats(torch.tensor([[1, 2, 3]]), torch.tensor([[2, 3, 4]])).sum().backward()
    model.zero_grad()


def test_draws_follow_the_softmax() -> None:
    logits, random, temperature = torch.tensor([1.0, 0.0, -1.0, 2.0]), torch.Generator().manual_seed(0), 0.7
    count = 4000
    drawn = torch.tensor([pick(logits, temperature, 0, random) for _ in range(count)])
    p = (logits / temperature).softmax(0)
    deviation = (p * (1 - p) / count).sqrt()
    assert ((torch.bincount(drawn, minlength=4) / count - p).abs() < 4 * deviation).all()


def test_top_k_keeps_the_likeliest_and_all_is_all() -> None:
    logits, random = torch.tensor([0.0, 3.0, 1.0, 2.9]), torch.Generator().manual_seed(0)
    assert {pick(logits, 1.0, 2, random) for _ in range(200)} == {1, 3}
    assert {pick(logits, 5.0, 99, random) for _ in range(200)} == {0, 1, 2, 3}
    assert {pick(logits, 1.0, 1, random) for _ in range(20)} == {1}


def test_a_tiny_temperature_is_greedy_and_finite() -> None:
    assert pick(torch.tensor([1.0, 2.0, -3.0]), 1e-40, 0, torch.Generator()) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [1, 50]}, "token 50; the vocabulary has tokens 0 to 49"),
        ({"prompt": [-1]}, "token -1"),
        ({"tokens": -1}, "tokens = -1"),
        ({"temperature": -0.5}, "temperature = -0.5"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"top_k": -1}, "top_k = -1"),
    ],
    ids=["empty", "too-large", "negative", "tokens", "temperature", "nan", "top-k"],
)
def test_a_wrong_setting_is_refused_before_the_first_token(model: GPT, change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(model, **{"prompt": [1], "tokens": 1, **change})


# --- text out of bytes


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_character_is_never_split(size: int) -> None:
    """F158: the byte tokens of an emoji; nothing shows until it is whole."""
    text = "naïve 🦀 — 日本"
    data = text.encode()
    pieces = [data[i : i + size] for i in range(0, len(data), size)]
    shown = list(stream_text(pieces))
    assert "".join(shown) == text
    assert all("\N{REPLACEMENT CHARACTER}" not in part and part for part in shown)


def test_text_is_shown_as_soon_as_it_is_whole() -> None:
    crab = "🦀".encode()
    stream = stream_text([b"a", crab[:2], crab[2:], b"b"])
    assert [next(stream) for _ in range(3)] == ["a", "🦀", "b"]


def test_bytes_that_are_no_text_become_replacement_characters() -> None:
    assert (
        "".join(stream_text([b"a\xff", b"b", "é".encode()[:1]]))
        == "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}"
    )
