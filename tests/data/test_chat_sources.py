"""Where conversations come from: files by their records, the hub by a stand-in, broken files by name and place."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from xsalab.data.chat_sources import BROKEN, ChatSource, distinct_names, read_records
from xsalab.data.sources import SourceFile

TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
QUESTION = {"question": "Q", "subject": "s", "choices": ["x", "y"], "answer": 1}


def contents(path: Path) -> list[Any]:
    return [record.content for record in read_records(SourceFile(path.name, path))]


@pytest.mark.parametrize(
    ("text", "where", "times"),
    [
        ("a.jsonl", "a.jsonl", 1),
        ("a.jsonl x 4", "a.jsonl", 4),
        (" my chats/a x.jsonl x4 ", "my chats/a x.jsonl", 4),
        ("hub:mmlu x 3", "hub:mmlu", 3),
    ],
)
def test_a_source_is_a_text_with_its_repetitions(text: str, where: str, times: int) -> None:
    assert ChatSource.parse(text) == ChatSource(where, times)


@pytest.mark.parametrize("text", ["", "  ", "a.jsonl x 0", "hub:smol", "hub:"])
def test_what_is_no_source_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"give a file, a folder or hub:NAME|use hub:smoltalk, hub:mmlu, hub:gsm8k"):
        ChatSource.parse(text)


def test_lines_of_messages_with_or_without_a_name(tmp_path: Path) -> None:
    """Blank lines are no records and count as lines; a byte order mark is none either."""
    path = tmp_path / "a.jsonl"
    path.write_text(f"\ufeff{json.dumps({'messages': TALK})}\n\n{json.dumps(TALK)}\n", encoding="utf-8")
    found = list(read_records(SourceFile("x/a.jsonl", path)))
    assert [record.content for record in found] == [{"messages": TALK}, TALK]
    assert [record.id for record in found] == ["x/a.jsonl:1", "x/a.jsonl:3"]
    assert found[1].place == f"{path}: line 3"
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert contents(packed) == contents(path)


def test_parquet_files_give_the_columns_that_count(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"messages": [TALK, TALK], "source": ["x", "y"]}), path)
    assert contents(path) == [{"messages": TALK}] * 2
    assert [record.place for record in read_records(SourceFile("a", path))] == [f"{path}: row 1", f"{path}: row 2"]
    pq.write_table(pa.Table.from_pylist([QUESTION]), path)
    assert contents(path) == [{key: QUESTION[key] for key in ("question", "choices", "answer")}]
    pq.write_table(pa.Table.from_pylist([{"question": "Q", "answer": "A", "id": 1}]), path)
    assert contents(path) == [{"question": "Q", "answer": "A"}]
    pq.write_table(pa.table({"text": ["a"], "id": [1]}), path)
    with pytest.raises(ValueError, match=r"a\.parquet: neither a column 'messages' nor .*; its columns: text, id"):
        contents(path)


def test_a_broken_line_is_a_record_with_a_fault(tmp_path: Path) -> None:
    """Those behind it are read; what is wrong with it is told."""
    path = tmp_path / "a.jsonl"
    lines = [b'{"messages": [', b"\xff", b"9" * 5000, b"[" * 200_000, b"[] []", json.dumps(TALK).encode()]
    path.write_bytes(b"\n".join(lines))
    *broken, last = read_records(SourceFile(path.name, path))
    assert (last.content, last.fault, last.place) == (TALK, None, f"{path}: line 6")
    faults = [record.fault for record in broken if record.fault is not None]
    assert [fault.reason for fault in faults] == [BROKEN] * 5
    assert [faults[number].detail for number in (0, 1, 4)] == [
        "Expecting value (character 15 of the line)", "not UTF-8 (byte 0 of the line)",
        "Extra data (character 4 of the line)",
    ]  # fmt: skip


def test_a_broken_parquet_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"messages": [TALK] * 2000}), path, compression="none")
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    with pytest.raises(ValueError, match=r"a\.parquet: not a complete Parquet file"):
        contents(path)
    path.write_bytes(whole[:4] + b"\xff" * 200 + whole[204:])
    with pytest.raises(ValueError, match=r"a\.parquet: damaged"):
        contents(path)


def test_files_folders_and_patterns(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "deep/c.parquet", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    def names(where: str) -> list[str]:
        return [file.name for file in ChatSource(str(tmp_path / where)).files()]

    assert names(".") == ["a.jsonl", "b.jsonl", "deep/c.parquet"]
    assert names("*.jsonl") == ["a.jsonl", "b.jsonl"]
    assert names("b.jsonl") == ["b.jsonl"]
    for where, message in (
        ("c.jsonl", "no such file or folder"),
        ("*.txt", "no such file or folder"),
        ("README.md", "this kind of file is not read; suffixes that work: .jsonl, "),
    ):
        with pytest.raises(ValueError, match=message):
            names(where)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no file"):
        names("empty")


def test_nanochat_s_mixture_comes_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolTalk, MMLU's auxiliary training questions and GSM8K by repository and file; nothing else is asked for."""
    asked = []

    def download(repo: str, name: str, *, repo_type: str) -> str:
        asked.append((repo, name, repo_type))
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        tables = {
            "data": [{"messages": TALK, "source": "x"}],
            "all": [QUESTION],
            "main": [{"question": "Q", "answer": "A"}],
        }
        pq.write_table(pa.Table.from_pylist(tables[path.parent.name]), path)
        return str(path)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    sources = [ChatSource.parse(text) for text in ("hub:smoltalk", "hub:mmlu x 3", "hub:gsm8k x 4")]
    files = [source.files() for source in sources]
    assert [len(group) for group in files] == [4, 1, 1]
    assert files[1][0].name == "cais/mmlu/all/auxiliary_train-00000-of-00001.parquet"
    assert {repo for repo, _, kind in asked if kind == "dataset"} == {
        "HuggingFaceTB/smol-smoltalk", "cais/mmlu", "openai/gsm8k",
    }  # fmt: skip
    assert [contents(group[0].path)[0].keys() for group in files] == [
        {"messages"}, {"question", "choices", "answer"}, {"question", "answer"},
    ]  # fmt: skip


def test_a_hub_that_is_away_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: object, **kwargs: object) -> str:
        raise huggingface_hub.errors.OfflineModeIsEnabled("offline")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    with pytest.raises(OSError, match=r"main/train-00000-of-00001\.parquet of openai/gsm8k could not be had: offline"):
        ChatSource("hub:gsm8k").files()


def test_equal_names_are_told_apart(tmp_path: Path) -> None:
    """Items of tables are named by file and line: the second source's file of the same name gets another."""
    files = [SourceFile("a.jsonl", tmp_path / folder / "a.jsonl") for folder in ("x", "y")]
    groups = distinct_names([[files[0]], [files[1]]])
    assert [file.name for group in groups for file in group] == ["a.jsonl", "1/a.jsonl"]
    with pytest.raises(ValueError, match=r"x/a\.jsonl: is named twice; ' x 2'"):
        distinct_names([[files[0]], [files[0]]])
