"""Reads a checkpoint and a tokenizer of karpathy/nanochat. No pickle is executed.

The weights are read by torch's weights-only loader. The tokenizer is a pickle of a tiktoken ``Encoding``: its
opcodes are read as data, those that build numbers, strings and dicts alone, and its one class is never made.
"""

from __future__ import annotations

import json
import pickle
import pickletools
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from tokenizers import Regex, pre_tokenizers
from torch import Tensor

from ..model import GPT, ModelConfig, VariantChoice

BOS = "<|bos|>"

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
    model; parameters of its own keep their first values. Raises ValueError naming the file, and the tensor that
    is missing, left over or of another shape.
    """
    folder = Path(folder)
    step = latest_step(folder) if step is None else step
    weights_path, meta_path = folder / f"model_{step:06d}.pt", folder / f"meta_{step:06d}.json"
    model = GPT(_read_config(meta_path), choice, dtype=dtype)
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


class NanochatTokenizer:
    """nanochat's byte-level BPE: ids are ranks, and of two neighbours the pair of lowest rank merges first."""

    def __init__(self, ranks: Mapping[bytes, int], pattern: str, specials: Mapping[str, int]) -> None:
        """Raises ValueError where the ids of tokens and special tokens are not 0, 1, 2, … without a gap."""
        ids = sorted([*ranks.values(), *specials.values()])
        if ids != list(range(len(ids))):
            raise ValueError(f"token ids must be 0 to {len(ids) - 1}, each once")
        if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
            raise ValueError(f"{len(missing)} single bytes are no tokens, the first is {missing[0]}")
        if BOS not in specials:
            raise ValueError(f"no special token {BOS}")
        self.ranks, self.specials = dict(ranks), dict(specials)
        self._split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        self._bytes = [b""] * len(ids)
        for token, number in ranks.items():
            self._bytes[number] = token
        self._names = list(self._bytes)
        for name, number in specials.items():
            self._names[number] = name.encode()
        self._known: dict[str, list[int]] = {}

    @classmethod
    def read(cls, path: Path) -> NanochatTokenizer:
        """From tokenizer.pkl. Raises ValueError naming the file for any other pickle, and executes none."""
        try:
            state = read_encoding(path.read_bytes())
            return cls(state["mergeable_ranks"], state["pat_str"], state["special_tokens"])
        except FileNotFoundError:
            raise ValueError(f"{path}: no such file") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: not a pickled tiktoken Encoding; nothing in it was executed ({error})") from None

    @property
    def vocab_size(self) -> int:
        """Number of ids, special tokens included."""
        return len(self._bytes)

    @property
    def bos(self) -> int:
        """Id of the token that begins every document."""
        return self.specials[BOS]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, as ordinary text: no special token arises, none is added."""
        return [
            [number for piece, _ in self._split.pre_tokenize_str(text) for number in self._encode_piece(piece)]
            for text in texts
        ]

    def _encode_piece(self, piece: str) -> list[int]:
        if piece not in self._known:
            parts = [bytes([byte]) for byte in piece.encode()]
            while len(parts) > 1:
                pairs = [a + b for a, b in pairwise(parts)]
                best = min(range(len(pairs)), key=lambda i: self.ranks.get(pairs[i], len(self._bytes)))
                if pairs[best] not in self.ranks:
                    break
                parts[best : best + 2] = [pairs[best]]
            self._known[piece] = [self.ranks[part] for part in parts]
        return self._known[piece]

    def decode(self, ids: Iterable[int]) -> str:
        """The text; special tokens by their names, bytes that are no UTF-8 as the replacement character."""
        return b"".join(self._names[number] for number in ids).decode("utf-8", errors="replace")

    def token_bytes(self, number: int) -> bytes:
        """The bytes that an id stands for; a special token's name."""
        return self._names[number]

    def bytes_per_token(self) -> Int64[np.ndarray, " vocab"]:
        """Raw UTF-8 bytes that each id stands for; 0 for special tokens."""
        return np.array([len(token) for token in self._bytes], dtype=np.int64)


_MARK = object()
_ENCODING = object()
_VALUES = {
    "SHORT_BINUNICODE", "BINUNICODE", "SHORT_BINBYTES", "BINBYTES", "BININT", "BININT1", "BININT2",
}  # fmt: skip


def read_encoding(data: bytes) -> dict[str, Any]:
    """The state of a pickled ``tiktoken.core.Encoding``, by reading its opcodes as data.

    An interpreter of the few opcodes that such a file needs: strings, bytes, numbers, dicts, and one object
    of one class, which is not imported. Any other opcode or class raises ValueError; nothing is called.
    """
    stack: list[Any] = []
    memo: list[Any] = []
    state: dict[str, Any] | None = None
    try:
        for opcode, argument, _ in pickletools.genops(data):
            name = opcode.name
            if name in ("PROTO", "FRAME"):
                continue
            if name in _VALUES:
                stack.append(argument)
            elif name == "MEMOIZE":
                memo.append(stack[-1])
            elif name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[int(argument)])  # pyright: ignore
            elif name == "MARK":
                stack.append(_MARK)
            elif name == "EMPTY_DICT":
                stack.append({})
            elif name == "EMPTY_TUPLE":
                stack.append(())
            elif name == "SETITEMS":
                mark = max(i for i, value in enumerate(stack) if value is _MARK)
                items = stack[mark + 1 :]
                del stack[mark:]
                stack[-1].update(zip(items[::2], items[1::2], strict=True))
            elif name == "SETITEM":
                key, value = stack[-2:]
                del stack[-2:]
                stack[-1][key] = value
            elif name == "STACK_GLOBAL":
                module, attribute = stack[-2:]
                if (module, attribute) != ("tiktoken.core", "Encoding"):
                    raise ValueError(f"it asks for {module}.{attribute}")
                stack[-2:] = [_ENCODING]
            elif name == "NEWOBJ":
                if stack[-2:] != [_ENCODING, ()]:
                    raise ValueError("it makes an object that is no Encoding")
                stack.pop()
            elif name == "BUILD":
                state = stack.pop()
                if stack != [_ENCODING] or not isinstance(state, dict):
                    raise ValueError("its state is no dict of an Encoding")
            elif name == "STOP":
                break
            else:
                raise ValueError(f"opcode {name} is not read")
    except (IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"its opcodes do not fit together: {error}") from None
    if state is None:
        raise ValueError("it holds no Encoding")
    return state
