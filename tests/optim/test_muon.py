"""Muon as functions on stacks of matrices."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from xsalab.optim import orthogonalize
from xsalab.optim.muon import cautious_decay_, muon_update, nesterov_, plain_muon_update, rate_factor


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def first_update(gradient: Tensor, **how) -> Tensor:
    rows, columns = gradient.shape[-2:]
    variance = torch.zeros(len(gradient), *((rows, 1) if rows >= columns else (1, columns)))
    return muon_update(gradient.clone(), variance, beta2=0.9, **how)


@pytest.mark.parametrize("shape", [(48, 48), (96, 32), (32, 96), (1, 12), (4, 12)], ids=str)
def test_the_polar_factor_is_found(shape: tuple[int, int]) -> None:
    """Against the singular value decomposition: the directions stay, the lengths go to 1.

    Five steps aim at a flat polynomial: small singular values are lifted to within 15 %, not to 1 exactly.
    """
    g = draw(2, *shape)
    x = orthogonalize(g)
    u, s, vt = torch.linalg.svd(g, full_matrices=False)
    along = u.mT @ x @ vt.mT
    torch.testing.assert_close(along, torch.diag_embed(along.diagonal(dim1=-2, dim2=-1)), atol=2e-4, rtol=0)
    steep = s / s.amax(-1, keepdim=True) > 1e-2
    assert (along.diagonal(dim1=-2, dim2=-1)[steep] - 1).abs().max() < 0.15


@pytest.mark.parametrize("shape", [(64, 64), (128, 32), (32, 128)], ids=str)
def test_the_first_update_has_its_singular_values_in_a_narrow_band(shape: tuple[int, int]) -> None:
    """For a gradient whose singular values spread by a factor of 30. The polynomial ends within 15 % of 1;
    rows of equal size and variance reduction move the values by a little more."""
    u, _, vt = torch.linalg.svd(draw(3, *shape), full_matrices=False)
    g = u * torch.logspace(0, -1.5, min(shape)) @ vt
    values = torch.linalg.svdvals(first_update(g))
    assert values.min() > 0.7
    assert values.max() < 1.3


@pytest.mark.parametrize("shape", [(16, 4), (4, 16), (9, 9)], ids=str)
def test_an_update_has_the_norm_of_its_rank(shape: tuple[int, int]) -> None:
    update = first_update(draw(2, *shape))
    torch.testing.assert_close(update.norm(dim=(-2, -1)), torch.full((2,), math.sqrt(min(shape))), rtol=1e-5, atol=0)


@pytest.mark.parametrize("shape", [(16, 4), (4, 16), (9, 9)], ids=str)
def test_an_update_is_the_steps_one_after_the_other(shape: tuple[int, int]) -> None:
    """Renormalisation and variance reduction are carried out as one factor a line; here as they are stated."""
    rows, columns = shape
    line = -1 if rows >= columns else -2
    g, variance = draw(2, *shape), draw(2, *((rows, 1) if rows >= columns else (1, columns)), seed=1).square()
    want_variance = variance.clone()
    scaled = torch.stack([each * (each.norm() / rows**0.5) / each.norm(dim=1, keepdim=True) for each in g])
    x = orthogonalize(scaled)
    x = torch.stack([each * min(shape) ** 0.5 / each.norm() for each in x])
    want_variance += 0.1 * (x.square().mean(dim=line, keepdim=True) - want_variance)
    reduced = x / want_variance.sqrt()
    want = torch.stack([each * before.norm() / each.norm() for each, before in zip(reduced, x, strict=True)])
    torch.testing.assert_close(muon_update(g, variance, beta2=0.9), want, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(variance, want_variance)


def test_momentum_looks_ahead() -> None:
    """M ← M + (1 − μ)(G − M), then G + μ(M − G)."""
    gradients, momenta = [draw(3, 4), draw(3, 4, seed=1)], [draw(3, 4, seed=2), torch.zeros(3, 4)]
    kept = [0.9 * m + 0.1 * g for g, m in zip(gradients, momenta, strict=True)]
    ahead = torch.stack([0.1 * g + 0.9 * m for g, m in zip(gradients, kept, strict=True)])
    torch.testing.assert_close(nesterov_(gradients, momenta, 0.9), ahead)
    torch.testing.assert_close(momenta, kept)


@pytest.mark.parametrize("factor", [0.25, 1e4])
def test_the_size_of_the_gradient_does_not_matter(factor: float) -> None:
    """Down to where nanochat's floor of 1e-6 under the norm is felt; within its 1e-6 / ‖G‖ here."""
    torch.testing.assert_close(first_update(factor * draw(2, 8, 6)), first_update(draw(2, 8, 6)), atol=1e-4, rtol=0)


