"""One cell end to end.

A run resumes from its last complete checkpoint by itself. The order at the end is: checkpoint, evaluate,
scores, status; so a failure in the evaluation loses nothing and the evaluation can be repeated.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..config import build, digest, dump
from ..data import Corpus, Rows
from ..eval import ItemScore
from ..eval.bits_per_byte import total_bpb
from ..eval.validation import evaluate
from ..files import folder_lock, make_folder
from ..model import GPT, ModelConfig, VariantChoice
from ..model.causality import check_causality
from ..model.variant import VARIANTS
from ..peers import Elsewhere
from ..train import Diverged, Hook, TrainState, train
from ..train.checkpoint import load_checkpoint, load_model, model_tensors, save_checkpoint
from ..train.ranks import ALONE, Ranks
from .building import batches, build_state, compute_dtype, derived, open_corpus
from .command_run import CommandTask, run_command
from .design import Cell, RunConfig, config_differences, ours
from .fingerprint import code_digest, fingerprint, state_digest
from .hooks import Checkpoints, Metrics, Report, Validation
from .mechanism import DiagnoseConfig, Diagnosis
from .pairing import describe, mismatch
from .plugins import PLUGIN, import_plugins
from .store import Follower, RunFolder
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
    diagnose: DiagnoseConfig | None = None

    @property
    def threads(self) -> int:
        """Of the processor, that the run computes with."""
        return self.config.train.threads

    @property
    def steps(self) -> int:
        """That the run takes."""
        return self.config.train.steps

    @property
    def processes(self) -> int:
        """That share each of its batches."""
        return self.config.train.processes

    @property
    def compiled(self) -> bool:
        """Whether its model is to be compiled."""
        return self.config.train.compile

    @property
    def kernels(self) -> bool:
        """Whether it computes with the C++ kernels where they can be had."""
        return self.config.train.device == "cpu" and compute_dtype(self.config) == "bfloat16"


def run_cell(task: RunTask | CommandTask, event: Event = lambda cell, content: None, ranks: Ranks = ALONE) -> str:
    """Carries out one cell, or continues it; returns its state: "finished" or "diverged".

    Of several processes all call it: the first holds the run's folder and writes there.
    Raises ValueError where the folder holds a run of another configuration, the partner of this point and
    seed does not match, the processes differ in code or data, or the variant looks at future tokens; nothing is
    trained then. A user's own trainer: ``run_command``.
    """
    if isinstance(task, CommandTask):
        return run_command(task, event)
    config, folder = task.config, RunFolder(task.folder) if ranks.first else Follower(task.folder)
    _check_division(task, ranks)
    with held(folder, ranks):
        begin, tables = time.perf_counter(), dump(config)
        agree(ranks, {"config": tables, "code": code_digest(), "plugins": dict(task.plugins)})
        if ended := ranks.lead(lambda: _known(task, folder)):
            return ended
        torch.set_num_threads(config.train.threads)
        import_plugins(task.plugins)
        # prepared once, where it is not there yet; then every process opens it
        ranks.lead(lambda: open_corpus(config.data, config.model.vocab_size, task.home).folder.name)
        corpus = open_corpus(config.data, config.model.vocab_size, task.home)
        config.train.batch_rows(config.model.context)
        check_causality_once(config.model, config.variant)
        state = fresh_state(config, ranks)
        own = fingerprint(config, state, corpus, task.plugins)
        agree(ranks, own)
        ranks.lead(lambda: _begin(task, folder, own))
        return train_and_evaluate(
            folder, state, config, corpus.rows(config.model.context),
            lambda model: evaluate(model, corpus, config.eval, ranks),
            begin=begin,
            event=lambda content: event(task.cell, content),
            others=lambda step: [
                *(TRACKERS[name](folder.path, task.cell, tables, step) for name in task.trackers),
                *([Diagnosis(folder.path, task.diagnose, corpus, config)] if task.diagnose else []),
            ],
        )  # fmt: skip


@contextmanager
def held(folder: RunFolder, ranks: Ranks) -> Iterator[None]:
    """The run's folder, made where it is not there, for the processes of one run alone."""
    with ExitStack() as stack:

        def hold() -> None:
            make_folder(folder.path)
            stack.enter_context(folder_lock(folder.path, "run", LOCK_WAIT))

        ranks.lead(hold)
        yield


