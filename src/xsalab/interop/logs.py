"""Other tools' logs, read as they stand: series of (step, value), what the log says of itself, what is wrong with it.

    nanochat      the console of base_train and chat_sft
    csv, jsonl    rows with a column or field of steps; a column "seed" makes several runs
    wandb         Weights & Biases: the table that its pages export ("RUN - metric"), or its history as JSON lines
    tensorboard   event files
    xsalab        a run's own folder

Steps are the log's own here; ``align`` brings them to one convention. Where a log goes back to an earlier step (a
resume), everything from that step on is taken out before the new block is read, as a log that was cut back would hold.
Values that are not finite are kept apart and noted. Nothing is dropped without a note.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ..config import flat
from .nanochat import FIELDS

Event = tuple[int, str, float]  # step, name, value, in the order of the log

# Of a tracker's own "_step", which counts its calls, and one that the trainer logged, the latter is the better.
STEP_NAMES = ("step", "global_step", "train/global_step", "trainer/global_step", "train/step", "iteration", "iter",
              "_step")  # fmt: skip
ALIASES = {
    "loss": ("train/loss", "loss", "train_loss", "training_loss", "training/loss", "train.loss"),
    "val_bpb": ("val/bpb", "val_bpb", "val bpb", "eval/bpb", "eval_bpb", "val.bpb"),
}
# What must agree within one run and on one side of a comparison.
SHAPES = ("context", "vocab_size", "depth", "heads", "kv_heads", "width", "window", "parameters", "tokens",
          "batch_tokens", "steps")  # fmt: skip


@dataclass(frozen=True, eq=False)
class Series:
    """steps (n,) int64, strictly rising; values (n,) float64, all finite."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.steps)

    def at(self, step: int) -> float | None:
        """The value at a step; None where there is none."""
        place = int(np.searchsorted(self.steps, step))
        return float(self.values[place]) if place < len(self) and self.steps[place] == step else None


@dataclass(frozen=True, eq=False)
class Log:
    """One run's log.

    kind: one of the six above. run: the run's name where a file holds several, else the file's. series: by the log's
    own names. facts: what the log says of itself, by xsalab's names where there are any (steps, seed, batch_tokens,
    vocab_size, parameters, device, world_size, …). notes: what was found wrong, and with how many lines or steps.
    not_finite: the steps at which a series held NaN or an infinity.
    """

    path: Path
    kind: str
    series: Mapping[str, Series]
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    notes: tuple[str, ...] = ()
    run: str = ""
    not_finite: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])

    def name_of(self, metric: str) -> str | None:
        """The log's own name of a metric: as given, or one of the usual names of "loss" and "val_bpb"; None if none."""
        known = {name.lower(): name for name in (*self.not_finite, *self.series)}
        wanted = metric.lower()
        same = next((names for names in ALIASES.values() if wanted in names), ())
        return next((known[name] for name in (wanted, *same) if name in known), None)

    def pick(self, metric: str) -> Series:
        """The series of a metric. Raises ValueError naming those that are there."""
        name = self.name_of(metric)
        if name is None:
            there = ", ".join(sorted(self.series)) or "none"
            raise ValueError(f"{self.path}: no metric {metric!r}; it holds: {there}; name one with --metric")
        return self.series.get(name, Series(np.empty(0, np.int64), np.empty(0)))


def read_log(path: Path, run: str = "") -> Log:
    """The log of one run. run: its name where a file holds several.

    Raises ValueError where nothing can be read (empty, not text, no steps), or the file holds several runs and none
    was named; OSError where it is not there.
    """
    logs = read_logs(path)
    names = ", ".join(log.run for log in logs)
    chosen = [log for log in logs if run in ("", log.run)]
    if len(chosen) != 1:
        raise ValueError(f"{path}: {f'no run {run!r}' if run else 'several runs'}; it holds: {names}; name one of them")
    return chosen[0]


