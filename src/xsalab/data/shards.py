"""Training rows in pieces, one for each Parquet shard, read while other shards are still being prepared.

A piece is ``shards/<context>/NNNNN.bin``, the packed rows of shard N alone, and ``NNNNN.json``, what is said of them,
which is written last: a piece is whole or not there. Whoever prepares holds a lock ``shards/worker-<k>.lock``, and
leaves ``NNNNN.error`` where a shard could not be prepared. A reader that needs a missing piece waits as long as
somebody prepares. Nothing here tokenises: preparing.py does.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from ..config import digest
from .rows import Rows, check_batch, shard_order, window_order
from .storage import verify

POLL_SECONDS = 0.3  # between two looks at a piece that is not there yet
TELL_SECONDS = 5.0  # waited before the user is told what for
ROW_BITS = 32  # of a row's id, that count within its shard; those above are the shard's number


def shards_folder(corpus: Path) -> Path:
    """Where a corpus keeps its pieces, and the locks of those who prepare them."""
    return corpus / "shards"


def being_prepared(corpus: Path) -> bool:
    """Whether some process, here or on another machine that shares the folder, prepares shards of this corpus."""
    return any(_held(path) for path in shards_folder(corpus).glob("worker-*.lock"))


def _held(path: Path) -> bool:
    try:
        with FileLock(path, timeout=0):
            return False
    except Timeout:
        return True


class Pieces:
    """The pieces of one corpus and context. ``names``: the training shards by number."""

    def __init__(self, corpus: Path, manifest: Mapping[str, Any], context: int) -> None:
        self.corpus, self.context = corpus, context
        self.folder = shards_folder(corpus) / str(context)
        self.names: Sequence[str] = manifest["shards"]
        self.dtype = np.dtype(manifest["dtype"])
        self._known: dict[int, dict[str, Any]] = {}
        self._verified: set[int] = set()

    def __len__(self) -> int:
        return len(self.names)

    def path(self, number: int, suffix: str) -> Path:
        """A file of shard ``number``: "bin", "json", "error" or "lock"."""
        return self.folder / f"{number:05d}.{suffix}"

    def prepared(self) -> set[int]:
        """The numbers of the shards that are there."""
        return self._numbers("json")

    def failed(self) -> set[int]:
        """The numbers of the shards that could not be prepared."""
        return self._numbers("error")

    def _numbers(self, suffix: str) -> set[int]:
        names = os.listdir(self.folder) if self.folder.is_dir() else ()
        found = (name.split(".") for name in names)
        return {int(parts[0]) for parts in found if parts[0].isdecimal() and parts[1:] == [suffix]}

    def find(self, number: int) -> dict[str, Any] | None:
        """What is said of a shard; None where it is not prepared. ValueError where that file is damaged."""
        if number not in self._known:
            path = self.path(number, "json")
            try:
                self._known[number] = json.loads(path.read_bytes())
            except FileNotFoundError:
                return None
            except ValueError:
                raise ValueError(f"{path}: damaged; {_again(path)}") from None
        return self._known[number]

    def get(self, number: int) -> dict[str, Any]:
        """What is said of a shard, as soon as it is prepared.

        Warns once of a longer wait. Raises ValueError with the reason where the shard could not be prepared, or where
        no process prepares it.
        """
        told, begin = False, time.monotonic()
        while (found := self.find(number)) is None:
            name = f"shard {number} ({self.names[number]})"
            error = self.path(number, "error")
            if error.exists():
                raise ValueError(f"{name} could not be prepared: {error.read_text(encoding='utf-8')}")
            if not being_prepared(self.corpus) and not self.path(number, "json").exists():
                raise ValueError(f"{name} is not prepared and no process prepares it; run: xsalab data FILE")
            if not told and time.monotonic() - begin > TELL_SECONDS:
                told = True
                warnings.warn(f"waiting for {name}, which is being prepared", stacklevel=2)
            time.sleep(POLL_SECONDS)
        return found

    def read(self, number: int, places: np.ndarray) -> np.ndarray:
        """Rows of one shard, int64 (n, context + 1). ValueError where the file is not as it was written.

        Its SHA-256 is compared when this process reads it first. The file is open during the call alone, so that the
        number of shards costs no handles.
        """
        path = self.path(number, "bin")
        if number not in self._verified:
            verify(path, self.get(number), _again(self.path(number, "json")))
            self._verified.add(number)
        rows = np.empty((len(places), self.context + 1), dtype=self.dtype)
        with path.open("rb", buffering=0) as file:
            for row, place in zip(rows, places.tolist(), strict=True):
                file.seek(place * row.nbytes)
                if file.readinto(row.data) != row.nbytes:
                    raise ValueError(f"{path}: ends within row {place}; {_again(self.path(number, 'json'))}")
        return rows.astype(np.int64)

    def summary(self) -> dict[str, Any]:
        """Counts over the shards prepared so far, in the words of a corpus in one piece, and of how many.

        ``sha256``: of all pieces' SHA-256, None as long as one is missing.
        """
        found = [about for number in sorted(self.prepared()) if (about := self.find(number))]
        summed = ("rows", "documents", "tokens", "repeated", "padding", "cut_documents", "size")
        counts: dict[str, Any] = {name: sum(about[name] for about in found) for name in summed}
        return {
            "context": self.context, "dtype": str(self.dtype), "shards": len(self), "prepared": len(found), **counts,
            "waste": counts["padding"] / max(counts["rows"] * (self.context + 1), 1),
            "sha256": digest([about["sha256"] for about in found]) if len(found) == len(self) else None,
        }  # fmt: skip


def _again(about: Path) -> str:
    return f"delete {about} and run: xsalab data FILE, to prepare this shard again"


def described(corpus: Path, manifest: Mapping[str, Any], context: int) -> dict[str, Any]:
    """The manifest with what a corpus in one piece says of its training side, as far as shards are prepared."""
    pieces = Pieces(corpus, manifest, context)
    found = [about for number in sorted(pieces.prepared()) if (about := pieces.find(number))]
    skipped = Counter(manifest["skipped"])
    for about in found:
        skipped.update(about["skipped"])
    return {
        **manifest,
        "train": {name: sum(about["text"][name] for about in found) for name in ("documents", "tokens", "bytes")},
        "duplicates_dropped": sum(about["duplicates_dropped"] for about in found),
        "skipped": dict(skipped),
        "sources": {**manifest["sources"], **{about["shard"]: about["source"] for about in found}},
    }


class ShardRows(Rows):
    """Rows of shards, in windows of ``window`` shards that are shuffled together. ``tokens`` holds none of them.

    An epoch is a permutation of the shards by (seed, epoch), cut into windows; the rows of a window are permuted by
    (seed, window), windows being counted over all epochs. So a batch needs the shards of the windows up to its own,
    and depends on nothing but the shards and (seed, step). ``counts`` are of what was prepared when it was opened.
    """

    def __init__(self, pieces: Pieces, window: int, pad: int, name: str) -> None:
        super().__init__(np.empty((0, pieces.context + 1), dtype=pieces.dtype), pad, name, pieces.summary())
        self.pieces, self.window = pieces, min(window, len(pieces))
        self.windows = -(-len(pieces) // self.window)  # in an epoch
        self._total = 0  # rows of an epoch, once all shards are known
        self._shards = lru_cache(maxsize=4)(lambda seed, epoch: shard_order(len(pieces), seed, epoch))
        self._starts = lru_cache(maxsize=4)(lambda seed, epoch: [0])  # of the windows in their epoch; grows
        self._rows = lru_cache(maxsize=2)(self._window_rows)

    def __len__(self) -> int:
        """Rows of an epoch. ValueError as long as a shard is not prepared."""
        missing = len(self.pieces) - len(self.pieces.prepared())
        if missing:
            raise ValueError(f"{self.pieces.folder}: the number of rows is not known: {missing} shards are missing")
        return sum(self.pieces.get(number)["rows"] for number in range(len(self.pieces)))

    def edge_steps(self, steps: int) -> tuple[int, ...]:
        """The first step: the last one's shards may not be there yet."""
        return (0,)

    def order(self, seed: int, first: int, count: int) -> np.ndarray:
        """Ids of ``count`` rows from place ``first`` on, int64: shard · 2³² + row. Waits for shards not prepared yet.

        Raises ValueError where ``count`` is below 1 or exceeds the rows of all shards, and as ``Pieces.get`` does.
        """
        if count < 1:
            raise ValueError(f"batch_rows = {count}: must be at least 1")
        self._locate(seed, first + count - 1)
        if self._total:
            check_batch(count, self._total, self.context)
        found = []
        while count:
            epoch, window, place = self._locate(seed, first)
            found.append(self._rows(seed, epoch, window)[place : place + count])
            first, count = first + len(found[-1]), count - len(found[-1])
        return np.concatenate(found)

    def read(self, ids: np.ndarray) -> np.ndarray:
        """The tokens of rows by their ids, int64 (n, context + 1)."""
        numbers, places = ids >> ROW_BITS, ids & ((1 << ROW_BITS) - 1)
        rows = np.empty((len(ids), self.context + 1), dtype=np.int64)
        for number in np.unique(numbers):
            chosen = np.flatnonzero(numbers == number)
            rows[chosen] = self.pieces.read(int(number), places[chosen])
        return rows

    def _of_window(self, seed: int, epoch: int, window: int) -> list[int]:
        """The shards of a window, by number."""
        return self._shards(seed, epoch)[window * self.window : (window + 1) * self.window].tolist()

    def _locate(self, seed: int, position: int) -> tuple[int, int, int]:
        """Epoch, window and place within it of a position in the endless sequence."""
        epoch, place = divmod(position, self._total) if self._total else (0, position)
        starts = self._starts(seed, epoch)
        while starts[-1] <= place and len(starts) <= self.windows:
            shards = self._of_window(seed, epoch, len(starts) - 1)
            starts.append(starts[-1] + sum(self.pieces.get(number)["rows"] for number in shards))
        if starts[-1] <= place:  # beyond the first epoch, the length of which is known now
            self._total = starts[-1]
            if not self._total:
                raise ValueError(f"{self.pieces.folder}: no training document is left beside the validation text")
            return self._locate(seed, position)
        window = bisect_right(starts, place) - 1
        return epoch, window, place - starts[window]

    def _window_rows(self, seed: int, epoch: int, window: int) -> np.ndarray:
        """The ids of a window's rows in their order."""
        shards = self._of_window(seed, epoch, window)
        ids = [(number << ROW_BITS) + np.arange(self.pieces.get(number)["rows"]) for number in shards]
        joined = np.concatenate(ids)
        return joined[window_order(len(joined), seed, epoch * self.windows + window)]
