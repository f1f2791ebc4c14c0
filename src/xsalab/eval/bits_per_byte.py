"""BITS PER BYTE: how many bits the model needs, on average, for one byte of unseen text.

    bpb = Σ −ln p(token | what stands before it) / (ln 2 · Σ bytes of the tokens)

A loss per token depends on how much text a token stands for; per byte, models with different tokenizers
compare. Bytes are the raw UTF-8 bytes of the target tokens. Special tokens have none, and count neither
loss nor bytes: the start token is read, never scored. Every byte of a document is scored exactly once.

A document longer than the context is read in windows. The first scores all of its targets, each later one
moves on by ``stride`` and scores the last ``stride`` alone; the rest is the context they are given:

    targets   0 1 2 3 4 5 6 7 8 9          context 4, stride 2
    window 1  s s s s
    window 2      . . s s
    window 3          . . s s
    window 4              . . s s
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from ..data.chat_rows import TokenConversation
from ..data.corpus import TokenDocument
from ..model import GPT
from ..train.ranks import ALONE, Ranks
from . import ItemScore

MASKED = -1


class Window(NamedTuple):
    """Inputs ``start`` to ``end`` of a document; the targets before ``scored`` are context alone."""

    document: int
    start: int
    end: int
    scored: int


def bits_per_byte(
    model: GPT,
    documents: Sequence[TokenDocument],
    *,
    bos: int,
    bytes_per_token: np.ndarray | Tensor,
    context: int,
    stride: int | None = None,
    batch_rows: int = 16,
    ranks: Ranks = ALONE,
) -> list[ItemScore]:
    """One score a document, in order: nats (float64 sum) over bytes.

    bytes_per_token (vocabulary,) are integers, 0 for special tokens; ``stride`` None is half the context.
    Raises ValueError where there is nothing to score, or where a document's tokens do not stand for its
    bytes (the tokens of another tokenizer).
    """
    stride = max(context // 2, 1) if stride is None else stride
    if context < 1 or not 1 <= stride <= context or batch_rows < 1:
        raise ValueError(
            f"context = {context}, stride = {stride}, batch_rows = {batch_rows}: "
            "each is at least 1, and the stride at most the context"
        )
    if not documents:
        raise ValueError("no documents to evaluate: bits per byte needs at least one")
    sizes = _sizes(bytes_per_token)
    weights = [int(sizes[document.tokens].sum()) for document in documents]
    for document, weight in zip(documents, weights, strict=True):
        if weight != document.bytes:
            raise ValueError(
                f"document {document.id}: its tokens stand for {weight} bytes, its text has {document.bytes}; "
                "tokens and bytes per token must come from one tokenizer"
            )
    if not sum(weights):
        raise ValueError(f"no bytes to evaluate in {len(documents)} documents")

    windows = [
        window
        for number, document in enumerate(documents)
        for window in windows_of(number, len(document.tokens), context, stride)
    ]
    sums = np.zeros(len(windows))
    # The shortest first, so that a batch holds windows of like length; few lengths, so that shapes stay few.
    order = sorted(range(len(windows)), key=lambda i: windows[i].end - windows[i].start)
    for first, counts in shared(range(0, len(order), batch_rows), ranks):
        chosen = order[first : first + batch_rows]
        longest = windows[chosen[-1]].end - windows[chosen[-1]].start
        inputs = np.full((batch_rows, _padded(longest, context)), bos, dtype=np.int64)
        targets = np.full_like(inputs, MASKED)
        for row, i in enumerate(chosen):
            number, start, end, scored = windows[i]
            tokens = documents[number].tokens
            inputs[row, 0 if start else 1 : end - start] = tokens[max(start - 1, 0) : end - 1]
            new = tokens[scored:end].astype(np.int64)  # stored tokens are unsigned and have no −1
            targets[row, scored - start : end - start] = np.where(sizes[new] > 0, new, MASKED)
        sums[chosen] += _row_nats(model, inputs, targets)[: len(chosen)] * counts
    sums = ranks.sum(sums)
    totals = [0.0] * len(documents)
    for window, nats in zip(windows, sums, strict=True):
        totals[window.document] += float(nats)
    return [
        ItemScore("bpb", document.id, total, float(weight))
        for document, total, weight in zip(documents, totals, weights, strict=True)
    ]


def windows_of(document: int, length: int, context: int, stride: int) -> Iterator[Window]:
    """The windows over a document of ``length`` tokens: every target is scored in exactly one."""
    done = 0
    while done < length:
        start = max(done + stride - context, 0) if done else 0
        end = min(start + context, length)
        yield Window(document, start, end, done)
        done = end


def row_bits_per_byte(
    model: GPT,
    rows: np.ndarray,
    bytes_per_token: np.ndarray | Tensor,
    batch_rows: int = 16,
    ranks: Ranks = ALONE,
) -> list[ItemScore]:
    """One score a row of packed tokens (n, width), as nanochat evaluates: input row[:-1], target row[1:].

    Documents share a row and see each other. Special targets are left out. Raises ValueError where there
    is nothing to score.
    """
    if rows.ndim != 2 or rows.shape[1] < 2 or not len(rows):
        raise ValueError(f"no rows to evaluate: rows are (n, width) with n ≥ 1 and width ≥ 2, got {rows.shape}")
    sizes = _sizes(bytes_per_token)
    sums, weights = np.zeros(len(rows)), np.zeros(len(rows))
    for first, counts in shared(range(0, len(rows), batch_rows), ranks):
        chosen = np.asarray(rows[first : first + batch_rows], dtype=np.int64)
        full = np.concatenate((chosen, np.zeros((batch_rows - len(chosen), rows.shape[1]), dtype=np.int64)))
        inputs, targets = full[:, :-1], full[:, 1:].copy()
        mine = slice(first, first + len(chosen))
        weights[mine] += sizes[targets].sum(1)[: len(chosen)] * counts
        targets[sizes[targets] == 0] = MASKED
        targets[len(chosen) :] = MASKED
        sums[mine] += _row_nats(model, inputs, targets)[: len(chosen)] * counts
    sums, weights = ranks.sum(sums), ranks.sum(weights)
    if not weights.sum():
        raise ValueError(f"no bytes to evaluate in {len(rows)} rows: every target is a special token")
    return [ItemScore("bpb", str(row), float(sums[row]), float(weights[row])) for row in range(len(rows))]


def answer_bits_per_byte(
    model: GPT,
    conversations: Sequence[TokenConversation],
    bytes_per_token: np.ndarray | Tensor,
    batch_rows: int = 16,
    ranks: Ranks = ALONE,
) -> list[ItemScore]:
    """One score a conversation, in order: nats over bytes of what the assistant itself writes in all its turns.

    Each conversation has a row of its own and fits it, context + 1 tokens; special tokens are read, never scored.
    Raises ValueError where there is nothing to score.
    """
    if not conversations:
        raise ValueError("no conversations to evaluate: hold out at least one")
    sizes, context = _sizes(bytes_per_token), model.config.context
    targets = [
        np.where(c.mask.astype(bool) & (sizes[c.tokens] > 0), c.tokens.astype(np.int64), MASKED)[1:]
        for c in conversations
    ]
    weights = [int(sizes[row[row != MASKED]].sum()) for row in targets]
    if not sum(weights):
        raise ValueError(f"no bytes to evaluate in {len(conversations)} conversations: the assistant writes nothing")
    values = np.zeros(len(conversations))
    order = sorted(range(len(conversations)), key=lambda i: len(targets[i]))
    for first, counts in shared(range(0, len(order), batch_rows), ranks):
        chosen = order[first : first + batch_rows]
        length = _padded(len(targets[chosen[-1]]), context)
        inputs, expected = np.zeros((batch_rows, length), np.int64), np.full((batch_rows, length), MASKED, np.int64)
        for row, i in enumerate(chosen):
            inputs[row, : len(targets[i])] = conversations[i].tokens[:-1]
            expected[row, : len(targets[i])] = targets[i]
        values[chosen] += _row_nats(model, inputs, expected)[: len(chosen)] * counts
    values = ranks.sum(values)
    return [
        ItemScore("sft", conversation.id, float(value), float(weight))
        for conversation, value, weight in zip(conversations, values, weights, strict=True)
    ]


def total_bpb(scores: Iterable[ItemScore]) -> float:
    """Σ nats / (ln 2 · Σ bytes). Raises ValueError where there are no bytes."""
    scores = list(scores)
    weight = math.fsum(score.weight for score in scores)
    if weight <= 0:
        raise ValueError(f"no bytes in {len(scores)} scores: bits per byte is not defined")
    return math.fsum(score.value for score in scores) / (math.log(2) * weight)


def shared(firsts: Sequence[int], ranks: Ranks) -> Iterator[tuple[int, bool]]:
    """This process's part of the batches, by their first rows, and whether they count.

    Every process gets as many, since a sliced model is put together by all of them: where there is none left, the last
    one again, which does not count.
    """
    for begin in range(0, len(firsts), ranks.world):
        place = begin + ranks.rank
        yield firsts[min(place, len(firsts) - 1)], place < len(firsts)


def _sizes(bytes_per_token: np.ndarray | Tensor) -> Int64[np.ndarray, " vocab"]:
    return np.asarray(bytes_per_token, dtype=np.int64)


def _padded(length: int, context: int) -> int:
    """The next quarter of the context: a batch takes one of four lengths."""
    quarter = -(-context // 4)
    return min(-(-length // quarter) * quarter, context)


@torch.no_grad()
def _row_nats(model: GPT, inputs: np.ndarray, targets: np.ndarray) -> Float64[np.ndarray, " rows"]:
    # no_grad, not inference_mode: a rotary table that grows here must stay usable in training
    device = model.head.weight.device
    nats = model.token_nats(torch.from_numpy(inputs).to(device), torch.from_numpy(targets).to(device))
    return nats.cpu().numpy().astype(np.float64).sum(1)
