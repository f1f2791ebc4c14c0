from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from xsalab import chat as module
from xsalab.chat import HELP, Chat, ChatSettings, say, talk, which_model
from xsalab.data import Tokenizer
from xsalab.data.chat import render, render_prompt
from xsalab.model import GPT, ModelConfig

CONTEXT = 64


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["what is a token? a token is a piece of text, and 12 + 3 = 15. "] * 4, 285)


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> GPT:
    config = ModelConfig(depth=1, width=32, heads=2, context=CONTEXT, vocab_size=tokenizer.vocab_size)
    model, random = GPT(config), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3, generator=random)
    return model


@pytest.fixture
def chat(model: GPT, tokenizer: Tokenizer) -> Chat:
    return Chat(model, tokenizer, ChatSettings(tokens=8))


class Screen:
    """What was written, and the notes beside it."""

    def __init__(self) -> None:
        self.text, self.notes = "", []

    def write(self, text: str) -> None:
        self.text += text

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def screen() -> Screen:
    return Screen()


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Puts answers in the model's place; the list returned fills with what ``generate`` was asked."""

    def use(*answers: list[int]) -> list[dict[str, Any]]:
        asked: list[dict[str, Any]] = []

        def generate(model: GPT, prompt: list[int], tokens: int, **options: Any) -> Iterator[int]:
            asked.append({"prompt": list(prompt), "tokens": tokens, **options})
            for token in answers[(len(asked) - 1) % len(answers)][:tokens]:
                if token in options["stop"]:
                    return
                yield token

        monkeypatch.setattr(module, "generate", generate)
        return asked

    return use


def reader(*lines: str) -> Callable[[], str | None]:
    waiting = iter(lines)
    return lambda: next(waiting, None)


# --- the conversation


def test_history_is_the_whole_conversation_as_training_has_it(
    chat: Chat, tokenizer: Tokenizer, scripted: Any, screen: Screen
) -> None:
    """Three questions: the last prompt is what the renderer of training data makes of all that was said."""
    chat.settings.tokens = 20
    first, second = tokenizer.encode(["a piece", "12 + 3"])
    end = tokenizer.specials["<|assistant_end|>"]
    asked = scripted([*first, end, 5], [*second, end])
    talk(chat, reader("what is a token?", "", "  and?  ", "so"), screen.write, screen.note, terminal=False)
    messages = [
        {"role": "user", "content": "what is a token?"},
        {"role": "assistant", "content": "a piece"},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "12 + 3"},
        {"role": "user", "content": "so"},
    ]
    assert [entry["prompt"] for entry in asked] == [render_prompt(messages[:n], tokenizer) for n in (1, 3, 5)]
    assert screen.text == "a piece\n12 + 3\na piece\n"
    assert screen.notes == []


def test_the_models_own_tokens_are_kept_and_never_encoded_again(
    chat: Chat, tokenizer: Tokenizer, scripted: Any, screen: Screen
) -> None:
    """An answer in single bytes, one of them no text: the next prompt has those very tokens."""
    answer = [tokenizer.encode([sign])[0][0] for sign in "token"] + [tokenizer.token_bytes.index(b"\xff")]
    asked = scripted([*answer, tokenizer.specials["<|assistant_end|>"]])
    talk(chat, reader("a", "b"), screen.write, screen.note, terminal=False)
    assert screen.text == "token\N{REPLACEMENT CHARACTER}\n" * 2
    before = render_prompt([{"role": "user", "content": "a"}], tokenizer)
    assert asked[1]["prompt"][len(before) :][: len(answer)] == answer
    assert tokenizer.encode(["token"])[0] != answer[:5]


def test_a_character_is_never_split(chat: Chat, tokenizer: Tokenizer, scripted: Any) -> None:
    """F158: the four byte tokens of an emoji come as one piece of text."""
    crab = tokenizer.encode(["🦀"])[0]
    assert len(crab) == 4
    scripted([*tokenizer.encode(["a"])[0], *crab])
    assert list(chat.ask("b").pieces) == ["a", "🦀"]


