"""The runs of an experiment as tasks of a Ray cluster, on a folder that all its machines see.

Ray places the runs and tells what has died; everything else is as on one machine (workers.py): a run is a folder, which
holds its checkpoints and is locked by whoever works on it. A run whose worker or machine died is submitted again and
continues from its checkpoint. The driver knows how far the runs are from their folders alone.
"""

from __future__ import annotations

import os
import pickle
import platform
import socket
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from ..files import folder_lock, write_atomic
from .command_run import CommandTask
from .design import Cell, Experiment
from .downstream import DownstreamTask
from .fingerprint import code_digest
from .plugins import import_plugins, read_plugins
from .run import Event
from .store import RunFolder, RunStore, found_on
from .timing import measure_costs, measured_costs
from .workers import Losses, Task, begun_on, block, do, portable, uses

POLL = 0.5  # seconds between looks at the runs
LOCK_WAIT = 120.0  # seconds: a file server frees the locks of a machine that died after its lease, often 90
CONTINUE = "the same command continues: the runs resume from their checkpoints"


# The cluster


def find_ray(address: str = "") -> Any:
    """The package. ValueError naming the install command where it is not there.

    address: of the cluster that is to be connected to, none for one of its own: Ray reads its settings when imported.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # nothing is sent to anybody
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # as Ray will have it; without a warning
    if address and _has_token():  # a cluster started where there is a token asks for it
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    try:
        import ray
    except ImportError:
        raise ValueError("--on ray: Ray is not installed; pip install 'xsalab[ray]'") from None
    return ray


@contextmanager
def connected(address: str = "") -> Iterator[Any]:
    """Yields Ray, connected to the cluster at ``address``, else at RAY_ADDRESS, else to one of its own on this machine.

    One of its own ends with this process at the latest. Within another call the same connection serves.
    Raises ValueError where no cluster answers, or one of other versions.
    """
    address = address or os.environ.get("RAY_ADDRESS", "")
    address = "" if address == "local" else address
    host, _, port = address.rpartition(":")
    if address not in ("", "auto") and ("/" in host or not (host and port.isdigit())):
        raise ValueError(f"--address {address}: give HOST:PORT of the cluster's head, such as 10.0.0.1:6379, or auto")
    if host and not _answers(address):
        raise ValueError(f"--address {address}: nothing answers there; start the head with: ray start --head")
    ray = find_ray(address)
    if ray.is_initialized():
        yield ray
        return
    own = {} if address else {"include_dashboard": False}
    try:
        ray.init(address=address or "local", log_to_driver=False, logging_level="ERROR", **own)
    except (ConnectionError, RuntimeError) as error:
        where = f" at {address}: is it of this version, and is its token here?" if address else ":"
        raise ValueError(f"Ray{where} {error}") from None
    try:
        with redirect_stdout(sys.stderr):  # where Ray prints what it has to say; a result goes to stdout alone
            yield ray
    finally:
        ray.shutdown()


def _has_token() -> bool:
    """Whether Ray's token of authentication is at one of its places."""
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    return bool(os.environ.get("RAY_AUTH_TOKEN")) or path.is_file()


def _answers(address: str, seconds: float = 10.0) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), seconds).close()
    except OSError:
        return False
    return True


def needs(task: Task) -> dict[str, float]:
    """CPUs and GPUs of a task, under Ray's names."""
    device, processes = uses(task)
    return {"CPU": task.threads * processes, "GPU": processes if device == "cuda" else 0}


def check_room(needed: dict[str, float], nodes: Sequence[dict[str, Any]]) -> None:
    """ValueError where no machine of the cluster holds a run. nodes: as ``ray.nodes()`` gives them."""
    there = [node["Resources"] for node in nodes if node["Alive"]]
    if not any(all(node.get(name, 0) >= amount for name, amount in needed.items()) for node in there):
        machines = "; ".join(f"{node.get('CPU', 0):g} CPUs and {node.get('GPU', 0):g} GPUs" for node in there)
        raise ValueError(
            f"a run needs {needed['CPU']:g} CPUs (train.threads × processes) and {needed['GPU']:g} GPUs on one "
            f"machine, and no machine of the cluster has them: {machines}"
        )


def accelerator(device: str, types: Collection[str]) -> str:
    """Which of the cluster's accelerator types a device is, by its name: "A100" is "NVIDIA A100-SXM4-80GB".

    ValueError where it is none of them, so that its runs have nowhere to go on.
    """
    words = device.replace("-", " ").split()
    if found := [kind for kind in types if kind in words]:
        return found[0]
    raise ValueError(
        f"runs began on {device}, and the cluster has {', '.join(sorted(types))}; partners share one kind of device. "
        "Add such a machine, or delete the runs of that point and seed to make them again"
    )


