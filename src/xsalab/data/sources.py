"""Where text comes from: the standard library's own text, files and folders, ClimbMix shards from the hub.

A source is a list of files, each of which yields documents in a fixed order, and the rule that says which
documents are held out for validation. Nothing here knows of tokens.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import json
import math
import os
import re
import sysconfig
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from ..config import config
from .storage import fingerprint

SUFFIXES = (".txt", ".md", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")

CLIMBMIX_REPO = "karpathy/climbmix-400b-shuffle"
CLIMBMIX_LAST = 6542  # the last shard is the validation shard, as in nanochat's dataset.py
RETRY_SECONDS = (1.0, 10.0)  # waited before a download of one shard among hundreds is tried again

STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib-dynload"}
# A part of a module ends at the first line that qualifies: a top-level statement after a blank line once the part
# has so many characters, any line after a blank line beyond the second number, any line beyond the third.
STDLIB_PART_CHARACTERS = (2_500, 5_000, 10_000)


@config
class DataConfig:
    """What is read, what is held out, and how it is tokenised and packed. Raises ValueError naming the field."""

    source: str = "stdlib"  # "stdlib"; a file; a folder; "climbmix:0-7" or "climbmix:0,3,5": shards by number
    validation: str = ""  # a file, or a file's name inside the source; "": by the rule of the source
    validation_fraction: float = 0.03  # share of documents held out where no validation file is named
    tokenizer: str = ""  # path of an existing tokenizer.json; "": train one on the training documents
    tokenizer_megabytes: float = 8.0  # training text shown to the tokenizer's trainer
    pack_buffer: int = 1000  # documents that best fit chooses from
    # Shards that are shuffled together. 0: all text is prepared as one, before training; n: each Parquet shard is
    # prepared on its own, and training starts when the first ones are there.
    window: int = 0

    def __post_init__(self) -> None:
        if not self.source.strip():
            raise ValueError("source = '': give 'stdlib', a file, a folder, or 'climbmix:0-7'")
        if self.source.startswith("climbmix:"):
            climbmix_numbers(self.source)
        if not 0 < self.validation_fraction < 1:
            raise ValueError(f"validation_fraction = {self.validation_fraction}: must be between 0 and 1, such as 0.03")
        if not (self.tokenizer_megabytes > 0 and math.isfinite(self.tokenizer_megabytes)):
            raise ValueError(f"tokenizer_megabytes = {self.tokenizer_megabytes}: must be positive, such as 8")
        if self.pack_buffer < 1:
            raise ValueError(f"pack_buffer = {self.pack_buffer}: must be at least 1")
        if self.window < 0:
            raise ValueError(f"window = {self.window}: must be at least 0 (all text as one), such as 8 shards")
        if self.window and self.source == "stdlib":
            raise ValueError(
                f"window = {self.window}: 'stdlib' has no shards; use 0, or a source of Parquet shards (a folder of "
                "Parquet files, 'climbmix:0-7')"
            )


@dataclass(frozen=True)
class Document:
    """A text and where it came from: "relative/file.name:index", the index counting the file's records from 0."""

    id: str
    text: str


@dataclass(frozen=True)
class SourceFile:
    """A file of a source by its name relative to the source, with forward slashes.

    Where ``repo`` is set it is one of that data set at the hub, and ``fetched`` tells where it was downloaded to.
    """

    name: str
    path: Path
    repo: str = ""

    def fetched(self) -> SourceFile:
        """The file on this machine, downloaded now where it is at the hub; tried three times. OSError naming it."""
        if not self.repo:
            return self
        for seconds in RETRY_SECONDS:
            try:
                return SourceFile(self.name, hub_file(self.repo, self.name))
            except OSError:
                time.sleep(seconds)
        return SourceFile(self.name, hub_file(self.repo, self.name))


