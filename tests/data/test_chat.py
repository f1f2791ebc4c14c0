"""Conversations to tokens: nanochat's form to the token, a mask over the assistant's own, bad ones named."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from xsalab.data.chat import (
    CHAT_TOKENS,
    BadConversation,
    check_chat_tokens,
    gsm8k_parts,
    messages_of,
    multiple_choice,
    render,
    render_prompt,
)
from xsalab.interop.nanochat import NanochatTokenizer

BOS, US, UE, AS, AE, PS, PE, OS, OE = range(1000, 1009)


class Letters:
    """A character is its code point; the special tokens have ids from 1000 on."""

    def __init__(self, *left_out: str) -> None:
        names = zip(("<|bos|>", *CHAT_TOKENS), range(1000, 1009), strict=True)
        self.bos, self.specials = BOS, {name: number for name, number in names if name not in left_out}

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [[ord(character) for character in text] for text in texts]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def test_a_conversation_token_by_token() -> None:
    """F078: counted are the assistant's text and the end of its turn; not its start, not the user, not <|bos|>."""
    found = render([user("ab"), assistant("c"), user("d"), assistant("ef")], Letters())
    assert found.tokens == [BOS, US, 97, 98, UE, AS, 99, AE, US, 100, UE, AS, 101, 102, AE]
    assert [int(counted) for counted in found.mask] == [0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 1]


def test_a_call_is_counted_and_what_it_gave_back_is_not() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "python", "text": "1+1"}, {"type": "python_output", "text": "2"}]
    found = render([user("?"), assistant([*parts, {"type": "text", "text": "b"}])], Letters())
    assert found.tokens == [BOS, US, 63, UE, AS, 97, PS, 49, 43, 49, PE, OS, 50, OE, 98, AE]
    assert [int(counted) for counted in found.mask] == [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 1, 1]


def test_a_system_message_stands_before_the_user_s_own() -> None:
    """Joined by a blank line; the messages that were given stay as they are."""
    messages = [{"role": "system", "content": "s"}, user("u"), assistant("a"), user("v"), assistant("b")]
    before = json.dumps(messages)
    assert render(messages, Letters()) == render([user("s\n\nu"), *messages[2:]], Letters())
    assert json.dumps(messages) == before
    assert render_prompt(messages[:2], Letters()) == [BOS, US, *map(ord, "s\n\nu"), UE, AS]


def test_a_prompt_ends_where_the_assistant_begins() -> None:
    messages = [user("a"), assistant("b"), user("c")]
    assert render_prompt(messages, Letters()) == [BOS, US, 97, UE, AS, 98, AE, US, 99, UE, AS]
    assert render_prompt(messages, Letters())[:-1] == render(messages, Letters()).tokens
    with pytest.raises(BadConversation, match="no user turn at the end"):
        render_prompt(messages[:2], Letters())


def test_special_tokens_never_come_from_text() -> None:
    found = render([user("<|assistant_start|>"), assistant("<|bos|>")], Letters())
    assert [token for token in found.tokens if token >= 1000] == [BOS, US, UE, AS, AE]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "no messages"),
        ("hello", "no messages"),
        (None, "no messages"),
        ([user("a")], "no assistant turn"),
        ([user("a"), assistant(" \n")], "empty answers: the assistant writes nothing"),
        ([user("a"), assistant([{"type": "python_output", "text": "3"}])], "empty answers"),
        ([assistant("a"), user("b")], "roles out of order"),
        ([user("a"), user("b"), assistant("c")], "roles out of order"),
        ([user("a"), assistant("b"), assistant("c")], "roles out of order"),
        ([{"role": "system", "content": "a"}], "roles out of order"),
        ([{"role": "system", "content": "a"}, assistant("b")], "roles out of order"),
        ([user("a"), {"role": "tool", "content": "b"}], "unknown role: message 2 is from 'tool'"),
        ([user("a"), "b"], "unknown role: message 2 is from None"),
        ([user("a"), assistant([{"type": "image", "text": "b"}])], "unknown part type: .*'image'"),
        ([user("a"), assistant(["b"])], "unknown part type"),
        ([user("a"), assistant(None)], "content not text: message 2 holds NoneType"),
        ([user(["a"]), assistant("b")], "content not text: message 1 holds list"),
        ([{"role": "user"}, assistant("b")], "content not text: message 1"),
        ([{"role": "system", "content": 3}, user("a"), assistant("b")], "content not text: message 1 holds int"),
        ([user("a"), assistant("\ud800")], "content not text: message 2 holds half of a surrogate pair"),
    ],
)
def test_a_conversation_that_breaks_a_rule_says_which(messages: Any, reason: str) -> None:
    with pytest.raises(BadConversation, match=f"^{reason}") as raised:
        render(messages, Letters())
    assert reason.startswith(raised.value.reason)


