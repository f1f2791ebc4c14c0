"""All runs of an experiment, side by side in processes of their own."""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..config import digest, dump
from ..data import Corpus, batch_at, prepare
from ..eval.diagnostics import validation_rows
from ..eval.validation import check_evaluation
from ..files import make_folder, write_atomic
from .command_run import CommandTask
from .design import Cell, Experiment, declared_factors, expand, resolve
from .downstream import DownstreamTask, carry_out, check_downstream
from .plugins import read_plugins
from .run import Event, RunTask, run_cell
from .stages import declare
from .store import RunStore


def begin_experiment(
    experiment: Experiment, out: Path, progress: Callable[[str, float], None] | None = None
) -> tuple[RunStore, list[Corpus]]:
    """Makes the experiment's folder with its TOML, and prepares the corpora that its cells need."""
    store = RunStore.of(experiment, out)
    make_folder(store.folder)
    write_atomic(store.folder / "experiment.toml", experiment.text)
    declare(experiment, store)
    if experiment.downstream:
        check_downstream(experiment.downstream)
    if experiment.command:
        working_folder(experiment)
        return store, []
    configs = [resolve(experiment, cell) for cell in expand(experiment)]
    needed = {digest([dump(run.data), run.model.vocab_size]): run for run in configs}
    corpora: list[Corpus] = []
    packed: list[dict[str, Any]] = []
    for run in needed.values():
        corpus = prepare(run.data, run.model.vocab_size, out, progress)
        users = [c for c in configs if (c.data, c.model.vocab_size) == (run.data, run.model.vocab_size)]
        contexts = sorted({c.model.context for c in users})
        rows = {context: corpus.rows(context) for context in contexts}
        for c in users:  # whether there are rows enough for a batch is known now, not when the run starts
            context = c.model.context
            try:
                batch_at(rows[context], seed=0, step=0, batch_rows=c.train.batch_rows(context))
            except ValueError as error:
                raise ValueError(f"{experiment.path}: train.batch_tokens = {c.train.batch_tokens}: {error}") from None
            check_evaluation(corpus, c.eval, context)
            if experiment.diagnose:
                validation_rows(corpus, c.eval, context, experiment.diagnose.rows)
        packed.append({"folder": corpus.folder.name, "manifest": corpus.manifest, "contexts": contexts})
        corpora.append(corpus)
    write_atomic(store.folder / "corpora.json", json.dumps(packed, indent=1, ensure_ascii=False))
    return store, corpora


def working_folder(experiment: Experiment) -> Path:
    """Where a command runs: command.folder, beside the TOML. ValueError where there is none."""
    assert experiment.command is not None, "a command's experiment"
    folder = (experiment.path.parent / experiment.command.folder).resolve()
    if not folder.is_dir():
        raise ValueError(f"{experiment.path}: command.folder = {experiment.command.folder!r}: no folder {folder}")
    return folder


def tasks(experiment: Experiment, out: Path, trackers: Sequence[str] = ()) -> list[RunTask | CommandTask]:
    """A task for each cell, with the partners that it must match."""
    store, plugins = RunStore.of(experiment, out), read_plugins(experiment.path, experiment.plugins)
    if experiment.command and trackers:
        raise ValueError(f"--{trackers[0]}: a command logs by its own means; leave it out")
    found: list[RunTask | CommandTask] = []
    cells = expand(experiment)
    for cell in cells:
        partners = tuple(
            (store.run(other).path, declared_factors(experiment, cell.arm, other.arm))
            for other in cells
            if other != cell and (other.point, other.seed) == (cell.point, cell.seed)
        )
        if experiment.command:
            run = experiment.command.resolve(experiment, cell)
            where, minutes = working_folder(experiment), experiment.command.minutes
            found.append(CommandTask(cell, run, store.run(cell).path, where, experiment.path, minutes, partners))
            continue
        found.append(
            RunTask(
                cell,
                resolve(experiment, cell),
                store.run(cell).path,
                out,
                plugins,
                partners,
                tuple(trackers),
                experiment.diagnose,
            )
        )
    return found


def default_jobs(threads: int, pending: int) -> int:
    """Runs side by side: as many as the cores hold at ``threads`` each, or the GPUs."""
    if torch.cuda.is_available():
        return max(1, min(torch.cuda.device_count(), pending))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores // threads, pending))


Task = RunTask | CommandTask | DownstreamTask


def _do(task: Task, event: Event) -> str:
    return carry_out(task, event) if isinstance(task, DownstreamTask) else run_cell(task, event)


def run_tasks(pending: Sequence[Task], jobs: int, event: Event) -> dict[Cell, str]:
    """Carries out tasks, ``jobs`` at a time; returns the state of each.

    The first mistake of a user (ValueError) stops the rest; what runs is left resumable. One job runs in
    this process, more in processes of their own, which end when this one does.
    """
    states: dict[Cell, str] = {}
    if jobs == 1 or len(pending) == 1:
        for task in pending:
            event(task.cell, {"kind": "start"})
            states[task.cell] = _do(task, event)
            event(task.cell, {"kind": "end", "state": states[task.cell]})
        return states
    context = multiprocessing.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    for task in pending:
        inbox.put(task)
    for _ in range(jobs):
        inbox.put(None)
    saved = os.environ.get("OMP_NUM_THREADS")
    if not isinstance(pending[0], CommandTask):  # a command has its threads from the user
        os.environ["OMP_NUM_THREADS"] = str(pending[0].threads)
    workers = [context.Process(target=_worker, args=(inbox, outbox, i), daemon=True) for i in range(jobs)]
    try:
        for worker in workers:
            worker.start()
    finally:
        if saved is None:
            os.environ.pop("OMP_NUM_THREADS", None)
        else:
            os.environ["OMP_NUM_THREADS"] = saved
    try:
        while len(states) < len(pending):
            try:
                cell, content = outbox.get(timeout=1.0)
            except queue.Empty:
                dead = [worker for worker in workers if worker.exitcode not in (None, 0)]
                if dead:
                    raise ValueError(
                        f"a worker process ended with code {dead[0].exitcode} (killed, or out of memory?); "
                        "the finished runs are kept, the same command continues the others"
                    ) from None
                continue
            if content["kind"] == "error":
                raise content["error"]
            event(cell, content)
            if content["kind"] == "end":
                states[cell] = content["state"]
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.join()
    return states


def _worker(inbox: Any, outbox: Any, index: int) -> None:
    """Takes tasks until there are none; ends at once when its parent does."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    if torch.cuda.is_available():
        torch.cuda.set_device(index % torch.cuda.device_count())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends its workers
    while (task := inbox.get()) is not None:
        outbox.put((task.cell, {"kind": "start"}))
        try:
            state = _do(task, lambda cell, content: outbox.put((cell, content)))
        except BaseException as error:
            outbox.put((task.cell, {"kind": "error", "error": _portable(error)}))
            return
        outbox.put((task.cell, {"kind": "end", "state": state}))


def _portable(error: BaseException) -> Exception:
    """An error as it can travel to the parent: a user's mistake as such, a fault of ours with its traceback."""
    if isinstance(error, OSError):
        return OSError(error.errno, error.strerror, error.filename) if error.filename else OSError(str(error))
    if isinstance(error, ValueError):
        return ValueError(str(error))
    return RuntimeError("".join(traceback.format_exception(error)))
