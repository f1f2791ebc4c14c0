"""Checkpoints: complete or not there. Safetensors and JSON, never a pickle.

A set is written into a temporary folder, flushed to disk and renamed; its ``state.json`` lists every file
with its SHA-256. A set that is incomplete or damaged is passed over, with a warning, for the one before.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
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


def model_tensors(state: TrainState) -> dict[str, Tensor]:
    """Weights and variant buffers by name."""
    return dict(state.model.state_dict())


def save_checkpoint(folder: Path, state: TrainState, notes: Mapping[str, Any]) -> Path:
    """Writes ``folder/step-N`` and removes all but the newest two sets."""
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step-{state.step:09d}"
    temporary = folder / f".{final.name}.{os.getpid()}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        save_tensors(model_tensors(state), temporary / "model.safetensors")
        save_tensors(state.optimizer.named_state(), temporary / "optimizer.safetensors")
        files = {path.name: _sha256(path) for path in sorted(temporary.iterdir())}
        content = {"step": state.step, "files": files, **notes}
        write_atomic(temporary / "state.json", json.dumps(content, indent=1))
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
        _flush(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    # A damaged set of a later step is no reason to drop a good one, and stays until its step comes again.
    for old in [path for path in _sets(folder) if _step(path) <= state.step][:-KEEP]:
        shutil.rmtree(old)
    return final


def load_checkpoint(folder: Path, state: TrainState) -> dict[str, Any] | None:
    """Puts the newest complete set into ``state`` and returns its notes; None where there is none."""
    for path in folder.glob(".*.tmp") if folder.is_dir() else ():
        shutil.rmtree(path, ignore_errors=True)  # a save that was killed
    for path in reversed(_sets(folder)):
        fault = _fault(path)
        if fault:
            warnings.warn(f"{path}: {fault}; the checkpoint before it is used", stacklevel=2)
            continue
        notes = json.loads((path / "state.json").read_text(encoding="utf-8"))
        load_model(path / "model.safetensors", state)
        state.optimizer.load_named_state(load_tensors(path / "optimizer.safetensors"))
        state.step = notes["step"]
        return notes
    return None


def load_model(path: Path, state: TrainState) -> None:
    """Copies weights into the model, converted to its dtypes. ValueError naming what does not fit."""
    own, found = state.model.state_dict(), load_tensors(path)
    if missing := sorted(own.keys() ^ found.keys()):
        raise ValueError(f"{path}: parameters differ from the model's: {', '.join(missing[:5])}")
    for name, tensor in own.items():
        if tensor.shape != found[name].shape:
            raise ValueError(f"{path}: {name} is {tuple(found[name].shape)}, the model's {tuple(tensor.shape)}")
        tensor.copy_(found[name])


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
    return "" if {"model.safetensors", "optimizer.safetensors"} <= set(files) else "a file is not listed"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
