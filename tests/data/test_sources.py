"""Sources: what is read, in which order, what is held out, and what a broken file says."""

from __future__ import annotations

import gzip
import json
import sysconfig
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from data.texts import sentences
from xsalab.config import build
from xsalab.data import DataConfig
from xsalab.data.sources import climbmix_numbers, open_source, read_texts, split_module


def texts_of(config: DataConfig, side: str = "train", skipped: Counter[str] | None = None) -> list[str]:
    return [d.text for d in open_source(config).documents(side, Counter() if skipped is None else skipped)]


# The standard library


def test_modules_are_split_without_loss_and_never_within_a_line() -> None:
    sizes = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:150]:
        text = path.read_bytes().decode("utf-8")
        parts = split_module(text)
        assert "".join(parts) == text
        assert all(part.endswith("\n") for part in parts[:-1])
        sizes += [len(part) for part in parts[:-1]]
    assert 2_500 <= median(sizes) <= 4_500


def test_modules_are_cut_before_a_statement_that_follows_a_blank_line() -> None:
    block = "import a\n" + "import b\n" * 100 + "def f(x):\n    y = 1\n\n    return x\n\n\n"
    text = block * 12
    parts = split_module(text)
    assert "".join(parts) == text
    assert len(parts) > 3
    assert all(part.startswith("import a\n") for part in parts)
    table = '    "entry": 1,\n' * 2_000  # no blank line anywhere: cut at some line
    assert max(map(len, split_module(table))) < 10_100


def test_stdlib_modules_are_whole_on_one_side() -> None:
    source = open_source(DataConfig())
    train, validation = ({file.name for file in side} for side in (source.train, source.validation))
    assert not train & validation
    assert "json/decoder.py" in train | validation
    assert not any({"test", "tests", "site-packages"} & set(name.split("/")) for name in train | validation)
    size = {file.name: file.path.stat().st_size for file in source.files}
    assert 0.02 < sum(size[name] for name in validation) / sum(size.values()) <= 0.03


def test_stdlib_files_that_are_not_utf8_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(40):
        (tmp_path / f"module{i}.py").write_text(f"x = {i}\n" * 9, encoding="utf-8")
    (tmp_path / "latin.py").write_bytes(b"# \xe9t\xe9\n" * 9)
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_x.py").write_text("left = 'out'\n", encoding="utf-8")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    skipped: Counter[str] = Counter()
    config = DataConfig(validation_fraction=0.2)
    both = texts_of(config, "train", skipped) + texts_of(config, "validation", skipped)
    assert sorted(both) == sorted(f"x = {i}\n" * 9 for i in range(40))
    assert skipped == {"not UTF-8": 1}


# Files and folders


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "jsonl.zst"])
def test_json_lines_give_their_texts_in_order(tmp_path: Path, suffix: str) -> None:
    """F074: empty, missing and blank texts are skipped and counted; the order and the numbers of the rest stay."""
    texts = ["one", "", None, "  \n", "zwei é 😀", "three"]
    data = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    if suffix.endswith("gz"):
        data = gzip.compress(data, mtime=0)
    elif suffix.endswith("zst"):  # two frames, as tools that append write them
        half = len(data) // 2
        data = b"".join(zstandard.ZstdCompressor().compress(part) for part in (data[:half], data[half:]))
    path = tmp_path / f"corpus.{suffix}"
    path.write_bytes(data)
    (tmp_path / "held.txt").write_text("held out", encoding="utf-8")
    skipped: Counter[str] = Counter()
    source = open_source(DataConfig(source=str(path), validation=str(tmp_path / "held.txt")))
    documents = list(source.documents("train", skipped))
    assert [(d.id, d.text) for d in documents] == [
        (f"{path.name}:0", "one"),
        (f"{path.name}:4", "zwei é 😀"),
        (f"{path.name}:5", "three"),
    ]
    assert skipped == {"empty": 3}


def test_parquet_without_text_is_skipped_and_counted(shards: Callable[..., Path]) -> None:
    """F074: a column with a text, an empty text, None and spaces only."""
    folder = shards(["first", "", None, "   ", "last"], ["held out"])
    skipped: Counter[str] = Counter()
    assert texts_of(DataConfig(source=str(folder)), "train", skipped) == ["first", "last"]
    assert skipped == {"empty": 3}