def agree(ranks: Ranks, own: Mapping[str, Any]) -> None:
    """ValueError, in all processes, where one has another ``own`` than the first: other code, data or configuration.

    The name of the machine is its own matter.
    """
    told = [json.loads(text) for text in ranks.texts(json.dumps({**own, "machine": ""}))]
    for rank, other in enumerate(told):
        if found := config_differences(told[0], other):
            text = f"process {rank} of {ranks.world} differs from process 0: {describe(found)}. "
            raise (ValueError if ranks.first else Elsewhere)(f"{text}All need the same code, data and versions")


def _check_division(task: RunTask, ranks: Ranks) -> None:
    train = task.config.train
    if train.processes != ranks.world:
        raise ValueError(
            f"train.processes = {train.processes}, but {ranks.world} work here: "
            f"start it by xsalab run, or by torchrun --nproc-per-node={train.processes} -m xsalab train"
        )
    if task.diagnose and train.shard and ranks.world > 1:
        raise ValueError("[diagnose] with train.shard: a sliced model is not measured; use xsalab diagnose afterwards")


def _known(task: RunTask, folder: RunFolder) -> str:
    """How the run ended, if it did, else "". Raises ValueError where the folder is another run's."""
    known = folder.read("config").get("config")
    if known is not None and (found := ours(config_differences(known, dump(task.config)))):
        raise ValueError(
            f"{folder.path}: holds a run of another configuration: {describe(found)}. "
            "Give the experiment another name, or delete that folder"
        )
    stored = folder.read("config").get("plugins", {})
    if known is not None and _from_plugin(task.config) and stored != dict(task.plugins):
        raise ValueError(
            f"{folder.path}: trained with another text of plugin {', '.join(stored) or '(none)'}. "
            "Give the experiment another name, or delete that folder"
        )
    ended = tidy(folder)
    return ended if ended in ("finished", "diverged") else ""


def _begin(task: RunTask, folder: RunFolder, own: Mapping[str, Any]) -> None:
    """Checks what a run must match, its partners and its own beginning, and writes down what it is."""
    for partner, factors in task.partners:
        other = RunFolder(partner).read("fingerprint")
        if other and (found := mismatch(own, other, factors)):
            raise ValueError(
                f"{task.cell.name} is no partner of {partner.name}: {describe(found)}. "
                "A pair differs in its declared factors alone"
            )
    begin_under(folder, own)
    folder.write(
        "config", {"config": dump(task.config), "derived": derived(task.config), "plugins": dict(task.plugins)}
    )
    folder.write("fingerprint", own)


def tidy(folder: RunFolder) -> str:
    """The run's state, after what a killed process left half written is gone, and what a finished run needs no more."""
    for left in folder.path.glob(".*.tmp"):
        left.unlink()
    if (state := folder.state) == "finished":
        shutil.rmtree(folder.path / "checkpoints", ignore_errors=True)
    return state


def fresh_state(config: RunConfig, ranks: Ranks = ALONE) -> TrainState:
    """``build_state`` for a run of its own: every run compiles a model of its own, and torch gives up after eight."""
    if config.train.compile:
        torch._dynamo.reset()
    return build_state(config, ranks)


def begin_under(folder: RunFolder, own: Mapping[str, Any]) -> None:
    """ValueError where the folder's run began under other conditions than ``own``, its fingerprint now."""
    before = folder.read("fingerprint")
    if before and (found := ours(mismatch(own, before, ()))):
        raise ValueError(
            f"{folder.path}: began under other conditions: {describe(found)}. Delete the folder to start it again here"
        )


