"""Reads a nanochat checkpoint. No pickle is executed: the weights are read by torch's weights-only loader."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ...model import GPT, ModelConfig, VariantChoice
from ..strengths import strengths
from .tokenizer import NanochatTokenizer

VARIANT_FILE = "xsalab_variant.json"  # record.py says what is in it

# our parameter name for nanochat's; {} is a layer
NAMES = {
    "transformer.wte.weight": "embedding.weight",
    "transformer.h.{}.attn.c_q.weight": "blocks.{}.attention.w_q.weight",
    "transformer.h.{}.attn.c_k.weight": "blocks.{}.attention.w_k.weight",
    "transformer.h.{}.attn.c_v.weight": "blocks.{}.attention.w_v.weight",
    "transformer.h.{}.attn.c_proj.weight": "blocks.{}.attention.w_o.weight",
    "transformer.h.{}.attn.ve_gate.weight": "blocks.{}.attention.value_gate.weight",
    "transformer.h.{}.mlp.c_fc.weight": "blocks.{}.mlp.w1.weight",
    "transformer.h.{}.mlp.c_proj.weight": "blocks.{}.mlp.w2.weight",
    "value_embeds.{}.weight": "value_embeddings.{}.weight",
    "lm_head.weight": "head.weight",
    "resid_lambdas": "residual",
    "x0_lambdas": "x0",
    "smear_gate.weight": "smear_gate.weight",
    "smear_lambda": "smear",
    "backout_lambda": "backout",
}
# our field for each of nanochat's model_config
FIELDS = {
    "sequence_len": "context",
    "vocab_size": "vocab_size",
    "n_layer": "depth",
    "n_head": "heads",
    "n_kv_head": "kv_heads",
    "n_embd": "width",
    "window_pattern": "window",
}


def read_checkpoint(
    folder: Path, step: int | None = None, choice: VariantChoice | None = None, dtype: torch.dtype = torch.float32
) -> tuple[GPT, NanochatTokenizer]:
    """The model of ``model_<step>.pt`` and ``meta_<step>.json`` with the tokenizer beside them.

    ``step`` None takes the highest step that has both files. ``choice`` puts a variant of attention into the
    model; parameters of its own keep their first values. None takes XSA with the strengths that xsalab_variant.json
    names for this step, and standard attention where it names none, or 0 alone: ``variant_note`` says which. Raises
    ValueError naming the file, and the tensor that is missing, left over or of another shape.
    """
    folder = Path(folder)
    step = latest_step(folder) if step is None else step
    weights_path, meta_path = folder / f"model_{step:06d}.pt", folder / f"meta_{step:06d}.json"
    config = _read_config(meta_path)
    model = GPT(config, _read_choice(folder, step, config) if choice is None else choice, dtype=dtype)
    load_weights(model, _read_tensors(weights_path), str(weights_path))
    tokenizer = NanochatTokenizer.read(folder / "tokenizer.pkl")
    if tokenizer.vocab_size != model.config.vocab_size:
        raise ValueError(
            f"{folder / 'tokenizer.pkl'}: {tokenizer.vocab_size} tokens, but {meta_path.name} says "
            f"vocab_size = {model.config.vocab_size}; take the tokenizer that the model was trained with"
        )
    return model, tokenizer


def latest_step(folder: Path) -> int:
    """The highest step with both model and meta file; by number, whatever else lies there."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    found = [re.fullmatch(r"model_(\d+)\.pt", path.name) for path in folder.iterdir()]
    steps = [int(match[1]) for match in found if match and (folder / f"meta_{match[1]}.json").is_file()]
    if not steps:
        raise ValueError(f"{folder}: holds no nanochat checkpoint, model_<step>.pt with meta_<step>.json")
    return max(steps)


