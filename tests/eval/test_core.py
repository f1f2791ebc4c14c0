from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.bundles import LM, MC, SCHEMA, TASKS, write_bundle
from xsalab.data import Tokenizer
from xsalab.eval import centred_mean
from xsalab.eval.bundle import Item, Task, open_bundle, read_bundle
from xsalab.eval.core import (
    CoreConfig,
    LineEncoder,
    answer_task,
    ask,
    chance_of,
    core,
    judge,
    kept_items,
    questions_of,
)
from xsalab.eval.scoring import Score
from xsalab.interop.nanochat import read_checkpoint
from xsalab.model import GPT, ModelConfig, init_weights

FAR = 10_000


class Letters:
    """A character a token; the characters of ``pairs`` that stand together are one."""

    bos = 0

    def __init__(self, *pairs: str) -> None:
        self.pairs = pairs
        self.pattern = re.compile("|".join([*map(re.escape, pairs), "."]), re.DOTALL)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [
            [256 + self.pairs.index(m) if m in self.pairs else 1 + ord(m) % 255 for m in self.pattern.findall(text)]
            for text in texts
        ]

    def ids(self, text: str) -> tuple[int, ...]:
        return (self.bos, *self.encode([text])[0])


def tasks(tmp_path: Path, **changes: dict[str, Any]) -> dict[str, Task]:
    written = {name: {**task, **changes.get(name, {})} for name, task in TASKS.items()}
    return {task.name: task for task in read_bundle(write_bundle(tmp_path / "b", written)).tasks}


def model_of(context: int = 64) -> GPT:
    model = GPT(ModelConfig(depth=2, width=32, heads=2, context=context, vocab_size=260))
    init_weights(model, 0)
    return model


# --- what is asked


def test_the_prompts_are_the_references(tmp_path: Path) -> None:
    """Items shuffled by Random(1337), examples drawn by Random(1234 + i); written out by hand for each kind."""
    found, letters = tasks(tmp_path), Letters()
    written: dict[str, list[dict[str, Any]]] = {"choose": MC, "which": SCHEMA, "next": LM}
    for name, items in written.items():
        order = list(enumerate(items))
        random.Random(1337).shuffle(order)
        questions, skipped = questions_of(found[name], letters, 0, FAR)
        assert not skipped
        assert [question.item.name for question in questions] == [str(line + 1) for line, _ in order]
        for i, (question, (_, item)) in enumerate(zip(questions, order, strict=True)):
            others = [other for j, (_, other) in enumerate(order) if j != i]
            shown = random.Random(1234 + i).sample(others, found[name].shots)
            if name == "choose":
                before = "".join(f"{e['query']} {e['choices'][e['gold']]}\n\n" for e in shown)
                want = [f"{before}{item['query']} {choice}" for choice in item["choices"]]
            elif name == "which":
                want = [f"{context} {item['continuation']}" for context in item["context_options"]]
            else:
                before = "".join(f"{e['context'].strip()}: {e['continuation']}\n\n" for e in shown)
                want = [f"{before}{item['context'].strip()}: {item['continuation']}"]
            assert [prompt.tokens for prompt in question.prompts] == [letters.ids(text) for text in want]


def test_the_scored_span_of_each_kind(tmp_path: Path) -> None:
    """Choices: from where they differ. Schema: the common end. Language modelling: the answer, its space included."""
    found, letters = tasks(tmp_path, choose={"num_fewshot": [0]}, next={"num_fewshot": [0]}), Letters()

    def scored(task: str, items: list[dict[str, Any]], number: int) -> list[str]:
        item = next(i for i in found[task].items if i.name == str(number + 1))
        question = ask(found[task], item, [], LineEncoder(letters), FAR)
        assert question is not None
        assert question.rules == ()
        return ["".join(chr(t - 1) for t in prompt.tokens[prompt.start :]) for prompt in question.prompts]

    assert scored("choose", MC, 3) == ["one 3", "two 3", "three"]
    assert scored("which", SCHEMA, 2) == [" eats 2."] * 2
    assert scored("next", LM, 4) == [" 5"]


