"""Other tools' logs, read as they stand: series of (step, value), what the log says of itself, what is wrong with it.

    nanochat      the console of base_train and chat_sft
    csv           any table with a column of steps
    wandb         Weights & Biases: the table that its pages export (several runs), or its history as JSON lines
    tensorboard   event files, or the table that its pages export
    jsonl         JSON lines with a field of steps
    xsalab        a run's own folder

Steps are the log's own here; ``align`` brings them to one convention. Where a log goes back to an earlier step (a
resume), everything from that step on is taken out before the new block is read, as a log that was cut back would hold.
Values that are not finite are kept apart and noted. Nothing is dropped without a note.
"""

from __future__ import annotations

import codecs
import csv
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ..config import flat

Event = tuple[int, str, float]  # step, name, value, in the order of the log; name "" : the log is cut back to the step

STEP_NAMES = ("step", "global_step", "train/global_step", "trainer/global_step", "train/step", "iteration", "iter",
              "steps", "_step")  # fmt: skip
ALIASES = {
    "loss": ("train/loss", "loss", "train_loss", "training_loss", "training/loss"),
    "val_bpb": ("val/bpb", "val_bpb", "validation bpb", "val bpb", "eval/bpb", "eval_bpb"),
}
SEED_IN_NAME = re.compile(r"(?:^|[._\-/])(?:seed[=_-]?|s)(\d{1,10})(?=[._\-/]|$)")


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
    if run:
        chosen = tuple(log for log in logs if log.run == run)
        if not chosen:
            raise ValueError(f"{path}: no run {run!r}; it holds: {_names(logs)}")
        logs = chosen
    if len(logs) > 1:
        raise ValueError(f"{path}: holds {len(logs)} runs: {_names(logs)}; name one with --run")
    return next(iter(logs))


def read_logs(path: Path) -> tuple[Log, ...]:
    """All runs of a file or of a run's folder, at least one. Raises as ``read_log``."""
    if path.is_dir():
        if is_run_folder(path):
            return (_read_xsalab(path),)
        if event_files(path):
            return (_read_tensorboard(path),)
        raise ValueError(f"{path}: no log in this folder: neither metrics.jsonl, metrics.parquet nor event files")
    if "tfevents" in path.name:
        return (_read_tensorboard(path),)
    if path.name in ("metrics.jsonl", "metrics.parquet") and (path.parent / "config.json").is_file():
        return (_read_xsalab(path.parent),)
    text, notes = _text(path)
    lines = re.split(r"\r\n|\n|\r", text)
    if any(_TRAIN.match(_plain(line)) or _AT_STEP.match(_plain(line)) for line in lines):
        return (_read_nanochat(path, lines, notes),)
    first = text.lstrip()[:1]
    if first in ("{", "["):
        return _read_json(path, text, lines, notes)
    return _read_csv(path, lines, notes)


def is_run_folder(path: Path) -> bool:
    """Whether a folder holds a run of xsalab's own, with rows to read."""
    return any((path / name).is_file() for name in ("metrics.jsonl", "metrics.parquet"))


def event_files(path: Path) -> list[Path]:
    """The TensorBoard event files of a folder, in the order in which they were begun."""
    return sorted(file for file in path.iterdir() if "tfevents" in file.name and file.is_file())


def seed_in_name(name: str) -> int | None:
    """The seed that a file's name states: "xsa_seed3.csv", "run.s3.log"; None where it states none, or two."""
    found = {int(number) for number in SEED_IN_NAME.findall(name)}
    return found.pop() if len(found) == 1 else None


def _names(logs: Sequence[Log]) -> str:
    return ", ".join(log.run for log in logs)


