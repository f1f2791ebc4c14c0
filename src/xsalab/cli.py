"""The verbs. Each is a few lines that call one function.

Exit codes: 0 done; 1 a check failed or a run diverged; 2 a mistake in what was asked; 130 interrupted.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

app = typer.Typer(
    name="xsalab",
    help="Does a change to attention help, by how much, how surely, and at what cost?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=False,
)
console = Console()
notes = Console(stderr=True)

File = Annotated[Path, typer.Argument(help="the experiment's TOML file", metavar="FILE.toml")]
Out = Annotated[Path, typer.Option("--out", help="folder for corpora and experiments")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="section.field=value, over the file's; may repeat")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON value for machines")]
OUT = Path("out")


def main() -> None:
    """Entry point: a user's mistake is one short message and exit code 2, never a traceback."""
    warnings.showwarning = lambda message, *_, **__: _note(f"warning: {message}")
    # Compiled kernels outlive the process, so that a second run starts at once.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path.home() / ".cache" / "xsalab" / "inductor"))
    before = signal.signal(signal.SIGINT, _interrupt)
    try:
        app()
    except (ValueError, OSError) as error:
        if os.environ.get("XSALAB_TRACEBACK"):
            raise
        print(f"error: {_message(error)}", file=sys.stderr)
        sys.exit(2)
    except _Interrupted:
        print("interrupted; the same command continues where it stopped", file=sys.stderr)
        sys.exit(130)
    finally:
        signal.signal(signal.SIGINT, before)


class _Interrupted(BaseException):
    """Ctrl-C. Not KeyboardInterrupt, which click takes for itself, with another exit code in each release."""


def _interrupt(number: int, frame: Any) -> None:
    raise _Interrupted


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _note(text: str) -> None:
    """A line for the user beside the result: to stderr, whole, however long its paths are."""
    notes.print(text, markup=False, highlight=False, soft_wrap=True)


def _load(path: Path, sets: list[str] | None, plugins: bool = True) -> Any:
    """The experiment; with ``plugins`` its variants' files are imported after their paths and hashes are printed."""
    from .config import read_toml
    from .experiment.plugins import import_plugins, read_plugins
    from .experiment.reading import load_experiment

    if plugins:
        names = read_toml(path, sets or ()).get("plugins", [])
        # what is no list of names is refused by load_experiment
        texts = read_plugins(path, [n for n in names if isinstance(n, str)] if isinstance(names, list) else [])
        _tell_plugins(path.parent, texts)
        import_plugins(texts)
    return load_experiment(path, sets or (), known_variants=plugins)


def _tell_plugins(folder: Path, texts: Iterable[tuple[str, str]]) -> None:
    """Says whose code is about to run, and which."""
    import hashlib

    for name, text in texts:
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        _note(f"plugin {folder / name}, sha256 {digest}")


@contextmanager
def _bar(description: str, total: float) -> Iterator[Any]:
    """A progress bar with an ETA on a terminal; yields a function (completed, description)."""
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
        console=notes, transient=True, disable=not notes.is_terminal,
    ) as progress:  # fmt: skip
        task = progress.add_task(description, total=total)
        yield lambda completed, text=None: progress.update(task, completed=completed, description=text or description)


def _prepare(experiment: Any, out: Path) -> Any:
    from .experiment.fleet import begin_experiment

    with _bar("preparing the corpus", 1.0) as update:
        store, corpora = begin_experiment(experiment, out, lambda stage, share: update(share, stage))
    for corpus in corpora:
        for line in corpus.notes:
            _note(f"note: {line}")
    return store, corpora


