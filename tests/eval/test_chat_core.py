from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from eval.chat_items import ByteTokenizer, arc, write_lines, write_tasks
from xsalab.eval import ItemScore, TaskAnswers
from xsalab.eval import chat_core as chat_core_module
from xsalab.eval.chat_core import (
    NOT_RUN,
    chat_core,
    chat_core_means,
    letter_likelihoods,
    pass_at,
    sample_seed,
)
from xsalab.eval.chat_prompts import ChatCoreConfig
from xsalab.interop.nanochat import read_checkpoint
from xsalab.model import GPT, ModelConfig

TOKENIZER = ByteTokenizer()
CATEGORICAL = ("ARC-Easy", "ARC-Challenge", "MMLU")


def build(context: int = 256, seed: int = 0, **changes: Any) -> GPT:
    """Weights that make every part of the model count."""
    config = ModelConfig(
        **{
            "depth": 2, "width": 32, "heads": 2, "context": context, "vocab_size": TOKENIZER.vocab_size, "window": "SL",
            "window_block": 8, "value_gate_channels": 4, "smear_channels": 8, **changes,
        }
    )  # fmt: skip
    model, random = GPT(config), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3, generator=random)
    return model


class Knowing:
    """Stands for a model: its logits at the end of a prompt are what ``logits`` gives for the prompt's text."""

    def __init__(self, logits: Callable[[str], dict[str, float]], context: int = 256) -> None:
        self.config = SimpleNamespace(context=context, vocab_size=TOKENIZER.vocab_size, soft_cap=0.0, depth=1)
        self.head = SimpleNamespace(weight=torch.eye(TOKENIZER.vocab_size))
        self.logits, self.seen = logits, []

    def hidden(self, tokens: Tensor) -> Tensor:
        x = torch.zeros(*tokens.shape, TOKENIZER.vocab_size)
        end = TOKENIZER.specials["<|assistant_start|>"]
        for row, numbers in enumerate(tokens.tolist()):
            last = numbers.index(end)
            self.seen.append(numbers[: last + 1])
            for letter, value in self.logits(TOKENIZER.decode(numbers[:last])).items():
                x[row, last, ord(letter)] = value
        return x


def ask(
    model: Any, folder: Path, tokenizer: Any = TOKENIZER, notes: list[tuple[str, str]] | None = None, **changes: Any
) -> dict[str, TaskAnswers]:
    """Task -> answers; ``known`` and ``sandbox`` are handed on, other changes are the configuration's."""
    extra = {name: changes.pop(name) for name in ("known", "sandbox", "progress") if name in changes}
    config = ChatCoreConfig(**{"max_new_tokens": 8, **changes})
    note = (lambda task, text: None) if notes is None else (lambda task, text: notes.append((task, text)))
    return {a.task: a for a, _ in chat_core(cast(GPT, model), tokenizer, folder, config, note=note, **extra)}


def keys(model: GPT, folder: Path, tokenizer: Any = TOKENIZER, **changes: Any) -> dict[str, str]:
    """Task -> the key under which it would be asked."""
    found: dict[str, str] = {}

    def known(task: str, key: str) -> TaskAnswers:
        found[task] = key
        return TaskAnswers(task, 0.0, 0.0, (ItemScore(task, "", 0.0, 1.0),))

    ask(model, folder, tokenizer, known=known, **changes)
    return found


# Categorical


