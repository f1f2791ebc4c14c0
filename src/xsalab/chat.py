"""A chat in the terminal with a trained model.

The conversation is kept as tokens, turn by turn: what was said is never encoded a second time, so the model sees
its own answers as it wrote them. What no longer fits into the context is dropped, the oldest turn first.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .data import Tokenizer
from .data.chat import check_chat_tokens, render_prompt
from .eval.calculator import Calculator
from .eval.generate import check_seed, check_temperature, generate, stream_text
from .experiment.run import load_run
from .model import GPT

HELP = """\
/clear            begin a new conversation
/undo             take back the last question and its answer
/seed N           of the choice of tokens, from the next answer on
/temperature X    0: always the likeliest token; 1: as the model has it
/help             this list
/quit             leave (so does Ctrl-D); Ctrl-C stops an answer"""

Write = Callable[[str], None]

# how a sum and its result are shown: [48/2][= 24]
SHOWN = {
    "<|python_start|>": b"[", "<|python_end|>": b"]", "<|output_start|>": b"[= ", "<|output_end|>": b"]",
}  # fmt: skip


@dataclass
class ChatSettings:
    """How answers are made. ``tokens`` bounds one answer; the context bounds all."""

    tokens: int = 256
    temperature: float = 0.6
    top_k: int = 50
    seed: int = 0


@dataclass
class Answer:
    """An answer while it comes. ``ended`` is there when ``pieces`` has ended:

    "stop" (the model's own end), "tokens" (the answer's limit), "context" (the model's), "interrupted".
    """

    dropped: int  # turns that were taken out of the conversation to make room
    pieces: Generator[str, None, None] = field(init=False)
    ended: str = ""
    tokens: list[int] = field(default_factory=list)
    text: str = ""


class Chat:
    """One conversation with one model."""

    def __init__(self, model: GPT, tokenizer: Tokenizer, settings: ChatSettings) -> None:
        self.model, self.tokenizer, self.settings = model, tokenizer, settings
        self.end = tokenizer.specials["<|assistant_end|>"]
        self.tool = Calculator(tokenizer)
        self.shown = list(tokenizer.token_bytes)
        for name, text in SHOWN.items():
            self.shown[tokenizer.specials[name]] = text
        self.turns: list[list[int]] = []
        self.answers = 0  # since the seed was set: each answer has a seed of its own

    def ask(self, text: str) -> Answer:
        """Adds the user's ``text``; the answer is made while its ``pieces`` are read, and then is part of the history.

        Raises ValueError, and changes nothing, where the text alone fills the context.
        """
        context, settings = self.model.config.context, self.settings
        bos, *turn = render_prompt([{"role": "user", "content": text}], self.tokenizer)
        if 1 + len(turn) >= context:
            raise ValueError(
                f"the message has {len(turn)} tokens, its marks included, and the model's context {context}: shorten it"
            )
        room = min(settings.tokens, context // 4)  # an answer is not squeezed into what old turns leave
        dropped = 0
        while self.turns and 1 + sum(map(len, self.turns)) + len(turn) + room > context:
            self.turns.pop(0)
            dropped += 1
        prompt = [bos, *(token for earlier in self.turns for token in earlier), *turn]
        answer = Answer(dropped)
        answer.pieces = self._pieces(answer, prompt, turn, min(settings.tokens, context - len(prompt)))
        return answer

    def _pieces(self, answer: Answer, prompt: list[int], turn: list[int], count: int) -> Generator[str, None, None]:
        settings, stop = self.settings, (self.end, self.tokenizer.bos)
        new = generate(
            self.model, prompt, count, temperature=settings.temperature, top_k=settings.top_k,
            seed=settings.seed + self.answers, stop=stop, tool=self.tool,
        )  # fmt: skip
        answer.ended = "interrupted"
        try:
            for text in stream_text(self._bytes(new, answer.tokens)):
                answer.text += text
                yield text
            if len(answer.tokens) < count:
                answer.ended = "stop"
            else:
                answer.ended = "tokens" if count == settings.tokens else "context"
        finally:  # also where the reader leaves early
            self.answers += 1
            self.turns.append([*turn, *answer.tokens, self.end])

    def _bytes(self, new: Iterator[int], kept: list[int]) -> Iterator[bytes]:
        for token in new:
            kept.append(token)
            yield self.shown[token]

    def command(self, line: str) -> str:
        """Carries out a line that begins with a slash; returns what there is to say. ValueError for a wrong one."""
        name, _, value = line.strip().partition(" ")
        if name == "/help":
            return HELP
        if name == "/clear":
            self.turns, self.answers = [], 0
            return "a new conversation"
        if name == "/undo":
            if not self.turns:
                return "nothing was said yet"
            self.turns.pop()
            return f"taken back; questions left: {len(self.turns)}"
        if name == "/seed":
            self.settings.seed, self.answers = check_seed(_number(name, value, int)), 0
            return f"seed {self.settings.seed}"
        if name == "/temperature":
            self.settings.temperature = check_temperature(_number(name, value, float))
            return f"temperature {self.settings.temperature:g}"
        raise ValueError(f"{name}: no such command; /help lists them")


def _number(name: str, value: str, kind: Callable[[str], Any]) -> Any:
    try:
        return kind(value)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise ValueError(f"{name} {value}".rstrip() + f": give {what}, as in {name} 1") from None


def open_chat(folder: Path, settings: ChatSettings) -> Chat:
    """The chat with a finished run's model.

    Raises ValueError where there is none, or where its tokenizer has no special tokens for conversations.
    """
    model, corpus, _ = load_run(folder)
    check_chat_tokens(corpus.tokenizer, str(folder))
    return Chat(model, corpus.tokenizer, settings)


def which_model(folder: Path) -> tuple[Path, str]:
    """RUN/sft where fine-tuning is finished, else RUN; and a note that says it."""
    tuned = folder / "sft"
    if (tuned / "model.safetensors").is_file():
        return tuned, f"{tuned}: the fine-tuned model"
    if folder.resolve().name == "sft":
        return folder, f"{folder}: the fine-tuned model"
    why = "its fine-tuning is not finished" if tuned.is_dir() else "not fine-tuned"
    return (
        folder,
        f"{folder}: the base model, {why}, so it continues text rather than answers (xsalab sft {folder} --data FILE)",
    )


def ended_note(answer: Answer, settings: ChatSettings, context: int) -> str:
    """Why an answer ended, where it is not the model's own end."""
    return {
        "stop": "",
        "tokens": f"stopped after {settings.tokens} tokens (--tokens)",
        "context": f"stopped at the end of the model's context of {context} tokens",
        "interrupted": "stopped",
    }[answer.ended]


class _CtrlC:
    """While entered, Ctrl-C ends an answer; at the prompt it raises KeyboardInterrupt."""

    answering = stopped = False

    def __enter__(self) -> _CtrlC:
        self.before = signal.signal(signal.SIGINT, self)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self.before)

    def __call__(self, *_: object) -> None:
        if not self.answering:
            raise KeyboardInterrupt
        self.stopped = True  # looked at between two tokens, so that nothing is left half done


