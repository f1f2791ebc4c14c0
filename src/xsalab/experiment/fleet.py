"""What an experiment needs before its runs: its folder, its corpora, a task for each cell."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..config import digest, dump
from ..data import Corpus, batch_at, prepare, prepare_shards
from ..eval.diagnostics import validation_rows
from ..eval.validation import check_evaluation
from ..files import make_folder, write_atomic
from .command_run import CommandTask
from .design import Experiment, declared_factors, expand, resolve
from .downstream import check_downstream
from .plugins import read_plugins
from .run import RunTask
from .stages import declare
from .store import RunStore


def begin_experiment(
    experiment: Experiment,
    out: Path,
    progress: Callable[[str, float], None] = lambda stage, share: None,
    *,
    all_shards: bool = False,
    jobs: int = 0,
) -> tuple[RunStore, list[Corpus]]:
    """Makes the experiment's folder with its TOML, and prepares the corpora that its cells need.

    Of a corpus in shards (data.window) the first ones, and the others go on in processes of their own that end with
    this one; with ``all_shards`` all. jobs: such processes, 0: as many as cores.
    """
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
        seeds = list(dict.fromkeys(c.seed for c in users))
        if run.data.window:
            prepare_shards(corpus, run.data, contexts, seeds, whole=all_shards, jobs=jobs, progress=progress)
        rows = {context: corpus.rows(context) for context in contexts}
        for c in users:  # whether there are rows enough for a batch is known now, not when the run starts
            context = c.model.context
            try:
                batch_at(rows[context], seed=seeds[0], step=0, batch_rows=c.train.batch_rows(context))
            except ValueError as error:
                raise ValueError(f"{experiment.path}: train.batch_tokens = {c.train.batch_tokens}: {error}") from None
            check_evaluation(corpus, c.eval, context)
            if experiment.diagnose:
                validation_rows(corpus, c.eval, context, experiment.diagnose.rows)
        manifest = corpus.described(contexts[0])
        packed.append({"folder": corpus.folder.name, "manifest": manifest, "contexts": contexts})
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
