"""An evaluation bundle as DCLM and nanochat lay it out: core.yaml, eval_meta_data.csv, eval_data/**.jsonl.

Read as it is, from a folder, a zip, or an address with the zip's SHA-256. What is wrong with one item or task is
named and counted and leaves the others.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
import shutil
import urllib.request
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..data.storage import sha256 as sha256_of
from ..files import make_folder

KINDS = ("multiple_choice", "schema", "language_modeling")
LABEL = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
Folder = Path | zipfile.Path


@dataclass(frozen=True)
class Item:
    """One line of a task's file. ``fault``: why it cannot be asked; empty where it can.

    multiple_choice: ``options`` are the choices that follow ``text``; schema: the contexts that ``text`` follows;
    language_modeling: ``text`` is the context, the one option what must follow.
    """

    name: str  # its line in the file, from 1
    text: str = ""
    options: tuple[str, ...] = ()
    gold: int = 0
    fault: str = ""


@dataclass(frozen=True)
class Task:
    """A task of the bundle, with all its items in the order of the file. ``baseline``: a share below 1."""

    name: str
    kind: str
    shots: int
    delimiter: str
    baseline: float
    items: tuple[Item, ...]
    path: str


@dataclass(frozen=True)
class Bundle:
    """The tasks that can be asked, in the bundle's order; ``faults``: the others, by name, with the reason."""

    tasks: tuple[Task, ...]
    faults: Mapping[str, str]


def open_bundle(source: str, sha256: str, cache: Path) -> Folder:
    """The folder that holds core.yaml: of a folder, a zip, or a zip at an https address, kept under ``cache``.

    Raises ValueError where there is none, where an address comes without its checksum, or the file has another one.
    """
    if source.startswith("http://"):
        raise ValueError(f"bundle = {source!r}: give an https address")
    path = _download(source, sha256, cache) if source.startswith("https://") else Path(source)
    if path.is_dir():
        root: Folder = path
    elif path.is_file():
        if sha256 and (found := sha256_of(path)) != sha256.lower():
            raise ValueError(f"{path}: its SHA-256 is {found}, not {sha256} as stated (sha256)")
        try:
            root = zipfile.Path(path)
        except zipfile.BadZipFile:
            raise ValueError(f"{path}: not a zip file; give a bundle's folder, its zip, or an https address") from None
    else:
        raise ValueError(
            f"bundle = {source!r}: no such folder or zip; it holds core.yaml, eval_meta_data.csv, eval_data/"
        )
    for folder in (root, *(child for child in root.iterdir() if child.is_dir())):  # a zip has a folder around it
        if (folder / "core.yaml").is_file():
            return folder
    raise ValueError(
        f"{source}: no core.yaml there; an evaluation bundle holds core.yaml, eval_meta_data.csv, eval_data/"
    )


def _download(address: str, sha256: str, cache: Path) -> Path:
    target = cache / f"bundle-{hashlib.sha256(address.encode()).hexdigest()[:16]}.zip"
    if not target.is_file():
        make_folder(cache)
        part = target.with_suffix(f".{os.getpid()}.tmp")
        try:
            with urllib.request.urlopen(address, timeout=60) as response, part.open("wb") as file:
                shutil.copyfileobj(response, file)
            found = sha256_of(part)
            if sha256.lower() != found:
                wanted = (
                    f"not {sha256} as stated"
                    if sha256
                    else f"none is stated: if you trust it, state sha256 = {found!r}"
                )
                raise ValueError(f"{address}: what came has SHA-256 {found}, {wanted}")
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
    return target


def read_bundle(folder: Folder, tasks: tuple[str, ...] = ()) -> Bundle:
    """The tasks of core.yaml, or those named. Raises ValueError for a name that it lacks, or where no task is left."""
    entries, baselines = _entries(folder), _baselines(folder)
    known = [str(entry["label"]) for entry in entries]
    if strange := [name for name in known if not re.fullmatch(LABEL, name) or known.count(name) > 1]:
        raise ValueError(f"{folder / 'core.yaml'}: label {strange[0]!r}: each once, of letters, digits and . _ -")
    if unknown := [name for name in tasks if name not in known]:
        raise ValueError(f"task {unknown[0]!r} is not in {folder / 'core.yaml'}; its tasks: {', '.join(known)}")
    found: list[Task] = []
    faults: dict[str, str] = {}
    for name, entry in zip(known, entries, strict=True):
        if tasks and name not in tasks:
            continue
        try:
            found.append(_task(folder, name, entry, baselines))
        except ValueError as error:
            faults[name] = str(error)
    if not found:
        raise ValueError(f"{folder}: no task can be asked: " + "; ".join(f"{k}: {v}" for k, v in faults.items()))
    return Bundle(tuple(found), faults)