def test_sums_are_worked_out_and_shown(chat: Chat, tokenizer: Tokenizer, monkeypatch: Any, screen: Screen) -> None:
    """The real ``generate`` with the calculator: a model that writes a sum is handed its result."""
    special = tokenizer.specials
    script = [special["<|python_start|>"], *tokenizer.encode(["12*3"])[0], special["<|python_end|>"]]
    unheard = [0] * (2 + len(tokenizer.encode(["36"])[0]))  # what the model would say where the result is forced
    draws = iter([*script, *unheard, *tokenizer.encode(["."])[0], special["<|assistant_end|>"]])
    monkeypatch.setattr("xsalab.eval.generate.pick", lambda *_: [next(draws)])
    chat.settings.tokens = 20
    answer = say(chat, "12*3?", screen.write, screen.note)
    assert screen.text == "[12*3][= 36].\n"
    assert tokenizer.decode(answer.tokens) == "<|python_start|>12*3<|python_end|><|output_start|>36<|output_end|>."
    parts = [
        {"type": "python", "text": "12*3"},
        {"type": "python_output", "text": "36"},
        {"type": "text", "text": "."},
    ]
    messages = [{"role": "user", "content": "12*3?"}, {"role": "assistant", "content": parts}]
    assert [tokenizer.bos, *chat.turns[0]] == render(messages, tokenizer).tokens


def test_thirty_long_turns_stay_within_the_context(
    chat: Chat, tokenizer: Tokenizer, scripted: Any, screen: Screen
) -> None:
    """F157: the oldest turns go, with a note each time; what is asked is always there, with room for an answer."""
    asked = scripted(tokenizer.encode(["a token is a piece of text"])[0])
    lines = [f"what is a piece of text, number {number}?" for number in range(30)]
    talk(chat, reader(*lines), screen.write, screen.note, terminal=False)
    assert len(asked) == 30
    for line, entry in zip(lines, asked, strict=True):
        assert len(entry["prompt"]) + entry["tokens"] <= CONTEXT
        assert entry["tokens"] == 8
        text = tokenizer.decode(entry["prompt"])
        assert text.startswith("<|bos|><|user_start|>")
        assert text.endswith(f"<|user_start|>{line}<|user_end|><|assistant_start|>")
    dropped = [note for note in screen.notes if "dropped" in note]
    assert dropped[0] == f"note: beyond the context of {CONTEXT} tokens; the oldest turn was dropped"
    assert len(dropped) > 25


def test_the_newest_turns_are_those_that_stay(chat: Chat, tokenizer: Tokenizer, scripted: Any, screen: Screen) -> None:
    """Each prompt ends with as many whole turns as fit, the last ones, in their order."""
    asked = scripted([5])
    lines = [f"{number:02d}" for number in range(40)]
    talk(chat, reader(*lines), screen.write, screen.note, terminal=False)
    counts = []
    for number, entry in enumerate(asked):
        said = re.findall(r"<\|user_start\|>(\d\d)<\|user_end\|>", tokenizer.decode(entry["prompt"]))
        assert said == lines[number + 1 - len(said) : number + 1]
        counts.append(len(said))
    turn = len(asked[1]["prompt"]) - len(asked[0]["prompt"])
    assert counts[:3] == [1, 2, 3]
    assert counts[-1] == (CONTEXT - 8 - len(asked[0]["prompt"])) // turn + 1 > 4


def test_an_answer_that_reaches_the_end_of_the_context_stops_with_a_note(
    chat: Chat, tokenizer: Tokenizer, scripted: Any, screen: Screen
) -> None:
    scripted([5] * 500)
    chat.settings.tokens = 500
    answer = say(chat, "a", screen.write, screen.note)
    assert len(render_prompt([{"role": "user", "content": "a"}], tokenizer)) + len(answer.tokens) == CONTEXT
    assert (answer.ended, screen.notes) == (
        "context",
        [f"note: stopped at the end of the model's context of {CONTEXT} tokens"],
    )


def test_an_answer_that_reaches_its_own_limit_says_so(chat: Chat, scripted: Any, screen: Screen) -> None:
    scripted([5] * 500)
    assert say(chat, "a", screen.write, screen.note).ended == "tokens"
    assert screen.notes == ["note: stopped after 8 tokens (--tokens)"]


