"""The five tasks of ChatCORE: where their items are, what is asked, and what counts as right.

The items, their order and the prompts are those of nanochat (scripts/chat_eval.py and tasks/ of karpathy/nanochat), so
that numbers compare: a task's items are shuffled by numpy's ``default_rng(42).permutation`` over all rows of its file,
and a limit takes the first of them. An item is called by its line in the file (row, in Parquet), from 1. A line that
cannot be used keeps its place in the shuffle, is named and is left out; the others stay as they are.

Where an answer is judged otherwise than there:

GSM8K     nanochat takes what matches "#### " and then an optional minus, digits, full stops and commas, first match,
          and compares strings without commas. Here too the first number after "####" counts, but a currency sign and
          other or no space may stand before it, a full stop or comma behind it is not part of it, and numbers are
          compared as decimals: "#### $72", "#### 72." and "#### 72.0" are 72. So a score is nanochat's or higher,
          but for an answer in which a number that nanochat's pattern skips comes before another one.
HumanEval the program is nanochat's (imports at the prompt's beginning, then the first fenced code block or else the
          whole answer); whether it passed is proved by the sandbox, not by an exit code (F149): a score is nanochat's
          or lower where a program ends itself.
Several samples: an item's value is the share of right samples (pass@1); nanochat counts an item as right if any is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ..data.chat import multiple_choice
from ..data.sources import brief, encodable, hub_file, parquet_file

HUB = "hub"  # in place of a folder: the files are downloaded from the hub, once
SHUFFLE_SEED = 42
MMLU_LETTERS = ("A", "B", "C", "D")


@dataclass(frozen=True)
class ChatItem:
    """One question. ``letters`` are what may be answered, where that is so.

    ``reference``: the right letter; the final number; the code that raises where a program is wrong.
    """

    name: str
    prompt: str
    reference: str
    letters: tuple[str, ...] = ()


@dataclass(frozen=True)
class ChatTask:
    """``stem`` is the name of its file in a folder, ``repo`` and ``subset`` where the hub has it."""

    name: str
    stem: str
    repo: str
    subset: str
    baseline: float  # nanochat's convention
    parse: Callable[[str, Mapping[str, Any]], ChatItem]


def read_items(folder: Path, task: ChatTask, limit: int = 0) -> tuple[list[ChatItem], list[str]]:
    """The first ``limit`` items (0: all) in nanochat's order, and one message for each line that cannot be used.

    Raises OSError or ValueError naming the file where it is missing, cannot be downloaded or is damaged.
    """
    path = task_file(folder, task)
    rows = _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path)
    place = "row" if path.suffix == ".parquet" else "line"
    order = np.random.default_rng(SHUFFLE_SEED).permutation(len(rows))
    items, faults = [], []
    for index in order[: limit or None]:
        number, read = rows[index]
        try:
            items.append(task.parse(str(number), read()))
        except ValueError as error:
            faults.append(f"{path}: {place} {number}: {error}")
    return items, faults


def task_file(folder: Path, task: ChatTask) -> Path:
    """``stem``.jsonl or ``stem``.parquet of the folder; of the hub its Parquet file, downloaded if it is not there."""
    if folder == Path(HUB):
        return hub_file(task.repo, f"{task.subset}/test-00000-of-00001.parquet")
    found = [path for suffix in ("jsonl", "parquet") if (path := folder / f"{task.stem}.{suffix}").is_file()]
    if not found:
        raise ValueError(f"{folder / task.stem}.jsonl: no such file (nor .parquet)")
    if len(found) == 2:
        raise ValueError(f"{found[0]}: {found[1].name} is there as well; keep one of them")
    return found[0]


Row = tuple[int, Callable[[], Mapping[str, Any]]]  # its number from 1, and what reads it


def _json_rows(path: Path) -> list[Row]:
    lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    return [(number, lambda line=line: _json(line)) for number, line in enumerate(lines, start=1) if line.strip()]


def _json(line: bytes) -> Mapping[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start} of the line)") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"is {type(row).__name__}, not an object with fields")
    return row


def _parquet_rows(path: Path) -> list[Row]:
    with parquet_file(path) as file:
        try:
            table = file.read()
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{path}: damaged ({brief(error)}); delete it or get it again") from None
    return [(i + 1, lambda i=i: table.slice(i, 1).to_pylist()[0]) for i in range(table.num_rows)]


# What the rows hold


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"field {field!r} is {value!r:.60}, not a text")
    if not encodable(value):
        raise ValueError(f"field {field!r} holds half of a surrogate pair, which is no character")
    return value


def _texts(value: Any, field: str, least: int) -> tuple[str, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) < least:
        raise ValueError(f"field {field!r} is {value!r:.60}, not a list of at least {least} texts")
    return tuple(_text(entry, field) for entry in value)


def _arc(name: str, row: Mapping[str, Any]) -> ChatItem:
    question, options = _text(row.get("question"), "question"), row.get("choices")
    if not isinstance(options, Mapping):
        raise ValueError(f"field 'choices' is {options!r:.60}, not a table of 'text' and 'label'")
    texts, letters = _texts(options.get("text"), "choices.text", 2), _texts(options.get("label"), "choices.label", 2)
    if len(texts) != len(letters) or len(set(letters)) != len(letters):
        raise ValueError(f"field 'choices' has {len(texts)} texts for the labels {', '.join(letters)}")
    gold = row.get("answerKey")
    if gold not in letters:
        raise ValueError(f"answerKey = {gold!r} is none of the labels {', '.join(letters)}")
    return ChatItem(name, multiple_choice(question, letters, texts), gold, letters)


def _mmlu(name: str, row: Mapping[str, Any]) -> ChatItem:
    question, texts = _text(row.get("question"), "question"), _texts(row.get("choices"), "choices", 2)
    if len(texts) != len(MMLU_LETTERS):
        raise ValueError(f"field 'choices' has {len(texts)} entries, an item of MMLU has {len(MMLU_LETTERS)}")
    gold = row.get("answer")
    if isinstance(gold, bool) or not isinstance(gold, int) or not 0 <= gold < len(texts):
        raise ValueError(f"answer = {gold!r}: must be a whole number from 0 to {len(texts) - 1}")
    return ChatItem(name, multiple_choice(question, MMLU_LETTERS, texts), MMLU_LETTERS[gold], MMLU_LETTERS)


def _gsm8k(name: str, row: Mapping[str, Any]) -> ChatItem:
    question, answer = _text(row.get("question"), "question"), _text(row.get("answer"), "answer")
    number = final_number(answer)
    if number is None:
        raise ValueError("field 'answer' has no number after ####")
    return ChatItem(name, question, str(number))


def _humaneval(name: str, row: Mapping[str, Any]) -> ChatItem:
    prompt, test = _text(row.get("prompt"), "prompt"), _text(row.get("test"), "test")
    entry = row.get("entry_point")
    if not isinstance(entry, str) or not entry.isidentifier():
        raise ValueError(f"entry_point = {entry!r}: must be the name of a function")
    return ChatItem(name, prompt, f"{test}\ncheck({entry})")


CATEGORICAL = {
    task.name: task
    for task in (
        ChatTask("ARC-Easy", "arc_easy_test", "allenai/ai2_arc", "ARC-Easy", 0.25, _arc),
        ChatTask("ARC-Challenge", "arc_challenge_test", "allenai/ai2_arc", "ARC-Challenge", 0.25, _arc),
        ChatTask("MMLU", "mmlu_test", "cais/mmlu", "all", 0.25, _mmlu),
    )
}
GENERATED = {
    task.name: task
    for task in (
        ChatTask("GSM8K", "gsm8k_test", "openai/gsm8k", "main", 0.0, _gsm8k),
        ChatTask("HumanEval", "humaneval_test", "openai/openai_humaneval", "openai_humaneval", 0.0, _humaneval),
    )
}
CHAT_TASKS = {**CATEGORICAL, **GENERATED}  # in nanochat's order


# What counts as right

_FINAL = re.compile(r"####[ \t]*(-?)[$€£]?(-?)([0-9.,]*[0-9][0-9.,]*)")


def final_number(text: str) -> Decimal | None:
    """The first number that follows "####", exactly; None where there is none (or "1.2.3", which is none)."""
    match = _FINAL.search(text)
    if match is None:
        return None
    try:
        number = Decimal(match[3].rstrip(".,").replace(",", ""))
    except InvalidOperation:
        return None
    return -number if match[1] or match[2] else number


_IMPORT = ("import ", "from ")
_FENCED = re.compile(r"```(?:python)?\s*\n(?P<code>.*?)\n```", re.DOTALL)


def program(prompt: str, answer: str) -> str:
    """The prompt's imports, then the answer's first fenced code block, or the whole answer where it has none."""
    imports = []
    for line in map(str.strip, prompt.split("\n")):
        if line.startswith(_IMPORT):
            imports.append(line)
        elif line and not line.startswith("#"):
            break
    fenced = _FENCED.search(answer)
    return "\n".join(imports) + "\n\n" + (fenced["code"] if fenced else answer).strip()
