"""Text to a prepared corpus on disk: tokens, an index of documents, the tokenizer and a manifest.

``prepare`` tokenises once into ``home/corpora/<digest>`` and verifies what is there on every other use.
``Corpus.rows`` packs the training documents once for each context.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock

from ..config import digest, dump
from ..files import write_atomic
from .rows import Packing, Rows, pack
from .shards import Pieces, ShardRows, described
from .sources import DataConfig, Document, Source, SourceFile, list_files, open_source, share_of, source_record
from .storage import (
    append,
    batched,
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
    verify,
    write_rows,
    writing,
)
from .tokenizer import Tokenizer

FORMAT = 1  # of the prepared folder; a change of layout prepares anew
SIDES = ("train", "validation")
DUPLICATE = "duplicate of a validation document"
ENCODE_BATCH = 256  # documents a thread encodes at once
Progress = Callable[[str, float], None]


@dataclass(frozen=True, eq=False)
class TokenDocument:
    """A tokenised document: ``tokens`` (n,) without the start token, and the UTF-8 bytes of its text."""

    id: str
    tokens: np.ndarray
    bytes: int


@dataclass(frozen=True, eq=False)
class Corpus:
    """A prepared corpus. ``notes`` are lines for the user: what changed at the source since the preparation.

    With ``window``, DataConfig's, the training side is prepared in shards by preparing.prepare_shards, and may be there
    in part.
    """

    folder: Path
    manifest: dict[str, Any]
    tokenizer: Tokenizer
    notes: list[str]
    window: int = 0

    def documents(self, side: str) -> list[TokenDocument]:
        """The documents of "train" or "validation" in source order; tokens are views of the mapped file.

        Raises ValueError for the training side of a corpus in shards: of that rows alone are kept.
        """
        if self.window and side == "train":
            raise ValueError(
                f"{self.folder}: prepared in shards (data.window = {self.window}), which keep no training documents; "
                "use rows, or data.window = 0"
            )
        tokens = map_file(self.folder / f"{side}.bin", self.manifest["dtype"])
        # read_table and to_numpy would import pyarrow's data sets and pandas: half a second of every start
        index = pq.ParquetFile(self.folder / f"{side}.documents.parquet").read()
        names, sizes, lengths = (index.column(name).to_pylist() for name in ("id", "bytes", "tokens"))
        ends = itertools.accumulate(lengths)
        return [
            TokenDocument(name, tokens[end - length : end], size)
            for name, size, length, end in zip(names, sizes, lengths, ends, strict=True)
        ]

    def validation_documents(self) -> list[TokenDocument]:
        """The held-out documents in source order."""
        return self.documents("validation")

    def rows(self, context: int) -> Rows:
        """The training documents in rows of ``context`` + 1 tokens; packed on first use, verified on every other.

        In shards: those that are prepared, and the others as soon as they are. Raises ValueError if ``context`` is
        below 1 or the packed file was damaged, OSError if the disk is full.
        """
        if context < 1:
            raise ValueError(f"context = {context}: must be at least 1")
        if self.window:
            name = digest([self.manifest["files"], self.manifest["sources"], context, self.window])
            return ShardRows(Pieces(self.folder, self.manifest, context), self.window, self.tokenizer.pad, name)
        data, about = self.folder / f"rows-{context}.bin", self.folder / f"rows-{context}.json"
        dtype, pad = self.manifest["dtype"], self.tokenizer.pad
        with FileLock(lock_path(self.folder)):
            if about.exists():
                counts = json.loads(about.read_text(encoding="utf-8"))
                verify(data, counts, f"delete {about} to pack again")
            else:
                tokens = self.manifest["train"]["tokens"] + self.manifest["train"]["documents"]
                require_room(self.folder, (tokens // context + 1) * (context + 1) * np.dtype(dtype).itemsize)
                packing = Packing()
                packed = pack(
                    (document.tokens for document in self.documents("train")),
                    bos=self.tokenizer.bos,
                    pad=pad,
                    width=context + 1,
                    buffer=self.manifest["config"]["pack_buffer"],
                    packing=packing,
                )
                write_rows(data, packed, dtype)
                counts = {"context": context, "dtype": dtype, **packing.summary(context + 1), **fingerprint(data)}
                write_atomic(about, to_json(counts))
        tokens = map_file(data, dtype).reshape(-1, context + 1)
        return Rows(tokens, pad, digest({"sha256": counts["sha256"], "context": context}), counts)

    def described(self, context: int) -> dict[str, Any]:
        """The manifest; in shards with the counts of what is prepared for ``context``."""
        return described(self.folder, self.manifest, context) if self.window else self.manifest


# Preparing


def prepare(config: DataConfig, vocab_size: int, home: Path, progress: Progress | None = None) -> Corpus:
    """The corpus of ``config`` under ``home``, prepared on first use and verified on every other.

    The list of source files is frozen at the first preparation, so that the validation text never changes; what
    differs at the source later is told in ``Corpus.notes``. ``progress`` gets a stage and the share done. With
    ``config.window`` these are the tokenizer and the validation side; preparing.prepare_shards does the rest.
    Raises ValueError naming file, field and remedy, OSError if the disk is full.
    """
    given = Tokenizer.load(config.tokenizer) if config.tokenizer else None
    if given and given.vocab_size != vocab_size:
        raise ValueError(
            f"vocab_size = {vocab_size}: {config.tokenizer} has {given.vocab_size} tokens; use that number"
        )
    key = _key(config, vocab_size, given)
    folder = Path(home) / "corpora" / digest(key)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(lock_path(folder)):
        if folder.exists():
            manifest = verified_manifest(folder)
            notes = _source_notes(config, manifest["sources"])
        else:
            tell = progress or (lambda stage, share: None)
            manifest = build_folder(folder, lambda partial: _build(config, key, vocab_size, given, partial, tell))
            notes = []
    return Corpus(folder, manifest, Tokenizer.load(folder / "tokenizer.json"), notes, config.window)


def _key(config: DataConfig, vocab_size: int, given: Tokenizer | None) -> dict[str, Any]:
    """What the prepared files depend on, the files' own content apart."""
    key = {**dump(config), "vocab_size": vocab_size, "format": FORMAT}
    if key.pop("window"):
        key["layout"] = "shards"  # how many are shuffled together changes no file
    if config.source == "stdlib":
        key["python"] = f"{platform.python_implementation()} {platform.python_version()}"
    elif not config.source.startswith("climbmix:"):
        key["source"] = str(Path(config.source).resolve())
    if config.validation and Path(config.validation).is_file():
        key["validation"] = str(Path(config.validation).resolve())
    if given:
        key["tokenizer"] = given.digest
    return key


