"""CORE (DCLM, arXiv 2406.11794), item by item, with nanochat's prompts, few-shot draws and scoring.

    multiple choice    query ␣ choice        the choice of the highest mean log-likelihood over its own tokens,
                                             those after the longest common beginning of all choices
    schema             context ␣ text        the context under which ``text``, the common end, is likeliest
    language modelling context ␣ text        right if every token of ``text`` is the likeliest

Few-shot examples stand before it, each followed by a blank line, the start token before all. A task's items are
shuffled by ``random.Random(1337)``, and the first ``max_per_task`` kept; the examples of item i are drawn by
``random.Random(1234 + i)`` from the other kept ones. CORE is the mean over tasks of
(accuracy − baseline) / (1 − baseline).

Where the reference fails there is a rule, counted for each task under the word in quotes:

"from all"         fewer kept items than examples asked for: the examples are drawn from all other items of the task
"no own token"     a choice is a beginning of another and has no token of its own: scoring begins one token earlier,
                   for every choice alike
"merged"           the last token before the answer and its first are one: scoring begins with that token
"beyond context"   longer than the model was trained on; asked whole, as the reference does up to 10 × the context
"cut"              longer than the limit: examples are dropped from the front, then the beginning of the prompt
"tied"             the best options are equally likely to the last bit: the first of them counts
"skipped"          the item cannot be read or has nothing to score
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..config import config, digest, dump
from ..model import GPT
from ..train.ranks import ALONE, Ranks
from . import ItemScore, TaskAnswers
from .bundle import Bundle, Item, Task
from .scoring import Prompt, Score, score_prompts

REFERENCE_LIMIT = 10  # contexts: the length of nanochat's rotary table
FORMAT = 1  # of the answers: another number asks every task again


class Encoder(Protocol):
    """What is needed of a tokenizer."""

    @property
    def bos(self) -> int: ...
    def encode(self, texts: Sequence[str]) -> list[list[int]]: ...


@config
class CoreConfig:
    """Which bundle, how much of it, and what is done with prompts longer than the context."""

    bundle: str = ""  # a folder, a zip, or the https address of a zip
    sha256: str = ""  # of the zip; an address needs it
    tasks: tuple[str, ...] = ()  # empty: all
    max_per_task: int = 0  # items; 0: all
    longest: str = "reference"  # prompts: "reference" asks up to 10 contexts whole, "context" cuts at one
    batch_tokens: int = 0  # of a pass; 0: what suits the device; changes speed and memory alone

    def __post_init__(self) -> None:
        if self.max_per_task < 0:
            raise ValueError(f"max_per_task = {self.max_per_task}: must be at least 0 (all)")
        if self.longest not in ("reference", "context"):
            raise ValueError(f"longest = {self.longest!r}: use 'reference' (10 contexts) or 'context'")
        if self.batch_tokens < 0:
            raise ValueError(f"batch_tokens = {self.batch_tokens}: must be at least 0 (what suits the device)")


@dataclass(frozen=True)
class Question:
    """An item as it is put to the model: a prompt for each option, and the rules that touched it."""

    item: Item
    prompts: tuple[Prompt, ...]
    rules: tuple[str, ...] = ()


def core(
    model: GPT,
    tokenizer: Encoder,
    bundle: Bundle,
    config: CoreConfig,
    *,
    known: Callable[[str, str], TaskAnswers | None] = lambda task, key: None,
    progress: Callable[[str, int], None] = lambda task, items: None,
    left_out: Callable[[str, str], None] = lambda task, why: None,
    ranks: Ranks = ALONE,
) -> Iterator[tuple[TaskAnswers, str]]:
    """The answers to each task, and the key of what they depend on beside the weights.

    known: (task, key) -> answers that are there already. progress: called with how many items were done since.
    left_out: called with a task that cannot be asked, and why; the others are.
    """
    for task in bundle.tasks:
        asked = {name: value for name, value in dump(task).items() if name != "path"}
        key = digest([FORMAT, asked, config.max_per_task, config.longest, model.config.context])
        answers = known(task.name, key)
        if answers is None:
            try:
                answers = answer_task(
                    model, tokenizer, task, config, lambda n, name=task.name: progress(name, n), ranks
                )
            except ValueError as error:
                left_out(task.name, str(error))
                continue
        else:
            progress(task.name, len(kept_items(task, config.max_per_task)))
        yield answers, key


def answer_task(
    model: GPT,
    tokenizer: Encoder,
    task: Task,
    config: CoreConfig,
    progress: Callable[[int], None] = lambda items: None,
    ranks: Ranks = ALONE,
) -> TaskAnswers:
    """Puts a task to the model. Raises ValueError where no item of it can be asked."""
    context = model.config.context
    limit = context * (REFERENCE_LIMIT if config.longest == "reference" else 1)
    questions, skipped = questions_of(task, tokenizer, config.max_per_task, limit)
    if not questions:
        raise ValueError(f"{task.path}: none of {skipped} items can be asked")
    share = len(questions) / sum(len(question.prompts) for question in questions)
    done = _Steps(share, progress)
    flat = score_prompts(
        model, [p for question in questions for p in question.prompts], batch_tokens=config.batch_tokens, progress=done,
        ranks=ranks,
    )  # fmt: skip
    scores, counts, place = [], Counter({"skipped": skipped}), 0
    for question in questions:
        own = flat[place : place + len(question.prompts)]
        place += len(own)
        right, tied = judge(task.kind, question.item.gold, own)
        rules = [*question.rules, *(["tied"] if tied else [])]
        if max(len(prompt.tokens) for prompt in question.prompts) > context:
            rules.append("beyond context")
        counts.update(rules)
        scores.append(
            ItemScore(
                task.name, question.item.name, float(right), 1.0, tuple(s.log_likelihood for s in own),
                "cut" in rules, tuple(s.tokens for s in own),
            )
        )  # fmt: skip
    return TaskAnswers(task.name, task.baseline, chance_of(task, questions), tuple(scores), dict(+counts))


class _Steps:
    """Items out of prompts, for a bar."""

    def __init__(self, share: float, progress: Callable[[int], None]) -> None:
        self.share, self.progress, self.sum, self.told = share, progress, 0.0, 0

    def __call__(self, prompts: int) -> None:
        self.sum += prompts * self.share
        if (new := round(self.sum) - self.told) > 0:
            self.told += new
            self.progress(new)


def judge(kind: str, gold: int, scores: Sequence[Score]) -> tuple[bool, bool]:
    """(right, tied) of one item: the highest mean log-likelihood, of equal ones the first; or every token likeliest."""
    if kind == "language_modeling":
        return scores[0].greedy, False
    means = [score.mean for score in scores]
    best = max(means)
    return means.index(best) == gold, means.count(best) > 1


def chance_of(task: Task, questions: Sequence[Question]) -> float:
    """The accuracy of a model that guesses at random among each item's options; 0 where tokens must be hit."""
    if task.kind == "language_modeling":
        return 0.0
    return sum(1 / len(question.item.options) for question in questions) / len(questions)