def test_a_subset_draws_its_examples_from_what_was_kept(tmp_path: Path) -> None:
    """As the reference does with max_per_task."""
    found, letters = tasks(tmp_path), Letters()
    kept = kept_items(found["choose"], 3)
    for question in questions_of(found["choose"], letters, 3, FAR)[0]:
        text = "".join(chr(token - 1) for token in question.prompts[0].tokens[1:])
        shown = {int(number) for number in re.findall(r"Question (\d)\?", text)[:-1]}
        assert shown == {int(item.name) - 1 for item in kept} - {int(question.item.name) - 1}
        assert question.rules == ()


def test_too_few_kept_items_take_examples_from_the_whole_task(tmp_path: Path) -> None:
    """F136: two kept items and two examples; counted. More examples than items: an error that names both numbers."""
    found, letters = tasks(tmp_path), Letters()
    questions, _ = questions_of(found["choose"], letters, 2, FAR)
    assert [question.rules for question in questions] == [("from all",)] * 2
    short = tasks(tmp_path / "short", choose={"num_fewshot": [6]})
    with pytest.raises(ValueError, match=r"choose\.jsonl: 6 examples are asked for, and 5 other items are there"):
        questions_of(short["choose"], letters, 0, FAR)


def test_a_faulty_item_is_neither_asked_nor_shown_and_moves_no_other(tmp_path: Path) -> None:
    whole, holed = tasks(tmp_path / "a"), tasks(tmp_path / "b", choose={"items": [*MC[:5], {**MC[5], "gold": 9}]})
    letters = Letters()
    questions, skipped = questions_of(holed["choose"], letters, 0, FAR)
    assert skipped == 1
    order = [item.name for item in kept_items(whole["choose"], 0)]
    assert [question.item.name for question in questions] == [name for name in order if name != "6"]
    assert not any("Question 5" in "".join(chr(t - 1) for t in q.prompts[0].tokens[1:]) for q in questions)
    answers = answer_task(model_of(), letters, holed["choose"], CoreConfig())
    assert answers.counts["skipped"] == 1
    assert len(answers.scores) == 5


# --- rules where the reference fails


def one(kind: str, text: str, options: tuple[str, ...], delimiter: str = " ", shots: int = 0) -> tuple[Task, Item]:
    item = Item("1", text, options, 0)
    return Task("t", kind, shots, delimiter, 0.0, (item,), "t.jsonl"), item


def test_a_choice_that_begins_another_still_has_a_scored_token() -> None:
    """F137: "at" has no token of its own beside "attic": scoring begins one token earlier, for both."""
    task, item = one("multiple_choice", "Where?", ("at", "attic"))
    question = ask(task, item, [], LineEncoder(Letters()), FAR)
    assert question is not None
    assert question.rules == ("no own token",)
    assert [len(prompt.tokens) - prompt.start for prompt in question.prompts] == [1, 4]


def test_an_answer_that_merges_with_what_stands_before_it_is_scored_from_there() -> None:
    """F137: with the token " y" the prompt "x: " does not begin the whole; scoring begins where they part."""
    task, item = one("language_modeling", "x", ("y",), ": ")
    letters = Letters(": ", " y")
    letters.pattern = re.compile(r": (?!y)| y|.", re.DOTALL)
    question = ask(task, item, [], LineEncoder(letters), FAR)
    assert question is not None
    (prompt,) = question.prompts
    assert prompt.tokens[prompt.start :] == (257,)
    task, item = one("language_modeling", "x", ("b",), "a")
    question = ask(task, item, [], LineEncoder(Letters("ab")), FAR)
    assert question is not None
    assert question.rules == ("merged",)
    assert question.prompts[0].tokens[question.prompts[0].start :] == (256,)


