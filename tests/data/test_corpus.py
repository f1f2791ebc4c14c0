"""Preparing a corpus: every document once, nothing on both sides, verified on reuse, whole or not there."""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from data.texts import sentences
from xsalab.data import Corpus, DataConfig, Tokenizer, prepare, storage
from xsalab.data import corpus as corpus_module


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
        patch.setattr(storage, "append", broken)
        with pytest.raises(KeyboardInterrupt):
            corpus.rows(16)
    assert not list(corpus.folder.glob("*.partial"))
    assert corpus.rows(16).digest == expected


def test_a_full_disk_is_told_in_bytes(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    message = r"disk full: 2,000 bytes needed, [\d,]+ free.*/dev/full"
    with pytest.raises(OSError, match=message), storage.writing(Path("/dev/full")) as file:
        storage.append(file, np.zeros(1000, dtype=np.uint16))
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
