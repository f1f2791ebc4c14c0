"""Runs on Ray: a real cluster started here, whose worker and then whose head are killed; and what needs no cluster."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from xsalab.experiment import ray_runs
from xsalab.experiment.design import Cell
from xsalab.experiment.fingerprint import code_digest
from xsalab.experiment.fleet import tasks
from xsalab.experiment.run import RunTask
from xsalab.experiment.store import RunFolder
from xsalab.experiment.workers import run_tasks
from xsalab.files import folder_lock

COMMAND = [sys.executable, "-c", "from xsalab.cli import main; main()"]


def on_gpu(task: RunTask, processes: int = 1) -> RunTask:
    train = dataclasses.replace(task.config.train, device="cuda", processes=processes)
    return dataclasses.replace(task, config=dataclasses.replace(task.config, train=train))


# A real cluster


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Of Ray's processes and of the command: a token of their own, as a user's cluster has one."""
    (tmp_path / "token").write_text("a" * 32)
    return {
        **os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token"),
    }  # fmt: skip


@pytest.fixture
def cluster(environment: dict[str, str]) -> Iterator[tuple[Any, str]]:
    """The head of a Ray cluster with two CPUs, as a process, and its address. All its processes end with the test."""
    psutil = pytest.importorskip("psutil")
    pytest.importorskip("ray", exc_type=ImportError)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = f"from ray.scripts.scripts import cli; cli(['start', '--head', '--block', '--num-cpus=2', '--port={port}'])"
    head = subprocess.Popen(
        [sys.executable, "-c", start], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    process = psutil.Process(head.pid)
    known: dict[int, Any] = {}

    def processes() -> list[Any]:
        known.update((child.pid, child) for child in process.children(recursive=True))
        return list(known.values())

    process.all = processes
    try:
        until(lambda: ray_runs._answers(f"127.0.0.1:{port}", 1) or head.poll() is not None)
        assert head.poll() is None, "the head has ended"
        yield process, f"127.0.0.1:{port}"
    finally:
        if head.poll() is None:
            processes()
            head.kill()
        head.wait()
        for child in known.values():
            if child.is_running():
                child.kill()


def until(true: Callable[[], Any], seconds: float = 120) -> Any:
    limit = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < limit, "it does not come"
        time.sleep(0.02)
    return found


def command(environment: dict[str, str], *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, "run", *map(str, arguments), "--on", "ray", "--json"],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def under_way(out: Path) -> list[RunFolder]:
    """The runs that train and have a checkpoint."""
    found = {path.parents[1] for path in out.glob("experiments/*/runs/*/checkpoints/step-*")}
    return [RunFolder(path) for path in sorted(found) if RunFolder(path).state == "running"]


def worker_of(head: Any, runs: list[RunFolder]) -> Any:
    """The process of the cluster that has one of the runs in hand, by the log that it writes; None: there is none."""
    from psutil import Error

    logs = {str(run.path / "metrics.jsonl") for run in runs}
    for child in head.all() if logs else ():
        with suppress(OSError, Error):
            if logs & {file.path for file in child.open_files()}:
                return child
    return None


@pytest.mark.slow
def test_killed_workers_and_heads(
    lab: Any, cluster: Any, environment: dict[str, str], numbers_of: Any, tmp_path: Path
) -> None:
    """12 cells on 2 CPUs, a worker killed in the middle: complete, and to the bit what is found without Ray.

    Then the head is killed: the command says so, and once more, on a Ray of its own, it ends as complete.
    """
    sizes: dict[str, Any] = {"train__tokens": 256 * 24, "train__checkpoint_steps": 4, "controls__null": True}
    home = lab(out="local", seeds=[0, 1, 2, 3], **sizes)
    path = home.experiment.path
    head, address = cluster

    one = command(environment, path, "--address", address, "--out", tmp_path / "one")
    worker = until(lambda: worker_of(head, under_way(tmp_path / "one")) or one.poll() is not None)
    assert worker is not True, one.communicate()[1]
    worker.kill()
    printed, said = one.communicate()
    assert one.returncode == 0, said
    assert "its worker died (WorkerCrashedError); taken up again" in said
    assert json.loads(printed)["complete"]

    again = lab("again", out="two", seeds=[0], **{**sizes, "controls__null": False})
    two = command(environment, again.experiment.path, "--address", address, "--out", tmp_path / "two")
    until(lambda: under_way(tmp_path / "two") or two.poll() is not None)
    head.all()
    head.kill()
    _, said = two.communicate()
    assert two.returncode == 2, said
    assert "is gone; start it again, and the same command continues" in said
    three = command(environment, again.experiment.path, "--out", tmp_path / "two")

    # Two slots and one agree to the bit (test_run.py); here nothing is to be started.
    local = run_tasks(tasks(home.experiment, home.out), [()], lambda cell, content: None)
    printed, said = three.communicate()
    assert three.returncode == 0, said
    assert json.loads(printed)["complete"]

    assert len(local) == 12
    for cell in local:
        whole = home.store.run(cell)
        for out, name in (("one", "tiny"), ("two", "again")):
            found = RunFolder(tmp_path / out / "experiments" / name / "runs" / cell.name)
            if out == "one" or (cell.seed == 0 and cell.arm != "null"):
                assert numbers_of(found) == numbers_of(whole), (out, cell.name)
    resumes = [RunFolder(run).status["resumes"] for run in (tmp_path / "one").glob("experiments/*/runs/*")]
    assert sorted(resumes)[-2:] == [0, 1]
    assert not list(tmp_path.glob("*/experiments/*/.ray-*"))


# Without one


def test_without_ray(xsalab: Any, write_experiment: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    ran = xsalab("run", write_experiment(), "--on", "ray", "--out", tmp_path / "out")
    ran.refused("Ray is not installed; pip install 'xsalab[ray]'")


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("ray://10.0.0.1:10001", r"give HOST:PORT of the cluster's head, such as 10.0.0.1:6379, or auto"),
        ("head", "give HOST:PORT"),
        ("127.0.0.1:1", "nothing answers there; start the head with: ray start --head"),
    ],
)
def test_addresses_that_are_none(address: str, words: str) -> None:
    with pytest.raises(ValueError, match=f"--address {address}: {words}"), ray_runs.connected(address):
        pass


