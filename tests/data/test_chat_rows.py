"""Conversations to prepared rows: what is trained on, what is held out, what is cut or left out, and what is reused."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.texts import sentences
from xsalab.data import Tokenizer, batch_at, chat_reading, chat_rows
from xsalab.data.chat_reading import TOO_LONG
from xsalab.data.chat_rows import ChatChoice, ChatData, prepare_conversations
from xsalab.data.chat_sources import ChatSource

CONTEXT = 63


def talk(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(sentences(100), 300)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes records as JSON lines."""

    def lines(records: Sequence[Any], name: str = "a.jsonl") -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        return path

    return lines


@pytest.fixture
def make(tmp_path: Path, tokenizer: Tokenizer) -> Callable[..., ChatData]:
    """Prepares sources under ``tmp_path / home``."""

    def prepared(*sources: object, context: int = CONTEXT, **options: Any) -> ChatData:
        validation = tuple(ChatSource(str(path)) for path in options.pop("validation", ()))
        choice = ChatChoice(tuple(ChatSource.parse(str(text)) for text in sources), validation, **options)
        return prepare_conversations(choice, tokenizer, context, tmp_path / "home")

    return prepared


def trained(data: ChatData, tokenizer: Tokenizer) -> Counter[str]:
    """The conversations in the rows as text, with how often each is there."""
    rows = data.rows()
    text = "".join(tokenizer.decode(token for token in row.tolist() if token != rows.pad) for row in rows.tokens)
    return Counter(text.split("<|bos|>")[1:])


def held_out(data: ChatData, tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.decode(c.tokens.tolist()).removeprefix("<|bos|>") for c in data.held_out()]


def form(*texts: str) -> str:
    """A conversation as it stands in a row."""
    ends = ("<|user_start|>{}<|user_end|>", "<|assistant_start|>{}<|assistant_end|>")
    return "".join(ends[i % 2].format(text) for i, text in enumerate(texts))


TALKS = [talk(f"what is {i}", f"it is {i}") for i in range(40)]


def test_every_conversation_is_on_one_side(write: Any, make: Any, tokenizer: Tokenizer) -> None:
    """Held out are a tenth, by hash, each once; all others are in the rows, whole; nothing is on both sides."""
    data = make(write(TALKS), fraction=0.1)
    apart, rows = held_out(data, tokenizer), trained(data, tokenizer)
    assert len(apart) == len(set(apart)) == 4
    assert Counter(apart) + rows == Counter(form(*(m["content"] for m in conversation)) for conversation in TALKS)
    again = make(write(list(reversed(TALKS)), "b.jsonl"), fraction=0.1)
    assert set(held_out(again, tokenizer)) == set(apart), "the side depends on the text alone"
    assert [c.id for c in data.held_out()] == sorted((c.id for c in data.held_out()), key=lambda id: int(id[8:]))


def test_only_the_assistant_s_tokens_are_targets(write: Any, make: Any, tokenizer: Tokenizer) -> None:
    """F078: of every packed row, the targets that count spell the assistant's turns and nothing else."""
    data = make(write(TALKS), fraction=0.1)
    batch = batch_at(data.rows(), seed=0, step=0, batch_rows=len(data.rows()))
    spelled = tokenizer.decode(batch.targets[batch.targets >= 0].tolist()).split("<|assistant_end|>")
    assert spelled.pop() == ""
    rows = trained(data, tokenizer)
    assert Counter(spelled) == Counter(t.split("<|assistant_start|>")[1].split("<|assistant_end|>")[0] for t in rows)
    counted = sum(len(tokenizer.encode([text])[0]) + 1 for text in spelled)
    assert data.manifest["counted"] == int((batch.targets >= 0).sum()) == counted


def test_repetitions_are_repeated_in_the_rows_alone(write: Any, make: Any, tokenizer: Tokenizer) -> None:
    """nanochat's mixture: a source three times, another once, mixed; a held-out conversation is scored once."""
    one, three = write(TALKS[:20], "one.jsonl"), write(TALKS[20:], "three.jsonl")
    data = make(one, f"{three} x 3", fraction=0.1)
    rows, apart = trained(data, tokenizer), set(held_out(data, tokenizer))
    assert len(apart) == 4
    for number, conversation in enumerate(TALKS):
        text = form(*(m["content"] for m in conversation))
        assert rows[text] == (0 if text in apart else 1 if number < 20 else 3)
    assert data.lines()[0].startswith(f"40 conversations: {rows.total()} to train on with repetitions, 4 held out; ")