def test_a_message_larger_than_the_context_is_refused_and_nothing_is_lost(
    chat: Chat, scripted: Any, screen: Screen
) -> None:
    asked = scripted([5])
    talk(chat, reader("a", "é" * CONTEXT, "b"), screen.write, screen.note, terminal=False)
    assert len(asked) == 2
    assert len(chat.turns) == 2
    (note,) = [note for note in screen.notes if note.startswith("error: ")]
    assert f"the model's context {CONTEXT}: shorten it" in note
    assert f"{2 * CONTEXT + 3} tokens" in note


def test_an_answer_is_the_same_again_with_its_seed(chat: Chat) -> None:
    """Each answer has a seed of its own; /seed and /clear begin again."""
    chat.settings.temperature = 1.0

    def answers(*lines: str) -> list[str]:
        screen = Screen()
        talk(chat, reader(*lines), screen.write, screen.note, terminal=False)
        return screen.text.split("\n")

    first = answers("a", "/undo", "a")
    assert first[0] != first[1]
    assert answers("/clear", "a", "/undo", "a") == first
    assert answers("/clear", "/seed 1", "a", "/clear") == first[1:]


# --- commands


def test_commands(chat: Chat, scripted: Any, screen: Screen) -> None:
    asked = scripted([5])
    lines = ["/help", "/undo", "a", "b", "/undo", "/temperature 0", "/seed 7", "c", "/clear", "d", "/quit", "never"]
    talk(chat, reader(*lines), screen.write, screen.note, terminal=False)
    assert screen.notes == [
        HELP, "nothing was said yet", "taken back; questions left: 1", "temperature 0", "seed 7",
        "a new conversation",
    ]  # fmt: skip
    texts = [chat.tokenizer.decode(entry["prompt"]).count("<|user_start|>") for entry in asked]
    assert texts == [1, 2, 2, 1]
    assert [(entry["temperature"], entry["seed"]) for entry in asked] == [(0.6, 0), (0.6, 1), (0, 7), (0, 7)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/fly", "/fly: no such command; /help lists them"),
        ("/seed", "/seed: give a whole number, as in /seed 1"),
        ("/seed 1.5", "/seed 1.5: give a whole number"),
        (f"/seed {2**70}", "must be a whole number from"),
        ("/temperature hot", "/temperature hot: give a number"),
        ("/temperature -1", "temperature = -1.0: must be a finite number of at least 0"),
        ("/temperature nan", "temperature = nan"),
    ],
)
def test_a_wrong_command_is_told_and_changes_nothing(chat: Chat, screen: Screen, line: str, words: str) -> None:
    before = vars(chat.settings).copy()
    talk(chat, reader(line), screen.write, screen.note, terminal=False)
    (note,) = screen.notes
    assert note.startswith("error: ")
    assert words in note
    assert vars(chat.settings) == before
    assert chat.turns == []


def test_help_names_every_command(chat: Chat) -> None:
    for line in HELP.splitlines()[:-1]:
        name = line.split()[0]
        assert "no such command" not in chat.command(f"{name} 1")


# --- Ctrl-C


def test_ctrl_c_stops_an_answer_and_not_the_chat(chat: Chat, monkeypatch: pytest.MonkeyPatch, screen: Screen) -> None:
    """What was written so far is part of the conversation; the next question is answered as always."""
    asked: list[list[int]] = []

    def generate(model: GPT, prompt: list[int], tokens: int, **options: Any) -> Iterator[int]:
        asked.append(prompt)
        for number in range(5):
            if number == 2 and len(asked) == 1:
                signal.raise_signal(signal.SIGINT)
            yield 5 + number

    monkeypatch.setattr(module, "generate", generate)
    before = signal.getsignal(signal.SIGINT)
    talk(chat, reader("a", "b"), screen.write, screen.note, terminal=True)
    assert signal.getsignal(signal.SIGINT) is before
    assert screen.notes == ["note: stopped"]
    assert screen.text == chat.tokenizer.decode([5, 6, 7]) + "\n" + chat.tokenizer.decode(range(5, 10)) + "\n"
    assert chat.turns[0][-4:] == [5, 6, 7, chat.end]
    assert asked[1][: len(chat.turns[0]) + 1] == [chat.tokenizer.bos, *chat.turns[0]]


