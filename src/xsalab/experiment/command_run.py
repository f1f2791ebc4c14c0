"""One run of a user's own trainer: start it, keep its output, read its metrics and scores, end it.

Beside the files of every run (store.py) the run's folder holds

    log.txt    what the command wrote, both streams, line by line
    out/       {out}: what it wrote to files; emptied before it starts

A command that was interrupted or failed starts again from nothing: nobody here knows how to resume it. One that has
ended is not run again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any, TypeGuard

from ..config import digest
from ..eval import ItemScore
from ..files import folder_lock, make_folder, write_atomic
from .command import UNIT, CommandRun, Source
from .design import Cell, config_differences
from .fingerprint import machine, processor
from .guard import CANNOT_START, GRACE
from .pairing import describe, mismatch
from .store import MetricsLog, RunFolder

Event = Callable[[Cell, dict[str, Any]], None]
GUARD = Path(__file__).with_name("guard.py")
LOCK_WAIT = 5.0  # seconds, as for our own runs
POLL = 0.2  # seconds between looks at a running command
NUMBER = re.compile(r"[+-]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?|nan|inf(?:inity)?)", re.IGNORECASE)
THOUSANDS = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+")
SHOWN = 3  # last lines of output in a message
LARGEST = 16_000_000  # bytes of a file named in the command whose content is compared


@dataclass(frozen=True)
class CommandTask:
    """What a process needs to carry out one cell of a command."""

    cell: Cell
    run: CommandRun
    folder: Path
    where: Path  # the working folder
    toml: Path  # the experiment's
    minutes: float = 0
    partners: tuple[tuple[Path, tuple[str, ...]], ...] = ()
    threads: int = 1
    steps: int = 1  # of the progress bar: how many steps a command takes is not known
    compiled: bool = False
    kernels: bool = False


def run_command(task: CommandTask, event: Event = lambda cell, content: None) -> str:
    """Carries out one cell; returns its state: "finished" or "diverged" (its result is not a finite number).

    Raises ValueError where the folder holds a finished run of another command, where the partner of this point and
    seed does not match, and where the command fails, takes too long or leaves no result: the message shows the last
    lines of its output and names the log.
    """
    folder = RunFolder(task.folder)
    make_folder(folder.path)
    with folder_lock(folder.path, "run", LOCK_WAIT):
        ended = folder.state in ("finished", "diverged")
        tables = task.run.tables()
        known = folder.read("config").get("config")
        if ended and known is not None and (found := config_differences(known, tables)):
            raise ValueError(
                f"{folder.path}: holds a run of another command: {describe(found)}. "
                "Give the experiment another name, or delete that folder"
            )
        if ended:
            return folder.state
        out = folder.path.resolve() / "out"
        argv, env = task.run.filled(task.cell.name, out, task.toml.resolve().parent)
        own = fingerprint(tables, argv, env, task.where, task.toml)
        for partner, factors in task.partners:
            ready = RunFolder(partner).state in ("finished", "diverged")
            if ready and (found := mismatch(own, RunFolder(partner).fingerprint(), factors)):
                raise ValueError(
                    f"{task.cell.name} is no partner of {partner.name}: {describe(found)}. "
                    "A pair differs in its declared factors alone; delete the older run to make both again"
                )
        resumes = folder.status.get("resumes", -1) + 1
        for name in ("metrics.jsonl", "metrics.parquet", "scores.parquet", "log.txt"):
            (folder.path / name).unlink(missing_ok=True)
        shutil.rmtree(out, ignore_errors=True)
        make_folder(out)
        folder.write("config", {"config": tables, "derived": _commit(task.where), "plugins": {}})
        folder.write("fingerprint", own)
        folder.write("status", {"state": "running", "step": 0, "resumes": resumes})
        try:
            return _carry_out(task, folder, out, argv, env, resumes, event)
        except ValueError as error:
            folder.write("status", {"state": "failed", "step": 0, "resumes": resumes, "message": str(error)})
            raise ValueError(f"{task.cell.name}: {error}") from None


def _carry_out(
    task: CommandTask, folder: RunFolder, out: Path, argv: list[str], env: dict[str, str], resumes: int, event: Event
) -> str:
    source, metric = task.run.metrics, task.run.metric
    begin = time.perf_counter()
    log, last = folder.path / "log.txt", deque[str](maxlen=SHOWN)
    asked = "" if task.run.scores else metric  # the scores are the result: what a log says is beside it
    rows, live = Rows(source.step if source else "step", asked), MetricsLog(folder.path / "metrics.jsonl")

    def line_written(line: str) -> None:
        if line.strip():
            last.append(line.strip())
        for row in _matches(source, line, asked):
            rows.add(row, f"the output's line {line.strip()!r}")
            live.write(rows.latest)

    def look() -> None:
        if source and source.jsonl:
            for row in _new_rows(out / source.jsonl, rows):
                live.write(row)
        if rows.latest:
            words = f"step {rows.latest['step']}"
            if metric in rows.latest:
                words += f", {metric} {rows.latest[metric]:.4g}"
            event(task.cell, {"kind": "step", "step": rows.latest["step"], "steps": 0, "words": words})

    def where() -> str:
        said = "".join(f"\n    {line[:200]}" for line in last) or " nothing"
        return f"; it last wrote:{said}\nThe whole output: {log}"

    try:
        code = start(argv, task.where, env, log, 60 * task.minutes, line_written, look)
    finally:
        live.close()
    if code is None:
        raise ValueError(f"took longer than command.minutes = {task.minutes:g} and was ended{where()}")
    if code == CANNOT_START:
        raise ValueError(f"{last[-1] if last else argv[0]} (working folder {task.where})")
    if code:
        raise ValueError(f"the command ended with exit code {code}{where()}")
    if source and source.jsonl:
        rows = read_rows(out / source.jsonl, source.step, asked)  # from the start: the file may have been written anew
    table = rows.table()
    write_atomic(folder.path / "metrics.jsonl", "".join(json.dumps(_finite(row)) + "\n" for row in table))
    folder.finish_metrics()
    status: dict[str, Any] = {"step": table[-1]["step"] if table else 0, "resumes": resumes}
    if rows.repeated:
        status["note"] = f"a step's value came again {rows.repeated} times: the last one counts"
    scores = read_scores(out / task.run.scores) if task.run.scores else _one_score(rows, task.run, where)
    value = sum(score.value for score in scores) / (UNIT[task.run.unit] * sum(score.weight for score in scores))
    seconds = {"training": time.perf_counter() - begin}
    if not math.isfinite(value):  # as it is where any score is not
        message = f"{metric} is not a finite number at the end"
        folder.write("status", {**status, "state": "diverged", "message": message, "seconds": seconds})
        return "diverged"
    folder.write_scores(scores)
    series = [[row["step"], row[metric]] for row in table if metric in row]
    same = digest([repr(series), [[score.item, repr(score.value), repr(score.weight)] for score in scores]])
    folder.write("status", {**status, "state": "finished", "seconds": seconds, "weights": same, "value": value})
    return "finished"


# The process


def start(
    argv: Sequence[str], where: Path, env: Mapping[str, str], log: Path, limit: float, line: Callable[[str], None],
    look: Callable[[], None],
) -> int | None:  # fmt: skip
    """Runs a command to its end and returns its exit code; None where it took longer than ``limit`` seconds (0: none).

    Its output goes to ``log`` and line by line to ``line``; ``look`` is called a few times a second. The command and
    what it started are ended whatever ends this call, this process's own death included.
    """
    begin = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-I", str(GUARD), *argv], cwd=where, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True, encoding="utf-8", errors="replace",
        env={"PYTHONUNBUFFERED": "1", **os.environ, **env},
    )  # fmt: skip
    faults: list[BaseException] = []

    def read() -> None:  # a thread of its own: what the command left running may hold its output open
        assert process.stdout is not None, "a pipe"
        try:
            with log.open("w", encoding="utf-8") as file:
                for text in process.stdout:
                    file.write(text)
                    file.flush()
                    line(text)
        except (OSError, ValueError) as error:  # a full disk, a metric that is no number
            faults.append(error)

    reader = Thread(target=read, daemon=True)
    reader.start()
    code = None
    try:
        while code is None and not faults and not (limit and time.perf_counter() - begin > limit):
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(POLL)
            look()
    finally:
        _end(process)
        reader.join()
        assert process.stdout is not None, "a pipe"
        process.stdout.close()
    if faults:
        raise faults[0]
    return code


def _end(process: subprocess.Popen[str]) -> None:
    """Ends the command where it still runs, and what it left behind."""
    assert process.stdin is not None, "a pipe"
    with suppress(OSError):  # the guard may be gone
        process.stdin.close()
    try:
        process.wait(GRACE + 1)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if os.name == "posix":
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


# What must agree within a pair


def fingerprint(
    tables: Mapping[str, Any], argv: Sequence[str], env: Mapping[str, str], where: Path, toml: Path
) -> dict[str, Any]:
    """What can be known of a run before it starts, in the form of our own engine's fingerprint.

    The content of files that the command names is compared by name, as plugins are.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "config": dict(tables),
        "start": {},
        "environment": {
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
            "device": processor(),
            "cores": cores,
            "program": _program(argv[0], env, where),
            **_tracked(where, toml),
        },
        "code": "the command's own",
        "machine": machine(),
        "plugins": dict(_files(argv, where)),
    }