@app.command()
def data(file: File, out: Out = OUT, sets: Sets = None, json_: Json = False) -> None:
    """Prepare the corpus: text, tokenizer, packed rows.

    Example: xsalab data experiments/quick.toml
    """
    from .experiment.design import expand, resolve

    experiment = _load(file, sets, plugins=False)
    if experiment.command:
        print("[]" if json_ else 'nothing to prepare: engine = "command", so the data are the command\'s own')
        return
    _, corpora = _prepare(experiment, out)
    contexts = sorted({resolve(experiment, cell).model.context for cell in expand(experiment)})
    content = [
        {"folder": str(corpus.folder), **corpus.manifest, "rows": [corpus.rows(context).counts for context in contexts]}
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

    from .check import all_checks, experiment_choices
    from .experiment.design import expand, resolve

    torch.set_num_threads(1)  # so small that threads only wait for each other, for minutes on a busy machine
    extra = ()
    if file is not None:
        experiment = _load(file, sets)
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
    until_decided: Annotated[
        bool, typer.Option("--until-decided", help="add seeds at fixed looks until the primary contrast is decided")
    ] = False,
    max_seeds: Annotated[
        int, typer.Option(help="the last look of --until-decided, declared before the runs; 0: 12")
    ] = 0,
    sets: Sets = None,
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
    """
    from .experiment.outcome import outcome
    from .experiment.stages import as_run, begin_looks, decided, next_look
    from .experiment.store import RunStore
    from .files import folder_lock, make_folder
    from .report import print_outcome, write_report

    if max_seeds and not until_decided:
        raise ValueError(
            f"--max-seeds {max_seeds}: is the cap of --until-decided; give both, or list seeds in the file"
        )
    written = _load(file, sets)
    store = RunStore.of(written, out)
    make_folder(store.folder)
    trackers = [name for name, wanted in (("tensorboard", tensorboard), ("wandb", wandb)) if wanted]
    spent: list[dict[str, Any]] = []
    beside = 1
    clock = {"begin": time.perf_counter()}
    with folder_lock(store.folder, "experiment"):
        experiment = begin_looks(written, store, max_seeds or 12) if until_decided else as_run(written, store)
        while True:
            if experiment.looks:
                _note(f"the look at {len(experiment.seeds)} of at most {experiment.looks[-1]} seeds")
            experiment, statuses, used = _carry_out(experiment, store, out, jobs, trackers, clock)
            spent, beside = spent + statuses, max(beside, used)
            if experiment.downstream:
                _ask_downstream(experiment, store, jobs, unsafe_run_code)
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
        print(_parts(clock, spent, beside))
        print(f"report: {page}")
    if any(entry["state"] == "diverged" for entry in result["runs"]):
        raise typer.Exit(1)


def _carry_out(
    experiment: Any, store: Any, out: Path, jobs: int, trackers: list[str], clock: dict[str, float]
) -> tuple[Any, list[dict[str, Any]], int]:
    """The runs that are not there yet, the timing, and what follows from it for equal time.

    Returns the experiment with its further runs, the statuses of the runs of this call, and how many ran side by side.
    """
    from .experiment.stages import equal_time_ratios, plan_equal_time, usable_costs
    from .experiment.timing import measure_costs, measured_costs

    _prepare(experiment, out)
    clock.setdefault("corpus", time.perf_counter())
    statuses, used = _train_missing(experiment, store, out, jobs, trackers)
    clock["runs"] = time.perf_counter()
    if experiment.controls.timing and not usable_costs(experiment, store):
        with _bar("timing the arms in turns", 1.0) as update:
            measure_costs(experiment, store, out, lambda done, total: update(done / total))
    clock["timing"] = time.perf_counter()
    if experiment.equal_time.rerun:
        experiment = plan_equal_time(experiment, store, measured_costs(experiment, store))
        if not equal_time_ratios(store):
            _note("equal time: no run is planned from step times of a busy machine; run again when it is quiet")
        further, more = _train_missing(experiment, store, out, jobs, trackers)
        statuses, used = statuses + further, max(used, more)
        clock["equal time"] = time.perf_counter()
    return experiment, statuses, used


def _train_missing(
    experiment: Any, store: Any, out: Path, jobs: int, trackers: list[str]
) -> tuple[list[dict[str, Any]], int]:
    from .experiment.building import cannot_compile
    from .experiment.fleet import default_jobs, run_tasks, tasks
    from .experiment.run import run_cell

    every = tasks(experiment, out, trackers)
    ended = [task for task in every if store.run(task.cell).state in ("finished", "diverged")]
    pending = [task for task in every if task not in ended]
    for task in ended:  # trains nothing; a run of another configuration is found before hours are spent
        run_cell(task)
    if experiment.command:
        jobs = jobs or 1  # what a command needs of the machine is not known
    jobs = jobs or default_jobs(max(task.threads for task in every), len(pending))
    if any(task.compiled for task in pending) and (reason := cannot_compile()):
        _note(f"note: {reason}")
    if pending:
        _note(f"{len(pending)} of {len(every)} runs to do, {jobs} at a time")
        with _run_progress(store, pending) as event:
            run_tasks(pending, jobs, event)
    return [store.run(task.cell).status for task in pending], jobs


def _ask_downstream(experiment: Any, store: Any, jobs: int, unsafe_code: bool) -> None:
    """CORE, fine-tuning and ChatCORE of the finished runs that lack them, under one bar."""
    from .experiment.downstream import downstream_tasks
    from .experiment.fleet import default_jobs, run_tasks

    pending = downstream_tasks(experiment, store, unsafe_code)
    if not pending:
        return
    jobs = jobs or default_jobs(max(task.threads for task in pending), len(pending))
    parts = pending[0].parts
    _note(f"{len(pending)} runs to ask: {', '.join(parts)}; {jobs} at a time")
    done = {(task.cell, part): 0.0 for task in pending for part in parts}
    told: set[str] = set()
    with _bar("asking", len(done)) as update:

        def event(cell: Any, content: dict[str, Any]) -> None:
            if content["kind"] == "part":
                done[cell, content["part"]] = content["done"] / content["total"]
                update(sum(done.values()), f"asking {cell.name}, {content['words']}")
            elif content["kind"] == "note" and content["text"] not in told:  # the same of every run
                told.add(content["text"])
                _note(f"{cell.name}: {content['text']}")
            elif content["kind"] == "end":
                done.update({(cell, part): 1.0 for part in parts})
                _note(f"{cell.name}: {content['state']}")
                update(sum(done.values()))

        run_tasks(pending, jobs, event)


def _parts(clock: dict[str, float], statuses: list[dict[str, Any]], jobs: int) -> str:
    """Where the time of this call went: wall seconds a stage, and what the runs spent theirs on."""
    names = list(clock)
    stages = ", ".join(f"{name} {clock[name] - clock[before]:.0f} s" for before, name in itertools.pairwise(names))
    spent = [status["seconds"] for status in statuses if "seconds" in status]
    inside = ", ".join(f"{part} {sum(run[part] for run in spent):.0f} s" for part in (spent[0] if spent else ()))
    total = f"took {clock[names[-1]] - clock[names[0]]:.0f} s: {stages}"
    return f"{total}; within the runs, {jobs} side by side: {inside}" if inside else total


@contextmanager
def _run_progress(store: Any, pending: list[Any]) -> Iterator[Any]:
    """One bar over all steps; a line for each run that ends."""
    total = sum(task.steps for task in pending)
    done = dict.fromkeys((task.cell for task in pending), 0)
    with _bar("training", total) as update:

        def event(cell: Any, content: dict[str, Any]) -> None:
            if content["kind"] == "step":
                done[cell] = content["step"] if content["steps"] else 0  # of a command the number is not known
                words = content.get("words") or f"loss {content['loss']:.3f}"
                update(sum(done.values()), f"training {cell.name}, {words}")
            elif content["kind"] == "end":
                status = store.run(cell).status
                done[cell] = next(task.steps for task in pending if task.cell == cell)
                seconds = status.get("seconds", {})
                detail = status.get("message", "")
                if "val_bpb" in status:
                    detail = f"val bpb {status['val_bpb']:.4f}, {sum(seconds.values()):.0f} s"
                elif "value" in status:
                    detail = f"{status['value']:.6g}, {sum(seconds.values()):.0f} s"
                _note(f"{cell.name}: {status['state']}, {detail}")
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
    json_: Json = False,
) -> None:
    """Train one run of an experiment in the foreground, or continue it.

    Example: xsalab train experiments/quick.toml --arm xsa --seed 0
    """
    from .experiment.fleet import run_tasks, tasks
    from .experiment.stages import as_run
    from .experiment.store import RunStore

    experiment = _load(file, sets)
    experiment = as_run(experiment, RunStore.of(experiment, out))
    store, _ = _prepare(experiment, out)
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
    with _run_progress(store, chosen) as event:
        states = run_tasks(chosen, 1, event)
    folder = store.run(chosen[0].cell)
    if json_:
        print(json.dumps({"folder": str(folder.path), **folder.status}, ensure_ascii=False))
    else:
        print(folder.path)
    if "diverged" in states.values():
        raise typer.Exit(1)


@app.command()
def status(file: File, out: Out = OUT, sets: Sets = None, json_: Json = False) -> None:
    """Show how far every run of an experiment is. Runs no code of the experiment's plugins.

    Example: xsalab status experiments/quick.toml --json
    """
    from .experiment.design import expand, resolve
    from .experiment.stages import as_run
    from .experiment.store import RunStore

    experiment = _load(file, sets, plugins=False)
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
        rows.append(row)
    if json_:
        print(json.dumps(rows, ensure_ascii=False))
        return
    table = Table(box=None)
    for heading in ("run", "state", "step", experiment.metric.name if experiment.command else "val bpb", ""):
        table.add_column(heading)
    for row in rows:
        value = f"{row['value']:.6g}" if "value" in row else ""
        value = f"{row['val_bpb']:.4f}" if "val_bpb" in row else value
        steps = str(row["step"]) if row["steps"] is None else f"{row['step']}/{row['steps']}"
        table.add_row(row["run"], row["state"], steps, value, row.get("message", ""))
    console.print(table)
    states = [row["state"] for row in rows]
    print(", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)))


@app.command()
def report(file: File, out: Out = OUT, sets: Sets = None, json_: Json = False) -> None:
    """Print the verdicts and write the page again from what is stored. Runs no code of the experiment's plugins.

    Example: xsalab report experiments/quick.toml
    """
    from .experiment.outcome import outcome
    from .experiment.stages import as_run
    from .experiment.store import RunStore
    from .report import print_outcome, write_report

    experiment = _load(file, sets, plugins=False)
    store = RunStore.of(experiment, out)
    if not store.folder.is_dir():
        raise ValueError(f"{store.folder}: nothing was run yet; begin with: xsalab run {file}")
    experiment = as_run(experiment, store)
    result = outcome(experiment, store)
    page = write_report(experiment, store, result)
    if json_:
        print(json.dumps({**result, "report": str(page)}, ensure_ascii=False, allow_nan=False))
    else:
        print_outcome(result, console)
        print(f"report: {page}")


@app.command()
def sample(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="a finished run's folder")],
    prompt: Annotated[str, typer.Argument(help="text to continue")] = "",
    tokens: Annotated[int, typer.Option(min=1, help="how many to add")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest token")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="choose among the k likeliest; 0: among all")] = 50,
    seed: Annotated[int, typer.Option(help="of the choice of tokens")] = 0,
    samples: Annotated[int, typer.Option(min=1, help="how many continuations; their seeds count up from --seed")] = 1,
    json_: Json = False,
) -> None:
    """Continue a text with a trained model.

    Example: xsalab sample out/experiments/quick/runs/base.xsa.s0 "def main(" --tokens 60

    Example: xsalab sample out/experiments/quick/runs/base.xsa.s0 "import " --samples 4 --json
    """
    from .eval.generate import generate, generate_batch, stream_text
    from .experiment.run import load_run
    from .experiment.store import RunFolder

    _tell_plugins(folder, RunFolder(folder).read("config").get("plugins", {}).items())
    model, corpus, _ = load_run(folder)
    tokenizer = corpus.tokenizer
    start = [tokenizer.bos, *tokenizer.encode([prompt])[0]]
    if len(start) + tokens > model.config.context:
        _note(f"note: prompt and --tokens go beyond the {model.config.context} tokens that the model was trained on")
    if samples == 1:
        new = generate(model, start, tokens, temperature=temperature, top_k=top_k, seed=seed, stop=[tokenizer.bos])
        if not json_:
            print(prompt, end="", flush=True)
            for piece in stream_text(tokenizer.token_bytes[token] for token in new):
                print(piece, end="", flush=True)
            print()
            return
        every = [list(new)]
    else:
        seeds = range(seed, seed + samples)
        with _bar("sampling", samples) as update:
            every = generate_batch(
                model, [start] * samples, tokens=tokens, temperature=temperature, top_k=top_k, seeds=seeds,
                stop=[tokenizer.bos], limit=len(start) + tokens, progress=lambda done, total: update(done),
            )  # fmt: skip
    made = [{"prompt": prompt, "tokens": ids, "text": tokenizer.decode(ids)} for ids in every]
    if json_:
        print(json.dumps(made[0] if samples == 1 else made, ensure_ascii=False))
        return
    for number, entry in enumerate(made):
        print(f"--- seed {seed + number}\n{prompt}{entry['text']}")


@app.command()
def chat(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="a finished run's folder; RUN/sft is taken if there")],
    prompt: Annotated[str | None, typer.Option(help="one question, one answer, and no terminal")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="at most, of one answer")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest token")] = 0.6,
    top_k: Annotated[int, typer.Option(min=0, help="choose among the k likeliest; 0: among all")] = 50,
    seed: Annotated[int, typer.Option(help="of the choice of tokens")] = 0,
    json_: Json = False,
) -> None:
    """Talk with a trained model: fine-tuned where RUN/sft is there. Ctrl-C stops an answer, Ctrl-D leaves.

    Lines can be piped in as well; each is a question, or a command such as /clear (see /help).

    Example: xsalab chat out/experiments/quick/runs/base.xsa.s0

    Example: xsalab chat out/experiments/quick/runs/base.xsa.s0 --prompt "What is 12 * 3?" --json
    """
    from .chat import ChatSettings, lines, open_chat, say, talk, which_model
    from .experiment.store import RunFolder

    if json_ and prompt is None:
        raise ValueError("--json: needs --prompt TEXT; a conversation is not one JSON value")
    if prompt is not None and not prompt.strip():
        raise ValueError("--prompt: is empty; give a question, or leave it out to talk")
    chosen, words = which_model(folder)
    _tell_plugins(chosen, RunFolder(chosen).read("config").get("plugins", {}).items())
    talking = open_chat(chosen, ChatSettings(tokens, temperature, top_k, seed))
    _note(words)

    def write(text: str) -> None:
        if not json_:
            print(_spelled(text), end="", flush=True)

    if prompt is not None:
        answer = say(talking, prompt, write, _note)
        if json_:
            content = {"run": str(chosen), "prompt": prompt, "answer": answer.text, "tokens": answer.tokens}
            print(json.dumps({**content, "ended": answer.ended}, ensure_ascii=False))
        return
    terminal = sys.stdin.isatty()
    if terminal:
        _note("/help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves")
    talk(talking, lines(terminal), write, _note, terminal=terminal)


@app.command()
def sft(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="a finished run's folder")],
    data: Annotated[list[str], typer.Option(help="a file, folder or hub:smoltalk; may repeat; 'FILE x 4'")],
    epochs: Annotated[float | None, typer.Option(help="passes over the conversations; 1 where left out")] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", help="sft.field=value; may repeat")] = None,
    json_: Json = False,
) -> None:
    """Fine-tune a finished run on conversations, into RUN/sft, or go on where that stopped.

    Example: xsalab sft out/experiments/quick/runs/base.xsa.s0 --data chats.jsonl --data "gsm8k_train.jsonl x 4"
    """
    from .experiment.sft import fine_tune, sft_config
    from .experiment.store import RunFolder

    config = sft_config(data, [*([f"sft.epochs={epochs}"] if epochs is not None else []), *(sets or ())])
    _tell_plugins(folder, RunFolder(folder).read("config").get("plugins", {}).items())
    with ExitStack() as bars:
        update = bars.enter_context(_bar("preparing the conversations", 1.0))

        def event(content: dict[str, Any]) -> None:
            nonlocal update
            if content["kind"] == "prepare":
                update(content["share"], content["stage"])
            elif content["kind"] == "data":
                bars.close()
                for line in content["lines"]:
                    _note(line)
                update = bars.enter_context(_bar("fine-tuning", content["steps"]))
            else:
                update(content["step"], f"fine-tuning, loss {content['loss']:.3f}")

        tuned = RunFolder(fine_tune(folder, config, event=event))
    values = [row["val_bpb"] for row in tuned.metrics() if "val_bpb" in row]
    if json_:
        content = {"folder": str(tuned.path), **tuned.status, "val_bpb_before": values[0] if values else None}
        print(json.dumps(content, ensure_ascii=False))
    elif tuned.state == "finished":
        change = f"{values[0]:.4f} bits per byte before, {values[-1]:.4f} after {tuned.status['steps']} steps"
        print(f"held-out answers: {change}")
        print(tuned.path)
    else:
        print(f"{tuned.path}: {tuned.state}, {tuned.status.get('message', '')}")
    if tuned.state == "diverged":
        raise typer.Exit(1)


@app.command()
def core(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="a finished run's folder, or a nanochat checkpoint's")],
    bundle: Annotated[str, typer.Option(help="the evaluation bundle: a folder, a zip, or a zip's https address")] = "",
    sha256: Annotated[str, typer.Option(help="of the zip; an address needs it")] = "",
    tasks: Annotated[list[str] | None, typer.Option(help="one of the bundle's; may repeat; all where left out")] = None,
    max_per_task: Annotated[int, typer.Option(help="items of each task, the first in nanochat's order; 0: all")] = 0,
    longest: Annotated[str, typer.Option(help="prompts: 'reference' (10 contexts, as nanochat) or 'context'")] = (
        "reference"
    ),
    out: Out = OUT,
    json_: Json = False,
) -> None:
    """Ask a run the tasks of CORE, item by item; or go on where that stopped.

    Example: xsalab core out/experiments/quick/runs/base.xsa.s0 --bundle eval_bundle --max-per-task 100
    """
    from .eval.core import CoreConfig
    from .experiment.core import ask_core
    from .experiment.store import RunFolder

    config = CoreConfig(bundle, sha256, tuple(tasks or ()), max_per_task, longest)
    _tell_plugins(folder, RunFolder(folder).read("config").get("plugins", {}).items())
    with _bar("asking", 1.0) as update:
        result = ask_core(
            folder, config, out=out, note=_note,
            progress=lambda done, total, task: update(done / total, f"asking {task}"),
        )  # fmt: skip
    content = result.as_json()
    if json_:
        print(json.dumps(content, ensure_ascii=False, allow_nan=False))
        return
    _task_table(content["tasks"])
    print(f"CORE {content['CORE']:.4f} (a model that guesses at random: {content['guessing']:.4f})")
    _say_lines(content["notes"])
    print(content["folder"])


def _task_table(tasks: dict[str, dict[str, Any]]) -> None:
    """A benchmark's tasks: accuracy, what guessing gives, and what rules touched."""
    table = Table(box=None)
    for heading in ("task", "accuracy", "items", "chance", "baseline", "centred", ""):
        table.add_column(heading)
    for name, row in tasks.items():
        shares = (row["chance"], row["baseline"], row["centred"])
        counts = ", ".join(f"{count} {rule}" for rule, count in row["counts"].items())
        accuracy, *others = (f"{100 * share:.1f} %" for share in (row["accuracy"], *shares))
        table.add_row(name, accuracy, str(row["items"]), *others, counts)
    console.print(table)


@app.command()
def chatcore(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="a finished run's folder; RUN/sft is taken if there")],
    data: Annotated[str, typer.Option(help="folder with arc_easy_test.jsonl, …; 'hub': downloaded once")] = "hub",
    tasks: Annotated[list[str] | None, typer.Option(help="one of the five; may repeat; all where left out")] = None,
    max_categorical: Annotated[int, typer.Option(help="items of ARC and MMLU each; 0: all")] = 0,
    max_generated: Annotated[int, typer.Option(help="items of GSM8K and HumanEval each; 0: all")] = 24,
    samples: Annotated[int, typer.Option(help="answers to a generated item; above 1 gives pass@k")] = 1,
    temperature: Annotated[float, typer.Option(help="of generated answers; 0: always the likeliest token")] = 0.0,
    top_k: Annotated[int, typer.Option(help="choose among the k likeliest; 0: among all")] = 50,
    max_new_tokens: Annotated[int, typer.Option(help="of one answer; never more than the context")] = 512,
    k: Annotated[list[int] | None, typer.Option(min=1, help="of pass@k; may repeat; 1 and all where left out")] = None,
    seed: Annotated[int, typer.Option(help="of the choice of tokens")] = 0,
    batch_rows: Annotated[int, typer.Option(help="rows side by side; changes memory, never a score")] = 16,
    run_code: Annotated[bool, typer.Option("--run-code", help="HumanEval: run programs that the model wrote")] = False,
    unsafe_run_code: Annotated[
        bool, typer.Option("--unsafe-run-code", help="even where they cannot be shut in; see docs/sandbox.md")
    ] = False,
    json_: Json = False,
) -> None:
    """Ask a run the five tasks of ChatCORE, item by item; or go on where that stopped.

    Example: xsalab chatcore out/experiments/quick/runs/base.xsa.s0 --data chat --max-categorical 200 --run-code
    """
    from .eval.chat_prompts import ChatCoreConfig
    from .eval.chat_tasks import CHAT_TASKS
    from .experiment.chatcore import ask_chat_core, chat_folder
    from .experiment.store import RunFolder

    config = ChatCoreConfig(
        data=data, tasks=tuple(tasks or CHAT_TASKS), max_categorical=max_categorical, max_generated=max_generated,
        samples=samples, temperature=temperature, top_k=top_k, max_new_tokens=max_new_tokens, seed=seed,
        batch_rows=batch_rows, run_code=run_code or unsafe_run_code,
    )  # fmt: skip
    _tell_plugins(folder, RunFolder(chat_folder(folder)[0]).read("config").get("plugins", {}).items())
    with _bar("asking", 1.0) as update:
        result = ask_chat_core(
            folder, config, unsafe_code=unsafe_run_code, note=_note,
            progress=lambda done, total, task: update(done / total, f"asking {task}"),
        )  # fmt: skip
    content = result.as_json(tuple(k or ()))
    if json_:
        print(json.dumps(content, ensure_ascii=False, allow_nan=False))
        return
    _task_table(content["tasks"])
    for name, row in content["tasks"].items():
        if samples > 1 or k:
            for number, value in row.get("pass_at", {}).items():
                print(f"{name} pass@{number}: " + (f"{100 * value:.1f} %" if value is not None else "not available"))
    for name in ("ChatCORE", "ChatCORE_cat"):
        if content[name] is not None:
            print(f"{name} {content[name]:.4f}")
    _say_lines(content["notes"])
    print(content["folder"])


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="a finished run, RUN/sft, or a nanochat checkpoint")],
    to: Annotated[Path, typer.Argument(metavar="DIR", help="a new folder")],
    chat: Annotated[
        bool | None, typer.Option("--chat/--no-chat", help="with chat template; left out: RUN/sft alone has one")
    ] = None,
    json_: Json = False,
) -> None:
    """Write a trained model as a Hugging Face folder that loads without xsalab, and prove that it does.

    Example: xsalab export out/experiments/quick/runs/base.xsa.s0 my-model
    """
    from .experiment.card import experiment_card
    from .experiment.run import load_run
    from .experiment.store import RunFolder
    from .interop.export import export as write_export
    from .interop.export_tokenizer import nanochat_tokenizer
    from .interop.nanochat import read_checkpoint

    stored = RunFolder(folder).read("config")
    plugins = tuple(stored.get("plugins", {}).items())
    if not stored and any(folder.glob("model_*.pt")):
        model, given = read_checkpoint(folder)
        tokenizer, card = nanochat_tokenizer(given), ""
    else:
        _tell_plugins(folder, plugins)
        model, corpus, _ = load_run(folder)
        tokenizer, card = corpus.tokenizer, experiment_card(folder)
    chat = "sft" in stored if chat is None else chat
    _note("writing, then loading it in a process without xsalab")
    made = write_export(model, tokenizer, to, card=card, chat=chat, plugins=plugins)
    if json_:
        print(json.dumps({**vars(made), "folder": str(made.folder)}, ensure_ascii=False))
        return
    print(f"{made.folder}: {len(made.files)} files, {made.bytes:,} bytes")
    print(f"proved: {made.logits:,} logits equal to the last bit without xsalab" if made.logits else made.note)


