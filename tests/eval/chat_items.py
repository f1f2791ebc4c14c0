"""Small ChatCORE files and a tokenizer of bytes, for the tests of ChatCORE."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, SupportsIndex

from xsalab.data.chat import CHAT_TOKENS

STEMS = {
    "ARC-Easy": "arc_easy_test",
    "ARC-Challenge": "arc_challenge_test",
    "MMLU": "mmlu_test",
    "GSM8K": "gsm8k_test",
    "HumanEval": "humaneval_test",
}


class ByteTokenizer:
    """Every byte is a token; ``split``: these letters become two tokens, the first a zero byte."""

    def __init__(self, split: str = "") -> None:
        self.split = split.encode()
        self.bos = 256
        self.specials = {"<|bos|>": 256, **{name: 257 + i for i, name in enumerate(CHAT_TOKENS)}}
        self.names = {number: name for name, number in self.specials.items()}

    @property
    def vocab_size(self) -> int:
        return 256 + len(self.specials)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [
            [number for byte in text.encode() for number in ([0, byte] if byte in self.split else [byte])]
            for text in texts
        ]

    def decode(self, ids: Iterable[SupportsIndex], /) -> str:
        numbers = [number.__index__() for number in ids]
        parts = [bytes([n]) if n < 256 else self.names[n].encode() for n in numbers]
        return b"".join(parts).decode("utf-8", errors="replace")


def arc(number: int, letters: str = "ABCD") -> dict[str, Any]:
    """An item whose question grows with its number and whose right letter goes round."""
    return {
        "id": f"q{number}",
        "question": f"Which is number {number}? " + "la " * (number % 7),
        "choices": {"text": [f"thing {letter}" for letter in letters], "label": list(letters)},
        "answerKey": letters[number % len(letters)],
    }


def mmlu(number: int) -> dict[str, Any]:
    return {
        "question": f"What follows from {number}?",
        "choices": ["one", "two", "three", "four"],
        "answer": number % 4,
        "subject": "logic",
    }


def gsm8k(number: int) -> dict[str, Any]:
    return {"question": f"What is {number} and 1?", "answer": f"It is <<{number}+1={number + 1}>>.\n#### {number + 1}"}


def humaneval(number: int) -> dict[str, Any]:
    return {
        "task_id": f"HumanEval/{number}",
        "prompt": f'import math\n\n\ndef add_{number}(x):\n    """ Adds {number}. """\n',
        "entry_point": f"add_{number}",
        "canonical_solution": f"    return x + {number}\n",
        "test": f"def check(candidate):\n    assert candidate(2) == {number + 2}\n",
    }


MAKERS = {"ARC-Easy": arc, "ARC-Challenge": arc, "MMLU": mmlu, "GSM8K": gsm8k, "HumanEval": humaneval}


def write_lines(path: Path, rows: Iterable[Any]) -> Path:
    """JSON lines; a text stands as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def write_tasks(folder: Path, count: int = 6, tasks: Iterable[str] = tuple(MAKERS)) -> Path:
    folder.mkdir(exist_ok=True)
    for task in tasks:
        write_lines(folder / f"{STEMS[task]}.jsonl", [MAKERS[task](number) for number in range(count)])
    return folder
