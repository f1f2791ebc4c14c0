"""One run on several processes, started by torchrun: ``launch`` begins it, this module as a program is each of them.

    python -m torch.distributed.run --standalone --nproc-per-node=N -m xsalab.experiment.launch TASK.json

The processes tell in lines of JSON on standard output what happens; what else they print is shown where they fail.
A guard ends them, with all that they started, when the process that asked for them is gone.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from ..config import build, dump
from ..files import make_folder
from ..peers import Elsewhere, Lost, launched, rank
from ..train.ranks import ALONE, Ranks, joined
from .command_run import CommandTask
from .run import Event, RunTask, run_cell

RETRIES = 2  # of a run whose process died; it goes on from its checkpoint: what kills it three times is the run's own
GUARD = Path(__file__).with_name("guard.py")
LINE = "xsalab "  # begins a line that is for ``launch``


def launch(task: RunTask, event: Event, devices: tuple[int, ...] = ()) -> str:
    """Carries out a cell on ``task.processes`` processes of this machine; returns its state, as ``run_cell`` does.

    devices: numbers of the GPUs, one a process; (): the first ones, or the processor.
    Raises what a process raised, with its number: ValueError, OSError, RuntimeError for a fault of ours. A process that
    was killed is started again with the others, at most RETRIES times, then ValueError.
    """
    for attempt in range(1 + RETRIES):
        told, tail, code = _attempt(task, event, devices)
        # that another is gone says no more than that one was killed
        errors = [content for content in told if content["kind"] == "error" and content["error"] != Lost.__name__]
        if errors:
            raise _error(next((e for e in errors if e["error"] != Elsewhere.__name__), errors[0]), task.processes)
        states = [content["state"] for content in told if content["kind"] == "end"]
        if states:
            return states[0]
        if attempt < RETRIES:
            event(task.cell, {"kind": "again", "text": f"a process ended with code {code}; the run goes on"})
    raise ValueError(
        f"{task.folder}: one of {task.processes} processes was killed {1 + RETRIES} times (exit code {code}, out of "
        f"memory?); the same command continues from the last checkpoint. Their last words:\n{tail}"
    )


def _attempt(task: RunTask, event: Event, devices: tuple[int, ...]) -> tuple[list[dict[str, Any]], str, int]:
    """What the processes told at last, the end of what else they printed, and the exit code."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(task.threads), "PYTHONUNBUFFERED": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    if devices:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")  # the numbers are those of what this process may use
        names = visible.split(",") if visible else [str(number) for number in range(max(devices) + 1)]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(names[number] for number in devices)
    make_folder(task.folder)
    told: list[dict[str, Any]] = []
    tail: deque[str] = deque(maxlen=40)
    with tempfile.TemporaryDirectory(prefix="xsalab-") as folder:
        path = Path(folder) / "task.json"
        path.write_text(json.dumps(dump(task)), encoding="utf-8")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*torchrun, f"--nproc-per-node={task.processes}", "-m", __name__, str(path)]
        child = subprocess.Popen(
            [sys.executable, "-I", str(GUARD), *command], env=environment, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0 if os.name == "posix" else None,
        )  # fmt: skip
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            _listen(child.stdout, task, event, told, tail)
            code = child.wait()
        finally:
            child.stdin.close()  # where this process is stopped, the guard ends the others
            child.stdout.close()
            child.wait()
    return told, "\n".join(tail), code


def _listen(output: IO[bytes], task: RunTask, event: Event, told: list[dict[str, Any]], tail: deque[str]) -> None:
    for raw in output:
        line = raw.decode("utf-8", "replace").rstrip()
        if not line.startswith(LINE):
            tail.append(line)
            continue
        content = json.loads(line.removeprefix(LINE))
        if content["kind"] in ("end", "error"):
            told.append(content)
        else:
            event(task.cell, content)


def _error(content: dict[str, Any], processes: int) -> Exception:
    """The error of one process as it is raised here."""
    text = f"process {content['rank']} of {processes}: {content['message']}"
    if content["error"] == "OSError":
        return OSError(content["errno"], content["message"], content["filename"])
    return ValueError(text) if content["error"] in ("ValueError", Elsewhere.__name__) else RuntimeError(text)


@contextmanager
def as_one_of(task: RunTask | CommandTask) -> Iterator[tuple[RunTask | CommandTask, Ranks]]:
    """The task as torchrun's processes carry it out together, and which of them this is; else as it is, alone.

    torchrun's number of processes wins over train.processes. ValueError where the task is a command's.
    """
    if launched() == 1:
        yield task, ALONE
        return
    if not isinstance(task, RunTask):
        raise ValueError("a command starts its own processes: leave torchrun out, or put it into the command")
    train = dataclasses.replace(task.config.train, processes=launched())
    train.batch_rows(task.config.model.context)
    with joined(train.device) as ranks:
        yield dataclasses.replace(task, config=dataclasses.replace(task.config, train=train)), ranks


def say(content: dict[str, Any]) -> None:
    """One line for ``launch``, in one write: the lines of several processes do not mix."""
    sys.stdout.write(LINE + json.dumps(content) + "\n")
    sys.stdout.flush()


def error_of(error: Exception, rank: int) -> dict[str, Any]:
    """An error as it is told: a user's mistake as such, a fault of ours with its traceback."""
    content: dict[str, Any] = {"kind": "error", "rank": rank, "error": type(error).__name__, "message": str(error)}
    if isinstance(error, OSError) and error.filename:
        found = {"errno": error.errno, "message": error.strerror, "filename": str(error.filename)}
        return {**content, **found, "error": "OSError"}
    if isinstance(error, Elsewhere):
        return content
    if isinstance(error, (ValueError, OSError)):
        return {**content, "error": "ValueError"}
    return {**content, "message": "".join(traceback.format_exception(error))}


def main(path: Path) -> int:
    """One process of the run that ``path`` describes."""
    task = build(RunTask, json.loads(path.read_text(encoding="utf-8")), str(path))
    try:
        with joined(task.config.train.device) as ranks:
            tell: Event = (lambda cell, content: say(content)) if ranks.first else (lambda cell, content: None)
            state = run_cell(task, tell, ranks)
            if ranks.first:
                say({"kind": "end", "state": state})
    except Exception as error:
        say(error_of(error, rank()))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