@pytest.mark.parametrize(("kind", "options"), [("language_modeling", ("",)), ("schema", ("a", "b"))])
def test_an_item_without_anything_to_score_is_skipped(kind: str, options: tuple[str, ...]) -> None:
    task, item = one(kind, "" if kind == "schema" else "text", options, "")
    assert ask(task, item, [], LineEncoder(Letters()), FAR) is None


def test_a_long_prompt_loses_examples_first_and_its_question_last() -> None:
    """F144: within 64 tokens a 5-shot item keeps its newest examples and the whole question; then the beginning."""
    task, item = one("multiple_choice", "Q" * 20, ("one", "two"), shots=5)
    shown = [Item(str(n), str(n) * 20, ("yes", "no"), 0) for n in range(5)]
    letters = Letters()
    question = ask(task, item, shown, LineEncoder(letters), 64)
    assert question is not None
    assert question.rules == ("cut",)
    for prompt, choice in zip(question.prompts, item.options, strict=True):
        assert prompt.tokens == letters.ids(f"{'4' * 20} yes\n\n{'Q' * 20} {choice}")
        assert len(prompt.tokens) <= 64
        assert prompt.tokens[prompt.start :] == letters.ids(choice)[1:] if choice == "one" else True
    tight = ask(task, item, shown, LineEncoder(letters), 10)
    assert tight is not None
    assert tight.rules == ("cut",)
    assert tight.prompts[0].tokens == letters.ids("QQQQQ one")
    assert tight.prompts[0].start == 7


def test_a_prompt_within_the_limit_is_whole_and_beyond_the_context_counted(tmp_path: Path) -> None:
    """Up to 10 contexts as the reference; ``longest = "context"`` cuts there and flags the rows."""
    task, model = tasks(tmp_path)["choose"], model_of(context=24)
    whole = answer_task(model, Letters(), task, CoreConfig())
    assert whole.counts == {"beyond context": 6}
    assert not any(score.cut for score in whole.scores)
    cut = answer_task(model, Letters(), task, CoreConfig(longest="context"))
    assert cut.counts == {"cut": 6}
    assert all(score.cut for score in cut.scores)


def test_equally_likely_options_are_counted_and_the_first_taken() -> None:
    low, high = Score(-4.0, 2, False), Score(-3.0, 3, False)
    assert judge("multiple_choice", 1, [low, high]) == (True, False)
    assert judge("multiple_choice", 0, [high, Score(-1.0, 1, False)]) == (True, True)
    assert judge("schema", 1, [high, Score(-1.0, 1, False)]) == (False, True)
    assert judge("language_modeling", 0, [Score(-9.0, 2, True)]) == (True, False)
    assert judge("language_modeling", 0, [Score(-0.1, 2, False)]) == (False, False)


# --- chance and the figure


def test_a_model_that_guesses_scores_the_computed_chance(tmp_path: Path) -> None:
    """F135: over many items of 2 to 5 options, within 4 standard errors; the convention is another number."""
    draw = random.Random(0)
    items = tuple(Item(str(n), "q", tuple("abcde"[: draw.randint(2, 5)]), 0) for n in range(4000))
    task = Task("guess", "multiple_choice", 0, " ", 0.25, items, "")
    questions = [q for item in items if (q := ask(task, item, [], LineEncoder(Letters()), FAR))]
    right = [judge(task.kind, draw.randrange(len(i.options)), [Score(-draw.random(), 1, False) for _ in i.options])[0]
             for i in items]  # fmt: skip
    chance = chance_of(task, questions)
    assert chance == pytest.approx(sum(1 / len(item.options) for item in items) / 4000)
    assert abs(sum(right) / 4000 - chance) < 4 * (0.25 / 4000) ** 0.5
    assert chance_of(Task("hit", "language_modeling", 0, " ", 0.0, (), ""), []) == 0


