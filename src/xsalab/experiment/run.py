"""One cell end to end, and all cells of an experiment side by side in processes of their own.

A run resumes from its last complete checkpoint by itself. The order at the end is: checkpoint, evaluate,
scores, status; so a failure in the evaluation loses nothing and the evaluation can be repeated.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import math
import multiprocessing
import os
import queue
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors.torch import save as safetensors_bytes

from ..config import build, digest, dump
from ..data import Batch, Corpus, DataConfig, Rows, batch_at, prepare
from ..eval.bits_per_byte import total_bpb
from ..eval.validation import EvalConfig, check_evaluation, evaluate, evaluation_documents
from ..model import GPT, ModelConfig, VariantChoice, count_parameters, init_weights
from ..model.causality import check_causality
from ..model.variant import VARIANTS
from ..optim import Hybrid, effective_rates
from ..optim.hybrid import Rates
from ..train import Diverged, Hook, StepMetrics, TrainState, train
from ..train.checkpoint import (
    load_checkpoint,
    load_model,
    make_folder,
    model_tensors,
    save_checkpoint,
    save_tensors,
    write_atomic,
)
from ..train.loop import DTYPES, fast_bfloat16
from .design import Cell, Experiment, RunConfig, config_differences, declared_factors, expand, resolve
from .environment import code_digest, environment
from .pairing import describe, mismatch
from .store import MetricsLog, RunFolder, RunStore
from .trackers import TRACKERS

Event = Callable[[Cell, dict[str, Any]], None]
PLUGIN = "xsalab_plugin_"  # begins the module name of a plugin
LOCK_WAIT = 5.0  # seconds: as long as the workers of a killed parent need to end


@dataclass(frozen=True)
class RunTask:
    """What a process needs to carry out one cell."""

    cell: Cell
    config: RunConfig
    folder: Path
    home: Path  # where prepared corpora are
    plugins: tuple[tuple[str, str], ...] = ()  # (name, text) of the variants' files
    partners: tuple[tuple[Path, tuple[str, ...]], ...] = ()  # runs of this point and seed, and the declared factors
    trackers: tuple[str, ...] = ()


# ---------------------------------------------------------------------------------------------- plugins


def read_plugins(experiment_path: Path, names: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """(path as written, text) of each plugin, found beside the experiment's file. Runs nothing."""
    found = []
    for name in names:
        path = experiment_path.parent / name
        try:
            found.append((name, path.read_text(encoding="utf-8")))
        except OSError as error:
            raise ValueError(f"{experiment_path}: plugins: {path}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"{experiment_path}: plugins: {path}: not UTF-8 (byte {error.start})") from None
    return tuple(found)


def import_plugins(plugins: Sequence[tuple[str, str]]) -> None:
    """Executes the plugins' text, which registers their variants. Once a process and text."""
    for name, text in plugins:
        _import_plugin(name, text)


@lru_cache(maxsize=64)
def _import_plugin(name: str, text: str) -> None:
    module = importlib.util.module_from_spec(
        importlib.util.spec_from_loader(PLUGIN + Path(name).stem, loader=None)  # pyright: ignore
    )
    sys.modules[module.__name__] = module
    try:
        exec(compile(text, name, "exec"), module.__dict__)
    except Exception as error:
        line = error.__traceback__.tb_next.tb_lineno if error.__traceback__ and error.__traceback__.tb_next else "?"
        raise ValueError(f"plugin {name}, line {line}: {type(error).__name__}: {error}") from error


# ------------------------------------------------------------------------------------ building a state


def compute_dtype(config: RunConfig) -> str:
    """ "float32" or "bfloat16": as configured, or what this processor has fast units for."""
    train = config.train
    if train.dtype != "auto":
        return train.dtype
    return "bfloat16" if fast_bfloat16(train.device) else "float32"


def rates_of(config: RunConfig) -> Rates:
    """The optimizer's rates for this model and batch."""
    return effective_rates(
        config.optim,
        width=config.model.width,
        batch_tokens=config.train.batch_tokens,
        scaling_parameters=scaling_parameters(config.model),
        reference_parameters=scaling_parameters(reference_model(config.model)),
    )


def reference_model(model: ModelConfig) -> ModelConfig:
    """Depth 12 at the same width per layer and the same head size: where nanochat's hyperparameters were tuned."""
    heads = max(1, round(12 * model.width / model.depth / model.head_size))
    return dataclasses.replace(
        model, depth=12, heads=heads, kv_heads=0, head_dim=model.head_size, width=heads * model.head_size
    )


@lru_cache(maxsize=64)
def scaling_parameters(model: ModelConfig) -> int:
    """Matrices of the blocks and the head, counted without allocating them."""
    with torch.device("meta"):
        return count_parameters(GPT(model)).scaling


def build_state(config: RunConfig) -> TrainState:
    """A model with the first weights of its seed, on its device, and its optimizer."""
    if config.train.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("train.device = 'cuda': torch finds no CUDA device here; use 'cpu'")
    dtype = DTYPES[compute_dtype(config)]
    model = GPT(config.model, config.variant, dtype=dtype, kernel=config.train.attention)
    init_weights(model, config.seed)
    model.to(config.train.device)
    state = TrainState(model, Hybrid(model, config.optim, rates_of(config), dtype))
    if config.train.compile and not cannot_compile():
        state.token_nats = compiled_nats(model)
    return state


def compiled_nats(model: GPT) -> Callable[..., torch.Tensor]:
    """model.token_nats with its trunk compiled for fixed shapes; the head works in blocks of its own."""
    hidden = torch.compile(model.hidden, dynamic=False, fullgraph=True)
    return lambda tokens, targets: model.nats_of_hidden(hidden(tokens), targets)


@lru_cache(maxsize=1)
def cannot_compile() -> str:
    """Empty where torch.compile can work on this machine, else why not, in one line."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:  # torch raises kinds of its own for "no compiler"
        return f"no C++ compiler is installed ({type(error).__name__}): training runs uncompiled"
    return ""


@lru_cache(maxsize=4)
def open_corpus(data: DataConfig, vocab_size: int, home: Path) -> Corpus:
    """The prepared corpus, prepared now where it is not there yet."""
    return prepare(data, vocab_size, home)


def batches(config: RunConfig, rows: Rows) -> Callable[[int], Batch]:
    """The run's batch of a step: a pure function of its seed and the step."""
    batch_rows, permute = config.train.batch_rows(config.model.context), config.train.permute_rows
    return lambda step: batch_at(rows, seed=config.seed, step=step, batch_rows=batch_rows, permute=permute)


def derived(config: RunConfig) -> dict[str, Any]:
    """Numbers that follow from the configuration, stored beside it."""
    with torch.device("meta"):
        model = GPT(config.model, config.variant)
        counts = count_parameters(model)
        extra = sum(variant.extra_flops() for variant in model.variants())
    rates, context = rates_of(config), config.model.context
    seen = sum(min(config.model.window_of(layer), context) + 1 for layer in range(config.model.depth))
    attention = 4 * config.model.heads * config.model.head_size * seen
    return {
        "steps": config.train.steps,
        "parameters": dict(counts._asdict(), total=counts.total, scaling=counts.scaling),
        "flops_per_token": 3 * (2 * counts.scaling + attention + extra),
        "lr": dict(rates.lr),
        "matrix_weight_decay": rates.matrix_weight_decay,
        "dtype": compute_dtype(config),
        "head_size": config.model.head_size,
        "kv_heads": config.model.groups,
        "layers": list(check_layers(config.variant, config.model)),
    }


def check_layers(choice: VariantChoice, model: ModelConfig) -> tuple[int, ...]:
    """The layers that the variant is in effect on."""
    from ..model.variant import check_choice

    return check_choice(choice, model)


# ----------------------------------------------------------------------------------------- fingerprint


def fingerprint(
    config: RunConfig, state: TrainState, corpus: Corpus, plugins: Sequence[tuple[str, str]]
) -> dict[str, Any]:
    """What a partner must agree with, taken before the first step."""
    rows, steps = corpus.rows(config.model.context), config.train.steps
    batch_of = batches(config, rows)
    edges = [sorted(batch_of(step).row_ids.tolist()) for step in (0, steps - 1)]
    documents = evaluation_documents(corpus, config.eval.max_bytes)
    return {
        "config": dump(config),
        "start": {name: _tensor_digest(tensor) for name, tensor in state.model.named_parameters()},
        "rows": digest([rows.digest, *edges]),
        "corpus": digest(corpus.manifest.get("files", corpus.folder.name)),
        "evaluation": digest([[document.id, document.bytes] for document in documents]),
        "environment": environment(config.train, compute_dtype(config), state.token_nats is not None),
        "code": code_digest(),
        # Of a variant from a plugin: a plugin that another arm needs is nothing to the arms without it.
        "plugins": {
            name: hashlib.sha256(text.encode()).hexdigest()[:16]
            for name, text in plugins
            if VARIANTS[config.variant.name].__module__.startswith(PLUGIN)
        },
    }


def _tensor_digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(str(tuple(tensor.shape)).encode() + data.tobytes()).hexdigest()[:16]


def state_digest(state: TrainState) -> str:
    """SHA-256 of all weights: equal for two runs that agree to the bit."""
    return hashlib.sha256(safetensors_bytes(model_tensors(state))).hexdigest()


# --------------------------------------------------------------------------------------------- hooks


class _Checkpoints(Hook):
    """Saves every ``every`` steps and at the end, before anything else happens at that step."""

    def __init__(self, folder: Path, log: MetricsLog, every: int, steps: int, saved_at: int) -> None:
        self.folder, self.log, self.every, self.steps, self.saved_at = folder, log, every, steps, saved_at

    def before_step(self, state: TrainState) -> None:
        due = state.step == self.steps or (state.step and state.step % self.every == 0)
        if due and state.step != self.saved_at:
            self.log.sync()
            save_checkpoint(self.folder, state, {})
            self.saved_at = state.step


class _Validation(Hook):
    """val_bpb[s] with the weights after s updates; at the end the rows that are kept."""

    def __init__(self, log: MetricsLog, corpus: Corpus, config: EvalConfig, steps: int) -> None:
        self.log, self.corpus, self.config, self.steps = log, corpus, config, steps
        self.scores = []
        self.seconds = 0.0

    def before_step(self, state: TrainState) -> None:
        if state.step == self.steps or (self.config.every and state.step % self.config.every == 0):
            begin = time.perf_counter()
            self.scores = evaluate(state.model, self.corpus, self.config)
            self.seconds = time.perf_counter() - begin
            self.log.write({"step": state.step, "val_bpb": total_bpb(self.scores), "eval_seconds": self.seconds})


class _Metrics(Hook):
    """One row a step, with what the variants log."""

    def __init__(self, log: MetricsLog) -> None:
        self.log = log

    def after_step(self, state: TrainState, metrics: StepMetrics) -> None:
        row: dict[str, Any] = dict(vars(metrics))
        for layer, variant in enumerate(state.model.variants()):
            row |= {f"layer{layer}.{name}": value for name, value in variant.logged().items()}
        self.log.write(row)


class _Report(Hook):
    """Tells the caller how far the run is, at most a few times a second."""

    def __init__(self, cell: Cell, steps: int, event: Event) -> None:
        self.cell, self.steps, self.event, self.last = cell, steps, event, 0.0

    def after_step(self, state: TrainState, metrics: StepMetrics) -> None:
        now = time.perf_counter()
        if now - self.last > 0.3 or state.step == self.steps:
            self.last = now
            self.event(self.cell, {"kind": "step", "step": state.step, "steps": self.steps, "loss": metrics.loss})


# ------------------------------------------------------------------------------------------- one run


def run_cell(task: RunTask, event: Event = lambda cell, content: None) -> str:
    """Carries out one cell, or continues it; returns its state: "finished" or "diverged".

    Raises ValueError where the folder holds a run of another configuration, the partner of this point and
    seed does not match, or the variant looks at future tokens; nothing is trained then.
    """
    config, folder = task.config, RunFolder(task.folder)
    make_folder(folder.path)
    with run_lock(folder.path):
        tables = dump(config)
        known = folder.read("config").get("config")
        if known is not None and (found := config_differences(known, tables)):
            raise ValueError(
                f"{folder.path}: holds a run of another configuration: {describe(found)}. "
                "Give the experiment another name, or delete that folder"
            )
        for left in folder.path.glob(".*.tmp"):  # of a process that was killed while it wrote
            left.unlink()
        if folder.state == "finished":
            shutil.rmtree(folder.path / "checkpoints", ignore_errors=True)
        if folder.state in ("finished", "diverged"):
            return folder.state
        begin = time.perf_counter()
        torch.set_num_threads(config.train.threads)
        import_plugins(task.plugins)
        corpus = open_corpus(config.data, config.model.vocab_size, task.home)
        config.train.batch_rows(config.model.context)
        check_causality_once(config.model, config.variant)
        if config.train.compile:
            torch._dynamo.reset()  # every run compiles a model of its own; torch gives up after eight
        state = build_state(config)
        own = fingerprint(config, state, corpus, task.plugins)
        for partner, factors in task.partners:
            other = RunFolder(partner).read("fingerprint")
            if other and (found := mismatch(own, other, factors)):
                raise ValueError(
                    f"{task.cell.name} is no partner of {partner.name}: {describe(found)}. "
                    "A pair differs in its declared factors alone"
                )
        before = folder.read("fingerprint")
        if before and (found := mismatch(own, before, ())):
            raise ValueError(
                f"{folder.path}: began under other conditions: {describe(found)}. "
                "Delete the folder to start it again here"
            )
        folder.write("config", {"config": tables, "derived": derived(config), "plugins": dict(task.plugins)})
        folder.write("fingerprint", own)
        return _train_and_evaluate(task, folder, state, corpus, begin, event)


def _train_and_evaluate(
    task: RunTask, folder: RunFolder, state: TrainState, corpus: Corpus, begin: float, event: Event
) -> str:
    config, steps = task.config, task.config.train.steps
    checkpoints = folder.path / "checkpoints"
    load_checkpoint(checkpoints, state)
    resumed = state.step
    trackers = [TRACKERS[name](folder.path, task.cell, dump(config), resumed) for name in task.trackers]
    folder.cut_metrics(resumed)
    status = {"steps": steps, "step": state.step, "resumes": folder.status.get("resumes", -1) + 1}
    folder.write("status", {"state": "running", **status})
    log = MetricsLog(folder.path / "metrics.jsonl")
    validation = _Validation(log, corpus, config.eval, steps)
    hooks: list[Hook] = [
        _Checkpoints(checkpoints, log, config.train.checkpoint_steps, steps, resumed),
        validation,
        _Metrics(log),
        _Report(task.cell, steps, event),
        *trackers,
    ]
    ready = time.perf_counter()
    try:
        train(
            state, batches(config, corpus.rows(config.model.context)), config.optim.schedule_over(steps),
            micro_rows=config.train.micro_rows, clip=config.optim.clip, hooks=hooks,
        )  # fmt: skip
        if not all(math.isfinite(score.value) for score in validation.scores):
            return _diverged(folder, status, steps, f"step {steps}: the validation loss is not finite")
        folder.write_scores(validation.scores)
        save_tensors(model_tensors(state), folder.path / "model.safetensors")
        folder.finish_metrics()
    except Diverged as error:
        log.write({**vars(error.metrics), "diverged": True})
        save_checkpoint(checkpoints, state, {"diverged": str(error)})
        return _diverged(folder, status, state.step, str(error))
    except Exception as error:
        with suppress(OSError):  # a full disk refuses this as well, and the first error is the one to tell
            folder.write("status", {**status, "state": "failed", "step": state.step, "message": str(error)})
        raise
    finally:
        log.close()
    seconds = {
        "start": ready - begin,
        "training": time.perf_counter() - ready - validation.seconds,
        "evaluation": validation.seconds,
    }
    folder.write(
        "status",
        {
            **status, "state": "finished", "step": steps, "seconds": seconds, "weights": state_digest(state),
            "val_bpb": total_bpb(validation.scores),
        },
    )  # fmt: skip
    shutil.rmtree(checkpoints, ignore_errors=True)
    return "finished"


def _diverged(folder: RunFolder, status: Mapping[str, Any], step: int, message: str) -> str:
    """Ends a run that broke down; its checkpoints stay for inspection."""
    folder.finish_metrics()
    folder.write("status", {**status, "state": "diverged", "step": step, "message": message})
    return "diverged"


_CHECKED: set[str] = set()


def check_causality_once(model: ModelConfig, choice: VariantChoice) -> None:
    """``check_causality``, once a process for each model and choice."""
    key = digest([dump(model), dump(choice)])
    if key not in _CHECKED:
        check_causality(model, choice)
        _CHECKED.add(key)


@contextmanager
def run_lock(folder: Path, what: str = "run") -> Iterator[None]:
    """Holds a folder for this process. ValueError where another process has it."""
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=LOCK_WAIT if what == "run" else 0)
    except Timeout:
        raise ValueError(f"{folder}: another process works on this {what}; wait for it or stop it") from None
    try:
        yield
    finally:
        lock.release()


