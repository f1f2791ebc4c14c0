"""The attention kernels behind one signature, and the key/value cache.

A variant is handed an ``Attend`` and never chooses a kernel, a mask or a cache itself. ``explicit`` is the
oracle: the T × T softmax written out. ``sdpa`` is torch's fused kernel. Score hooks and sinks take the
explicit path, which trains on every device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

# (scores (b, h, t, s) in float32, query positions (t, 1), key positions (1, s)) -> scores
ScoreMod = Callable[[Tensor, Tensor, Tensor], Tensor]


class Attend(Protocol):
    """Causal softmax attention of one layer: its window, its kernel and its cache are inside."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, score_mod: ScoreMod | None = None, sink: Tensor | None = None
    ) -> Tensor:
        """q (b, t, h, d), k and v (b, t, g, d) of the tokens given now -> (b, t, h, d)."""
        ...


class KVCache:
    """Keys and values of every layer, and what smear needs of the last token.

    Grows by copying; dtype and device follow the first keys that are put in. ``length`` counts the
    tokens of finished forward passes.
    """

    def __init__(self, depth: int) -> None:
        self.length = 0
        self.keys: list[Tensor | None] = [None] * depth
        self.values: list[Tensor | None] = [None] * depth
        self.last_embedding: Tensor | None = None  # (b, 1, c), before smearing

    def check_rows(self, rows: int) -> None:
        """Raises ValueError where the cache holds another batch than one of ``rows``: copying would broadcast."""
        held = next((store.shape[0] for store in self.keys if store is not None), rows)
        if held != rows:
            raise ValueError(f"the cache holds a batch of {held}, got {rows}")

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


class LayerAttend:
    """``Attend`` for one layer. ``window`` is the number of earlier keys that a query sees besides itself."""

    def __init__(self, window: int, kernel: str = "sdpa", cache: KVCache | None = None, layer: int = 0) -> None:
        if kernel not in KERNELS:
            raise ValueError(f"attention kernel {kernel!r} is not known; known: {', '.join(KERNELS)}")
        if window < 1:
            raise ValueError(f"window = {window}: a query sees at least one earlier key (full is the context)")
        self.window, self.kernel, self.cache, self.layer = window, kernel, cache, layer

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, score_mod: ScoreMod | None = None, sink: Tensor | None = None
    ) -> Tensor:
        if self.cache is not None:
            k, v = self.cache.extend(self.layer, k, v)
        if score_mod is not None or sink is not None:
            return explicit(q, k, v, self.window, score_mod=score_mod, sink=sink)
        return KERNELS[self.kernel](q, k, v, self.window)


def positions(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of queries (t, 1) and keys (1, s): the last query is at the last key."""
    t, s = q.shape[1], k.shape[1]
    return torch.arange(s - t, s, device=q.device)[:, None], torch.arange(s, device=q.device)[None, :]


def visible(query: Tensor, key: Tensor, window: int) -> Tensor:
    """(t, s) booleans: neither later than the query nor more than ``window`` before it."""
    return (key <= query) & (key >= query - window)


def explicit(
    q: Tensor, k: Tensor, v: Tensor, window: int, *, score_mod: ScoreMod | None = None, sink: Tensor | None = None
) -> Tensor:
    """softmax(q kᵀ / √D) v written out, in float32 (float64 stays float64).

    ``sink`` (h,) is one logit a head that joins the softmax's denominator and carries no value. A query
    that sees no key gives 0.
    """
    dtype, group = torch.promote_types(q.dtype, torch.float32), q.shape[2] // k.shape[2]
    queries = q.to(dtype).unflatten(2, (k.shape[2], group))
    scores = torch.einsum("btgrd,bsgd->bgrts", queries, k.to(dtype)).flatten(1, 2) / math.sqrt(q.shape[-1])
    query, key = positions(q, k)
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


def sdpa(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """torch's scaled_dot_product_attention; a mask only where causality alone does not say it."""
    t, s = q.shape[1], k.shape[1]
    mask = None if t == s and window >= s - 1 else visible(*positions(q, k), window)
    y = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None and t > 1,
        enable_gqa=k.shape[2] != q.shape[2],
    )
    return y.transpose(1, 2)


def blocked(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """``sdpa`` for training with a short window: a block of ``window`` queries meets two blocks of keys.

    Costs 2 · window keys a query instead of all; taken where the context is a multiple of the window.
    """
    (b, t, h, d), g, w = q.shape, k.shape[2], window
    if k.shape[1] != t or t % w or t <= 2 * w:
        return sdpa(q, k, v, window)
    n = t // w
    k_pairs, v_pairs = (F.pad(x, (0, 0, 0, 0, w, 0)).unfold(1, 2 * w, w).permute(0, 1, 4, 2, 3) for x in (k, v))
    query = torch.arange(w, 2 * w, device=q.device)[:, None]
    key = torch.arange(2 * w, device=q.device)[None, :]
    mask = visible(query, key, w).expand(n, w, 2 * w).clone()
    mask[0, :, :w] = False  # the padding before the first block
    y = F.scaled_dot_product_attention(
        q.reshape(b * n, w, h, d).transpose(1, 2),
        k_pairs.reshape(b * n, 2 * w, g, d).transpose(1, 2),
        v_pairs.reshape(b * n, 2 * w, g, d).transpose(1, 2),
        attn_mask=mask.repeat(b, 1, 1)[:, None],
        enable_gqa=g != h,
    )
    return y.transpose(1, 2).reshape(b, t, h, d)


KERNELS: dict[str, Callable[[Tensor, Tensor, Tensor, int], Tensor]] = {
    "sdpa": sdpa,
    "blocked": blocked,
    "explicit": explicit,
}
