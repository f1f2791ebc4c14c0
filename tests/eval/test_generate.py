from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from xsalab.eval import decode
from xsalab.eval import generate as module
from xsalab.eval.generate import generate, generate_batch, pick, stream_text
from xsalab.interop.nanochat import read_checkpoint
from xsalab.model import GPT, KVCache, ModelConfig, VariantChoice
from xsalab.model.variant import VARIANTS


def small(choice: VariantChoice, kernel: str = "sdpa", context: int = 8) -> GPT:
    """A small model with windows, grouped heads, value embeddings, smear, and weights that make every part count."""
    config = ModelConfig(
        depth=3, width=32, heads=4, kv_heads=2, context=context, vocab_size=50, window_block=4,
        value_gate_channels=4, smear_channels=8,
    )  # fmt: skip
    model, random = GPT(config, choice, kernel=kernel), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2, generator=random)
    return model


@pytest.fixture(scope="module")
def model() -> GPT:
    return small(VariantChoice("xsa"))


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
    assert list(generate(model, [1], 20, seed=0, stop=[stop])) == tokens[: tokens.index(stop)]


def test_gradients_stay_on_between_tokens(model: GPT) -> None:
    """A generator that held no_grad open would switch its caller's gradients off."""
    for _ in generate(model, [1], 2):
        assert torch.is_grad_enabled()


def test_training_goes_on_after_the_rotary_table_grew(model: GPT) -> None:
    list(generate(model, [1], 40))
    model.token_nats(torch.tensor([[1, 2, 3]]), torch.tensor([[2, 3, 4]])).sum().backward()
    model.zero_grad()


def test_draws_follow_the_softmax() -> None:
    """Chances on a fine grid give each token its share, to the grid's width; every row by its own logits."""
    logits, temperature, count = torch.tensor([[1.0, 0.0, -1.0, 2.0], [3.0, 1.0, 0.0, 0.0]]), 0.7, 4000
    chances = [(i + 0.5) / count for i in range(count)]
    for top_k in (0, 3):
        drawn = torch.tensor([pick(logits, temperature, top_k, [chance, chance]) for chance in chances])
        for row in (0, 1):
            kept = logits[row].topk(top_k or 4)
            p = torch.zeros(4).scatter(0, kept.indices, (kept.values / temperature).softmax(0))
            assert (torch.bincount(drawn[:, row], minlength=4) / count - p).abs().max() < 1.5 / count


def test_chance_is_uniform_and_of_one_seed() -> None:
    """The stream behind the draws: reproducible, in [0, 1), without a gap."""
    sample, again, other = (module._Sample(seed) for seed in (3, 3, 4))
    drawn = sorted(sample.chance() for _ in range(1000))
    assert drawn == sorted(again.chance() for _ in range(1000)) != sorted(other.chance() for _ in range(1000))
    # Kolmogorov-Smirnov: exceeded once in a thousand seeds
    assert max(abs(value - i / 1000) for i, value in enumerate(drawn)) < 1.95 / 1000**0.5


def test_top_k_keeps_the_likeliest_and_all_is_all() -> None:
    logits, chances = torch.tensor([[0.0, 3.0, 1.0, 2.9]]), [i / 200 for i in range(200)]
    assert {pick(logits, 1.0, 2, [chance])[0] for chance in chances} == {1, 3}
    assert {pick(logits, 5.0, 99, [chance])[0] for chance in chances} == {0, 1, 2, 3}
    assert {pick(logits, 1.0, 1, [chance])[0] for chance in chances} == {1}


def test_a_tiny_temperature_is_greedy_and_finite() -> None:
    assert pick(torch.tensor([[1.0, 2.0, -3.0]]), 1e-40, 0, [0.999]) == [1]


def test_a_token_without_probability_is_never_drawn() -> None:
    """At both ends of the chances, and where a chance rounds up to 1."""
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0]])
    assert [pick(logits, 1.0, 0, [chance])[0] for chance in (0.0, 0.4999, 0.5, 1 - 2**-53)] == [1, 1, 3, 3]


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