def kept_items(task: Task, max_per_task: int) -> list[Item]:
    """The task's items in the reference's order, the first ``max_per_task`` of them (0: all)."""
    items = list(task.items)
    random.Random(1337).shuffle(items)
    return items[: max_per_task or None]


def questions_of(task: Task, tokenizer: Encoder, max_per_task: int, limit: int) -> tuple[list[Question], int]:
    """The items as they are asked, and how many were skipped. ``limit``: tokens of a prompt.

    Raises ValueError where the task has fewer items than it wants examples.
    """
    kept = kept_items(task, max_per_task)
    encode, questions = LineEncoder(tokenizer), []
    for number, item in enumerate(kept):
        if item.fault:
            continue
        others = [other for i, other in enumerate(kept) if i != number and not other.fault]
        rules = []
        if len(others) < task.shots:
            others = [other for other in task.items if other is not item and not other.fault]
            rules.append("from all")
            if len(others) < task.shots:
                raise ValueError(
                    f"{task.path}: {task.shots} examples are asked for, and {len(others)} other items are there"
                )
        examples = random.Random(1234 + number).sample(others, task.shots)
        question = ask(task, item, examples, encode, limit)
        if question is not None:
            questions.append(Question(item, question.prompts, (*rules, *question.rules)))
    return questions, len(kept) - len(questions)


