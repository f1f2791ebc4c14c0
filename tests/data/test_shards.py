"""Rows in shards: every row once an epoch, a batch from (seed, step) alone, and no wait without somebody who works."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

from data.texts import sentences
from xsalab.data import Corpus, DataConfig, Rows, batch_at, prepare, prepare_shards
from xsalab.data import shards as shards_module
from xsalab.data.preparing import prepare_piece
from xsalab.data.rows import Packing, pack
from xsalab.data.shards import Pieces, ShardRows

SHARDS = 7


@pytest.fixture
def config(shards: Callable[..., Path]) -> DataConfig:
    """Seven shards of 3 to 9 documents, and a validation shard."""
    return DataConfig(source=str(shards(*(sentences(3 + n, n) for n in range(SHARDS)), sentences(5, 99))), window=3)


@pytest.fixture
def corpus(config: DataConfig, tmp_path: Path) -> Corpus:
    """Tokenizer and validation side; no shard yet."""
    return prepare(config, 280, tmp_path / "home")


@pytest.fixture
def whole(corpus: Corpus, config: DataConfig) -> Corpus:
    prepare_shards(corpus, config, [24], [0], jobs=1)
    return corpus


def rows_of(corpus: Corpus, window: int = 3) -> Rows:
    return dataclasses.replace(corpus, window=window).rows(24)


def ids(rows: Rows, step: int, seed: int = 0, batch_rows: int = 6, **options: object) -> list[int]:
    batch = batch_at(rows, seed=seed, step=step, batch_rows=batch_rows, **options)  # type: ignore[arg-type]
    return batch.row_ids.tolist()


def packed_directly(corpus: Corpus, texts: Sequence[str], width: int) -> list[tuple[int, ...]]:
    """The rows of one shard without any of the code that prepares shards."""
    documents = [np.array(tokens) for tokens in corpus.tokenizer.encode(texts)]
    tokenizer = corpus.tokenizer
    rows = pack(documents, bos=tokenizer.bos, pad=tokenizer.pad, width=width, buffer=1000, packing=Packing())
    return [tuple(row.tolist()) for row in rows]


@pytest.fixture
def expected(corpus: Corpus) -> list[list[tuple[int, ...]]]:
    return [packed_directly(corpus, sentences(3 + n, n), 25) for n in range(SHARDS)]


# The order


@pytest.mark.parametrize("window", [1, 3, 7, 100])
def test_an_epoch_has_every_row_once_and_windows_are_of_their_shards(
    whole: Corpus, expected: list[list[tuple[int, ...]]], window: int
) -> None:
    rows = rows_of(whole, window)
    total = sum(map(len, expected))
    assert len(rows) == total == rows.counts["rows"]
    orders = []
    for epoch in range(3):
        found = rows.order(5, epoch * total, total)
        assert Counter(tuple(row) for row in rows.read(found).tolist()) == Counter(
            row for shard in expected for row in shard
        )
        orders.append(list(dict.fromkeys((found >> 32).tolist())))
        begin = 0
        while begin < SHARDS:  # the last window is smaller
            chosen = orders[-1][begin : begin + window]
            size = sum(len(expected[number]) for number in chosen)
            done = sum(len(expected[number]) for number in orders[-1][:begin])
            assert set((found[done : done + size] >> 32).tolist()) == set(chosen)
            begin += window
        if window == 1:  # rows of one shard are shuffled as well
            assert (np.diff(found[: len(expected[orders[-1][0]])]) != 1).any()
    assert len({tuple(order) for order in orders}) == 3


def test_a_row_s_id_names_its_shard_and_place(whole: Corpus, expected: list[list[tuple[int, ...]]]) -> None:
    rows = rows_of(whole)
    for number, shard in enumerate(expected):
        found = rows.read((number << 32) + np.arange(len(shard))[::-1])
        assert found.tolist() == [list(row) for row in shard[::-1]]
        assert found.dtype == np.int64


def test_the_order_of_rows_in_shards_never_changes(tmp_path: Path) -> None:
    """A new release of numpy, or of this file, must not train on other batches under the same seed."""
    about = dict.fromkeys(("documents", "tokens", "repeated", "padding", "cut_documents", "size", "sha256"), 0)
    pieces = Pieces(tmp_path, {"shards": ["a", "b", "c", "d"], "dtype": "uint16"}, 8)
    pieces.folder.mkdir(parents=True)
    for number, count in enumerate((3, 0, 4, 2)):
        pieces.path(number, "json").write_text(json.dumps({**about, "rows": count}), encoding="utf-8")
    found = ShardRows(pieces, 3, 0, "x").order(3, 5, 9)
    assert [(i >> 32, i & 0xFFFFFFFF) for i in found.tolist()] == GOLDEN


GOLDEN = [(0, 0), (2, 2), (2, 3), (2, 1), (3, 1), (2, 0), (2, 1), (2, 2), (2, 3)]


def test_a_batch_depends_on_its_step_alone(whole: Corpus) -> None:
    """F082, F084: in any order, over window and epoch borders, after reopening."""
    rows = rows_of(whole)
    straight = [ids(rows, step) for step in range(100)]
    assert 2 * len(rows) < 100 * 6
    reopened = rows_of(whole)
    assert [ids(reopened, step) for step in reversed(range(100))] == straight[::-1]
    assert ids(rows_of(whole), 99) == straight[99]  # the first that is asked for lies in the last epoch
    assert ids(rows, 0, seed=1) != straight[0]
    stream = [i for batch in straight for i in batch]
    for epoch in range(2):
        whole_epoch = rows.order(0, epoch * len(rows), len(rows)).tolist()
        assert stream[epoch * len(rows) : (epoch + 1) * len(rows)] == whole_epoch


@pytest.mark.parametrize("permute", [False, True])
def test_ranks_share_the_global_batch(whole: Corpus, permute: bool) -> None:
    for step in (0, 11):
        shares = [ids(rows_of(whole), step, rank=rank, world=3, permute=permute) for rank in range(3)]
        assert [i for share in shares for i in share] == ids(rows_of(whole), step, permute=permute)
    assert sorted(ids(rows_of(whole), 1, permute=True)) == sorted(ids(rows_of(whole), 1))


def test_targets_have_no_padding(whole: Corpus) -> None:
    rows = rows_of(whole)
    batch = batch_at(rows, seed=0, step=0, batch_rows=len(rows))
    read = rows.read(batch.row_ids.numpy())
    assert (rows.context, batch.inputs.shape) == (24, (len(rows), 24))
    np.testing.assert_array_equal(batch.inputs.numpy(), read[:, :-1])
    np.testing.assert_array_equal(batch.targets.numpy(), np.where(read[:, 1:] == rows.pad, -1, read[:, 1:]))
    assert (batch.targets == -1).any()


def test_impossible_batches_are_refused(whole: Corpus) -> None:
    rows = rows_of(whole)
    with pytest.raises(ValueError, match=rf"batch_rows = 900: the corpus packs into {len(rows)} rows of 25 tokens"):
        ids(rows, 0, batch_rows=900)
    with pytest.raises(ValueError, match="batch_rows = 0"):
        ids(rows, 0, batch_rows=0)


# While shards are missing


def prepare_one(corpus: Corpus, config: DataConfig, number: int) -> None:
    pieces = Pieces(corpus.folder, corpus.manifest, 24)
    pieces.folder.mkdir(parents=True, exist_ok=True)
    prepare_piece(corpus, config, set(), pieces, number)


def test_a_batch_needs_the_shards_of_its_windows_alone(corpus: Corpus, config: DataConfig) -> None:
    """Training starts when one window is there, and reads what it would read if all were."""
    rows = rows_of(corpus)
    assert isinstance(rows, ShardRows)
    first = rows._of_window(0, 0, 0)
    for number in first:
        prepare_one(corpus, config, number)
    early = ids(rows, 0), ids(rows, 1, permute=True)
    digest = rows.digest
    with pytest.raises(ValueError, match=r"number of rows is not known: 4 shards are missing"):
        len(rows)
    assert rows.edge_steps(1000) == (0,)
    prepare_shards(corpus, config, [24], [0], jobs=1)
    again = rows_of(corpus)
    assert (ids(again, 0), ids(again, 1, permute=True)) == early
    assert again.digest == digest != rows_of(corpus, 2).digest


def test_a_missing_shard_that_nobody_prepares_is_an_error(corpus: Corpus) -> None:
    with pytest.raises(ValueError, match=r"shard \d \(shard_0000\d\.parquet\) is not prepared.*run: xsalab data FILE"):
        ids(rows_of(corpus), 0)


def test_a_reader_waits_as_long_as_somebody_prepares(
    corpus: Corpus, config: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards_module, "TELL_SECONDS", 0.0)
    monkeypatch.setattr(shards_module, "POLL_SECONDS", 0.02)
    corpus.rows(24)
    (corpus.folder / "shards").mkdir()
    lock = FileLock(corpus.folder / "shards" / "worker-4.lock", thread_local=False)
    lock.acquire()

    def later() -> None:
        time.sleep(0.2)
        for number in range(SHARDS):
            prepare_one(corpus, config, number)
        lock.release()

    thread = threading.Thread(target=later)
    thread.start()
    with pytest.warns(UserWarning, match=r"waiting for shard \d \(shard_0000\d\.parquet\), which is being prepared"):
        waited = ids(rows_of(corpus), 0)
    thread.join()
    assert waited == ids(rows_of(corpus), 0)


def test_a_reader_is_told_why_a_shard_failed(corpus: Corpus) -> None:
    rows = rows_of(corpus)
    assert isinstance(rows, ShardRows)
    rows.pieces.folder.mkdir(parents=True)
    number = rows._of_window(0, 0, 0)[0]
    rows.pieces.path(number, "error").write_text("the network is gone", encoding="utf-8")
    with pytest.raises(ValueError, match=rf"shard {number} .*could not be prepared: the network is gone"):
        ids(rows, 0)


# Faults


def test_a_damaged_piece_is_named_and_prepared_again(whole: Corpus, config: DataConfig) -> None:
    everything = len(rows_of(whole))
    expected = ids(rows_of(whole), 0, batch_rows=everything)
    path = whole.folder / "shards" / "24" / "00002.bin"
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"00002\.bin: changed .*delete .*00002\.json and run: xsalab data FILE"):
        ids(rows_of(whole), 0, batch_rows=everything)
    path.with_suffix(".json").unlink()
    prepare_shards(whole, config, [24], [0], jobs=1)
    rows = rows_of(whole)
    assert ids(rows, 0, batch_rows=everything) == expected
    path.write_bytes(b"")  # after it was verified
    with pytest.raises(ValueError, match=r"00002\.bin: ends within row"):
        ids(rows, 0, batch_rows=everything)
    path.with_suffix(".json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"00002\.json: damaged; delete"):
        rows_of(whole)


def test_documents_of_the_training_side_are_refused(whole: Corpus) -> None:
    assert len(whole.documents("validation")) == 5
    with pytest.raises(ValueError, match=r"prepared in shards \(data\.window = 3\)"):
        whole.documents("train")


def test_no_file_stays_open(whole: Corpus) -> None:
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("this system does not tell a process's open files")
    rows = rows_of(whole)
    before = len(os.listdir("/proc/self/fd"))
    ids(rows, 0, batch_rows=len(rows))
    assert len(os.listdir("/proc/self/fd")) == before
