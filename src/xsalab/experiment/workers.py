"""All runs of an experiment side by side on this machine.

A slot is where one run computes: the numbers of its GPUs, or () on the processor. Every slot has a worker, a process of
its own. The parent hands out the tasks itself, one after the other, so that it knows what a worker that dies had in
hand: that run is handed out again and continues from its checkpoint. The runs of one point and seed are compared with
each other and compute on one kind of device.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

import torch

from .command_run import CommandTask
from .design import Cell, Experiment, expand, resolve
from .downstream import DownstreamTask, carry_out
from .fingerprint import processor
from .launch import RETRIES, launch
from .run import Event, RunTask, run_cell
from .store import RunFolder

Task = RunTask | CommandTask | DownstreamTask
Slot = tuple[int, ...]


# Where runs compute


def uses(task: Task) -> tuple[str, int]:
    """The kind of device that a task computes on, "cpu" or "cuda", and how many processes share its batches."""
    if isinstance(task, RunTask):
        return task.config.train.device, task.config.train.processes
    return (task.device if isinstance(task, DownstreamTask) else "cpu"), 1


def alike(tasks: Sequence[Task]) -> list[list[Task]]:
    """The tasks by device and number of processes, in their order: only those that are alike share slots."""
    found: dict[tuple[str, int], list[Task]] = {}
    for task in tasks:
        found.setdefault(uses(task), []).append(task)
    return list(found.values())


def slots(devices: Sequence[int], processes: int) -> list[Slot]:
    """The devices in groups of ``processes``. ValueError where they do not come out even."""
    count = len(devices)
    if count % processes:
        below = count - count % processes
        legal = f"{below} or {below + processes}" if below else f"{processes}"
        raise ValueError(f"{count} devices for runs of train.processes = {processes}: give {legal} devices")
    return [tuple(devices[i : i + processes]) for i in range(0, count, processes)]


def default_jobs(threads: int, pending: int, device: str = "cpu", processes: int = 1) -> int:
    """Runs side by side: as many as the GPUs or the cores hold, at ``threads`` cores a process."""
    if device == "cuda" and torch.cuda.is_available():
        held = torch.cuda.device_count() // processes
    else:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        held = cores // (threads * processes)
    return max(1, min(held, pending))


def choose_slots(tasks: Sequence[Task], devices: Sequence[int] = (), jobs: int = 0) -> list[Slot]:
    """Slots for tasks that are alike: on these devices, or so many runs side by side, or as many as the machine holds.

    More jobs than the GPUs hold share them. Of a command it is not known what it needs: one at a time.
    """
    device, processes = uses(tasks[0])
    jobs = jobs or (
        1
        if isinstance(tasks[0], CommandTask)
        else default_jobs(max(task.threads for task in tasks), len(tasks), device, processes)
    )
    there = torch.cuda.device_count() if device == "cuda" else 0
    if not there:
        return [()] * jobs  # a run that asks for a GPU where there is none says so itself
    if devices:
        return slots(devices, processes)
    if there < processes:
        raise ValueError(f"train.processes = {processes}: there are {there} GPUs here; give {there} or fewer")
    every = slots(range(there - there % processes), processes)
    return [every[i % len(every)] for i in range(jobs)]


def read_devices(text: str, experiment: Experiment) -> tuple[int, ...]:
    """The numbers of ``--devices``. ValueError where they are none, come twice, are not there, or are no use here."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() for word in words):
        raise ValueError(f"--devices {text}: not numbers; give those of GPUs, such as 0,1,2,3")
    devices = tuple(int(word) for word in words)
    if twice := [number for number, count in Counter(devices).items() if count > 1]:
        raise ValueError(f"--devices {text}: GPU {twice[0]} comes twice; give each once")
    if experiment.command:
        raise ValueError(f'--devices {text}: engine = "command" places its runs itself; use --jobs N')
    trains = [resolve(experiment, cell).train for cell in expand(experiment)]
    needed = {train.processes for train in trains if train.device == "cuda"}
    if not needed:
        raise ValueError(f"--devices {text}: train.device = 'cpu'; use --jobs N, the number of runs side by side")
    there = torch.cuda.device_count()
    if missing := [number for number in devices if number >= there]:
        known = f"those here are 0 to {there - 1}" if there > 1 else "the one here is 0" if there else "there is none"
        raise ValueError(f"--devices {text}: there is no GPU {missing[0]}; {known}")
    for processes in needed:
        slots(devices, processes)
    return devices


