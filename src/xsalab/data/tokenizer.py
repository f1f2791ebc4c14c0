"""Byte-level BPE with the GPT-4 style split: trained, checked and exported by Hugging Face ``tokenizers``, and
encoded by ``tiktoken``, several times as fast, where both are proven to give the same ids.

Special tokens have the last ids and never arise from text: encoding uses a tokenizer that does not know them,
so that a document with the literal text "<|bos|>" is ordinary text. Bytes per token are exact, for tokens that are
part of a character too: they are counted on bytes and never on decoded strings.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import chain
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

OUR_SPLIT = {  # as tokenizer.json tells of it
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ],
}
# Of a BPE model, what ours leave unset: each changes how text is merged.
UNUSUAL = (
    "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback", "ignore_merges",
)  # fmt: skip

# Text that a normaliser, a prefix or a special token would change.
PROBE = f"X 12  e\u0301\n\U0001f600 {BOS}"
# tiktoken's pattern engine gives up on about a million white spaces in a row: what cannot be cut into pieces of twice
# this length is encoded by the other library.
PIECE_CHARACTERS = 1 << 16


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
        if self.decode(self._encode_by_merges(PROBE)) != PROBE:
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
        """Ids of each text, as ordinary text: no special token arises, none is added. Threads may encode at once."""
        encoded: list[list[int]] = []
        for text in texts:
            pieces = _pieces(text) if self.splits_lines and len(text) > PIECE_CHARACTERS else [text]
            parts = [self._encode_piece(piece) for piece in pieces]
            encoded.append(parts[0] if len(parts) == 1 else list(chain.from_iterable(parts)))
        return encoded

    def _encode_piece(self, text: str) -> list[int]:
        if self._by_rank and len(text) <= 2 * PIECE_CHARACTERS:
            text.encode()  # refuses half of a surrogate pair; tiktoken would put another character there, unsaid
            return self._by_rank(text)
        return self._encode_by_merges(text)

    def _encode_by_merges(self, text: str) -> list[int]:
        return self._encoder.encode_batch_fast([text], add_special_tokens=False)[0].ids

    @cached_property
    def _by_rank(self) -> Callable[[str], list[int]] | None:
        """tiktoken's encoder of this vocabulary; None where it is not installed or could give other ids."""
        if not importlib.util.find_spec("tiktoken") or not self._merges_by_rank():
            return None
        import tiktoken  # pyright: ignore[reportMissingImports]

        ranks = {token: number for number, token in enumerate(self._bytes)}
        return tiktoken.Encoding("xsalab", pat_str=SPLIT, mergeable_ranks=ranks, special_tokens={}).encode_ordinary

    def _merges_by_rank(self) -> bool:
        """Whether merging the neighbours whose joint token has the lowest id gives what the list of merges gives.

        It does where every token but the bytes has one merge, in the order of ids, and is what its own text is merged
        to. Say the lowest joint token S of two neighbours x, y comes next. All that was merged so far within S is how S
        alone would be merged, up to its last merge, and that one makes S: so it joins x and y.
        """
        model = self._json["model"]
        if self._json.get("normalizer") or self._json["pre_tokenizer"] != OUR_SPLIT or any(map(model.get, UNUSUAL)):
            return False
        tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
        merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        if {*tokens[:256]} != {*byte_alphabet().values()} or tokens[256:] != ["".join(merge) for merge in merges]:
            return False
        merged = self._encoder.model.tokenize
        return all([part.id for part in merged(token)] == [number] for number, token in enumerate(tokens))

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
