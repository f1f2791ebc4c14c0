"""CORE of a run: asks its model, and keeps the answers beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..eval import TaskAnswers, centred_mean
from ..eval.bundle import Bundle, open_bundle, read_bundle
from ..eval.core import CoreConfig, Encoder, core, kept_items
from ..interop.nanochat import latest_step, read_checkpoint, variant_note
from ..model import GPT
from ..train.ranks import ALONE, Ranks
from .answers import known_answers, write_answers
from .fingerprint import model_digest
from .run import load_run
from .store import RunFolder

CACHE = Path.home() / ".cache" / "xsalab" / "bundles"


@dataclass(frozen=True)
class CoreResult:
    """``folder``: where the answers are. ``left_out``: task -> why it was not asked. ``tasks``: in the bundle."""

    folder: Path
    answers: dict[str, TaskAnswers]
    left_out: dict[str, str]
    tasks: int
    max_per_task: int = 0

    @property
    def figure(self) -> float:
        """CORE over the tasks that were asked."""
        return centred_mean(list(self.answers.values()))

    @property
    def guessing(self) -> float:
        """What a model that guesses at random scores on these very items: 0 by the convention alone."""
        shares = [(found.chance - found.baseline) / (1 - found.baseline) for found in self.answers.values()]
        return sum(shares) / len(shares)

    def notes(self) -> list[str]:
        """What must be said beside the figure."""
        told = [f"{task}: not asked: {why}" for task, why in self.left_out.items()]
        if self.max_per_task:
            told.append(f"a sample: at most {self.max_per_task} items of each task")
        if len(self.answers) < self.tasks:
            told.append(f"the figure is over {len(self.answers)} of the bundle's {self.tasks} tasks: it is not CORE")
        return told

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        tasks = {name: found.summary() for name, found in self.answers.items()}
        return {
            "folder": str(self.folder), "CORE": self.figure, "guessing": self.guessing, "tasks": tasks,
            "left_out": self.left_out, "notes": self.notes(),
        }  # fmt: skip


def find_bundle(config: CoreConfig) -> tuple[Bundle, list[str]]:
    """The tasks that are asked, and the names of all in the bundle. ValueError where there is no such bundle."""
    if not config.bundle:
        raise ValueError("no bundle is given: a folder or zip with core.yaml, or the https address of a zip and sha256")
    folder = open_bundle(config.bundle, config.sha256, CACHE)
    whole = read_bundle(folder)
    chosen = read_bundle(folder, config.tasks) if config.tasks else whole
    return chosen, [*(task.name for task in whole.tasks), *whole.faults]


def is_checkpoint(folder: Path) -> bool:
    """Whether it holds a nanochat checkpoint and no run of ours."""
    return any(folder.glob("model_*.pt"))


def open_model(folder: Path, out: Path, name: str = "core") -> tuple[GPT, Encoder, Path, str]:
    """The model and tokenizer of a run, or of a nanochat checkpoint; where its answers are kept; its weights' digest.

    Of a checkpoint, a folder with model_<step>.pt, the last step: under ``out``/nanochat.
    """
    if is_checkpoint(folder):
        model, tokenizer = read_checkpoint(folder)
        kept = out / "nanochat" / f"{folder.resolve().name}-{latest_step(folder):06d}" / name
        return model, tokenizer, kept, model_digest(model)
    model, corpus, _ = load_run(folder)
    return model, corpus.tokenizer, folder / name, RunFolder(folder).status["weights"]


def ask_core(
    run: Path,
    config: CoreConfig,
    *,
    name: str = "core",
    out: Path = Path("out"),
    progress: Callable[[float, float, str], None] = lambda done, total, task: None,
    note: Callable[[str], None] = lambda text: None,
    ranks: Ranks = ALONE,
) -> CoreResult:
    """Asks what is not there yet; each task's answers are kept as soon as they are complete.

    name: of the folder with the answers, answers.BENCHMARKS. progress: (items done, of all, the task). note: a line for
    the user. Raises ValueError where the bundle or the run is not there, no task can be asked, or the folder holds
    answers to another bundle's tasks: they would become part of the figure.
    """
    bundle, names = find_bundle(config)
    model, tokenizer, folder, weights = open_model(run, out, name)
    if is_checkpoint(run):
        note(variant_note(run))
    if strange := sorted(path.stem for path in folder.glob("*.parquet") if path.stem not in names):
        raise ValueError(
            f"{folder}: holds answers to {', '.join(strange[:4])}, which this bundle has not; "
            "delete them, or give the bundle that they are of"
        )
    total = sum(len(kept_items(task, config.max_per_task)) for task in bundle.tasks)
    left_out, answers, done = dict(bundle.faults), {}, 0

    def step(task: str, items: int) -> None:
        nonlocal done
        done += items
        progress(done, total, task)

    asked = core(
        model, tokenizer, bundle, config, known=partial(known_answers, folder, weights=weights), progress=step,
        left_out=left_out.__setitem__, ranks=ranks,
    )  # fmt: skip
    for found, key in asked:
        settings = {"max_per_task": config.max_per_task, "longest": config.longest}
        if ranks.first:
            write_answers(folder, found, key, weights=weights, settings=settings)
        answers[found.task] = found
    for task in bundle.tasks:
        faulty = [item for item in kept_items(task, config.max_per_task) if item.fault]
        if faulty and task.name in answers:
            first = f"{task.path}, line {faulty[0].name}: {faulty[0].fault}"
            note(f"{task.name}: {len(faulty)} items cannot be read and are left out, the first is {first}")
    if not answers:
        raise ValueError("no task was asked: " + "; ".join(f"{task}: {why}" for task, why in left_out.items()))
    return CoreResult(folder, answers, left_out, len(names), config.max_per_task)