def read_logs(path: Path) -> tuple[Log, ...]:
    """All runs of a file or of a run's folder, at least one. Raises as ``read_log``."""
    if path.is_dir() and is_run_folder(path):
        return _read_xsalab(path)
    if path.is_dir() or "tfevents" in path.name:
        return (_read_tensorboard(path, event_files(path) if path.is_dir() else [path]),)
    data = path.read_bytes()
    if not data.strip():
        raise ValueError(f"{path}: empty; there is nothing to read")
    if b"\0" in data:
        raise ValueError(f"{path}: not a text file; give a console log, CSV, JSON lines or TensorBoard's event files")
    text = data.decode("utf-8-sig", errors="replace")
    notes = ["not all in UTF-8: read as far as it is"] if "\ufffd" in text else []
    lines = text.splitlines(keepends=True)
    if any(_POINT.match(line) for line in lines):
        return (_read_nanochat(path, lines, notes),)
    lines = [line for line in lines if line.strip()]
    return _read_jsonl(path, lines, notes) if text.lstrip().startswith("{") else _read_csv(path, lines, notes)


def is_run_folder(path: Path) -> bool:
    """Whether a folder holds a run of xsalab's own, begun or finished."""
    return any((path / name).is_file() for name in ("status.json", "metrics.jsonl", "metrics.parquet"))


def event_files(path: Path) -> list[Path]:
    """The TensorBoard event files of a folder, in the order in which they were begun."""
    return sorted(file for file in path.iterdir() if "tfevents" in file.name and file.is_file())


def seed_in_name(name: str) -> int | None:
    """The seed that a file's name states: "xsa_seed3.csv", "run.s3.log"; None where it states none, or two."""
    found = {int(number) for number in re.findall(r"(?:^|[._\-/])(?:seed[=_-]?|s)(\d{1,10})(?=[._\-/]|$)", name)}
    return found.pop() if len(found) == 1 else None


# From events to series


def _log(
    path: Path, kind: str, events: Iterable[Event], facts: Mapping[str, Any], notes: Sequence[str], run: str = ""
) -> Log:
    """Cuts back where the log goes back, sets apart what is not finite, and counts what is missing."""
    kept: dict[str, dict[int, float]] = {}
    back: list[str] = []
    repeated: Counter[str] = Counter()
    for step, name, value in events:
        values = kept.setdefault(name, {})
        last = next(reversed(values), None)
        if last is not None and step < last:
            back.append(f"from step {last} to {step}")
            for column in kept.values():
                while column and next(reversed(column)) >= step:
                    column.popitem()
        repeated[name] += last == step
        values[step] = value
    found = list(notes)
    if back:
        shown = "; ".join(back[:3]) + ("; …" if len(back) > 3 else "")
        found.append(f"goes back {_count(len(back), 'time')} ({shown}), a resume or another run: the last block stands")
    found += [f"{name}: {_count(n, 'step')} repeated; the last value stands" for name, n in repeated.items() if n]
    series: dict[str, Series] = {}
    not_finite: dict[str, tuple[int, ...]] = {}
    for name, values in kept.items():
        if broken := tuple(step for step, value in values.items() if not math.isfinite(value)):
            not_finite[name] = broken
            found.append(f"{name}: {_count(len(broken), 'value')} not finite, left out; the first at step {broken[0]}")
        if good := {step: value for step, value in values.items() if math.isfinite(value)}:
            series[name] = Series(np.array(list(good), np.int64), np.array(list(good.values()), np.float64))
        if len(values) > 2 and (gap := _missing(np.array(list(values), np.int64))):
            found.append(f"{name}: {gap}")
    if not kept:
        raise ValueError(f"{path}: no values by step; what was read of it holds none")
    return Log(path, kind, series, facts, tuple(found), run or path.name, not_finite)


