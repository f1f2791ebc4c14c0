"""A run on several processes: what it records, what becomes of a process that dies, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from processes import together
from xsalab.eval.core import CoreConfig
from xsalab.experiment.core import ask_core
from xsalab.experiment.launch import error_of, launch
from xsalab.experiment.plugins import import_plugins
from xsalab.experiment.run import RunTask, run_cell
from xsalab.experiment.store import RunFolder
from xsalab.peers import Elsewhere
from xsalab.train import TrainConfig

Numbers = Callable[[RunFolder], Mapping[str, Any]]

# Half way through the run process 1 is in trouble once: when there is a file ``marker``, whose text says in which.
PLUGIN = """
import os, signal
from pathlib import Path
import torch
from xsalab.model.variant import Variant, variant

@variant("trouble")
class Trouble(Variant):
    def __init__(self, site, marker: str = "") -> None:
        super().__init__(site)
        self.marker, self.fraction = Path(marker), 0.0

    def set_progress(self, fraction):
        self.fraction = fraction

    def forward(self, t, attend):
        training = torch.is_grad_enabled() and self.fraction >= 0.5
        if training and os.environ.get("RANK") == "1" and self.marker.is_file():
            how = self.marker.read_text()
            self.marker.unlink()
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(5, "the cable is loose", "/mnt/shared")
        return attend(t.q, t.k, t.v)