def startable(waiting: Sequence[Task], flying: Collection[Task], types: Collection[str]) -> list[tuple[Task, str]]:
    """The tasks that may be submitted now, each with the accelerator type that it must have ("": any).

    Among several types the first run of a block decides; the others wait until its fingerprint tells where it is.
    """
    if len(types) < 2:
        return [(task, "") for task in waiting]
    undecided = {block(task) for task in flying if not begun_on(task)}
    found: list[tuple[Task, str]] = []
    for task in waiting:
        if uses(task)[0] != "cuda":
            found.append((task, ""))
        elif device := begun_on(task):
            found.append((task, accelerator(device, types)))
        elif block(task) not in undecided:
            undecided.add(block(task))
            found.append((task, ""))
    return found


# On the driver


def run_on_ray(pending: Sequence[Task], address: str, event: Event) -> dict[Cell, str]:
    """Carries out tasks on a Ray cluster; returns the state of each. Events and errors: as ``workers.run_tasks``.

    address: as ``connected``. Raises ValueError too where the experiment's folder is not shared by all machines or is
    gone, and where the cluster is.
    """
    if any(isinstance(task, CommandTask) for task in pending):
        raise ValueError('--on ray: engine = "command": what a command needs of a machine is not known; use --on local')
    home = pending[0].folder.parents[1]
    waiting, states, losses = [_whole(task) for task in pending], dict[Cell, str](), Losses(event)
    with connected(address) as ray, _token(home) as token:
        head, flying = ray.get_runtime_context().gcs_address, dict[Any, Follow]()
        try:
            while waiting or flying:
                if waiting:
                    nodes = ray.nodes()
                    types = accelerator_types(nodes)
                    for task, kind in startable(waiting, [run.task for run in flying.values()], types):
                        check_room(needs(task), nodes)
                        waiting.remove(task)
                        flying[_submit(ray, task, kind, token)] = Follow(task)
                time.sleep(POLL)  # here and not in Ray's own wait, which keeps Ctrl-C from us
                if not home.is_dir():
                    raise ValueError(f"{home}: the folder is gone (no longer mounted?); bring it back, and {CONTINUE}")
                if not _answers(head):
                    raise ValueError(f"the Ray cluster at {head} is gone; start it again, and {CONTINUE}")
                for run in flying.values():
                    for content in run.news():
                        event(run.task.cell, content)
                ended, _ = ray.wait(list(flying), num_returns=len(flying), timeout=0)
                for reference in ended:
                    task = flying.pop(reference).task
                    if died := _died(ray, reference, states, task):
                        if losses.again(task, died):
                            waiting.insert(0, task)
                    else:
                        event(task.cell, {"kind": "end", "state": states[task.cell]})
        finally:
            for reference in flying:
                with suppress(ray.exceptions.RayError):
                    ray.cancel(reference, force=True)
    losses.tell()
    return states


def measure_on_ray(experiment: Experiment, store: RunStore, out: Path, task: Task, address: str) -> dict[str, Any]:
    """``measure_costs`` on a machine of the cluster that has what ``task`` needs; its numbers are in timing.json."""
    plugins = read_plugins(experiment.path, experiment.plugins)
    with connected(address) as ray, _token(store.folder) as token:
        check_room(needs(task), ray.nodes())
        arguments = pickle.dumps((replace(experiment, plugins=()), store, out.absolute(), plugins))
        _result(ray, ray.get(_remote(ray, needs(task)).remote("measure_here", arguments, str(token), code_digest())))
    return measured_costs(experiment, store)


def accelerator_types(nodes: Sequence[dict[str, Any]]) -> set[str]:
    """The accelerator types of the machines that live, as Ray names them."""
    mark = "accelerator_type:"
    return {name[len(mark) :] for node in nodes if node["Alive"] for name in node["Resources"] if name.startswith(mark)}


def _whole(task: Task) -> Task:
    """The task with whole paths: on another machine the working directory is another."""
    if isinstance(task, DownstreamTask):
        return replace(task, folder=task.folder.absolute())
    assert not isinstance(task, CommandTask), "refused"
    partners = tuple((path.absolute(), factors) for path, factors in task.partners)
    return replace(task, folder=task.folder.absolute(), home=task.home.absolute(), partners=partners)