def _program(name: str, env: Mapping[str, str], where: Path) -> str:
    if "/" in name or os.sep in name:
        return str(where / name)
    return shutil.which(name, path=env.get("PATH")) or name


def _files(argv: Sequence[str], where: Path) -> Iterator[tuple[str, str]]:
    for word in argv[1:]:
        path = where / word
        with suppress(OSError, ValueError):  # a word that is no path, or too long for one
            if path.is_file() and path.stat().st_size <= LARGEST:
                yield word, hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _tracked(where: Path, toml: Path) -> dict[str, str]:
    """A digest of the working folder's files that git tracks, as they lie there; {} in no checkout.

    Not of the experiment's own TOML: a longer one, with more seeds or arms, continues what was run.
    """
    try:
        chosen = ("--", ".", f":(exclude,literal){toml.resolve().relative_to(where).as_posix()}")
    except ValueError:  # it lies elsewhere
        chosen = ("--", ".")
    listed, changes = _git(where, "ls-files", "--stage", *chosen), _git(where, "diff", *chosen)
    if listed is None or changes is None:
        return {}
    return {"files": hashlib.sha256(listed + changes).hexdigest()[:16]}


def _commit(where: Path) -> dict[str, Any]:
    """Where the checkout stands, for the record; {} in none."""
    commit, changes = _git(where, "rev-parse", "HEAD"), _git(where, "status", "--porcelain", "--", ".")
    if commit is None or changes is None:
        return {}
    return {"commit": commit.decode("ascii", "replace").strip(), "changed": bool(changes)}


