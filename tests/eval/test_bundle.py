from __future__ import annotations

import hashlib
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from eval.bundles import MC, TASKS, write_bundle
from xsalab.eval.bundle import open_bundle, read_bundle


def zipped(folder: Path, inside: str = "") -> bytes:
    """The folder's files as a zip; ``inside``: a folder around them."""
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        for path in sorted(folder.rglob("*")):
            archive.write(path, inside + str(path.relative_to(folder)))
    return sink.getvalue()


@pytest.mark.parametrize("inside", ["", "eval_bundle/"])
def test_a_zip_holds_what_its_folder_holds(tmp_path: Path, inside: str) -> None:
    folder = write_bundle(tmp_path / "bundle")
    archive = tmp_path / "bundle.zip"
    archive.write_bytes(zipped(folder, inside))
    found = [read_bundle(open_bundle(str(path), "", tmp_path)) for path in (folder, archive)]
    parts = [[(task.name, task.kind, task.shots, task.delimiter, task.items) for task in b.tasks] for b in found]
    assert parts[0] == parts[1]
    assert [name for name, *_ in parts[0]] == list(TASKS)
    choose = found[0].tasks[0]
    assert choose.items[4].name == "5"
    assert choose.items[4].options == tuple(MC[4]["choices"])
    assert choose.baseline == pytest.approx(0.333)
    assert [task.delimiter for task in found[0].tasks] == [" ", " ", ": "]


