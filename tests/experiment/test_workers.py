"""Workers: what a dead one had in hand goes on, what dies always fails alone, and partners share a kind of device."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from xsalab.cli import console, experiments
from xsalab.experiment import workers
from xsalab.experiment.design import Cell
from xsalab.experiment.downstream import Downstream, DownstreamTask
from xsalab.experiment.fingerprint import processor
from xsalab.experiment.reading import load_experiment
from xsalab.experiment.run import RunTask
from xsalab.experiment.store import RunFolder
from xsalab.experiment.workers import Handout, Losses, choose_slots, default_jobs, ended_by, run_tasks, slots

# Text of a plugin: its process is killed once, as soon as the run has a checkpoint.
DIES_ONCE = """
import os, pathlib, signal, threading, time
folder, mark = pathlib.Path({folder!r}), pathlib.Path({mark!r})
def watch():
    while not list(folder.glob("checkpoints/step-*")):
        time.sleep(0.001)
    mark.touch()
    os.kill(os.getpid(), signal.SIGKILL)
if not mark.exists():
    threading.Thread(target=watch, daemon=True).start()
"""
DIES = "import os\nos._exit(3)\n"


def ignore(cell: Cell, content: dict[str, Any]) -> None:
    pass


def on(task: RunTask, device: str = "cuda", processes: int = 1) -> RunTask:
    train = dataclasses.replace(task.config.train, device=device, processes=processes)
    return dataclasses.replace(task, config=dataclasses.replace(task.config, train=train))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes torch find GPUs of these names."""

    def make(*names: str) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(names))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: names[number])

    return make


# Where


def test_devices_in_groups() -> None:
    assert slots([0, 1, 2, 3], 1) == [(0,), (1,), (2,), (3,)]
    assert slots([3, 1, 0, 2], 2) == [(3, 1), (0, 2)]


@pytest.mark.parametrize(("count", "processes", "legal"), [(5, 2, "give 4 or 6"), (1, 4, "give 4"), (7, 3, "6 or 9")])
def test_devices_that_do_not_come_out_even(count: int, processes: int, legal: str) -> None:
    with pytest.raises(ValueError, match=f"{count} devices for runs of train.processes = {processes}: .*{legal} "):
        slots(range(count), processes)


def test_slots_on_gpus(lab: Any, gpus: Any) -> None:
    """All that are there; those that were named; more jobs than they hold share them."""
    gpus(*["A"] * 5)
    one = lab().task()
    alone, shared = [on(one)] * 9, [on(one, processes=2)] * 9
    assert choose_slots(alone) == [(0,), (1,), (2,), (3,), (4,)]
    assert choose_slots(alone[:2]) == [(0,), (1,)]
    assert choose_slots(alone, (4, 1)) == [(4,), (1,)]
    assert choose_slots(alone, jobs=7) == [(0,), (1,), (2,), (3,), (4,), (0,), (1,)]
    assert choose_slots(shared) == [(0, 1), (2, 3)]
    assert choose_slots(shared, (4, 3)) == [(4, 3)]
    with pytest.raises(ValueError, match=r"train.processes = 8: there are 5 GPUs here; give 5 or fewer"):
        choose_slots([on(one, processes=8)])


