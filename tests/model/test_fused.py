"""Attention in one C++ kernel, against the softmax written out and THE OPERATION behind it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from xsalab.model import native
from xsalab.model.attend import KVCache, LayerAttend, explicit
from xsalab.model.fused import attention, serves
from xsalab.model.xsa import exclude_self

pytestmark = pytest.mark.skipif(bool(native.reason()), reason=native.reason() or "kernels are there")

# rounding to bfloat16 of weights, of their gradients and of the result: each 2⁻⁹ relative, a few of them together
TOLERANCE = 1.2e-2

SHAPES = {  # b, t, s, h, g, d, window
    "one block": (2, 32, 32, 2, 2, 64, 32),
    "odd length": (2, 70, 70, 2, 2, 32, 70),
    "grouped": (1, 45, 45, 4, 2, 32, 45),
    "one value head": (2, 40, 40, 3, 1, 64, 40),
    "window inside a block": (1, 90, 90, 2, 1, 32, 7),
    "window across blocks": (1, 150, 150, 2, 2, 32, 50),
    "more keys than a chunk": (1, 1100, 1100, 1, 1, 32, 1100),
    "long and windowed": (1, 1300, 1300, 1, 1, 32, 600),
    "wide heads": (1, 40, 40, 1, 1, 128, 40),
    "behind a cache": (1, 40, 100, 2, 1, 32, 100),
    "behind a cache, windowed": (1, 33, 97, 2, 1, 32, 20),
    "one token": (1, 1, 1, 1, 1, 32, 1),
}


def inputs(b: int, t: int, s: int, h: int, g: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(t + s + h)
    shapes = ((b, t, h, d), (b, s, g, d), (b, s, g, d))
    q, k, v = (torch.randn(shape, generator=draw).bfloat16().requires_grad_() for shape in shapes)
    return q, k, v


def error(got: Tensor, want: Tensor) -> float:
    return float(((got.float() - want).norm() / want.norm().clamp_min(1e-6)).detach())


def both(shape: str, alpha: Tensor | None) -> tuple[list[Tensor], list[Tensor]]:
    """Output and gradients of q, k, v and α: of the kernel, and of the oracle in float32 of the same numbers."""
    b, t, s, h, g, d, window = SHAPES[shape]
    low = inputs(b, t, s, h, g, d)
    q, k, v = (x.detach().float().requires_grad_() for x in low)
    high = (q, k, v)
    strengths = [] if alpha is None else [alpha.clone().requires_grad_(), alpha.clone().requires_grad_()]
    got = attention(*low, window, strengths[0] if strengths else None)
    want = explicit(*high, window)
    if strengths:
        want = exclude_self(want, high[2][:, s - t :], strengths[1])
    grad = torch.randn(got.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    ours = torch.autograd.grad(got, [*low, *strengths[:1]], grad)
    theirs = torch.autograd.grad(want, [*high, *strengths[1:]], grad.float())
    return [got, *ours], [want, *theirs]


@pytest.mark.parametrize("shape", SHAPES)
def test_output_and_gradients_are_those_of_the_oracle(shape: str) -> None:
    """y, ∂q, ∂k, ∂v agree with the T × T softmax in float32 up to the rounding of bfloat16."""
    for got, want in zip(*both(shape, None), strict=True):
        if shape == "one token" and want.norm() < 1e-6:
            assert got.float().norm() < 1e-2  # the softmax of one score has no gradient
            continue
        assert error(got, want) < TOLERANCE


@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "one token"])
def test_exclusion_inside_is_the_operation_behind(shape: str) -> None:
    """With α a head: z and every gradient, α's included, agree with exclude_self of the oracle's output."""
    alpha = torch.linspace(0.25, 1.0, SHAPES[shape][3])
    for got, want in zip(*both(shape, alpha), strict=True):
        assert error(got, want) < TOLERANCE


def test_what_sees_only_itself_comes_out_exactly_zero() -> None:
    """At α = 1 position 0 is 0 to the last bit, and every output is orthogonal to its own value."""
    q, k, v = inputs(2, 70, 70, 4, 2, 64)
    z = attention(q, k, v, 70, 1.0).float()
    own = v.float().repeat_interleave(2, dim=2)
    assert not z[:, 0].any()
    cos = (z * own).sum(-1) / (z.norm(dim=-1) * own.norm(dim=-1) + 1e-30)
    assert cos[:, 1:].abs().max() < 5e-3  # the rounding of z


def test_strength_zero_is_attention_to_the_bit() -> None:
    """A live α of 0 changes no bit of output or gradients."""
    grads = []
    for alpha in (None, torch.zeros(3)):
        leaves = inputs(1, 50, 50, 3, 1, 32)
        y = attention(*leaves, 50, alpha)
        grads.append([y, *torch.autograd.grad(y.float().square().sum(), leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_value_of_zero_leaves_finite_gradients() -> None:
    """v = 0 for one token: z = y there, and no gradient is NaN."""
    q, k, v = inputs(1, 40, 40, 2, 2, 32)
    with torch.no_grad():
        v[:, 7] = 0
    alpha = torch.ones(2, requires_grad=True)
    z = attention(q, k, v, 40, alpha)
    assert torch.equal(z[:, 7], attention(q, k, v, 40)[:, 7])
    assert all(g.isfinite().all() for g in torch.autograd.grad(z.float().square().sum(), (q, k, v, alpha)))


def test_later_tokens_are_not_looked_at() -> None:
    """Not a number in a key and a value changes no earlier output."""
    q, k, v = (x.detach() for x in inputs(1, 70, 70, 2, 2, 32))
    before = attention(q, k, v, 70)
    k[:, 69], v[:, 69] = torch.nan, torch.inf
    assert torch.equal(attention(q, k, v, 70)[:, :64], before[:, :64])


def test_the_same_to_the_bit_whatever_the_threads() -> None:
    """A head is one thread's work from end to end: 1 and 2 threads, and a second time, give the same bits."""
    found, threads = [], torch.get_num_threads()
    try:
        for count in (1, 2, 2):
            torch.set_num_threads(count)
            leaves = inputs(3, 100, 100, 4, 2, 32)
            z = attention(*leaves, 60, 1.0)
            found.append([z, *torch.autograd.grad(z.float().square().sum(), leaves)])
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_views_of_a_joined_product_are_taken_as_they_are() -> None:
    """q, k, v cut out of one buffer give what their copies give."""
    joined = torch.randn((2, 40, 6, 32), generator=torch.Generator().manual_seed(0)).bfloat16()
    q, k, v = joined.split((4, 1, 1), dim=2)
    assert torch.equal(attention(q, k, v, 40, 1.0), attention(q.contiguous(), k.contiguous(), v.contiguous(), 40, 1.0))


