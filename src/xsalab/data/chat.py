"""CONVERSATIONS to tokens: special tokens around every turn, and a mask over what the assistant writes.

    <|bos|> <|user_start|> … <|user_end|> <|assistant_start|> … <|assistant_end|> <|user_start|> …

Counted (mask True) are the assistant's text, its calls with <|python_start|> and <|python_end|> around them, and
<|assistant_end|>. Not counted: <|bos|>, the user's turns, <|assistant_start|>, and what a tool gave back with
<|output_start|> and <|output_end|> around it. The forms are nanochat's (render_conversation and
render_for_completion in nanochat/tokenizer.py, render_mc in tasks/common.py, tasks/gsm8k.py), so that numbers compare.

A message is {"role", "content"}. Roles alternate, the user's first; a system message may stand in front of it and is
joined to it by a blank line. Content is text, or for the assistant a list of parts {"type", "text"} of the types
"text", "python" and "python_output".
"""

from __future__ import annotations

import itertools
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from .sources import encodable

CHAT_TOKENS = tuple(
    f"<|{who}_{edge}|>" for who in ("user", "assistant", "python", "output") for edge in ("start", "end")
)
PARTS = {"text": ("", True), "python": ("python", True), "python_output": ("output", False)}  # special, counted
LETTERS = string.ascii_uppercase


@runtime_checkable
class ChatTokenizer(Protocol):
    """What rendering needs of a tokenizer: our own and nanochat's have it."""

    @property
    def bos(self) -> int: ...

    @property
    def specials(self) -> Mapping[str, int]: ...

    def encode(self, texts: Sequence[str]) -> list[list[int]]: ...


class Rendered(NamedTuple):
    """Token ids, and for each whether it is the assistant's own: what a loss counts."""

    tokens: list[int]
    mask: list[bool]


class Piece(NamedTuple):
    """A special token by its name, or text."""

    special: str
    text: str
    counted: bool


class BadConversation(ValueError):
    """A conversation that cannot be rendered. ``reason``: which rule it breaks, the same words every time;
    ``detail``: where and with what."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


def check_chat_tokens(tokenizer: ChatTokenizer, where: str) -> None:
    """ValueError where the tokenizer lacks one of the special tokens that conversations are made of."""
    if missing := [name for name in CHAT_TOKENS if name not in tokenizer.specials]:
        raise ValueError(
            f"{where}: no special token {', '.join(missing)}: conversations cannot be told apart from text; "
            "use a base run whose tokenizer has them, as those that xsalab trains do"
        )


def render(messages: Any, tokenizer: ChatTokenizer) -> Rendered:
    """A whole conversation for training; it is not cut. Raises BadConversation where it breaks a rule."""
    return assemble([turns(messages)], tokenizer)[0]


def render_prompt(messages: Any, tokenizer: ChatTokenizer) -> list[int]:
    """A conversation that ends with the user's turn, and <|assistant_start|> behind it: what is to be answered."""
    pieces = _pieces(messages)
    if pieces[-1].special != "<|user_end|>":
        raise BadConversation("no user turn at the end", "a prompt ends with what the assistant is to answer")
    return assemble([[*pieces, Piece("<|assistant_start|>", "", False)]], tokenizer)[0].tokens


def turns(messages: Any) -> list[Piece]:
    """The pieces of a conversation in which the assistant writes something. Raises BadConversation."""
    pieces = _pieces(messages)
    if not any(piece.special == "<|assistant_start|>" for piece in pieces):
        raise BadConversation("no assistant turn")
    if not any(piece.counted and piece.text.strip() for piece in pieces):
        raise BadConversation("empty answers", "the assistant writes nothing")
    return pieces


def assemble(conversations: Sequence[Sequence[Piece]], tokenizer: ChatTokenizer) -> list[Rendered]:
    """Conversations to tokens, every text encoded by itself, all in one call."""
    encoded = iter(tokenizer.encode([p.text for pieces in conversations for p in pieces if not p.special]))
    rendered: list[Rendered] = []
    for pieces in conversations:
        found = Rendered([tokenizer.bos], [False])
        for piece in pieces:
            new = [tokenizer.specials[piece.special]] if piece.special else next(encoded)
            found.tokens.extend(new)
            found.mask.extend(itertools.repeat(piece.counted, len(new)))
        rendered.append(found)
    return rendered