def load_run(folder: Path) -> tuple[GPT, Corpus, RunConfig]:
    """The trained model of a finished run OUT/experiments/NAME/runs/RUN, its corpus and its configuration.

    Executes the plugins that are stored with the run. The model lies on the device that it was trained on,
    or on the CPU where there is none.
    """
    run = RunFolder(folder)
    stored = run.read("config")
    if not stored or len(folder.resolve().parents) < 4:
        raise ValueError(
            f"{folder}: no run here (config.json is missing); give a folder under out/experiments/NAME/runs"
        )
    weights = folder / "model.safetensors"
    if not weights.is_file():
        raise ValueError(f"{folder}: not finished ({run.state}); its weights are written when it ends")
    import_plugins(tuple(stored["plugins"].items()))
    config = build(RunConfig, stored["config"], str(folder / "config.json"))
    device = config.train.device if torch.cuda.is_available() else "cpu"
    state = build_state(
        dataclasses.replace(config, train=dataclasses.replace(config.train, compile=False, device=device))
    )
    with torch.no_grad():
        load_model(weights, state)
    state.model.set_progress(1.0)
    return state.model, open_corpus(config.data, config.model.vocab_size, folder.resolve().parents[3]), config


# ------------------------------------------------------------------------------------------ all runs


def tasks(experiment: Experiment, out: Path, trackers: Sequence[str] = ()) -> list[RunTask]:
    """A task for each cell, with the partners that it must match."""
    store, plugins = RunStore.of(experiment, out), read_plugins(experiment.path, experiment.plugins)
    found = []
    cells = expand(experiment)
    for cell in cells:
        partners = tuple(
            (store.run(other).path, declared_factors(experiment, cell.arm, other.arm))
            for other in cells
            if other != cell and (other.point, other.seed) == (cell.point, cell.seed)
        )
        found.append(
            RunTask(cell, resolve(experiment, cell), store.run(cell).path, out, plugins, partners, tuple(trackers))
        )
    return found