def test_the_cache_gives_the_same_rows() -> None:
    """40 tokens, then 24 behind them in a cache: what 64 at once give; exclusion looks at the new tokens' values."""
    q, k, v = (x.detach() for x in inputs(1, 64, 64, 2, 1, 32))
    whole = attention(q, k, v, 64, 1.0)
    cache = KVCache(1)
    parts = []
    for begin, end in ((0, 40), (40, 64)):
        attend = LayerAttend(64, "auto", cache, 0)
        part = attend.exclusive(q[:, begin:end], k[:, begin:end], v[:, begin:end], 1.0)
        assert part is not None
        parts.append(part)
        cache.advance(q.new_empty((1, end - begin, 0)))
    assert error(torch.cat(parts, dim=1), whole.float()) < 4e-3


def test_what_it_does_not_serve() -> None:
    """Float32, odd head sizes, one token behind a cache and the switch send the work to PyTorch."""
    q, k, v = inputs(1, 20, 20, 2, 2, 32)
    assert serves(q, k, v)
    assert not serves(q.float(), k.float(), v.float())
    assert not serves(q[..., :24], k[..., :24], v[..., :24])
    assert not serves(q[:, :1], k, v)
    with native.plain():
        assert not serves(q, k, v)


def test_wrong_shapes_are_refused() -> None:
    """Keys of another batch or dtype do not reach memory that is not theirs."""
    q, k, v = inputs(2, 20, 20, 2, 2, 32)
    with pytest.raises(RuntimeError, match="shapes differ"):
        attention(q, k[:1], v[:1], 20)
    with pytest.raises(RuntimeError, match="bfloat16"):
        torch.ops.xsalab.attention(q, k.float(), v.float(), 20, None)