def test_a_model_that_knows_the_letter_is_right_everywhere(tmp_path: Path) -> None:
    """And one that knows a wrong letter nowhere; letters outside the item's own never count, however likely."""
    write_tasks(tmp_path, 20, CATEGORICAL)
    gold = {}
    for task, stem in (("ARC-Easy", "arc_easy_test"), ("MMLU", "mmlu_test")):
        for line in (tmp_path / f"{stem}.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            gold[row["question"]] = row["answerKey"] if task == "ARC-Easy" else "ABCD"[row["answer"]]

    def logits(text: str) -> dict[str, float]:
        letter = gold[text.split("question: ")[1].split("\n")[0]]
        return {letter: 5.0, "Z": 9.0}

    def turned(text: str) -> dict[str, float]:
        return {
            "ABCD"[("ABCD".index(letter) + 1) % 4] if letter != "Z" else "Z": v for letter, v in logits(text).items()
        }

    for model, value in ((Knowing(logits), 1.0), (Knowing(turned), 0.0)):
        answers = ask(model, tmp_path, tasks=CATEGORICAL)
        assert {name: found.accuracy for name, found in answers.items()} == dict.fromkeys(CATEGORICAL, value)
        assert all(len(found.scores) == 20 and not found.counts for found in answers.values())


def test_equal_logits_take_the_first_letter_and_are_counted(tmp_path: Path) -> None:
    """Every token equally likely: right where the first letter is, and each option has −ln of the vocabulary."""
    rows = [arc(0, "ABCD"), arc(1, "ABCD"), arc(2, "ABC"), arc(3, "AB"), arc(5, "ABCDE")]
    write_lines(tmp_path / "arc_easy_test.jsonl", rows)
    found = ask(Knowing(lambda text: {}), tmp_path, tasks=("ARC-Easy",))["ARC-Easy"]
    assert found.accuracy == sum(row["answerKey"] == "A" for row in rows) / 5 == 0.4
    assert found.chance == pytest.approx((1 / 4 + 1 / 4 + 1 / 3 + 1 / 2 + 1 / 5) / 5)
    assert found.counts == {"tied": 5}
    for score in found.scores:
        assert score.options == pytest.approx([-math.log(TOKENIZER.vocab_size)] * len(score.options))
        assert score.lengths == (1,) * len(score.options)


def test_options_are_log_likelihoods_over_the_whole_vocabulary(tmp_path: Path) -> None:
    """Against a forward pass of each prompt alone, written out by hand."""
    write_tasks(tmp_path, 5, ["ARC-Easy"])
    model = build()
    found = ask(model, tmp_path, tasks=("ARC-Easy",))["ARC-Easy"]
    user_start, user_end, end = (TOKENIZER.specials[f"<|{n}|>"] for n in ("user_start", "user_end", "assistant_start"))
    for score in found.scores:
        row = arc(int(score.item) - 1)
        text = f"Multiple Choice question: {row['question']}\n"
        text += "".join(f"- thing {letter}={letter}\n" for letter in "ABCD")
        text += "\nRespond only with the letter of the correct answer."
        prompt = [256, user_start, *text.encode(), user_end, end]
        with torch.no_grad():
            logs = model(torch.tensor([prompt]))[0, -1].log_softmax(-1)
        assert score.options == pytest.approx([logs[ord(letter)].item() for letter in "ABCD"], abs=1e-5)
        assert score.value == float("ABCD"[int(logs[[65, 66, 67, 68]].argmax())] == row["answerKey"])


def test_padding_never_changes_a_score(tmp_path: Path) -> None:
    """F145: the same items of many lengths in batches of 1 and of 8."""
    write_tasks(tmp_path, 24, ["ARC-Easy", "MMLU"])
    model = build()
    one, eight = (ask(model, tmp_path, tasks=("ARC-Easy", "MMLU"), batch_rows=rows) for rows in (1, 8))
    for task in one:
        for a, b in zip(one[task].scores, eight[task].scores, strict=True):
            assert (a.item, a.value) == (b.item, b.value)
            assert a.options == pytest.approx(b.options, abs=1e-4)


def test_likelihoods_come_in_the_order_asked() -> None:
    """Whatever the lengths by which they were run."""
    model, prompts = build(), [[256, *range(n)] for n in (9, 2, 30, 1, 17)]
    together = letter_likelihoods(model, prompts, [[1, 2]] * 5, batch_rows=2)
    alone = [letter_likelihoods(model, [prompt], [[1, 2]])[0] for prompt in prompts]
    for a, b in zip(together, alone, strict=True):
        assert a == pytest.approx(b, abs=1e-4)
    assert len({round(a[0], 3) for a in together}) == 5


def test_a_prompt_beyond_ten_contexts_loses_its_beginning(tmp_path: Path) -> None:
    """Up to there it is asked whole, and counted; the question's end, the choices and the instruction remain."""
    rows = [arc(0), arc(1), arc(2)]
    rows[1]["question"], rows[2]["question"] = "m" * 300, "first " + "l" * 2000
    write_lines(tmp_path / "arc_easy_test.jsonl", rows)
    model = Knowing(lambda text: {"A": 1.0}, context=200)
    found = ask(model, tmp_path, tasks=("ARC-Easy",))["ARC-Easy"]
    assert found.counts == {"cut": 1, "beyond context": 2}
    assert {score.item: score.cut for score in found.scores} == {"1": False, "2": False, "3": True}
    longest = max(model.seen, key=len)
    assert len(longest) == 2000
    text = TOKENIZER.decode(longest)
    assert text.startswith("<|bos|><|user_start|>lll")
    assert "first" not in text
    assert text.endswith("=D\n\nRespond only with the letter of the correct answer.<|user_end|><|assistant_start|>")
    assert "m" * 300 in TOKENIZER.decode(sorted(model.seen, key=len)[1])


def test_random_weights_are_right_by_chance_alone(shared_data: Path) -> None:
    """150 real ARC items: within four standard errors of the chance level that is computed from them."""
    found = ask(build(), shared_data / "chat", tasks=("ARC-Easy",), max_categorical=150)["ARC-Easy"]
    spread = math.sqrt(found.chance * (1 - found.chance) / 150)
    assert len(found.scores) == 150
    assert found.chance == pytest.approx(0.25, abs=0.01)
    assert abs(found.accuracy - found.chance) < 4 * spread


# What cannot be asked


def test_a_split_letter_is_named_and_the_generated_tasks_are_still_asked(tmp_path: Path) -> None:
    notes: list[tuple[str, str]] = []
    answers = ask(build(), write_tasks(tmp_path), ByteTokenizer(split="C"), notes)
    assert list(answers) == ["GSM8K"]
    told = {task: text for task, text in notes if text.startswith(NOT_RUN)}
    assert list(told) == [*CATEGORICAL, "HumanEval"]
    assert all("the letter 'C' is 2 tokens of this tokenizer (0, 67)" in told[task] for task in CATEGORICAL)
    assert "--run-code" in told["HumanEval"]


def test_what_is_left_is_scored_and_said(tmp_path: Path) -> None:
    """A missing file, a file without one usable line, and broken lines among good ones."""
    write_tasks(tmp_path, 8)
    (tmp_path / "arc_challenge_test.jsonl").unlink()
    write_lines(tmp_path / "mmlu_test.jsonl", ["{", "{"])
    write_lines(tmp_path / "gsm8k_test.jsonl", [{"question": "?"}] * 8)
    write_lines(tmp_path / "arc_easy_test.jsonl", [*[arc(n) for n in range(8)], *["{}"] * 5])
    notes: list[tuple[str, str]] = []
    answers = ask(build(), tmp_path, notes=notes)
    assert list(answers) == ["ARC-Easy"]
    assert (len(answers["ARC-Easy"].scores), answers["ARC-Easy"].counts["skipped"]) == (8, 5)
    told = [text for task, text in notes if task == "ARC-Easy"]
    assert len(told) == 4
    assert all(text.startswith(f"skipped: {tmp_path / 'arc_easy_test.jsonl'}: line ") for text in told[:3])
    assert told[3] == "skipped: 2 more"
    reasons = {task: text for task, text in notes if text.startswith(NOT_RUN)}
    assert "arc_challenge_test.jsonl: no such file" in reasons["ARC-Challenge"]
    assert "none of its items can be used" in reasons["MMLU"]
    assert "line" in reasons["GSM8K"]


def test_nothing_to_ask_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no task of ChatCORE can be asked:\nMMLU: .*no such file"):
        ask(build(), tmp_path, tasks=("MMLU",))
    bare = ByteTokenizer()
    bare.specials = {"<|bos|>": 256}
    with pytest.raises(ValueError, match=r"no special token <\|user_start\|>"):
        ask(build(), write_tasks(tmp_path), bare)


# Generated


def answered(texts: Mapping[str, Sequence[str]], monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Puts ``texts`` (a question's word -> its samples in turn) in place of generation; returns the calls."""
    calls: list[dict[str, Any]] = []

    def generate_batch(model: Any, prompts: Sequence[Sequence[int]], **settings: Any) -> list[list[int]]:
        calls.append({"prompts": prompts, **settings})
        used = {word: iter(samples) for word, samples in texts.items()}
        new = []
        for prompt in prompts:
            word = next(word for word in texts if word in TOKENIZER.decode(prompt))
            new.append(TOKENIZER.encode([next(used[word])])[0])
        return new

    monkeypatch.setattr(chat_core_module, "generate_batch", generate_batch)
    return calls


def test_generated_numbers_are_compared_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F147, from file to score: 72 written in several ways is right, 720 is not, and what has no number is counted."""
    gold = {"tea": "72", "pie": "1,000", "sun": "-5", "oak": "72", "fig": "72"}
    rows = [{"question": f"How much {word}?", "answer": f"so\n#### {value}"} for word, value in gold.items()]
    write_lines(tmp_path / "gsm8k_test.jsonl", rows)
    texts = {"tea": ["#### $72."], "pie": ["#### 1000"], "sun": ["#### -5.0"], "oak": ["#### 720"], "fig": ["It is 72"]}
    answered(texts, monkeypatch)
    found = ask(build(), tmp_path, tasks=("GSM8K",), max_new_tokens=50)["GSM8K"]
    assert {score.item: score.value for score in found.scores} == {"1": 1, "2": 1, "3": 1, "4": 0, "5": 0}
    assert found.counts == {"no number": 1}
    assert (found.baseline, found.chance, found.accuracy) == (0.0, 0.0, 0.6)


def test_several_samples_give_the_share_that_is_right_and_pass_at_k(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F152: pass@k by hand for two of four; k = 10 is not available, never left out."""
    write_lines(tmp_path / "gsm8k_test.jsonl", [{"question": w, "answer": "#### 1"} for w in ("tea", "pie")])
    samples = {"tea": ["#### 1", "#### 2", "#### 1", "no"], "pie": ["#### 3"] * 4}
    answered(samples, monkeypatch)
    found = ask(build(), tmp_path, tasks=("GSM8K",), samples=4, temperature=0.7, top_k=3, max_new_tokens=30)["GSM8K"]
    assert {score.item: score.value for score in found.scores} == {"1": 0.5, "2": 0.0}
    assert pass_at(found) == {1: 0.25, 4: 0.5}
    assert pass_at(found, (2, 10)) == {2: pytest.approx((1 - 1 / 6) / 2), 10: None}
    assert found.counts == {"no number": 1}


def test_how_generation_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The assistant's end and the start token stop it, the calculator is there, a seed a sample."""
    calls = answered({"What": [""] * 99}, monkeypatch)
    write_tasks(tmp_path, 3, ["GSM8K"])
    ask(build(context=64), tmp_path, tasks=("GSM8K",), samples=2, temperature=0.7, top_k=3, max_new_tokens=500, seed=7)
    (call,) = calls
    assert call["tokens"] == 64
    assert call["limit"] == 640
    assert set(call["stop"]) == {256, TOKENIZER.specials["<|assistant_end|>"]}
    assert (call["temperature"], call["top_k"]) == (0.7, 3)
    assert [bytes(prompt[2:-2]).decode() for prompt in call["prompts"]][::2] == [
        bytes(prompt[2:-2]).decode() for prompt in call["prompts"]
    ][1::2]
    assert len(set(call["seeds"])) == 6
    special = TOKENIZER.specials
    sum_ = [special["<|python_start|>"], *b"6*7", special["<|python_end|>"]]
    assert call["tool"](sum_) == [special["<|output_start|>"], *b"42", special["<|output_end|>"]]


def test_a_seed_belongs_to_an_item_and_not_to_its_place() -> None:
    """Whatever else is asked, a sample is drawn with the same seed; tasks, items, samples and seeds all differ."""
    seeds = {sample_seed(a, task, i, s) for a in (0, 1) for task in "AB" for i in ("1", "11") for s in range(12)}
    assert len(seeds) == 2 * 2 * 2 * 12
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(0, "GSM8K", "1", 0) == sample_seed(0, "GSM8K", "1", 0)


def test_a_long_question_is_shortened_so_that_an_answer_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = answered({"end?": ["x" * 20, "y"] * 9}, monkeypatch)
    rows = [{"question": "m" * n + " end?", "answer": "#### 1"} for n in (1000, 30, 5)]
    write_lines(tmp_path / "gsm8k_test.jsonl", rows)
    found = ask(build(context=64), tmp_path, tasks=("GSM8K",), max_new_tokens=20)["GSM8K"]
    by_item = {score.item: score for score in found.scores}
    assert [by_item[name].cut for name in "123"] == [True, False, False]
    assert sorted(map(len, calls[0]["prompts"]))[-1] == 640 - 20
    assert found.counts["cut"] == 1
    assert found.counts["unfinished"] == 2
    assert found.counts["no number"] == 3


def test_generation_does_not_depend_on_the_batch(tmp_path: Path) -> None:
    """The real thing, tiny: the same answers in batches of 1 and 5, and of an item alone."""
    write_tasks(tmp_path, 5, ["GSM8K"])
    model = build(context=64)
    settings: dict[str, Any] = {"tasks": ("GSM8K",), "samples": 2, "temperature": 1.0, "max_new_tokens": 6}
    one, five = (ask(model, tmp_path, batch_rows=rows, **settings)["GSM8K"] for rows in (1, 5))
    first = ask(model, tmp_path, max_generated=1, **settings)["GSM8K"]
    assert one.scores == five.scores
    assert first.scores == five.scores[:1]


class FakeSandbox:
    """Passes a program that holds "right"."""

    def __init__(self) -> None:
        self.ran: list[tuple[str, str]] = []

    def run(self, program: str, check: str, *, seconds: float = 5.0) -> Any:
        self.ran.append((program, check))
        return SimpleNamespace(
            passed="right" in program, outcome="passed" if "right" in program else "timeout", detail=""
        )


def test_programs_go_to_the_sandbox_with_their_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tasks(tmp_path, 3, ["HumanEval"])
    answered({"add_0": ["```python\nright = 0\n```"], "add_1": ["wrong"], "add_2": ["right = 2"]}, monkeypatch)
    sandbox = FakeSandbox()
    found = ask(build(), tmp_path, tasks=("HumanEval",), sandbox=sandbox, max_new_tokens=99)["HumanEval"]
    assert {score.item: score.value for score in found.scores} == {"1": 1, "2": 0, "3": 1}
    assert found.counts == {"timeout": 1}
    assert (
        "import math\n\nright = 0",
        "def check(candidate):\n    assert candidate(2) == 2\n\ncheck(add_0)",
    ) in sandbox.ran


# The whole


def test_chat_core_is_the_mean_of_centred_accuracies() -> None:
    """By nanochat's formula and baselines; without one of the five there is no ChatCORE."""
    accuracy = {"ARC-Easy": 0.5, "ARC-Challenge": 0.25, "MMLU": 1.0, "GSM8K": 0.1, "HumanEval": 0.3}
    baseline = {"ARC-Easy": 0.25, "ARC-Challenge": 0.25, "MMLU": 0.25}
    answers = [
        TaskAnswers(name, baseline.get(name, 0.0), 0.0, (ItemScore(name, "1", value, 1.0),))
        for name, value in accuracy.items()
    ]
    means = chat_core_means(answers)
    assert means["ChatCORE"] == pytest.approx((1 / 3 + 0.0 + 1.0 + 0.1 + 0.3) / 5)
    assert means["ChatCORE_cat"] == pytest.approx((1 / 3 + 0.0 + 1.0) / 3)
    assert chat_core_means(answers[:-1]) == {"ChatCORE": None, "ChatCORE_cat": means["ChatCORE_cat"]}
    assert chat_core_means(answers[1:]) == {"ChatCORE": None, "ChatCORE_cat": None}


def test_known_answers_are_not_asked_again(tmp_path: Path) -> None:
    write_tasks(tmp_path, 4, CATEGORICAL)
    there = TaskAnswers("MMLU", 0.25, 0.25, (ItemScore("MMLU", "1", 1.0, 1.0),))
    model = Knowing(lambda text: {})
    steps: list[tuple[float, float, str]] = []
    found = ask(
        model, tmp_path, tasks=CATEGORICAL, known=lambda task, key: there if task == "MMLU" else None,
        progress=lambda *step: steps.append(step),
    )  # fmt: skip
    assert found["MMLU"] is there
    assert len(model.seen) == 8
    assert [done for done, _, _ in steps] == sorted(done for done, _, _ in steps)
    assert steps[-1] == (12, 12, "MMLU")


def test_known_answers_to_programs_need_no_sandbox(tmp_path: Path) -> None:
    """Nothing is run for them."""
    write_tasks(tmp_path, 2, ["HumanEval"])
    there = TaskAnswers("HumanEval", 0.0, 0.0, (ItemScore("HumanEval", "1", 1.0, 1.0),))
    assert ask(build(), tmp_path, tasks=("HumanEval",), known=lambda task, key: there) == {"HumanEval": there}
    with pytest.raises(ValueError, match="--run-code"):
        ask(build(), tmp_path, tasks=("HumanEval",))


def test_a_key_stands_for_all_that_answers_depend_on(tmp_path: Path) -> None:
    """Items, tokenizer, context and settings, each where it matters; not the batch."""
    model, folder = build(), write_tasks(tmp_path, tasks=(*CATEGORICAL, "GSM8K"))
    before = keys(model, folder)
    assert len(set(before.values())) == 4
    assert keys(model, folder, batch_rows=3) == before
    assert keys(model, folder, seed=1, top_k=3) == before  # nothing is drawn at temperature 0

    def changed(after: dict[str, str]) -> set[str]:
        return {task for task in before if before[task] != after[task]}

    for settings in ({"max_generated": 3}, {"max_new_tokens": 9}, {"temperature": 0.5}):
        assert changed(keys(model, folder, **settings)) == {"GSM8K"}
    drawn = [keys(model, folder, temperature=0.5, **more)["GSM8K"] for more in ({}, {"seed": 1}, {"samples": 2})]
    assert len(set(drawn)) == 3
    assert changed(keys(model, folder, max_categorical=3)) == set(CATEGORICAL)
    assert changed(keys(build(context=128), folder)) == set(before)
    assert changed(keys(model, folder, ByteTokenizer(split="?"))) == set(before)
    text = (folder / "gsm8k_test.jsonl").read_text(encoding="utf-8")
    write_lines(folder / "gsm8k_test.jsonl", text.replace("#### ", "#### 1").splitlines())
    assert changed(keys(model, folder)) == {"GSM8K"}
    write_lines(folder / "gsm8k_test.jsonl", text.splitlines())
    write_lines(folder / "mmlu_test.jsonl", (folder / "mmlu_test.jsonl").read_text(encoding="utf-8").split("\n")[1:-1])
    assert changed(keys(model, folder)) == {"MMLU"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tasks": ("ARC",)}, "ARC-Easy, ARC-Challenge, MMLU, GSM8K, HumanEval"),
        ({"tasks": ()}, "each once"),
        ({"tasks": ("MMLU", "MMLU")}, "each once"),
        ({"samples": 4}, "samples = 4 at temperature 0"),
        ({"samples": 0}, "samples = 0: must be at least 1"),
        ({"max_generated": -1}, "max_generated = -1"),
        ({"temperature": math.nan}, "temperature = nan"),
        ({"data": " "}, "data"),
    ],
)
def test_settings_are_checked(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ChatCoreConfig(**change)


# karpathy/nanochat 92d63d4: its own run_categorical_eval (scripts/chat_eval.py) with its own model of nanochat_d4, on
# the first 40 items of each task in its order, 1 for a right answer
NANOCHATS = {
    "ARC-Easy": "0001011101000010010100001100101000110101",
    "ARC-Challenge": "0101100000101000010000100000010001000001",
    "MMLU": "0100011001000001000010000001010001000000",
}


@pytest.mark.slow
def test_answers_are_nanochats_item_by_item(shared_data: Path) -> None:
    """A real checkpoint on real items: order, prompts, tokens, logits and judgement together."""
    model, tokenizer = read_checkpoint(shared_data / "nanochat_d4")
    answers = ask(model, shared_data / "chat", tokenizer, tasks=CATEGORICAL, max_categorical=40)
    assert {name: "".join(str(int(s.value)) for s in found.scores) for name, found in answers.items()} == NANOCHATS
