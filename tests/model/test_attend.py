"""Every kernel against the softmax written out; the cache against one full pass."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from xsalab.model import GPT, KVCache, LayerAttend
from xsalab.model.attend import KERNELS, explicit

Tiny = Callable[..., GPT]


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def by_hand(q: Tensor, k: Tensor, v: Tensor, window: int, sink: Tensor | None = None, self_too: bool = True) -> Tensor:
    """Query by query, head by head, over the keys that it may see."""
    (b, t, h, d), s, group = q.shape, k.shape[1], q.shape[2] // k.shape[2]
    y = torch.zeros_like(q)
    for row in range(b):
        for i in range(t):
            own = s - t + i
            seen = [j for j in range(max(0, own - window), own + 1) if self_too or j != own]
            for head in range(h):
                if not seen:
                    continue
                scores = torch.stack([q[row, i, head].dot(k[row, j, head // group]) for j in seen]) / math.sqrt(d)
                if sink is not None:
                    scores = torch.cat((scores, sink[head : head + 1]))
                weights = scores.softmax(0)
                y[row, i, head] = sum(w * v[row, j, head // group] for w, j in zip(weights, seen, strict=False))
    return y


@pytest.mark.parametrize("window", [1, 3, 100])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize(("t", "s"), [(7, 7), (3, 8), (1, 6)], ids=["full", "chunk", "decode"])
def test_explicit_is_the_sum_over_the_keys_that_a_query_sees(t: int, s: int, groups: int, window: int) -> None:
    """F011, F014: the last query stands at the last key, and a window counts for one query too."""
    q, k, v = draw(2, t, 4, 6), draw(2, s, groups, 6, seed=1), draw(2, s, groups, 6, seed=2)
    torch.testing.assert_close(explicit(q, k, v, window), by_hand(q, k, v, window), atol=1e-13, rtol=0)


@pytest.mark.parametrize("window", [1, 2, 4, 7, 100])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("size", [8, 20], ids=["d8", "d20"])
@pytest.mark.parametrize("t", [1, 5, 12, 13, 16], ids=lambda t: f"t{t}")
@pytest.mark.parametrize("kernel", sorted(set(KERNELS) - {"explicit"}))
def test_a_kernel_and_its_gradients_are_those_of_explicit(
    kernel: str, t: int, size: int, groups: int, window: int
) -> None:
    """F001, F019: grouped heads, a head size that is no multiple of 8, odd lengths."""
    results = []
    for name in (kernel, "explicit"):
        inputs = [
            draw(2, t, heads, size, seed=heads + i).requires_grad_() for i, heads in enumerate((4, groups, groups))
        ]
        q, k, v = inputs
        y = KERNELS[name](q, k, v, window)
        y.backward(draw(2, t, 4, size, seed=9))
        results.append((y.detach(), *(tensor.grad for tensor in inputs)))
    torch.testing.assert_close(results[0], results[1], atol=1e-12, rtol=0)


@pytest.mark.parametrize("kernel", sorted(set(KERNELS) - {"explicit"}))
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)], ids=str)
def test_a_kernel_is_as_good_as_its_dtype(kernel: str, dtype: torch.dtype, tolerance: float) -> None:
    """bfloat16 rounds weights and values to 3 digits; an average of unit normals stays within 2e-2."""
    q, k, v = (draw(2, 32, heads, 16, seed=heads + i, dtype=dtype) for i, heads in enumerate((4, 2, 2)))
    y = KERNELS[kernel](q, k, v, 8)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), explicit(q.double(), k.double(), v.double(), 8), atol=tolerance, rtol=0)


def test_blocked_takes_its_own_path_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the parity above would compare sdpa with explicit twice."""
    calls = []
    original = torch.nn.functional.scaled_dot_product_attention

    def watched(*args, **kwargs) -> Tensor:
        calls.append(args[1].shape[2])
        return original(*args, **kwargs)

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", watched)
    q, k, v = (draw(1, 12, 2, 8) for _ in range(3))
    KERNELS["blocked"](q, k, v, 4)
    KERNELS["blocked"](q[:, :10], k[:, :10], v[:, :10], 4)
    KERNELS["blocked"](q[:, :7], k[:, :7], v[:, :7], 4)
    assert calls == [4, 8, 4, 8, 7]  # the first block alone, the others with the one before; padded; all keys


def test_scores_of_any_size_stay_finite() -> None:
    q, k, v = draw(1, 5, 2, 8) * 1e4, draw(1, 5, 2, 8, seed=1) * 1e4, draw(1, 5, 2, 8, seed=2)
    assert explicit(q, k, v, 10).isfinite().all()