@dataclass(frozen=True)
class Source:
    """The files of the two sides. Where ``fraction`` is set both sides name the same files, and each document's
    hash decides its side; else a file is on one side as a whole."""

    train: tuple[SourceFile, ...]
    validation: tuple[SourceFile, ...]
    rule: str  # one line for the manifest
    fraction: float = 0.0
    ignored: int = 0  # files with a suffix that nothing here reads
    split_modules: bool = False

    @property
    def files(self) -> tuple[SourceFile, ...]:
        """Every file once, training files first."""
        return tuple(dict.fromkeys(self.train + self.validation))

    def documents(
        self, side: str, skipped: Counter[str], order: Callable[[str], Any] | None = None
    ) -> Iterator[Document]:
        """The documents of ``side`` ("train" or "validation") in file order, or with the files sorted by
        ``order`` of their names. What is skipped is counted in ``skipped`` by reason."""
        files = self.train if side == "train" else self.validation
        for given in sorted(files, key=lambda file: order(file.name)) if order else files:
            file = given.fetched()
            for index, text in enumerate(self._texts(file, skipped)):
                if text is None or not text.strip():
                    skipped["empty"] += 1
                elif not self.fraction or (share_of(text) < self.fraction) == (side == "validation"):
                    yield Document(f"{file.name}:{index}", text)

    def _texts(self, file: SourceFile, skipped: Counter[str]) -> Iterator[str | None]:
        if not self.split_modules or file.path.suffix != ".py":
            yield from read_texts(file.path)
            return
        try:
            text = file.path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            skipped["not UTF-8"] += 1
            return
        yield from split_module(text)


