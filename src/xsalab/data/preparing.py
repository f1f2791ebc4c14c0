"""Shards prepared side by side: each worker process takes the next shard that nobody has, one at a time.

The workers need no coordinator: a lock a shard keeps two from one, a piece is whole or not there, and what a killed
one left half written is written again. Downloads happen inside the workers, beside the tokenising of others.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from ..files import make_folder, write_atomic
from .corpus import DUPLICATE, ENCODE_BATCH, Corpus, held_out_hashes, training
from .rows import Packing, pack, shard_order
from .shards import Pieces, being_prepared, shards_folder
from .sources import DataConfig, Source, shard_file, source_record
from .storage import batched, fingerprint, to_json, write_rows
from .tokenizer import Tokenizer

Task = tuple[int, int]  # context, number of the shard
Progress = Callable[[str, float], None]
POLL_SECONDS = 0.2
GIVE_UP = 3  # shards in a row that a worker could not get or write, after which it ends: no network, no room


def prepare_shards(
    corpus: Corpus,
    config: DataConfig,
    contexts: Sequence[int],
    seeds: Sequence[int],
    *,
    whole: bool = True,
    jobs: int = 0,
    progress: Progress = lambda stage, share: None,
) -> None:
    """Prepares the missing shards of a corpus with ``config.window``, in the order in which the seeds need them.

    whole: returns when all are there, else when the first seed's first window is, and the rest goes on in processes
    that end with this one and leave it the processor. jobs: processes, 0: as many as cores; with ``whole`` 1 is this
    process itself. ``progress`` gets a stage and the share done. What is prepared stays whatever happens: the same
    call goes on with the rest. Raises ValueError naming the first shard that failed, and why.
    """
    assert config.window, "a corpus in shards"
    pieces = {context: Pieces(corpus.folder, corpus.manifest, context) for context in contexts}
    there = {context: found.prepared() for context, found in pieces.items()}
    order = needed_order(len(corpus.manifest["shards"]), config.window, seeds)
    tasks = [(context, number) for number in order for context in contexts if number not in there[context]]
    if not tasks:
        return
    for context, number in tasks:
        make_folder(pieces[context].folder)
        pieces[context].path(number, "error").unlink(missing_ok=True)  # of an earlier attempt
    first = set(order[: config.window])
    needed = tasks if whole else [task for task in tasks if task[1] in first]
    jobs = min(jobs or _cores(), len(tasks))
    if whole and jobs == 1:
        with _claim(corpus.folder):
            _work(corpus, config, tasks, lambda done: progress(_stage(corpus, len(contexts)), done / len(tasks)))
    else:
        workers = _start(corpus, config, tasks, jobs, polite=not whole)
        _await(corpus, pieces, needed, workers, lambda share: progress(_stage(corpus, len(contexts)), share))
        for worker in workers if whole else ():
            worker.join()  # each has ended, or sees that nothing is left
    there = {context: found.prepared() for context, found in pieces.items()}
    missing = [(context, number) for context, number in needed if number not in there[context]]
    if missing:
        raise ValueError(_failure(pieces, missing, len(needed)))


def needed_order(shards: int, window: int, seeds: Sequence[int]) -> list[int]:
    """All shards in the order in which runs of these seeds need them: each seed's first window, then the second ones.

    By windows, not by shards: so the first run can start after one window, however many seeds there are.
    """
    orders = [shard_order(shards, seed, 0).tolist() for seed in seeds]
    starts = range(0, shards, window)
    return list(dict.fromkeys(n for start in starts for order in orders for n in order[start : start + window]))


def _stage(corpus: Corpus, contexts: int) -> str:
    return f"preparing {contexts * len(corpus.manifest['shards']):,} shards"


def _failure(pieces: dict[int, Pieces], missing: list[Task], needed: int) -> str:
    """The first shard that failed and why, and what is left."""
    failed = [(task, path) for task in missing if (path := pieces[task[0]].path(task[1], "error")).exists()]
    kept = f"{len(missing):,} of {needed:,} shards are not prepared; the others are kept, the same command continues"
    if not failed:
        return f"{kept}. A process that prepared them was ended (out of memory?), or has told why above"
    (context, number), path = failed[0]
    return f"shard {number} ({pieces[context].names[number]}): {path.read_text(encoding='utf-8')}\n{kept}"


# The workers' side


def prepare_piece(corpus: Corpus, config: DataConfig, held_out: set[bytes], pieces: Pieces, number: int) -> None:
    """Writes the rows of one shard, packed alone, and what is said of them. In memory: a row group and the buffer.

    Documents that are held out as well are left out and counted. Raises OSError where the shard cannot be had,
    ValueError where it is damaged, or no more the file that it was when the corpus was prepared.
    """
    name = pieces.names[number]
    file = shard_file(config, name).fetched()
    if not file.path.exists():
        raise ValueError(f"{file.path}: is gone since the corpus was prepared; put it back, or delete {corpus.folder}")
    record, known = source_record(file.path), corpus.manifest["sources"][name]
    if known and any(record[what] != known[what] for what in ("size", "mtime_ns")):
        raise ValueError(
            f"{file.path}: changed since the corpus was prepared; put it back, or delete {corpus.folder} to prepare "
            "all of it again"
        )
    skipped, text, packing = Counter[str](), Counter[str](), Packing()

    def documents() -> Iterator[np.ndarray]:
        for batch in batched(training(Source((file,), (), ""), held_out, skipped), ENCODE_BATCH):
            for document, ids in zip(batch, corpus.tokenizer.encode([d.text for d in batch]), strict=True):
                text.update(documents=1, tokens=len(ids), bytes=len(document.text.encode()))
                yield np.array(ids, dtype=pieces.dtype)

    tokenizer, width, buffer = corpus.tokenizer, pieces.context + 1, corpus.manifest["config"]["pack_buffer"]
    rows = pack(documents(), bos=tokenizer.bos, pad=tokenizer.pad, width=width, buffer=buffer, packing=packing)
    write_rows(pieces.path(number, "bin"), rows, str(pieces.dtype))
    about = {
        "shard": name,
        "context": pieces.context,
        "text": {what: text[what] for what in ("documents", "tokens", "bytes")},
        "duplicates_dropped": skipped.pop(DUPLICATE, 0),
        "skipped": dict(skipped),
        **packing.summary(width),
        "source": record,
        **fingerprint(pieces.path(number, "bin")),
    }
    write_atomic(pieces.path(number, "json"), to_json(about))


def _work(corpus: Corpus, config: DataConfig, tasks: Sequence[Task], tell: Callable[[int], None]) -> None:
    """Prepares what nobody else has, until all of ``tasks`` are there or have failed, here or elsewhere."""
    pieces = {context: Pieces(corpus.folder, corpus.manifest, context) for context in {c for c, _ in tasks}}
    held_out = held_out_hashes(corpus.folder)
    left, failed_in_a_row = list(tasks), 0
    while left:
        busy: list[Task] = []
        for done, (context, number) in enumerate(left):
            tell(done)
            found = pieces[context]
            lock = FileLock(found.path(number, "lock"))
            if _settled(found, number):
                continue
            try:
                lock.acquire(timeout=0)
            except Timeout:
                busy.append((context, number))  # by another process, which may be killed: looked at again
                continue
            try:
                if not _settled(found, number):
                    prepare_piece(corpus, config, held_out, found, number)
                found.path(number, "lock").unlink(missing_ok=True)  # the piece is there: nobody needs the lock any more
                failed_in_a_row = 0
            except (ValueError, OSError) as error:
                write_atomic(found.path(number, "error"), _words(error))
                failed_in_a_row += isinstance(error, OSError)
                if failed_in_a_row == GIVE_UP:
                    return
            finally:
                lock.release()
        left = busy
        if left:
            time.sleep(POLL_SECONDS)


def _settled(pieces: Pieces, number: int) -> bool:
    return pieces.path(number, "json").exists() or pieces.path(number, "error").exists()


def _words(error: Exception) -> str:
    return f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)


@contextmanager
def _claim(corpus: Path) -> Iterator[None]:
    """Holds a lock by which readers know that somebody prepares."""
    number = 0
    while True:
        lock = FileLock(shards_folder(corpus) / f"worker-{number}.lock")
        try:
            lock.acquire(timeout=0)
            break
        except Timeout:
            number += 1
    try:
        yield
    finally:
        lock.release()


# Processes


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start(corpus: Corpus, config: DataConfig, tasks: Sequence[Task], jobs: int, polite: bool) -> list[Any]:
    """Worker processes, each known to readers as somebody who prepares. They end when this process does."""
    context = multiprocessing.get_context("spawn")
    workers = []
    for _ in range(jobs):
        ready = context.Event()
        given = (corpus.folder, corpus.manifest, config, tasks, polite, ready)
        workers.append((context.Process(target=_worker, args=given, daemon=True), ready))
    for process, _ in workers:
        process.start()
    for process, ready in workers:
        while not ready.wait(POLL_SECONDS) and process.is_alive():
            pass
    return [process for process, _ in workers]


def _worker(
    folder: Path, manifest: dict[str, Any], config: DataConfig, tasks: Sequence[Task], polite: bool, ready: Any
) -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends its workers
    if polite and hasattr(os, "nice"):
        os.nice(10)  # training has the processor first
    with _claim(folder):
        ready.set()
        corpus = Corpus(folder, manifest, Tokenizer.load(folder / "tokenizer.json"), [], config.window)
        try:
            _work(corpus, config, tasks, lambda done: None)
        except OSError as error:  # not even the reason of a failure could be written
            sys.exit(f"error: {_words(error)}")


def _await(
    corpus: Corpus, pieces: dict[int, Pieces], needed: Sequence[Task], workers: list[Any], tell: Callable[[float], None]
) -> None:
    """Returns when all of ``needed`` are there or have failed, or nobody prepares them any more."""
    while True:
        # asked before the look at the pieces, so that the last one of a worker that ends is seen
        at_work = any(worker.is_alive() for worker in workers) or being_prepared(corpus.folder)
        there = {context: found.prepared() | found.failed() for context, found in pieces.items()}
        done = sum(number in there[context] for context, number in needed)
        tell(done / len(needed))
        if done == len(needed) or not at_work:
            break
        time.sleep(POLL_SECONDS)
