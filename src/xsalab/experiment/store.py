"""One folder a run: configuration, fingerprint, status, metrics, scores, weights. Rows, never only means.

config.json        the resolved configuration
fingerprint.json   shared start, batches, corpus, software, device: what a partner must agree with
status.json        running, finished, diverged or failed, and how far
metrics.jsonl      one row a step while the run lives; metrics.parquet when it has ended
scores.parquet     one row a validation document: nats and bytes
model.safetensors  the weights after the last step
checkpoints/       while the run lives; what a diverged run leaves for inspection
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from ..eval import ItemScore
from ..files import explain_disk, write_atomic
from ..train.checkpoint import save_tensors
from .design import Cell, Experiment

STATES = ("waiting", "running", "finished", "diverged", "failed")
LONGEST_ROW = 65_536  # bytes


@dataclass(frozen=True)
class RunStore:
    """The folder of an experiment: ``out/experiments/NAME``."""

    folder: Path

    @classmethod
    def of(cls, experiment: Experiment, out: Path) -> RunStore:
        """Where the experiment's runs are kept under the folder ``out``."""
        return cls(out / "experiments" / experiment.name)

    def run(self, cell: Cell) -> RunFolder:
        """The run of a cell, there or not."""
        return RunFolder(self.folder / "runs" / cell.name)