def test_a_folder_is_read_recursively_by_name_without_hidden_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a/c.txt", ".hidden.txt", ".git/x.txt", "picture.png", "a/held.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name, encoding="utf-8")
    source = open_source(DataConfig(source=str(tmp_path), validation="a/held.txt"))
    assert [d.text for d in source.documents("train", Counter())] == ["a/c.txt", "a/z.md", "b.txt"]
    assert [d.id for d in source.documents("validation", Counter())] == ["a/held.txt:0"]
    assert source.ignored == 1


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "hello"}\n')
    assert [*read_texts(tmp_path / "a.txt"), *read_texts(tmp_path / "b.jsonl")] == ["hello", "hello"]


def test_documents_are_held_out_by_their_content(tmp_path: Path) -> None:
    """The side of a document does not depend on its place or on what else there is."""
    texts = sentences(400)
    for name, lines in (("a.jsonl", texts), ("b.jsonl", texts[::-1] + sentences(50, seed=1))):
        (tmp_path / name).write_text("".join(json.dumps({"text": t}) + "\n" for t in lines), encoding="utf-8")
    a, b = (DataConfig(source=str(tmp_path / name), validation_fraction=0.1) for name in ("a.jsonl", "b.jsonl"))
    held_a, held_b = set(texts_of(a, "validation")), set(texts_of(b, "validation"))
    assert 20 <= len(held_a) <= 60
    assert held_a == held_b & set(texts)
    assert sorted([*held_a, *texts_of(a)]) == sorted(texts)


def test_the_last_shard_is_validation(shards: Callable[..., Path]) -> None:
    folder = shards(["a"], ["b"], ["c"])
    assert texts_of(DataConfig(source=str(folder))) == ["a", "b"]
    assert texts_of(DataConfig(source=str(folder)), "validation") == ["c"]
    named = DataConfig(source=str(folder), validation="shard_00000.parquet")
    assert (texts_of(named), texts_of(named, "validation")) == (["b", "c"], ["a"])


# ClimbMix


def test_climbmix_shards_come_from_the_hub(shards: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shards(["zero"], ["one"], ["two"], ["three"])
    shards(["held out"], first=6542)
    asked = []

    def download(repo: str, name: str, *, repo_type: str) -> str:
        asked.append((repo, name, repo_type))
        return str(folder / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    config = DataConfig(source="climbmix:0-1,3")
    assert texts_of(config) == ["zero", "one", "three"]
    assert asked[-1] == ("karpathy/climbmix-400b-shuffle", "shard_06542.parquet", "dataset")
    assert texts_of(config, "validation") == ["held out"]
    assert texts_of(DataConfig(source="climbmix:0", validation="shard_00002.parquet"), "validation") == ["two"]


def test_a_failed_download_names_the_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: object, **kwargs: object) -> str:
        raise huggingface_hub.errors.OfflineModeIsEnabled("offline")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    with pytest.raises(OSError, match=r"shard_00002\.parquet .*offline"):
        open_source(DataConfig(source="climbmix:2"))


def test_climbmix_numbers() -> None:
    assert climbmix_numbers("climbmix:0-3") == [0, 1, 2, 3]
    assert climbmix_numbers("climbmix:5,0-2, 1") == [0, 1, 2, 5]


@pytest.mark.parametrize("shards", ["", "3-1", "6542", "0-6542", "a", "-1", "1;2"])
def test_climbmix_numbers_out_of_range_are_refused(shards: str) -> None:
    with pytest.raises(ValueError, match=r"source = .*0 to 6541.*climbmix:0-7"):
        DataConfig(source=f"climbmix:{shards}")


# Bad input


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("source", " "),
        ("validation_fraction", 0.0),
        ("validation_fraction", 1.0),
        ("validation_fraction", float("nan")),
        ("tokenizer_megabytes", 0),
        ("tokenizer_megabytes", float("inf")),
        ("pack_buffer", 0),
    ],
)
def test_values_out_of_range_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{field} = "):
        build(DataConfig, {field: value})


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.source = .*nowhere.*no such file or folder"):
        open_source(DataConfig(source=str(tmp_path / "nowhere")))


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the folder is empty; suffixes that work: \.txt, "):
        open_source(DataConfig(source=str(tmp_path)))