def _text(path: Path) -> tuple[str, list[str]]:
    """The file as text: UTF-8, or UTF-16 with its mark (a redirect on Windows). ValueError where it is no text."""
    data = path.read_bytes()
    if not data.strip():
        raise ValueError(f"{path}: empty; there is nothing to read")
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return data.decode("utf-16", errors="replace"), []
    if b"\0" in data:
        raise ValueError(f"{path}: not a text file; give a console log, CSV, JSON lines or TensorBoard's event files")
    text = data.decode("utf-8-sig", errors="replace")
    bad = sum("\ufffd" in line for line in text.splitlines()) if "\ufffd" in text else 0
    return text, [f"{_count(bad, 'line')} not in UTF-8: read as far as they go"] if bad else []


# From events to series


def _log(
    path: Path, kind: str, events: Iterable[Event], facts: Mapping[str, Any], notes: Sequence[str], run: str = ""
) -> Log:
    """Cuts back where the log goes back, sets apart what is not finite, and counts what is missing."""
    kept: dict[str, dict[int, float]] = {}
    back: list[str] = []
    repeated: dict[str, list[int]] = {}
    for step, name, value in events:
        values = kept.setdefault(name, {}) if name else {}
        last = next(reversed(values), None)
        if not name or (last is not None and step < last):
            cut = [_cut(column, step) for column in kept.values()]
            if max(cut, default=0):
                back.append(f"from step {last if name else step + max(cut) - 1} to {step} ({_count(max(cut), 'step')})")
        elif last == step:
            repeated.setdefault(name, []).append(step)
        if name:
            values[step] = value
    found = list(notes)
    if back:
        shown = "; ".join(back[:3]) + ("; …" if len(back) > 3 else "")
        found.append(
            f"goes back {_count(len(back), 'time')}, a resume or another run: {shown}; the last block stands, "
            "what was logged before it from that step on is left out"
        )
    found += [
        f"{name}: {_count(len(steps), 'step')} repeated (the first is {steps[0]}); the last value stands"
        for name, steps in repeated.items()
    ]
    series: dict[str, Series] = {}
    not_finite: dict[str, tuple[int, ...]] = {}
    for name, values in kept.items():
        if broken := tuple(step for step, value in values.items() if not math.isfinite(value)):
            not_finite[name] = broken
            found.append(f"{name}: {_count(len(broken), 'value')} not finite, left out; the first at step {broken[0]}")
        good = {step: value for step, value in values.items() if math.isfinite(value)}
        if good:
            series[name] = Series(np.array(list(good), np.int64), np.array(list(good.values()), np.float64))
            if gap := _missing(np.array(list(values), np.int64)):
                found.append(f"{name}: {gap}")
    if not series and not not_finite:
        raise ValueError(f"{path}: no values by step; what was read of it holds none")
    return Log(path, kind, series, facts, tuple(found), run or path.name, not_finite)


def _cut(column: dict[int, float], step: int) -> int:
    """Takes out the rows from ``step`` on; how many there were."""
    count = 0
    while column and next(reversed(column)) >= step:
        column.popitem()
        count += 1
    return count


