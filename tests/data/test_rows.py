"""Preparing, packing and batches: nothing lost, nothing on both sides, a batch from (rows, seed, step) alone."""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.texts import sentences
from xsalab.data import Corpus, DataConfig, Rows, Tokenizer, batch_at, prepare
from xsalab.data import corpus as corpus_module
from xsalab.data import rows as rows_module
from xsalab.data.rows import Packing, nanochat_rows, pack

BOS, PAD = 1, 0


def documents_of(lengths: Sequence[int]) -> list[np.ndarray]:
    """Documents of these lengths in which no token occurs twice."""
    starts = np.cumsum([2, *lengths])
    return [np.arange(start, start + n) for start, n in zip(starts, lengths, strict=False)]


def packed(lengths: Sequence[int], width: int, buffer: int = 10) -> tuple[np.ndarray, Packing]:
    packing = Packing()
    rows = list(pack(documents_of(lengths), bos=BOS, pad=PAD, width=width, buffer=buffer, packing=packing))
    return np.array(rows).reshape(-1, width), packing


# Packing

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


@given(lengths=LENGTHS, width=st.integers(2, 40), buffer=st.integers(1, 12))
@settings(max_examples=200, deadline=None)
def test_every_token_is_a_target_once_after_its_predecessor(lengths: list[int], width: int, buffer: int) -> None:
    """F062: no token of a document is lost, however long it is."""
    rows, packing = packed(lengths, width, buffer)
    pairs = Counter((int(a), int(b)) for row in rows for a, b in pairwise(row) if b not in (BOS, PAD))
    expected = Counter()
    for document in documents_of(lengths):
        expected.update(zip([BOS, *document[:-1].tolist()], document.tolist(), strict=True))
    assert pairs == expected
    assert packing.rows * width == packing.tokens + packing.repeated + packing.padding
    assert packing.tokens == sum(lengths) + len(lengths)
    assert packing.documents == len(lengths)
    assert packing.padding == int((rows == PAD).sum()) < width
    assert not (rows[:-1] == PAD).any()


def simple_pack(lengths: Sequence[int], width: int, buffer: int) -> np.ndarray:
    """The rule again, in lists and linear searches."""
    coming = [[BOS, *d.tolist()] for d in documents_of(lengths)]
    waiting: list[list[int]] = []
    rows: list[list[int]] = [[]]
    while True:
        while coming and len(waiting) < buffer:
            waiting.append(coming.pop(0))
        if not waiting:
            break
        if len(rows[-1]) == width:
            rows.append([])
        fitting = [d for d in waiting if len(d) <= width - len(rows[-1])]
        chosen = max(fitting, key=len) if fitting else waiting[0]
        waiting = [d for d in waiting if d is not chosen]
        while len(rows[-1]) + len(chosen) > width:
            space = width - len(rows[-1])
            rows[-1] += chosen[:space]
            chosen = chosen[space - 1 :]
            rows.append([])
        rows[-1] += chosen
    rows[-1] += [PAD] * (width - len(rows[-1]))
    return np.array(rows)