@pytest.mark.parametrize("name", ["", "a.doc"], ids=["folder", "file"])
def test_a_source_without_a_usable_file_lists_the_suffixes(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.doc").write_text("x", encoding="utf-8")
    with pytest.raises(ValueError, match=r"cannot be read|can be read; suffixes that work: \.txt, "):
        open_source(DataConfig(source=str(tmp_path / name)))


def test_a_single_shard_needs_a_validation_file(shards: Callable[..., Path]) -> None:
    """F059: with one shard nothing would be left to train on."""
    folder = shards(["a"])
    with pytest.raises(ValueError, match=r"at least two .*data\.validation"):
        open_source(DataConfig(source=str(folder)))
    with pytest.raises(ValueError, match="is the only file"):
        open_source(DataConfig(source=str(folder), validation="shard_00000.parquet"))


def test_an_unknown_validation_file_is_named(shards: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match=r"data\.validation = 'shard_9\.parquet': neither a file nor"):
        open_source(DataConfig(source=str(shards(["a"], ["b"])), validation="shard_9.parquet"))


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_truncated_shard_is_named_before_anything_is_read(shards: Callable[..., Path], share: float) -> None:
    """F060: a shard cut off by a broken download, whichever it is."""
    folder = shards(sentences(50), sentences(50, 1), sentences(50, 2))
    path = folder / "shard_00001.parquet"
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(ValueError, match=r"shard_00001\.parquet: not a complete Parquet file"):
        open_source(DataConfig(source=str(folder)))


def test_a_damaged_row_group_is_named(shards: Callable[..., Path]) -> None:
    folder = shards(sentences(50), ["held out"])
    path = folder / "shard_00000.parquet"
    data = bytearray(path.read_bytes())
    data[8:200] = b"\xff" * 192
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"shard_00000\.parquet: row group 0"):
        texts_of(DataConfig(source=str(folder)))


def test_a_parquet_file_without_text_lists_its_columns(shards: Callable[..., Path]) -> None:
    folder = shards(["a"], ["b"])
    pq.write_table(pa.table({"content": ["a"], "id": [1]}), folder / "shard_00000.parquet")
    with pytest.raises(ValueError, match="no column 'text'; its columns: content, id"):
        open_source(DataConfig(source=str(folder)))
    pq.write_table(pa.table({"text": [1]}), folder / "shard_00000.parquet")
    with pytest.raises(ValueError, match="column 'text' holds int64, not strings"):
        open_source(DataConfig(source=str(folder)))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"ok\nno \xff", r"a\.txt: not UTF-8 at byte 6 \(line 2\)"),
        ("a.md", b"\xef\xbb\xbf\xc3", r"a\.md: not UTF-8 at byte 3 \(line 1\)"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', r"a\.jsonl: line 2 is not UTF-8 \(byte 10 "),
        ("a.jsonl", b'{"text": "a"}\n{"text": "b"\n', r"a\.jsonl: line 2 is not JSON"),
        ("a.jsonl", b'{"txt": "a"}\n', r"a\.jsonl: line 1 has no field 'text'"),
        ("a.jsonl", b'["text"]\n', r"a\.jsonl: line 1 has no field 'text'"),
        ("a.jsonl", b'\n{"text": 3}\n', r"a\.jsonl: line 2: 'text' is int"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"a\.jsonl: line 1: .*surrogate"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99, mtime=0)[:-12], r"a\.jsonl\.gz: damaged or cut off"),
        ("a.jsonl.gz", b"no gzip", r"a\.jsonl\.gz: damaged or cut off"),
        ("a.jsonl.zst", zstandard.compress(b'{"text": "a"}\n' * 99)[:-5], r"a\.jsonl\.zst: damaged or cut off"),
        ("a.jsonl.zst", b"no zstandard", r"a\.jsonl\.zst: damaged or cut off"),
    ],
)
def test_a_broken_text_file_is_named_with_the_place(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message):
        list(read_texts(tmp_path / name))
