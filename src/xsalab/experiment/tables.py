"""The numbers of an experiment as a few Parquet files: small enough to be published beside a report.

scores.parquet      one row a run and validation document: value (nats) and weight (bytes)
mechanism.parquet   one row a run, step, layer and head, over the whole context (eval/diagnostics.py)
geometry.parquet    one row a run, step and matrix (optim/geometry.py), without the sketches
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..files import make_folder
from .design import Experiment, expand
from .mechanism import stored
from .store import RunStore, read_parquet, write_rows


def write_tables(experiment: Experiment, store: RunStore, folder: Path) -> list[Path]:
    """Writes what the finished runs stored, each table whole or not at all; one that would be empty is left out."""
    make_folder(folder)
    tables: dict[str, list[dict[str, Any]]] = {"scores": [], "mechanism": [], "geometry": []}
    for cell in expand(experiment):
        run = store.run(cell)
        if run.state != "finished":
            continue
        where = {"point": cell.point, "arm": cell.arm, "seed": cell.seed}
        scores = read_parquet(run.path / "scores.parquet").to_pylist()
        tables["scores"] += [{**where, **{name: row[name] for name in ("item", "value", "weight")}} for row in scores]
        tables["mechanism"] += [
            {**where, **{name: value for name, value in row.items() if name not in ("start", "end")}}
            for row in stored(run.path, "mechanism")
            if row["alpha"] is not None  # which a range of positions has not
        ]
        tables["geometry"] += [
            {**where, **{name: value for name, value in row.items() if name != "sketch"}}
            for row in stored(run.path, "geometry")
        ]
    paths: list[Path] = []
    for name, rows in tables.items():
        if rows:
            paths.append(folder / f"{name}.parquet")
            write_rows(paths[-1], rows)
    return paths
