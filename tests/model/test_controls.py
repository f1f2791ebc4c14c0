"""The rivals of XSA: each against its own definition, written out."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from xsalab.model import GPT, QKV, HeadGate, LayerAttend, SelfMasked, Sink, Site

Tiny = Callable[..., GPT]
SITE = Site(layer=0, depth=2, heads=4, kv_heads=2, head_dim=8, width=32, has_value_embedding=False)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def qkv(t: int = 9) -> QKV:
    q, k, v = draw(2, t, 4, 8), draw(2, t, 2, 8, seed=1), draw(2, t, 2, 8, seed=2)
    return QKV(q, k, v, v, draw(2, t, 32, seed=3))


def scores_of(t: QKV, window: int) -> tuple[Tensor, Tensor]:
    """Masked scores (b, h, t, t) and values (b, h, t, d), value heads copied out."""
    k, v = (x.repeat_interleave(2, dim=2).transpose(1, 2) for x in (t.k, t.v))
    scores = t.q.transpose(1, 2) @ k.mT / math.sqrt(8)
    length = scores.shape[-1]
    distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    return scores.masked_fill((distance < 0) | (distance > window), -math.inf), v


@pytest.mark.parametrize("window", [1, 3, 100])
def test_self_masked_is_a_softmax_without_the_diagonal(window: int) -> None:
    t = qkv()
    scores, v = scores_of(t, window)
    scores = scores.masked_fill(torch.eye(9).bool(), -math.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)  # position 0 has no key left
    assert weights.diagonal(dim1=-2, dim2=-1).max() == 0
    got = SelfMasked(SITE)(t, LayerAttend(window))
    torch.testing.assert_close(got, (weights @ v).transpose(1, 2), atol=1e-13, rtol=0)
    assert not got[:, 0].any()


def test_self_masked_has_finite_gradients_where_nothing_is_left() -> None:
    t = qkv()
    leaves = [x.clone().requires_grad_() for x in (t.q, t.k, t.v)]
    SelfMasked(SITE)(QKV(leaves[0], leaves[1], leaves[2], leaves[2], t.x), LayerAttend(3)).square().sum().backward()
    for leaf in leaves:
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all()


@pytest.mark.parametrize("window", [3, 100])
def test_sink_is_a_softmax_with_one_more_column(window: int) -> None:
    t, sink = qkv(), Sink(SITE)
    with torch.no_grad():
        sink.logit.copy_(torch.tensor([-2.0, 0.0, 1.0, 5.0]))
    scores, v = scores_of(t, window)
    column = sink.logit.double().view(1, 4, 1, 1).expand(2, 4, 9, 1)
    weights = torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]
    torch.testing.assert_close(sink(t, LayerAttend(window)), (weights @ v).transpose(1, 2), atol=1e-13, rtol=0)


def test_sink_learns_and_says_where_it_stands() -> None:
    sink = Sink(SITE, start=1.5)
    sink(qkv(), LayerAttend(3)).square().sum().backward()
    assert sink.logit.grad is not None
    assert (sink.logit.grad < 0).all()  # a larger sink makes every output smaller
    assert sink.logged() == {f"sink.{head}": 1.5 for head in range(4)}


def test_a_sink_far_down_is_plain_attention() -> None:
    t = qkv()
    torch.testing.assert_close(
        Sink(SITE, start=-200.0)(t, LayerAttend(3)), LayerAttend(3)(t.q, t.k, t.v), atol=1e-13, rtol=0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_head_gate_starts_as_bitwise_plain_attention(tiny: Tiny, tokens: Tensor, dtype: torch.dtype) -> None:
    plain, gated = tiny(dtype=dtype), tiny("head-gate", dtype=dtype)
    for variant in gated.variants():
        torch.nn.init.zeros_(variant.gate)
    assert torch.equal(gated(tokens), plain(tokens))


def test_a_head_gate_scales_each_head_and_token() -> None:
    t, gate = qkv(), HeadGate(SITE).double()
    with torch.no_grad():
        gate.gate.copy_(draw(4, 32, seed=5))
    factors = torch.empty(2, 9, 4, dtype=torch.float64)
    for head in range(4):
        factors[..., head] = 2 / (1 + torch.exp(-(t.x * gate.gate[head].detach()).sum(-1)))
    want = LayerAttend(3)(t.q, t.k, t.v) * factors.unsqueeze(-1)
    torch.testing.assert_close(gate(t, LayerAttend(3)), want, atol=1e-12, rtol=0)


def test_a_new_head_gate_is_zero() -> None:
    assert not HeadGate(SITE).gate.any()
    assert HeadGate(SITE).extra_flops() == 2 * 4 * 32 + 4 * 8