def device_kind(slot: Slot) -> str:
    """The name of a slot's devices, as a run's fingerprint has it. ValueError where they are of several kinds."""
    if not slot:
        return processor()
    names = {torch.cuda.get_device_name(number) for number in slot}
    if len(names) > 1:
        numbers = ",".join(map(str, slot))
        raise ValueError(
            f"GPUs {numbers} would share one run and are of several kinds: {', '.join(sorted(names))}; "
            "order --devices by kind"
        )
    return names.pop()


def place(slot: Slot) -> str:
    """A slot in words; "" for the processor."""
    return f"GPU {','.join(map(str, slot))}" if slot else ""


# Which run comes next


def block(task: Task) -> tuple[str, int]:
    """Point and seed: the runs that are compared with each other."""
    return task.cell.point, task.cell.seed


def begun_on(task: Task) -> str:
    """The device that this run, or one that it is compared with, computed on; "" where none has begun."""
    if isinstance(task, CommandTask):
        return ""  # compared by its own fingerprint when it starts
    partners = [path for path, _ in task.partners] if isinstance(task, RunTask) else []
    for path in (task.folder, *partners):
        if device := RunFolder(path).read("fingerprint").get("environment", {}).get("device"):
            return device
    return ""


class Handout:
    """The tasks that wait, and the kind of device of each block.

    kinds: those of the slots. Raises ValueError where a block began on a kind that has no slot any more.
    """

    def __init__(self, pending: Sequence[Task], kinds: Collection[str]) -> None:
        self.waiting = list(pending)
        self.kind: dict[tuple[str, int], str] = {}
        for task in pending:
            if not (kind := begun_on(task)):
                continue
            if kind in kinds:
                self.kind.setdefault(block(task), kind)
            elif not isinstance(task, DownstreamTask):  # a trained run may be asked anywhere
                raise ValueError(
                    f"{task.cell.name}: the runs of its point and seed began on {kind}, and there is none among the "
                    f"devices of this call ({', '.join(sorted(set(kinds)))}); partners share one kind. Continue on "
                    "such a device, or delete the runs of that point and seed to make them again"
                )

    def take(self, kind: str) -> Task | None:
        """The next task for a device of this kind; None where none of those that wait may run there."""
        for task in self.waiting:
            if self.kind.get(block(task), kind) == kind:
                self.kind[block(task)] = kind
                self.waiting.remove(task)
                return task
        return None

    def put_back(self, task: Task) -> None:
        """Before all others: it was under way."""
        self.waiting.insert(0, task)


# Carrying out


class Losses:
    """The runs whose worker died: which are to be tried again, and which have failed."""

    def __init__(self, event: Event) -> None:
        self.event, self.tries, self.failed = event, Counter[Cell](), dict[Cell, str]()

    def again(self, task: Task, words: str) -> bool:
        """Whether the task is to be tried once more; otherwise its run is recorded as failed. words: what happened."""
        self.tries[task.cell] += 1
        if self.tries[task.cell] <= RETRIES:
            self.event(task.cell, {"kind": "again", "text": f"{words}; taken up again"})
            return True
        self.failed[task.cell] = words = f"{words}, {RETRIES + 1} times"
        folder = RunFolder(task.folder)
        if not isinstance(task, DownstreamTask) and folder.path.is_dir():  # a run that is only asked is trained
            folder.write("status", {**folder.read("status"), "state": "failed", "message": words})
        self.event(task.cell, {"kind": "failed", "text": words})
        return False

    def tell(self) -> None:
        """ValueError naming the failed runs, where there are any."""
        if self.failed:
            named = [f"{cell.name}: {words}" for cell, words in self.failed.items()]
            more = f" and {len(named) - 3} more" if len(named) > 3 else ""
            raise ValueError(
                f"failed: {'; '.join(named[:3])}{more}. The other runs are finished; the same command continues these"
            )