@app.command()
def plan(
    file: File,
    out: Out = OUT,
    effect: Annotated[str, typer.Option(help="the difference worth finding: 0.003, or 0.3% of the baseline")] = "",
    sd: Annotated[str, typer.Option(help="a stated sd of the paired differences: 0.0005, or 0.05%")] = "",
    measure: Annotated[bool, typer.Option("--measure/--no-measure", help="time a few steps where needed")] = True,
    sets: Sets = None,
    json_: Json = False,
) -> None:
    """Say what an experiment will cost and what it can see, before anything is spent.

    Trains and writes nothing, runs no code of the experiment's plugins.

    Example: xsalab plan experiments/quick.toml --effect 0.3%
    """
    from .experiment.stages import as_run
    from .experiment.store import RunStore
    from .plan import plan as make_plan
    from .plan import print_plan

    experiment = _load(file, sets, plugins=False)
    store = RunStore.of(experiment, out)
    content = make_plan(as_run(experiment, store), store, effect=effect, sd=sd, measure=measure)
    if json_:
        print(json.dumps(content, ensure_ascii=False, allow_nan=False))
    else:
        print_plan(content, console)


@app.command()
def calibrate(
    experiments: Annotated[int, typer.Option(min=1, help="experiments a setting")] = 2000,
    jobs: Annotated[int, typer.Option(min=0, help="processes side by side; 0: one a core")] = 0,
    bank: Annotated[Path | None, typer.Option(help="a finished experiment to resample, not the shipped runs")] = None,
    out: Out = OUT,
    json_: Json = False,
) -> None:
    """Try the verdicts on thousands of experiments whose truth is known, and judge their errors.

    Exit code 1 if an error is larger, or an interval wider, than it says.

    Example: xsalab calibrate --experiments 2000
    """
    from .calibrate import calibrate as run_calibration
    from .calibrate import collect, markdown, read_bank, shipped_bank
    from .experiment.stages import as_run
    from .experiment.store import RunStore

    if bank is None:
        runs = shipped_bank()
    else:
        experiment = _load(bank, None, plugins=False)
        store = RunStore.of(experiment, out)
        runs = read_bank(collect(as_run(experiment, store), store))
    with _bar("calibrating", 1.0) as update:
        result = run_calibration(runs, experiments=experiments, jobs=jobs, progress=update)
    print(json.dumps(result, ensure_ascii=False, allow_nan=False) if json_ else markdown(result))
    if result["failed"]:
        raise typer.Exit(1)