@pytest.mark.parametrize("shape", [(6, 6), (12, 6), (6, 12)], ids=str)
@pytest.mark.parametrize("plain", [False, True], ids=["hybrid", "plain"])
def test_a_zero_gradient_gives_a_zero_update(shape: tuple[int, int], plain: bool) -> None:
    """F028: behind an output matrix that starts at zero the first gradient is exactly zero."""
    zero = torch.zeros(2, *shape)
    update = plain_muon_update(zero) if plain else first_update(zero)
    assert not update.any()  # NaN counts as something


def test_a_matrix_does_not_see_the_others_of_its_stack() -> None:
    """F032: matrices of one shape are stacked for speed; each is orthogonalised on its own."""
    g = draw(3, 12, 8)
    together = first_update(g)
    for i in range(3):
        torch.testing.assert_close(together[i : i + 1], first_update(g[i : i + 1]), atol=1e-6, rtol=0)
    stacked_as_one = first_update(g.reshape(1, 36, 8)).view(3, 12, 8)
    assert (together - stacked_as_one).abs().max() > 0.1


def test_the_dtype_of_the_iteration_is_an_option() -> None:
    """F041: float32 stays float32; bfloat16's singular values are off by its rounding."""
    g = draw(2, 32, 32)
    exact = torch.linalg.svdvals(orthogonalize(g.double(), dtype=torch.float64))
    single, half = orthogonalize(g), orthogonalize(g, dtype=torch.bfloat16)
    assert (single.dtype, half.dtype) == (torch.float32, torch.bfloat16)
    error = (torch.linalg.svdvals(single).double() - exact).abs().max()
    error_half = (torch.linalg.svdvals(half.float()).double() - exact).abs().max()
    assert error < 1e-4
    assert 1e-3 < error_half < 0.1
    assert first_update(g, dtype=torch.bfloat16).dtype == torch.float32


def test_coefficients_are_arguments() -> None:
    """F043: one step with (a, b, c) is the polynomial a x + b x³ + c x⁵ of the singular values."""
    g, (a, b, c) = draw(1, 6, 6), (2.0, -1.5, 0.5)
    s = torch.linalg.svdvals(g / (1.01 * g.norm() + 1e-6))
    want = (a * s + b * s**3 + c * s**5).abs().sort(descending=True).values
    torch.testing.assert_close(torch.linalg.svdvals(orthogonalize(g, [(a, b, c)])), want, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("shape", "factor"), [((16, 4), 2.0), ((4, 16), 1.0), ((9, 9), 1.0)], ids=str)
def test_the_rate_factor_is_of_outputs_over_inputs(shape: tuple[int, int], factor: float) -> None:
    """F033."""
    assert rate_factor(*shape) == factor


def test_decay_pulls_only_where_the_update_goes_the_same_way() -> None:
    weight = torch.tensor([[2.0, -2.0, 2.0, 0.0]])
    update = torch.tensor([[1.0, 1.0, 0.0, 1.0]])
    cautious_decay_([weight], update[None], rate=0.1, decay=0.5)
    torch.testing.assert_close(weight, torch.tensor([[2 - 0.1 - 0.1, -2 - 0.1, 2 - 0.1, -0.1]]))
