"""What a run is scored on: a fixed choice of validation documents, and how they are laid out."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np

from ..config import config
from ..data import Corpus, TokenDocument, nanochat_rows
from ..model import GPT
from ..train.ranks import ALONE, Ranks
from . import ItemScore
from .bits_per_byte import bits_per_byte, row_bits_per_byte


@config
class EvalConfig:
    """``max_bytes`` of validation text are scored: documents in an order fixed by their names, the first always."""

    max_bytes: int = 200_000
    every: int = 0  # steps between evaluations during training; 0: at the end alone
    stride: int = 0  # tokens a long document's window moves on; 0: half the context
    batch_rows: int = 16  # changes memory, never a score
    packing: str = "documents"  # "nanochat" scores rows as nanochat packs them, for published numbers

    def __post_init__(self) -> None:
        for name, least in (("max_bytes", 1), ("every", 0), ("stride", 0), ("batch_rows", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least {least}")
        if self.packing not in ("documents", "nanochat"):
            raise ValueError(f"packing = {self.packing!r}: use 'documents' or 'nanochat'")


@lru_cache(maxsize=8)
def evaluation_documents(corpus: Corpus, max_bytes: int) -> tuple[TokenDocument, ...]:
    """The documents that are scored. They depend on the validation text and ``max_bytes`` alone."""
    ordered = sorted(corpus.validation_documents(), key=lambda document: hashlib.sha256(document.id.encode()).digest())
    chosen: list[TokenDocument] = []
    total = 0
    for document in ordered:
        if chosen and total + document.bytes > max_bytes:
            continue
        chosen.append(document)
        total += document.bytes
    return tuple(chosen)


def check_evaluation(corpus: Corpus, config: EvalConfig, context: int) -> None:
    """Raises ValueError, before anything is trained, where there would be nothing to score."""
    if config.packing == "nanochat" and not len(_packed(corpus, config, context)):
        raise ValueError(
            f"eval.packing = 'nanochat': {config.max_bytes:,} bytes of validation text fill no row of {context + 1} "
            "tokens; raise eval.max_bytes, give more validation text, or use 'documents'"
        )


def _packed(corpus: Corpus, config: EvalConfig, context: int) -> np.ndarray:
    documents = evaluation_documents(corpus, config.max_bytes)
    return nanochat_rows([document.tokens for document in documents], corpus.tokenizer.bos, context + 1)


def evaluate(model: GPT, corpus: Corpus, config: EvalConfig, ranks: Ranks = ALONE) -> list[ItemScore]:
    """One row a document (nats, bytes), or one a packed row with packing = "nanochat".

    Of several processes each scores a part, and all return the whole.
    """
    tokenizer, context = corpus.tokenizer, model.config.context
    sizes = tokenizer.bytes_per_token()
    if config.packing == "nanochat":
        return row_bits_per_byte(model, _packed(corpus, config, context), sizes, config.batch_rows, ranks)
    documents = evaluation_documents(corpus, config.max_bytes)
    return bits_per_byte(
        model, documents, bos=tokenizer.bos, bytes_per_token=sizes, context=context,
        stride=config.stride or None, batch_rows=config.batch_rows, ranks=ranks,
    )  # fmt: skip
