from __future__ import annotations

import random

import pytest
import torch

from xsalab.eval.scoring import Prompt, score_prompts
from xsalab.model import GPT, ModelConfig, VariantChoice, init_weights
from xsalab.model.variant import VARIANTS

CONFIG = ModelConfig(depth=3, width=32, heads=4, kv_heads=2, context=24, vocab_size=50, window_block=4)


def model_of(name: str = "standard", kernel: str = "sdpa") -> GPT:
    """A model whose every weight counts: at the usual start W_o is zero."""
    model = GPT(CONFIG, VariantChoice(name), kernel=kernel)
    init_weights(model, 3)
    draws = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=draws))
    return model


def prompts() -> list[Prompt]:
    """Options of items, items on one passage, a prompt alone, one that begins another, two that are equal."""
    draw = random.Random(1)
    passage = [0, *(draw.randrange(50) for _ in range(30))]
    found = []
    for _ in range(3):
        question = passage + [draw.randrange(50) for _ in range(draw.randint(18, 25))]
        for n in (1, 2, 5):
            found.append(Prompt(tuple(question + [draw.randrange(50) for _ in range(n)]), len(question)))
    found.append(Prompt((0, 5), 1))
    found.append(Prompt(tuple(draw.randrange(50) for _ in range(70)), 3))
    found.append(Prompt(tuple(passage), 20))
    found.append(found[0])
    draw.shuffle(found)
    return found


def alone(model: GPT, prompt: Prompt) -> tuple[float, bool]:
    """By the loss of the whole sequence, without cache or padding."""
    tokens = torch.tensor([prompt.tokens])
    with torch.no_grad():
        nats = model.token_nats(tokens[:, :-1], tokens[:, 1:])[0, prompt.start - 1 :]
        likeliest = model(tokens[:, :-1])[0, prompt.start - 1 :].argmax(-1)
    return -float(nats.double().sum()), likeliest.tolist() == list(prompt.tokens[prompt.start :])


@pytest.mark.parametrize("kernel", ["sdpa", "explicit"])
@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_a_score_is_that_of_the_prompt_alone_whatever_is_shared_and_padded(name: str, kernel: str) -> None:
    """F145: batches of one row and of all; F139: a log-likelihood, the larger the likelier."""
    model = model_of(name, kernel)
    for batch_tokens in (1, 64, 4096):
        for prompt, score in zip(prompts(), score_prompts(model, prompts(), batch_tokens=batch_tokens), strict=True):
            want, greedy = alone(model, prompt)
            assert score.log_likelihood == pytest.approx(want, abs=1e-4)
            assert score.tokens == len(prompt.tokens) - prompt.start
            assert score.greedy == greedy
    assert model.kernel == kernel


def test_the_likeliest_tokens_are_called_so() -> None:
    """F139: what the model itself would write is greedy, and likelier than anything else of that length."""
    model = model_of()
    tokens = [0, 7, 9]
    with torch.no_grad():
        for _ in range(4):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    others = [Prompt((*tokens[:-1], other), 3) for other in range(50) if other != tokens[-1]]
    own, *rest = score_prompts(model, [Prompt(tuple(tokens), 3), *others])
    assert own.greedy
    assert not any(score.greedy for score in rest)
    assert own.log_likelihood > max(score.log_likelihood for score in rest)


def test_a_shared_beginning_is_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve prompts on one passage: the passage goes through the model once, each question once, each option once."""
    model = model_of()
    ran = []
    original = GPT.hidden

    def watched(self: GPT, tokens: torch.Tensor, cache: object = None) -> torch.Tensor:
        ran.append(tokens.numel())
        return original(self, tokens, cache)  # pyright: ignore

    monkeypatch.setattr(GPT, "hidden", watched)
    passage = tuple(i % 50 for i in range(100))
    asked = [
        Prompt((*passage, *(question,) * 20, option), 120) for question in (1, 2, 3) for option in (10, 11, 12, 13)
    ]
    score_prompts(model, asked, batch_tokens=4096)
    assert sum(ran) == 100 + 3 * 20 + 12


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (Prompt((0, 1, 2), 0), "start = 0 of a prompt of 3 tokens"),
        (Prompt((0, 1, 2), 3), "at least one token is scored"),
        (Prompt((0, 50), 1), "outside the vocabulary of 50"),
    ],
)
def test_a_prompt_without_anything_to_score_is_refused(prompt: Prompt, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        score_prompts(model_of(), [prompt])
