"""The blocked loss against torch's cross-entropy of the whole matrix of logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from xsalab.model.head import capped_logits, token_nats

VOCABULARY, ROWS = 50, 64


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def reference(x: Tensor, weight: Tensor, targets: Tensor, cap: float) -> Tensor:
    logits = (x @ weight.to(x.dtype).T)[..., :VOCABULARY].float()
    logits = cap * torch.tanh(logits / cap) if cap else logits
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=-1, reduction="none").view(
        targets.shape
    )


@pytest.fixture
def targets() -> Tensor:
    targets = torch.randint(0, VOCABULARY, (3, 70), generator=torch.Generator().manual_seed(1))
    targets[0, :5] = targets[2, -1] = -1
    return targets


@pytest.mark.parametrize("cap", [15.0, 2.0, 0.0])
@pytest.mark.parametrize("block", [1, 1 << 20], ids=["many-blocks", "one-block"])
def test_nats_and_gradients_are_those_of_cross_entropy(
    monkeypatch: pytest.MonkeyPatch, targets: Tensor, cap: float, block: int
) -> None:
    """210 rows in blocks of 64, the last one short, and in one."""
    monkeypatch.setattr("xsalab.model.head.BLOCK_BYTES", {"cpu": block})
    results = []
    for ours in (True, False):
        x, weight = draw(3, 70, 16).requires_grad_(), draw(ROWS, 16, seed=2).requires_grad_()
        nats = token_nats(x, weight, targets, cap, VOCABULARY) if ours else reference(x, weight, targets, cap)
        nats.backward(draw(3, 70, seed=3))
        results.append((nats.detach(), x.grad, weight.grad))
    # float32, sums of up to 210 products of order 1 in another order
    torch.testing.assert_close(results[0], results[1], atol=2e-5, rtol=1e-5)


def test_masked_targets_cost_nothing_and_teach_nothing(targets: Tensor) -> None:
    x, weight = draw(3, 70, 16).requires_grad_(), draw(ROWS, 16, seed=2).requires_grad_()
    nats = token_nats(x, weight, targets, 15.0, VOCABULARY)
    nats.sum().backward()
    assert not nats[targets == -1].any()
    assert (nats[targets >= 0] > 0).all()
    assert x.grad is not None
    assert not x.grad[targets == -1].any()
    assert x.grad[targets >= 0].any(-1).all()


def test_rows_beyond_the_vocabulary_take_no_part(targets: Tensor) -> None:
    """F045: padding of the table neither raises the loss nor gets a gradient."""
    x, weight = draw(3, 70, 16), draw(ROWS, 16, seed=2)
    spoiled = weight.clone()
    spoiled[VOCABULARY:] = 1e6
    spoiled.requires_grad_()
    nats = token_nats(x, spoiled, targets, 15.0, VOCABULARY)
    assert torch.equal(nats, token_nats(x, weight, targets, 15.0, VOCABULARY))
    nats.sum().backward()
    assert spoiled.grad is not None
    assert not spoiled.grad[VOCABULARY:].any()
    assert spoiled.grad[:VOCABULARY].any()


def test_an_infinite_loss_at_a_masked_place_stays_there() -> None:
    """F119: selected, not multiplied by 0: totals and gradients of the others are finite."""
    x, weight = draw(4, 16), draw(ROWS, 16, seed=2).requires_grad_()
    x[1] = 3e38
    x.requires_grad_()
    targets = torch.tensor([3, -1, 4, 5])
    nats = token_nats(x, weight, targets, 0.0, VOCABULARY)
    assert nats.isfinite().all()
    nats.sum().backward()
    assert x.grad is not None
    assert x.grad[[0, 2, 3]].isfinite().all()


def test_bfloat16_states_float32_nats(targets: Tensor) -> None:
    """The products are bfloat16's; logits, loss and sums are float32. 8 bits of mantissa on logits of order 4: 2e-2."""
    x, weight = draw(3, 70, 16, dtype=torch.bfloat16).requires_grad_(), draw(ROWS, 16, seed=2).requires_grad_()
    nats = token_nats(x, weight, targets, 15.0, VOCABULARY)
    nats.sum().backward()
    assert (nats.dtype, x.grad.dtype, weight.grad.dtype) == (torch.float32, torch.bfloat16, torch.float32)  # pyright: ignore
    torch.testing.assert_close(nats, reference(x.float(), weight, targets, 15.0), atol=6e-2, rtol=0)


def test_logits_stay_within_the_cap() -> None:
    x, weight = 100 * draw(5, 16), draw(ROWS, 16, seed=2)
    assert capped_logits(x, weight, 15.0).abs().max() <= 15
    torch.testing.assert_close(capped_logits(x, weight, 0.0), x @ weight.T)
    small = 1e-3 * x
    torch.testing.assert_close(capped_logits(small, weight, 15.0), 15 * torch.tanh(small @ weight.T / 15))
