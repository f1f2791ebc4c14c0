"""The calculator that a chat model may use: sums in, one number out, and no Python is run.

After ``<|python_start|>48/2<|python_end|>`` the tokens of ``<|output_start|>24<|output_end|>`` are forced on the
sample. The numbers are written as GSM8K's own marks have them (``<<48/2=24>>``), since those are what a model is
fine-tuned on: nanochat forces Python's "24.0" there. Sums are exact fractions, so 0.1 + 0.2 is 0.3.

Left out on purpose: nanochat's second tool, ``"text".count("t")``.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Protocol

from ..data.chat import ChatTokenizer, check_chat_tokens

LENGTH = 100  # characters; GSM8K's longest sum has 30. It bounds the digits of a result, and so the time, as well
DECIMALS = 10  # of a result that has no end, such as 1/3

_TWO: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
_ONE: dict[type[ast.unaryop], Callable[[Fraction], Fraction]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


class ToolTokenizer(ChatTokenizer, Protocol):
    """What the calculator needs of a tokenizer."""

    def decode(self, ids: Iterable[int], /) -> str: ...


class Calculator:
    """A ``Tool``: looks at the new tokens of one sample and says what must follow. Keeps nothing between calls."""

    def __init__(self, tokenizer: ToolTokenizer) -> None:
        """Raises ValueError where the tokenizer lacks one of the special tokens of conversations."""
        check_chat_tokens(tokenizer, "calculator")
        names = ("python_start", "python_end", "output_start", "output_end")
        self.tokenizer = tokenizer
        self.start, self.end, self.output_start, self.output_end = (tokenizer.specials[f"<|{name}|>"] for name in names)

    def __call__(self, new: Sequence[int]) -> list[int]:
        """Tokens to force behind ``new``: the result, where ``new`` ends a sum that can be worked out; else none."""
        if not new or new[-1] != self.end:
            return []
        for first in range(len(new) - 2, -1, -1):
            if new[first] == self.start:
                result = calculate(self.tokenizer.decode(new[first + 1 : -1]))
                if result is None:
                    return []
                return [self.output_start, *self.tokenizer.encode([result])[0], self.output_end]
        return []


def calculate(text: str) -> str | None:
    """The value of a sum such as ``1,200*(3-.5)/2``; None for anything that is not one.

    Numbers, + − * / //, parentheses, and commas within numbers. No power, no name, at most ``LENGTH`` characters.
    A whole number has no decimals; others have as many as they need, at most ``DECIMALS``.
    """
    text = text.replace(",", "").strip()
    if len(text) > LENGTH or not set(text) <= set("0123456789+-*/.() "):
        return None
    try:
        return _written(_value(ast.parse(text, mode="eval").body))
    except (SyntaxError, ZeroDivisionError):
        return None


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return Fraction(str(node.value))  # by its digits: 0.1 is a tenth
    if isinstance(node, ast.UnaryOp) and type(node.op) in _ONE:
        return _ONE[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _TWO:
        return Fraction(_TWO[type(node.op)](_value(node.left), _value(node.right)))
    raise SyntaxError(f"{type(node).__name__} is no arithmetic")


def _written(value: Fraction) -> str:
    """Decimal digits without an exponent, and without zeros that say nothing."""
    scaled = round(value * 10**DECIMALS)  # halves to even
    sign, digits = "-" if scaled < 0 else "", f"{abs(scaled):0{DECIMALS + 1}d}"
    decimals = digits[-DECIMALS:].rstrip("0")
    return sign + digits[:-DECIMALS] + ("." + decimals if decimals else "")