@given(lengths=LENGTHS, width=st.integers(2, 40), buffer=st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_packing_is_best_fit_and_cuts_the_oldest(lengths: list[int], width: int, buffer: int) -> None:
    np.testing.assert_array_equal(packed(lengths, width, buffer)[0], simple_pack(lengths, width, buffer))


def test_one_document_of_fifty_contexts_is_packed_whole() -> None:
    """F062: nothing of a long document is thrown away."""
    rows, packing = packed([50 * 64], width=65)
    assert rows.shape == (50, 65)
    assert rows[:, 1:].ravel().tolist() == documents_of([50 * 64])[0].tolist()
    assert rows[:, 0].tolist() == [BOS, *rows[:-1, -1].tolist()]
    assert packing.summary(65) == {
        "rows": 50, "documents": 1, "tokens": 3201, "repeated": 49, "padding": 0, "cut_documents": 1, "waste": 0.0
    }  # fmt: skip


def test_waste_is_the_share_of_padding() -> None:
    _, packing = packed([3], width=8)
    assert packing.summary(8)["waste"] == 0.5


def test_a_one_token_document_shifts_nothing() -> None:
    """F074: its token is predicted from the start token, and from nothing else."""
    rows, _ = packed([1, 3], width=6)
    assert rows.tolist() == [[BOS, 3, 4, 5, BOS, 2]]


def test_two_million_tokens_pack_within_two_seconds() -> None:
    lengths = np.random.default_rng(0).integers(50, 2000, 2_000)
    documents = [np.ones(n, dtype=np.uint16) for n in lengths]
    start = time.perf_counter()
    for _ in pack(documents, bos=BOS, pad=PAD, width=1025, buffer=1000, packing=Packing()):
        pass
    assert time.perf_counter() - start < 2


# nanochat's packing


def simple_nanochat(lengths: Sequence[int], width: int) -> np.ndarray:
    coming = [[BOS, *d.tolist()] for d in documents_of(lengths)]
    waiting: list[list[int]] = []
    rows: list[list[int]] = []
    row: list[int] = []
    while True:
        while len(waiting) < 1000 and coming:
            waiting += coming[:128]
            coming = coming[128:]
        if not waiting:
            return np.array(rows)
        space = width - len(row)
        lengths_now = [len(d) if len(d) <= space else 0 for d in waiting]
        best = lengths_now.index(max(lengths_now)) if max(lengths_now) else -1
        if best < 0:
            best = min(range(len(waiting)), key=lambda i: len(waiting[i]))
        row += waiting.pop(best)[:space]
        if len(row) == width:
            rows.append(row)
            row = []


def test_nanochat_rows_follow_nanochat_s_rule() -> None:
    lengths = np.random.default_rng(1).integers(1, 90, 1500).tolist()
    rows = nanochat_rows(documents_of(lengths), BOS, 65)
    np.testing.assert_array_equal(rows, simple_nanochat(lengths, 65))
    assert (rows[:, 0] == BOS).all()
    np.testing.assert_array_equal(nanochat_rows(documents_of(lengths), BOS, 65, limit=7), rows[:7])
    assert nanochat_rows([], BOS, 65).shape == (0, 65)


# Batches

ROWS = Rows(np.arange(1, 70 * 9 + 1, dtype=np.uint16).reshape(70, 9), pad=0, digest="x")


def ids(step: int, rows: Rows = ROWS, seed: int = 0, batch_rows: int = 8, **options: object) -> list[int]:
    return batch_at(rows, seed=seed, step=step, batch_rows=batch_rows, **options).row_ids.tolist()  # type: ignore[arg-type]


def test_every_epoch_is_a_permutation_of_all_rows() -> None:
    """F055, F084: the pass over the end of the data goes on with the next epoch, in another order."""
    stream = [i for step in range(35) for i in ids(step)]  # 4 epochs of 70
    epochs = [stream[e * 70 : (e + 1) * 70] for e in range(4)]
    assert all(sorted(epoch) == list(range(70)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert ids(0, seed=1) != ids(0)


def test_a_batch_depends_on_its_step_alone() -> None:
    """F082, F084, F086: any step in any order, after any other, in a fresh cache, in the second epoch too."""
    straight = [ids(step) for step in range(20)]
    rows_module._epoch.cache_clear()
    assert [ids(step) for step in reversed(range(20))] == straight[::-1]
    assert ids(13, seed=5) != straight[13]
    assert ids(13) == straight[13]


def test_a_late_step_costs_what_an_early_one_costs() -> None:
    """F086: no walk through the samples before it."""
    start = time.perf_counter()
    ids(10**9)
    assert time.perf_counter() - start < 0.1


def test_the_order_of_rows_never_changes() -> None:
    """A new release of numpy, or of this file, must not train on other batches under the same seed."""
    assert ids(0) == [66, 0, 54, 43, 69, 38, 21, 2]
    assert ids(9, seed=3) == [9, 31, 27, 59, 30, 7, 32, 8]


def test_permuted_rows_are_the_same_set_in_another_order() -> None:
    plain, permuted = [ids(s) for s in range(30)], [ids(s, permute=True) for s in range(30)]
    assert [sorted(p) for p in permuted] == [sorted(p) for p in plain]
    assert sum(a != b for a, b in zip(plain, permuted, strict=True)) >= 29
    assert permuted == [ids(s, permute=True) for s in range(30)]


@pytest.mark.parametrize("permute", [False, True])
def test_ranks_share_the_global_batch(permute: bool) -> None:
    for step in (0, 8):
        shares = [ids(step, rank=rank, world=4, permute=permute) for rank in range(4)]
        assert [i for share in shares for i in share] == ids(step, permute=permute)
        assert {len(share) for share in shares} == {2}


def test_targets_are_the_next_tokens_and_padding_has_none() -> None:
    tokens = np.array([[1, 5, 6, 7], [1, 8, 0, 0]], dtype=np.uint16)
    batch = batch_at(Rows(tokens, pad=0, digest="x"), seed=0, step=0, batch_rows=2)
    order = np.argsort(batch.row_ids.numpy())
    assert batch.inputs[order].tolist() == [[1, 5, 6], [1, 8, 0]]
    assert batch.targets[order].tolist() == [[5, 6, 7], [8, -1, -1]]
    assert batch.inputs.dtype == batch.targets.dtype == batch.row_ids.dtype == torch.int64
    assert batch.inputs.is_contiguous()
    assert batch.targets.is_contiguous()


def test_batches_cost_far_less_than_a_step() -> None:
    rows = Rows(np.ones((20_000, 257), dtype=np.uint16), pad=0, digest="x")
    batch_at(rows, seed=0, step=0, batch_rows=32)
    start = time.perf_counter()
    for step in range(100):
        batch_at(rows, seed=0, step=step, batch_rows=32)
    assert (time.perf_counter() - start) / 100 < 1e-3


def test_impossible_batches_are_refused() -> None:
    with pytest.raises(ValueError, match=r"batch_rows = 71: the corpus packs into 70 rows of 9 tokens"):
        ids(0, batch_rows=71)
    with pytest.raises(ValueError, match=r"batch_rows = 0: "):
        ids(0, batch_rows=0)
    with pytest.raises(ValueError, match=r"batch_rows = 8 does not divide among 3 processes: use 6 or 9"):
        ids(0, world=3)
    with pytest.raises(ValueError, match=r"seed = -1"):
        ids(0, seed=-1)


# Preparing


@pytest.fixture
def folder(shards: Callable[..., Path]) -> Path:
    return shards(sentences(60), sentences(60, 1), sentences(12, 2))


@pytest.fixture
def config(folder: Path) -> DataConfig:
    return DataConfig(source=str(folder))


@pytest.fixture
def corpus(config: DataConfig, tmp_path: Path) -> Corpus:
    return prepare(config, 300, tmp_path / "home")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != "manifest.json"}


def test_the_prepared_documents_are_the_source_s(corpus: Corpus) -> None:
    expected = {"train": sentences(60) + sentences(60, 1), "validation": sentences(12, 2)}
    for side, texts in expected.items():
        documents = corpus.documents(side)
        assert [corpus.tokenizer.decode(d.tokens.tolist()) for d in documents] == texts
        assert [d.bytes for d in documents] == [len(text.encode()) for text in texts]
        table = corpus.tokenizer.bytes_per_token()
        assert [int(table[d.tokens].sum()) for d in documents] == [d.bytes for d in documents]
        assert corpus.manifest[side]["documents"] == len(texts)
        assert corpus.manifest[side]["tokens"] == sum(len(d.tokens) for d in documents)
        assert corpus.manifest[side]["bytes"] == sum(d.bytes for d in documents)
    assert corpus.validation_documents()[3].id == "shard_00002.parquet:3"
    assert corpus.manifest["overlap"] == corpus.manifest["duplicates_dropped"] == 0


def test_the_manifest_names_every_file_with_its_hash(corpus: Corpus, folder: Path) -> None:
    manifest = json.loads((corpus.folder / "manifest.json").read_text(encoding="utf-8"))
    assert manifest == corpus.manifest
    for place, records in ((folder, manifest["sources"]), (corpus.folder, manifest["files"])):
        for name, record in records.items():
            assert record["sha256"] == hashlib.sha256((place / name).read_bytes()).hexdigest()
    assert set(manifest["sources"]) == {f"shard_0000{i}.parquet" for i in range(3)}
    assert set(manifest["files"]) == set(contents(corpus.folder))
    assert manifest["tokenizer"] == corpus.tokenizer.digest


def test_the_unigram_entropy_is_that_of_the_validation_tokens(corpus: Corpus) -> None:
    tokens = [int(t) for d in corpus.validation_documents() for t in d.tokens]
    size = sum(len(text.encode()) for text in sentences(12, 2))
    bits = -sum(n * math.log2(n / len(tokens)) for n in Counter(tokens).values())
    assert corpus.manifest["unigram_bits_per_byte"] == pytest.approx(bits / size, rel=1e-12)


def test_rows_hold_every_document(corpus: Corpus) -> None:
    rows = corpus.rows(31)
    assert rows.tokens.shape == (len(rows), 32)
    assert rows.context == 31
    base = rows.tokens
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    assert isinstance(base, mmap.mmap)
    bos = corpus.tokenizer.bos
    pairs = Counter((int(a), int(b)) for row in rows.tokens for a, b in pairwise(row))
    expected = Counter()
    for document in corpus.documents("train"):
        expected.update(zip([bos, *document.tokens[:-1].tolist()], document.tokens.tolist(), strict=True))
    assert Counter({p: n for p, n in pairs.items() if p[1] not in (bos, rows.pad)}) == expected
    assert rows.counts["tokens"] == corpus.manifest["train"]["tokens"] + 120
    assert corpus.rows(31).digest == rows.digest != corpus.rows(15).digest


def test_preparing_twice_gives_the_same_files(config: DataConfig, corpus: Corpus, tmp_path: Path) -> None:
    again = prepare(config, 300, tmp_path / "elsewhere")
    assert contents(again.folder) == contents(corpus.folder)
    assert again.rows(20).digest == corpus.rows(20).digest


def test_a_prepared_corpus_is_reused(
    config: DataConfig, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus.rows(16)
    monkeypatch.setattr(corpus_module, "_build", None)
    monkeypatch.setattr(corpus_module, "pack", None)
    again = prepare(config, 300, tmp_path / "home")
    assert (again.folder, again.manifest, again.notes) == (corpus.folder, corpus.manifest, [])
    assert len(again.rows(16)) == corpus.rows(16).counts["rows"]


def test_progress_is_told_in_order(config: DataConfig, tmp_path: Path) -> None:
    told: list[tuple[str, float]] = []
    prepare(config, 300, tmp_path / "home", lambda stage, share: told.append((stage, share)))
    assert list(dict.fromkeys(stage for stage, _ in told)) == [
        "reading", "training the tokenizer", "tokenising train", "tokenising validation", "prepared"
    ]  # fmt: skip
    for stage in ("tokenising train", "tokenising validation"):
        shares = [share for name, share in told if name == stage]
        assert shares == sorted(shares)
        assert 0 <= shares[0] < shares[-1] <= 1
        assert shares[-1] > 0.5  # not 1: half of so small a file is its footer


def test_a_shard_added_later_changes_nothing(
    config: DataConfig, corpus: Corpus, shards: Callable[..., Path], tmp_path: Path
) -> None:
    """F058: the validation text is fixed when the corpus is prepared, not by what is last in the folder."""
    shards(sentences(9, 3), first=3)
    again = prepare(config, 300, tmp_path / "home")
    assert [d.id for d in again.validation_documents()] == [d.id for d in corpus.validation_documents()]
    assert again.manifest == corpus.manifest
    (note,) = again.notes
    assert "1 file(s) added" in note
    assert "shard_00003.parquet" in note


def test_changed_and_lost_sources_are_told(
    config: DataConfig, corpus: Corpus, folder: Path, shards: Callable[..., Path], tmp_path: Path
) -> None:
    os.utime(folder / "shard_00001.parquet")  # touched, the content is the same
    assert prepare(config, 300, tmp_path / "home").notes == []
    shards(sentences(61))
    (folder / "shard_00001.parquet").unlink()
    gone, changed = prepare(config, 300, tmp_path / "home").notes
    assert "gone" in gone
    assert "shard_00001" in gone
    assert "changed" in changed
    assert "shard_00000" in changed
    shutil.rmtree(folder)
    assert "3 file(s) are gone" in prepare(config, 300, tmp_path / "home").notes[0]


def test_no_document_is_on_both_sides(shards: Callable[..., Path], tmp_path: Path) -> None:
    """F064: a training document that is held out as well is dropped and counted, whatever the sizes are."""
    held = sentences(12, 2)
    folder = shards(sentences(60) + held[:5], held[3:7] + sentences(60, 1), held)
    corpus = prepare(DataConfig(source=str(folder)), 300, tmp_path / "home")
    hashes = [
        set(pq.read_table(corpus.folder / f"{side}.documents.parquet").column("sha256").to_pylist())
        for side in ("train", "validation")
    ]
    assert not hashes[0] & hashes[1]
    assert hashes[1] == {hashlib.sha256(text.encode()).digest() for text in held}
    assert corpus.manifest["overlap"] == 0
    assert corpus.manifest["duplicates_dropped"] == 9
    assert corpus.manifest["train"]["documents"] == 120


@pytest.mark.parametrize("fraction", [0.05, 0.3])
def test_a_split_by_content_is_disjoint(tmp_path: Path, fraction: float) -> None:
    """F064: with the default and with another size of validation."""
    texts = sentences(200) + sentences(20)
    lines = [*texts, "", None]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in lines), encoding="utf-8")
    config = DataConfig(source=str(tmp_path / "a.jsonl"), validation_fraction=fraction)
    corpus = prepare(config, 300, tmp_path / "home")
    sides = [{corpus.tokenizer.decode(d.tokens) for d in corpus.documents(side)} for side in ("train", "validation")]
    assert not sides[0] & sides[1]
    assert sides[0] | sides[1] == set(texts)
    assert corpus.manifest["skipped"] == {"empty": 2}  # though both sides read the file


def test_skipped_texts_are_in_the_manifest(shards: Callable[..., Path], tmp_path: Path) -> None:
    """F074: None, empty and blank texts are counted once, and the rest keeps its order."""
    folder = shards([*sentences(60), "", None, "  ", *sentences(9, 1)], [None, *sentences(5, 2)])
    corpus = prepare(DataConfig(source=str(folder)), 300, tmp_path / "home")
    assert corpus.manifest["skipped"] == {"empty": 4}
    assert [d.id.split(":")[1] for d in corpus.documents("train")] == [*map(str, range(60)), *map(str, range(63, 72))]


def test_a_special_token_in_a_document_is_text(shards: Callable[..., Path], tmp_path: Path) -> None:
    """F067: the literal text of the start token makes no start of a document."""
    folder = shards([*sentences(60), "a <|bos|> b <|pad|>"], sentences(5, 2))
    corpus = prepare(DataConfig(source=str(folder)), 300, tmp_path / "home")
    assert not set(corpus.documents("train")[-1].tokens.tolist()) & set(corpus.tokenizer.specials.values())
    rows = corpus.rows(32)
    assert int((rows.tokens == corpus.tokenizer.bos).sum()) - rows.counts["documents"] in (0, 1, 2)


def test_an_existing_tokenizer_is_used(config: DataConfig, corpus: Corpus, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    Tokenizer.train(sentences(50, 7), 280).save(path)
    given = DataConfig(source=config.source, tokenizer=str(path))
    assert prepare(given, 280, tmp_path / "home").tokenizer.digest == Tokenizer.load(path).digest
    with pytest.raises(ValueError, match=r"vocab_size = 300: .*tokenizer\.json has 280 tokens"):
        prepare(given, 300, tmp_path / "home")


def test_the_validation_text_teaches_the_tokenizer_nothing(shards: Callable[..., Path], tmp_path: Path) -> None:
    a = prepare(DataConfig(source=str(shards(sentences(80), ["zzzz qqqq " * 90], folder="a"))), 300, tmp_path)
    b = prepare(DataConfig(source=str(shards(sentences(80), ["something else"], folder="b"))), 300, tmp_path)
    assert a.tokenizer.digest == b.tokenizer.digest


def test_one_document_and_a_validation_file(tmp_path: Path) -> None:
    """F062: a corpus of one document of 50 contexts loses nothing."""
    text = "".join(sentences(120))
    (tmp_path / "book.txt").write_text(text, encoding="utf-8")
    (tmp_path / "held.txt").write_text("".join(sentences(5, 1)), encoding="utf-8")
    config = DataConfig(source=str(tmp_path / "book.txt"), validation=str(tmp_path / "held.txt"))
    corpus = prepare(config, 300, tmp_path / "home")
    context = corpus.manifest["train"]["tokens"] // 50
    rows = corpus.rows(context).tokens.copy()
    targets = rows[:, 1:].ravel()
    assert corpus.tokenizer.decode(targets[targets != corpus.tokenizer.pad]) == text
    assert prepare(config, 300, tmp_path / "home").notes == []


# Faults


def test_a_corpus_too_small_for_validation_names_what_would_do(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in sentences(5)), encoding="utf-8")
    with pytest.raises(ValueError, match=r"too small for validation.*raise data\.validation_fraction") as caught:
        prepare(DataConfig(source=str(path), validation_fraction=0.001), 280, tmp_path / "home")
    enough = float(str(caught.value).split("(")[-1].split(" ")[0])
    config = DataConfig(source=str(path), validation_fraction=enough)
    assert prepare(config, 266, tmp_path / "home").manifest["validation"]["documents"] >= 1
    path.write_text(json.dumps({"text": "one"}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"too small.*1 distinct document"):
        prepare(DataConfig(source=str(path), validation_fraction=0.001), 280, tmp_path / "home")
    (tmp_path / "empty.txt").write_text(" ", encoding="utf-8")
    with pytest.raises(ValueError, match=r"data\.validation = .*empty\.txt.*no text"):
        prepare(DataConfig(source=str(path), validation=str(tmp_path / "empty.txt")), 280, tmp_path / "home")


def test_nothing_left_to_train_on_is_an_error(shards: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no training document is left"):
        prepare(DataConfig(source=str(shards(["a", "b"], ["b", "a"]))), 300, tmp_path / "home")


def test_a_failed_preparation_leaves_nothing(config: DataConfig, tmp_path: Path) -> None:
    """F072: a vocabulary larger than the corpus allows; the largest possible one is named."""
    with pytest.raises(ValueError, match=r"vocab_size = 5000: the training text allows at most \d+"):
        prepare(config, 5000, tmp_path / "home")
    assert {path.suffix for path in (tmp_path / "home" / "corpora").iterdir()} <= {".lock"}


def test_leftovers_of_a_killed_preparation_are_cleaned(config: DataConfig, corpus: Corpus, tmp_path: Path) -> None:
    partial = corpus.folder.with_name(corpus.folder.name + ".partial")
    expected = contents(corpus.folder)
    shutil.move(corpus.folder, partial)
    (partial / "train.bin").write_bytes(b"half")
    (partial / "stray.bin").write_bytes(b"x")
    assert contents(prepare(config, 300, tmp_path / "home").folder) == expected
    assert not partial.exists()


@pytest.mark.parametrize("name", ["train.bin", "validation.bin", "train.documents.parquet", "tokenizer.json"])
def test_a_damaged_corpus_is_refused(config: DataConfig, corpus: Corpus, tmp_path: Path, name: str) -> None:
    path = corpus.folder / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"{name}: changed since it was written .*; delete .* to prepare again"):
        prepare(config, 300, tmp_path / "home")
    path.write_bytes(data[:-1])
    with pytest.raises(ValueError, match=rf"{name}: has \d+ bytes instead of \d+"):
        prepare(config, 300, tmp_path / "home")
    path.unlink()
    with pytest.raises(ValueError, match=rf"{name}: missing"):
        prepare(config, 300, tmp_path / "home")


def test_damaged_rows_are_refused(corpus: Corpus) -> None:
    corpus.rows(16)
    path = corpus.folder / "rows-16.bin"
    path.write_bytes(path.read_bytes()[:-2] + b"\0\0")
    with pytest.raises(ValueError, match=r"rows-16\.bin: changed .*delete .*rows-16\.json to pack again"):
        corpus.rows(16)
    (corpus.folder / "rows-16.json").unlink()
    assert len(corpus.rows(16))
    with pytest.raises(ValueError, match="context = 0"):
        corpus.rows(0)


def test_interrupted_packing_starts_again(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = corpus.rows(16).digest
    for path in corpus.folder.glob("rows-16.*"):
        path.unlink()

    def broken(*args: object, **kwargs: object) -> object:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(corpus_module, "write_atomic", broken)  # killed between the rows and what is said of them
        with pytest.raises(KeyboardInterrupt):
            corpus.rows(16)
    with monkeypatch.context() as patch:
        patch.setattr(corpus_module, "_append", broken)
        with pytest.raises(KeyboardInterrupt):
            corpus.rows(16)
    assert not list(corpus.folder.glob("*.partial"))
    assert corpus.rows(16).digest == expected


def test_a_full_disk_is_told_in_bytes(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    message = r"disk full: 2,000 bytes needed, [\d,]+ free.*/dev/full"
    with pytest.raises(OSError, match=message), corpus_module._writing(Path("/dev/full")) as file:
        corpus_module._append(file, np.zeros(1000, dtype=np.uint16))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 5, 5))  # type: ignore[attr-defined]
    with pytest.raises(OSError, match=r"disk full: [\d,]+ bytes needed, 5 free"):
        corpus.rows(16)
    assert not list(corpus.folder.glob("rows-*"))


@pytest.mark.slow
def test_two_processes_prepare_one_corpus(folder: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from xsalab.data import DataConfig, prepare\n"
        "corpus = prepare(DataConfig(source=sys.argv[1]), 300, Path(sys.argv[2])); print(corpus.rows(16).digest)"
    )
    command = [sys.executable, "-c", program, str(folder), str(tmp_path / "home")]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    out = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert out[0] == out[1] != ""