def test_core_is_the_mean_of_the_centred_accuracies(tmp_path: Path) -> None:
    bundle = read_bundle(write_bundle(tmp_path / "b"))
    answers = [found for found, _ in core(model_of(), Letters(), bundle, CoreConfig())]
    shares = [sum(score.value for score in found.scores) / len(found.scores) for found in answers]
    want = ((shares[0] - 0.333) / 0.667 + shares[1] + shares[2]) / 3
    assert centred_mean(answers) == pytest.approx(want, abs=1e-12)


def test_the_key_follows_what_is_asked_and_not_how_fast(tmp_path: Path) -> None:
    bundle, other = read_bundle(write_bundle(tmp_path / "b")), tasks(tmp_path / "c", choose={"items": MC[:5]})
    model = model_of()

    def key(config: CoreConfig, bundle: Any = bundle) -> str:
        return next(iter(core(model, Letters(), bundle, config)))[1]

    same = [key(CoreConfig()), key(CoreConfig(batch_tokens=64)), key(CoreConfig(tasks=("choose",)))]
    assert len(set(same)) == 1
    from dataclasses import replace

    moved = read_bundle(write_bundle(tmp_path / "elsewhere"))
    assert key(CoreConfig(), moved) == same[0], "the same items in another folder"
    others = [
        key(CoreConfig(max_per_task=2)),
        key(CoreConfig(longest="context")),
        key(CoreConfig(), replace(bundle, tasks=(other["choose"],))),
    ]
    assert len({*same, *others}) == 4


@pytest.mark.parametrize(
    ("values", "words"),
    [({"max_per_task": -1}, "max_per_task = -1"), ({"longest": "x"}, "longest = 'x'"), ({"batch_tokens": -1}, "= -1")],
)
def test_a_setting_outside_its_range_is_named(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CoreConfig(**values)


# --- encoding line by line


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    text = "def f(x):\n    return x  # a comment\n\n\nQuestion: what? Answer: 42\r\n\r\n\tend.\n" * 20
    return Tokenizer.train([text], 300)


@given(text=st.text(alphabet="ab1 .?'\n\r\tQ:é\u2003", max_size=60))
def test_encoding_by_lines_is_encoding_the_text(tokenizer: Tokenizer, text: str) -> None:
    encode = LineEncoder(tokenizer)
    for _ in range(2):  # the second time from what is kept
        assert encode(text) == (tokenizer.bos, *tokenizer.encode([text])[0])


def test_another_split_is_encoded_whole(tokenizer: Tokenizer) -> None:
    """A split that takes a blank line and the next word together: line by line it would give other tokens."""
    table = json.loads(json.dumps(tokenizer.table()))
    table["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": r"\s+\S+|\S+|\s+"}
    other = Tokenizer(json.dumps(table))
    text = "a b\n\nQuestion: what?\n\nQ"
    assert tokenizer.splits_lines
    assert not other.splits_lines
    assert LineEncoder(other)(text) == (other.bos, *other.encode([text])[0])


# --- the reference itself

QUICK = (
    "hellaswag_zeroshot", "bigbench_qa_wikidata", "arc_easy", "copa", "openbook_qa", "lambada_openai", "winograd",
    "winogrande", "bigbench_dyck_languages", "agi_eval_lsat_ar", "bigbench_cs_algorithms",
)  # fmt: skip


@pytest.mark.slow
def test_nanochats_answers_are_reproduced(shared_data: Path) -> None:
    """All three kinds, item by item, with the real checkpoint. All 22 tasks: bench/peers.py."""
    model, tokenizer = read_checkpoint(shared_data / "nanochat_d4")
    stored = json.loads((shared_data / "nanochat_d4" / "core_items.json").read_text(encoding="utf-8"))["correct"]
    folder = shared_data / "core_bundle"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there")
    for task in read_bundle(open_bundle(str(folder), "", Path()), QUICK).tasks:
        got = {
            score.item: score.value for score in answer_task(model, tokenizer, task, CoreConfig(max_per_task=24)).scores
        }
        for item, want in zip(kept_items(task, 24), stored[task.name], strict=True):
            assert want is None or got[item.name] == want, f"{task.name}, line {item.name}"
