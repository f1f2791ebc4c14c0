"""Verbs for an experiment's file: data, check, run, status, report, train."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from .console import OUT, File, Json, Out, Sets, Smoke, app, bar, bars, console, load, note, notes


def prepare(experiment: Any, out: Path, all_shards: bool = False, jobs: int = 0) -> Any:
    from ..experiment.fleet import begin_experiment

    with bar("preparing the corpus", 1.0) as update:
        store, corpora = begin_experiment(
            experiment, out, lambda stage, share: update(share, stage), all_shards=all_shards, jobs=jobs
        )
    for corpus in corpora:
        for line in corpus.notes:
            note(f"note: {line}")
    return store, corpora


@app.command()
def data(
    file: File,
    out: Out = OUT,
    jobs: Annotated[int, typer.Option(min=0, help="processes that prepare shards; 0: as many as cores")] = 0,
    sets: Sets = None,
    smoke: Smoke = False,
    json_: Json = False,
) -> None:
    """Prepare the corpus: text, tokenizer, packed rows; with data.window all its shards. Continues what was stopped.

    Example: xsalab data experiments/quick.toml
    """
    from ..experiment.design import expand, resolve

    experiment = load(file, sets, plugins=False, smoke=smoke)
    if experiment.command:
        print("[]" if json_ else 'nothing to prepare: engine = "command", so the data are the command\'s own')
        return
    _, corpora = prepare(experiment, out, all_shards=True, jobs=jobs)
    contexts = sorted({resolve(experiment, cell).model.context for cell in expand(experiment)})
    content = [
        {
            "folder": str(corpus.folder),
            **corpus.described(contexts[0]),
            "rows": [corpus.rows(context).counts for context in contexts],
        }
        for corpus in corpora
    ]
    if json_:
        print(json.dumps(content, ensure_ascii=False))
        return
    for entry in content:
        print(f"corpus {entry['folder']}")
        for side in ("train", "validation"):
            counts = entry[side]
            print(
                f"  {side}: {counts['documents']:,} documents, {counts['tokens']:,} tokens, {counts['bytes']:,} bytes"
            )
        print(f"  held out: {entry['validation_rule']}; documents on both sides: {entry['overlap']}")
        print(f"  unigram entropy of the validation text: {entry['unigram_bits_per_byte']:.4f} bits per byte")
        for rows in entry["rows"]:
            print(f"  rows of {rows['context']} tokens: {rows['rows']:,}, waste {100 * rows['waste']:.3f} %")
            if "shards" in rows:
                print(f"    {rows['prepared']:,} of {rows['shards']:,} shards, {rows['size']:,} bytes of rows")
        if entry["skipped"]:
            print("  skipped: " + ", ".join(f"{count} {reason}" for reason, count in entry["skipped"].items()))


@app.command()
def check(
    file: Annotated[
        Path | None, typer.Argument(help="an experiment, to check its variants too", metavar="[FILE.toml]")
    ] = None,
    compiled: Annotated[bool, typer.Option("--compiled", help="torch.compile as well (about a minute)")] = False,
    sets: Sets = None,
    json_: Json = False,
) -> None:
    """Run the equivalence checks: α = 0, orthogonality, gradients, cache, causality, fast paths.

    Example: xsalab check experiments/quick.toml
    """
    import torch

    from ..check import all_checks, experiment_choices
    from ..experiment.design import expand, resolve

    torch.set_num_threads(1)  # so small that threads only wait for each other, for minutes on a busy machine
    extra = ()
    if file is not None:
        experiment = load(file, sets)
        if experiment.command:
            print("[]" if json_ else 'nothing to check: engine = "command", so the model is the command\'s own')
            return
        extra = experiment_choices([resolve(experiment, cell) for cell in expand(experiment)])
    found = []
    for result in all_checks(compiled, extra):
        found.append(result)
        if not json_:
            print(result, flush=True)
    failed = [result for result in found if not result.passed]
    if json_:
        print(json.dumps([{**vars(result), "passed": result.passed} for result in found], ensure_ascii=False))
    else:
        print(f"{len(found) - len(failed)} passed, {len(failed)} failed")
    if failed:
        raise typer.Exit(1)


@app.command()
def run(
    file: File,
    out: Out = OUT,
    jobs: Annotated[int, typer.Option(min=0, help="runs side by side; 0: as many as the cores or GPUs hold")] = 0,
    devices: Annotated[str, typer.Option(help="the GPUs to use, such as 0,1,2,3; left out: all")] = "",
    on: Annotated[
        str, typer.Option(help="local: this machine; ray: a Ray cluster, on a folder that it shares")
    ] = "local",
    address: Annotated[
        str,
        typer.Option(help="HOST:PORT of the Ray cluster; left out: RAY_ADDRESS, or a Ray of its own on this machine"),
    ] = "",
    until_decided: Annotated[
        bool, typer.Option("--until-decided", help="add seeds at fixed looks until the primary contrast is decided")
    ] = False,
    max_seeds: Annotated[
        int, typer.Option(help="the last look of --until-decided, declared before the runs; 0: 12")
    ] = 0,
    sets: Sets = None,
    smoke: Smoke = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="metrics to TensorBoard as well")] = False,
    wandb: Annotated[bool, typer.Option("--wandb", help="metrics to W&B as well, offline by default")] = False,
    unsafe_run_code: Annotated[
        bool, typer.Option("--unsafe-run-code", help="[chatcore] run_code where programs cannot be shut in")
    ] = False,
    json_: Json = False,
) -> None:
    """Carry out an experiment: every arm and seed, controls, timing, benchmarks, statistics, report.

    Continues what was interrupted, and adds what a longer file asks for (seeds, arms). With --until-decided the seeds
    come at looks (4, 6, 8, 12), and the intervals are wider, so that the error over all looks is 5 %.

    Example: xsalab run experiments/quick.toml

    Example: xsalab run experiments/quick.toml --until-decided --max-seeds 8

    Example: xsalab run experiments/d12.toml --devices 0,1,2,3

    Example: xsalab run experiments/d12.toml --on ray --address 10.0.0.1:6379 --out /shared/out
    """
    from ..experiment.outcome import outcome
    from ..experiment.stages import as_run, begin_looks, decided, next_look
    from ..experiment.store import RunStore
    from ..files import folder_lock, make_folder
    from ..report import print_outcome, write_report

    if max_seeds and not until_decided:
        raise ValueError(
            f"--max-seeds {max_seeds}: is the cap of --until-decided; give both, or list seeds in the file"
        )
    written = load(file, sets, smoke=smoke)
    where = _where(written, jobs, devices, on, address)
    store = RunStore.of(written, out)
    make_folder(store.folder)
    trackers = [name for name, wanted in (("tensorboard", tensorboard), ("wandb", wandb)) if wanted]
    spent: list[dict[str, Any]] = []
    beside = 1
    clock = {"begin": time.perf_counter()}
    with where.ready(), folder_lock(store.folder, "experiment"):
        experiment = begin_looks(written, store, max_seeds or 12) if until_decided else as_run(written, store)
        while True:
            if experiment.looks:
                note(f"the look at {len(experiment.seeds)} of at most {experiment.looks[-1]} seeds")
            experiment, statuses, used = _carry_out(experiment, store, out, where, trackers, clock)
            spent, beside = spent + statuses, max(beside, used)
            if experiment.downstream:
                _ask_downstream(experiment, store, where, unsafe_run_code)
                clock["benchmarks"] = time.perf_counter()
            result = outcome(experiment, store)
            page = write_report(experiment, store, result)
            further = next_look(experiment, store) if until_decided and not decided(result) else None
            if further is None:
                break
            experiment = further
        clock["report"] = time.perf_counter()
    if json_:
        print(json.dumps({**result, "report": str(page)}, ensure_ascii=False, allow_nan=False))
    else:
        print_outcome(result, console)
        print(_parts(clock, spent, "on Ray" if where.on_ray else f"{beside} side by side"))
        print(f"report: {page}")
    if any(entry["state"] == "diverged" for entry in result["runs"]):
        raise typer.Exit(1)


@dataclass(frozen=True)
class _Where:
    """What the options say about where the runs are carried out."""

    jobs: int
    devices: tuple[int, ...]
    on_ray: bool
    address: str

    def ready(self) -> Any:
        """A context within which runs can be carried out: connected to the cluster."""
        if not self.on_ray:
            return nullcontext()
        from ..experiment.ray_runs import connected

        return connected(self.address)

    def slots(self, pending: list[Any]) -> list[Any]:
        """Where tasks that are alike run on this machine."""
        from ..experiment.workers import choose_slots, uses

        return choose_slots(pending, self.devices if uses(pending[0])[0] == "cuda" else (), self.jobs)

    def carry_out(self, pending: list[Any], begin: Any) -> int:
        """Carries out tasks, those alike together, at most so many side by side as are returned (0: not known).

        begin: a context manager of (the words for where they run), which yields the function for events.
        """
        from ..experiment.ray_runs import run_on_ray
        from ..experiment.workers import alike, run_tasks

        if self.on_ray:
            with begin("on Ray") as event:
                run_on_ray(pending, self.address, event)
            return 0
        parts = [(group, self.slots(group)) for group in alike(pending)]
        beside = max(len(slots) for _, slots in parts)
        with begin(f"{beside} at a time") as event:
            for group, slots in parts:
                run_tasks(group, slots, event)
        return beside


def _where(experiment: Any, jobs: int, devices: str, on: str, address: str) -> _Where:
    """The options of ``run`` about where, or ValueError where they do not go together or are not to be had."""
    from ..experiment.workers import read_devices

    if on not in ("local", "ray"):
        raise ValueError(f"--on {on}: use local or ray")
    if address and on != "ray":
        raise ValueError(f"--address {address}: is the cluster's of --on ray; give both or neither")
    if on == "ray" and (devices or jobs):
        option = f"--devices {devices}" if devices else f"--jobs {jobs}"
        raise ValueError(f"{option}: with --on ray the cluster places the runs; leave it out")
    if on == "ray" and experiment.command:
        raise ValueError('--on ray: engine = "command": what a command needs of a machine is not known; use --on local')
    if devices and jobs:
        raise ValueError(
            f"--devices {devices} --jobs {jobs}: the devices say how many runs there are at a time; give one"
        )
    return _Where(jobs, read_devices(devices, experiment) if devices else (), on == "ray", address)


def _carry_out(
    experiment: Any, store: Any, out: Path, where: _Where, trackers: list[str], clock: dict[str, float]
) -> tuple[Any, list[dict[str, Any]], int]:
    """The runs that are not there yet, the timing, and what follows from it for equal time.

    Returns the experiment with its further runs, the statuses of the runs of this call, and how many ran side by side.
    """
    from ..experiment.fleet import tasks
    from ..experiment.ray_runs import measure_on_ray
    from ..experiment.stages import equal_time_ratios, plan_equal_time, usable_costs
    from ..experiment.timing import measure_costs, measured_costs

    prepare(experiment, out)
    clock.setdefault("corpus", time.perf_counter())
    statuses, used = _train_missing(experiment, store, out, where, trackers)
    clock["runs"] = time.perf_counter()
    if experiment.controls.timing and not usable_costs(experiment, store):
        with bar("timing the arms in turns", 1.0) as update:
            if where.on_ray:
                measure_on_ray(experiment, store, out, tasks(experiment, out)[0], where.address)
            else:
                measure_costs(experiment, store, out, lambda done, total: update(done / total))
    clock["timing"] = time.perf_counter()
    if experiment.equal_time.rerun:
        experiment = plan_equal_time(experiment, store, measured_costs(experiment, store))
        if not equal_time_ratios(store):
            note("equal time: no run is planned from step times of a busy machine; run again when it is quiet")
        further, more = _train_missing(experiment, store, out, where, trackers)
        statuses, used = statuses + further, max(used, more)
        clock["equal time"] = time.perf_counter()
    return experiment, statuses, used


def _train_missing(
    experiment: Any, store: Any, out: Path, where: _Where, trackers: list[str]
) -> tuple[list[dict[str, Any]], int]:
    from ..experiment.building import cannot_compile
    from ..experiment.fleet import tasks
    from ..experiment.run import run_cell
    from ..model.native import reason as no_kernels

    every = tasks(experiment, out, trackers)
    ended = [task for task in every if store.run(task.cell).state in ("finished", "diverged")]
    pending = [task for task in every if task not in ended]
    for task in ended:  # trains nothing; a run of another configuration is found before hours are spent
        run_cell(task)
    if any(task.compiled for task in pending) and (reason := cannot_compile()):
        note(f"note: {reason}")
    if any(task.kernels for task in pending) and (reason := no_kernels()):
        note(f"note: {reason}")
    used = 1
    if pending:

        @contextmanager
        def begin(words: str) -> Iterator[Any]:
            note(f"{len(pending)} of {len(every)} runs to do, {words}")
            with _run_progress(store, pending) as event:
                yield event

        used = where.carry_out(pending, begin)
    return [store.run(task.cell).status for task in pending], used


def _ask_downstream(experiment: Any, store: Any, where: _Where, unsafe_code: bool) -> None:
    """CORE, fine-tuning and ChatCORE of the finished runs that lack them, under one bar."""
    from ..experiment.downstream import downstream_tasks

    pending = downstream_tasks(experiment, store, unsafe_code)
    if not pending:
        return
    parts = pending[0].parts
    done = {(task.cell, part): 0.0 for task in pending for part in parts}
    told: set[str] = set()

    @contextmanager
    def begin(words: str) -> Iterator[Any]:
        note(f"{len(pending)} runs to ask: {', '.join(parts)}; {words}")
        with bar("asking", len(done)) as update:

            def event(cell: Any, content: dict[str, Any]) -> None:
                if content["kind"] == "part":
                    done[cell, content["part"]] = content["done"] / content["total"]
                    update(sum(done.values()), f"asking {cell.name}, {content['words']}")
                elif content["kind"] in ("again", "failed"):
                    note(f"{cell.name}: {content['text']}")
                elif content["kind"] == "note" and content["text"] not in told:  # the same of every run
                    told.add(content["text"])
                    note(f"{cell.name}: {content['text']}")
                elif content["kind"] == "end":
                    done.update({(cell, part): 1.0 for part in parts})
                    note(f"{cell.name}: {content['state']}")
                    update(sum(done.values()))

            yield event

    where.carry_out(pending, begin)


def _parts(clock: dict[str, float], statuses: list[dict[str, Any]], beside: str) -> str:
    """Where the time of this call went: wall seconds a stage, and what the runs spent theirs on."""
    names = list(clock)
    stages = ", ".join(f"{name} {clock[name] - clock[before]:.0f} s" for before, name in itertools.pairwise(names))
    spent = [status["seconds"] for status in statuses if "seconds" in status]
    inside = ", ".join(f"{part} {sum(run[part] for run in spent):.0f} s" for part in (spent[0] if spent else ()))
    total = f"took {clock[names[-1]] - clock[names[0]]:.0f} s: {stages}"
    return f"{total}; within the runs, {beside}: {inside}" if inside else total


@contextmanager
def _run_progress(store: Any, pending: list[Any]) -> Iterator[Any]:
    """One bar over all steps, below it a line for each run under way; a line that stays for each that ends."""
    steps = {task.cell: task.steps for task in pending}
    done, places = dict.fromkeys(steps, 0), dict.fromkeys(steps, "")
    with bars("training", sum(steps.values())) as (update, line):

        def event(cell: Any, content: dict[str, Any]) -> None:
            kind = content["kind"]
            if kind == "start":
                places[cell] = f", {content['where']}" if content["where"] else ""
                line(cell.name, f"begins{places[cell]}", 0, steps[cell])
                if not notes.is_terminal:
                    note(f"{cell.name}: begins{places[cell]}")
            elif kind == "step":
                done[cell] = content["step"] if content["steps"] else 0  # of a command the number is not known
                words = content.get("words") or f"{done[cell]}/{steps[cell]}, loss {content['loss']:.3f}"
                line(cell.name, words + places[cell], done[cell], steps[cell])
                update(sum(done.values()))
            elif kind in ("again", "failed"):
                line(cell.name)
                note(f"{cell.name}: {content['text']}")
            elif kind == "end":
                line(cell.name)
                status = store.run(cell).status
                done[cell] = steps[cell]
                seconds = status.get("seconds", {})
                detail = status.get("message", "")
                if "val_bpb" in status:
                    detail = f"val bpb {status['val_bpb']:.4f}, {sum(seconds.values()):.0f} s"
                elif "value" in status:
                    detail = f"{status['value']:.6g}, {sum(seconds.values()):.0f} s"
                note(f"{cell.name}: {status['state']}, {detail}")
                update(sum(done.values()))

        yield event


@app.command()
def train(
    file: File,
    arm: Annotated[str, typer.Option(help="the arm to train")],
    seed: Annotated[int, typer.Option(help="one of the experiment's seeds")],
    point: Annotated[str, typer.Option(help="the point; the first one where left out")] = "",
    out: Out = OUT,
    sets: Sets = None,
    smoke: Smoke = False,
    json_: Json = False,
) -> None:
    """Train one run of an experiment in the foreground, or continue it; on several processes under torchrun.

    Example: xsalab train experiments/quick.toml --arm xsa --seed 0

    Example: torchrun --nproc-per-node=2 -m xsalab train experiments/quick.toml --arm xsa --seed 0
    """
    from ..experiment.fleet import tasks
    from ..experiment.launch import as_one_of
    from ..experiment.run import run_cell
    from ..experiment.stages import as_run
    from ..experiment.store import RunStore
    from ..experiment.workers import choose_slots, run_tasks

    experiment = load(file, sets, smoke=smoke)
    store = RunStore.of(experiment, out)
    experiment = as_run(experiment, store)
    point = point or experiment.points[0].name
    every = tasks(experiment, out)
    chosen = [task for task in every if (task.cell.point, task.cell.arm, task.cell.seed) == (point, arm, seed)]
    if not chosen:
        names = ", ".join(sorted({task.cell.arm for task in every}))
        points = ", ".join(item.name for item in experiment.points)
        raise ValueError(
            f"--arm {arm} --seed {seed} --point {point}: no such run; arms: {names}; "
            f"seeds: {list(experiment.seeds)}; points: {points}"
        )
    with as_one_of(chosen[0]) as (task, ranks):
        ranks.lead(lambda: prepare(experiment, out) and None)
        with _run_progress(store, [task]) as event:
            if ranks.world > 1:
                state = run_cell(task, event, ranks)
            else:
                state = run_tasks([task], choose_slots([task], jobs=1), event)[task.cell]
    if not ranks.first:
        return
    folder = store.run(task.cell)
    if json_:
        print(json.dumps({"folder": str(folder.path), **folder.status}, ensure_ascii=False))
    else:
        print(folder.path)
    if state == "diverged":
        raise typer.Exit(1)


@app.command()
def status(file: File, out: Out = OUT, sets: Sets = None, smoke: Smoke = False, json_: Json = False) -> None:
    """Show how far every run of an experiment is. Runs no code of the experiment's plugins.

    Example: xsalab status experiments/quick.toml --json
    """
    from ..experiment.design import expand, resolve
    from ..experiment.stages import as_run
    from ..experiment.store import RunStore, found_on

    experiment = load(file, sets, plugins=False, smoke=smoke)
    store = RunStore.of(experiment, out)
    experiment = as_run(experiment, store)
    rows = []
    for cell in expand(experiment):
        run = store.run(cell)
        row: dict[str, Any] = {
            "run": cell.name,
            "step": 0,
            "steps": None if experiment.command else resolve(experiment, cell).train.steps,
            **run.status,
        }
        if row["state"] == "running":  # status.json says where the process began; the log, where it is
            logged = [entry["step"] + 1 for entry in run.metrics() if "loss" in entry or experiment.command]
            row["step"] = max([row["step"], *logged])
        if where := found_on(run.read("fingerprint")):
            row["where"] = where
        rows.append(row)
    if json_:
        print(json.dumps(rows, ensure_ascii=False))
        return
    table = Table(box=None)
    for heading in ("run", "state", "step", experiment.metric.name if experiment.command else "val bpb", "where", ""):
        table.add_column(heading)
    for row in rows:
        value = f"{row['value']:.6g}" if "value" in row else ""
        value = f"{row['val_bpb']:.4f}" if "val_bpb" in row else value
        steps = str(row["step"]) if row["steps"] is None else f"{row['step']}/{row['steps']}"
        table.add_row(row["run"], row["state"], steps, value, row.get("where", ""), row.get("message", ""))
    console.print(table)
    states = [row["state"] for row in rows]
    print(", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)))


@app.command()
def report(
    file: File,
    out: Out = OUT,
    sets: Sets = None,
    smoke: Smoke = False,
    format_: Annotated[
        str, typer.Option("--format", help="html; md or latex: also report.md or report.tex beside the page")
    ] = "html",
    figures: Annotated[Path | None, typer.Option(help="also the figures for a paper, as SVG, into this folder")] = None,
    tables: Annotated[
        Path | None, typer.Option(help="also scores, mechanism and geometry of all runs, as Parquet, into this folder")
    ] = None,
    json_: Json = False,
) -> None:
    """Print the verdicts and write the page again from what is stored. Runs no code of the experiment's plugins.

    Example: xsalab report experiments/quick.toml --format md --figures out/figures --tables out/tables
    """
    from ..experiment.outcome import outcome
    from ..experiment.stages import as_run
    from ..experiment.store import RunStore
    from ..experiment.tables import write_tables
    from ..paper import check_format, write_paper
    from ..report import losses, print_outcome, write_report

    check_format(format_)
    experiment = load(file, sets, plugins=False, smoke=smoke)
    store = RunStore.of(experiment, out)
    if not store.folder.is_dir():
        raise ValueError(f"{store.folder}: nothing was run yet; begin with: xsalab run {file}")
    experiment = as_run(experiment, store)
    result = outcome(experiment, store)
    page = write_report(experiment, store, result)
    more = []
    if format_ != "html" or figures:
        more = write_paper(experiment, store, result, losses(experiment, store), format_, figures)
    written = write_tables(experiment, store, tables) if tables else []
    if json_:
        files = {"report": str(page), "files": [str(path) for path in (*more, *written)]}
        print(json.dumps({**result, **files}, ensure_ascii=False, allow_nan=False))
    else:
        print_outcome(result, console)
        print(f"report: {page}")
        if format_ != "html":
            print(f"text: {more[0]}")
        if figures:
            print(f"figures: {len(more) - (format_ != 'html')} in {figures}")
        if tables:
            print(f"tables: {', '.join(path.name for path in written) or 'no run has finished yet'} in {tables}")
