"""Where the real nanochat run lies: the variable XSALAB_SHARED, or ../shared/data beside the repository."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(scope="session")
def nanochat_d4() -> Path:
    root = Path(__file__).resolve().parents[2]
    shared = Path(os.environ.get("XSALAB_SHARED", root.parent / "shared" / "data"))
    folder = shared / "nanochat_d4"
    if not folder.is_dir():
        pytest.skip(f"no nanochat run at {folder}; set XSALAB_SHARED to the folder that holds nanochat_d4")
    return folder


@pytest.fixture(scope="session")
def expected(nanochat_d4: Path) -> dict[str, np.ndarray]:
    with np.load(nanochat_d4 / "expected.npz") as arrays:
        return {name: arrays[name] for name in arrays}
