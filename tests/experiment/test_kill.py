"""kill -9 at any moment, and the same command again: weights, losses and scores agree to the bit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from xsalab.experiment.store import RunFolder

pytestmark = pytest.mark.slow

Numbers = Callable[[RunFolder], Mapping[str, Any]]
COMMAND = [sys.executable, "-c", "from xsalab.cli import main; main()"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}


def killed(*arguments: object) -> dict[str, Any]:
    """Runs killed.py to its end and returns what it tells."""
    script = str(Path(__file__).with_name("killed.py"))
    done = subprocess.run(
        [sys.executable, script, *map(str, arguments)], capture_output=True, text=True, check=False, env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def runs_of(out: Path) -> dict[str, RunFolder]:
    return {path.name: RunFolder(path) for path in sorted(out.glob("experiments/*/runs/*"))}


def assert_equal(out: Path, whole: Path, numbers_of: Numbers) -> None:
    found, expected = runs_of(out), runs_of(whole)
    assert found.keys() == expected.keys()
    for name, run in found.items():
        assert run.state == "finished"
        assert numbers_of(run) == numbers_of(expected[name]), name
        assert (run.path / "model.safetensors").read_bytes() == (expected[name].path / "model.safetensors").read_bytes()
        left = {path.name for path in run.path.iterdir()} ^ {path.name for path in expected[name].path.iterdir()}
        assert not left, left


def test_kills_at_random_moments(write_experiment: Any, tmp_path: Path, numbers_of: Numbers) -> None:
    """F082, F093: 24 kills while it prepares, trains, saves or evaluates; every life ends as the undisturbed run."""
    path = write_experiment(seeds=[0], eval__every=2, train__tokens=256 * 8, data__tokenizer_megabytes=0.1)
    told = killed("random", path, tmp_path / "out", 24, 0)
    assert sum(told["hit"].values()) >= 24
    assert len(told["hit"]) >= 3, told  # of preparing, starting, training, saving, evaluating
    for life in range(told["lives"]):
        assert_equal(tmp_path / "out" / f"life{life}", tmp_path / "out" / "whole", numbers_of)


def test_a_kill_at_every_single_write(write_experiment: Any, tmp_path: Path, numbers_of: Numbers) -> None:
    """F093, F095, F100: one after the other at each flush, rename and removal that a run makes."""
    path = write_experiment(seeds=[0], eval__every=1, arms__xsa=None, train__tokens=256 * 3, train__checkpoint_steps=1)
    told = killed("sweep", path, tmp_path / "out")
    assert told["writes"] > 30
    for life in range(1, told["writes"] + 1):
        assert_equal(tmp_path / "out" / f"life{life}", tmp_path / "out" / "whole", numbers_of)


def test_kills_of_the_command(write_experiment: Any, tmp_path: Path, numbers_of: Numbers) -> None:
    """F113: `xsalab train`, killed three times in its run or at its end; left alone it ends with exit code 0."""
    path = write_experiment(seeds=[0], eval__every=2, train__tokens=256 * 16, arms__xsa=None)
    draw, out = random.Random(1), tmp_path / "out"

    def start(folder: Path) -> subprocess.Popen[str]:
        arguments = ["train", str(path), "--arm", "standard", "--seed", "0", "--out", str(folder)]
        return subprocess.Popen(
            [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
        )

    whole = start(tmp_path / "whole")
    _, said = whole.communicate()
    assert whole.returncode == 0, said
    status = out / "experiments" / "tiny" / "runs" / "base.standard.s0" / "status.json"
    for _ in range(3):
        before = status.stat().st_mtime_ns if status.exists() else 0
        process = start(out)
        while process.poll() is None and (not status.exists() or status.stat().st_mtime_ns == before):
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.2))
        process.kill()
        process.communicate()
    last = start(out)
    printed, said = last.communicate()
    assert last.returncode == 0, said
    assert printed.strip() == str(status.parent)
    assert_equal(out, tmp_path / "whole", numbers_of)
    assert runs_of(out)["base.standard.s0"].status["resumes"] >= 1


def children_of(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks at the children through /proc")
def test_a_killed_run_takes_its_workers_along(write_experiment: Any, tmp_path: Path, numbers_of: Numbers) -> None:
    """`xsalab run` with two workers: they end with their parent; the same command finishes their runs to the bit."""
    path = write_experiment(seeds=[0], train__tokens=256 * 64, train__checkpoint_steps=4)
    out = tmp_path / "out"

    def start(folder: Path, jobs: int) -> subprocess.Popen[str]:
        arguments = ["run", str(path), "--jobs", str(jobs), "--out", str(folder), "--json"]
        return subprocess.Popen(
            [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
        )

    process = start(out, 2)
    while process.poll() is None and not list(out.glob("experiments/*/runs/*/checkpoints/step-*")):
        time.sleep(0.02)
    workers = children_of(process.pid)
    assert len(workers) >= 2
    process.send_signal(signal.SIGKILL)
    process.communicate()
    limit = time.monotonic() + 10
    while any(map(alive, workers)) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not any(map(alive, workers))
    assert "running" in {run.state for run in runs_of(out).values()}
    again, whole = start(out, 2), start(tmp_path / "whole", 1)
    for finished in (again, whole):
        printed, said = finished.communicate()
        assert finished.returncode == 0, said
        assert json.loads(printed)["complete"]
    assert_equal(out, tmp_path / "whole", numbers_of)
