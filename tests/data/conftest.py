"""Small sources for the tests of the data layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest


@pytest.fixture
def shards(tmp_path: Path) -> Callable[..., Path]:
    """Writes lists of texts as shard_00000.parquet, … into a folder, row groups of four rows."""

    def write(*texts: Sequence[str | None], folder: str = "shards", first: int = 0) -> Path:
        path = tmp_path / folder
        path.mkdir(exist_ok=True)
        for number, column in enumerate(texts, start=first):
            table = pa.table({"text": pa.array(column, pa.string())})
            pq.write_table(table, path / f"shard_{number:05d}.parquet", row_group_size=4)
        return path

    return write
