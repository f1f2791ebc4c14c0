"""Byte-level BPE with the GPT-4 style split, by Hugging Face ``tokenizers``.

Special tokens have the last ids and never arise from text: encoding uses a tokenizer that does not know them,
so that a document with the literal text "<|bos|>" is ordinary text. Bytes per token are exact, for tokens that are
part of a character too: they are counted on bytes and never on decoded strings.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
from jaxtyping import Int64
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HFTokenizer

from ..config import digest
from ..files import write_atomic

# The library's own threads make it warn on a later fork (older versions), and compete with those of rows.py.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

BOS, PAD = "<|bos|>", "<|pad|>"
SPECIAL_TOKENS = (
    BOS,
    PAD,
    *(f"<|{who}_{edge}|>" for who in ("user", "assistant", "python", "output") for edge in ("start", "end")),
)

SPLIT = "|".join(
    (
        r"'(?i:[sdmt]|ll|ve|re)",  # English contractions
        r"[^\r\n\p{L}\p{N}]?+\p{L}+",  # a word, with the space or sign before it
        r"\p{N}{1,2}",  # numbers in groups of one or two digits
        r" ?[^\s\p{L}\p{N}]++[\r\n]*",  # signs, with the line ends after them
        r"\s*[\r\n]",  # blank lines
        r"\s+(?!\S)",  # all but the last of several spaces
        r"\s+",
    )
)


# Text that a normaliser, a prefix or a special token would change.
PROBE = f"X 12  e\u0301\n\U0001f600 {BOS}"
PIECE_CHARACTERS = 1 << 20


class Tokenizer:
    """Text to ids and back. ``vocab_size`` counts the special tokens, which have the last ids."""

    def __init__(self, text: str) -> None:
        """From the text of a tokenizer.json that ``save`` wrote. Raises ValueError if it is anything else."""
        self._json = _checked(text)
        self.digest: str = digest(self._json)
        self.specials: dict[str, int] = {token["content"]: token["id"] for token in self._json["added_tokens"]}
        # Encoding must not know the special tokens, or their literal text would become one.
        self._encoder = _encoder({**self._json, "added_tokens": []})
        byte_of = {character: byte for byte, character in byte_alphabet().items()}
        by_id = sorted(self._json["model"]["vocab"].items(), key=lambda item: item[1])
        self._bytes: list[bytes] = [bytes(byte_of[character] for character in token) for token, _ in by_id]
        self._names: list[bytes] = self._bytes + [name.encode() for name in self.specials]
        if self.decode(self.encode([PROBE])[0]) != PROBE:
            raise ValueError("not a tokenizer.json of xsalab: decoding does not give back the text")

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """Learns the merges. Raises ValueError if ``vocab_size`` is too small, or larger than the text allows."""
        smallest = 256 + len(SPECIAL_TOKENS)
        if vocab_size < smallest:
            raise ValueError(
                f"vocab_size = {vocab_size}: must be at least {smallest}, "
                f"256 bytes and {len(SPECIAL_TOKENS)} special tokens"
            )
        tokenizer = HFTokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - len(SPECIAL_TOKENS),
            min_frequency=2,  # what was seen once is no pattern
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL_TOKENS])
        largest = tokenizer.get_vocab_size()
        if largest < vocab_size:
            raise ValueError(
                f"vocab_size = {vocab_size}: the training text allows at most {largest}; "
                "use that, or more text (data.source, data.tokenizer_megabytes)"
            )
        return cls(tokenizer.to_str())

    @classmethod
    def load(cls, path: Path | str) -> Tokenizer:
        """Reads a tokenizer.json. Raises ValueError naming the file if it is anything else; no pickle is read."""
        try:
            text = Path(path).read_bytes().decode("utf-8")
        except FileNotFoundError:
            raise ValueError(f"{path}: no such file; give the path of a tokenizer.json") from None
        except UnicodeDecodeError:
            raise ValueError(f"{path}: a binary file, perhaps a pickle; only tokenizer.json is read") from None
        try:
            return cls(text)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def save(self, path: Path | str) -> None:
        """Writes a tokenizer.json that Hugging Face ``tokenizers`` loads as well."""
        write_atomic(Path(path), json.dumps(self._json, ensure_ascii=False, indent=1) + "\n")

    def table(self) -> dict[str, Any]:
        """What tokenizer.json holds, as a copy."""
        return copy.deepcopy(self._json)

    @property
    def vocab_size(self) -> int:
        """Number of ids, special tokens included."""
        return len(self._names)

    @property
    def splits_lines(self) -> bool:
        """Whether a line end before something visible always ends a token: so it is with our split."""
        parts = (self._json.get("pre_tokenizer") or {}).get("pretokenizers") or [{}]
        return parts[0].get("pattern") == {"Regex": SPLIT}

    @property
    def bos(self) -> int:
        """Id of the token that begins every document."""
        return self.specials[BOS]

    @property
    def pad(self) -> int:
        """Id of the token that fills the last row; never a target."""
        if PAD not in self.specials:
            raise ValueError(f"the tokenizer has no {PAD}, so rows cannot be packed with it")
        return self.specials[PAD]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, as ordinary text: no special token arises, none is added."""
        pieces = [_pieces(text) if self.splits_lines else [text] for text in texts]
        flat = [piece for parts in pieces for piece in parts]
        encoded = iter(self._encoder.encode_batch_fast(flat, add_special_tokens=False))
        return [[i for _ in parts for i in next(encoded).ids] for parts in pieces]

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """The text; special tokens by their names, bytes that are no UTF-8 as the replacement character."""
        return b"".join(self._names[i] for i in ids).decode("utf-8", errors="replace")

    @property
    def token_bytes(self) -> list[bytes]:
        """What each id stands for: its raw bytes, a special token's name."""
        return list(self._names)

    def bytes_per_token(self) -> Int64[np.ndarray, " vocab"]:
        """Raw UTF-8 bytes that each id stands for; 0 for special tokens."""
        return np.array([len(token) for token in self._bytes] + [0] * len(self.specials), dtype=np.int64)


