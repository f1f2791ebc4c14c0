"""Records to rendered conversations, batch by batch: what a file holds, and what becomes of each of its records."""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .chat import BadConversation, Piece, assemble, messages_of, turns
from .chat_sources import Record, read_records
from .sources import SourceFile
from .storage import batched
from .tokenizer import Tokenizer

RENDER_BATCH = 256  # conversations a thread renders at once
TOO_LONG = "nothing of the assistant's text within a row"
Progress = Callable[[str, float], None]


class Outcome(NamedTuple):
    """Of a record: the rule that it breaks, or its tokens and mask (n, 2) with hashes of text and tokens."""

    record: Record
    fault: BadConversation | None = None
    data: np.ndarray = np.empty((0, 2), dtype=np.int64)
    text: int = 0
    tokens: int = 0
    cut: bool = False


@dataclass
class Index:
    """The usable conversations in reading order, a column each, and what was found on the way."""

    source: array[int] = field(default_factory=lambda: array("q"))  # number of the source
    file: array[int] = field(default_factory=lambda: array("q"))  # of the file, counted over all sources
    number: array[int] = field(default_factory=lambda: array("q"))  # of the line or row
    length: array[int] = field(default_factory=lambda: array("q"))
    text: array[int] = field(default_factory=lambda: array("Q"))
    tokens: array[int] = field(default_factory=lambda: array("Q"))
    read: int = 0
    skipped: Counter[str] = field(default_factory=Counter[str])
    first: dict[str, str] = field(default_factory=dict[str, str])  # reason, or "cut" -> where it was met first
    cut: int = 0
    twice: int = 0  # not trained on, as they are held out

    def add(self, source: int, file: int, outcome: Outcome) -> None:
        """Counts a record, and lists it where it can be used."""
        self.read += 1
        if outcome.fault is not None:
            self.skipped[outcome.fault.reason] += 1
            place, detail = outcome.record.place, outcome.fault.detail
            self.first.setdefault(outcome.fault.reason, f"{place}: {detail}" if detail else place)
            return
        if outcome.cut:
            self.cut += 1
            self.first.setdefault("cut", outcome.record.place)
        for column, value in (
            (self.source, source), (self.file, file), (self.number, int(outcome.record.id.rpartition(":")[2])),
            (self.length, len(outcome.data)), (self.text, outcome.text), (self.tokens, outcome.tokens),
        ):  # fmt: skip
            column.append(value)


RecordBatch = tuple[int, int, Sequence[Record]]  # the numbers of source and file, and records of it


def batches_of(groups: Sequence[Sequence[SourceFile]], limit: int, tell: Progress) -> Iterator[RecordBatch]:
    """All records in order, of each source the first ``limit``; tells which file is read."""
    files = [(source, file) for source, group in enumerate(groups) for file in group]
    total, done = max(sum(file.path.stat().st_size for _, file in files), 1), 0
    taken = Counter[int]()
    for number, (source, file) in enumerate(files):
        tell(f"reading {file.name}", done / total)
        left = limit - taken[source] if limit else None
        for batch in batched(itertools.islice(read_records(file), left), RENDER_BATCH):
            taken[source] += len(batch)
            yield source, number, batch
        done += file.path.stat().st_size


def render_batch(batch: RecordBatch, tokenizer: Tokenizer, width: int) -> tuple[int, int, list[Outcome]]:
    """What becomes of each record of a batch, in order; all texts are encoded in one call."""
    source, number, records = batch
    outcomes: list[Outcome] = []
    pieces: list[list[Piece]] = []
    for record in records:
        try:
            if record.fault:
                raise record.fault
            pieces.append(turns(messages_of(record.content)))
            outcomes.append(Outcome(record, text=_hash("\0".join(p.special or p.text for p in pieces[-1]).encode())))
        except BadConversation as fault:
            outcomes.append(Outcome(record, fault))
        except ValueError as error:
            raise ValueError(f"{record.place}: {error}") from None
    special = np.array(sorted(tokenizer.specials.values()))
    rendered = iter(assemble(pieces, tokenizer))
    for place, outcome in enumerate(outcomes):
        if outcome.fault is None:
            tokens, mask = next(rendered)
            data = np.stack((tokens, mask), axis=1)[:width].astype(np.int64)
            cut = len(tokens) > width
            if not (data[:, 1].astype(bool) & ~np.isin(data[:, 0], special)).any():
                fault = BadConversation(TOO_LONG, f"{len(tokens)} tokens, a row holds {width}")
                outcomes[place] = Outcome(outcome.record, fault)
            else:
                outcomes[place] = outcome._replace(data=data, tokens=_hash(data.tobytes()), cut=cut)
    return source, number, outcomes


def _hash(data: bytes) -> int:
    """64 bits that depend on the data alone, even over all data."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest())
