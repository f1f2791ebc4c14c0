"""nanochat's tokenizer: a pickle of a tiktoken ``Encoding``, read as data.

Of its opcodes those are followed that build numbers, strings and dicts alone; its one class is never made.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64
from tokenizers import Regex, pre_tokenizers

from ...data.tokenizer import SPLIT

BOS = "<|bos|>"


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
        self.splits_lines = pattern == SPLIT  # a line end before something visible always ends a token
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