def _text(path: Folder) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, KeyError):
        raise ValueError(f"{path}: missing from the bundle") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error})") from None
    except (OSError, zlib.error, zipfile.BadZipFile, EOFError) as error:  # a folder, a damaged member of a zip
        raise ValueError(f"{path}: cannot be read ({error})") from None


def _entries(folder: Folder) -> list[dict[str, Any]]:
    path = folder / "core.yaml"
    try:
        entries = yaml.safe_load(_text(path))["icl_tasks"]
        assert all("label" in entry for entry in entries)
    except (yaml.YAMLError, KeyError, TypeError, AssertionError) as error:
        reason = str(error).splitlines()[0] if str(error) else "an entry without a label"
        raise ValueError(f"{path}: not a list icl_tasks of tasks with a label each ({reason})") from None
    return entries


def _baselines(folder: Folder) -> dict[str, float]:
    """Task -> what the convention takes as guessing, a share."""
    path = folder / "eval_meta_data.csv"
    try:
        rows = csv.DictReader(io.StringIO(_text(path)))
        return {row["Eval Task"]: 0.01 * float(row["Random baseline"]) for row in rows}
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: needs columns 'Eval Task' and 'Random baseline' ({error})") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _task(folder: Folder, name: str, entry: Mapping[str, Any], baselines: Mapping[str, float]) -> Task:
    kind, shots = entry.get("icl_task_type"), entry.get("num_fewshot", [0])
    shots = shots[0] if isinstance(shots, list) and len(shots) == 1 else shots
    if kind not in KINDS:
        raise ValueError(f"icl_task_type = {kind!r} is not known; known: {', '.join(KINDS)}")
    if not isinstance(shots, int) or shots < 0:
        raise ValueError(f"num_fewshot = {shots!r}: a number of examples, in a list of one")
    if not 0 <= baselines.get(name, -1.0) < 1:
        raise ValueError(f"{folder / 'eval_meta_data.csv'} has no random baseline from 0 to 100 for it")
    path = folder / "eval_data" / str(entry.get("dataset_uri"))
    lines = _text(path).split("\n")  # not splitlines: JSON texts may hold other line ends
    items = tuple(_item(kind, str(number), line) for number, line in enumerate(lines, 1) if line.strip())
    if not any(not item.fault for item in items):
        raise ValueError(
            f"{path}: no item can be asked" + (f" (line {items[0].name}: {items[0].fault})" if items else "")
        )
    delimiter = str(entry.get("continuation_delimiter", " "))
    return Task(name, kind, shots, delimiter, baselines[name], items, str(path))


def _item(kind: str, name: str, line: str) -> Item:
    """One line; with ``fault`` where a field is missing or of another kind, or gold is no option."""
    text, options, single = {
        "multiple_choice": ("query", "choices", False),
        "schema": ("continuation", "context_options", False),
        "language_modeling": ("context", "continuation", True),
    }[kind]
    try:
        content = json.loads(line)
    except ValueError as error:
        return Item(name, fault=f"broken JSON ({error})")
    if not isinstance(content, dict) or not {text, options} <= content.keys():
        return Item(name, fault=f"needs the fields {text} and {options}")
    chosen = [content[options]] if single else content[options]
    if not isinstance(chosen, list) or not all(isinstance(part, str) for part in (content[text], *chosen)):
        return Item(name, fault=f"{text} is text, and {options} {'too' if single else 'a list of texts'}")
    if not single and len(chosen) < 2:
        return Item(name, fault=f"{options} holds {len(chosen)}; a choice needs 2 or more")
    gold = 0 if single else content.get("gold")
    if not isinstance(gold, int) or isinstance(gold, bool) or not 0 <= gold < len(chosen):
        return Item(name, fault=f"gold = {gold!r} is none of the {len(chosen)} options, 0 to {len(chosen) - 1}")
    return Item(name, content[text], tuple(chosen), gold)