def _missing(steps: NDArray[np.int64]) -> str:
    """In words, the steps that a series leaves out of its own stride; "" where none."""
    gaps = np.diff(steps)
    stride = Counter(gaps.tolist()).most_common(1)[0][0]
    wide = gaps > stride
    lost = int(((gaps - 1) // stride)[wide].sum())
    every = "" if stride == 1 else f" of every {stride} steps"
    return f"{_count(lost, 'value')}{every} missing, the first after step {steps[:-1][wide][0]}" if lost else ""


def _number(given: Any) -> float | None:
    """A number, "NaN" included; None where it is none. "7,62" is none: a comma may mean two things."""
    if isinstance(given, bool) or given is None:
        return None
    try:
        return float(str(given).replace("_", "x"))  # Python reads 1_0 as 10; no log means that
    except ValueError:
        return None


def _whole(given: Any) -> int | None:
    """A step or a seed: a whole number of at least 0."""
    number = _number(given)
    return int(number) if number is not None and 0 <= number < 2**53 and number == int(number) else None


# nanochat's console

_ANSI = r"(?:\x1b\[[0-9;]*m)*"
_POINT = re.compile(_ANSI + r"[sS]tep (\d+)(?:/(\d+))?(?: \(\S+%\))? \| (loss|Validation bpb|CORE metric): (\S+)")
_NAMES = {"loss": "train/loss", "Validation bpb": "val/bpb", "CORE metric": "core_metric"}
_SAID = (
    ("device", r"GPU: (.+?) \|"),
    ("world_size", r"Distributed world size: (\d+)"),
    ("dtype", r"COMPUTE_DTYPE: (?:torch\.)?(\w+)"),
    ("vocab_size", r"Vocab size: ([\d,]+)"),
    ("parameters", r"total +: ([\d,]+)"),
    ("tokens", r"Total number of training tokens: ([\d,]+)"),
    ("batch_tokens", r"Total batch size ([\d,]+)"),
    ("micro_batches", r"gradient accumulation steps: (\d+)"),
    *((ours, rf'"{theirs}": "?([^",\s]+)') for theirs, ours in FIELDS.items()),
)


def _read_nanochat(path: Path, lines: Sequence[str], notes: Sequence[str]) -> Log:
    """The lines of nanochat's scripts base_train and chat_sft (github.com/karpathy/nanochat, July 2026)."""
    facts: dict[str, Any] = {"writer": "nanochat base_train"}
    events: list[Event] = []
    found, bad = list(notes), 0

    def fact(name: str, text: str) -> None:
        value = int(text.replace(",", "")) if re.fullmatch(r"[\d,]+", text) else text
        before = facts.setdefault(name, value)
        if before != value and name in SHAPES:
            raise ValueError(f"{path}: states {name} = {before}, then {value}: two runs in one file; split it")
        if before != value:
            found.append(f"states {name} = {before}, then {value}")

    if not lines[-1].endswith(("\n", "\r")):  # the tool ends every line: what has no end may be half a number
        lines = lines[:-1]
        found.append("the last line has no end: not read")
    for line in lines:
        if match := _POINT.match(line):
            if (value := _number(match[4])) is None:
                bad += 1
                continue
            events.append((int(match[1]), _NAMES[match[3]], value))
            if match[2]:
                fact("steps", match[2])
            elif match[3] == "loss":  # the one that does not say how many steps there will be
                facts["writer"] = "nanochat chat_sft"
        else:
            bad += bool(re.match(_ANSI + r"[sS]tep \d", line))
            for name, pattern in _SAID:
                if said := re.search(pattern, line):
                    fact(name, said[1])
    if bad:
        found.append(f"{_count(bad, 'line')} of steps that could not be read")
    return _log(path, "nanochat", events, facts, found)


# Rows: CSV, JSON lines, xsalab's own


def _read_csv(path: Path, lines: Sequence[str], notes: list[str]) -> tuple[Log, ...]:
    header, *table = csv.reader(lines, delimiter=max(",\t;", key=lines[0].count))
    header = [name.strip() for name in header]
    if twice := [name for name, n in Counter(header).items() if n > 1]:
        raise ValueError(f"{path}: two columns have the same name: {twice[0]}; rename one")
    rows = [dict(zip(header, row, strict=True)) for row in table if len(row) == len(header)]
    if len(rows) < len(table):
        notes = [*notes, f"{_count(len(table) - len(rows), 'line')} cut off or of other columns, not read"]
    step = _step_name(path, header)
    wandb = len(header) > 1 and all(" - " in name for name in header if name != step)
    return _of_rows(path, "wandb" if wandb else "csv", step, rows, {}, notes)


def _read_jsonl(path: Path, lines: Sequence[str], notes: list[str]) -> tuple[Log, ...]:
    """Lines without a step, such as the settings at the head, are facts."""
    rows: list[dict[str, Any]] = []
    for line in lines:
        try:
            rows.append(dict(flat(json.loads(line))))
        except (ValueError, AttributeError):  # no JSON, or JSON that is no table
            continue
    if bad := len(lines) - len(rows):
        notes = [*notes, f"{_count(bad, 'line')} that could not be read (no JSON table, or cut off)"]
    names = dict.fromkeys(name for row in rows for name in row)
    step = _step_name(path, names)
    heads = (item for row in rows if step not in row for item in row.items())
    facts = {name: value for name, value in heads if isinstance(value, (str, int, float))}
    return _of_rows(
        path, "wandb" if "_step" in names else "jsonl", step, [row for row in rows if step in row], facts, notes
    )


def _step_name(path: Path, names: Iterable[str]) -> str:
    lower = {name.lower(): name for name in names}
    if step := next((lower[name] for name in STEP_NAMES if name in lower), ""):
        return step
    shown = ", ".join(list(lower.values())[:12])[:200]
    raise ValueError(f"{path}: no column or field of steps (one of {', '.join(STEP_NAMES)}); it has: {shown}")


def _of_rows(
    path: Path, kind: str, step: str, rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any], notes: Sequence[str]
) -> tuple[Log, ...]:
    """One log; or one for each value of a column "seed", or for each RUN of W&B's columns "RUN - metric".

    W&B's table has the least and the greatest of each point beside it: where they differ it is of several steps.
    """
    events: dict[str, list[Event]] = {}
    seeds: dict[str, int] = {}
    words: Counter[str] = Counter()
    no_step, bins = 0, 0
    for row in rows:
        at, seed = _whole(row[step]), _whole(row.get("seed"))
        if at is None:
            no_step += 1
            continue
        for name, given in row.items():
            run, _, metric = name.rpartition(" - ") if kind == "wandb" else ("", "", name)
            if seed is not None:
                run = f"{path.name}, seed {seed}"
                seeds[run] = seed
            if name in (step, "seed") or given is None or given == "" or name.startswith("_"):
                continue
            if metric.endswith(("__MIN", "__MAX")):
                bins += metric.endswith("MIN") and given != row.get(name.removesuffix("MIN") + "MAX")
            elif (value := _number(given)) is None:
                words[name] += 1
            else:
                events.setdefault(run, []).append((at, metric, value))
    found = list(notes)
    found += [f"{_count(no_step, 'line')} whose step is no whole number of at least 0"] * bool(no_step)
    found += [f"{_count(bins, 'value')} of bins of several steps, as the page drew them"] * bool(bins)
    found += [f"{name}: {_count(n, 'value')} left out, as no number" for name, n in words.items()]
    return tuple(
        _log(path, kind, of_run, {**facts, "seed": seeds[run]} if run in seeds else facts, found, run)
        for run, of_run in (events or {"": []}).items()
    )


def _read_xsalab(path: Path) -> tuple[Log, ...]:
    """The rows of a run's folder; facts are its configuration by plain names, software and machine."""
    live = path / "metrics.jsonl"

    def table(name: str) -> dict[str, Any]:
        file = path / f"{name}.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}

    try:
        config, prints, status = (table(name) for name in ("config", "fingerprint", "status"))
        if live.is_file():  # without what a killed process may have left of a line
            rows = [json.loads(line) for line in live.read_text(encoding="utf-8").split("\n")[:-1] if line]
        else:
            rows = pq.read_table(path / "metrics.parquet").to_pylist()
    except (ValueError, OSError) as error:
        raise ValueError(f"{path}: damaged ({error})") from None
    facts = {name.rpartition(".")[2]: value for name, value in flat(config.get("config", {}))}
    facts |= {"writer": "xsalab", **prints.get("environment", {})}
    facts |= {name: prints[name] for name in ("machine", "code") if name in prints}
    facts |= {name: status[name] for name in ("steps", "state") if name in status}
    notes = [] if facts.get("state", "finished") == "finished" else [f"the run is {facts['state']}"]
    return _of_rows(path, "xsalab", "step", rows, facts, notes)


# TensorBoard


def _read_tensorboard(path: Path, files: Sequence[Path]) -> Log:
    """Scalars of event files, in the order of their names."""
    if not files:
        raise ValueError(f"{path}: no log in this folder: neither a run's metrics nor event files")
    try:  # an optional dependency
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError:
        raise ValueError(f"{path}: needs the package tensorboard: pip install 'xsalab[tensorboard]'") from None
    events: list[Event] = []
    for file in files:
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                if value.HasField("tensor") and value.metadata.plugin_data.plugin_name == "scalars":
                    events.append((int(event.step), value.tag, float(make_ndarray(value.tensor).item())))
    if not events:
        raise ValueError(f"{path}: no scalars; is it an event file of TensorBoard?")
    return _log(path, "tensorboard", events, {}, ["values are float32, as event files hold them"])


def _count(n: int, word: str) -> str:
    return f"{n:,} {word}" + ("" if n == 1 else "s")