def _pieces(messages: Any) -> list[Piece]:
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise BadConversation("no messages")
    roles = [message.get("role") if isinstance(message, Mapping) else None for message in messages]
    for number, role in enumerate(roles):
        if role not in ("system", "user", "assistant"):
            raise BadConversation("unknown role", f"message {number + 1} is from {role!r}")
    system = ""
    if roles[0] == "system":
        system = f"{_text(messages[0].get('content'), 1)}\n\n"
        messages, roles = messages[1:], roles[1:]
    expected = ["user" if i % 2 == 0 else "assistant" for i in range(max(len(roles), 1))]
    if roles != expected:
        raise BadConversation("roles out of order", "user and assistant take turns, the user begins")
    pieces: list[Piece] = []
    for number, (role, message) in enumerate(zip(roles, messages, strict=True), start=2 if system else 1):
        content = message.get("content")
        pieces.append(Piece(f"<|{role}_start|>", "", False))
        if role == "user":
            pieces.append(Piece("", system + _text(content, number), False))
            system = ""
        else:
            pieces += _answer(content, number)
        pieces.append(Piece(f"<|{role}_end|>", "", role == "assistant"))
    return pieces


def _answer(content: Any, number: int) -> list[Piece]:
    """What the assistant says in one turn, between its start and end."""
    if not isinstance(content, Sequence) or isinstance(content, (str, bytes)):
        return [Piece("", _text(content, number), True)]
    pieces: list[Piece] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in PARTS:
            raise BadConversation("unknown part type", f"message {number} has a part of type {kind!r}")
        special, counted = PARTS[kind]
        text = Piece("", _text(part.get("text"), number), counted)
        around = [Piece(f"<|{special}_{edge}|>", "", counted) for edge in ("start", "end")] if special else []
        pieces += [around[0], text, around[1]] if around else [text]
    return pieces


def _text(content: Any, number: int) -> str:
    if not isinstance(content, str):
        raise BadConversation("content not text", f"message {number} holds {type(content).__name__}")
    if not encodable(content):
        raise BadConversation("content not text", f"message {number} holds half of a surrogate pair")
    return content


# What data sets hold instead of messages


def multiple_choice(question: str, letters: Sequence[str], choices: Sequence[str]) -> str:
    """The user's turn of a multiple-choice question: the letter stands right behind each choice, without a space,
    so that it is the token that answers."""
    listed = "".join(f"- {choice}={letter}\n" for letter, choice in zip(letters, choices, strict=True))
    return f"Multiple Choice question: {question}\n{listed}\nRespond only with the letter of the correct answer."


def gsm8k_parts(answer: str) -> list[dict[str, str]]:
    """A GSM8K solution as parts: each calculator mark <<expression=result>> is a call and what it gave back."""
    parts: list[dict[str, str]] = []
    for index, text in enumerate(re.split(r"<<([^>]+)>>", answer)):
        if index % 2:
            expression, equals, result = text.rpartition("=")
            parts.append({"type": "python", "text": expression if equals else text})
            parts.append({"type": "python_output", "text": result if equals else ""})
        elif text:
            parts.append({"type": "text", "text": text})
    return parts


def messages_of(record: Any) -> Any:
    """A record's messages: a list of them, {"messages"}, MMLU's {"question", "choices", "answer"} (the answer by
    number from 0 or by letter) or GSM8K's {"question", "answer"}.

    Raises BadConversation where the answer is none of the choices, ValueError for any other form of record.
    """
    if isinstance(record, list):
        return record
    names = record.keys() if isinstance(record, Mapping) else set()
    if "messages" in names:
        return record["messages"]
    if not {"question", "answer"} <= names:
        raise ValueError('neither messages, nor a "question" with its "answer"')
    question, answer = _text(record["question"], 1), record["answer"]
    if "choices" in names:
        choices = record["choices"]
        if not isinstance(choices, list) or not 2 <= len(choices) <= len(LETTERS):
            raise BadConversation("no choices", f"a list of 2 to {len(LETTERS)} texts")
        letters = LETTERS[: len(choices)]
        number = letters.find(answer) if isinstance(answer, str) and len(answer) == 1 else answer
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < len(choices):
            raise BadConversation("answer is none of the choices", f"{answer!r} of {len(choices)}")
        prompt = multiple_choice(question, letters, [_text(choice, 1) for choice in choices])
        return [{"role": "user", "content": prompt}, {"role": "assistant", "content": letters[number]}]
    parts = gsm8k_parts(_text(answer, 2))
    return [{"role": "user", "content": question}, {"role": "assistant", "content": parts}]
