from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eval.chat_items import MAKERS, STEMS, arc, gsm8k, humaneval, mmlu, write_lines, write_tasks
from xsalab.eval.chat_tasks import CHAT_TASKS, HUB, final_number, program, read_items

ARC, MMLU, GSM8K, HUMANEVAL = (CHAT_TASKS[name] for name in ("ARC-Easy", "MMLU", "GSM8K", "HumanEval"))


def test_items_come_in_nanochats_order_by_their_lines(tmp_path: Path) -> None:
    """numpy's default_rng(42).permutation over the rows; a limit takes the first of that order."""
    write_tasks(tmp_path, 20)
    items, faults = read_items(tmp_path, ARC)
    order = np.random.default_rng(42).permutation(20)
    assert [item.name for item in items] == [str(i + 1) for i in order]
    assert [item.reference for item in items] == ["ABCD"[i % 4] for i in order]
    assert read_items(tmp_path, ARC, 5) == (items[:5], [])
    assert faults == []


def test_lines_that_cannot_be_used_keep_their_place_and_are_named(tmp_path: Path) -> None:
    """The others stay in the same order under the same names; a blank line is no row."""
    good = [arc(number) for number in range(12)]
    before, _ = read_items(write_tasks(tmp_path, 12), ARC)
    bad: list[Any] = [*good]
    bad[3], bad[7] = "{broken", {"question": "What?"}
    path = write_lines(tmp_path / "arc_easy_test.jsonl", bad)
    after, faults = read_items(tmp_path, ARC)
    assert after == [item for item in before if item.name not in ("4", "8")]
    assert len(faults) == 2
    assert any(fault.startswith(f"{path}: line 4: not JSON") for fault in faults)
    assert any(fault.startswith(f"{path}: line 8: field 'choices' is None") for fault in faults)
    write_lines(path, [*good[:6], "", *good[6:]])
    assert {item.name for item in read_items(tmp_path, ARC)[0]} == {str(n) for n in (*range(1, 7), *range(8, 14))}


@pytest.mark.parametrize("name", CHAT_TASKS)
def test_parquet_holds_the_same_items(tmp_path: Path, name: str) -> None:
    (tmp_path / "lines").mkdir()
    rows = [MAKERS[name](number) for number in range(9)]
    expected, _ = read_items(write_tasks(tmp_path / "lines", 9), CHAT_TASKS[name])
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{STEMS[name]}.parquet")
    assert read_items(tmp_path, CHAT_TASKS[name]) == (expected, [])


def test_a_missing_a_doubled_and_a_damaged_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"mmlu_test\.jsonl: no such file"):
        read_items(tmp_path, MMLU)
    (tmp_path / "mmlu_test.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match=r"mmlu_test\.parquet: not a complete Parquet file"):
        read_items(tmp_path, MMLU)
    write_lines(tmp_path / "mmlu_test.jsonl", [mmlu(0)])
    with pytest.raises(ValueError, match=r"mmlu_test\.parquet is there as well"):
        read_items(tmp_path, MMLU)


@pytest.mark.parametrize(
    ("task", "row", "change", "words"),
    [
        (ARC, arc(0), {"question": None}, "field 'question' is None"),
        (ARC, arc(0), {"question": "half \ud800"}, "surrogate"),
        (ARC, arc(0), {"choices": {"text": [], "label": []}}, "choices.text"),
        (ARC, arc(0), {"choices": {"text": ["a", "b"], "label": ["A", "A"]}}, "2 texts for the labels A, A"),
        (ARC, arc(0), {"choices": {"text": ["a", "b"], "label": ["A", "B", "C"]}}, "2 texts for the labels A, B, C"),
        (ARC, arc(0), {"answerKey": "E"}, "answerKey = 'E' is none of the labels A, B, C, D"),
        (MMLU, mmlu(0), {"answer": 4}, "answer = 4"),
        (MMLU, mmlu(0), {"answer": True}, "answer = True"),
        (MMLU, mmlu(0), {"answer": "A"}, "answer = 'A'"),
        (MMLU, mmlu(0), {"choices": []}, "field 'choices' is []"),
        (MMLU, mmlu(0), {"choices": ["a", "b", "c"]}, "has 3 entries"),
        (GSM8K, gsm8k(0), {"answer": "It is 3."}, "no number after ####"),
        (HUMANEVAL, humaneval(0), {"entry_point": "a b"}, "entry_point = 'a b'"),
        (HUMANEVAL, humaneval(0), {"test": ""}, "field 'test' is ''"),
    ],
)
def test_wrong_fields_are_named(tmp_path: Path, task: Any, row: dict, change: dict, words: str) -> None:
    path = tmp_path / f"{task.stem}.jsonl"
    path.write_text(json.dumps({**row, **change}) + "\n", encoding="utf-8")
    items, (fault,) = read_items(tmp_path, task)
    assert items == []
    assert fault.startswith(f"{path}: line 1: ")
    assert words in fault


def test_no_object_and_no_utf8_are_named(tmp_path: Path) -> None:
    path = tmp_path / "gsm8k_test.jsonl"
    path.write_bytes(b'[1]\n{"question": "\xff"}\n')
    _, faults = read_items(tmp_path, GSM8K)
    assert sorted(faults) == [
        f"{path}: line 1: is list, not an object with fields",
        f"{path}: line 2: not UTF-8 (byte 14 of the line)",
    ]


def test_the_hubs_files_are_asked_for_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(repo: str, name: str, repo_type: str) -> str:
        asked.append((repo, name, repo_type))
        path = tmp_path / f"{len(asked)}.parquet"
        pq.write_table(pa.Table.from_pylist([MAKERS[list(CHAT_TASKS)[len(asked) - 1]](0)]), path)
        return str(path)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    for task in CHAT_TASKS.values():
        assert len(read_items(Path(HUB), task)[0]) == 1
    assert asked == [
        ("allenai/ai2_arc", "ARC-Easy/test-00000-of-00001.parquet", "dataset"),
        ("allenai/ai2_arc", "ARC-Challenge/test-00000-of-00001.parquet", "dataset"),
        ("cais/mmlu", "all/test-00000-of-00001.parquet", "dataset"),
        ("openai/gsm8k", "main/test-00000-of-00001.parquet", "dataset"),
        ("openai/openai_humaneval", "openai_humaneval/test-00000-of-00001.parquet", "dataset"),
    ]


def test_a_failed_download_names_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> str:
        raise RuntimeError("no route")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    with pytest.raises(OSError, match=r"main/test-00000-of-00001.parquet of openai/gsm8k could not be had: no route"):
        read_items(Path(HUB), GSM8K)


def test_prompts_are_nanochats_to_the_letter(tmp_path: Path) -> None:
    """The letter stands behind its choice, right after "=", without a space."""
    row = {
        "question": "Which is hot?",
        "choices": {"text": ["ice", "the sun"], "label": ["A", "B"]},
        "answerKey": "B",
    }
    write_lines(tmp_path / "arc_easy_test.jsonl", [row])
    (item,), _ = read_items(tmp_path, ARC)
    assert item.prompt == (
        "Multiple Choice question: Which is hot?\n- ice=A\n- the sun=B\n\n"
        "Respond only with the letter of the correct answer."
    )
    assert (item.letters, item.reference) == (("A", "B"), "B")
    write_lines(tmp_path / "mmlu_test.jsonl", [{"question": "2?", "choices": ["x", "y", "z", "w"], "answer": 2}])
    (item,), _ = read_items(tmp_path, MMLU)
    assert item.prompt == (
        "Multiple Choice question: 2?\n- x=A\n- y=B\n- z=C\n- w=D\n\n"
        "Respond only with the letter of the correct answer."
    )
    assert (item.letters, item.reference) == (("A", "B", "C", "D"), "C")


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("#### 72", True),
        ("so it is\n#### 72.", True),
        ("#### $72", True),
        ("#### 72.0", True),
        ("####72", True),
        ("#### 72,", True),
        ("#### 72 dollars", True),
        ("#### 72<|assistant_end|>", True),
        ("#### 72\n#### 5", True),
        ("#### unknown\n#### 72", True),
        ("#### 720", False),
        ("#### -72", False),
        ("#### 5\n#### 72", False),
        ("#### 7.2", False),
        ("#### 72.0.0", False),
        ("72", False),
        ("#### seventy", False),
        ("", False),
    ],
)
def test_a_final_number_is_read_exactly(answer: str, right: bool) -> None:
    """F147: a full stop behind and a currency sign before do not make 72 wrong; the first number after #### counts."""
    assert (final_number(answer) == Decimal(72)) is right


