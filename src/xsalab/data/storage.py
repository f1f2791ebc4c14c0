"""Prepared folders of binary files: whole or not there, and verified by size and SHA-256 on every later use."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ..files import explain_disk

T = TypeVar("T")


def build_folder(folder: Path, build: Callable[[Path], T]) -> T:
    """What ``build`` returns after it has filled a folder beside ``folder``, which then takes that name.

    The caller holds the folder's lock, so what a killed process left there is nobody's.
    """
    partial = folder.with_name(folder.name + ".partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir()
    try:
        built = build(partial)
        os.replace(partial, folder)
        sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return built


def verified_manifest(folder: Path) -> dict[str, Any]:
    """The folder's manifest.json, with every file that it lists. ValueError naming what is missing or changed."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        path = folder / "manifest.json"
        raise ValueError(f"{path}: missing or damaged; delete {folder} to prepare again") from None
    for name, expected in manifest["files"].items():
        verify(folder / name, expected, f"delete {folder} to prepare again")
    return manifest


def verify(path: Path, expected: dict[str, Any], remedy: str) -> None:
    """Raises ValueError unless ``path`` has the size and the SHA-256 that were written down."""
    if not path.exists():
        raise ValueError(f"{path}: missing; {remedy}")
    if path.stat().st_size != expected["size"]:
        raise ValueError(f"{path}: has {path.stat().st_size} bytes instead of {expected['size']}; {remedy}")
    if sha256(path) != expected["sha256"]:
        raise ValueError(f"{path}: changed since it was written (SHA-256 differs); {remedy}")


def fingerprint(path: Path) -> dict[str, Any]:
    """Size in bytes and SHA-256 of a file: what ``verify`` compares."""
    return {"size": path.stat().st_size, "sha256": sha256(path)}


def sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_rows(path: Path, rows: Iterable[np.ndarray], dtype: str) -> None:
    """Rows of one length as one binary file, whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    try:
        with writing(partial) as file:
            for block in batched(rows, 4096):
                append(file, np.stack(block).astype(dtype))
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def map_file(path: Path, dtype: str) -> np.ndarray:
    """A file's numbers, memory-mapped."""
    if not path.stat().st_size:
        return np.zeros(0, dtype=dtype)  # an empty file cannot be mapped
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))


class writing:
    """A binary file that is on the disk when the block ends."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> FileIO:
        self._file = self._path.open("wb", buffering=0)  # a buffer would hide the message by failing again on close
        return self._file

    def __exit__(self, *exception: object) -> None:
        with self._file as file:
            if exception[0] is None:
                os.fsync(file.fileno())


def append(file: FileIO, values: np.ndarray) -> None:
    """Writes ``values``. Raises OSError with the bytes needed and free where the disk is full."""
    rest = memoryview(values.tobytes())
    try:
        while rest:  # an unbuffered file may take a part only
            rest = rest[file.write(rest) :]
    except OSError as error:
        raise explain_disk(error, Path(str(file.name)), values.nbytes) from error


def require_room(folder: Path, needed: int) -> None:
    """Raises OSError before anything is written where ``needed`` bytes do not fit on the disk of ``folder``."""
    if shutil.disk_usage(folder).free < needed:
        raise explain_disk(OSError(errno.ENOSPC, ""), folder, needed)


def threaded(work: Callable[[Any], T], items: Iterable[Any]) -> Iterator[T]:
    """``map(work, items)`` on as many threads as there are processors, in order, with few items in flight."""
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(threads) as pool:
        pending: deque[Future[T]] = deque()
        for item in items:
            pending.append(pool.submit(work, item))
            if len(pending) > 2 * threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def batched(items: Iterable[T], size: int) -> Iterator[tuple[T, ...]]:
    """Tuples of ``size`` items, the last perhaps shorter (itertools has it from Python 3.12 on)."""
    iterator = iter(items)
    while batch := tuple(itertools.islice(iterator, size)):
        yield batch


def lock_path(folder: Path) -> Path:
    """The lock file beside a folder."""
    return folder.with_name(folder.name + ".lock")


def sync_folder(folder: Path) -> None:
    """Returns when the folder's list of names is on the disk."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def to_json(value: Any) -> bytes:
    """Indented JSON in UTF-8 with a line end."""
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()