@contextmanager
def _token(home: Path) -> Iterator[Path]:
    """A file just written into the experiment's folder: whoever sees it sees the same folder.

    Its name is new each time, so that no machine remembers whether it was there.
    """
    for left in home.glob(".ray-*"):
        left.unlink(missing_ok=True)
    token = home.absolute() / f".ray-{uuid4().hex}"
    write_atomic(token, "")
    try:
        yield token
    finally:
        with suppress(OSError):  # the folder may be gone, which is told already
            token.unlink()


def _submit(ray: Any, task: Task, kind: str, token: Path) -> Any:
    return _remote(ray, needs(task), kind).remote("carry_out_here", pickle.dumps(task), str(token), code_digest())


def _remote(ray: Any, needed: dict[str, float], kind: str = "") -> Any:
    """A function of the cluster. It knows of xsalab by name only, so that a machine without it can say so."""

    def on_machine(name: str, arguments: bytes, token: str, code: str) -> tuple[str, Any]:
        try:
            from xsalab.experiment import ray_runs
        except ImportError as error:
            import platform

            words = f"machine {platform.node()} of the cluster: {error}; install the same xsalab there"
            return "error", ValueError(words)
        return getattr(ray_runs, name)(arguments, token, code)

    # A process of its own for each run on a GPU, so that its memory is free. Deaths are counted here, not by Ray.
    options = {"num_cpus": needed["CPU"], "num_gpus": needed["GPU"], "max_retries": 0}
    if needed["GPU"]:
        options["max_calls"] = 1
    if kind:
        options["accelerator_type"] = kind
    return ray.remote(**options)(on_machine)


def _died(ray: Any, reference: Any, states: dict[Cell, str], task: Task) -> str:
    """Stores the task's state and returns "", or says how its worker died; raises the error that it ended with."""
    try:
        states[task.cell] = _result(ray, ray.get(reference))
        return ""
    except ray.exceptions.RayTaskError as error:
        raise RuntimeError(str(error)) from None
    except ray.exceptions.NodeDiedError:
        return "its machine died"
    except ray.exceptions.OutOfMemoryError:
        return "its worker was ended by Ray, since its machine was out of memory"
    except ray.exceptions.RayError as error:
        return f"its worker died ({type(error).__name__})"


def _result(ray: Any, found: tuple[str, Any]) -> Any:
    kind, content = found
    if kind == "error":
        raise content
    return content


class Follow:
    """What is new of a run, by its folder alone: whatever process has it, on whatever machine."""

    def __init__(self, task: Task) -> None:
        self.task, self.folder, self.begun, self.step = task, RunFolder(task.folder), False, -1
        self.resumes = self.folder.read("status").get("resumes", -1)

    def news(self) -> Iterator[dict[str, Any]]:
        """Events: that the run has begun since this was made, and its newest step."""
        if isinstance(self.task, DownstreamTask):  # of a finished run; what it is asked now is not in these files
            return
        status = self.folder.read("status")
        if status.get("state") != "running" or status["resumes"] == self.resumes:
            return
        if not self.begun:
            self.begun = True
            yield {"kind": "start", "where": found_on(self.folder.read("fingerprint"))}
        row = self.folder.latest()
        if "loss" in row and row["step"] != self.step:
            self.step = row["step"]
            yield {"kind": "step", "step": self.step + 1, "steps": self.task.steps, "loss": row["loss"]}


# On a machine of the cluster


def carry_out_here(arguments: bytes, token: str, code: str) -> tuple[str, Any]:
    """Carries out one task in a worker of Ray's; ("end", its state), or ("error", what the driver shall raise)."""
    try:
        check_machine(token, code)
        task = pickle.loads(arguments)
        if task.folder.is_dir():
            with folder_lock(task.folder, "run", LOCK_WAIT):  # of one who died, on this machine or another
                pass
        # Ray has set which GPUs are seen here: a run takes the first, several processes the first ones.
        return "end", do(task, lambda cell, content: None)
    except BaseException as error:
        return "error", portable(error)


def measure_here(arguments: bytes, token: str, code: str) -> tuple[str, Any]:
    """``measure_costs`` in a worker of Ray's."""
    try:
        check_machine(token, code)
        experiment, store, out, plugins = pickle.loads(arguments)
        import_plugins(plugins)
        measure_costs(experiment, store, out)
        return "end", None
    except BaseException as error:
        return "error", portable(error)


def check_machine(token: str, code: str) -> None:
    """ValueError where this machine does not see the experiment's folder, or has other code of xsalab."""
    name = platform.node()
    if not Path(token).is_file():
        raise ValueError(
            f"{Path(token).parent}: not shared with machine {name} of the cluster: give --out on a folder that all "
            "machines see under the same name"
        )
    if code_digest() != code:
        raise ValueError(f"machine {name} of the cluster has another version of xsalab; install the same one there")