def share_of(text: str) -> float:
    """A number in [0, 1) that depends on the text alone, even over all texts."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) / 2**64


# Finding files


def open_source(config: DataConfig) -> Source:
    """The files that ``config`` names, split into training and validation; ClimbMix shards are downloaded.

    Every Parquet file's footer is checked here. With ``config.window`` the training files are left alone: neither
    downloaded nor looked into. Raises ValueError naming the file or folder.
    """
    if config.source == "stdlib":
        source = _stdlib(config)
    elif config.source.startswith("climbmix:"):
        source = _climbmix(config)
    else:
        source = _files(config)
    if config.window:
        _check_shards(config, source)
    for file in source.validation if config.window else source.files:
        if file.name.endswith(".parquet"):
            open_parquet(file.path)
    return source


def _check_shards(config: DataConfig, source: Source) -> None:
    """ValueError where the training side is not whole Parquet files, beside a validation side of whole files."""
    others = [file.name for file in source.train if not file.name.endswith(".parquet")]
    if others:
        raise ValueError(
            f"data.window = {config.window}: {config.source!r} holds {others[0]}, which is no Parquet shard; "
            "use window = 0, or a folder of Parquet files alone"
        )
    if source.fraction:
        raise ValueError(
            f"data.window = {config.window}: {config.source!r} is one file, and its validation would be single "
            "documents; use window = 0, or a folder of shards, or name a file in data.validation"
        )


def list_files(config: DataConfig) -> tuple[list[SourceFile], int]:
    """The usable files of a standard library, file or folder source sorted by name, and the number ignored."""
    if config.source == "stdlib":
        return walk(Path(sysconfig.get_path("stdlib")), (".py",), STDLIB_LEFT_OUT)
    root = Path(config.source)
    if root.is_dir():
        return walk(root, SUFFIXES, set())
    if not root.exists():
        raise ValueError(f"data.source = {config.source!r}: no such file or folder (or use 'stdlib', 'climbmix:0-7')")
    return ([SourceFile(root.name, root)], 0) if root.name.endswith(SUFFIXES) else ([], 1)


def walk(root: Path, suffixes: tuple[str, ...], left_out: set[str]) -> tuple[list[SourceFile], int]:
    """The files under ``root`` with one of the suffixes, sorted by name, and the number of those with another."""
    found, ignored = [], 0
    for folder, folders, names in os.walk(root, onerror=_raise):
        folders[:] = [name for name in folders if name not in left_out and not name.startswith(".")]
        for name in names:
            if name.startswith("."):
                continue
            path = Path(folder, name)
            if not name.endswith(suffixes):
                ignored += 1
            # _sysconfigdata holds paths and flags of the machine that built the interpreter: no text
            elif not (left_out and name.startswith("_sysconfigdata")):
                found.append(SourceFile(path.relative_to(root).as_posix(), path))
    return sorted(found, key=lambda file: file.name), ignored


def _raise(error: OSError) -> None:
    raise error  # os.walk would leave out a folder that it cannot list


def _stdlib(config: DataConfig) -> Source:
    files, ignored = list_files(config)
    if not files:
        raise ValueError("data.source = 'stdlib': this interpreter ships no .py files; give a file or a folder")
    if config.validation:
        train, validation = _named(config, files)
        return Source(train, validation, f"file {config.validation}", ignored=ignored, split_modules=True)
    held_out = set(_modules_within(files, config.validation_fraction))
    rule = f"modules in the order of their paths' hashes, as many as fit {config.validation_fraction:g} of the bytes"
    train, validation = (tuple(f for f in files if (f in held_out) == side) for side in (False, True))
    return Source(train, validation, rule, ignored=ignored, split_modules=True)


def _modules_within(files: list[SourceFile], fraction: float) -> Iterator[SourceFile]:
    """Modules that together hold at most ``fraction`` of the bytes; all parts of a module stay on one side."""
    sizes = {file: file.path.stat().st_size for file in files}
    room = fraction * sum(sizes.values())
    for file in sorted(files, key=lambda file: share_of(file.name)):
        if 0 < sizes[file] <= room:
            room -= sizes[file]
            yield file


def _files(config: DataConfig) -> Source:
    files, ignored = list_files(config)
    if not files:
        what = f"none of its {ignored} files can be read" if ignored else "the folder is empty"
        if Path(config.source).is_file():
            what = "this kind of file cannot be read"
        raise ValueError(f"data.source = {config.source!r}: {what}; suffixes that work: {', '.join(SUFFIXES)}")
    if config.validation:
        train, validation = _named(config, files)
        return Source(train, validation, f"file {config.validation}", ignored=ignored)
    if Path(config.source).is_dir() and all(file.name.endswith(".parquet") for file in files):
        if len(files) == 1:
            raise ValueError(
                f"data.source = {config.source!r}: only one shard, {files[0].name}; give at least two (the last one is "
                "held out), or name a file in data.validation"
            )
        return Source(tuple(files[:-1]), tuple(files[-1:]), f"last shard, {files[-1].name}", ignored=ignored)
    rule = f"documents whose hash is below {config.validation_fraction}"
    return Source(tuple(files), tuple(files), rule, config.validation_fraction, ignored)


def _named(config: DataConfig, files: list[SourceFile]) -> tuple[tuple[SourceFile, ...], tuple[SourceFile, ...]]:
    """Training and validation files where ``config.validation`` names a file of the source or any other file."""
    named = [file for file in files if file.name == config.validation]
    path = Path(config.validation)
    if not named and path.is_file():
        named = [file for file in files if file.path.resolve() == path.resolve()]
        if not named and not path.name.endswith(SUFFIXES):
            raise ValueError(f"data.validation = {config.validation!r}: suffixes that work: {', '.join(SUFFIXES)}")
        named = named or [SourceFile(f"validation/{path.name}", path)]
    if not named:
        raise ValueError(
            f"data.validation = {config.validation!r}: neither a file nor the name of a file in {config.source!r}"
        )
    train = tuple(file for file in files if file not in named)
    if not train:
        raise ValueError(f"data.validation = {config.validation!r}: is the only file, so nothing is left to train on")
    return train, tuple(named)


def climbmix_numbers(source: str) -> list[int]:
    """The shard numbers of "climbmix:0-7" or "climbmix:0,3,5", sorted, each once."""
    numbers: set[int] = set()
    for part in source.removeprefix("climbmix:").split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip(), re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last or last >= CLIMBMIX_LAST:
            raise ValueError(
                f"source = {source!r}: shards are numbered 0 to {CLIMBMIX_LAST - 1} ({CLIMBMIX_LAST} is held out), "
                "as in 'climbmix:0-7' or 'climbmix:0,3,5'"
            )
        numbers.update(range(first, last + 1))
    return sorted(numbers)


def _climbmix(config: DataConfig) -> Source:
    train = [_shard(number) for number in climbmix_numbers(config.source)]
    validation, rule = (_shard(CLIMBMIX_LAST),), f"the fixed shard {CLIMBMIX_LAST:05d}"
    if config.validation:
        match = re.fullmatch(r"shard_(\d{5})\.parquet", config.validation, re.ASCII)
        if match and not any(file.name == config.validation for file in train):
            train.append(_shard(int(match[1])))
        (train, validation), rule = _named(config, train), f"file {config.validation}"
    wanted = train if config.window else [_downloaded(file) for file in train]
    return Source(tuple(wanted), tuple(_downloaded(file) for file in validation), rule)


def _shard(number: int) -> SourceFile:
    """A ClimbMix shard at the hub."""
    name = f"shard_{number:05d}.parquet"
    return SourceFile(name, Path(CLIMBMIX_REPO, name), CLIMBMIX_REPO)


def shard_file(config: DataConfig, name: str) -> SourceFile:
    """A training shard by its name: at the hub, in the folder, or the one file."""
    if config.source.startswith("climbmix:"):
        return SourceFile(name, Path(CLIMBMIX_REPO, name), CLIMBMIX_REPO)
    root = Path(config.source)
    return SourceFile(name, root if root.is_file() else root / name)


def _downloaded(file: SourceFile) -> SourceFile:
    return SourceFile(file.name, hub_file(file.repo, file.name)) if file.repo else file


def source_record(path: Path) -> dict[str, Any]:
    """Size, SHA-256 and time of a source file. ValueError where the hub's cache names it by another SHA-256.

    The cache keeps a large file as blobs/<SHA-256 that the hub states>, and its name as a link to it.
    """
    record = {**fingerprint(path), "mtime_ns": path.stat().st_mtime_ns}
    blob = path.resolve()
    if blob.parent.name == "blobs" and re.fullmatch(r"[0-9a-f]{64}", blob.name) and blob.name != record["sha256"]:
        raise ValueError(
            f"{path}: damaged: its SHA-256 is {record['sha256'][:16]}…, the hub says {blob.name[:16]}…; "
            f"delete {blob} to download it again"
        )
    return record


def hub_file(repo: str, name: str) -> Path:
    """A data set's file in the hub's cache; an interrupted download goes on where it stopped.

    Raises OSError naming the file where it can be had neither there nor from the hub.
    """
    try:
        return Path(huggingface_hub.hf_hub_download(repo, name, repo_type="dataset"))
    except Exception as error:  # the hub raises a dozen kinds: offline, no entry, timeouts, proxies
        raise OSError(f"{name} of {repo} could not be had: {error}") from error


# Reading files


def read_texts(path: Path) -> Iterator[str | None]:
    """The texts of one file in order; None where a record has none. Raises ValueError naming file and place."""
    if path.name.endswith(".parquet"):
        return _parquet_texts(path)
    if path.name.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst")):
        return _json_texts(path)
    return iter([_whole_text(path)])


def _whole_text(path: Path) -> str:
    data = path.read_bytes()
    mark = len(codecs.BOM_UTF8) if data.startswith(codecs.BOM_UTF8) else 0
    try:
        return data[mark:].decode("utf-8")
    except UnicodeDecodeError as error:
        line = data[mark : mark + error.start].count(b"\n") + 1
        raise ValueError(f"{path}: not UTF-8 at byte {error.start + mark} (line {line}); convert the file") from None


def json_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number, line) of each line that is not blank, compressed or not; without a byte order mark."""
    for number, line in enumerate(_lines(path), start=1):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if line.strip():
            yield number, line