def test_the_sources_are_mixed(write: Any, make: Any, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one behind the other, whatever best fit does: here it has nothing to choose from."""
    monkeypatch.setattr(chat_rows, "BUFFER", 1)
    data = make(write(TALKS[:20], "one.jsonl"), write(TALKS[20:], "two.jsonl"))
    text = tokenizer.decode(data.rows().tokens.ravel().tolist())
    order = [int(number) for number in re.findall(r"what is (\d+)<", text)]
    assert len(order) == 38
    halves = [sum(number < 20 for number in half) for half in (order[:19], order[19:])]
    assert min(halves) > 4, halves


def test_bad_conversations_are_counted_and_named(write: Any, make: Any) -> None:
    """Each rule with its number and the file and line where it was met first; what is good is used."""
    bad = [talk("a"), [], talk("a"), [{"role": "robot", "content": "x"}], talk("b", "")]
    path = write([*TALKS[:3], *bad, *TALKS[3:]])
    data = make(path)
    assert data.manifest["read"] == 45
    assert data.manifest["skipped"] == {"no assistant turn": 2, "no messages": 1, "unknown role": 1, "empty answers": 1}
    assert data.manifest["training"] + data.manifest["held_out"] == 40
    lines = data.lines()
    assert lines[0].startswith("45 conversations: 38 to train on, 2 held out; ")
    assert f"2 skipped, no assistant turn; the first: {path}: line 4" in lines
    assert f"1 skipped, unknown role; the first: {path}: line 7: message 1 is from 'robot'" in lines


def test_broken_lines_are_counted_and_named(write: Any, make: Any) -> None:
    """A write that was cut off spoils its own line alone; a file of nothing else is refused."""
    path = write(TALKS)
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join([*lines[:4], lines[4][:30], '{"messages": [', *lines[6:]]), encoding="utf-8")
    data = make(path)
    assert data.manifest["skipped"] == {"broken JSON": 2}
    assert data.manifest["training"] + data.manifest["held_out"] == 38
    (line,) = data.lines()[1:]
    assert line.startswith(f"2 skipped, broken JSON; the first: {path}: line 5: ")
    path.write_text("{\n[\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"a\.jsonl: no conversation .*: 0 of 2 .*: 2 × broken JSON, .*: line 1: "):
        make(path)


def test_longer_than_a_row(write: Any, make: Any, tokenizer: Tokenizer) -> None:
    """F076: cut at the end where some of the answer is left, skipped where none is, counted both times.

    Every row has a target that counts, so that no loss is a division by zero.
    """
    answered = talk("short", "an answer of many words " * 20)
    late = talk("a question of many words " * 20, "short")
    path = write([*TALKS, answered, late])
    data = make(path, fraction=0.1)
    assert (data.manifest["cut"], data.manifest["skipped"]) == (1, {TOO_LONG: 1})
    assert f"1 longer than a row, cut at the end; the first: {path}: line 41" in data.lines()
    assert any(
        f"the first: {path}: line 42: " in line and f"a row holds {CONTEXT + 1}" in line for line in data.lines()
    )
    rows = data.rows()
    everything = [tokenizer.decode(row.tolist()) for row in rows.tokens] + held_out(data, tokenizer)
    assert sum("an answer of many" in text for text in everything) == 1
    assert not any("a question of many" in text for text in everything)
    batch = batch_at(rows, seed=0, step=0, batch_rows=len(rows))
    assert ((batch.targets >= 0).sum(1) > 0).all()


def test_a_tag_alone_is_no_answer(write: Any, make: Any, tokenizer: Tokenizer) -> None:
    """F076: a row that ends right behind <|python_start|> leaves nothing of the assistant's text."""
    fixed = len(tokenizer.encode(["q"])[0]) + 5  # <|bos|>, the user's two, <|assistant_start|>, <|python_start|>
    call = [{"role": "user", "content": "q"}, {"role": "assistant", "content": [{"type": "python", "text": "1+1"}]}]
    path = write([talk("a", "b"), talk("c", "d"), call])
    assert make(path, context=fixed - 1).manifest["skipped"] == {TOO_LONG: 1}
    assert make(path, context=fixed).manifest["skipped"] == {}


def test_a_held_out_conversation_is_not_trained_on_under_another_name(
    write: Any, make: Any, tokenizer: Tokenizer
) -> None:
    """Copies in another file, and what is the same once it is cut: left out of the rows and counted."""
    long = "word " * 200
    copies = [*TALKS[:3], talk("q", f"{long}one"), talk("r", "s")]
    validation = write([*TALKS[:3], talk("q", f"{long}two")], "validation.jsonl")
    data = make(write(copies), validation=[validation])
    assert (data.manifest["twice"], data.manifest["training"], data.manifest["held_out"]) == (4, 1, 4)
    assert trained(data, tokenizer) == {form("r", "s"): 1}
    assert "4 the same as a held-out one, not trained on" in data.lines()
    doubled = make(write([*TALKS, *TALKS], "doubled.jsonl"), fraction=0.1)
    assert (doubled.manifest["held_out"], doubled.manifest["twice"]) == (4, 4)
    assert set(held_out(doubled, tokenizer)).isdisjoint(trained(doubled, tokenizer))


def test_at_least_one_and_at_most_so_many_are_held_out(write: Any, make: Any) -> None:
    path = write(TALKS)
    assert make(path, fraction=0.001).manifest["held_out"] == 1
    assert make(path, fraction=0.5, most_held_out=3).manifest["held_out"] == 3
    other = write([talk(f"x{i}", "y") for i in range(9)], "other.jsonl")
    data = make(path, validation=[other], most_held_out=3)
    assert (data.manifest["held_out"], data.manifest["training"]) == (3, 40), "the rest of it is not trained on"


def test_a_limit_takes_the_first_of_each_source(write: Any, make: Any, tokenizer: Tokenizer, tmp_path: Path) -> None:
    write(TALKS[:5], "folder/a.jsonl")
    write(TALKS[5:20], "folder/b.jsonl")
    data = make(tmp_path / "folder", f"{write(TALKS[20:], 'c.jsonl')} x 2", limit=7, fraction=0.01)
    assert data.manifest["read"] == 14
    texts = {form(*(m["content"] for m in conversation)) for conversation in TALKS[:7] + TALKS[20:27]}
    assert trained(data, tokenizer).keys() | set(held_out(data, tokenizer)) == texts


def test_nothing_usable_is_an_error_with_its_reasons(write: Any, make: Any) -> None:
    with pytest.raises(ValueError, match=r"a\.jsonl: no conversation to hold out: 0 of 2 .* 2 × no assistant turn"):
        make(write([talk("a"), talk("b")]))
    with pytest.raises(ValueError, match=r"a\.jsonl: no conversation to train on: 1 of 1 records can be used$"):
        make(write([talk("a", "b")]))
    with pytest.raises(ValueError, match=r"no conversation to hold out: 0 of 0 records can be used$"):
        make(write([]))
    with pytest.raises(ValueError, match=r"v\.jsonl: no conversation to hold out: 40 of 41 .* 1 × no messages"):
        make(write(TALKS), validation=[write([[]], "v.jsonl")])
    with pytest.raises(ValueError, match=r"a\.jsonl: line 2: neither messages, nor"):
        make(write([TALKS[0], {"text": "a"}]))


# On disk


def files(data: ChatData) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in data.folder.iterdir()}