def _build(
    config: DataConfig, key: dict[str, Any], vocab_size: int, given: Tokenizer | None, folder: Path, progress: Progress
) -> dict[str, Any]:
    """Writes all files of a corpus into ``folder`` and returns its manifest."""
    progress("reading", 0.0)
    source = open_source(config)
    whole = source.validation if config.window else source.files
    sources = {file.name: source_record(file.path) for file in whole}
    skipped = {side: Counter[str]() for side in SIDES}
    held_out = {text_hash(document.text) for document in source.documents("validation", Counter())}
    if not held_out:
        raise ValueError(_too_small(config, source))
    if next(training(source, held_out, Counter(), share_of), None) is None:
        raise ValueError(f"data.source = {config.source!r}: no training document is left beside the validation text")
    tokenizer = given
    if tokenizer is None:
        progress("training the tokenizer", 0.0)
        # Files in the order of their names' hashes: a limit below the whole takes from all over the source, and
        # shards that lie beyond it are not downloaded.
        texts = _first_bytes(training(source, held_out, Counter(), share_of), int(config.tokenizer_megabytes * 1e6))
        tokenizer = Tokenizer.train(texts, vocab_size)
    tokenizer.save(folder / "tokenizer.json")

    dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
    sides = {"validation": (source.documents("validation", skipped["validation"]), source.validation)}
    if not config.window:
        sides = {"train": (training(source, held_out, skipped["train"]), source.train), **sides}
    counts = {
        side: _write_side(_watch(documents, files, f"tokenising {side}", progress), tokenizer, folder, side, dtype)
        for side, (documents, files) in sides.items()
    }
    overlap = held_out_hashes(folder)
    overlap &= held_out_hashes(folder, "train") if not config.window else set()
    assert not overlap, "a document is on both sides"
    if source.fraction:  # both sides read every file: what was skipped is the same, and counted once
        skipped["validation"].clear()
    manifest = {
        "format": FORMAT,
        "config": key,
        "dtype": dtype,
        "tokenizer": tokenizer.digest,
        "validation_rule": source.rule,
        **counts,
        "duplicates_dropped": skipped["train"].pop(DUPLICATE, 0),
        "overlap": len(overlap),
        "skipped": dict(skipped["train"] + skipped["validation"]),
        "ignored_files": source.ignored,
        "unigram_bits_per_byte": unigram_entropy(
            map_file(folder / "validation.bin", dtype), counts["validation"]["bytes"]
        ),
        "sources": sources,
        "files": {path.name: fingerprint(path) for path in sorted(folder.iterdir())},
    }
    if config.window:
        manifest["shards"] = [file.name for file in source.train]
        manifest["sources"] = {**{file.name: _state(file) for file in source.train}, **sources}
    write_atomic(folder / "manifest.json", to_json(manifest))
    sync_folder(folder)
    progress("prepared", 1.0)
    return manifest