@dataclass(frozen=True)
class RunFolder:
    """The files of one run."""

    path: Path

    def read(self, name: str) -> dict[str, Any]:
        """A JSON file of the folder; {} where it is not there. ValueError naming the file where it is damaged."""
        path = self.path / f"{name}.json"
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(content, dict):
                raise ValueError("not a table")
            return content
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise ValueError(f"{path}: damaged ({error}); delete the run's folder to run it again") from None

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Writes a JSON file whole or not at all."""
        write_atomic(self.path / f"{name}.json", json.dumps(content, indent=1, ensure_ascii=False))

    @property
    def status(self) -> dict[str, Any]:
        """``state``: "waiting", "running", "finished", "diverged" or "failed"; ``step`` of ``steps``.

        Of a finished run ``val_bpb``, or ``value`` of a command's. ValueError naming the file where that is not so.
        """
        found = {"state": "waiting", **self.read("status")}
        if found["state"] not in STATES:
            raise self._incomplete("status.json", f"state = {found['state']!r}")
        value = found.get("val_bpb", found.get("value"))
        if found["state"] == "finished" and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise self._incomplete("status.json", "a finished run without its value")
        return found

    def fingerprint(self) -> dict[str, Any]:
        """What a run must agree in with its partner. ValueError naming the file where it is missing or not whole."""
        found = self.read("fingerprint")
        if not found:
            there = (self.path / "fingerprint.json").is_file()
            raise self._incomplete("fingerprint.json", "empty" if there else "missing")
        for name in ("config", "start", "plugins", "environment"):
            if not isinstance(found.get(name), dict):
                raise self._incomplete("fingerprint.json", f"no table {name!r}")
        for name in ("code", "machine"):
            if name not in found:
                raise self._incomplete("fingerprint.json", f"no {name!r}")
        return found

    def _incomplete(self, file: str, what: str) -> ValueError:
        return ValueError(f"{self.path / file}: {what}; delete the run's folder to run it again")

    @property
    def state(self) -> str:
        return self.status["state"]

    def metrics(self) -> list[dict[str, Any]]:
        """One row a step with what was measured there, raw; absent values are left out."""
        log, table = self.path / "metrics.jsonl", self.path / "metrics.parquet"
        if log.is_file():  # where both are there the run was killed between writing the one and removing the other
            rows = [json.loads(line) for line in _whole_lines(log)]
        else:
            rows = read_parquet(table).to_pylist() if table.is_file() else []
        return [{key: value for key, value in row.items() if value is not None} for row in rows]

    def latest(self) -> dict[str, Any]:
        """The newest whole row of the live log, read from its end; {} where there is none."""
        try:
            with (self.path / "metrics.jsonl").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - LONGEST_ROW))
                lines = file.read().split(b"\n")[:-1]  # what follows the last line feed is half written
        except FileNotFoundError:
            return {}
        return json.loads(lines[-1]) if lines else {}

    def cut_metrics(self, step: int) -> None:
        """Makes the live log hold the rows before ``step`` alone: where a resumed run continues.

        Raises ValueError where the record of those steps is not whole.
        """
        rows = [row for row in self.metrics() if row["step"] < step]
        log = self.path / "metrics.jsonl"
        recorded = [row["step"] for row in rows if "tokens" in row]
        if recorded != list(range(step)):
            raise ValueError(
                f"{log}: holds {len(recorded)} of the {step} steps before the checkpoint; "
                f"delete {self.path} to run it again"
            )
        write_atomic(log, "".join(json.dumps(row) + "\n" for row in rows))
        (self.path / "metrics.parquet").unlink(missing_ok=True)

    def finish_metrics(self) -> None:
        """Turns the live log into Parquet."""
        write_rows(self.path / "metrics.parquet", self.metrics())
        (self.path / "metrics.jsonl").unlink(missing_ok=True)

    def log(self) -> MetricsLog:
        """The live log, open."""
        return MetricsLog(self.path / "metrics.jsonl")

    def write_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """The weights after the last step."""
        save_tensors(tensors, self.path / "model.safetensors")

    def write_scores(self, scores: Sequence[ItemScore]) -> None:
        """One row an item: task, item, value, weight."""
        rows = [{"task": s.task, "item": s.item, "value": s.value, "weight": s.weight} for s in scores]
        write_rows(self.path / "scores.parquet", rows)

    def scores(self) -> dict[str, tuple[float, float]]:
        """Item -> (value, weight). ValueError naming the file where it is missing or not whole."""
        path = self.path / "scores.parquet"
        if not path.is_file():
            raise self._incomplete(path.name, "missing: a finished run's score of each item")
        table = read_parquet(path)
        if lacking := {"item", "value", "weight"} - set(table.column_names):
            raise self._incomplete(path.name, f"no column {min(lacking)!r}")
        return {row["item"]: (row["value"], row["weight"]) for row in table.to_pylist()}


def found_on(fingerprint: Mapping[str, Any]) -> str:
    """The device and the machine that a run computes on, in words; "" where it has not begun."""
    device = fingerprint.get("environment", {}).get("device", "")
    return f"{device}, machine {fingerprint.get('machine', '?')}" if device else ""


class Follower(RunFolder):
    """A run's folder as all but the first of its processes see it: they read there and write nothing."""

    def write(self, name: str, content: Mapping[str, Any]) -> None: ...

    def cut_metrics(self, step: int) -> None: ...

    def finish_metrics(self) -> None: ...

    def write_weights(self, tensors: Mapping[str, Tensor]) -> None: ...

    def write_scores(self, scores: Sequence[ItemScore]) -> None: ...

    def log(self) -> MetricsLog:
        return _Unwritten()


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """A Parquet file with every column that occurs in a row, whole or not at all."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = pa.table({column: [row.get(column) for row in rows] for column in columns})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    write_atomic(path, sink.getvalue().to_pybytes())


def read_parquet(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """A whole Parquet file, or these columns of it; ValueError naming it where it is damaged or has no such column."""
    try:
        with pq.ParquetFile(path) as file:  # a small one: threads cost more than they save
            table = file.read(None if columns is None else list(columns), use_threads=False)
    except (pa.ArrowInvalid, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise ValueError(f"{path}: not a whole Parquet file ({error})") from None
    if lacking := set(columns or ()) - set(table.column_names):
        raise ValueError(f"{path}: no column {min(lacking)!r}; delete the file and measure it again")
    return table


def _whole_lines(path: Path) -> list[str]:
    """The lines that end with a line feed: a killed process may leave half of the last one."""
    text = path.read_text(encoding="utf-8")
    return [line for line in text.split("\n")[:-1] if line]


class MetricsLog:
    """Appends rows to metrics.jsonl, each written at once, so that a kill loses at most the row in hand."""

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, path.open("ab", buffering=0)

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends a row; a number that is not finite is left out, as JSON has none."""
        finite = {key: value for key, value in row.items() if not isinstance(value, float) or math.isfinite(value)}
        data = (json.dumps(finite) + "\n").encode()
        try:
            while data:  # an unbuffered file may take a part only
                data = data[self.file.write(data) :]
        except OSError as error:
            raise explain_disk(error, self.path, len(data)) from error

    def sync(self) -> None:
        """Returns when all rows are on the disk: before a checkpoint that says they are."""
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()


class _Unwritten(MetricsLog):
    """The log of a process that writes none."""

    def __init__(self) -> None: ...

    def write(self, row: Mapping[str, Any]) -> None: ...

    def sync(self) -> None: ...

    def close(self) -> None: ...