def json_records(path: Path) -> Iterator[tuple[int, Any]]:
    """(line number, record) of each line of JSON that is not blank, compressed or not.

    Raises ValueError naming the file, and the line where that is no JSON.
    """
    for number, line in json_lines(path):
        try:
            yield number, json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: line {number} is not UTF-8 (byte {error.start} of the line)") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: line {number} is not JSON: {error}") from None


def _json_texts(path: Path) -> Iterator[str | None]:
    for number, record in json_records(path):
        if not isinstance(record, dict) or "text" not in record:
            raise ValueError(f"{path}: line {number} has no field 'text'; each line is an object with one")
        text = record["text"]
        if text is not None and not isinstance(text, str):
            raise ValueError(f"{path}: line {number}: 'text' is {type(text).__name__}, not a string")
        if text is not None and not encodable(text):
            raise ValueError(f"{path}: line {number}: 'text' holds half of a surrogate pair, which is no character")
        yield text


def encodable(text: str) -> bool:
    """Whether the text is UTF-8's to write: half of a surrogate pair is not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _lines(path: Path) -> Iterator[bytes]:
    try:
        if path.name.endswith(".gz"):
            with gzip.open(path, "rb") as file:
                yield from file
        elif path.name.endswith(".zst"):
            yield from _zstandard_lines(path)
        else:
            with path.open("rb") as file:
                yield from file
    except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise ValueError(f"{path}: damaged or cut off ({error}); copy or download it again") from None


def _zstandard_lines(path: Path) -> Iterator[bytes]:
    """zstandard's own reader ends silently where a file is cut off; a decompression object knows."""
    rest = b""
    with path.open("rb") as file:
        frame = zstandard.ZstdDecompressor().decompressobj()
        data = file.read(1 << 20)
        while data:
            *lines, rest = (rest + frame.decompress(data)).split(b"\n")
            yield from lines
            data = frame.unused_data
            if frame.eof:  # several frames may follow one another
                data = data or file.read(1 << 20)
                if data:
                    frame = zstandard.ZstdDecompressor().decompressobj()
            else:
                data = file.read(1 << 20)
        if not frame.eof:
            raise EOFError("the last frame is not complete")
    if rest:
        yield rest