def training(
    source: Source, held_out: set[bytes], skipped: Counter[str], order: Callable[[str], Any] | None = None
) -> Iterator[Document]:
    """The training documents whose very text is not held out as well; the others are counted in ``skipped``."""
    for document in source.documents("train", skipped, order):
        if text_hash(document.text) in held_out:
            skipped[DUPLICATE] += 1
        else:
            yield document


def held_out_hashes(folder: Path, side: str = "validation") -> set[bytes]:
    """``text_hash`` of the documents of a prepared side."""
    # read_table would import pyarrow's data sets
    return set(pq.ParquetFile(folder / f"{side}.documents.parquet").read(columns=["sha256"])["sha256"].to_pylist())


def text_hash(text: str) -> bytes:
    """SHA-256 of the text's UTF-8 bytes, 32 bytes: what makes two documents the same."""
    return _hash(text.encode())


def _hash(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _too_small(config: DataConfig, source: Source) -> str:
    """The message for a validation side without any document."""
    if config.validation:
        return f"data.validation = {config.validation!r}: holds no text"
    message = f"data.source = {config.source!r}: too small for validation, none of the {source.rule}"
    if not source.fraction:
        return f"{message}; raise data.validation_fraction or name a data.validation file"
    shares = sorted({share_of(document.text) for document in source.documents("train", Counter())})
    if len(shares) < 2:
        return f"{message}: {len(shares)} distinct document(s); give more, or name a data.validation file"
    enough = f"{math.ceil(shares[0] * 1000 + 1) / 1000:g} holds out at least one of {len(shares)}"
    return f"{message}; raise data.validation_fraction ({enough}), name a data.validation file, or give more text"


def _first_bytes(documents: Iterable[Document], limit: int) -> Iterator[str]:
    """Texts until ``limit`` bytes have been given."""
    for document in documents:
        if limit <= 0:
            return
        limit -= len(document.text.encode())
        yield document.text


def _watch(
    documents: Iterable[Document], files: Sequence[SourceFile], stage: str, progress: Progress
) -> Iterator[Document]:
    """Passes documents on and reports the share of the files read so far, in steps of about one per cent."""
    sizes = {file.name: file.path.stat().st_size for file in files}
    total = max(sum(sizes.values()), 1)
    name, before, inside, told = "", 0, 0, -1.0
    for document in documents:
        if (file := document.id.rpartition(":")[0]) != name:
            before, inside, name = before + sizes.get(name, 0), 0, file
        inside += len(document.text)
        # the text of a compressed file is longer than the file
        share = min((before + min(inside, sizes[file])) / total, 1.0)
        if share - told >= 0.01:
            progress(stage, share)
            told = share
        yield document


def _write_side(
    documents: Iterable[Document], tokenizer: Tokenizer, folder: Path, side: str, dtype: str
) -> dict[str, int]:
    """Writes ``<side>.bin`` and ``<side>.documents.parquet``; returns the counts."""

    def encode(batch: Sequence[Document]) -> tuple[list[tuple[str, bytes, int, int]], np.ndarray]:
        texts = [document.text for document in batch]
        lengths, tokens = encode_batch(tokenizer, texts, dtype)
        data = [text.encode() for text in texts]
        names = [document.id for document in batch]
        return list(zip(names, map(_hash, data), map(len, data), lengths, strict=True)), tokens

    index: list[tuple[str, bytes, int, int]] = []
    with writing(folder / f"{side}.bin") as file:
        for entries, tokens in threaded(encode, batched(documents, ENCODE_BATCH)):
            index += entries
            append(file, tokens)
    names, hashes, sizes, lengths = zip(*index, strict=True) if index else ((), (), (), ())
    table = pa.table(
        {
            "id": pa.array(names, pa.string()),
            "sha256": pa.array(hashes, pa.binary(32)),
            "bytes": pa.array(sizes, pa.int64()),
            "tokens": pa.array(lengths, pa.int64()),
        }
    )
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    with writing(folder / f"{side}.documents.parquet") as file:
        append(file, np.frombuffer(sink.getvalue(), dtype=np.uint8))
    return {"documents": len(index), "tokens": sum(lengths), "bytes": sum(sizes)}


def encode_batch(tokenizer: Tokenizer, texts: Sequence[str], dtype: str) -> tuple[list[int], np.ndarray]:
    """The number of tokens of each text, and all tokens in one array."""
    encoded = tokenizer.encode(texts)
    lengths = [len(ids) for ids in encoded]
    return lengths, np.fromiter(itertools.chain.from_iterable(encoded), dtype=dtype, count=sum(lengths))


def unigram_entropy(tokens: np.ndarray, size: int) -> float:
    """Bits per byte of the code that knows the tokens' frequencies alone: H(tokens) · tokens / bytes."""
    counts = np.unique(tokens, return_counts=True)[1].astype(np.float64)
    return float(-(counts * np.log2(counts / counts.sum())).sum() / size)


# Verifying


def _source_notes(config: DataConfig, frozen: dict[str, Any]) -> list[str]:
    """One line for each kind of change at the source since the corpus was prepared."""
    if config.source.startswith("climbmix:"):
        return []  # a shard by its number; the copy in the cache is not needed any more
    exists = config.source == "stdlib" or Path(config.source).exists()
    now = {file.name: file for file in (list_files(config)[0] if exists else [])}
    if config.validation and Path(config.validation).is_file():
        outside = f"validation/{Path(config.validation).name}"
        now |= {outside: SourceFile(outside, Path(config.validation))} if outside in frozen else {}
    added = [name for name in now if name not in frozen]
    gone = [name for name in frozen if name not in now]
    changed = [name for name, record in frozen.items() if name in now and _differs(now[name].path, record)]
    return [
        f"{config.source}: {len(names)} file(s) {what}, first {names[0]}; the corpus stays as it was prepared"
        for names, what in (
            (added, "added since the preparation are not used"),
            (gone, "are gone since the preparation"),
            (changed, "changed since the preparation"),
        )
        if names
    ]


def _differs(path: Path, record: dict[str, Any]) -> bool:
    state = path.stat()
    if state.st_size == record["size"] and state.st_mtime_ns == record["mtime_ns"]:
        return False
    return state.st_size != record["size"] or sha256(path) != record.get("sha256")


def _state(file: SourceFile) -> dict[str, Any]:
    """What can be said of a shard without reading it: nothing where it is at the hub."""
    if file.repo:
        return {}
    state = file.path.stat()
    return {"size": state.st_size, "mtime_ns": state.st_mtime_ns}