def _git(where: Path, *words: str) -> bytes | None:
    try:
        done = subprocess.run(["git", "-C", str(where), *words], capture_output=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):  # no git here: then there is nothing to compare
        return None
    return done.stdout if done.returncode == 0 else None


# Metrics


@dataclass
class Rows:
    """Rows of metrics by step; of a value that comes twice at a step the last counts.

    A row without a step belongs to the step before it; where no row has one, to its own number.
    asked: the metric that must be a number where it stands; a text is left out of the others.
    """

    step: str
    asked: str = ""
    by_step: dict[int, dict[str, float]] = field(default_factory=dict[int, dict[str, float]])
    last: dict[str, float] = field(default_factory=dict[str, float])  # of each metric, the value that was written last
    latest: dict[str, float] = field(default_factory=dict[str, float])
    repeated: int = 0
    read: int = 0
    named: bool = False  # whether any row had a step
    seen: int = 0  # bytes of the file, by the live log

    def add(self, row: Mapping[str, Any], place: str) -> None:
        """Takes a row's numbers. ValueError naming ``place`` for a step that is no whole number from 0.

        So for a text where the metric ``asked`` stands.
        """
        if self.asked and isinstance(text := row.get(self.asked), str):
            raise ValueError(f"{place}: {self.asked} = {text!r} is no number{_hint(text)}; write it without quotes")
        step: int = int(self.latest["step"]) if self.named else self.read
        if self.step in row:
            given = row[self.step]
            number = _step_of(given) if isinstance(given, str) else given if _is_number(given) else math.nan
            if not (math.isfinite(number) and number == int(number) >= 0):
                raise ValueError(f"{place}: {self.step} = {given!r} is no whole number from 0{_hint(given)}")
            step = int(number)
            if not self.named:
                self.by_step = {0: dict(self.last)} if self.last else {}
                self.repeated, self.named = 0, True
        numbers = {name: float(value) for name, value in row.items() if name != self.step and _is_number(value)}
        held = self.by_step.setdefault(step, {})
        self.repeated += len(held.keys() & numbers.keys())
        held |= numbers
        self.last |= numbers
        self.latest = {"step": step, **numbers}
        self.read += 1

    def table(self) -> list[dict[str, Any]]:
        """One row a step, in their order."""
        return [{"step": step, **self.by_step[step]} for step in sorted(self.by_step)]


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _finite(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if math.isfinite(value)}


