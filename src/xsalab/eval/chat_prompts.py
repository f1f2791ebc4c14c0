"""From ChatCORE's items to prompts in tokens: what a task is asked with, and the key of all that it depends on.

Prompts longer than the context are read as they are up to ten times the context, which is as far as nanochat's rotary
table goes, and counted ("beyond context"; nanochat cuts prompts at 2,048 tokens, at their end). Beyond that the
beginning of the user's text is dropped, so that the question's end, the choices and the instruction remain; ``cut`` is
set. An answer has at most ``max_new_tokens`` tokens and no more than the context, and its room is kept free.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, SupportsIndex

import numpy as np

from ..config import config
from ..data.chat import ChatTokenizer, render_prompt
from .chat_tasks import CATEGORICAL, CHAT_TASKS, HUB, ChatItem, ChatTask, read_items

REACH = 10  # contexts; nanochat's rotary table
RULES = 1  # part of every key: raised when a rule here changes what is answered or counted
TOLD = 3  # faults of one file that are told one by one


@config
class ChatCoreConfig:
    """What is asked and how. Raises ValueError naming the field."""

    data: str = HUB  # a folder with arc_easy_test.jsonl, …; "hub": downloaded
    tasks: tuple[str, ...] = tuple(CHAT_TASKS)
    max_categorical: int = 0  # items of each categorical task, the first in nanochat's order; 0: all
    max_generated: int = 24  # of each generated task
    samples: int = 1  # answers to an item; above 1 gives pass@k
    temperature: float = 0.0
    top_k: int = 50  # at temperature 0 it plays no part
    max_new_tokens: int = 512
    seed: int = 0
    batch_rows: int = 16  # changes memory, never a score
    run_code: bool = False  # HumanEval runs what the model wrote

    def __post_init__(self) -> None:
        least = {
            "max_categorical": 0, "max_generated": 0, "samples": 1, "top_k": 0, "max_new_tokens": 1, "batch_rows": 1,
        }  # fmt: skip
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least {smallest}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature = {self.temperature}: must be a finite number of at least 0")
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(
                f"samples = {self.samples} at temperature 0 are all the same; set temperature, such as 0.8"
            )
        if not self.data.strip():
            raise ValueError("data = '': give a folder, or 'hub'")
        if not self.tasks or len(set(self.tasks)) < len(self.tasks) or not set(self.tasks) <= set(CHAT_TASKS):
            raise ValueError(f"tasks = {list(self.tasks)}: give some of {', '.join(CHAT_TASKS)}, each once")

    def longest_answer(self, context: int) -> int:
        """Tokens of one generated answer."""
        return min(self.max_new_tokens, context)


class AnswerTokenizer(ChatTokenizer, Protocol):
    """What is needed of a tokenizer: what rendering needs, and the way back to text."""

    def decode(self, ids: Iterable[SupportsIndex], /) -> str: ...


@dataclass(frozen=True)
class Prepared:
    """A task that can be asked: its items with their prompts in tokens, shortened where they had to be."""

    task: ChatTask
    items: tuple[ChatItem, ...]
    prompts: tuple[tuple[int, ...], ...]
    cut: tuple[bool, ...]
    letters: Mapping[str, int]  # letter -> its token
    skipped: int
    key: str

    @property
    def chance(self) -> float:
        """What guessing among the letters gives on these items; 0 for generated answers."""
        return sum(1 / len(item.letters) if item.letters else 0.0 for item in self.items) / len(self.items)


def prepare(
    task: ChatTask,
    tokenizer: AnswerTokenizer,
    folder: Path,
    config: ChatCoreConfig,
    context: int,
    note: Callable[[str, str], None] = lambda task, text: None,
) -> Prepared:
    """Raises ValueError or OSError where the task cannot be asked; ``note(task, text)`` tells what is skipped."""
    categorical = task.name in CATEGORICAL
    items, faults = read_items(folder, task, config.max_categorical if categorical else config.max_generated)
    for fault in faults[:TOLD]:
        note(task.name, f"skipped: {fault}")
    if len(faults) > TOLD:
        note(task.name, f"skipped: {len(faults) - TOLD} more")
    if not items:
        raise ValueError(f"none of its items can be used; {faults[0] if faults else 'the file is empty'}")
    letters = _letter_tokens(tokenizer, items)
    room = REACH * context - (0 if categorical else config.longest_answer(context))
    whole = [render_prompt([{"role": "user", "content": item.prompt}], tokenizer) for item in items]
    prompts = [_shortened(prompt, room) for prompt in whole]
    settings: list[object] = [RULES, task.name, context, len(faults)]
    if not categorical:
        settings += [config.samples, config.temperature, config.longest_answer(context)]
        settings += [config.top_k, config.seed] if config.temperature else []
    return Prepared(
        task,
        tuple(items),
        tuple(prompts),
        tuple(len(prompt) > room for prompt in whole),
        letters,
        len(faults),
        _key(settings, items, prompts, letters),
    )


def _letter_tokens(tokenizer: AnswerTokenizer, items: Sequence[ChatItem]) -> dict[str, int]:
    letters = list(dict.fromkeys(letter for item in items for letter in item.letters))
    tokens = dict(zip(letters, tokenizer.encode(letters), strict=True))
    for letter, ids in tokens.items():
        if len(ids) != 1:
            raise ValueError(
                f"the letter {letter!r} is {len(ids)} tokens of this tokenizer ({', '.join(map(str, ids))}); "
                "a categorical answer is one token"
            )
    return {letter: ids[0] for letter, ids in tokens.items()}


def _shortened(prompt: Sequence[int], room: int) -> tuple[int, ...]:
    """At most ``room`` tokens: the start token, the start of the user's turn, and the end of the rest."""
    return tuple(prompt) if len(prompt) <= room else (*prompt[:2], *prompt[len(prompt) - room + 2 :])


def _key(settings: object, items: Sequence[ChatItem], prompts: Sequence[Sequence[int]], letters: object) -> str:
    text = json.dumps([settings, letters, [[item.name, item.reference, item.letters] for item in items]])
    content = hashlib.sha256(text.encode())
    for prompt in prompts:
        content.update(np.array([len(prompt), *prompt], dtype="<i8").tobytes())
    return content.hexdigest()[:16]