def train_and_evaluate(
    folder: RunFolder,
    state: TrainState,
    config: RunConfig,
    rows: Rows,
    score: Callable[[GPT], list[ItemScore]],
    *,
    begin: float,
    event: Callable[[dict[str, Any]], None],
    others: Callable[[int], list[Hook]] = lambda step: [],
    score_first: bool = False,
) -> str:
    """From the last checkpoint, or from ``state`` as it is, to the run's whole record; returns how the run ended.

    score: the rows of scores of a model. ``score_first``: before the first step too. ``others`` are further hooks, made
    for the step that is continued from. ``begin``: when the run was begun, by time.perf_counter. Every process of the
    run calls it, all but the first with a Follower.
    """
    ranks = state.ranks
    steps, checkpoints = config.train.steps, folder.path / "checkpoints"
    load_checkpoint(checkpoints, state)
    resumed = state.step
    further = others(resumed) if ranks.first else []
    folder.cut_metrics(resumed)
    status = {"steps": steps, "step": state.step, "resumes": folder.status.get("resumes", -1) + 1}
    if ranks.world > 1 or "processes" in folder.status:  # [step, from which on so many worked on it]
        status["processes"] = [*folder.status.get("processes", []), [resumed, ranks.world]]
    folder.write("status", {"state": "running", **status})
    log = folder.log()
    validation = Validation(log, score, config.eval.every, steps, score_first)
    hooks: list[Hook] = [Checkpoints(checkpoints, log, config.train.checkpoint_steps, steps, resumed), validation]
    if ranks.first:
        hooks += [Metrics(log), Report(steps, event), *further]
    ready = time.perf_counter()
    try:
        train(
            state, batches(config, rows, ranks), config.optim.schedule_over(steps),
            micro_rows=config.train.micro_rows, clip=config.optim.clip, hooks=hooks,
        )  # fmt: skip
        if not all(math.isfinite(score.value) for score in validation.scores):
            return _diverged(folder, status, steps, f"step {steps}: the validation loss is not finite")
        folder.write_scores(validation.scores)
        folder.write_weights(model_tensors(state))
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
    diagnosed = sum(hook.seconds for hook in further if isinstance(hook, Diagnosis))
    seconds = {
        "start": ready - begin,
        "training": time.perf_counter() - ready - validation.seconds - diagnosed,
        "evaluation": validation.seconds,
        **({"diagnostics": diagnosed} if diagnosed else {}),
    }
    folder.write(
        "status",
        {
            **status, "state": "finished", "step": steps, "seconds": seconds, "weights": state_digest(state),
            "val_bpb": total_bpb(validation.scores),
        },
    )  # fmt: skip
    if ranks.first:
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


def check_finished(folder: Path) -> None:
    """ValueError where the folder holds no finished run of our own engine."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no run here, no folder; give a folder under out/experiments/NAME/runs")
    run = RunFolder(folder)
    stored = run.read("config")
    if not stored or len(folder.resolve().parents[1 if "sft" in stored else 0 :]) < 4:
        raise ValueError(
            f"{folder}: no run here (config.json is missing); give a folder under out/experiments/NAME/runs"
        )
    if "command" in stored["config"]:
        raise ValueError(
            f"{folder}: a command's run: what it trained is in {folder / 'out'}, in the command's own form"
        )
    if not (folder / "model.safetensors").is_file():
        why = "it diverged and has no weights" if run.state == "diverged" else "its weights are written when it ends"
        raise ValueError(f"{folder}: not finished ({run.state}); {why}")


def load_run(folder: Path) -> tuple[GPT, Corpus, RunConfig]:
    """The trained model of a finished run OUT/experiments/NAME/runs/RUN, its corpus and its configuration.

    RUN/sft, which ``fine_tune`` leaves, is such a run as well: the same model and corpus, other weights. Executes the
    plugins that are stored with the run. The model lies on the device that it was trained on, or on the CPU where
    there is none.
    """
    check_finished(folder)
    stored = RunFolder(folder).read("config")
    above = folder.resolve().parents[1 if "sft" in stored else 0 :]
    weights = folder / "model.safetensors"
    import_plugins(tuple(stored["plugins"].items()))
    config = build(RunConfig, stored["config"], str(folder / "config.json"))
    device = config.train.device if torch.cuda.is_available() else "cpu"
    state = build_state(
        dataclasses.replace(config, train=dataclasses.replace(config.train, compile=False, device=device))
    )
    with torch.no_grad():
        load_model(weights, state)
    state.model.set_progress(1.0)
    return state.model, open_corpus(config.data, config.model.vocab_size, above[3]), config
