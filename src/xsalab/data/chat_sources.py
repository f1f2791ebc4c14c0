"""Where conversations come from: files of messages or questions, and three data sets from the hub.

A source is written as one text, with " x N" behind it where it is to be taken N times:

    "chats.jsonl"   "chats/"   "chats/sft_*.jsonl"   "gsm8k_train.jsonl x 4"
    "hub:smoltalk"   "hub:mmlu x 3"   "hub:gsm8k x 4"          nanochat's mixture (scripts/chat_sft.py)

Paths are relative to the working directory, as ``data.source`` is. What a record is, its fields say
(``chat.messages_of``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from .chat import BadConversation
from .sources import SourceFile, brief, hub_file, json_lines, parquet_file, walk

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
HUB: dict[str, tuple[str, tuple[str, ...]]] = {
    "smoltalk": ("HuggingFaceTB/smol-smoltalk", tuple(f"data/train-{i:05d}-of-00004.parquet" for i in range(4))),
    "mmlu": ("cais/mmlu", ("all/auxiliary_train-00000-of-00001.parquet",)),
    "gsm8k": ("openai/gsm8k", ("main/train-00000-of-00001.parquet",)),
}
COLUMNS = (("messages",), ("question", "choices", "answer"), ("question", "answer"))  # of Parquet files
BROKEN = "broken JSON"  # why a line is skipped
BATCH = 1024  # records of a Parquet file that are in memory as Python values


@dataclass(frozen=True)
class ChatSource:
    """``where``: a path, a pattern with * in its file name, or "hub:NAME"; taken ``times`` times."""

    where: str
    times: int = 1

    @classmethod
    def parse(cls, text: str) -> ChatSource:
        """From its written form. ValueError where that is none; whether the files are there is asked later."""
        match = re.fullmatch(r"\s*(.*?\S)(?:\s+x\s*(\d+))?\s*", text)
        if not match or (match[2] is not None and int(match[2]) < 1):
            raise ValueError(f"{text!r}: give a file, a folder or hub:NAME, with ' x 4' behind it to take it 4 times")
        name = match[1].removeprefix("hub:")
        if name != match[1] and name not in HUB:
            raise ValueError(f"{text!r}: use {', '.join(f'hub:{known}' for known in HUB)}")
        return cls(match[1], int(match[2] or 1))

    def files(self) -> list[SourceFile]:
        """The files with their names in the source, in order; those of the hub are downloaded.

        Raises ValueError where there is none, OSError where the hub cannot be reached.
        """
        if self.where.startswith("hub:"):
            repo, names = HUB[self.where.removeprefix("hub:")]
            return [SourceFile(f"{repo}/{name}", hub_file(repo, name)) for name in names]
        path, found = Path(self.where), self.here()
        if not found:
            what = "no such file or folder" if not path.exists() else "holds no file"
            raise ValueError(f"{self.where}: {what} with conversations; suffixes that work: {', '.join(SUFFIXES)}")
        if wrong := [file.path for file in found if not file.name.endswith(SUFFIXES)]:
            raise ValueError(f"{wrong[0]}: this kind of file is not read; suffixes that work: {', '.join(SUFFIXES)}")
        return found

    def here(self) -> list[SourceFile]:
        """The files that lie on this machine now, of whatever kind; [] where all are gone, and for the hub."""
        path = Path(self.where)
        if self.where.startswith("hub:"):
            return []
        if "*" in path.name and not path.exists():
            return [SourceFile(file.name, file) for file in sorted(path.parent.glob(path.name)) if file.is_file()]
        if path.is_dir():
            return walk(path, SUFFIXES, set())[0]
        return [SourceFile(path.name, path)] if path.is_file() else []


class Record(NamedTuple):
    """One record of a file: ``place`` for a message to the user, ``id`` for tables, and what was found there.

    ``fault``: of a line that is no JSON, which has no content.
    """

    id: str  # "name:number", the number as in place
    place: str  # "path: line 3" or "path: row 3"; lines and rows are counted from 1
    content: Any
    fault: BadConversation | None = None


def read_records(file: SourceFile) -> Iterator[Record]:
    """The records of one file, in order; a line that is no JSON is one with a fault.

    Raises ValueError naming the file where it is damaged as a whole: a Parquet file, a compressed one.
    """
    if file.path.name.endswith(".parquet"):
        for number, content in enumerate(_parquet_records(file.path), start=1):
            yield Record(f"{file.name}:{number}", f"{file.path}: row {number}", content)
        return
    for number, line in json_lines(file.path):
        content, fault = _parsed(line)
        yield Record(f"{file.name}:{number}", f"{file.path}: line {number}", content, fault)


def _parsed(line: bytes) -> tuple[Any, BadConversation | None]:
    """A line's value, or what is wrong with it."""
    try:
        return json.loads(line.rstrip().decode("utf-8")), None
    except UnicodeDecodeError as error:
        detail = f"not UTF-8 (byte {error.start} of the line)"
    except json.JSONDecodeError as error:
        detail = f"{error.msg} (character {error.colno} of the line)"
    except (ValueError, RecursionError) as error:  # a number of too many digits, brackets nested too deep
        detail = str(error)
    return None, BadConversation(BROKEN, detail)


def _parquet_records(path: Path) -> Iterator[dict[str, Any]]:
    with parquet_file(path) as file:
        there = file.schema_arrow.names
        columns = next((list(names) for names in COLUMNS if set(names) <= set(there)), None)
        if columns is None:
            raise ValueError(
                f"{path}: neither a column 'messages' nor 'question' and 'answer'; its columns: {', '.join(there)}"
            )
        try:
            for batch in file.iter_batches(BATCH, columns=columns):
                yield from batch.to_pylist()
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{path}: damaged ({brief(error)}); delete it or download it again") from None
        except UnicodeDecodeError:
            raise ValueError(f"{path}: holds text that is not UTF-8") from None


def distinct_names(groups: Sequence[Sequence[SourceFile]]) -> list[list[SourceFile]]:
    """The sources' files with names that tell all of them apart: a name that another source has as well gets the
    source's number. ValueError where one file is in two of them."""
    where: dict[Path, int] = {}
    names: dict[str, int] = {}
    found: list[list[SourceFile]] = []
    for number, group in enumerate(groups):
        renamed: list[SourceFile] = []
        for file in group:
            if where.setdefault(file.path.resolve(), number) != number:
                raise ValueError(f"{file.path}: is named twice; ' x 2' behind a source takes it twice")
            taken = names.setdefault(file.name, number) != number
            renamed.append(SourceFile(f"{number}/{file.name}", file.path) if taken else file)
        found.append(renamed)
    return found