def default_jobs(threads: int, pending: int) -> int:
    """Runs side by side: as many as the cores hold at ``threads`` each, or the GPUs."""
    if torch.cuda.is_available():
        return max(1, min(torch.cuda.device_count(), pending))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores // threads, pending))


def run_tasks(pending: Sequence[RunTask], jobs: int, event: Event) -> dict[Cell, str]:
    """Carries out tasks, ``jobs`` at a time; returns the state of each.

    The first mistake of a user (ValueError) stops the rest; what runs is left resumable. One job runs in
    this process, more in processes of their own, which end when this one does.
    """
    states: dict[Cell, str] = {}
    if jobs == 1 or len(pending) == 1:
        for task in pending:
            event(task.cell, {"kind": "start"})
            states[task.cell] = run_cell(task, event)
            event(task.cell, {"kind": "end", "state": states[task.cell]})
        return states
    context = multiprocessing.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    for task in pending:
        inbox.put(task)
    for _ in range(jobs):
        inbox.put(None)
    saved = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(pending[0].config.train.threads)
    workers = [context.Process(target=_worker, args=(inbox, outbox, i), daemon=True) for i in range(jobs)]
    try:
        for worker in workers:
            worker.start()
    finally:
        if saved is None:
            del os.environ["OMP_NUM_THREADS"]
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
            state = run_cell(task, lambda cell, content: outbox.put((cell, content)))
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


