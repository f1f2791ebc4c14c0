"""The attention kernels behind one signature, and the key/value cache.

A variant is handed an ``Attend`` and never chooses a kernel, a mask or a cache itself. ``explicit`` is the
oracle: the T × T softmax written out. ``sdpa`` is torch's fused kernel. ``auto`` takes the fastest there is. Score
hooks and sinks take the explicit path, which trains on every device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .cuda import attention as cuda_attention
from .fused import attention, serves

# (scores (b, h, t, s) in float32, query positions (t, 1), key positions (1, s)) -> scores
ScoreMod = Callable[[Tensor, Tensor, Tensor], Tensor]


class Attend(Protocol):
    """Causal softmax attention of one layer: its window, its kernel and its cache are inside."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, score_mod: ScoreMod | None = None, sink: Tensor | None = None
    ) -> Tensor:
        """q (b, t, h, d), k and v (b, t, g, d) of the tokens given now -> (b, t, h, d)."""
        ...

    # An ``Attend`` may also have ``exclusive(q, k, v, alpha) -> Tensor | None``: exclude_self of its output against v
    # in the same kernel, or None where it has no such kernel.


class Places(NamedTuple):
    """Positions of the queries (b, t) and keys (b, s) where the rows of a batch stand at different ones.

    A key at ``NOWHERE`` is later than every query: padding, that nobody sees.
    """

    query: Tensor
    key: Tensor


NOWHERE = 1 << 40


