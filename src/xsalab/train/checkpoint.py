"""Checkpoints: complete or not there. Safetensors and JSON, never a pickle.

A set is written into a temporary folder, flushed to disk and renamed; its ``state.json`` lists every file
with its SHA-256. A set that is incomplete or damaged is passed over, with a warning, for the one before.

    model.safetensors, optimizer.safetensors            of one process
    model-00001-of-00004.safetensors, …                 of four: each writes the parameters that it owns

Every tensor is whole and in one file, under its own name, so that any number of processes reads what any number wrote.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..files import explain_disk, write_atomic
from .loop import TrainState

KEEP = 2


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """A safetensors file, written whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    try:
        held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(held, temporary, **({"metadata": dict(metadata)} if metadata else {}))
        _flush(temporary)
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        cause = error if isinstance(error, OSError) else OSError(_errno_of(error), str(error))
        raise explain_disk(cause, path, needed) from error


def _errno_of(error: SafetensorError) -> int:
    found = re.search(r"os error (\d+)|code: (\d+)", str(error))
    return int(found[1] or found[2]) if found else errno.EIO


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file; ValueError naming the file where it is not one."""
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path}: not a safetensors file, or damaged ({error})") from None


class TensorFiles(Mapping[str, Tensor]):
    """The tensors of several safetensors files by name, each read when it is asked for."""

    def __init__(self, paths: Iterable[Path]) -> None:
        """Raises ValueError naming a file that is none."""
        self._file: dict[str, Any] = {}
        self.where = ""
        for path in paths:
            self.where = self.where or str(path)
            try:
                file = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise ValueError(f"{path}: not a safetensors file, or damaged ({error})") from None
            self._file.update(dict.fromkeys(file.keys(), file))

    def __getitem__(self, name: str) -> Tensor:
        return self._file[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file)

    def __len__(self) -> int:
        return len(self._file)

    def shape(self, name: str) -> tuple[int, ...]:
        """Without reading it."""
        return tuple(self._file[name].get_slice(name).get_shape())


def model_tensors(state: TrainState) -> dict[str, Tensor]:
    """Weights and variant buffers by name; every process of the run must ask, and the first has them."""
    return state.division.whole_weights()


def save_checkpoint(folder: Path, state: TrainState, notes: Mapping[str, Any]) -> Path:
    """Writes ``folder/step-N`` and removes all but the newest two sets. Every process of the run calls it.

    What one of them cannot write none keeps: its error is raised there, Elsewhere in the others.
    """
    ranks, division = state.ranks, state.division
    final = folder / f"step-{state.step:09d}"
    temporary = Path(ranks.lead(lambda: str(_make_temporary(folder, final))))
    part = f"-{ranks.rank + 1:05d}-of-{ranks.world:05d}" if ranks.world > 1 else ""
    weights, moments = division.own_weights(), division.own_state(state.optimizer)

    def write() -> dict[str, str]:
        paths = [temporary / f"{name}{part}.safetensors" for name in ("model", "optimizer")]
        for path, tensors in zip(paths, (weights, moments), strict=True):
            save_tensors(tensors, path)
        return {path.name: _sha256(path) for path in paths}

    def finish(files: dict[str, str]) -> None:
        content = {"step": state.step, "files": files, **notes}
        write_atomic(temporary / "state.json", json.dumps(content, indent=1))
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
        _flush(folder)

    try:
        files = {name: sha for written in ranks.each(write) for name, sha in written.items()}
        ranks.lead(lambda: finish(files))
    finally:
        if ranks.first:
            shutil.rmtree(temporary, ignore_errors=True)
    if ranks.first:
        # A damaged set of a later step is no reason to drop a good one, and stays until its step comes again.
        for old in [path for path in _sets(folder) if _step(path) <= state.step][:-KEEP]:
            shutil.rmtree(old)
    return final


def _make_temporary(folder: Path, final: Path) -> Path:
    try:
        folder.mkdir(exist_ok=True)  # not its parents: a shared folder that vanished must not come back on another disk
        temporary = folder / f".{final.name}.{os.getpid()}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
    except OSError as error:
        raise explain_disk(error, folder, 0) from error
    return temporary


def load_checkpoint(folder: Path, state: TrainState) -> dict[str, Any] | None:
    """Puts the newest complete set into ``state`` and returns its notes; None where there is none.

    Every process of the run calls it; their number need not be that which wrote the set.
    """
    newest = state.ranks.lead(lambda: _newest(folder))
    if newest is None:
        return None
    path = folder / newest
    notes = json.loads((path / "state.json").read_text(encoding="utf-8"))
    load_model([path / name for name in notes["files"] if name.startswith("model")], state)
    moments = TensorFiles(path / name for name in notes["files"] if name.startswith("optimizer"))
    state.division.load_state(state.optimizer, moments)
    state.step = notes["step"]
    return notes


def _newest(folder: Path) -> str | None:
    """The newest complete set's name, after what killed saves left is gone."""
    for path in folder.glob(".*.tmp") if folder.is_dir() else ():
        shutil.rmtree(path, ignore_errors=True)
    for path in reversed(_sets(folder)):
        fault = _fault(path)
        if not fault:
            return path.name
        warnings.warn(f"{path}: {fault}; the checkpoint before it is used", stacklevel=4)
    return None


def load_model(paths: Path | Sequence[Path], state: TrainState) -> None:
    """Copies weights into the model, converted to its dtypes. ValueError naming what does not fit."""
    files = TensorFiles([paths] if isinstance(paths, Path) else paths)
    own = state.division.shapes()
    if missing := sorted(own.keys() ^ files.keys()):
        raise ValueError(f"{files.where}: parameters differ from the model's: {', '.join(missing[:5])}")
    for name, shape in own.items():
        if shape != files.shape(name):
            raise ValueError(f"{files.where}: {name} is {files.shape(name)}, the model's {shape}")
    with torch.no_grad():
        for name in own:
            state.division.load_weight(name, files[name])


def _sets(folder: Path) -> list[Path]:
    """Checkpoint folders in the order of their steps; anything else is ignored."""
    found = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name)] if folder.is_dir() else []
    return sorted(found, key=_step)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _fault(path: Path) -> str:
    """What is wrong with a set; empty where it is complete."""
    try:
        files = json.loads((path / "state.json").read_text(encoding="utf-8"))["files"]
        files = dict(files)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"state.json is missing or damaged ({type(error).__name__})"
    for name, expected in files.items():
        if not (path / name).is_file():
            return f"{name} is missing"
        if _sha256(path / name) != expected:
            return f"{name} is damaged"
    kinds = {name.partition("-")[0].removesuffix(".safetensors") for name in files}
    return "" if {"model", "optimizer"} <= kinds else "a file is not listed"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