def parquet_file(path: Path) -> pq.ParquetFile:
    """The file with its footer read. Raises ValueError naming the file."""
    try:
        return pq.ParquetFile(path)
    except pa.ArrowException as error:
        raise ValueError(
            f"{path}: not a complete Parquet file ({brief(error)}); delete it or download it again"
        ) from None


def open_parquet(path: Path) -> pq.ParquetFile:
    """``parquet_file`` with its string column ``text`` found."""
    file = parquet_file(path)
    if "text" not in file.schema_arrow.names:
        raise ValueError(f"{path}: no column 'text'; its columns: {', '.join(file.schema_arrow.names)}")
    kind = file.schema_arrow.field("text").type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise ValueError(f"{path}: column 'text' holds {kind}, not strings")
    return file


def _parquet_texts(path: Path) -> Iterator[str | None]:
    with open_parquet(path) as file:
        for group in range(file.num_row_groups):
            try:
                texts = file.read_row_group(group, columns=["text"]).column("text").to_pylist()
            except (pa.ArrowException, OSError) as error:
                raise ValueError(f"{path}: row group {group} is damaged ({brief(error)})") from None
            except UnicodeDecodeError:
                raise ValueError(f"{path}: row group {group} holds text that is not UTF-8") from None
            yield from texts


def brief(error: Exception) -> str:
    """The first line of an error's message."""
    return str(error).splitlines()[0][:120]


def split_module(text: str) -> list[str]:
    """A module's text in parts of about 3,500 characters, cut before top-level statements; joined they give it."""
    statement, blank, any_line = STDLIB_PART_CHARACTERS
    parts: list[list[str]] = [[]]
    size, after_blank = 0, False
    for line in re.findall(r"[^\n]*\n|[^\n]+", text):
        top_level = after_blank and line[0] not in " \t\r\n\f)]}"
        if (size >= statement and top_level) or (size >= blank and after_blank) or size >= any_line:
            parts.append([])
            size = 0
        parts[-1].append(line)
        size += len(line)
        after_blank = not line.strip()
    return ["".join(part) for part in parts]