def test_slots_on_the_processor(lab: Any, gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By cores, at threads times processes a run, whatever GPUs there are."""
    gpus("A", "A", "A")
    monkeypatch.setattr(workers.os, "sched_getaffinity", lambda _: set(range(8)))
    one = lab().task()
    assert choose_slots([one] * 9) == [()] * 8
    assert choose_slots([on(one, "cpu", 4)] * 9) == [()] * 2
    assert choose_slots([one] * 9, jobs=3) == [()] * 3
    assert default_jobs(16, 9) == 1


def test_the_kind_of_a_slot(gpus: Any) -> None:
    gpus("A", "A", "B")
    assert workers.device_kind((0, 1)) == "A"
    assert workers.device_kind(()) == processor()
    with pytest.raises(ValueError, match=r"GPUs 1,2 would share one run and are of several kinds: A, B; order"):
        workers.device_kind((1, 2))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0,x", r"--devices 0,x: not numbers; give those of GPUs, such as 0,1,2,3"),
        ("0,,1", "not numbers"),
        ("-1", "not numbers"),
        ("1,0,1", "GPU 1 comes twice"),
        ("0,3", r"there is no GPU 3; those here are 0 to 2"),
        ("0,1,2", r"3 devices for runs of train.processes = 2: give 2 or 4 devices"),
    ],
)
def test_devices_that_cannot_be_had(write_experiment: Any, gpus: Any, text: str, words: str) -> None:
    gpus("A", "A", "A")
    experiment = load_experiment(write_experiment(train__device="cuda", train__processes=2))
    assert workers.read_devices("2, 0", experiment) == (2, 0)
    with pytest.raises(ValueError, match=words):
        workers.read_devices(text, experiment)


def test_devices_where_there_are_none(xsalab: Any, write_experiment: Any, gpus: Any, tmp_path: Path) -> None:
    gpus()
    path, on_gpus = write_experiment(), write_experiment("other", train__device="cuda")

    def run(*arguments: object) -> Any:
        return xsalab("run", *arguments, "--out", tmp_path / "out")

    run(path, "--devices", "0").refused("train.device = 'cpu'; use --jobs N")
    run(on_gpus, "--devices", "0").refused("there is no GPU 0; there is none")
    run(path, "--devices", "0", "--jobs", 2).refused("--devices 0 --jobs 2", "give one")
    run(path, "--on", "slurm").refused("--on slurm: use local or ray")
    run(path, "--address", "a:1").refused("--address a:1", "--on ray")
    run(path, "--on", "ray", "--jobs", 2).refused("--jobs 2: with --on ray the cluster places the runs")
    assert not (tmp_path / "out").exists()


# Which


def test_a_block_stays_on_its_kind(lab: Any) -> None:
    """Once a run of a point and seed is begun on a kind, the others go to slots of that kind alone."""
    home = lab(seeds=[0, 1])
    first, second = [home.task("standard", 0), home.task("xsa", 0)], [home.task("standard", 1), home.task("xsa", 1)]
    handout = Handout([*first, *second], {"A", "B"})
    assert handout.take("A") == first[0]
    assert handout.take("B") == second[0]
    assert handout.take("B") == second[1]
    assert handout.take("B") is None
    handout.put_back(second[0])
    assert handout.take("A") == first[1]
    assert handout.take("A") is None
    assert handout.take("B") == second[0]


def test_a_block_goes_on_where_it_began(lab: Any) -> None:
    """What an earlier call began, by its fingerprint; where that kind is no more it is an error, and nothing runs."""
    home = lab(seeds=[0, 1])
    run = home.run("standard", 1)
    run.write("fingerprint", {**run.read("fingerprint"), "environment": {"device": "B"}})
    pending = [home.task("xsa", 1), home.task("standard", 0), home.task("xsa", 0)]
    handout = Handout(pending, ["A", "B"])
    assert handout.take("A") == pending[1]
    assert handout.take("B") == pending[0]
    assert handout.take("B") is None
    with pytest.raises(ValueError, match=r"base.xsa.s1: the runs of its point and seed began on B, .*this call \(A\)"):
        run_tasks(pending, [(), ()], ignore, lambda slot: "A")
    assert home.folder("standard", 0).state == "waiting"
    asked = DownstreamTask(Cell("base", "standard", 1), run.path, Downstream(), 1, "")
    assert Handout([asked], ["A"]).take("A") == asked  # a trained run may be asked anywhere


# Deaths


@pytest.mark.slow
def test_dead_workers(lab: Any, numbers_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose worker is killed goes on from its checkpoint to the same numbers; what always kills fails alone."""
    monkeypatch.setattr(workers, "RETRIES", 1)  # less of starting processes
    sizes: dict[str, Any] = {"train__tokens": 256 * 24, "train__checkpoint_steps": 4}
    home, whole = lab(**sizes), lab(out="whole", **sizes)
    dies = DIES_ONCE.format(folder=str(home.folder("standard", 0).path), mark=str(tmp_path / "mark"))
    pending: list[workers.Task] = [
        dataclasses.replace(home.task("standard", 0), plugins=(("once.py", dies),)),
        dataclasses.replace(home.task("xsa", 1), plugins=(("always.py", DIES),)),
        home.task("xsa", 0),
    ]
    told: list[tuple[str, str, str]] = []
    with pytest.raises(ValueError, match=r"failed: base.xsa.s1: .* exit code 3, 2 times. The other .* same command"):
        run_tasks(
            pending,
            [(), ()],
            lambda cell, content: told.append((cell.name, content["kind"], content.get("text", ""))),
        )
    again = {(name, text) for name, kind, text in told if kind == "again"}
    assert ("base.standard.s0", "its worker was killed by SIGKILL (out of memory?); taken up again") in again
    assert sum(entry[:2] == ("base.xsa.s1", "again") for entry in told) == workers.RETRIES
    killed, dead = home.folder("standard", 0), home.folder("xsa", 1)
    assert killed.status["resumes"] == 1
    assert dead.state == "failed"
    assert dead.status["message"] == "its worker ended with exit code 3, 2 times"
    assert set(run_tasks([home.task("xsa", 1)], [()], ignore).values()) == {"finished"}
    for arm, seed in (("standard", 0), ("xsa", 0), ("xsa", 1)):
        assert numbers_of(home.folder(arm, seed)) == numbers_of(whole.run(arm, seed))


def test_a_failed_run_is_recorded_once(lab: Any) -> None:
    """Of a run that is only asked the training stays finished; of one without a folder there is nothing to record."""
    home = lab()
    trained = home.run()
    asked = DownstreamTask(Cell("base", "standard", 0), trained.path, Downstream(), 1, "")
    losses = Losses(ignore)
    assert [losses.again(asked, "died") for _ in range(3)] == [True, True, False]
    assert [losses.again(home.task("xsa"), "died") for _ in range(3)] == [True, True, False]
    assert trained.state == "finished"
    assert not home.folder("xsa").path.exists()
    with pytest.raises(ValueError, match=r"failed: base.standard.s0: died, 3 times; base.xsa.s0: died, 3 times. "):
        losses.tell()


def test_how_a_process_ended() -> None:
    assert ended_by(-9) == "was killed by SIGKILL (out of memory?)"
    assert ended_by(-11) == "was killed by SIGSEGV"
    assert ended_by(-60) == "was killed by signal 60"
    assert ended_by(1) == "ended with exit code 1"


# What is seen


def test_status_tells_steps_and_places(xsalab: Any, lab: Any, write_experiment: Any, tmp_path: Path) -> None:
    """All runs under way, each with its newest step and where it is."""
    home = lab()
    for arm, step in (("standard", 1), ("xsa", 2)):
        run = home.run(arm)
        rows = [row for row in run.metrics() if row["step"] <= step]
        (run.path / "metrics.parquet").unlink()
        (run.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 3, "lo')
        run.write("status", {"state": "running", "step": 0, "steps": 4, "resumes": 0})
        assert run.latest() == rows[-1]
    assert RunFolder(tmp_path).latest() == {}
    path = write_experiment()
    shown = json.loads(xsalab("status", path, "--out", home.out, "--json").out)
    place = f"{processor()}, machine {home.folder().read('fingerprint')['machine']}"
    assert [(row["run"], row["state"], row["step"], row.get("where")) for row in shown] == [
        ("base.standard.s0", "running", 2, place), ("base.xsa.s0", "running", 3, place),
        ("base.standard.s1", "waiting", 0, None), ("base.xsa.s1", "waiting", 0, None),
    ]  # fmt: skip
    assert "2 running" in xsalab("status", path, "--out", home.out).out


def test_a_line_for_each_run_under_way(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal: name, steps, loss and place of all that run at a time; one that has ended leaves its result."""
    home = lab(seeds=[0])
    screen = Console(file=io.StringIO(), force_terminal=True, width=150, height=20, legacy_windows=False)
    monkeypatch.setattr(console, "notes", screen)
    monkeypatch.setattr(experiments, "notes", screen)
    pending = [home.task("standard"), home.task("xsa")]
    with experiments._run_progress(home.store, pending) as event:
        for number, task in enumerate(pending):
            event(task.cell, {"kind": "start", "where": f"GPU {number}"})
            event(task.cell, {"kind": "step", "step": number + 1, "steps": 4, "loss": 5.25})
        screen.file.truncate(0)  # pyright: ignore
        home.run("xsa")
        event(pending[0].cell, {"kind": "step", "step": 3, "steps": 4, "loss": 5.125})
    lines = screen.file.getvalue()  # pyright: ignore
    assert "base.standard.s0 3/4, loss 5.125, GPU 0" in lines
    assert "base.xsa.s0 2/4, loss 5.250, GPU 1" in lines
    with experiments._run_progress(home.store, pending) as event:
        event(pending[1].cell, {"kind": "end", "state": "finished"})
    assert "base.xsa.s0: finished, val bpb" in screen.file.getvalue()  # pyright: ignore