def test_a_run_that_fits_on_no_machine(lab: Any) -> None:
    def node(alive: bool = True, **resources: float) -> dict[str, Any]:
        return {"Alive": alive, "Resources": resources}

    assert ray_runs.needs(lab().task()) == {"CPU": 1, "GPU": 0}
    needed = ray_runs.needs(on_gpu(lab().task(), 2))
    assert needed == {"CPU": 2, "GPU": 2}
    ray_runs.check_room(needed, [node(CPU=1.0, GPU=8.0), node(CPU=2.0, GPU=2.0)])
    nodes = [node(CPU=1.0, GPU=8.0), node(CPU=64.0), node(False, CPU=2.0, GPU=2.0)]
    with pytest.raises(ValueError, match=r"needs 2 CPUs .* and 2 GPUs on one machine, .*: 1 CPUs and 8 GPUs; 64 CPUs"):
        ray_runs.check_room(needed, nodes)


def test_partners_share_an_accelerator(lab: Any) -> None:
    """Among several types the first run of a block goes anywhere, the others to the type that it began on."""
    home = lab(seeds=[0, 1])
    a, b, c = (on_gpu(home.task(arm, seed)) for arm, seed in (("standard", 0), ("xsa", 0), ("standard", 1)))
    types = ray_runs.accelerator_types(
        [
            {"Alive": True, "Resources": {"CPU": 1, "accelerator_type:A100": 1}},
            {"Alive": True, "Resources": {"accelerator_type:H100": 1, "node:10.0.0.1": 1}},
            {"Alive": False, "Resources": {"accelerator_type:V100": 1}},
        ]
    )
    assert types == {"A100", "H100"}
    assert ray_runs.startable([a, b, c], [], {"H100"}) == [(a, ""), (b, ""), (c, "")]
    assert ray_runs.startable([a, b, c], [], types) == [(a, ""), (c, "")]
    assert ray_runs.startable([b, c], [a], types) == [(c, "")]
    RunFolder(a.folder).path.mkdir(parents=True)
    RunFolder(a.folder).write("fingerprint", {"environment": {"device": "NVIDIA A100-SXM4-80GB"}})
    assert ray_runs.startable([b], [a, c], types) == [(b, "A100")]
    with pytest.raises(ValueError, match=r"runs began on NVIDIA A100-SXM4-80GB, and the cluster has H100, V100; "):
        ray_runs.startable([b], [], {"H100", "V100"})