"""


@pytest.fixture
def trouble(lab: Callable[..., Any], tmp_path: Path) -> Callable[..., tuple[RunTask, Path]]:
    """A task on two processes, and the file that brings trouble: eight steps, a checkpoint after every second one."""

    def make(out: str, **changes: Any) -> tuple[RunTask, Path]:
        (tmp_path / "trouble.py").write_text(PLUGIN, encoding="utf-8")
        import_plugins((("trouble.py", PLUGIN),))
        marker = tmp_path / "marker"
        made = lab(
            out=out, plugins=["trouble.py"], arms={"standard": {"variant": "trouble", "marker": str(marker)}},
            seeds=[0], train__tokens=256 * 8, train__processes=2, eval__every=4, **changes,
        )  # fmt: skip
        return made.task(), marker

    return make


def silent(cell: Any, content: dict[str, Any]) -> None: ...


@pytest.mark.slow
def test_a_killed_process_costs_nothing(trouble: Callable[..., tuple[RunTask, Path]], numbers_of: Numbers) -> None:
    """F087, F093, F101: the run goes on by itself from its last checkpoint and ends, to the bit, as the undisturbed."""
    whole, marker = trouble("whole")
    assert launch(whole, silent) == "finished"
    killed, marker = trouble("killed")
    marker.write_text("killed")
    events: list[dict[str, Any]] = []
    begin = time.monotonic()
    assert launch(killed, lambda cell, content: events.append(content)) == "finished"
    assert time.monotonic() - begin < 120
    assert not marker.exists()
    assert [content["kind"] for content in events].count("again") == 1
    found, expected = RunFolder(killed.folder), RunFolder(whole.folder)
    assert numbers_of(found) == numbers_of(expected)
    assert (found.path / "model.safetensors").read_bytes() == (expected.path / "model.safetensors").read_bytes()
    assert expected.status["processes"] == [[0, 2]]
    assert found.status["processes"] == [[0, 2], [4, 2]]
    assert {path.name for path in found.path.iterdir()} == {path.name for path in expected.path.iterdir()}


@pytest.mark.slow
def test_two_processes_record_what_one_does(lab: Callable[..., Any]) -> None:
    """F105, F106, F111, F131: the same documents, losses and counts, whatever number of batches two have to share."""
    changes: dict[str, Any] = {"seeds": [0], "train__tokens": 256 * 4, "eval__every": 2, "eval__batch_rows": 3}
    one, two = lab(out="one", **changes).task(), lab(out="two", train__processes=2, **changes).task()
    assert run_cell(one) == "finished"
    assert launch(two, silent) == "finished"
    alone, together = RunFolder(one.folder), RunFolder(two.folder)
    assert alone.scores().keys() == together.scores().keys()
    for item, (nats, size) in alone.scores().items():
        assert together.scores()[item] == (pytest.approx(nats, rel=1e-5), size)
    for mine, theirs in zip(alone.metrics(), together.metrics(), strict=True):
        assert mine.keys() == theirs.keys()
        for name in {"step", "tokens", "lr_factor"} & mine.keys():
            assert mine[name] == theirs[name]
        for name in {"loss", "val_bpb"} & mine.keys():
            assert mine[name] == pytest.approx(theirs[name], rel=1e-5)
    # the rest of a run may be made by another number of processes: no other run is meant
    assert run_cell(dataclasses.replace(two, config=one.config)) == "finished"


@pytest.mark.slow
def test_the_error_of_a_process_is_told(trouble: Callable[..., tuple[RunTask, Path]]) -> None:
    """Its own, not that of those that lost it; and what was trained before is kept."""
    task, marker = trouble("out")
    marker.write_text("loose")
    with pytest.raises(OSError, match="the cable is loose") as told:
        launch(task, silent)
    assert told.value.filename == "/mnt/shared"
    assert {path.name for path in (task.folder / "checkpoints").iterdir()} == {"step-000000002", "step-000000004"}
    assert launch(task, silent) == "finished"
    assert RunFolder(task.folder).status["processes"] == [[0, 2], [4, 2]]


@pytest.mark.slow
def test_two_processes_answer_core_as_one(lab: Callable[..., Any], tmp_path: Path) -> None:
    """F111: every item once, with the same answer, by tasks of four, five and more items."""
    run = lab(seeds=[0], train__tokens=256).run().path
    bundle = Path(__file__).parents[2] / "examples" / "downstream" / "bundle"
    copy = run.parent / "copy"
    shutil.copytree(run, copy)
    alone = ask_core(run, CoreConfig(bundle=str(bundle), max_per_task=5))
    ended = together(["-m", "xsalab", "core", copy, f"--bundle={bundle}", "--max-per-task=5", "--json"], 2)
    assert [code for code, _ in ended] == [0, 0], ended
    content = json.loads(ended[0][1].splitlines()[-1])
    assert ended[1][1] == ""  # the second says nothing
    assert content["CORE"] == pytest.approx(alone.figure)
    assert len(content["tasks"]) == len(alone.answers) > 1
    for path in sorted((run / "core").glob("*.parquet")):
        mine, theirs = (pq.read_table(folder / "core" / path.name).to_pylist() for folder in (run, copy))
        assert [row["item"] for row in mine] == [row["item"] for row in theirs]
        assert [row["value"] for row in mine] == [row["value"] for row in theirs]


COMMAND = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


@pytest.mark.slow
def test_torchrun_starts_again(write_experiment: Callable[..., Path], tmp_path: Path) -> None:
    """``torchrun --max-restarts``: from the last complete checkpoint, and it wins over train.processes."""
    (tmp_path / "trouble.py").write_text(PLUGIN, encoding="utf-8")
    marker = tmp_path / "marker"
    marker.write_text("killed")
    arms = {"standard": {"variant": "trouble", "marker": str(marker)}}
    path = write_experiment(plugins=["trouble.py"], arms=arms, seeds=[0], train__tokens=256 * 4)
    done = subprocess.run(
        [
            *COMMAND, "--nproc-per-node=2", "--max-restarts=1", "-m", "xsalab", "train", str(path),
            "--arm=standard", "--seed=0", f"--out={tmp_path / 'out'}",
        ],
        capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert not marker.exists()
    folder = Path(done.stdout.strip())  # one of the two prints
    assert RunFolder(folder).status["processes"] == [[0, 2], [2, 2]]


def test_batches_that_do_not_divide() -> None:
    """The nearest legal values are named."""
    train = TrainConfig(batch_tokens=12 * 64, processes=5)
    with pytest.raises(ValueError, match=re.escape("5 processes do not divide the 12 rows of a batch")) as told:
        train.batch_rows(64)
    assert "use 4 or 6 processes, or train.batch_tokens = 960" in str(told.value)
    with pytest.raises(ValueError, match=re.escape("use 12 processes, or train.batch_tokens = 1024")):
        dataclasses.replace(train, processes=16).batch_rows(64)
    assert dataclasses.replace(train, processes=6).batch_rows(64) == 12


def test_a_run_of_many_is_not_begun_by_one(lab: Callable[..., Any]) -> None:
    task = lab(train__processes=2).task()
    with pytest.raises(ValueError, match="torchrun --nproc-per-node=2 -m xsalab train"):
        run_cell(task)
    assert not task.folder.exists()


def test_verbs_that_are_for_one_process(xsalab: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    xsalab("status", "x.toml").refused("torchrun", "train.processes")


def test_errors_travel_as_what_they_are() -> None:
    assert error_of(ValueError("a"), 3) == {"kind": "error", "rank": 3, "error": "ValueError", "message": "a"}
    assert error_of(Elsewhere("b"), 1)["error"] == "Elsewhere"
    assert "ZeroDivisionError" in error_of(ZeroDivisionError("c"), 0)["message"]
    told = error_of(FileNotFoundError(2, "gone", "/x"), 0)
    assert (told["error"], told["errno"], told["filename"]) == ("OSError", 2, "/x")