def _missing(steps: NDArray[np.int64]) -> str:
    """In words, the steps that a series leaves out of its own stride; "" where none."""
    if len(steps) < 3:
        return ""
    strides, counts = np.unique(np.diff(steps), return_counts=True)
    stride = int(strides[np.argmax(counts)])
    wide = np.flatnonzero(np.diff(steps) > stride)
    lost = sum((int(steps[i + 1] - steps[i]) - 1) // stride for i in wide)
    if not lost:
        return ""
    every = "" if stride == 1 else f" of every {stride} steps"
    return f"{_count(lost, 'value')}{every} missing, the first after step {steps[wide[0]]}"


def _number(text: Any) -> float | None:
    """A number, "NaN" included; None where it is none. "7,62" is none: a comma may mean two things."""
    if isinstance(text, bool) or text is None:
        return None
    if isinstance(text, (int, float)):
        return float(text)
    try:
        return float(str(text).strip().replace("_", "x"))  # Python reads 1_0 as 10; no log means that
    except ValueError:
        return None


def _step(value: Any) -> int | None:
    number = _number(value)
    if number is None or not math.isfinite(number) or number < 0 or number != int(number) or number > 2**53:
        return None
    return int(number)


# nanochat's console

_TRAIN = re.compile(r"step (\d+)(?:/(\d+))? \([\d.]+%\) \| (loss: .+)$")
_AT_STEP = re.compile(r"Step (\d+) \| ((?:Validation bpb|CORE metric|ChatCORE): .+)$")
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_NAMES = {"loss": "train/loss", "lrm": "train/lrm", "dt": "train/dt_ms", "tok/sec": "train/tok_per_sec",
          "Validation bpb": "val/bpb", "CORE metric": "core_metric", "ChatCORE": "chatcore_metric",
          "ChatCORE_cat": "chatcore_cat"}  # fmt: skip
_MODEL = {"sequence_len": "context", "vocab_size": "vocab_size", "n_layer": "depth", "n_head": "heads",
          "n_kv_head": "kv_heads", "n_embd": "width", "window_pattern": "window"}  # fmt: skip
_SAID: tuple[tuple[re.Pattern[str], str, Callable[[str], Any]], ...] = tuple(
    (re.compile(pattern), name, kind)
    for pattern, name, kind in (
        (r"Autodetected device type: (\S+)", "device", str),
        (r"GPU: (.+?) \|", "device", str),
        (r"Distributed world size: (\d+)", "world_size", int),
        (r"COMPUTE_DTYPE: (?:torch\.)?(\w+)", "dtype", str),
        (r"Vocab size: ([\d,]+)", "vocab_size", lambda text: int(text.replace(",", ""))),
        (r"total +: ([\d,]+)", "parameters", lambda text: int(text.replace(",", ""))),
        (r"Total number of training tokens: ([\d,]+)", "tokens", lambda text: int(text.replace(",", ""))),
        (r"Total batch size ([\d,]+)", "batch_tokens", lambda text: int(text.replace(",", ""))),
        (r"gradient accumulation steps: (\d+)", "micro_batches", int),
    )
)
SHAPES = ("context", "vocab_size", "depth", "heads", "kv_heads", "width", "window", "parameters", "tokens",
          "batch_tokens", "steps")  # fmt: skip


def _plain(line: str) -> str:
    return _ANSI.sub("", line).strip()


def _read_nanochat(path: Path, lines: Sequence[str], notes: Sequence[str]) -> Log:
    """The lines of nanochat's scripts base_train and chat_sft (github.com/karpathy/nanochat, July 2026)."""
    facts: dict[str, Any] = {"writer": "nanochat base_train"}
    events: list[Event] = []
    found, bad = list(notes), 0

    def fact(name: str, value: Any) -> None:
        before = facts.get(name, value)
        if before != value and name in SHAPES:
            raise ValueError(f"{path}: states {name} = {before}, then {value}: two runs in one file; split it")
        if before != value and name != "device":  # a GPU's name says more than its type, which comes before it
            found.append(f"states {name} = {before}, then {value}")
        facts[name] = value

    if lines[-1].strip():  # the tool ends every line: what has no end may be half a number
        found.append("the last line has no end: not read")
    for raw in lines[:-1]:
        line = _plain(raw)
        if match := _TRAIN.match(line):
            step = int(match[1])
            if match[2]:
                fact("steps", int(match[2]))
            else:
                facts["writer"] = "nanochat chat_sft"
            values = _fields(match[3])
        elif match := _AT_STEP.match(line):
            step, values = int(match[1]), _fields(match[2])
        else:
            bad += bool(re.match(r"[sS]tep \d", line)) and "Average reward" not in line
            for pattern, name, kind in _SAID:
                if said := pattern.search(line):
                    fact(name, kind(said[1]))
            if said := re.match(r'"(\w+)": (.+?),?$', line):
                name = _MODEL.get(said[1])
                if name is not None:
                    fact(name, _json_or_text(said[2]))
            continue
        bad += "loss" in values and values["loss"] is None
        known = ((_NAMES[name], value) for name, value in values.items() if name in _NAMES)
        events += [(step, name, value) for name, value in known if value is not None]
    if bad:
        found.append(f"{_count(bad, 'line')} of steps that could not be read")
    return _log(path, "nanochat", events, facts, found)


def _fields(text: str) -> dict[str, float | None]:
    """The "name: value" parts between bars; the unit behind a number goes."""
    found: dict[str, float | None] = {}
    for part in text.split(" | "):
        name, _, value = part.partition(": ")
        found[name.strip()] = _number(re.sub(r"(?<=\d)(ms|m|s)$", "", value.strip()).replace(",", ""))
    return found


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


# Tables


def _read_csv(path: Path, lines: Sequence[str], notes: list[str]) -> tuple[Log, ...]:
    rows = [line for line in lines if line.strip()]
    delimiter = max(",\t;", key=rows[0].count)
    table = list(csv.reader(rows, delimiter=delimiter))
    header = [name.strip() for name in table[0]]
    lower = [name.lower() for name in header]
    where = next((lower.index(name) for name in STEP_NAMES if name in lower), None)
    if where is None:
        shown = ", ".join(header[:12]) + (", …" if len(header) > 12 else "")
        raise ValueError(
            f"{path}: no column of steps (one of {', '.join(STEP_NAMES)}); its first line reads: {shown[:200]}"
        )
    if len(set(header)) < len(header):
        raise ValueError(f"{path}: two columns have the same name: {_twice(header)}; rename one")
    if lower == ["wall time", "step", "value"]:
        match = re.match(r"(?:run[-_](.*?)[-_])?tag[-_](.+)\.csv$", path.name)
        header = ["", "Step", match[2] if match else "value"]
    good: list[tuple[int, list[str]]] = []
    for row in table[1:]:
        step = _step(row[where]) if len(row) == len(header) else None
        if step is not None:
            good.append((step, row))
    if len(good) < len(table) - 1:
        notes = [*notes, f"{_count(len(table) - 1 - len(good), 'line')} that could not be read (no step, or cut off)"]
    columns = [i for i, name in enumerate(header) if i != where and name]
    if lower == ["wall time", "step", "value"]:
        return (_log(path, "tensorboard", _cells(good, {columns[0]: header[columns[0]]}), {}, notes),)
    if columns and header[where] == "Step" and all(" - " in header[i] for i in columns):
        return _wandb_table(path, header, good, columns, notes)
    records = [(step, {header[i]: row[i].strip() for i in columns if row[i].strip()}) for step, row in good]
    return _by_seed(path, "csv", records, {}, notes)


def _twice(names: Sequence[str]) -> str:
    return next(name for i, name in enumerate(names) if name in names[:i])


def _cells(rows: Iterable[tuple[int, list[str]]], names: Mapping[int, str]) -> Iterator[Event]:
    """The cells of some columns that hold a number, as events under the names given."""
    for step, row in rows:
        for i, name in names.items():
            value = _number(row[i])
            if value is not None:
                yield step, name, value


def _wandb_table(
    path: Path, header: list[str], rows: list[tuple[int, list[str]]], columns: list[int], notes: list[str]
) -> tuple[Log, ...]:
    """The table that a W&B page exports: "RUN - metric", with the least and the greatest of each bin beside it."""
    runs: dict[str, dict[int, str]] = {}
    for i in columns:
        run, _, metric = header[i].rpartition(" - ")
        runs.setdefault(run, {})[i] = metric
    found: list[Log] = []
    for run, names in runs.items():
        plain = {i: name for i, name in names.items() if not name.endswith(("__MIN", "__MAX"))}
        own = list(notes)
        ends = {name: i for i, name in names.items() if i not in plain}
        for name in plain.values():
            least, greatest = (ends.get(name + end) for end in ("__MIN", "__MAX"))
            if least is None or greatest is None:
                continue
            if binned := sum(row[least].strip() != row[greatest].strip() for _, row in rows):
                own.append(f"{name}: bins of several steps, as the page drew them: {_count(binned, 'value')}")
        found.append(_log(path, "wandb", _cells(rows, plain), {}, own, run))
    return tuple(found)


# JSON lines


def _read_json(path: Path, text: str, lines: Sequence[str], notes: list[str]) -> tuple[Log, ...]:
    given: list[Any] = []
    bad = 0
    if text.lstrip().startswith("["):
        try:
            given = list(json.loads(text))
        except ValueError as error:
            raise ValueError(f"{path}: not whole as JSON: {error}") from None
    else:
        for line in lines:
            if line.strip():
                try:
                    given.append(json.loads(line))
                except ValueError:
                    bad += 1
    rows = [dict(flat(row)) for row in given if isinstance(row, dict)]
    bad += len(given) - len(rows)
    if bad:
        notes = [*notes, f"{_count(bad, 'line')} that could not be read (no JSON table, or cut off)"]
    lower = [{name.lower(): name for name in row} for row in rows]
    present = {name for names in lower for name in names}
    # The tracker's own "_step" counts its calls: a step that the trainer itself logged is the better one.
    name = next((name for name in STEP_NAMES if name in present), None)
    if name is None:
        shown = ", ".join(sorted(present)[:12]) or "no fields at all"
        raise ValueError(f"{path}: no field of steps (one of {', '.join(STEP_NAMES)}) in its lines; found: {shown}")
    kind = "wandb" if "_step" in present else "jsonl"
    if kind == "wandb" and name != "_step":
        notes = [*notes, f"steps are those of {name!r}; W&B's own _step counts its calls"]
    records: list[tuple[int, dict[str, Any]]] = []
    facts: dict[str, Any] = {}
    lost = 0
    for row, names in zip(rows, lower, strict=True):
        step = _step(row[names[name]]) if name in names else None
        if step is not None:
            skipped = (names[name], *(key for key in row if key.startswith("_")))
            records.append((step, {key: value for key, value in row.items() if key not in skipped}))
        elif name in names:
            lost += 1
        else:  # a line without a step, such as the settings at the head
            facts |= {key: value for key, value in row.items() if isinstance(value, (str, int, float))}
    if lost:
        notes = [*notes, f"{_count(lost, 'line')} whose step is no whole number of at least 0"]
    return _by_seed(path, kind, records, facts, notes)


def _by_seed(
    path: Path, kind: str, records: Sequence[tuple[int, Mapping[str, Any]]], facts: Mapping[str, Any],
    notes: Sequence[str],
) -> tuple[Log, ...]:  # fmt: skip
    """One log, or one for each value of a field "seed". A field of words or settings that never changes is a fact."""
    seeds = dict.fromkeys(_step(row["seed"]) for _, row in records if "seed" in row)
    found: list[Log] = []
    for seed in seeds or {None: None}:
        rows = [(step, row) for step, row in records if not seeds or _step(row.get("seed")) == seed]
        own = dict(facts) | ({} if seed is None else {"seed": seed})
        for name in dict.fromkeys(name for _, row in rows for name in row):
            values = list(dict.fromkeys(row[name] for _, row in rows if name in row and _hashable(row[name])))
            word = len(values) == 1 and isinstance(values[0], str) and _number(values[0]) is None
            if word or (len(values) == 1 and name in SHAPES and name not in ("tokens", "steps")):  # those may be counts
                own[name] = _step(values[0]) or values[0]
        events: list[Event] = []
        words: dict[str, int] = {}
        for step, row in rows:
            for name, given in row.items():
                value = _number(given)
                if name == "seed" or name in own or given is None:
                    continue
                if value is None:
                    words[name] = words.get(name, 0) + 1
                else:
                    events.append((step, name, value))
        numbers = {name for _, name, _ in events}
        mixed = [f"{name}: left out, as no numbers: {_count(n, 'value')}" for name, n in words.items()
                 if name in numbers]  # fmt: skip
        if {"train/loss", "train/lrm"} <= numbers:
            own.setdefault("writer", "nanochat through a tracker")
        run = f"{path.name}, seed {seed}" if len(seeds) > 1 else ""
        found.append(_log(path, kind, events, own, [*notes, *mixed], run))
    return tuple(found)


def _hashable(value: Any) -> bool:
    return isinstance(value, (str, int, float))


# TensorBoard


def _read_tensorboard(path: Path) -> Log:
    """Scalars of one event file, or of all in a folder in the order of their names."""
    try:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError:
        raise ValueError(
            f"{path}: event files need the package tensorboard: pip install 'xsalab[tensorboard]'"
        ) from None
    events: list[Event] = []
    files = event_files(path) if path.is_dir() else [path]
    for file in files:
        if not file.stat().st_size:
            raise ValueError(f"{file}: empty; there is nothing to read")
        for event in EventFileLoader(str(file)).Load():
            if event.HasField("session_log") and event.session_log.status == event.session_log.START:
                events.append((int(event.step), "", math.nan))  # a resumed writer purges what it wrote from here on
            for value in event.summary.value:
                if value.HasField("tensor") and value.metadata.plugin_data.plugin_name == "scalars":
                    events.append((int(event.step), value.tag, float(make_ndarray(value.tensor).item())))
    if not events:
        raise ValueError(f"{path}: no scalars; is it an event file of TensorBoard?")
    return _log(path, "tensorboard", events, {}, ["values are float32, as event files hold them"])


# xsalab's own runs


def _read_xsalab(path: Path) -> Log:
    """The rows of a run's folder. Its log is cut back when it resumes, so it never goes back."""
    log, table = path / "metrics.jsonl", path / "metrics.parquet"
    if log.is_file():
        whole = log.read_text(encoding="utf-8").split("\n")[:-1]
        rows: list[dict[str, Any]] = [json.loads(line) for line in whole if line]
    else:
        try:
            rows = pq.read_table(table).to_pylist()
        except (pa.ArrowInvalid, OSError) as error:
            raise ValueError(f"{table}: not a whole Parquet file ({error})") from None
    facts: dict[str, Any] = {"writer": "xsalab"}
    status, config, prints = (_read_json_table(path / f"{name}.json") for name in ("status", "config", "fingerprint"))
    settings = dict(flat(config.get("config", {})))
    for name, key in (
        ("seed", "seed"), ("tokens", "train.tokens"), ("batch_tokens", "train.batch_tokens"),
        ("vocab_size", "model.vocab_size"), ("context", "model.context"), ("depth", "model.depth"),
        ("width", "model.width"), ("heads", "model.heads"), ("dtype", "train.dtype"), ("threads", "train.threads"),
    ):  # fmt: skip
        if key in settings:
            facts[name] = settings[key]
    facts |= {name: status[name] for name in ("steps", "state") if name in status}
    facts |= {name: value for name, value in prints.get("environment", {}).items() if name not in facts}
    facts |= {name: prints[name] for name in ("machine", "code") if name in prints}
    events = [
        (row["step"], name, float(value))
        for row in rows
        for name, value in row.items()
        if name != "step" and isinstance(value, (int, float)) and not isinstance(value, bool)
    ]
    notes = [f"the run is {facts['state']}"] if facts.get("state") not in (None, "finished") else []
    return _log(path, "xsalab", events, facts, notes)


def _read_json_table(path: Path) -> dict[str, Any]:
    """A JSON file of the folder; {} where it is not there."""
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{path}: damaged ({error})") from None


def _count(n: int, word: str) -> str:
    return f"{n:,} {word}" + ("" if n == 1 else "s")