# --- many prompts together

CHOICES = {
    **{name: VariantChoice(name) for name in VARIANTS},
    "xsa, half": VariantChoice("xsa", options={"alpha": 0.5}),
    "xsa, projected": VariantChoice("xsa", options={"against": "projected"}),
    "xsa, learned": VariantChoice("xsa", options={"alpha": {"learned": "sigmoid", "per": "head"}}),
    "xsa, scheduled": VariantChoice("xsa", layers="1:", options={"alpha": {"from": 0.2, "to": 0.9}}),
}
LENGTHS = (5, 1, 13, 2, 9)  # in no order, one alone, some longer than the short window and than the context


def prompts_of(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 50, (length,), generator=random).tolist() for length in lengths]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The shapes (rows, columns) of the passes and steps that follow."""
    seen: list[tuple[int, int]] = []
    hidden, step = GPT.hidden, decode.PlainSteps.__call__

    def watched(self: GPT, tokens: torch.Tensor, cache: KVCache | None = None) -> torch.Tensor:
        seen.append((tokens.shape[0], tokens.shape[1]))
        return hidden(self, tokens, cache)

    def watched_step(self: decode.PlainSteps, tokens: Sequence[int], store: KVCache) -> tuple[torch.Tensor, KVCache]:
        seen.append((len(tokens), 1))
        return step(self, tokens, store)

    monkeypatch.setattr(GPT, "hidden", watched)
    monkeypatch.setattr(decode.PlainSteps, "__call__", watched_step)
    return seen


@pytest.mark.parametrize("kernel", ["sdpa", "explicit"])
@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_cached_logits_of_rows_of_any_length_are_those_of_a_full_pass(choice: VariantChoice, kernel: str) -> None:
    """Rows are read together, go on one token a step, change places, are dropped and doubled."""
    model = small(choice, kernel)
    model.set_progress(0.7)
    rows = prompts_of(LENGTHS)
    steps, follow = decode.stepper(model), torch.Generator().manual_seed(1)
    found, store = module._read(model, [tuple(row) for row in rows])
    for step in range(9):
        with torch.no_grad():
            alone = torch.cat([model(torch.tensor([row]))[:, -1] for row in rows])
        torch.testing.assert_close(found, alone, atol=1e-5, rtol=1e-5)
        if step in (2, 6):
            places = [3, 0, 2, 0] if step == 2 else [1, 2]
            store = store.select(torch.tensor(places))
            rows = [rows[place] for place in places]
        given = torch.randint(0, 50, (len(rows),), generator=follow).tolist()
        rows = [[*row, new] for row, new in zip(rows, given, strict=True)]
        found, store = steps(given, store)


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_a_batch_is_greedy_as_each_prompt_alone(name: str) -> None:
    """F145: neither padding nor neighbours, nor prompts that take the places of finished ones, change a token."""
    model = small(VariantChoice(name))
    prompts = prompts_of((*LENGTHS, 5, 30))
    alone = [argmax_by_full_passes(model, prompt, 8) for prompt in prompts]
    stop = alone[0][4]
    ended = [tokens[: tokens.index(stop)] if stop in tokens else tokens for tokens in alone]
    for batch_rows in (1, 2, 16):
        assert generate_batch(model, prompts, tokens=8, limit=99, batch_rows=batch_rows) == alone
        assert generate_batch(model, prompts, tokens=8, limit=99, batch_rows=batch_rows, stop=[stop]) == ended


def test_a_sample_is_the_same_whatever_is_beside_it(model: GPT) -> None:
    """One seed a sample: alone, in a batch, in another order, with another size of batch."""
    prompts, seeds = prompts_of((*LENGTHS, 5, 5)), [7, 8, 9, 10, 11, 12, 13]
    options: dict[str, Any] = {"temperature": 0.9, "top_k": 20, "stop": [3, 4]}
    alone = [
        list(generate(model, prompt, 15, seed=seed, **options)) for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    assert len({len(tokens) for tokens in alone}) > 2  # some end early
    for order in ([0, 1, 2, 3, 4, 5, 6], [6, 2, 4], [5, 3, 1, 0]):
        for batch_rows in (1, 3, 16):
            new = generate_batch(
                model, [prompts[i] for i in order], tokens=15, seeds=[seeds[i] for i in order], limit=99,
                batch_rows=batch_rows, **options,
            )  # fmt: skip
            assert new == [alone[i] for i in order]


def test_samples_of_one_prompt_differ_from_the_first_token_on(model: GPT) -> None:
    """F155: four samples at temperature 1 begin with four tokens, and come again with their seeds."""
    options: dict[str, Any] = {"tokens": 5, "temperature": 1.0, "limit": 99}
    first, again = (generate_batch(model, [[1, 2, 3]] * 4, seeds=[0, 1, 2, 3], **options) for _ in range(2))
    assert first == again
    assert len({tokens[0] for tokens in first}) == 4
    assert (
        generate_batch(model, [[1, 2, 3]] * 2, seeds=[5, 5], **options)[0]
        == generate_batch(model, [[1, 2, 3]] * 2, seeds=[5, 5], **options)[1]
    )


def test_first_tokens_of_many_samples_follow_the_softmax(model: GPT) -> None:
    """Each seed is a draw of its own: the counts are those of independent draws."""
    count, prompt = 1000, [1, 2, 3]
    new = generate_batch(
        model, [prompt] * count, tokens=1, temperature=1.0, seeds=range(count), batch_rows=500, limit=4
    )
    drawn = torch.bincount(torch.tensor([tokens[0] for tokens in new]), minlength=50) / count
    with torch.no_grad():
        p = model(torch.tensor([prompt]))[0, -1].softmax(0)
    assert ((drawn - p).abs() < 4 * (p * (1 - p) / count).sqrt() + 1 / count).all()


def test_several_samples_of_a_prompt_read_it_once(model: GPT, passes: list[tuple[int, int]]) -> None:
    generate_batch(model, [[1, 2, 3]] * 3 + [[4, 5]] * 2, tokens=3, temperature=1.0, seeds=range(5))
    assert passes == [(2, 3), (5, 1), (5, 1)]


def test_finished_rows_cost_nothing_and_give_their_place_away(model: GPT, passes: list[tuple[int, int]]) -> None:
    """Limits end rows after 3, 2 and 1 tokens; half a batch of room is filled at once."""
    generate_batch(model, [[1] * 5, [1] * 6, [1] * 7], tokens=9)
    assert passes == [(3, 7), (2, 1), (1, 1)]
    passes.clear()
    generate_batch(model, [[1] * 5, [1] * 6, [1] * 7], tokens=9, batch_rows=2)
    assert passes == [(2, 6), (2, 1), (2, 7)]  # the first reads its 7 tokens again, beside the third


def test_prompts_of_like_length_are_read_together(model: GPT, passes: list[tuple[int, int]]) -> None:
    """Two batches of two, in the order of length: nothing is padded."""
    generate_batch(model, [[1] * 7, [2] * 3, [3] * 7, [4] * 3], tokens=1, batch_rows=2)
    assert passes == [(2, 3), (2, 7)]


def test_only_the_last_place_goes_through_the_head(model: GPT, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, capped = [], module.capped_logits
    for name in (module, decode):
        monkeypatch.setattr(name, "capped_logits", lambda x, *rest: seen.append(tuple(x.shape)) or capped(x, *rest))
    generate_batch(model, [[1, 2, 3], [4]], tokens=2)
    list(generate(model, [1, 2, 3], 1))
    assert seen == [(2, 32), (2, 32), (1, 32)]


def test_prompt_and_answer_stay_within_the_limit(model: GPT) -> None:
    """The context of 8 bounds both together; what was cut by it has exactly the tokens that fit."""
    prompts = prompts_of((1, 5, 7))
    assert [len(new) for new in generate_batch(model, prompts, tokens=100)] == [7, 3, 1]
    assert [len(new) for new in generate_batch(model, prompts, tokens=2)] == [2, 2, 1]
    assert [len(new) for new in generate_batch(model, prompts, tokens=100, limit=20)] == [19, 15, 13]
    with pytest.raises(ValueError, match="prompt 1 has 8 tokens, and prompt and answer together at most 8"):
        generate_batch(model, prompts_of((7, 8)), tokens=1)


def test_no_prompts_and_no_tokens_give_nothing(model: GPT, passes: list[tuple[int, int]]) -> None:
    assert generate_batch(model, [], tokens=5) == []
    assert generate_batch(model, [[1], [2]], tokens=0) == [[], []]
    assert passes == []


def test_what_the_tool_wants_takes_the_place_of_draws(model: GPT) -> None:
    """Forced tokens are read by the model as its own, count as new tokens, and use up no chance."""
    asked: list[list[int]] = []

    def tool(new: Sequence[int]) -> list[int]:
        asked.append(list(new))
        return [40, 41, 42] if len(new) == 2 else []

    def by_hand(prompt: list[int], seed: int) -> list[int]:
        random, sequence = torch.Generator().manual_seed(seed), list(prompt)
        for number in range(7):
            with torch.no_grad():
                logits = model(torch.tensor([sequence]))[0, -1]
            forced = {2: 40, 3: 41, 4: 42}
            if number in forced:
                sequence.append(forced[number])
            else:
                chance = float(torch.rand((), dtype=torch.float64, generator=random))
                sequence.append(int((logits.double().softmax(0).cumsum(0) <= chance).sum()))
        return sequence[len(prompt) :]

    prompts = [[1, 2], [3]]
    expected = [by_hand([1, 2], 0), by_hand([3], 1)]
    options: dict[str, Any] = {"temperature": 1.0, "tool": tool}
    assert generate_batch(model, prompts, tokens=7, seeds=[0, 1], limit=20, **options) == expected
    asked.clear()
    assert list(generate(model, [3], 7, seed=1, **options)) == expected[1]
    assert asked == [expected[1][:length] for length in (0, 1, 2, 5, 6)]


def test_progress_is_told_up_to_the_end(model: GPT) -> None:
    told: list[tuple[int, int]] = []
    generate_batch(
        model, prompts_of((5, 6, 7)), tokens=9, batch_rows=2, progress=lambda done, total: told.append((done, total))
    )
    assert told == [(1, 3), (3, 3)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": [[1], []]}, "prompt is empty"),
        ({"prompts": [[1], [50]]}, "token 50; the vocabulary has tokens 0 to 49"),
        ({"temperature": 0.5}, "0 seeds for 2 prompts: give one a prompt"),
        ({"seeds": [1]}, "1 seeds for 2 prompts"),
        ({"seeds": [1, 2**70]}, "seed = 1180591620717411303424: must be a whole number"),
        ({"batch_rows": 0}, "batch_rows = 0"),
        ({"limit": -1}, "limit = -1"),
        ({"top_k": -1}, "top_k = -1"),
    ],
    ids=["empty", "token", "no-seeds", "few-seeds", "large-seed", "rows", "limit", "top-k"],
)
def test_a_wrong_batch_is_refused_before_anything_runs(
    model: GPT, passes: list[tuple[int, int]], change: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        generate_batch(model, **{"prompts": [[1], [2]], "tokens": 1, **change})
    assert passes == []


def test_a_batch_is_greedy_as_nanochat_is(shared_data: Path) -> None:
    """A real model: the stored continuation, beside prompts of other lengths that are parts of the same text."""
    model, _ = read_checkpoint(shared_data / "nanochat_d4")
    with np.load(shared_data / "nanochat_d4" / "expected.npz") as arrays:
        prompt, whole = arrays["greedy_prompt"].tolist(), arrays["greedy_tokens"].tolist()
    assert prompt + list(generate(model, prompt, 48, temperature=0)) == whole
    prompts = [whole[: len(prompt) + more] for more in (30, 0, 11, 47)]
    new = generate_batch(model, prompts, tokens=48, limit=len(whole), batch_rows=3)
    assert [start + tokens for start, tokens in zip(prompts, new, strict=True)] == [whole] * 4


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