def run_tasks(
    pending: Sequence[Task], slots: Sequence[Slot], event: Event, kind_of: Callable[[Slot], str] = device_kind
) -> dict[Cell, str]:
    """Carries out tasks, one in each slot at a time; returns the state of each.

    kind_of: the kind of a slot's devices. With one slot or one task all is done in this process, else in processes of
    their own, which end when this one does. event: besides those of the tasks {"kind": "start", "where"}, "end" with
    its "state", and "again" and "failed" with a "text", where a worker died.

    The first mistake of a user (ValueError, OSError) stops the rest; what runs is left resumable. A run whose worker
    died is tried again, RETRIES times; then it is recorded as failed, the others go on, and ValueError is raised at
    the end.
    """
    kinds = [kind_of(slot) for slot in slots]
    handout, states, losses = Handout(pending, kinds), dict[Cell, str](), Losses(event)
    if len(slots) == 1 or len(pending) == 1:
        for slot, kind in zip(slots, kinds, strict=True):
            while (task := handout.take(kind)) is not None:
                event(task.cell, {"kind": "start", "where": place(slot)})
                bind(slot)
                states[task.cell] = do(task, event, slot)
                event(task.cell, {"kind": "end", "state": states[task.cell]})
        return states
    workers = [_Worker(slot, kind) for slot, kind in zip(slots, kinds, strict=True)]
    try:
        while True:
            for worker in workers:
                if worker.task is None and (task := handout.take(worker.kind)) is not None:
                    worker.give(task)
            busy = {worker.connection: worker for worker in workers if worker.task is not None}
            if not busy:
                break
            wait([*busy, *(worker.process.sentinel for worker in busy.values())])
            for worker in busy.values():
                task = worker.task
                assert task is not None, "busy"
                dead = not worker.process.is_alive()  # first: what it sent before is in the pipe
                for content in worker.told():
                    if content["kind"] == "error":
                        raise content["error"]
                    event(task.cell, content)
                    if content["kind"] == "end":
                        states[task.cell], worker.task = content["state"], None
                if dead and worker.task is not None:
                    worker.task = None
                    if losses.again(task, f"its worker {ended_by(worker.process.exitcode)}"):
                        handout.put_back(task)
    finally:
        for worker in workers:
            worker.end()
    losses.tell()
    return states


@dataclass
class _Worker:
    """The process of a slot, as its parent sees it; it is started when there is a task for it."""

    slot: Slot
    kind: str
    process: Any = None
    connection: Any = None
    task: Task | None = None

    def give(self, task: Task) -> None:
        """Hands it the task; a process is started where there is none or it has died."""
        self.task = task
        if self.process is None or not self.process.is_alive():
            self.end()
            context = multiprocessing.get_context("spawn")
            self.connection, other = context.Pipe()
            self.process = context.Process(target=_work, args=(other, self.slot), daemon=True)
            with _threads_of(task):
                self.process.start()
            other.close()  # the worker's alone, so that its end closes the pipe
        with suppress(OSError):  # it has died just now, which its sentinel tells
            self.connection.send(task)

    def told(self) -> Iterator[dict[str, Any]]:
        """What it has sent; of a dead one the last message may be cut off."""
        with suppress(EOFError, OSError):
            while self.connection.poll():
                yield self.connection.recv()

    def end(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.join()
            self.connection.close()
            self.process = None


@contextmanager
def _threads_of(task: Task) -> Iterator[None]:
    """The environment of a process that computes with the task's threads; a command has its own from the user."""
    before = os.environ.get("OMP_NUM_THREADS")
    if not isinstance(task, CommandTask):
        os.environ["OMP_NUM_THREADS"] = str(task.threads)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("OMP_NUM_THREADS", None)
        else:
            os.environ["OMP_NUM_THREADS"] = before


def _work(connection: Any, slot: Slot) -> None:
    """Carries out what its parent sends; ends at once when its parent does."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends its workers
    writing = threading.Lock()  # an event may come from a thread of the task's

    def tell(content: dict[str, Any]) -> None:
        with writing:
            connection.send(content)

    while True:
        task = connection.recv()
        tell({"kind": "start", "where": place(slot)})
        try:
            bind(slot)
            state = do(task, lambda cell, content: tell(content), slot)
        except BaseException as error:
            tell({"kind": "error", "error": portable(error)})
            return
        tell({"kind": "end", "state": state})


def bind(slot: Slot) -> None:
    """This process computes on the slot's device; several devices have processes of their own."""
    if len(slot) == 1:
        torch.cuda.set_device(slot[0])


def do(task: Task, event: Event, slot: Slot = ()) -> str:
    """Carries out one task on the slot's devices; returns its state."""
    if isinstance(task, DownstreamTask):
        return carry_out(task, event)
    if isinstance(task, RunTask) and task.config.train.processes > 1:
        return launch(task, event, slot)
    return run_cell(task, event)


def ended_by(code: int) -> str:
    """How a process ended, by its exit code."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def portable(error: BaseException) -> Exception:
    """An error as it can travel to the parent: a user's mistake as such, a fault of ours with its traceback."""
    if isinstance(error, OSError):
        return OSError(error.errno, error.strerror, error.filename) if error.filename else OSError(str(error))
    if isinstance(error, ValueError):
        return ValueError(str(error))
    return RuntimeError("".join(traceback.format_exception(error)))
