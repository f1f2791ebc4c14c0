"""Conversations to prepared rows on disk: fine-tuning is training on other rows.

``prepare_conversations`` reads, renders, splits and packs once into ``home/chat/<digest>`` and verifies what is there
on every other use. The digest is over the files' contents, so a file that changed is prepared anew.

A conversation that breaks a rule is skipped, and counted by the rule's words; so is a line that is no JSON. One that is
longer than a row (context + 1 tokens) is cut at its end where some of the assistant's text is left, else skipped; both
are counted.
Held out are the conversations with the smallest hashes of their text, or all of a source of their own. What is held
out is never trained on: neither a conversation of the same text, nor one that is the same once both are cut.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from ..config import digest
from ..files import make_folder, write_atomic
from .chat import check_chat_tokens
from .chat_reading import Index, Progress, batches_of, render_batch
from .chat_sources import ChatSource, distinct_names
from .rows import Packing, Rows, mixed, pack_whole
from .sources import SourceFile
from .storage import (
    append,
    build_folder,
    fingerprint,
    lock_path,
    map_file,
    require_room,
    sha256,
    sync_folder,
    threaded,
    to_json,
    verified_manifest,
    write_rows,
    writing,
)
from .tokenizer import Tokenizer

FORMAT = 1
BUFFER = 100  # conversations that best fit chooses from: nanochat's buffer_size


@dataclass(frozen=True)
class ChatChoice:
    """What is read and what is held out. ``limit``: of each source its first records alone; 0: all."""

    sources: tuple[ChatSource, ...]
    validation: tuple[ChatSource, ...] = ()  # held out; (): by hash from the sources
    fraction: float = 0.05
    most_held_out: int = 500
    limit: int = 0


@dataclass(frozen=True, eq=False)
class TokenConversation:
    """A rendered conversation: ``tokens`` (n,), start token first, and ``mask`` (n,), true for the assistant's own."""

    id: str
    tokens: np.ndarray
    mask: np.ndarray


@dataclass(frozen=True, eq=False)
class ChatData:
    """A prepared folder of conversations. ``manifest`` says what was read, skipped, cut, held out and packed."""

    folder: Path
    manifest: dict[str, Any]

    def rows(self) -> Rows:
        """The training conversations in rows with their mask."""
        about = self.manifest
        data = map_file(self.folder / "rows.bin", about["dtype"]).reshape(-1, about["key"]["context"] + 1, 2)
        name = digest(about["files"]["rows.bin"]["sha256"])
        return Rows(data[:, :, 0], about["pad"], name, about["packing"], data[:, :, 1])

    def held_out(self) -> list[TokenConversation]:
        """The conversations to score, in source order."""
        data = map_file(self.folder / "held_out.bin", self.manifest["dtype"]).reshape(-1, 2)
        index = json.loads((self.folder / "held_out.json").read_text(encoding="utf-8"))
        ends = np.cumsum([entry["tokens"] for entry in index])
        return [
            TokenConversation(entry["id"], data[end - entry["tokens"] : end, 0], data[end - entry["tokens"] : end, 1])
            for entry, end in zip(index, ends.tolist(), strict=True)
        ]

    def lines(self) -> list[str]:
        """What a user should know: how many conversations of which kind, and the first of each that was left out."""
        about, packing = self.manifest, self.manifest["packing"]
        repeated = " with repetitions" if any(source["times"] > 1 for source in about["key"]["sources"]) else ""
        found = [
            f"{about['read']:,} conversations: {about['training']:,} to train on{repeated}, "
            f"{about['held_out']:,} held out; "
            f"{packing['rows']:,} rows, {100 * packing['waste']:.1f} % padding, "
            f"{100 * about['counted'] / packing['tokens']:.1f} % of the tokens are the assistant's"
        ]
        for reason, count in about["skipped"].items():
            found.append(f"{count:,} skipped, {reason}; the first: {about['first'][reason]}")
        if about["twice"]:
            found.append(f"{about['twice']:,} the same as a held-out one, not trained on")
        if about["cut"]:
            found.append(f"{about['cut']:,} longer than a row, cut at the end; the first: {about['first']['cut']}")
        return found


def prepare_conversations(
    choice: ChatChoice, tokenizer: Tokenizer, context: int, home: Path, progress: Progress | None = None
) -> ChatData:
    """The conversations of ``choice`` in rows of ``context`` + 1 tokens under ``home``; packed on first use.

    Raises ValueError naming the file where one is missing or damaged, where no conversation is left to train on or to
    hold out, and where the tokenizer lacks the special tokens; OSError where the disk is full or the hub away.
    """
    tell = progress or (lambda stage, share: None)
    check_chat_tokens(tokenizer, "the run's tokenizer")
    groups = _groups(choice)
    key = {
        "format": FORMAT, "tokenizer": tokenizer.digest, "context": context, "buffer": BUFFER,
        "sources": contents_of(choice), "held_out_sources": len(choice.validation),
        "fraction": choice.fraction, "most_held_out": choice.most_held_out, "limit": choice.limit,
    }  # fmt: skip
    folder = Path(home) / "chat" / digest(key)
    make_folder(folder.parent)
    with FileLock(lock_path(folder)):
        if folder.exists():
            return ChatData(folder, verified_manifest(folder))
        return ChatData(folder, build_folder(folder, lambda new: _build(choice, groups, tokenizer, key, new, tell)))


