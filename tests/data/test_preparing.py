"""Preparing shards: what is whole stays, what failed is named, nothing is done twice, and 2,000 of them."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from filelock import FileLock

from data.texts import sentences
from xsalab.data import Corpus, DataConfig, batch_at, prepare, prepare_shards, sources
from xsalab.data import preparing as preparing_module
from xsalab.data.preparing import needed_order
from xsalab.data.rows import Packing, pack
from xsalab.data.shards import Pieces, ShardRows

SHARDS = 5


@pytest.fixture
def folder(shards: Callable[..., Path]) -> Path:
    return shards(*(sentences(20, n) for n in range(SHARDS)), sentences(5, 99))


@pytest.fixture
def config(folder: Path) -> DataConfig:
    return DataConfig(source=str(folder), window=2)


@pytest.fixture
def corpus(config: DataConfig, tmp_path: Path) -> Corpus:
    return prepare(config, 280, tmp_path / "home")


def pieces_of(corpus: Corpus, context: int = 24) -> Pieces:
    return Pieces(corpus.folder, corpus.manifest, context)


def contents(corpus: Corpus) -> dict[str, bytes]:
    folder = pieces_of(corpus).folder
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix != ".lock"}


# What is written


def test_pieces_are_the_shards_and_say_so(corpus: Corpus, config: DataConfig, folder: Path) -> None:
    assert corpus.described(24)["train"] == {"documents": 0, "tokens": 0, "bytes": 0}
    told: list[tuple[str, float]] = []
    prepare_shards(corpus, config, [24], [0], jobs=1, progress=lambda stage, share: told.append((stage, share)))
    assert {stage for stage, _ in told} == {"preparing 5 shards"}
    assert [share for _, share in told] == [0, 0.2, 0.4, 0.6, 0.8]
    assert set(contents(corpus)) == {f"0000{n}.{suffix}" for n in range(SHARDS) for suffix in ("bin", "json")}
    assert not list(pieces_of(corpus).folder.glob("*.lock"))
    for number in range(SHARDS):
        about = pieces_of(corpus).get(number)
        source = folder / f"shard_0000{number}.parquet"
        assert about["shard"] == source.name
        assert about["source"]["sha256"] == hashlib.sha256(source.read_bytes()).hexdigest()
        rows = pieces_of(corpus).path(number, "bin").read_bytes()
        assert (about["sha256"], about["size"]) == (hashlib.sha256(rows).hexdigest(), len(rows))
        assert about["text"]["bytes"] == sum(len(text.encode()) for text in sentences(20, number))
        assert about["rows"] * 25 * 2 == len(rows)
    described = corpus.described(24)
    assert described["train"]["documents"] == 100
    assert set(described["sources"]) == {f"shard_0000{n}.parquet" for n in range(SHARDS + 1)}
    summary = pieces_of(corpus).summary()
    assert (summary["prepared"], summary["shards"], summary["documents"]) == (5, 5, 100)
    assert summary["sha256"]


def test_the_same_shards_for_every_window_and_again(corpus: Corpus, config: DataConfig, tmp_path: Path) -> None:
    prepare_shards(corpus, config, [24], [0], jobs=1)
    before = contents(corpus)
    other = DataConfig(source=config.source, window=4)
    again = prepare(other, 280, tmp_path / "home")
    assert (again.folder, again.window) == (corpus.folder, 4)
    prepare_shards(again, other, [24], [7], jobs=1)
    assert contents(again) == before
    elsewhere = prepare(config, 280, tmp_path / "elsewhere")
    prepare_shards(elsewhere, config, [24], [3], jobs=1)
    assert contents(elsewhere) == before
    one = prepare(DataConfig(source=config.source), 280, tmp_path / "home")
    assert one.folder != corpus.folder
    assert one.documents("train")


def test_documents_that_are_held_out_are_dropped(shards: Callable[..., Path], tmp_path: Path) -> None:
    """F064, in shards; an empty shard has no rows and is passed over."""
    held = sentences(6, 9)
    folder = shards([*sentences(20), *held[:2], None], [held[3], "  "], sentences(20, 1), held)
    config = DataConfig(source=str(folder), window=1)
    corpus = prepare(config, 280, tmp_path / "home")
    prepare_shards(corpus, config, [24], [0], jobs=1)
    described = corpus.described(24)
    assert described["train"]["documents"] == 40
    assert described["duplicates_dropped"] == 3
    assert described["skipped"] == {"empty": 2}
    rows = corpus.rows(24)
    assert pieces_of(corpus).get(1)["rows"] == 0
    found = rows.order(0, 0, len(rows))
    assert len(set(found.tolist())) == len(rows)
    everything = " ".join(corpus.tokenizer.decode(row) for row in rows.read(found).tolist())
    assert not any(text[:14] in everything for text in held)


def test_nothing_left_to_train_on_is_an_error(shards: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no training document is left"):
        prepare(DataConfig(source=str(shards(["a"], ["b"], ["b", "a"])), window=1), 280, tmp_path / "home")


def test_shards_are_prepared_in_the_order_of_need() -> None:
    """The first windows of all seeds come first, so that every run can begin early."""
    orders = [needed_order(20, 20, [seed]) for seed in range(3)]
    merged = needed_order(20, 4, range(3))
    assert sorted(merged) == list(range(20))
    first = [n for order in orders for n in order[:4]]
    assert merged[: len(set(first))] == list(dict.fromkeys(first))
    assert merged[:4] == orders[0][:4]
    assert orders[0] != orders[1]


# Sources that have shards


def test_a_window_needs_shards(tmp_path: Path, shards: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match=r"window = -1: must be at least 0"):
        DataConfig(window=-1)
    with pytest.raises(ValueError, match=r"window = 8: 'stdlib' has no shards; use 0"):
        DataConfig(window=8)
    folder = shards(sentences(20), sentences(5, 1))
    (folder / "notes.txt").write_text("text", encoding="utf-8")
    with pytest.raises(ValueError, match=r"data\.window = 2: .*notes\.txt, which is no Parquet shard; use window = 0"):
        prepare(DataConfig(source=str(folder), window=2), 280, tmp_path)
    file = folder / "shard_00000.parquet"
    with pytest.raises(ValueError, match=r"data\.window = 2: .*is one file.*name a file in data\.validation"):
        prepare(DataConfig(source=str(file), window=2), 280, tmp_path)
    named = DataConfig(source=str(file), validation=str(folder / "shard_00001.parquet"), window=2)
    corpus = prepare(named, 280, tmp_path)
    prepare_shards(corpus, named, [24], [0], jobs=1)
    assert corpus.described(24)["train"]["documents"] == 20


class Hub:
    """The hub's cache with the shards of a folder: links to files that are named by their SHA-256."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder, self.cache = folder, cache
        self.asked: list[str] = []
        self.offline: set[str] = set()

    def download(self, repo: str, name: str, repo_type: str) -> str:
        self.asked.append(name)
        if name in self.offline or "all" in self.offline:
            raise RuntimeError("no network")
        data = (self.folder / name).read_bytes()
        blob, link = self.cache / "blobs" / hashlib.sha256(data).hexdigest(), self.cache / "snapshots" / name
        for path in (blob, link):
            path.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            blob.write_bytes(data)
            link.symlink_to(blob)
        return str(link)


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    (folder / f"shard_0000{SHARDS}.parquet").rename(folder / "shard_06542.parquet")
    found = Hub(folder, tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", found.download)
    monkeypatch.setattr(sources, "RETRY_SECONDS", (0.0, 0.0))
    return found


HUB = DataConfig(source="climbmix:0-4", window=2, tokenizer_megabytes=0.001)


def test_shards_are_downloaded_when_they_are_needed(hub: Hub, tmp_path: Path) -> None:
    corpus = prepare(HUB, 270, tmp_path / "home")
    assert set(hub.asked) - {"shard_06542.parquet"} == {min(corpus.manifest["shards"], key=sources.share_of)}
    assert corpus.manifest["sources"]["shard_06542.parquet"]["sha256"]
    hub.asked.clear()
    prepare_shards(corpus, HUB, [24], [0], jobs=1)
    assert sorted(hub.asked) == [f"shard_0000{n}.parquet" for n in range(SHARDS)]
    assert all(record["sha256"] for record in corpus.described(24)["sources"].values())


def test_a_failed_download_is_named_and_the_rest_is_kept(hub: Hub, tmp_path: Path) -> None:
    corpus = prepare(HUB, 270, tmp_path / "home")
    hub.offline.add("shard_00003.parquet")
    hub.asked.clear()
    with pytest.raises(ValueError, match=r"shard 3 \(shard_00003\.parquet\): .*no network\n1 of 5 shards") as caught:
        prepare_shards(corpus, HUB, [24], [0], jobs=1)
    assert "the same command continues" in str(caught.value)
    assert hub.asked.count("shard_00003.parquet") == 3
    assert pieces_of(corpus).prepared() == {0, 1, 2, 4}
    with pytest.raises(ValueError, match=r"shard 3 .*could not be prepared: .*no network"):
        pieces_of(corpus).get(3)
    hub.offline.clear()
    hub.asked.clear()
    prepare_shards(corpus, HUB, [24], [0], jobs=1)
    assert hub.asked == ["shard_00003.parquet"]
    assert pieces_of(corpus).prepared() == set(range(SHARDS))
    assert not pieces_of(corpus).failed()


def test_without_a_network_a_worker_gives_up(hub: Hub, tmp_path: Path) -> None:
    corpus = prepare(HUB, 270, tmp_path / "home")
    hub.offline.add("all")
    hub.asked.clear()
    with pytest.raises(ValueError, match="5 of 5 shards are not prepared"):
        prepare_shards(corpus, HUB, [24], [0], jobs=1)
    assert len(set(hub.asked)) == preparing_module.GIVE_UP < SHARDS


@pytest.mark.parametrize("window", [0, 2])
def test_a_shard_that_is_not_what_the_hub_says_is_refused(hub: Hub, tmp_path: Path, window: int) -> None:
    """In one piece as well: a disk's fault in the cache must not become training text."""
    config = DataConfig(source="climbmix:0-4", window=window, tokenizer_megabytes=0.001)
    link = Path(hub.download("", "shard_00002.parquet", "dataset"))
    pq.write_table(pa.table({"text": sentences(20, 50)}), link.resolve())  # readable, and other text
    with pytest.raises(ValueError, match=r"shard_00002\.parquet: damaged: .*delete .*blobs/[0-9a-f]{64} to download"):
        prepare_shards(prepare(config, 270, tmp_path / "home"), config, [24], [0], jobs=1)
    for path in (link.resolve(), link):
        path.unlink()
    corpus = prepare(config, 270, tmp_path / "home")
    if window:
        prepare_shards(corpus, config, [24], [0], jobs=1)
    good = hashlib.sha256((hub.folder / "shard_00002.parquet").read_bytes()).hexdigest()
    assert corpus.described(24)["sources"]["shard_00002.parquet"]["sha256"] == good


def test_a_source_that_changed_before_it_was_prepared_is_refused(
    corpus: Corpus, config: DataConfig, folder: Path, shards: Callable[..., Path]
) -> None:
    shards(sentences(21, 3), first=3)
    (folder / "shard_00001.parquet").unlink()
    with pytest.raises(ValueError, match=r"2 of 5 shards are not prepared"):
        prepare_shards(corpus, config, [24], [0], jobs=1)
    reasons = {n: pieces_of(corpus).path(n, "error").read_text(encoding="utf-8") for n in (1, 3)}
    assert "shard_00001.parquet: is gone since the corpus was prepared" in reasons[1]
    assert "shard_00003.parquet: changed since the corpus was prepared" in reasons[3]


def test_a_damaged_shard_is_named(corpus: Corpus, config: DataConfig, folder: Path) -> None:
    path = folder / "shard_00004.parquet"
    state, data = path.stat(), bytearray(path.read_bytes())
    data[-300:] = bytes(300)
    path.write_bytes(data)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    with pytest.raises(ValueError, match=r"shard 4 .*shard_00004\.parquet: not a complete Parquet file"):
        prepare_shards(corpus, config, [24], [0], jobs=1)
    assert pieces_of(corpus).prepared() == {0, 1, 2, 3}


# Several at a time


def test_a_shard_that_another_process_has_is_left_to_it(
    corpus: Corpus, config: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = pieces_of(corpus)
    pieces.folder.mkdir(parents=True)
    lock = FileLock(pieces.path(2, "lock"), thread_local=False)
    lock.acquire()
    written: list[tuple[int, bool]] = []
    plain = preparing_module.prepare_piece

    def watched(corpus: Corpus, config: DataConfig, held: set[bytes], pieces: Pieces, number: int) -> None:
        written.append((number, lock.is_locked))
        plain(corpus, config, held, pieces, number)

    monkeypatch.setattr(preparing_module, "prepare_piece", watched)
    thread = threading.Thread(target=lambda: (time.sleep(0.5), lock.release()))  # dies without a piece
    thread.start()
    prepare_shards(corpus, config, [24], [0], jobs=1)
    thread.join()
    assert written[-1] == (2, False)
    assert sorted(number for number, _ in written) == list(range(SHARDS))


def test_a_shard_prepared_meanwhile_is_not_prepared_again(
    corpus: Corpus, config: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another process between the look and the lock."""
    plain, asked = preparing_module.prepare_piece, []

    class Late(FileLock):
        def acquire(self, *args: Any, **options: Any) -> Any:
            path = Path(self.lock_file)
            if path.stem.isdecimal():
                plain(corpus, config, set(), pieces_of(corpus), int(path.stem))
            return super().acquire(*args, **options)

    monkeypatch.setattr(preparing_module, "FileLock", Late)
    monkeypatch.setattr(preparing_module, "prepare_piece", lambda *given: asked.append(given[-1]))
    prepare_shards(corpus, config, [24], [0], jobs=1)
    assert asked == []
    assert pieces_of(corpus).prepared() == set(range(SHARDS))


def test_a_killed_writer_leaves_no_piece(
    corpus: Corpus, config: DataConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Killed between the rows and what is said of them."""

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(preparing_module, "write_atomic", killed)
        with pytest.raises(KeyboardInterrupt):
            prepare_shards(corpus, config, [24], [0], jobs=1)
    assert pieces_of(corpus).prepared() == set()
    prepare_shards(corpus, config, [24], [0], jobs=1)
    other = prepare(config, 280, tmp_path / "other")
    prepare_shards(other, config, [24], [0], jobs=1)
    assert contents(other) == contents(corpus)


@pytest.mark.slow
def test_memory_does_not_grow_with_shards_or_documents(
    shards: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row group, a batch to encode, a block of rows to write: that is all that is held."""
    monkeypatch.setattr(preparing_module, "ENCODE_BATCH", 32)
    peaks = []
    for name, count, documents in (("few", 1, 150), ("many", 4, 150), ("long", 1, 600)):
        folder = shards(*(sentences(documents, n, words=30) for n in range(count)), sentences(5, 99), folder=name)
        config = DataConfig(source=str(folder), window=2, pack_buffer=4)
        corpus = prepare(config, 270, tmp_path / "home")
        tracemalloc.start()
        prepare_shards(corpus, config, [4], [0], jobs=1)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    few, many, long = peaks
    assert max(many, long) < 1.3 * few, peaks


# Two thousand

MANY, WINDOW, CONTEXT = 2000, 16, 32
PROGRAM = """
import sys, time
from pathlib import Path
from xsalab.data import DataConfig, batch_at, prepare, prepare_shards
if __name__ == "__main__":
    config = DataConfig(source=sys.argv[1], window=16, tokenizer_megabytes=0.01)
    corpus = prepare(config, 300, Path(sys.argv[2]))
    prepare_shards(corpus, config, [32], [0, 1], whole=False, jobs=2)
    rows = corpus.rows(32)
    print(rows.counts["prepared"], *(batch_at(rows, seed=0, step=s, batch_rows=8).row_ids.tolist() for s in (0, 1)))
    sys.stdout.flush()
    time.sleep(600)
"""


def texts_of(number: int) -> list[str]:
    return sentences(random.Random(number).randint(1, 4), number, words=20)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """2,000 shards of 1 to 4 documents, and a validation shard."""
    folder = tmp_path_factory.mktemp("many")
    for number in range(MANY):
        pq.write_table(pa.table({"text": texts_of(number)}), folder / f"shard_{number:05d}.parquet")
    pq.write_table(pa.table({"text": sentences(20, MANY)}), folder / f"shard_{MANY:05d}.parquet")
    yield folder
    shutil.rmtree(folder)


@pytest.mark.slow
def test_two_thousand_shards(many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begun by two processes, read before the last is there, killed, continued, and every row once an epoch."""
    home = tmp_path / "home"
    begun = subprocess.Popen([sys.executable, "-c", PROGRAM, str(many), str(home)], stdout=subprocess.PIPE, text=True)
    assert begun.stdout is not None
    count, _, early = begun.stdout.readline().partition(" ")
    assert WINDOW <= int(count) < MANY  # it could train now
    begun.send_signal(signal.SIGKILL)
    begun.communicate()
    config = DataConfig(source=str(many), window=WINDOW, tokenizer_megabytes=0.01)
    corpus = prepare(config, 300, home)
    pieces = Pieces(corpus.folder, corpus.manifest, CONTEXT)
    time.sleep(1.5)
    at_kill = pieces.prepared()
    time.sleep(0.7)
    assert pieces.prepared() == at_kill  # its workers ended with it
    assert WINDOW <= len(at_kill) < MANY
    written = {n: pieces.path(n, "json").stat().st_mtime_ns for n in at_kill}

    monkeypatch.setattr(os, "fsync", lambda handle: None)  # half of the time; what it is for was killed above
    prepare_shards(corpus, config, [CONTEXT], [0, 1], jobs=1)
    assert pieces.prepared() == set(range(MANY))
    assert {n: pieces.path(n, "json").stat().st_mtime_ns for n in at_kill} == written  # none was done again

    rows = corpus.rows(CONTEXT)
    assert isinstance(rows, ShardRows)
    batches = [batch_at(rows, seed=0, step=step, batch_rows=8).row_ids.tolist() for step in (0, 1)]
    assert " ".join(map(str, batches)) == early.strip()
    tokenizer, direct = corpus.tokenizer, Counter[bytes]()
    for number in range(MANY):
        documents = [np.array(tokens) for tokens in tokenizer.encode(texts_of(number))]
        packed = pack(documents, bos=tokenizer.bos, pad=tokenizer.pad, width=33, buffer=1000, packing=Packing())
        direct.update(row.tobytes() for row in packed)
    handles = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0
    for epoch in range(2):
        ids = rows.order(1, epoch * len(rows), len(rows))
        assert len(np.unique(ids)) == len(ids)
        assert Counter(row.tobytes() for row in rows.read(ids)) == direct
        shards = list(dict.fromkeys((ids >> 32).tolist()))
        assert shards != sorted(shards)
    assert not handles or len(os.listdir("/proc/self/fd")) <= handles
    assert json.loads(pieces.path(MANY - 1, "json").read_bytes())["shard"] == f"shard_{MANY - 1:05d}.parquet"