def ask(task: Task, item: Item, examples: Sequence[Item], encode: LineEncoder, limit: int) -> Question | None:
    """An item behind its examples, within ``limit`` tokens; None where it has nothing to score."""
    examples, rules = list(examples), []
    while True:
        found = _prompts(task, item, examples, encode)
        if found is None:
            return None
        prompts, touched = found
        longest = max(len(prompt.tokens) for prompt in prompts)
        if longest <= limit:
            break
        rules = ["cut"]
        if examples:
            examples = examples[1:]
            continue
        prompts = tuple(_cut(prompt, limit) for prompt in prompts)
        break
    return Question(item, prompts, (*touched, *rules))


def _cut(prompt: Prompt, limit: int) -> Prompt:
    """The start token and the last ``limit`` − 1 tokens."""
    over = max(len(prompt.tokens) - limit, 0)
    return Prompt((prompt.tokens[0], *prompt.tokens[over + 1 :]), max(prompt.start - over, 1))


def _prompts(
    task: Task, item: Item, examples: Sequence[Item], encode: LineEncoder
) -> tuple[tuple[Prompt, ...], list[str]] | None:
    before = "".join(f"{_shown(task, example)}\n\n" for example in examples)
    if task.kind == "multiple_choice":
        rows = [encode(before + item.text + task.delimiter + choice) for choice in item.options]
        start, shortest = _common(rows), min(map(len, rows))
        empty = start >= shortest
        return tuple(Prompt(row, min(start, shortest - 1)) for row in rows), ["no own token"] if empty else []
    if task.kind == "schema":
        rows = [encode(before + context + task.delimiter + item.text) for context in item.options]
        suffix = _common([row[::-1] for row in rows])
        if not suffix:
            return None
        return tuple(Prompt(row, max(len(row) - suffix, 1)) for row in rows), []
    before += item.text.strip() + task.delimiter
    whole, without = encode(before + item.options[0]), encode(before.strip())
    start = _common([whole, without])
    if start >= len(whole):
        return None
    return (Prompt(whole, start),), ["merged"] if start < len(without) else []


def _shown(task: Task, example: Item) -> str:
    """A solved example."""
    if task.kind == "multiple_choice":
        return example.text + task.delimiter + example.options[example.gold]
    if task.kind == "schema":
        return example.options[example.gold] + task.delimiter + example.text
    return example.text.strip() + task.delimiter + example.options[0]


def _common(rows: Sequence[Sequence[int]]) -> int:
    """Length of the longest common beginning."""
    shortest = min(map(len, rows))
    return next((i for i in range(shortest) if any(row[i] != rows[0][i] for row in rows)), shortest)


class LineEncoder:
    """Start token and text, line by line where the tokenizer allows: few-shot examples come again and again.

    With the split of data/tokenizer.py a line end before something visible always ends a token (``splits_lines``).
    """

    def __init__(self, tokenizer: Encoder) -> None:
        self.tokenizer = tokenizer
        self.by_lines = bool(getattr(tokenizer, "splits_lines", False))
        self.known: dict[str, tuple[int, ...]] = {}

    def __call__(self, text: str) -> tuple[int, ...]:
        lines = re.split(r"(?<=\n)(?=\S)", text) if self.by_lines else [text]
        if new := [line for line in dict.fromkeys(lines) if line not in self.known]:
            self.known.update(zip(new, map(tuple, self.tokenizer.encode(new)), strict=True))
        return (self.tokenizer.bos, *(token for line in lines for token in self.known[line]))