class KVCache:
    """Keys and values of every layer, and what smear needs of the last token.

    Grows by copying; dtype and device follow the first keys that are put in. ``length`` counts the columns: the
    tokens of finished forward passes, padding included. While all rows have as many tokens, ``lengths`` is None.
    Rows of different length: run prompts padded on the right, then tell by ``keep`` what of them was real.
    """

    def __init__(self, depth: int) -> None:
        self.length = 0
        self.keys: list[Tensor | None] = [None] * depth
        self.values: list[Tensor | None] = [None] * depth
        self.last_embedding: Tensor | None = None  # (b, 1, c), before smearing
        self.lengths: Tensor | None = None  # (b,) real tokens
        self._places: Tensor | None = None  # (b, length) position of each column, once rows differ
        self._new: Tensor | None = (
            None  # (b, t, c) embeddings of the last pass, or (b, t, 0): what ``keep`` chooses from
        )

    @property
    def rows(self) -> int | None:
        """Rows of the batch that the cache holds; None while it is empty."""
        return next((store.shape[0] for store in self.keys if store is not None), None)

    def check_rows(self, rows: int) -> None:
        """Raises ValueError where the cache holds another batch than one of ``rows``: copying would broadcast."""
        if self.rows not in (None, rows):
            raise ValueError(f"the cache holds a batch of {self.rows}, got {rows}")

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Appends (b, t, g, d) and returns everything so far, (b, length + t, g, d)."""
        end = self.length + k.shape[1]
        stores = []
        for store, new in ((self.keys, k), (self.values, v)):
            old = store[layer]
            if old is None or old.shape[1] < end:
                grown = new.new_empty((new.shape[0], max(64, 2 * end), *new.shape[2:]))
                if old is not None:
                    grown[:, : self.length] = old[:, : self.length]
                old = store[layer] = grown
            old[:, self.length : end] = new
            stores.append(old[:, :end])
        return stores[0], stores[1]

    def places(self, t: int) -> Places | None:
        """Where the next ``t`` tokens of each row stand; None where all rows stand at ``length``."""
        if self.lengths is None or self._places is None:
            return None
        query = self.lengths[:, None] + torch.arange(t, device=self.lengths.device)
        return Places(query, torch.cat((self._places, query), dim=1))

    def advance(self, embeddings: Tensor) -> None:
        """Ends a pass of t tokens; embeddings (b, t, c): theirs before smearing, c = 0 where nothing smears."""
        places, t = self.places(embeddings.shape[1]), embeddings.shape[1]
        self.length += t
        if places is not None and self.lengths is not None:
            self._places, self.lengths = places.key, self.lengths + t
        self._new, self.last_embedding = embeddings, embeddings[:, -1:]

    def keep(self, counts: Tensor) -> None:
        """Of the last pass, the first ``counts`` (b,) int64 tokens of each row were real, at least 1; the rest is
        padding, which no later token sees. Raises ValueError for other counts.
        """
        assert self._new is not None, "keep follows a pass"
        t, rows = self._new.shape[1], torch.arange(len(counts), device=counts.device)
        if counts.shape != self._new.shape[:1] or not 1 <= int(counts.min()) <= int(counts.max()) <= t:
            raise ValueError(f"counts = {counts.tolist()}: one number a row, from 1 to the {t} tokens of the last pass")
        self.last_embedding = self._new[rows, counts - 1][:, None]
        if self.lengths is None or self._places is None:
            if bool((counts == t).all()):
                return
            self.lengths = counts.new_full(counts.shape, self.length)
            self._places = torch.arange(self.length, device=counts.device).repeat(len(counts), 1)
        padding = torch.arange(t, device=counts.device) >= counts[:, None]
        self._places[:, -t:].masked_fill_(padding, NOWHERE)
        self.lengths = self.lengths - t + counts

    def select(self, rows: Tensor) -> KVCache:
        """A cache of the rows with these indices (n,), in this order; one may come several times. Copies."""
        chosen = KVCache(len(self.keys))
        chosen.length = self.length
        for mine, theirs in ((self.keys, chosen.keys), (self.values, chosen.values)):
            theirs[:] = [None if store is None else store[:, : self.length][rows] for store in mine]
        for name in ("last_embedding", "lengths", "_places", "_new"):
            held = getattr(self, name)
            setattr(chosen, name, None if held is None else held[rows])
        return chosen


class LayerAttend:
    """``Attend`` for one layer. ``window`` is the number of earlier keys that a query sees besides itself.

    ``places``: of this pass, where the rows of the cache stand at different positions.
    """

    def __init__(
        self,
        window: int,
        kernel: str = "auto",
        cache: KVCache | None = None,
        layer: int = 0,
        places: Places | None = None,
    ) -> None:
        if kernel not in KERNELS:
            raise ValueError(f"attention kernel {kernel!r} is not known; known: {', '.join(KERNELS)}")
        if window < 1:
            raise ValueError(f"window = {window}: a query sees at least one earlier key (full is the context)")
        self.window, self.kernel, self.cache, self.layer, self.places = window, kernel, cache, layer, places

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, score_mod: ScoreMod | None = None, sink: Tensor | None = None
    ) -> Tensor:
        if self.cache is not None:
            k, v = self.cache.extend(self.layer, k, v)
        if score_mod is not None or sink is not None:
            return explicit(q, k, v, self.window, self.places, score_mod=score_mod, sink=sink)
        return KERNELS[self.kernel](q, k, v, self.window, self.places)

    def exclusive(self, q: Tensor, k: Tensor, v: Tensor, alpha: float | Tensor) -> Tensor | None:
        """``exclude_self`` of attention's output against v, in one kernel; None where no kernel does both."""
        few = self.cache is not None and self.cache.length > 0 and q.shape[1] < 16  # as in serves()
        if self.kernel != "auto" or self.places is not None or few:
            return None
        keys, values = (k, v) if self.cache is None else self.cache.extend(self.layer, k, v)
        return attention(q, keys, values, self.window, alpha) if serves(q, keys, values) else None


def positions(q: Tensor, k: Tensor, places: Places | None = None) -> tuple[Tensor, Tensor]:
    """Positions of queries (t, 1) and keys (1, s): the last query is at the last key.

    Where rows differ, (b, 1, t, 1) and (b, 1, 1, s).
    """
    if places is not None:
        return places.query[:, None, :, None], places.key[:, None, None, :]
    t, s = q.shape[1], k.shape[1]
    return torch.arange(s - t, s, device=q.device)[:, None], torch.arange(s, device=q.device)[None, :]


def visible(query: Tensor, key: Tensor, window: int) -> Tensor:
    """(…, t, s) booleans: neither later than the query nor more than ``window`` before it."""
    return (key <= query) & (key >= query - window)


def explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    places: Places | None = None,
    *,
    score_mod: ScoreMod | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """softmax(q kᵀ / √D) v written out, in float32 (float64 stays float64).

    ``sink`` (h,) is one logit a head that joins the softmax's denominator and carries no value. A query
    that sees no key gives 0.
    """
    dtype, group = torch.promote_types(q.dtype, torch.float32), q.shape[2] // k.shape[2]
    queries = q.to(dtype).unflatten(2, (k.shape[2], group))
    scores = torch.einsum("btgrd,bsgd->bgrts", queries, k.to(dtype)).flatten(1, 2) / math.sqrt(q.shape[-1])
    query, key = positions(q, k, places)
    if score_mod is not None:
        scores = score_mod(scores, query, key)
    scores = scores.masked_fill(~visible(query, key, window), -math.inf)
    top = scores.amax(-1, keepdim=True)
    if sink is not None:
        top = torch.maximum(top, sink.to(dtype).view(1, -1, 1, 1))
    top = top.detach().clamp_min(torch.finfo(dtype).min)  # a row of −inf alone would give −inf − −inf = NaN
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + (sink.to(dtype).view(1, -1, 1, 1) - top).exp()
    weights = (weights / total.clamp_min(torch.finfo(dtype).tiny)).unflatten(1, (k.shape[2], group))
    return torch.einsum("bgrts,bsgd->btgrd", weights, v.to(dtype)).flatten(2, 3).to(q.dtype)


def sdpa(q: Tensor, k: Tensor, v: Tensor, window: int, places: Places | None = None) -> Tensor:
    """torch's scaled_dot_product_attention; a mask only where causality alone does not say it."""
    t, s = q.shape[1], k.shape[1]
    plain = places is None and t == s and window >= s - 1
    mask = None if plain else visible(*positions(q, k, places), window)
    y = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None and t > 1,
        enable_gqa=k.shape[2] != q.shape[2],
    )
    return y.transpose(1, 2)


def blocked(q: Tensor, k: Tensor, v: Tensor, window: int, places: Places | None = None) -> Tensor:
    """``sdpa`` for whole sequences with a short window: a block of ``window`` queries meets two blocks of keys.

    Costs 2 · window keys a query instead of all. A last block that is not full is padded behind.
    """
    (b, t, h, d), g, w = q.shape, k.shape[2], window
    if k.shape[1] != t or t <= 2 * w:
        return sdpa(q, k, v, window, places)
    if t % w:
        q, k, v = (F.pad(x, (0, 0, 0, 0, 0, w - t % w)) for x in (q, k, v))
        return blocked(q, k, v, window)[:, :t]
    # Each block from the second on meets its own keys and those before it, the first its own alone: two calls, so that
    # one mask serves all blocks.
    first = sdpa(q[:, :w], k[:, :w], v[:, :w], window)
    n = t // w - 1
    blocks = q[:, w:].reshape(b * n, w, h, d)
    k_pairs, v_pairs = (x.unfold(1, 2 * w, w).permute(0, 1, 4, 2, 3).reshape(b * n, 2 * w, g, d) for x in (k, v))
    key = torch.arange(2 * w, device=q.device)[None, :]
    y = F.scaled_dot_product_attention(
        blocks.transpose(1, 2),
        k_pairs.transpose(1, 2),
        v_pairs.transpose(1, 2),
        attn_mask=visible(key[:, w:].T, key, w),
        enable_gqa=g != h,
    )
    return torch.cat((first, y.transpose(1, 2).reshape(b, n * w, h, d)), dim=1)


def auto(q: Tensor, k: Tensor, v: Tensor, window: int, places: Places | None = None) -> Tensor:
    """The C++ kernel or CUDA's where they serve, else ``blocked``, which is ``sdpa`` where windows are not short."""
    if q.is_cuda and (y := cuda_attention(q, k, v, window, places)) is not None:
        return y
    if places is None and serves(q, k, v):
        return attention(q, k, v, window)
    return blocked(q, k, v, window, places)


class Kernel(Protocol):
    """Causal attention within a window: q (b, t, h, d), k and v (b, s, g, d) -> (b, t, h, d)."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, window: int, places: Places | None = None, /) -> Tensor: ...


KERNELS: dict[str, Kernel] = {
    "auto": auto,
    "sdpa": sdpa,
    "blocked": blocked,
    "explicit": explicit,
}
