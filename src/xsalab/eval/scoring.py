"""Log-likelihoods of the ends of many prompts: equal beginnings are run once, and only scored places meet the head.

The prompts form a tree: prompts with an equal beginning share its node, whose keys and values its children continue
from (options of an item, items on one passage, few-shot blocks that repeat). Nodes of like length are run together,
padded on the right, where nothing looks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..model import GPT, KVCache
from ..model.head import capped_logits
from ..train.ranks import ALONE, Ranks

WORTH_SHARING = 16  # tokens: below it a pass of its own costs more than it saves
# Tokens spared of those that come behind: these then run against cached keys under a mask, which costs more than alone.
LEAST_SPARED = 0.25
LOGIT_BYTES = 1 << 26  # of float32 logits at a time
# Tokens of a pass: on CPUs what stays in the cache (8,192 took 2.5 times as long as 1,024), on GPUs few launches.
BATCH_TOKENS = {"cpu": 1024, "cuda": 65536}


class Prompt(NamedTuple):
    """Tokens, the start token first; those from ``start`` on are scored, at least one and never the first."""

    tokens: tuple[int, ...]
    start: int


class Score(NamedTuple):
    """``log_likelihood``: Σ ln p over the ``tokens`` scored ones; ``greedy``: each is the likeliest."""

    log_likelihood: float
    tokens: int
    greedy: bool

    @property
    def mean(self) -> float:
        """Log-likelihood of a token on average."""
        return self.log_likelihood / self.tokens


@dataclass
class _Node:
    """Tokens ``begin`` to ``end`` of the prompts below it, which agree up to ``end``."""

    begin: int
    end: int
    prompts: list[int]  # of a leaf: exactly one
    children: list[_Node] = field(default_factory=list)


def score_prompts(
    model: GPT,
    prompts: Sequence[Prompt],
    *,
    batch_tokens: int = 0,
    progress: Callable[[int], None] = lambda prompts: None,
    ranks: Ranks = ALONE,
) -> list[Score]:
    """One score a prompt, in order. ``batch_tokens``: of a pass, 0: what suits the device; a score depends on it by
    rounding alone. Of several processes, each with the whole model, each scores a part, and all return the whole.

    progress: called with the number of prompts that were scored since. Raises ValueError for a prompt that scores its
    first token or none, or holds a token outside the vocabulary.
    """
    for prompt in prompts:
        if not 1 <= prompt.start < len(prompt.tokens):
            raise ValueError(
                f"start = {prompt.start} of a prompt of {len(prompt.tokens)} tokens: from 1 to the last place, "
                "so that at least one token is scored and something stands before it"
            )
        if not 0 <= min(prompt.tokens) <= max(prompt.tokens) < model.config.vocab_size:
            raise ValueError(f"a prompt holds a token outside the vocabulary of {model.config.vocab_size}")
    batch_tokens = batch_tokens or BATCH_TOKENS.get(model.head.weight.device.type, BATCH_TOKENS["cpu"])
    order = sorted(range(len(prompts)), key=lambda i: prompts[i].tokens)
    mine = _part(prompts, order, ranks)
    found = np.zeros((len(prompts), 3))
    with torch.no_grad(), _fast_windows(model):
        for i, score in _descend(model, prompts, _grow(prompts, mine, 0), batch_tokens):
            found[i] = score
            progress(1)
    progress(len(prompts) - len(mine))
    return [Score(float(log_p), int(tokens), bool(greedy)) for log_p, tokens, greedy in ranks.sum(found)]


def _part(prompts: Sequence[Prompt], order: list[int], ranks: Ranks) -> list[int]:
    """Neighbours in ``order``, which share beginnings, of about the same number of tokens in every process."""
    ends = np.cumsum([len(prompts[i].tokens) for i in order])
    if not len(ends):
        return order
    first, last = (int(np.searchsorted(ends, ends[-1] * part / ranks.world)) for part in (ranks.rank, ranks.rank + 1))
    return order[first if ranks.rank else 0 : last if ranks.rank + 1 < ranks.world else len(order)]


@contextmanager
def _fast_windows(model: GPT) -> Iterator[None]:
    """Whole prompts in short windows are not worth a mask of all keys."""
    before = model.kernel
    model.kernel = "blocked" if before == "sdpa" else before
    try:
        yield
    finally:
        model.kernel = before


def _grow(prompts: Sequence[Prompt], order: Sequence[int], begin: int, least: int = 0) -> list[_Node]:
    """The nodes under one that ends at ``begin``; ``order``: its prompts, sorted by their tokens.

    Neighbours that agree up to ``least`` tokens or more share a node, if that spares enough.
    """
    nodes: list[_Node] = []
    first, least = 0, max(least, begin + WORTH_SHARING)
    while first < len(order):
        last, end = first, prompts[order[first]].start
        while last + 1 < len(order):
            a, b = prompts[order[last]], prompts[order[last + 1]]
            limit = min(end, b.start)
            shared = _agree(a.tokens, b.tokens, limit)
            if shared < least:
                break
            last, end = last + 1, shared
        chosen = order[first : last + 1]
        spared = (len(chosen) - 1) * (end - begin)
        if len(chosen) == 1:
            nodes.append(_Node(begin, len(prompts[chosen[0]].tokens), [chosen[0]]))
        elif spared < LEAST_SPARED * sum(len(prompts[i].tokens) - end for i in chosen):
            nodes += _grow(prompts, chosen, begin, end + 1)
        else:
            nodes.append(_Node(begin, end, list(chosen), _grow(prompts, chosen, end)))
        first = last + 1
    return nodes


def _agree(a: Sequence[int], b: Sequence[int], limit: int) -> int:
    """How many of the first ``limit`` tokens agree."""
    if a[:limit] == b[:limit]:
        return limit
    low, high = 0, min(limit, len(a), len(b))  # a[:low] == b[:low]
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def _descend(
    model: GPT,
    prompts: Sequence[Prompt],
    nodes: Sequence[_Node],
    batch_tokens: int,
    cache: KVCache | None = None,
    parents: Sequence[int] = (),
    tails: Tensor | None = None,
) -> Iterator[tuple[int, Score]]:
    """Scores below ``nodes``. ``parents``: of each node, its parent's row in ``cache`` and ``tails`` (rows, c).

    tails: the hidden state of each parent's last token, which predicts the first of a child's.
    """
    held = 0 if cache is None else cache.length
    order = sorted(range(len(nodes)), key=lambda i: nodes[i].end - nodes[i].begin)
    while order:
        longest = nodes[order[-1]].end - nodes[order[-1]].begin
        rows = max(1, min(batch_tokens // longest, 8 * batch_tokens // (longest + held)))
        order, chosen = order[:-rows], order[-rows:]
        batch = [nodes[i] for i in chosen]
        counts = torch.tensor([node.end - node.begin for node in batch])
        tokens = np.zeros((len(batch), longest), dtype=np.int64)
        for row, node in enumerate(batch):
            tokens[row, : counts[row]] = prompts[node.prompts[0]].tokens[node.begin : node.end]
        device = model.head.weight.device
        inner = [row for row, node in enumerate(batch) if node.children]
        before, store = None, KVCache(model.config.depth) if inner else None
        if cache is not None and tails is not None:
            places = torch.tensor([parents[i] for i in chosen], device=device)
            before, store = tails[places], cache.select(places)
        x = model.hidden(torch.from_numpy(tokens).to(device), store)
        leaves = [row for row, node in enumerate(batch) if not node.children]
        if leaves:
            yield from _leaves(model, prompts, [(batch[row], row) for row in leaves], x, before)
        if inner and store is not None:
            store.keep(counts.to(device))
            ends = x[torch.arange(len(batch), device=device), counts.to(device) - 1]
            del x
            below = [(child, row) for row in inner for child in batch[row].children]
            yield from _descend(
                model, prompts, [child for child, _ in below], batch_tokens, store, [row for _, row in below], ends
            )


def _leaves(
    model: GPT, prompts: Sequence[Prompt], leaves: Sequence[tuple[_Node, int]], x: Tensor, before: Tensor | None
) -> Iterator[tuple[int, Score]]:
    """The scores of prompts that end in this pass; ``x`` (rows, t, c) are its hidden states."""
    rows, places, targets, owners = [], [], [], []
    for node, row in leaves:
        prompt = prompts[node.prompts[0]]
        count = len(prompt.tokens) - prompt.start
        rows += [row] * count
        places += range(prompt.start - 1 - node.begin, len(prompt.tokens) - 1 - node.begin)
        targets += prompt.tokens[prompt.start :]
        owners += [node.prompts[0]] * count
    at = torch.tensor(places, device=x.device)
    of = torch.tensor(rows, device=x.device)
    states = x[of, at.clamp_min(0)]
    if before is not None:  # the first token after a shared beginning is predicted by the end of that
        states = torch.where((at < 0)[:, None], before[of], states)
    wanted = torch.tensor(targets, device=x.device)
    log_p, likeliest = [], []
    size = max(1, LOGIT_BYTES // (4 * model.config.vocab_size))
    for part in range(0, len(states), size):
        weight = model.head.weight[: model.config.vocab_size]
        logits = capped_logits(states[part : part + size], weight, model.config.soft_cap)
        goal = wanted[part : part + size]
        log_p.append(logits.gather(1, goal[:, None])[:, 0] - logits.logsumexp(-1))
        likeliest.append(logits.argmax(-1) == goal)
    values, greedy = torch.cat(log_p).double().cpu().numpy(), torch.cat(likeliest).cpu().numpy()
    edges = np.flatnonzero(np.diff(np.array(owners), prepend=-1))
    for begin, end in zip(edges, [*edges[1:], len(owners)], strict=True):
        score = Score(float(values[begin:end].sum()), int(end - begin), bool(greedy[begin:end].all()))
        yield owners[begin], score