def test_ctrl_c_at_the_prompt_says_how_to_leave(chat: Chat, scripted: Any, screen: Screen) -> None:
    scripted([5])
    lines = iter(["", "a"])

    def read() -> str | None:
        line = next(lines, None)
        if line == "":
            signal.raise_signal(signal.SIGINT)
        return line

    talk(chat, read, screen.write, screen.note, terminal=True)
    assert screen.notes == ["\n/quit or Ctrl-D leaves"]
    assert len(chat.turns) == 1


HARNESS = """
import fcntl, sys, termios, time
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # the terminal of this process: it sends Ctrl-C as a signal
import torch
from pathlib import Path
from xsalab import chat, cli
from xsalab.data import Tokenizer
from xsalab.model import GPT, ModelConfig

tokenizer = Tokenizer.train(["a token"], 266)
model = GPT(ModelConfig(depth=1, width=32, heads=2, context=4096, vocab_size=266))
letters = tokenizer.encode(["xyz"])[0]


def generate(model, prompt, tokens, **options):
    if len(prompt) < 8:  # the first question: an answer without an end
        while True:
            time.sleep(0.01)
            yield letters[0]
    yield from letters


chat.generate = generate
chat.open_chat = lambda folder, settings: chat.Chat(model, tokenizer, settings)
cli.main()
"""