def variant_note(folder: Path, step: int | None = None) -> str:
    """A line for the user: which attention ``read_checkpoint`` without a choice gives this model, and why."""
    step = latest_step(folder) if step is None else step
    alpha = read_strength(folder, step)
    if alpha is not None:
        each = alpha if isinstance(alpha, list) else [alpha]
        shown = [f"{strength:g}" for strength in (each if len(set(each)) > 1 else each[:1])]
        attention = "XSA" if any(each) else "standard attention, XSA"
        return f"{attention} α = {', '.join(shown)} as {VARIANT_FILE} says"
    there = (folder / VARIANT_FILE).is_file()
    why = f"{VARIANT_FILE} does not name step {step}" if there else f"no {VARIANT_FILE} lies beside it"
    return f"standard attention, as {why}: a model trained with XSA by other means needs it"


def read_strength(folder: Path, step: int) -> float | list[float] | None:
    """α that the folder's xsalab_variant.json names for a step: a number, or one a layer; None where it names none.

    Raises ValueError naming the file where it is another file.
    """
    path = folder / VARIANT_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path}: not a JSON file: {error}") from None
    steps = content.get("steps", {}) if isinstance(content, dict) else None
    if not isinstance(content, dict) or not isinstance(steps, dict) or not content.keys() <= {"steps", "alpha"}:
        raise ValueError(f'{path}: not understood; write {{"alpha": 1}}, or [1, 1, 0.5, …], one a layer')
    alpha = steps.get(str(step), content.get("alpha"))
    each = alpha if isinstance(alpha, list) else [] if alpha is None else [alpha]
    if wrong := [value for value in each if type(value) not in (int, float) or not 0 <= value <= 1]:
        raise ValueError(f"{path}: alpha = {wrong[0]!r}: must be a number in [0, 1], or a list with one a layer")
    if alpha == []:
        raise ValueError(f"{path}: alpha = []: must be a number in [0, 1], or a list with one a layer")
    return alpha


def _read_choice(folder: Path, step: int, config: ModelConfig) -> VariantChoice:
    alpha = read_strength(folder, step)
    if alpha is None:
        return VariantChoice()
    try:
        every = strengths(alpha, "all", config)
    except ValueError as error:
        raise ValueError(f"{folder / VARIANT_FILE}: {error}") from None
    return VariantChoice("xsa", "all", {"alpha": alpha}) if any(every) else VariantChoice()


def _read_config(path: Path) -> ModelConfig:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))["model_config"]
        return ModelConfig(**{FIELDS[name]: value for name, value in values.items()})
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except KeyError as error:
        raise ValueError(f"{path}: no field of nanochat's model_config is called {error}, or it is missing") from None
    except (TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: not the meta file of a nanochat checkpoint: {error}") from None


def _read_tensors(path: Path) -> Mapping[str, Tensor]:
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = str(error).splitlines()[0] if str(error) else "the file is empty"
        raise ValueError(f"{path}: not a file of tensors alone; nothing in it was executed ({reason})") from None
    if not isinstance(tensors, Mapping) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ValueError(f"{path}: not a table of tensors by name")
    return tensors


@torch.no_grad()
def load_weights(model: GPT, tensors: Mapping[str, Tensor], where: str) -> None:
    """Copies nanochat's tensors into ``model``; each is used once, and each parameter is filled."""
    own = {name: parameter for name, parameter in model.named_parameters() if ".variant." not in name}
    missing = set(own)
    for theirs, tensor in tensors.items():
        name = our_name(theirs.removeprefix("_orig_mod."))  # written by a compiled model
        if name is None or name not in own:
            raise ValueError(f"{where}: tensor {theirs} {tuple(tensor.shape)} has no place in this model")
        if name not in missing:
            raise ValueError(f"{where}: tensor {theirs} is there twice")
        if own[name].shape != tensor.shape:
            raise ValueError(
                f"{where}: tensor {theirs} is {tuple(tensor.shape)}, the model's {name} {tuple(own[name].shape)}"
            )
        own[name].copy_(tensor)
        missing.remove(name)
    if missing:
        raise ValueError(f"{where}: no tensor for {', '.join(sorted(missing))}")


def our_name(theirs: str) -> str | None:
    """Our name of nanochat's parameter; None where there is none."""
    numbers = re.findall(r"(?<=\.)\d+(?=\.)", theirs)
    ours = NAMES.get(re.sub(r"(?<=\.)\d+(?=\.)", "{}", theirs))
    return ours.format(*numbers) if ours else None