def test_thousands_signs_and_decimals_are_numbers() -> None:
    """F147."""
    assert final_number("#### 1,000") == 1000
    assert final_number("#### -5") == final_number("#### -$5.00") == final_number("#### $-5") == -5
    assert final_number("#### .5") == Decimal("0.5")
    assert final_number("It is #### 7.50.") == Decimal("7.5")
    assert final_number("#### 12345678901234567890123") != final_number("#### 12345678901234567890124")


def test_the_real_items_can_all_be_used(shared_data: Path) -> None:
    """Every line of the real files; the golds of GSM8K are those of a plain reading of what follows ####."""
    sizes = {}
    for name, task in CHAT_TASKS.items():
        items, faults = read_items(shared_data / "chat", task)
        assert not faults
        sizes[name] = len(items)
    assert sizes == {"ARC-Easy": 2376, "ARC-Challenge": 1172, "MMLU": 1710, "GSM8K": 1319, "HumanEval": 164}
    lines = (shared_data / "chat" / "gsm8k_test.jsonl").read_text(encoding="utf-8").splitlines()
    for item in read_items(shared_data / "chat", GSM8K)[0]:
        plain = json.loads(lines[int(item.name) - 1])["answer"].split("#### ")[1].replace(",", "")
        assert Decimal(item.reference) == Decimal(plain)


PROMPT = "# a comment\nimport math\nfrom typing import List\n\n\ndef f(x):\n    import os\n"


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("def f(x):\n    return 1\n", "def f(x):\n    return 1"),
        ("Here:\n```python\ndef f(x):\n    return 2\n```\nDone.", "def f(x):\n    return 2"),
        ("```\nf = 3\n```\nor\n```python\nf = 4\n```", "f = 3"),
        ("```python   \nf = 5\n\n```", "f = 5"),
        ("```python\nf = 6", "```python\nf = 6"),
        ("```js\nf = 7\n```\n", "```js\nf = 7\n```"),
    ],
)
def test_a_program_is_the_prompts_imports_and_the_first_block_of_the_answer(answer: str, code: str) -> None:
    """As nanochat puts it together: imports before anything else of the prompt, the block or else the whole answer."""
    assert program(PROMPT, answer) == f"import math\nfrom typing import List\n\n{code}"


def test_right_programs_pass_and_others_do_not(tmp_path: Path) -> None:
    """The check that goes with an item, run on its own solution and on another."""
    write_tasks(tmp_path, 3)
    items, _ = read_items(tmp_path, HUMANEVAL)
    for item in items:
        number = int(item.name) - 1
        space: dict[str, Any] = {}
        exec(program(item.prompt, f"def add_{number}(x):\n    return x + {number}"), space)
        exec(item.reference, space)
        exec(program(item.prompt, f"def add_{number}(x):\n    return x - 1"), space)
        with pytest.raises(AssertionError):
            exec(item.reference, space)
