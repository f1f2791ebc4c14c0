"""Documents to fixed rows, and a batch as a pure function of (rows, seed, step).

``pack`` fills rows of context + 1 tokens without losing one; ``pack_whole`` fills them with conversations, of which
only the assistant's tokens are targets. ``batch_at`` needs no state, so that resume is one integer and the arms of a
pair read the same rows.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Rows:
    """Packed rows: ``tokens`` (n, context + 1), memory-mapped; ``counts`` tells what packing did.

    ``mask``, of the same shape, is 0 where a token is no target; None: every token but padding is one.
    """

    tokens: np.ndarray
    pad: int
    digest: str
    counts: dict[str, Any] = field(default_factory=dict)
    mask: np.ndarray | None = None

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def context(self) -> int:
        """Inputs a row holds."""
        return self.tokens.shape[1] - 1

    def order(self, seed: int, first: int, count: int) -> np.ndarray:
        """Ids of ``count`` rows, int64, from place ``first`` on in an endless sequence of epochs, each of all rows.

        Raises ValueError where that is not 1 to as many rows as there are.
        """
        check_batch(count, len(self), self.context)
        epochs, places = np.divmod(np.arange(first, first + count), len(self))
        return np.concatenate([_epoch(len(self), seed, int(e))[places[epochs == e]] for e in np.unique(epochs)])

    def read(self, ids: np.ndarray) -> np.ndarray:
        """The tokens of rows by their ids, int64 (n, context + 1)."""
        return self.tokens[ids].astype(np.int64)

    def edge_steps(self, steps: int) -> tuple[int, ...]:
        """The first and the last of ``steps`` steps, as far as their batches can be had now."""
        return 0, steps - 1


@dataclass(frozen=True, eq=False)
class Batch:
    """``inputs`` and ``targets`` int64 (b, t), a target −1 where it does not count; ``row_ids`` int64 (b,)."""

    inputs: Tensor
    targets: Tensor
    row_ids: Tensor


@dataclass
class Packing:
    """What packing did: ``repeated`` tokens lead the rests of cut documents, ``padding`` fills the last row."""

    rows: int = 0
    documents: int = 0
    tokens: int = 0  # of documents, start tokens included, repeats not
    repeated: int = 0
    padding: int = 0
    cut_documents: int = 0

    def summary(self, width: int) -> dict[str, Any]:
        """The counts, and the waste: the share of all places that is padding."""
        return {**asdict(self), "waste": self.padding / max(self.rows * width, 1)}


def pack(
    documents: Iterable[np.ndarray], *, bos: int, pad: int, width: int, buffer: int, packing: Packing
) -> Iterator[np.ndarray]:
    """Rows (width,) that hold every document, start token first, without losing a token.

    A row begins with the rest of a cut document, else with a document; it is filled with the longest of ``buffer``
    documents that fits. When none fits the oldest is cut: its beginning fills the row, and its rest, led by the last
    token of the beginning, begins the next one. So every token but the first of a document is a target exactly once,
    with its own predecessor before it. The last row is padded. ``packing`` is counted up.
    """
    waiting = _Buffer(documents, buffer)
    row, filled = np.full(width, pad, dtype=np.int64), 0
    rest: np.ndarray | None = None
    while rest is not None or waiting:
        space = width - filled
        if rest is not None:
            piece, rest = rest, None
        else:
            piece = waiting.longest_within(space - 1)
            whole = piece is not None
            piece = piece if piece is not None else waiting.oldest()
            piece = np.concatenate(([bos], piece))
            packing.documents += 1
            packing.tokens += len(piece)
            packing.cut_documents += not whole and space > 1  # with one place left the rest is the whole document
        if len(piece) > space:
            rest, piece = piece[space - 1 :], piece[:space]
            packing.repeated += 1
        row[filled : filled + len(piece)] = piece
        filled += len(piece)
        if filled == width:
            packing.rows += 1
            yield row
            row, filled = np.full(width, pad, dtype=np.int64), 0
    if filled:
        packing.rows += 1
        packing.padding += width - filled
        yield row


def pack_whole(
    conversations: Iterable[np.ndarray], *, pad: int, width: int, buffer: int, packing: Packing
) -> Iterator[np.ndarray]:
    """Rows (width, 2) of whole conversations (n, 2) with n ≤ width: tokens, and a mask of those that are targets.

    Every row begins with a conversation. It is filled with the longest of ``buffer`` conversations that fits (of equal
    ones the oldest); when none fits, the rest is padding, which is no target: no conversation is cut. So does
    nanochat's scripts/chat_sft.py, with 100 in the buffer. ``packing`` is counted up.
    """
    waiting = _Buffer(conversations, buffer)
    while waiting:
        row, filled = np.zeros((width, 2), dtype=np.int64), 0
        row[:, 0] = pad
        while (piece := waiting.longest_within(width - filled)) is not None:
            row[filled : filled + len(piece)] = piece
            filled += len(piece)
            packing.documents += 1
        assert filled, "a conversation is longer than a row"
        packing.rows += 1
        packing.tokens += filled
        packing.padding += width - filled
        yield row


def nanochat_rows(
    documents: Iterable[np.ndarray], bos: int, width: int, *, limit: int | None = None
) -> Int64[np.ndarray, "rows width"]:
    """Rows as nanochat packs them for validation: every row begins with a document, and what is cut off is lost.

    The longest of the buffered documents that fits is taken; when none fits the shortest is cropped to fill the row.
    The buffer is refilled by 128 documents whenever it holds fewer than 1,000. Where nanochat would begin its second
    epoch the buffer runs empty here, and a last row that is not full is left out. At most ``limit`` rows.
    """
    waiting = _Buffer(documents, 1000, refill=128)
    rows: list[np.ndarray] = []
    while waiting and (limit is None or len(rows) < limit):
        row: list[np.ndarray] = []
        space = width
        while space and waiting:
            piece = waiting.longest_within(space - 1)
            piece = piece if piece is not None else waiting.shortest()
            row.append(np.concatenate(([bos], piece))[:space])
            space -= len(row[-1])
        if not space:
            rows.append(np.concatenate(row))
    return np.array(rows, dtype=np.int64).reshape(-1, width)


class _Buffer:
    """Documents waiting to be packed, by length and by age. Equal lengths: the oldest first."""

    def __init__(self, documents: Iterable[np.ndarray], size: int, refill: int = 1) -> None:
        self._source, self._size, self._refill = enumerate(documents), size, refill
        self._by_age: dict[int, np.ndarray] = {}  # by index; the first is the oldest
        self._by_length: list[tuple[int, int]] = []  # (length, −index), sorted
        self._fill()

    def __len__(self) -> int:
        return len(self._by_age)

    def _fill(self) -> None:
        while len(self._by_age) < self._size:
            before = len(self._by_age)
            for index, tokens in itertools.islice(self._source, self._refill):
                self._by_age[index] = tokens
                insort(self._by_length, (len(tokens), -index))
            if len(self._by_age) == before:
                return

    def longest_within(self, length: int) -> np.ndarray | None:
        """The longest document of at most ``length`` tokens."""
        place = bisect_right(self._by_length, (length, 1)) - 1
        return self._take(place) if place >= 0 else None

    def oldest(self) -> np.ndarray:
        """The document that has waited longest."""
        index, tokens = next(iter(self._by_age.items()))
        return self._take(bisect_left(self._by_length, (len(tokens), -index)))

    def shortest(self) -> np.ndarray:
        """The shortest document."""
        return self._take(bisect_right(self._by_length, (self._by_length[0][0], 1)) - 1)

    def _take(self, place: int) -> np.ndarray:
        tokens = self._by_age.pop(-self._by_length.pop(place)[1])
        self._fill()
        return tokens


def batch_at(
    rows: Rows, *, seed: int, step: int, batch_rows: int, permute: bool = False, rank: int = 0, world: int = 1
) -> Batch:
    """Global batch ``step``, or the share of it that ``rank`` of ``world`` processes reads. A pure function.

    The batches are consecutive pieces of an endless sequence of epochs, each a permutation of all rows that depends
    on (seed, epoch) alone. ``permute`` orders the rows within the batch by (seed, step): the same set, another order.
    The order of rows in shards: shards.ShardRows. Raises ValueError if ``batch_rows`` exceeds the rows or does not
    divide by ``world``.
    """
    if batch_rows % world:
        down, up = batch_rows // world * world, -(-batch_rows // world) * world
        near = " or ".join(str(n) for n in (down, up) if n)
        raise ValueError(f"batch_rows = {batch_rows} does not divide among {world} processes: use {near}")
    if seed < 0 or step < 0:
        raise ValueError(f"seed = {seed}, step = {step}: must be 0 or more")
    assert 0 <= rank < world
    ids = rows.order(seed, step * batch_rows, batch_rows)
    if permute:
        ids = ids[_permutation(batch_rows, seed, step, stream=1)]
    share = batch_rows // world
    ids = ids[rank * share : (rank + 1) * share]
    tokens = torch.from_numpy(rows.read(ids))
    targets = tokens[:, 1:].clone()
    targets.masked_fill_(targets == rows.pad, -1)
    if rows.mask is not None:
        targets.masked_fill_(torch.from_numpy(rows.mask[ids, 1:] == 0), -1)
    return Batch(tokens[:, :-1].contiguous(), targets, torch.from_numpy(ids))


def check_batch(batch_rows: int, rows: int, context: int) -> None:
    """ValueError where no batch can have so many of so many rows."""
    if not 1 <= batch_rows <= rows:
        raise ValueError(
            f"batch_rows = {batch_rows}: the corpus packs into {rows} rows of {context + 1} tokens; "
            f"use 1 to {rows} rows a batch, or more text"
        )


def mixed(count: int) -> np.ndarray:
    """An order of ``count`` things, int64, that is the same for every run: how several sources are mixed."""
    return _permutation(count, 0, 0, stream=2)


def shard_order(shards: int, seed: int, epoch: int) -> np.ndarray:
    """The order of the shards in one epoch, int64."""
    return _permutation(shards, seed, epoch, stream=3)


def window_order(rows: int, seed: int, window: int) -> np.ndarray:
    """The order of the rows in one window of shards, int64; windows are counted over all epochs."""
    return _permutation(rows, seed, window, stream=4)


@lru_cache(maxsize=4)
def _epoch(rows: int, seed: int, epoch: int) -> np.ndarray:
    order = _permutation(rows, seed, epoch, stream=0)
    order.setflags(write=False)
    return order


def _permutation(n: int, seed: int, key: int, stream: int) -> np.ndarray:
    """A permutation that depends on the four numbers alone: by raw Philox output, which no release of numpy changes."""
    philox = np.random.Philox(key=np.array([seed, key], dtype=np.uint64), counter=[0, 0, 0, stream])
    return np.argsort(philox.random_raw(n), kind="stable")