def begin_experiment(
    experiment: Experiment, out: Path, progress: Callable[[str, float], None] | None = None
) -> tuple[RunStore, list[Corpus]]:
    """Makes the experiment's folder with its TOML, and prepares the corpora that its cells need."""
    store = RunStore.of(experiment, out)
    make_folder(store.folder)
    write_atomic(store.folder / "experiment.toml", experiment.text)
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
        packed.append({"folder": corpus.folder.name, "manifest": corpus.manifest, "contexts": contexts})
        corpora.append(corpus)
    write_atomic(store.folder / "corpora.json", json.dumps(packed, indent=1, ensure_ascii=False))
    return store, corpora


def twin_agrees(experiment: Experiment, store: RunStore) -> bool | None:
    """Whether the cell that was run twice agrees to the bit in weights and losses; None while a run is missing."""
    point, seed = experiment.points[0].name, experiment.seeds[0]
    first, second = (store.run(Cell(point, arm, seed)) for arm in (experiment.baseline, "twin"))
    if first.state != "finished" or second.state != "finished":
        return None

    def numbers(run: RunFolder) -> list[Mapping[str, Any]]:
        return [{k: v for k, v in row.items() if not k.endswith("seconds")} for row in run.metrics()]

    same_weights = first.status["weights"] == second.status["weights"]
    return same_weights and numbers(first) == numbers(second) and first.scores() == second.scores()