def test_prepared_once_and_verified_after(write: Any, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(TALKS)
    data = make(path)
    monkeypatch.setattr(chat_rows, "_build", None)
    again = make(path)
    assert again.folder == data.folder
    assert again.rows().digest == data.rows().digest
    np.testing.assert_array_equal(again.rows().tokens, data.rows().tokens)
    moved = path.with_name("moved")
    moved.mkdir()
    assert make(path.rename(moved / "a.jsonl")).folder == data.folder, "where a file lies does not matter"
    damaged = data.folder / "rows.bin"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x09")
    with pytest.raises(ValueError, match=r"rows\.bin: changed since it was written .* delete .* to prepare again"):
        make(moved / "a.jsonl")


@pytest.mark.parametrize(
    "change",
    [{"fraction": 0.2}, {"most_held_out": 1}, {"limit": 30}, {"context": 40}],
    ids=lambda change: next(iter(change)),
)
def test_another_choice_is_prepared_anew(change: dict[str, Any], write: Any, make: Any) -> None:
    path = write(TALKS)
    assert make(path, **change).folder != make(path).folder


def test_a_file_that_changed_is_prepared_anew(write: Any, make: Any, tokenizer: Tokenizer) -> None:
    before = make(write(TALKS))
    after = make(write([talk("what is 0", "it is X"), *TALKS[1:]]))
    assert after.folder != before.folder, "a file of the same name and size"
    assert form("what is 0", "it is X") in trained(after, tokenizer) | Counter(held_out(after, tokenizer))


def test_the_same_files_from_any_number_of_threads(write: Any, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(TALKS)
    expected = files(make(path))
    monkeypatch.setattr(chat_reading, "RENDER_BATCH", 3)
    shutil.rmtree(make(path).folder)
    assert files(make(path)) == expected


def test_a_preparation_that_was_killed_leaves_nothing(write: Any, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(TALKS)
    expected = make(path)
    kept = files(expected)
    for name in ("write_rows", "write_atomic", "sync_folder"):
        shutil.rmtree(expected.folder)

        def killed(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(chat_rows, name, killed)
            with pytest.raises(KeyboardInterrupt):
                make(path)
        assert [entry.suffix for entry in expected.folder.parent.iterdir()] == [".lock"]
        assert files(make(path)) == kept


def test_a_tokenizer_without_chat_tokens_is_refused_before_reading(tokenizer: Tokenizer, tmp_path: Path) -> None:
    content = json.loads(json.dumps(tokenizer._json))
    content["added_tokens"] = [token for token in content["added_tokens"] if "start" not in token["content"]]
    for number, token in enumerate(content["added_tokens"]):
        token["id"] = tokenizer.vocab_size - 10 + number
    bare = Tokenizer(json.dumps(content))
    choice = dataclasses.replace(ChatChoice((ChatSource("nowhere.jsonl"),)))
    with pytest.raises(ValueError, match=r"tokenizer: no special token <\|user_start\|>, <\|assistant_start\|>"):
        prepare_conversations(choice, bare, CONTEXT, tmp_path)
