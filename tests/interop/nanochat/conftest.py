"""A stand-in checkout that can be imported in this process, and what importing it left is taken out again."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanochat_standin import write_standin


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = write_standin(tmp_path / "checkout")
    monkeypatch.syspath_prepend(folder)
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] in ("nanochat", "scripts")]:
        del sys.modules[name]