def talk(chat: Chat, read: Callable[[], str | None], write: Write, note: Write, *, terminal: bool) -> None:
    """The chat itself: ``read`` gives a line of the user's, None at the end; ``write`` gets the answers' text.

    In a terminal Ctrl-C stops an answer and not the program; elsewhere it ends the program as always.
    """
    with _CtrlC() if terminal else nullcontext(_CtrlC()) as ctrl_c:
        while True:
            try:
                line = read()
                if line is None or line.strip() in ("/quit", "/exit"):
                    return
                _respond(chat, line.strip(), write, note, ctrl_c)
            except KeyboardInterrupt:
                note("\n/quit or Ctrl-D leaves")


def _respond(chat: Chat, line: str, write: Write, note: Write, ctrl_c: _CtrlC) -> None:
    """One line of the user's: a mistake in it is told and changes nothing."""
    try:
        if line.startswith("/"):
            note(chat.command(line))
        elif line:
            say(chat, line, write, note, ctrl_c)
    except ValueError as error:
        note(f"error: {error}")


def say(chat: Chat, text: str, write: Write, note: Write, ctrl_c: _CtrlC | None = None) -> Answer:
    """Asks, and writes the answer as it comes, with notes on what was dropped and on why it ended."""
    context, ctrl_c = chat.model.config.context, ctrl_c or _CtrlC()
    ctrl_c.answering, ctrl_c.stopped = True, False
    try:
        answer = chat.ask(text)
        if answer.dropped:
            turns = "turn was" if answer.dropped == 1 else f"{answer.dropped} turns were"
            note(f"note: beyond the context of {context} tokens; the oldest {turns} dropped")
        for piece in answer.pieces:
            write(piece)
            if ctrl_c.stopped:
                answer.pieces.close()
                break
        write("\n")
    finally:
        ctrl_c.answering = False
    if why := ended_note(answer, chat.settings, context):
        note(f"note: {why}")
    return answer


def lines(terminal: bool) -> Callable[[], str | None]:
    """What reads the user's lines: with a prompt and, where Python has readline, editing in a terminal."""
    if not terminal:
        return lambda: sys.stdin.readline() or None
    with suppress(ImportError):  # Windows has none; input() edits there by itself
        import readline  # noqa: F401

    def read() -> str | None:
        try:
            return input("> ")
        except EOFError:
            print()
            return None

    return read