def byte_alphabet() -> dict[int, str]:
    """The character that byte-level BPE writes for each byte.

    Bytes that print in Latin-1 stand for themselves, the others get the characters from U+0100 on, in order.
    """
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printing]
    return {byte: chr(byte) for byte in printing} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def _pieces(text: str) -> list[str]:
    """A long text in pieces that encode one by one as they do together (the library keeps 100 bytes a token).

    The split always ends a token at a line end that something visible follows.
    """
    pieces, start = [], 0
    while len(text) - start > PIECE_CHARACTERS:
        cut = re.compile(r"(?<=\n)(?=\S)").search(text, start + PIECE_CHARACTERS)
        if not cut:
            break
        pieces.append(text[start : cut.start()])
        start = cut.start()
    return [*pieces, text[start:]]


def _checked(text: str) -> dict[str, Any]:
    """The parsed tokenizer.json, known to be a byte-level BPE whose special tokens have the last ids."""
    try:
        tokenizer = json.loads(text)
        model, added = tokenizer["model"], tokenizer["added_tokens"]
        ids = sorted(model["vocab"].values())
        faults = {
            "its model is not BPE": model["type"] != "BPE",
            "it drops merges at random": bool(model.get("dropout")),
            "it cuts or pads texts": bool(tokenizer.get("truncation") or tokenizer.get("padding")),
            "it is not byte-level": set("".join(model["vocab"])) != set(byte_alphabet().values())
            or not set(byte_alphabet().values()) <= set(model["vocab"]),
            "ids of ordinary tokens are not 0, 1, 2, …": ids != list(range(len(ids))),
            "special tokens do not follow the ordinary ones": [token["id"] for token in added]
            != list(range(len(ids), len(ids) + len(added))),
            f"it has no {BOS}": BOS not in [token["content"] for token in added],
        }
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a tokenizer.json of xsalab ({type(error).__name__}: {str(error)[:80]})") from None
    for fault, found in faults.items():
        if found:
            raise ValueError(f"not a tokenizer.json of xsalab: {fault}")
    return tokenizer


def _encoder(tokenizer: dict[str, Any]) -> HFTokenizer:
    try:
        return HFTokenizer.from_str(json.dumps(tokenizer))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"not a tokenizer.json of xsalab: {str(error)[:120]}") from None
