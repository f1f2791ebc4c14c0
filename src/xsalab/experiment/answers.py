"""Answers to benchmarks, beside the run that gave them: one Parquet file a task, one row an item.

RUN/core/TASK.parquet        CORE of the base model
RUN/tasks/TASK.parquet       tasks of the user's own, in a bundle of CORE's layout
RUN/sft/core/TASK.parquet    of the fine-tuned one, where it was asked
RUN/sft/chatcore/TASK.parquet

A file's own metadata hold the task's baseline, chance level and counts, ``weights``: a digest of the model's, and
``key``: of all else that the answers depend on. A task is asked again where one of the two is another; what is there is
kept otherwise, so that an interrupted evaluation goes on where it stopped. ``settings`` say how it was asked: the tasks
of one figure were asked in one way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from ..eval import ItemScore, TaskAnswers
from ..files import make_folder, write_atomic
from .store import read_parquet

# folder -> name in words, in the order they are told
BENCHMARKS = {"core": "CORE", "tasks": "task score", "chatcore": "ChatCORE"}
_META = b"xsalab"


class Stored(NamedTuple):
    """What one file holds."""

    key: str
    weights: str
    settings: dict[str, Any]
    answers: TaskAnswers


def write_answers(
    folder: Path,
    answers: TaskAnswers,
    key: str,
    *,
    weights: str = "",
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Writes ``folder/TASK.parquet`` whole or not at all."""
    rows = answers.scores
    table = pa.table(
        {
            "task": [answers.task] * len(rows),
            "item": [row.item for row in rows],
            "value": [row.value for row in rows],
            "weight": [row.weight for row in rows],
            "options": pa.array([list(row.options) for row in rows], pa.list_(pa.float64())),
            "lengths": pa.array([list(row.lengths) for row in rows], pa.list_(pa.int64())),
            "cut": [row.cut for row in rows],
        }
    )
    meta = {
        "key": key, "weights": weights, "settings": dict(settings), "baseline": answers.baseline,
        "chance": answers.chance, "counts": dict(answers.counts),
    }  # fmt: skip
    table = table.replace_schema_metadata({_META: json.dumps(meta).encode()})
    make_folder(folder)
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    write_atomic(folder / f"{answers.task}.parquet", sink.getvalue().to_pybytes())


def read_task(path: Path) -> Stored:
    """One file. ValueError naming it where it is damaged or something else."""
    table = read_parquet(path)
    try:
        meta: dict[str, Any] = json.loads((table.schema.metadata or {})[_META])
        scores = tuple(
            ItemScore(
                row["task"], row["item"], row["value"], row["weight"], tuple(row["options"]), row["cut"],
                tuple(row["lengths"]),
            )
            for row in table.to_pylist()
        )  # fmt: skip
        answers = TaskAnswers(path.stem, meta["baseline"], meta["chance"], scores, meta["counts"])
        return Stored(meta["key"], meta["weights"], meta["settings"], answers)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not the answers to a task ({error}); delete it to have it asked again") from None


def read_answers(folder: Path) -> dict[str, Stored]:
    """Task -> what its file holds, of a benchmark's folder; {} where it is not there."""
    return {path.stem: read_task(path) for path in sorted(folder.glob("*.parquet"))}


def known_answers(folder: Path, task: str, key: str, *, weights: str = "") -> TaskAnswers | None:
    """What is there of a task under this very key and these weights; None where it must be asked."""
    path = folder / f"{task}.parquet"
    if not path.is_file():
        return None
    found = read_task(path)
    return found.answers if (found.key, found.weights) == (key, weights) else None


def one_way(stored: Mapping[str, Stored], folder: Path) -> None:
    """ValueError naming two tasks of a folder that were asked with other settings: their mean would be no figure."""
    first: dict[str, tuple[str, Any]] = {}
    for task, found in stored.items():
        for name, value in found.settings.items():
            other, before = first.setdefault(name, (task, value))
            if before != value:
                raise ValueError(
                    f"{folder}: {other} was asked with {name} = {before}, {task} with {name} = {value}: one figure "
                    "needs one way of asking; ask all tasks again in one way, or delete the files of the others"
                )