@pytest.mark.parametrize("start", [-3.0, 0.0, 40.0])
def test_a_sink_joins_the_denominator_alone(start: float) -> None:
    q, k, v, sink = (
        draw(2, 7, 4, 6),
        draw(2, 7, 2, 6, seed=1),
        draw(2, 7, 2, 6, seed=2),
        torch.arange(4.0).double() + start,
    )
    torch.testing.assert_close(explicit(q, k, v, 3, sink=sink), by_hand(q, k, v, 3, sink=sink), atol=1e-13, rtol=0)


@pytest.mark.parametrize("window", [0, -1])
def test_full_has_one_spelling(window: int) -> None:
    """F013: no falsy window that means everything or nothing; a full window is the context."""
    with pytest.raises(ValueError, match=f"window = {window}: .*full is the context"):
        LayerAttend(window)


def test_an_unknown_kernel_is_named() -> None:
    with pytest.raises(ValueError, match="'flash' is not known; known: auto, sdpa, blocked, explicit"):
        LayerAttend(4, "flash")


# --- the cache


VARIANTS = {
    "standard": {},
    "xsa": {},
    "xsa-0.5-projected": {"alpha": 0.5, "against": "projected"},
    "xsa-learned": {"alpha": {"learned": "sigmoid", "start": 0.7}},
    "self-masked": {},
    "head-gate": {},
    "sink": {},
}


@pytest.mark.parametrize("kernel", sorted(KERNELS))
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("chunks", [[7, 1, 3, 1, 1], [13], [1] * 13, [5, 8]], ids=str)
def test_chunks_through_the_cache_give_the_logits_of_one_pass(
    tiny: Tiny, tokens: Tensor, name: str, chunks: list[int], kernel: str
) -> None:
    """F003, F011, F014: prefill and decode with a window of 4, grouped heads, smear and every variant."""
    kind = "xsa" if name.startswith("xsa") else name
    model = tiny(kind, VARIANTS[name], kernel=kernel, window="SL", dtype=torch.float64)
    cache = KVCache(model.config.depth)
    with torch.no_grad():
        parts = [model(chunk, cache) for chunk in tokens.split(chunks, dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens), atol=2e-6, rtol=0)  # logits are float32
    assert cache.length == 13


@pytest.mark.parametrize("kernel", sorted(KERNELS))
@pytest.mark.parametrize(("kept", "equal"), [(5, True), (4, False)], ids=["outside", "inside"])
def test_keys_before_the_window_have_no_influence(kernel: str, kept: int, equal: bool) -> None:
    """F011: one token is decoded under a window of 4: of 10 keys it sees the last 5, itself included."""
    q, k, v = draw(1, 1, 4, 8), draw(1, 10, 2, 8, seed=1), draw(1, 10, 2, 8, seed=2)
    results = []
    for change in (0.0, 1.0):
        keys, values, cache = k.clone(), v.clone(), KVCache(1)
        keys[:, : 10 - kept] += change
        values[:, : 10 - kept] += change
        cache.extend(0, keys[:, :9], values[:, :9])
        cache.length = 9
        results.append(LayerAttend(4, kernel, cache)(q, keys[:, 9:], values[:, 9:]))
    assert torch.equal(*results) == equal


def test_the_cache_keeps_its_contents_as_it_grows(tiny: Tiny) -> None:
    """F016: more tokens than the first 64 rows, several layers, fed one by one."""
    model = tiny("xsa", context=256)
    tokens = torch.randint(0, 50, (2, 200), generator=torch.Generator().manual_seed(1))
    cache = KVCache(4)
    with torch.no_grad():
        parts = [model(chunk, cache) for chunk in tokens.split([60, *[1] * 140], dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens), atol=5e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_cache_takes_the_computing_dtype(tiny: Tiny, tokens: Tensor, dtype: torch.dtype) -> None:
    """F017, F104."""
    model, cache = tiny("xsa", dtype=dtype), KVCache(4)
    with torch.no_grad():
        model(tokens[:, :9], cache)
        logits = model(tokens[:, 9:], cache)
    assert {store.dtype for store in (*cache.keys, *cache.values) if store is not None} == {dtype}
    assert logits.dtype == torch.float32


def test_another_batch_does_not_fit_into_a_cache(tiny: Tiny, tokens: Tensor) -> None:
    model, cache = tiny(), KVCache(4)
    with torch.no_grad():
        model(tokens, cache)
        with pytest.raises(ValueError, match="batch of 2, got 1"):
            model(tokens[:1], cache)
