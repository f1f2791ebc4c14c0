"""ChatCORE of a run: asks its fine-tuned model, or the base model where there is none, and keeps the answers there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..eval import TaskAnswers
from ..eval.chat_core import NOT_RUN, chat_core, chat_core_means, pass_at
from ..eval.chat_prompts import ChatCoreConfig
from ..eval.chat_tasks import CHAT_TASKS, GENERATED, HUB
from ..eval.sandbox import Sandbox
from .answers import known_answers, write_answers
from .run import load_run
from .store import RunFolder


@dataclass(frozen=True)
class ChatCoreResult:
    """``folder``: where the answers are, RUN/sft/chatcore or RUN/chatcore. ``left_out``: task -> why it was not run."""

    folder: Path
    fine_tuned: bool
    answers: dict[str, TaskAnswers]
    left_out: dict[str, str]

    @property
    def means(self) -> dict[str, float | None]:
        """ "ChatCORE" and "ChatCORE_cat"; None where a task is missing."""
        return chat_core_means(self.answers.values())

    def notes(self) -> list[str]:
        """What must be said beside the figures."""
        told = [] if self.fine_tuned else ["the model was not fine-tuned (xsalab sft): it never saw a chat"]
        told += [f"{task}: {NOT_RUN}{why}" for task, why in self.left_out.items()]
        if lacking := [task for task in CHAT_TASKS if task not in self.answers]:
            told.append(f"ChatCORE is the mean over all five tasks and is not given without {', '.join(lacking)}")
        return told

    def as_json(self, ks: tuple[int, ...] = ()) -> dict[str, Any]:
        """Plain values; pass@k of generated tasks as {k: share or null}."""
        tasks = {}
        for name, found in self.answers.items():
            tasks[name] = found.summary()
            if name in GENERATED:
                tasks[name]["pass_at"] = {str(k): value for k, value in pass_at(found, ks).items()}
        return {
            "folder": str(self.folder), "fine_tuned": self.fine_tuned, **self.means, "tasks": tasks,
            "left_out": self.left_out, "notes": self.notes(),
        }  # fmt: skip


def chat_folder(run: Path) -> tuple[Path, bool]:
    """The folder of the model that is asked, and whether it was fine-tuned: RUN/sft where that is there."""
    if (run / "sft" / "config.json").is_file():
        return run / "sft", True
    return run, run.resolve().name == "sft" and (run.resolve().parent / "config.json").is_file()


def ask_chat_core(
    run: Path,
    config: ChatCoreConfig,
    *,
    unsafe_code: bool = False,
    progress: Callable[[float, float, str], None] = lambda done, total, task: None,
    note: Callable[[str], None] = lambda text: None,
) -> ChatCoreResult:
    """Asks what is not there yet; each task's answers are kept as soon as they are complete.

    With ``config.run_code`` programs that the model wrote are run; ``unsafe_code`` where this machine cannot shut
    them in as well. Raises ValueError where that is not allowed, and where no task can be asked.
    """
    folder, fine_tuned = chat_folder(run)
    sandbox = Sandbox.open(unsafe=unsafe_code) if config.run_code and "HumanEval" in config.tasks else None
    if sandbox is not None:
        note(f"programs are run with {', '.join(sandbox.protections) or 'no protection'}")
        if sandbox.missing:
            note(f"not protected: {', '.join(sandbox.missing)}")
    model, corpus, _ = load_run(folder)
    answers: dict[str, TaskAnswers] = {}
    left_out: dict[str, str] = {}

    def told(task: str, text: str) -> None:
        if text.startswith(NOT_RUN):
            left_out[task] = text.removeprefix(NOT_RUN)
        else:
            note(f"{task}: {text}")

    out, weights = folder / "chatcore", RunFolder(folder).status["weights"]
    asked = chat_core(
        model, corpus.tokenizer, Path(config.data), config,
        sandbox=sandbox, known=partial(known_answers, out, weights=weights), progress=progress, note=told,
    )  # fmt: skip
    for found, key in asked:
        write_answers(out, found, key, weights=weights, settings=_settings(config, found.task))
        answers[found.task] = found
    return ChatCoreResult(out, fine_tuned, answers, left_out)


def _settings(config: ChatCoreConfig, task: str) -> dict[str, Any]:
    """How a task was asked, in what the tasks of one figure must agree."""
    data = config.data if config.data == HUB else str(Path(config.data).resolve())
    if task not in GENERATED:
        return {"data": data, "max_categorical": config.max_categorical}
    names = ("max_generated", "samples", "temperature", "max_new_tokens")
    return {"data": data, **{name: getattr(config, name) for name in names}}
