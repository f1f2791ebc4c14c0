"""After training: CORE, own tasks, fine-tuning and ChatCORE of every run, as the experiment's tables say.

[core] and [tasks] name bundles of one layout; what is in the second is told under its own name and is no part of CORE.

They are no part of a run's configuration: a run that is there can be asked more later, and what is there is kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..config import build, digest, dump
from ..eval.chat_prompts import ChatCoreConfig
from ..eval.chat_tasks import HUB
from ..eval.core import CoreConfig
from .answers import BENCHMARKS
from .chatcore import ask_chat_core
from .core import ask_core, find_bundle
from .design import Cell, Experiment, expand, resolve
from .sft import SftConfig, fine_tune
from .store import RunFolder, RunStore

Event = Callable[[Cell, dict[str, Any]], None]
TABLES: dict[str, type] = {"core": CoreConfig, "tasks": CoreConfig, "sft": SftConfig, "chatcore": ChatCoreConfig}
BUNDLES = ("core", "tasks")


@dataclass(frozen=True)
class Downstream:
    """What the runs of an experiment are asked after training; None where it is not."""

    core: CoreConfig | None = None
    tasks: CoreConfig | None = None
    sft: SftConfig | None = None
    chatcore: ChatCoreConfig | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        """The tables that are there."""
        return tuple(name for name in TABLES if getattr(self, name) is not None)


@dataclass(frozen=True)
class DownstreamTask:
    """What a process needs to ask one run. ``stamp``: of the questions, as they are now."""

    cell: Cell
    folder: Path
    downstream: Downstream
    threads: int
    stamp: str
    unsafe_code: bool = False
    device: str = "cpu"

    @property
    def parts(self) -> tuple[str, ...]:
        return self.downstream.parts


def read_downstream(tables: Mapping[str, Any], path: Path) -> Downstream | None:
    """The tables of an experiment's file; paths are relative to the file. None where there are none.

    Raises ValueError naming the field.
    """
    found: dict[str, Any] = {}
    for name, kind in TABLES.items():
        if name not in tables:
            continue
        if not isinstance(tables[name], dict):
            raise ValueError(f"{path}: {name} = {tables[name]!r}: must be a table, [{name}]")
        found[name] = build(kind, tables[name], f"{path}: {name}")
    for name in BUNDLES:
        if asked := found.get(name):
            if not asked.bundle:
                raise ValueError(
                    f"{path}: {name}.bundle is missing: a folder or zip with core.yaml, or an https address"
                )
            found[name] = dataclasses.replace(asked, bundle=_beside(path, asked.bundle))
    if sft := found.get("sft"):
        sources, validation = (tuple(_beside(path, text) for text in side) for side in (sft.sources, sft.validation))
        found["sft"] = dataclasses.replace(sft, sources=sources, validation=validation)
    if (chatcore := found.get("chatcore")) and chatcore.data != HUB:
        found["chatcore"] = dataclasses.replace(chatcore, data=_beside(path, chatcore.data))
    return Downstream(**found) if found else None


def _beside(path: Path, text: str) -> str:
    """A path beside the experiment's file; an address or a name of the hub as it is."""
    return text if text.startswith(("https://", "http://", "hub:")) else str((path.parent / text).resolve())


def check_downstream(downstream: Downstream) -> None:
    """What can be known before anything is trained: whether the questions are there. Raises ValueError."""
    for name in BUNDLES:
        if asked := getattr(downstream, name):
            find_bundle(asked)
    if downstream.sft:
        for source in (*downstream.sft.choice.sources, *downstream.sft.choice.validation):
            if not source.where.startswith("hub:"):
                source.files()
    if downstream.chatcore and downstream.chatcore.data != HUB and not Path(downstream.chatcore.data).is_dir():
        raise ValueError(f"chatcore.data = {downstream.chatcore.data!r}: no such folder")


def downstream_tasks(experiment: Experiment, store: RunStore, unsafe_code: bool = False) -> list[DownstreamTask]:
    """A task for each finished run that was not asked these questions yet. The twin is asked nothing."""
    downstream = experiment.downstream
    if downstream is None:
        return []
    check_downstream(downstream)
    stamp = digest([dump(downstream), unsafe_code, _stamps(downstream)])
    found = []
    for cell in expand(experiment):
        run = store.run(cell)
        if cell.arm == "twin" or run.state != "finished":
            continue
        own = digest([stamp, run.status["weights"]])
        if run.read("downstream").get("stamp") != own:
            train = resolve(experiment, cell).train
            found.append(DownstreamTask(cell, run.path, downstream, train.threads, own, unsafe_code, train.device))
    return found


def _stamps(downstream: Downstream) -> list[Any]:
    """Of the files with questions: name, size and time. Another stamp asks again what has really changed, no more."""
    named = [_source(getattr(downstream, name), "bundle") for name in BUNDLES]
    roots = [Path(name) for name in (*named, _source(downstream.chatcore, "data"))]
    files = [file for root in roots for file in ([root] if root.is_file() else sorted(root.rglob("*")))]
    if downstream.sft:
        for source in (*downstream.sft.choice.sources, *downstream.sft.choice.validation):
            files += [] if source.where.startswith("hub:") else [file.path for file in source.files()]
    return [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files if file.is_file()]


def _source(config: Any, field: str) -> str:
    text = getattr(config, field, "") or ""
    return text if Path(text).is_absolute() else "/nowhere"


def carry_out(task: DownstreamTask, event: Event = lambda cell, content: None) -> str:
    """Asks one run, part after part; returns "asked", or "diverged" where its fine-tuning did.

    event: {"kind": "part", "part", "done", "total", "words"} and {"kind": "note", "text"}.
    """
    torch.set_num_threads(task.threads)
    run, state = RunFolder(task.folder), "asked"

    def progress(part: str) -> Callable[[float, float, str], None]:
        def told(done: float, total: float, words: str) -> None:
            event(task.cell, {"kind": "part", "part": part, "done": done, "total": total, "words": words})

        return told

    def note(text: str) -> None:
        event(task.cell, {"kind": "note", "text": text})

    for name in BUNDLES:
        if asked := getattr(task.downstream, name):
            tell = progress(name)
            result = ask_core(task.folder, asked, name=name, progress=tell, note=note)
            for line in result.notes():
                note(f"{BENCHMARKS[name]}: {line}")
            tell(1, 1, BENCHMARKS[name])
    if task.downstream.sft:
        tell = progress("sft")

        def trained(content: dict[str, Any]) -> None:
            if content["kind"] == "step":
                tell(content["step"], content["steps"], f"fine-tuning, loss {content['loss']:.3f}")
            elif content["kind"] == "data":
                for line in content["lines"]:
                    note(line)

        tuned = RunFolder(fine_tune(task.folder, task.downstream.sft, event=trained))
        if tuned.state == "diverged":
            note(f"fine-tuning diverged: {tuned.status.get('message', '')}")
            state = "diverged"
        tell(1, 1, "fine-tuning")
    if task.downstream.chatcore and state != "diverged":
        tell = progress("chatcore")
        chat = ask_chat_core(
            task.folder, task.downstream.chatcore, unsafe_code=task.unsafe_code, progress=tell, note=note
        )
        for line in chat.notes():
            note(f"ChatCORE: {line}")
        tell(1, 1, "ChatCORE")
    run.write("downstream", {"stamp": task.stamp, "state": state, **dump(task.downstream)})
    return state