@pytest.mark.slow
def test_a_terminal_session() -> None:
    """The real command at a pseudo-terminal: prompt, an endless answer, Ctrl-C, another answer, Ctrl-D."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HARNESS), "chat", "RUN"],
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, env={**os.environ, "TERM": "dumb"},
    )  # fmt: skip
    os.close(theirs)
    seen = ""

    def wait_for(words: str, again: bytes = b"") -> None:
        """``again``: typed every 2 seconds until it comes."""
        nonlocal seen
        deadline = time.monotonic() + 60
        typed = time.monotonic()
        while words not in seen:
            ready, _, _ = select.select([ours], [], [], 0.5)
            assert time.monotonic() < deadline, f"{words!r} did not come: {seen}"
            if not ready:
                if again and time.monotonic() - typed > 2:
                    typed = time.monotonic()
                    os.write(ours, again)
                continue
            try:
                seen += os.read(ours, 4096).decode()
            except OSError:  # how Linux says that the other side is closed
                raise AssertionError(f"{words!r} did not come before the end: {seen}") from None
        seen = seen[seen.index(words) + len(words) :]

    try:
        wait_for("/help lists the commands")
        wait_for("> ")
        os.write(ours, b"a\n")
        wait_for("xxxx")
        os.write(ours, b"\x03")
        wait_for("note: stopped")
        wait_for("> ")
        os.write(ours, b"\x03")
        # a signal between the prompt and readline's wait for a key is told to Python with the next key only
        wait_for("/quit or Ctrl-D leaves", again=b"\x03")
        wait_for("> ")
        os.write(ours, b"b\n")
        wait_for("xyz")
        wait_for("> ")
        os.write(ours, b"\x04")
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


# --- which model, and the command


def test_the_fine_tuned_model_is_taken_where_it_is_whole(tmp_path: Path) -> None:
    run = tmp_path / "base.xsa.s0"
    run.mkdir()
    assert which_model(run)[0] == run
    assert "the base model, not fine-tuned" in which_model(run)[1]
    assert f"xsalab sft {run}" in which_model(run)[1]
    (run / "sft").mkdir()
    assert which_model(run)[0] == run
    assert "its fine-tuning is not finished" in which_model(run)[1]
    (run / "sft" / "model.safetensors").touch()
    assert which_model(run) == (run / "sft", f"{run / 'sft'}: the fine-tuned model")
    assert which_model(run / "sft") == (run / "sft", f"{run / 'sft'}: the fine-tuned model")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, model: GPT, tokenizer: Tokenizer) -> None:
    monkeypatch.setattr(module, "open_chat", lambda folder, settings: Chat(model, tokenizer, settings))


def test_one_question_by_prompt(opened: None, xsalab: Any, scripted: Any, tokenizer: Tokenizer, tmp_path: Path) -> None:
    scripted([*tokenizer.encode(["a token"])[0], tokenizer.specials["<|assistant_end|>"]])
    ran = xsalab("chat", tmp_path, "--prompt", "what?")
    assert (ran.code, ran.out) == (0, "a token\n")
    assert "the base model, not fine-tuned" in ran.err
    content = json.loads(xsalab("chat", tmp_path, "--prompt", "what?", "--json").out)
    assert content == {
        "run": str(tmp_path), "prompt": "what?", "answer": "a token", "tokens": tokenizer.encode(["a token"])[0],
        "ended": "stop",
    }  # fmt: skip


def test_questions_through_a_pipe(opened: None, xsalab: Any, scripted: Any, monkeypatch: Any, tmp_path: Path) -> None:
    """Without a terminal: a line a question, no prompt signs, commands as well."""
    asked = scripted([5])
    monkeypatch.setattr(sys, "stdin", io.StringIO("what?\n/clear\n\nand é?"))
    ran = xsalab("chat", tmp_path)
    assert ran.code == 0
    assert ran.out == 2 * "&\n"
    assert "a new conversation" in ran.err
    assert len(asked) == 2


def test_settings_of_the_command_reach_the_model(opened: None, xsalab: Any, scripted: Any, tmp_path: Path) -> None:
    asked = scripted([5])
    options = ("--tokens", 3, "--temperature", 0.2, "--top-k", 4, "--seed", 9)
    assert xsalab("chat", tmp_path, "--prompt", "a", *options).code == 0
    (entry,) = asked
    assert {name: entry[name] for name in ("tokens", "temperature", "top_k", "seed")} == {
        "tokens": 3, "temperature": 0.2, "top_k": 4, "seed": 9,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--json",), "--json: needs --prompt"),
        (("--prompt", " "), "--prompt: is empty"),
        (("--prompt", "é" * CONTEXT), "shorten it"),
        (("--prompt", "a", "--seed", str(2**70)), "seed = 1180591620717411303424"),
    ],
)
def test_a_mistake_is_one_message(opened: None, xsalab: Any, tmp_path: Path, arguments: Any, words: str) -> None:
    xsalab("chat", tmp_path, *arguments).refused(words)


def test_a_folder_that_is_no_run(xsalab: Any, tmp_path: Path) -> None:
    xsalab("chat", tmp_path / "none", "--prompt", "a").refused("no run here")


@pytest.mark.slow
def test_a_real_run(xsalab: Any, write_experiment: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """A base run of four steps answers something within its context of 32; a run without chat tokens is refused."""
    path = write_experiment(seeds=[0])
    trained = json.loads(xsalab("train", path, "--out", tmp_path, "--arm", "xsa", "--seed", 0, "--json").out)
    ran = xsalab("chat", trained["folder"], "--prompt", "the sum", "--json", "--seed", 1)
    assert ran.code == 0, ran.err
    content = json.loads(ran.out)
    assert content["ended"] in ("stop", "context")
    assert 0 < len(content["tokens"]) < 32
    again = json.loads(xsalab("chat", trained["folder"], "--prompt", "the sum", "--json", "--seed", 1).out)
    assert again == content

    sampled = json.loads(
        xsalab("sample", trained["folder"], "the ", "--tokens", 40, "--samples", 3, "--seed", 4, "--json").out
    )
    alone = [
        json.loads(xsalab("sample", trained["folder"], "the ", "--tokens", 40, "--seed", seed, "--json").out)
        for seed in (4, 5, 6)
    ]
    assert sampled == alone
    shown = xsalab("sample", trained["folder"], "the ", "--tokens", 40, "--samples", 2, "--seed", 4)
    assert shown.out == "".join(f"--- seed {4 + n}\nthe {alone[n]['text']}\n" for n in range(2))
    assert "note: prompt and --tokens go beyond the 32 tokens" in shown.err

    load_run = module.load_run

    def without(folder: Path) -> Any:
        model, corpus, config = load_run(folder)
        monkeypatch.setattr(corpus.tokenizer, "specials", {"<|bos|>": 0})
        return model, corpus, config

    monkeypatch.setattr(module, "load_run", without)
    xsalab("chat", trained["folder"], "--prompt", "a").refused(
        trained["folder"], "no special token <|user_start|>", "use a base run whose tokenizer has them"
    )
