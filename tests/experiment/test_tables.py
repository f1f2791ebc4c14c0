"""The published tables hold what the runs stored, row by row."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from fake_runs import fake
from xsalab.experiment.design import expand
from xsalab.experiment.store import write_rows
from xsalab.experiment.tables import write_tables


def test_tables_hold_every_finished_run(tmp_path: Path) -> None:
    """Scores sum to each run's bits; a waiting run has no row; ranges of positions and sketches are left out."""
    experiment, store = fake(tmp_path, change=lambda cell: {"state": "waiting"} if cell.seed == 1 else {})
    cells = [cell for cell in expand(experiment) if cell.seed != 1]
    first = store.run(cells[0])
    for kind, rows in {
        "mechanism": [
            {"step": 9, "layer": 0, "head": 1, "start": 0, "end": 8, "tokens": 16, "reach": 3.5, "alpha": 0.25},
            {"step": 9, "layer": 0, "head": 1, "start": 4, "end": 8, "tokens": 16, "reach": 5.5, "alpha": None},
        ],
        "geometry": [{"step": 4, "matrix": "w", "update_ratio": 0.5, "sketch": [1.0, 2.0]}],
    }.items():
        (first.path / kind).mkdir()
        write_rows(first.path / kind / "step-000000009.parquet", rows)
    paths = write_tables(experiment, store, tmp_path / "tables")
    tables = {path.stem: pq.read_table(path).to_pylist() for path in paths}
    where = {"point": cells[0].point, "arm": cells[0].arm, "seed": cells[0].seed}
    assert tables["mechanism"] == [
        {**where, "step": 9, "layer": 0, "head": 1, "tokens": 16, "reach": 3.5, "alpha": 0.25}
    ]
    assert tables["geometry"] == [{**where, "step": 4, "matrix": "w", "update_ratio": 0.5}]
    by_run: dict[tuple[str, str, int], float] = {}
    for row in tables["scores"]:
        key = row["point"], row["arm"], row["seed"]
        by_run[key] = by_run.get(key, 0.0) + row["value"]
    assert set(by_run) == {(cell.point, cell.arm, cell.seed) for cell in cells}
    for cell in cells:
        stored = sum(value for value, _ in store.run(cell).scores().values())
        assert by_run[cell.point, cell.arm, cell.seed] == pytest.approx(stored, rel=1e-12)


def test_an_empty_table_is_left_out(tmp_path: Path) -> None:
    experiment, store = fake(tmp_path)
    assert [path.name for path in write_tables(experiment, store, tmp_path / "t")] == ["scores.parquet"]