def contents_of(choice: ChatChoice) -> list[dict[str, Any]]:
    """Of each source, those held out last: how often it is taken, and its files by name and SHA-256, wherever they are.

    Raises what ``ChatSource.files`` raises.
    """
    sources = (*choice.sources, *choice.validation)
    return [
        {"times": source.times, "files": {file.name: sha256(file.path) for file in group}}
        for source, group in zip(sources, _groups(choice), strict=True)
    ]


def changed_file(began: Sequence[Mapping[str, Any]], choice: ChatChoice) -> Path | str:
    """The first file of ``choice`` that is not what it was when ``contents_of`` gave ``began``; "" where there is none.

    A file that a source did not have, or has lost, is one. A source that is gone from this machine altogether cannot be
    compared and counts as unchanged, and so does one from the hub, which is not asked.
    """
    sources = (*choice.sources, *choice.validation)
    for number, (source, before) in enumerate(zip(sources, began, strict=True)):
        files, left = source.here(), dict(before["files"])
        for file in files:
            name = file.name if file.name in left else f"{number}/{file.name}"  # as distinct_names writes it
            if left.pop(name, "") != sha256(file.path):
                return file.path
        if files and left:
            return f"{source.where}, {next(iter(left))}"
    return ""


def _groups(choice: ChatChoice) -> list[list[SourceFile]]:
    return distinct_names([source.files() for source in (*choice.sources, *choice.validation)])


def _build(
    choice: ChatChoice, groups: Sequence[Sequence[SourceFile]], tokenizer: Tokenizer, key: dict[str, Any], folder: Path,
    tell: Progress,
) -> dict[str, Any]:  # fmt: skip
    """Writes all files of a prepared folder and returns its manifest."""
    width, dtype = key["context"] + 1, "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    index, rendered = Index(), folder / "rendered.bin"
    with writing(rendered) as file:
        work = partial(render_batch, tokenizer=tokenizer, width=width)
        for source, number, outcomes in threaded(work, batches_of(groups, choice.limit, tell)):
            for outcome in outcomes:
                index.add(source, number, outcome)
                append(file, outcome.data.astype(dtype))
    training, held_out = _split(index, choice)
    order = np.repeat(training, np.array([source.times for source in choice.sources])[np.array(index.source)[training]])
    order = order[mixed(len(order))]
    data, ends = map_file(rendered, dtype).reshape(-1, 2), np.cumsum(index.length)

    def conversations(chosen: np.ndarray) -> Iterator[np.ndarray]:
        return (data[ends[i] - index.length[i] : ends[i]] for i in chosen.tolist())

    tell("packing", 0.0)
    require_room(folder, 2 * int(np.array(index.length)[order].sum()) * np.dtype(dtype).itemsize)
    packing = Packing()
    packed = pack_whole(conversations(order), pad=tokenizer.pad, width=width, buffer=BUFFER, packing=packing)
    write_rows(folder / "rows.bin", packed, dtype)
    with writing(folder / "held_out.bin") as file:
        for conversation in conversations(held_out):
            append(file, conversation)
    names = [file.name for group in groups for file in group]
    entries = [{"id": f"{names[index.file[i]]}:{index.number[i]}", "tokens": index.length[i]} for i in held_out]
    write_atomic(folder / "held_out.json", to_json(entries))
    counted = sum(int(conversation[:, 1].sum()) for conversation in conversations(order))
    del data
    rendered.unlink()
    manifest = {
        "format": FORMAT, "key": key, "dtype": dtype, "pad": tokenizer.pad, "read": index.read, "training": len(order),
        "held_out": len(held_out), "twice": index.twice, "skipped": dict(index.skipped), "cut": index.cut,
        "first": index.first, "counted": counted, "packing": packing.summary(width),
        "files": {path.name: fingerprint(path) for path in sorted(folder.iterdir())},
    }  # fmt: skip
    write_atomic(folder / "manifest.json", to_json(manifest))
    sync_folder(folder)
    tell("prepared", 1.0)
    return manifest


def _split(index: Index, choice: ChatChoice) -> tuple[np.ndarray, np.ndarray]:
    """The places in the index that are trained on, and those that are held out, int64.

    Held out are the conversations of the smallest hashes, each text once. A conversation of the other side that has the
    very tokens of a held-out one, of the same text or once both are cut, is counted and left out.
    """
    source, text, tokens = np.array(index.source), np.array(index.text), np.array(index.tokens)
    own = source >= len(choice.sources)
    if choice.validation:
        candidates, count = np.flatnonzero(own), choice.most_held_out
    else:
        candidates = np.arange(len(source))
        count = min(max(round(choice.fraction * len(np.unique(text))), 1), choice.most_held_out)
    first = np.unique(text[candidates], return_index=True)[1]
    held_out = np.sort(candidates[first[:count]])
    chosen = np.isin(tokens, tokens[held_out])
    training = np.flatnonzero(~chosen & ~own)
    index.twice = int((chosen & ~own).sum()) - (0 if choice.validation else len(held_out))
    for what, found in (("to hold out", held_out), ("to train on", training)):
        if not len(found):
            reasons = [
                f"{count} × {reason}, the first: {index.first[reason]}" for reason, count in index.skipped.items()
            ]
            left = f"{len(source)} of {index.read} records can be used" + ("; skipped: " if reasons else "")
            raise ValueError(f"{_names(choice)}: no conversation {what}: {left}{'; '.join(reasons)}")
    return training, held_out


def _names(choice: ChatChoice) -> str:
    return ", ".join(source.where for source in (*choice.sources, *choice.validation))
