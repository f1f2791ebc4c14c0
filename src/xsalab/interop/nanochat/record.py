"""What nanochat's checkpoints do not say: a small file beside them with the strengths that a model was trained with.

    {"steps": {"20": [1.0, 1.0, 0.5, 0.0]}}     by the launcher: α of each layer, for each step that it saw saved
    {"alpha": 1}                                by hand: every other step of the folder; a number, or one a layer

One file a folder, as steps of several runs may lie in one; by step, as those may differ in strength.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

from ...files import write_atomic
from ...model import ModelConfig
from ..strengths import strengths
from .checkpoint import FIELDS, VARIANT_FILE, read_strength
from .exclusion import NotThisModel, part_of


def record_strengths(alpha: float | Sequence[float], layers: str) -> None:
    """Every checkpoint that nanochat saves in this process gets its line in the file; one it loads is held against it.

    alpha, layers: as insert_exclusion. Called before a script is imported. nanochat must be importable. Raises
    ValueError where this nanochat is built in another way; loading raises NotThisModel where the file names other
    strengths than those in use.
    """
    manager = importlib.import_module("nanochat.checkpoint_manager")
    save, load = part_of(manager, "save_checkpoint"), part_of(manager, "load_checkpoint")
    saving, loading = inspect.signature(save), inspect.signature(load)
    for signature, names in ((saving, ("checkpoint_dir", "step", "meta_data")), (loading, ("checkpoint_dir", "step"))):
        if missing := [name for name in names if name not in signature.parameters]:
            raise ValueError(f"this nanochat is not understood: no {missing[0]} where it saves or loads a checkpoint")

    @wraps(save)
    def save_checkpoint(*args: Any, **named: Any) -> Any:
        found = save(*args, **named)  # first: a file that cannot be written must not cost the weights
        given = saving.bind(*args, **named).arguments
        if given.get("rank", 0) == 0:
            _write(Path(given["checkpoint_dir"]), given["step"], _strengths(alpha, layers, given["meta_data"]))
        return found

    @wraps(load)
    def load_checkpoint(*args: Any, **named: Any) -> Any:
        found = load(*args, **named)
        given = loading.bind(*args, **named).arguments
        folder, step = Path(given["checkpoint_dir"]), given["step"]
        try:
            recorded = read_strength(folder, step)
        except ValueError as error:
            raise NotThisModel(str(error)) from None
        if recorded is not None:
            _compare(folder / VARIANT_FILE, step, recorded, _strengths(alpha, layers, found[2]), found[2])
        return found

    setattr(manager, "save_checkpoint", save_checkpoint)  # noqa: B010
    setattr(manager, "load_checkpoint", load_checkpoint)  # noqa: B010


def _compare(
    path: Path, step: int, recorded: float | list[float], used: Sequence[float], meta: Mapping[str, Any]
) -> None:
    trained = _strengths(recorded, "all", meta)
    if trained != used:
        words = [",".join(f"{strength:g}" for strength in each) for each in (trained, used)]
        raise NotThisModel(
            f"{path}: step {step} was trained with alpha {words[0]} by layer, and {words[1]} is asked for; "
            f"give --alpha {words[0]}, or, to change the model on purpose, take the step out of this file"
        )


def _strengths(alpha: float | Sequence[float], layers: str, meta: Mapping[str, Any]) -> tuple[float, ...]:
    if "model_config" not in meta:
        raise NotThisModel("this nanochat is not understood: a checkpoint's meta data have no model_config")
    # where it is missing, nanochat's own loading takes full windows
    values = {"window_pattern": "L", **meta["model_config"]}
    config = ModelConfig(**{ours: value for theirs, value in values.items() if (ours := FIELDS.get(theirs))})
    try:
        return strengths(alpha, layers, config)
    except ValueError as error:
        raise NotThisModel(str(error)) from None


def _write(folder: Path, step: int, alphas: Sequence[float]) -> None:
    path = folder / VARIANT_FILE
    read_strength(folder, step)  # says what is wrong with a file that is there
    content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    steps = {**content.get("steps", {}), str(step): list(alphas)}
    write_atomic(path, json.dumps({**content, "steps": steps}) + "\n")