def test_a_download_needs_its_checksum_and_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one the message gives it; with another nothing is kept; the second time nothing is fetched."""
    data = zipped(write_bundle(tmp_path / "bundle"))
    digest, address, cache, fetched = hashlib.sha256(data).hexdigest(), "https://example.org/b.zip", tmp_path / "c", []

    def fetch(url: str, **_: Any) -> io.BytesIO:
        fetched.append(url)
        return io.BytesIO(data)

    monkeypatch.setattr("urllib.request.urlopen", fetch)
    with pytest.raises(ValueError, match=f"none is stated: if you trust it, state sha256 = '{digest}'"):
        open_bundle(address, "", cache)
    with pytest.raises(ValueError, match="not 00 as stated"):
        open_bundle(address, "00", cache)
    assert list(cache.iterdir()) == []
    for _ in range(2):
        assert len(read_bundle(open_bundle(address, digest, cache)).tasks) == 3
    assert fetched == [address] * 3
    with pytest.raises(ValueError, match="give an https address"):
        open_bundle("http://example.org/b.zip", digest, cache)


def test_a_zip_with_another_checksum_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "b.zip"
    path.write_bytes(zipped(write_bundle(tmp_path / "bundle")))
    with pytest.raises(ValueError, match=r"b\.zip: its SHA-256 is [0-9a-f]{64}, not ff as stated"):
        open_bundle(str(path), "ff", tmp_path)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: None, "no such folder or zip"),
        (lambda p: p.mkdir(), r"no core\.yaml there"),
        (lambda p: p.write_text("text"), "not a zip file"),
        (lambda p: (write_bundle(p) / "core.yaml").write_text("icl_tasks: [{a: 1}]"), "tasks with a label each"),
        (lambda p: (write_bundle(p) / "core.yaml").write_text("a: [b"), r"core\.yaml: not a list icl_tasks"),
        (lambda p: (write_bundle(p) / "eval_meta_data.csv").unlink(), r"eval_meta_data\.csv: missing"),
        (lambda p: (write_bundle(p) / "eval_meta_data.csv").write_text("a,b\n1,2\n"), "needs columns 'Eval Task'"),
        (lambda p: (write_bundle(p) / "eval_meta_data.csv").write_bytes(b"\xff"), "not UTF-8"),
    ],
)
def test_what_is_no_bundle_is_said(tmp_path: Path, make: Any, words: str) -> None:
    make(tmp_path / "b")
    with pytest.raises(ValueError, match=words):
        read_bundle(open_bundle(str(tmp_path / "b"), "", tmp_path))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"icl_task_type": "essay"}, "icl_task_type = 'essay' is not known; known: multiple_choice, schema"),
        ({"num_fewshot": [1, 2]}, r"num_fewshot = \[1, 2\]"),
        ({"num_fewshot": [-1]}, "num_fewshot = -1"),
        ({"dataset_uri": "own/gone.jsonl"}, r"gone\.jsonl: missing from the bundle"),
        ({"items": ["{"]}, r"no item can be asked \(line 1: broken JSON"),
        ({"items": []}, "no item can be asked"),
    ],
)
def test_a_task_that_cannot_be_asked_leaves_the_others(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    """A missing file, an unknown kind, a file of broken lines: named, and the other tasks are there."""
    folder = write_bundle(tmp_path / "b", {**TASKS, "choose": {**TASKS["choose"], **change}})
    bundle = read_bundle(folder)
    assert [task.name for task in bundle.tasks] == ["which", "next"]
    assert list(bundle.faults) == ["choose"]
    with pytest.raises(ValueError, match=words):
        read_bundle(folder, ("choose",))


def test_a_task_without_a_baseline_is_named(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "b")
    (folder / "eval_meta_data.csv").write_text("Eval Task,Random baseline\nwhich,50\nnext,100\n", encoding="utf-8")
    bundle = read_bundle(folder)
    assert [task.name for task in bundle.tasks] == ["which"]
    assert all("has no random baseline from 0 to 100" in why for why in bundle.faults.values())


@pytest.mark.parametrize("label", ["../../evil", "a/b", "", ".x", "with space"])
def test_a_label_names_a_file_and_nothing_else(tmp_path: Path, label: str) -> None:
    """A bundle writes nothing outside the folder of its answers."""
    folder = write_bundle(tmp_path / "b")
    text = (folder / "core.yaml").read_text(encoding="utf-8").replace('"label": "next"', f'"label": "{label}"')
    (folder / "core.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="each once, of letters, digits"):
        read_bundle(folder)


def test_a_label_is_there_once(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "b")
    text = (folder / "core.yaml").read_text(encoding="utf-8").replace('"which"', '"next"')
    (folder / "core.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="label 'next': each once"):
        read_bundle(folder)


def test_lines_end_at_line_feeds_alone(tmp_path: Path) -> None:
    """Line ends of other kinds stand raw in JSON texts; the items keep their number and place."""
    odd = [{**MC[0], "query": "one\u2028two\u0085three"}, *MC[1:]]
    tasks = {"choose": {**TASKS["choose"], "items": [json.dumps(item, ensure_ascii=False) for item in odd]}}
    (task,) = read_bundle(write_bundle(tmp_path / "b", tasks)).tasks
    assert len(task.items) == 6
    assert task.items[0].text == "one\u2028two\u0085three"


def test_a_task_that_is_a_folder_or_damaged_leaves_the_others(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "b", {**TASKS, "choose": {**TASKS["choose"], "dataset_uri": "own"}})
    assert "cannot be read" in read_bundle(folder).faults["choose"]
    archive, whole = tmp_path / "b.zip", write_bundle(tmp_path / "whole")
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as written:
        for path in sorted(whole.rglob("*")):
            written.write(path, str(path.relative_to(whole)))
        place = written.getinfo("eval_data/own/which.jsonl").header_offset
    data = bytearray(archive.read_bytes())
    name = data.index(b"which.jsonl", place) + len(b"which.jsonl")
    data[name + 4 : name + 24] = b"\xff" * 20
    archive.write_bytes(bytes(data))
    bundle = read_bundle(open_bundle(str(archive), "", tmp_path))
    assert list(bundle.faults) == ["which"]
    assert "cannot be read" in bundle.faults["which"]


def test_a_name_that_is_no_task_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"task 'chose' is not in .*core\.yaml; its tasks: choose, which, next"):
        read_bundle(write_bundle(tmp_path / "b"), ("chose",))


@pytest.mark.parametrize(
    ("item", "fault"),
    [
        ("{", "broken JSON"),
        ("[1]", "needs the fields query and choices"),
        ({"query": "q", "gold": 0}, "needs the fields query and choices"),
        ({"query": 1, "choices": ["a", "b"], "gold": 0}, "query is text, and choices a list of texts"),
        ({"query": "q", "choices": "ab", "gold": 0}, "query is text, and choices a list of texts"),
        ({"query": "q", "choices": ["a"], "gold": 0}, "choices holds 1; a choice needs 2 or more"),
        ({"query": "q", "choices": ["a", "b"], "gold": 2}, "gold = 2 is none of the 2 options, 0 to 1"),
        ({"query": "q", "choices": ["a", "b"], "gold": True}, "gold = True is none"),
        ({"query": "q", "choices": ["a", "b"]}, "gold = None is none"),
    ],
)
def test_an_item_that_cannot_be_read_keeps_its_place_and_its_reason(tmp_path: Path, item: Any, fault: str) -> None:
    tasks = {"choose": {**TASKS["choose"], "items": [MC[0], item, MC[2]]}}
    (task,) = read_bundle(write_bundle(tmp_path / "b", tasks)).tasks
    assert [bool(found.fault) for found in task.items] == [False, True, False]
    assert fault in task.items[1].fault