def test_what_a_machine_checks(lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder must be the same one, the code too; a lock held by another refuses; the state comes back."""
    import pickle

    home = lab()
    task = pickle.dumps(home.task())

    def carry_out(token: Path, code: str) -> Any:
        return ray_runs.carry_out_here(task, str(token), code)

    kind, error = carry_out(home.store.folder / ".ray-none", code_digest())
    assert kind == "error"
    assert f"{home.store.folder}: not shared with machine" in str(error)
    assert "give --out on a folder that all machines see" in str(error)
    with ray_runs._token(home.store.folder) as token:
        kind, error = carry_out(token, "another")
        assert "has another version of xsalab" in str(error)
        assert home.folder().state == "waiting"
        assert carry_out(token, code_digest()) == ("end", "finished")
        monkeypatch.setattr(ray_runs, "LOCK_WAIT", 0.1)
        with folder_lock(home.folder().path, "run"):
            kind, error = carry_out(token, code_digest())
        assert isinstance(error, ValueError)
        assert "another process works on this run" in str(error)

        def full(*_: object) -> str:
            raise OSError(errno.ENOSPC, "disk full: make room, and the same command continues", "/a/b")

        monkeypatch.setattr(ray_runs, "do", full)
        kind, error = carry_out(token, code_digest())
        assert isinstance(error, OSError)
        assert (error.errno, error.filename) == (errno.ENOSPC, "/a/b")
    assert not token.exists()


def test_a_run_is_followed_by_its_folder(lab: Any) -> None:
    """Begun by another process: told once that it has, then each newest step once, until it has ended."""
    home = lab()
    run = home.run()
    rows = run.metrics()
    follow = ray_runs.Follow(home.task())
    assert list(follow.news()) == []
    run.write("status", {"state": "running", "step": 0, "steps": 4, "resumes": 0})
    assert list(follow.news()) == []  # as an earlier process left it
    run.write("status", {"state": "running", "step": 0, "steps": 4, "resumes": 1})
    (run.path / "metrics.jsonl").write_text(json.dumps(rows[0]) + "\n")
    begun, step = follow.news()
    assert begun["kind"] == "start"
    assert "machine" in begun["where"]
    assert step == {"kind": "step", "step": 1, "steps": 4, "loss": rows[0]["loss"]}
    assert list(follow.news()) == []
    assert Cell("base", "standard", 0) == follow.task.cell


class Reference:
    """What a played task ends with."""

    def __init__(self, end: Any) -> None:
        self.end = end


class Played:
    """Ray as the driver sees it, played: each submitted task ends with the next of ``ends``, or never (None)."""

    class RayError(Exception):
        pass

    class RayTaskError(RayError):
        pass

    class NodeDiedError(RayError):
        pass

    class OutOfMemoryError(RayError):
        pass

    def __init__(self, *ends: Any) -> None:
        self.exceptions, self.ends, self.cancelled, self.options = self, list(ends), 0, list[dict[str, Any]]()

    def is_initialized(self) -> bool:
        return True

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": 2.0}}]

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(gcs_address="127.0.0.1:1")

    def remote(self, **options: Any) -> Any:
        self.options.append(options)
        return lambda function: SimpleNamespace(remote=lambda *_: Reference(self.ends.pop(0)))

    def wait(self, references: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        return [one for one in references if one.end is not None], []

    def get(self, reference: Any) -> Any:
        if isinstance(reference.end, Exception):
            raise reference.end
        return reference.end

    def cancel(self, reference: Any, force: bool) -> None:
        assert force
        self.cancelled += 1


@pytest.fixture
def played(lab: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Carries out two runs on a played Ray; returns it, the lab and what was told."""
    monkeypatch.setattr(ray_runs, "POLL", 0.01)
    monkeypatch.setattr(ray_runs, "_answers", lambda address: True)

    def run(*ends: Any, during: Callable[[Any], None] = lambda home: None) -> tuple[Played, Any, list[str]]:
        ray, home, told = Played(*ends), lab(), list[str]()
        monkeypatch.setitem(sys.modules, "ray", ray)
        home.folder("xsa").path.mkdir(parents=True, exist_ok=True)
        pending = [home.task("standard"), home.task("xsa")]
        monkeypatch.setattr(ray_runs.time, "sleep", lambda seconds: during(home))
        try:
            states = ray_runs.run_on_ray(
                pending, "", lambda cell, content: told.append(f"{cell.name} {content.get('text', content['kind'])}")
            )
            told.append(f"{len(states)} states")
        except (ValueError, OSError) as error:
            told.append(str(error))
        assert not list(home.store.folder.glob(".ray-*"))
        return ray, home, told

    return run


def test_deaths_on_ray(played: Any) -> None:
    """A dead machine's run is submitted again; what dies always is recorded as failed, and the others have gone on."""
    end, node, memory = ("end", "finished"), Played.NodeDiedError(), Played.OutOfMemoryError()
    ray, home, told = played(node, memory, memory, end, memory)  # what died last comes first
    assert told[0] == "base.standard.s0 its machine died; taken up again"
    assert told[1].startswith("base.xsa.s0 its worker was ended by Ray, since its machine was out of memory; taken up")
    assert "base.standard.s0 end" in told
    assert "failed: base.xsa.s0: its worker was ended by Ray" in told[-1]
    assert "3 times" in told[-1]
    assert home.folder("xsa").state == "failed"
    assert ray.options[0] == {"num_cpus": 1, "num_gpus": 0, "max_retries": 0}


def test_what_ends_all_on_ray(played: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake of a user, a folder that vanishes, a head that is gone: the rest is cancelled, and it is said."""
    ray, _, told = played(("error", OSError(errno.ENOSPC, "disk full", "/a/b")), None)
    assert told == ["[Errno 28] disk full: '/a/b'"]
    assert ray.cancelled == 1

    ray, _, told = played(None, None, during=lambda home: shutil.rmtree(home.store.folder))
    assert "the folder is gone (no longer mounted?); bring it back, and the same command continues" in told[-1]
    assert ray.cancelled == 2

    monkeypatch.setattr(ray_runs, "_answers", lambda address: False)
    ray, _, told = played(None, None)
    assert told == [
        "the Ray cluster at 127.0.0.1:1 is gone; start it again, and the same command continues: the runs resume from "
        "their checkpoints"
    ]
    assert ray.cancelled == 2