@app.command()
def align(
    log: Annotated[Path, typer.Argument(metavar="LOG", help="console log, CSV, JSON lines, event files, run folder")],
    reference: Annotated[Path | None, typer.Option(help="a log of raw values that saw the same batches")] = None,
    beta: Annotated[float | None, typer.Option(help="β of the exponential average, where it is known")] = None,
    form: Annotated[str, typer.Option(help="of that average: corrected or plain")] = "",
    metric: Annotated[str, typer.Option(help="which of the log's metrics")] = "loss",
    run: Annotated[str, typer.Option(help="which run, where the file holds several")] = "",
    out: Annotated[Path | None, typer.Option(help="write the aligned series to this CSV file")] = None,
    json_: Json = False,
) -> None:
    """Say which step convention and smoothing another tool's log has, undo both exactly, and write the result.

    Example: xsalab align console.log --out aligned.csv
    """
    from .align import align as align_log
    from .align import as_json, lines, write_table
    from .interop.logs import read_log

    other = None if reference is None else read_log(reference)
    aligned = align_log(read_log(log, run), reference=other, beta=beta, form=form, metric=metric)
    if out is not None:
        write_table(aligned, out)
    if json_:
        print(json.dumps(as_json(aligned), ensure_ascii=False, allow_nan=False))
        return
    _say_lines(lines(aligned))
    if out is not None:
        print(f"written: {out}")


