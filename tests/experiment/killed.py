"""Kills runs with SIGKILL and starts them again. Run by test_kill.py in a process of its own.

A child must be forked from a process that has used neither autograd nor threads, so this one only loads the
code, forks, kills and waits; all work is done in the children.

    python killed.py random FILE.toml OUT KILLS SEED     at random moments of preparing and of every run
    python killed.py sweep FILE.toml OUT                  at every single write of one run, one after the other

Prints one JSON value: what was killed, and where.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xsalab.experiment.building import derived
from xsalab.experiment.design import expand, resolve
from xsalab.experiment.fleet import begin_experiment, tasks
from xsalab.experiment.reading import load_experiment
from xsalab.experiment.run import check_causality_once, run_cell
from xsalab.experiment.store import RunFolder


def load_all(path: Path) -> None:
    """What every child would load or check anew."""
    experiment = load_experiment(path)
    for cell in expand(experiment):
        config = resolve(experiment, cell)
        derived(config)
        check_causality_once(config.model, config.variant)


def forked(work: Callable[[], None]) -> int:
    """The process id of a child that does ``work`` and ends with 0."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    return child


def finish(work: Callable[[], None]) -> float:
    """Seconds that an undisturbed child took."""
    begin = time.perf_counter()
    assert os.waitstatus_to_exitcode(os.waitpid(forked(work), 0)[1]) == 0
    return time.perf_counter() - begin


def everything(path: Path, out: Path) -> Callable[[], None]:
    def work() -> None:
        experiment = load_experiment(path)
        begin_experiment(experiment, out)
        for task in tasks(experiment, out):
            run_cell(task)

    return work


def phase(out: Path) -> str:
    """What a killed process was about, from what it left."""
    folders = [RunFolder(path) for path in sorted(out.glob("experiments/*/runs/*"))]
    for run in folders:
        state = run.status
        if state["state"] == "finished":
            continue
        if list(run.path.glob("checkpoints/.*")):
            return "saving"
        if (run.path / "checkpoints" / f"step-{state.get('steps', 0):09d}").is_dir():
            return "evaluating"
        return "training" if state["state"] == "running" else "starting"
    return "starting" if folders else "preparing"


def at_random(path: Path, out: Path, kills: int, seed: int) -> dict[str, Any]:
    draw, hit, lives = random.Random(seed), Counter[str](), 0
    length = finish(everything(path, out / "whole"))
    # On a busy machine lives take longer than the first, and all kills may fall early: then there are more.
    while sum(hit.values()) < kills or lives == 0 or (len(hit) < 3 and sum(hit.values()) < 10 * kills):
        life = out / f"life{lives}"
        child = forked(everything(path, life))
        time.sleep(draw.uniform(0, draw.choice((0.1, 0.5, 1.2)) * length))  # preparing is short
        if os.waitpid(child, os.WNOHANG) == (0, 0):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            hit[phase(life)] += 1
        else:
            lives += 1
    finish(everything(path, out / f"life{lives}"))
    return {"hit": hit, "lives": lives + 1, "seconds": length}


def at_every_write(path: Path, out: Path) -> dict[str, Any]:
    """Kills at the first call that changes the disk, at the second, and so on until a run needs no more."""

    def one(home: Path, die_at: int) -> Callable[[], None]:
        def work() -> None:
            experiment = load_experiment(path)
            begin_experiment(experiment, home)
            calls = 0

            def counted(plain: Callable[..., Any]) -> Callable[..., Any]:
                def call(*arguments: Any, **named: Any) -> Any:
                    nonlocal calls
                    calls += 1
                    if calls == die_at:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return plain(*arguments, **named)

                return call

            for name in ("fsync", "replace", "unlink", "rmdir", "mkdir"):
                setattr(os, name, counted(getattr(os, name)))
            run_cell(tasks(experiment, home)[0])

        return work

    finish(one(out / "whole", 0))
    at = 0
    while True:
        at += 1
        home = out / "swept"
        shutil.rmtree(home / "experiments", ignore_errors=True)
        status = os.waitpid(forked(one(home, at)), 0)[1]
        if os.waitstatus_to_exitcode(status) == 0:
            return {"writes": at - 1}
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, status
        finish(one(home, 0))
        (out / f"life{at}" / "experiments").parent.mkdir()
        (home / "experiments").rename(out / f"life{at}" / "experiments")


if __name__ == "__main__":
    kind, file, folder, *rest = sys.argv[1:]
    load_all(Path(file))
    if kind == "random":
        found = at_random(Path(file), Path(folder), int(rest[0]), int(rest[1]))
    else:
        found = at_every_write(Path(file), Path(folder))
    print(json.dumps(found))
