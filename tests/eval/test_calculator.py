from __future__ import annotations

import json
import operator
import random
import re
from fractions import Fraction
from pathlib import Path

import pytest

from xsalab.data import Tokenizer
from xsalab.eval.calculator import DECIMALS, Calculator, calculate


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["12 + 3.5 = 15.5 and 7 * 8 = 56, so 100 / 4 = 25. "] * 4, 280)


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("48/2", "24"),  # nanochat's would be 24.0
        ("0.1+0.2", "0.3"),
        (".5*10", "5"),
        ("1,200*(3-.5)/2", "1500"),
        ("-3*-(2+4)", "18"),
        ("+11", "11"),
        ("3*+6", "18"),
        ("560//10", "56"),
        (" 7 - 9 ", "-2"),
        ("1/3", "0." + DECIMALS * "3"),
        ("-2/3", "-0." + (DECIMALS - 1) * "6" + "7"),
        ("1/30000000000000", "0"),
        ("-1/30000000000000", "0"),
        ("100000000000000000000*10", "1" + 21 * "0"),
        ("(" * 20 + "1" + ")" * 20, "1"),
    ],
)
def test_sums_are_worked_out(text: str, result: str) -> None:
    assert calculate(text) == result


def test_sums_are_those_of_exact_fractions() -> None:
    """Random trees of decimal numbers, put together beside their value and never parsed by it."""
    draw = random.Random(0)
    signs = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}

    def tree(depth: int) -> tuple[str, Fraction]:
        if not depth or draw.random() < 0.2:
            cents = draw.randrange(1, 10_000)
            return f"{cents / 100:.2f}", Fraction(cents, 100)
        (left, a), (right, b) = tree(depth - 1), tree(depth - 1)
        sign = draw.choice([sign for sign in signs if sign != "/" or b])
        return f"({left}{sign}{right})", signs[sign](a, b)

    tried = 0
    while tried < 200:
        text, value = tree(3)
        if len(text) <= 100:
            tried += 1
            found = calculate(text)
            assert found is not None
            assert abs(Fraction(found) - value) <= Fraction(1, 2 * 10**DECIMALS), text
            assert re.fullmatch(r"-?(0|[1-9]\d*)(\.\d*[1-9])?", found), found


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "2**9", "9**9**9**9", "(1).real", "().__class__", "__import__('os')", "abs(-1)", "x+1", "'a'*9",
        "True", "1e9", "1_000", "0x10", "1j", "012", "1 2", "1(2)", "()", "(1", "5%", "1\n+1", "[1]", "1<2", "１+1",
        "1/0", "1//0", "1/(2-2)", "(" * 90, "9" * 101, "1+" * 50 + "1",
    ],
)  # fmt: skip
def test_anything_else_gives_nothing(text: str) -> None:
    """F154: no name, no attribute, no call, no power is reached."""
    assert calculate(text) is None


def test_no_sum_is_large() -> None:
    """The longest products of the largest numbers: digits stay bounded by the length of the sum."""
    found = calculate("9" * 50 + "*" + "9" * 49)
    assert found is not None
    assert int(found) == (10**50 - 1) * (10**49 - 1)
    assert calculate("*".join(["99999"] * 16)) == str(99999**16)


def test_the_marks_of_gsm8k(shared_data: Path) -> None:
    """All 23,716 training marks by value; by their very text all but those with cents (7.50) or no zero (.5)."""
    text = (shared_data / "chat" / "gsm8k_train.jsonl").read_text(encoding="utf-8")
    answers = [json.loads(line)["answer"] for line in text.rstrip().split("\n")]
    marks = [mark.rsplit("=", 1) for answer in answers for mark in re.findall(r"<<([^>]+)>>", answer)]
    found = [calculate(expression) for expression, _ in marks]
    assert len(marks) == 23_716
    assert [Fraction(value or "0") for value in found] == [Fraction(mark[1]) for mark in marks]
    assert sum(value == mark[1] for value, mark in zip(found, marks, strict=True)) == 23_049


# --- the tool


def call(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of a text with the tool's special tokens in it."""
    parts = re.split(r"(<\|\w+\|>)", text)
    return [
        i
        for part in parts
        for i in ([tokenizer.specials[part]] if part in tokenizer.specials else tokenizer.encode([part])[0])
    ]


def test_the_result_is_forced_behind_the_end_of_a_sum(tokenizer: Tokenizer) -> None:
    new = call(tokenizer, "so 12 + 3.5 = <|python_start|>12+3.5<|python_end|>")
    calculator = Calculator(tokenizer)
    assert tokenizer.decode(calculator(new)) == "<|output_start|>15.5<|output_end|>"
    assert all(calculator(new[:length]) == [] for length in range(len(new)))


@pytest.mark.parametrize(
    ("text", "forced"),
    [
        ("<|python_start|>1<|python_start|>7*8<|python_end|>", "<|output_start|>56<|output_end|>"),  # the last start
        ("<|python_start|>7*8<|python_end|><|python_end|>", ""),  # ended before
        ("7*8<|python_end|>", ""),  # never begun
        ("<|python_start|><|python_end|>", ""),
        ("<|python_start|>7*8<|output_start|><|python_end|>", ""),
        ("<|python_start|>().__class__<|python_end|>", ""),  # F154
        ("<|python_start|>1/0<|python_end|>", ""),
        ("<|python_start|>1<|python_end|><|output_start|>1<|output_end|>", ""),
    ],
)
def test_only_the_end_of_a_sum_forces_anything(tokenizer: Tokenizer, text: str, forced: str) -> None:
    assert tokenizer.decode(Calculator(tokenizer)(call(tokenizer, text))) == forced


def test_a_tokenizer_without_the_tool_is_refused(tokenizer: Tokenizer) -> None:
    class Plain:
        specials = {"<|bos|>": 0, "<|python_start|>": 1}  # noqa: RUF012
        bos = 0

        def encode(self, texts): ...
        def decode(self, ids): ...

    with pytest.raises(ValueError, match=r"no special token .*<\|output_start\|>, <\|output_end\|>"):
        Calculator(Plain())  # pyright: ignore