@app.command()
def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="EXPERIMENT:ARM, run folders, a log, or a folder of logs")],
    b: Annotated[str, typer.Argument(metavar="B", help="the same: the baseline")],
    metric: Annotated[str, typer.Option(help="what is compared at the end of the runs")] = "val_bpb",
    higher: Annotated[bool, typer.Option("--higher-is-better", help="an accuracy, not a loss")] = False,
    margin: Annotated[float, typer.Option(help="a difference too small to matter, as a share of B's value")] = 0.001,
    json_: Json = False,
) -> None:
    """Compare runs that exist, xsalab's or other tools' logs, and say what the comparison cannot vouch for.

    Example: xsalab compare out/experiments/quick:xsa out/experiments/quick:standard
    """
    from .compare import compare as compare_runs
    from .compare import lines, terminal_table

    content = compare_runs(a, b, metric=metric, lower_is_better=not higher, margin=margin)
    if json_:
        print(json.dumps(content, ensure_ascii=False, allow_nan=False))
        return
    console.print(terminal_table(content, _spelled))
    print()
    _say_lines(lines(content))


def _spelled(text: str) -> str:
    """The text as stdout can write it: signs that its encoding lacks are spelled out."""
    encoding = console.encoding or "utf-8"
    if encoding.lower().startswith("utf"):
        return text
    from .report import SPELLED

    return text.translate(SPELLED).encode(encoding, "replace").decode(encoding)


def _say_lines(texts: Iterable[str]) -> None:
    """Each as one line, however long."""
    for text in texts:
        print(_spelled(text))
