"""Files that are whole or not there, and disk errors that say what can be done."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


def write_atomic(path: Path, content: str | bytes) -> None:
    """Writes a file whole or not at all: temporary name, flush to disk, rename."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise explain_disk(error, path, len(data)) from error


def explain_disk(error: OSError, path: Path, needed: int) -> OSError:
    """The same error with what a user can act on: bytes needed and free, or the read-only folder."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        try:
            free = f"{shutil.disk_usage(path.parent).free:,}"
        except OSError:
            free = "unknown"
        words = f"disk full: {needed:,} bytes needed, {free} free; make room, and the same command continues"
        return OSError(errno.ENOSPC, words, str(path))
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return OSError(error.errno, "cannot write here (read-only?); choose another folder with --out", str(path))
    if error.errno in (errno.ENOENT, errno.ESTALE):
        words = "the folder is gone (unmounted or deleted in use?); bring it back, and the same command continues"
        return OSError(error.errno, words, str(path.parent))
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return OSError(error.errno, "a file stands where a folder is needed; choose another with --out", str(path))
    return error


def make_folder(path: Path) -> None:
    """The folder with its parents, there or made now. OSError that says what a user can do."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise explain_disk(error, path, 0) from error


@contextmanager
def folder_lock(folder: Path, what: str, wait: float = 0.0) -> Iterator[None]:
    """Holds a folder for this process. ValueError where another process has it after ``wait`` seconds."""
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=wait)
    except Timeout:
        raise ValueError(f"{folder}: another process works on this {what}; wait for it or stop it") from None
    try:
        yield
    finally:
        lock.release()