def _number_of(text: str) -> float | None:
    """The number that a text is; None where it is none, or one with a comma: 1,5 may be 1.5 or 15.

    A comma or semicolon after it belongs to the sentence.
    """
    text = text.strip().rstrip(",;")
    return float(text) if NUMBER.fullmatch(text) else None


def _step_of(text: str) -> float:
    """A step: 1,000 can only be a thousand, as 1.000 is none that anybody writes. NaN where it is no number."""
    text = text.strip().rstrip(",;")
    number = _number_of(text.replace(",", "") if THOUSANDS.fullmatch(text) else text)
    return math.nan if number is None else number


def _hint(text: Any) -> str:
    return " (a comma may mean two things)" if isinstance(text, str) and "," in text.strip().rstrip(",;") else ""


def _matches(source: Source | None, line: str, asked: str) -> Iterator[dict[str, Any]]:
    """What the patterns find in a line of output. ValueError where the group of the metric ``asked`` holds no number.

    Others without one are left out.
    """
    for pattern in source.pattern if source else ():
        found = re.search(pattern, line)
        groups = {name: text for name, text in found.groupdict().items() if text is not None} if found else {}
        row: dict[str, Any] = {}
        for name, text in groups.items():
            number = _number_of(text)
            if source and name == source.step:
                row[name] = text
            elif number is not None:
                row[name] = number
            elif name == asked:
                raise ValueError(
                    f"pattern {pattern!r}: {name} = {text!r} is no number{_hint(text)}, in the line {line.strip()!r}"
                )
        if row:
            yield row


def _new_rows(path: Path, rows: Rows) -> Iterator[dict[str, Any]]:
    """The whole lines that were added since the last look, for the live log: what is wrong is told at the end."""
    try:
        with path.open("rb") as file:
            file.seek(rows.seen)
            data = file.read()
    except OSError:
        return
    whole = data.rfind(b"\n") + 1
    rows.seen += whole
    for text in data[:whole].split(b"\n"):
        with suppress(ValueError):
            row = json.loads(text)
            if isinstance(row, dict):
                rows.add(row, "")
                yield rows.latest


def read_rows(path: Path, step: str, asked: str = "") -> Rows:
    """The rows of a file of JSON lines. ValueError naming the line that is none; no rows where there is no file.

    asked: the metric that must be a number where it stands.
    """
    rows = Rows(step, asked)
    for place, row in _json_lines(path):
        rows.add(row, place)
    return rows


def read_scores(path: Path) -> list[ItemScore]:
    """One score an item: ``{"item": "a", "value": 3.5, "weight": 2}``, weight 1 where left out.

    ValueError naming the line where an item comes twice, a number is missing or a weight is not above 0.
    """
    found: dict[str, ItemScore] = {}
    for place, row in _json_lines(path):
        item, value, weight = row.get("item"), row.get("value"), row.get("weight", 1)
        if not isinstance(item, (str, int)) or not _is_number(value) or not _is_number(weight):
            raise ValueError(f'{place}: {row!r}: write {{"item": NAME, "value": NUMBER, "weight": NUMBER}}')
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"{place}: weight = {weight!r}: above 0; leave out items without any")
        if str(item) in found:
            raise ValueError(f"{place}: item {item!r} is there twice; each item counts once")
        found[str(item)] = ItemScore("command", str(item), float(value), float(weight))
    if not found:
        raise ValueError(f"{path}: command.scores: no scores there; the command must write one JSON line an item")
    return list(found.values())


def _json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, row) of each line. Python's own writers say NaN and Infinity, which is read as such."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 (byte {error.start})") from None
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{place}: no JSON: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{place}: {row!r}: a JSON object is wanted")
        yield place, row


def _one_score(rows: Rows, run: CommandRun, where: Callable[[], str]) -> list[ItemScore]:
    """The run as one item: the last value of the metric."""
    if run.metric not in rows.last:
        assert run.metrics is not None, "checked when the file was read"
        source = f"the file {run.metrics.jsonl} in {{out}}" if run.metrics.jsonl else f"pattern {run.metrics.pattern}"
        others = f" (found: {', '.join(rows.last)})" if rows.last else ""
        raise ValueError(f"primary.metric = {run.metric!r}: {source} gave no such value{others}{where()}")
    return [ItemScore("command", "run", rows.last[run.metric], 1.0)]