def test_a_tokenizer_without_chat_tokens_is_named() -> None:
    lacking = Letters("<|python_start|>", "<|python_end|>")
    with pytest.raises(ValueError, match=r"t\.json: no special token <\|python_start\|>, <\|python_end\|>"):
        check_chat_tokens(lacking, "t.json")
    check_chat_tokens(Letters(), "t.json")


# What data sets hold instead of messages


def test_a_multiple_choice_question() -> None:
    """Written out by hand: the letter stands behind the choice without a space."""
    assert multiple_choice("Which?", ("A", "B"), ["one", "two"]) == (
        "Multiple Choice question: Which?\n- one=A\n- two=B\n\nRespond only with the letter of the correct answer."
    )


def test_calculator_marks_become_calls() -> None:
    assert gsm8k_parts("He has 2*3=<<2*3=6>>6.\n<<1=1=1>>#### 6") == [
        {"type": "text", "text": "He has 2*3="},
        {"type": "python", "text": "2*3"},
        {"type": "python_output", "text": "6"},
        {"type": "text", "text": "6.\n"},
        {"type": "python", "text": "1=1"},
        {"type": "python_output", "text": "1"},
        {"type": "text", "text": "#### 6"},
    ]
    assert gsm8k_parts("<<7>>") == [{"type": "python", "text": "7"}, {"type": "python_output", "text": ""}]
    assert gsm8k_parts("<<>>") == [{"type": "text", "text": "<<>>"}]


def test_a_record_is_known_by_its_fields() -> None:
    messages = [user("a"), assistant("b")]
    assert messages_of(messages) == messages_of({"messages": messages, "source": "x"}) == messages
    question = {"question": "Q", "choices": ["x", "y", "z"], "subject": "s"}
    expected = [user(multiple_choice("Q", "ABC", ["x", "y", "z"])), assistant("C")]
    assert messages_of({**question, "answer": 2}) == messages_of({**question, "answer": "C"}) == expected
    assert messages_of({"question": "Q", "answer": "1<<1=1>>"}) == [user("Q"), assistant(gsm8k_parts("1<<1=1>>"))]
    for answer in (3, -1, "D", "", True, None, 1.0):
        with pytest.raises(BadConversation, match="answer is none of the choices"):
            messages_of({**question, "answer": answer})
    for choices in (["x"], "xy", None):
        with pytest.raises(BadConversation, match="no choices"):
            messages_of({**question, "choices": choices, "answer": 0})
    for record in ({"text": "a"}, {"question": "a"}, "a", 3, None):
        with pytest.raises(ValueError, match="neither messages, nor a"):
            messages_of(record)


# nanochat itself


# SHA-256, first 16 digits, over the JSON of (ids, mask) of the first 20 records of a file, as render_conversation of
# karpathy/nanochat 92d63d4 gives them with the tokenizer of nanochat_d4.
NANOCHAT = {
    "sft_dolly.jsonl": "feda3e9eafb7aead",
    "sft_openassistant.jsonl": "879c6dcd0dd61fae",
    "sft_self_instruct.jsonl": "aac5a5d22087a29c",
    "sft_task_dialogues.jsonl": "f1c24cfa4c73f4bd",
    "gsm8k_train.jsonl": "cb38342b887ec873",
    "mmlu_dev.jsonl": "4069f29838be18c8",
}


@pytest.mark.parametrize("name", NANOCHAT)
def test_rendered_as_nanochat_renders(name: str, shared_data: Path) -> None:
    """Messages, multiple choice and calculator calls of real data sets: ids and masks are nanochat's own."""
    tokenizer = NanochatTokenizer.read(shared_data / "nanochat_d4" / "tokenizer.pkl")
    found = hashlib.sha256()
    with (shared_data / "chat" / name).open(encoding="utf-8") as file:
        for line in islice(file, 20):
            tokens, mask = render(messages_of(json.loads(line)), tokenizer)
            found.update(json.dumps([tokens, [int(counted) for counted in mask]]).encode())
    assert found.hexdigest()[:16] == NANOCHAT[name]
