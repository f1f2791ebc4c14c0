"""A prepared folder is whole or not there, and what changed in it is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from xsalab.data.storage import batched, build_folder, fingerprint, threaded, to_json, verified_manifest


def fill(folder: Path) -> str:
    (folder / "a.bin").write_bytes(b"abc")
    manifest = {"files": {"a.bin": fingerprint(folder / "a.bin")}}
    (folder / "manifest.json").write_bytes(to_json(manifest))
    return "filled"


def test_a_folder_is_there_when_it_is_whole(tmp_path: Path) -> None:
    """What a killed process left is taken away first, and a failure leaves nothing."""
    left = tmp_path / "one.partial" / "left"
    left.mkdir(parents=True)
    assert build_folder(tmp_path / "one", fill) == "filled"
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["a.bin", "manifest.json"]

    def fails(folder: Path) -> None:
        fill(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_folder(tmp_path / "two", fails)
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_what_changed_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    build_folder(folder, fill)
    assert verified_manifest(folder) == json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    for content, message in ((b"abd", r"a\.bin: changed since"), (b"ab", r"a\.bin: has 2 bytes instead of 3")):
        (folder / "a.bin").write_bytes(content)
        with pytest.raises(ValueError, match=rf"{message}.*delete .*one to prepare again"):
            verified_manifest(folder)
    (folder / "a.bin").unlink()
    with pytest.raises(ValueError, match=r"a\.bin: missing; delete"):
        verified_manifest(folder)
    (folder / "manifest.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"manifest\.json: missing or damaged; delete"):
        verified_manifest(folder)


def test_threads_keep_the_order() -> None:
    assert list(threaded(sum, batched(range(100), 7))) == [sum(range(i, min(i + 7, 100))) for i in range(0, 100, 7)]
