"""One cell end to end.

A run resumes from its last complete checkpoint by itself. The order at the end is: checkpoint, evaluate,
scores, status; so a failure in the evaluation loses nothing and the evaluation can be repeated.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..config import build, digest, dump
from ..data import Corpus
from ..eval.bits_per_byte import total_bpb
from ..eval.validation import EvalConfig, evaluate
from ..files import folder_lock, make_folder
from ..model import GPT, ModelConfig, VariantChoice
from ..model.causality import check_causality
from ..model.variant import VARIANTS
from ..train import Diverged, Hook, StepMetrics, TrainState, train
from ..train.checkpoint import load_checkpoint, load_model, model_tensors, save_checkpoint, save_tensors
from .building import batches, build_state, derived, open_corpus
from .command_run import CommandTask, run_command
from .design import Cell, RunConfig, config_differences
from .fingerprint import fingerprint, state_digest
from .pairing import describe, mismatch
from .plugins import PLUGIN, import_plugins
from .store import MetricsLog, RunFolder
from .trackers import TRACKERS

Event = Callable[[Cell, dict[str, Any]], None]
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

    @property
    def threads(self) -> int:
        """Of the processor, that the run computes with."""
        return self.config.train.threads

    @property
    def steps(self) -> int:
        """That the run takes."""
        return self.config.train.steps

    @property
    def compiled(self) -> bool:
        """Whether its model is to be compiled."""
        return self.config.train.compile


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


def run_cell(task: RunTask | CommandTask, event: Event = lambda cell, content: None) -> str:
    """Carries out one cell, or continues it; returns its state: "finished" or "diverged".

    Raises ValueError where the folder holds a run of another configuration, the partner of this point and
    seed does not match, or the variant looks at future tokens; nothing is trained then.
    A user's own trainer: ``run_command``.
    """
    if isinstance(task, CommandTask):
        return run_command(task, event)
    config, folder = task.config, RunFolder(task.folder)
    make_folder(folder.path)
    with folder_lock(folder.path, "run", LOCK_WAIT):
        tables = dump(config)
        known = folder.read("config").get("config")
        if known is not None and (found := config_differences(known, tables)):
            raise ValueError(
                f"{folder.path}: holds a run of another configuration: {describe(found)}. "
                "Give the experiment another name, or delete that folder"
            )
        for left in folder.path.glob(".*.tmp"):  # of a process that was killed while it wrote
            left.unlink()
        stored = folder.read("config").get("plugins", {})
        if known is not None and _from_plugin(config) and stored != dict(task.plugins):
            raise ValueError(
                f"{folder.path}: trained with another text of plugin {', '.join(stored) or '(none)'}. "
                "Give the experiment another name, or delete that folder"
            )
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


def _from_plugin(config: RunConfig) -> bool:
    """Whether the run's variant comes from a user's file."""
    kind = VARIANTS.get(config.variant.name)
    return kind is not None and kind.__module__.startswith(PLUGIN)


_CHECKED: set[str] = set()


def check_causality_once(model: ModelConfig, choice: VariantChoice) -> None:
    """``check_causality``, once a process for each model and choice."""
    key = digest([dump(model), dump(choice)])
    if key not in _CHECKED:
        try:
            check_causality(model, choice)
        except (ValueError, OSError):
            raise
        except Exception as error:  # code of a user's own variant
            raise ValueError(f"variant {choice.name!r} fails: {type(error).__name__}: {error}") from error
        _CHECKED.add(key)


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
    if "command" in stored["config"]:
        raise ValueError(
            f"{folder}: a command's run: what it trained is in {folder / 'out'}, in the command's own form"
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
