"""Geometry of an update against numpy; the sketch's inner products against the updates' own."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from xsalab.optim.geometry import SKETCH, matrix_geometry, sketch


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def plain_sketch_cosine(name: str, a: Tensor, b: Tensor) -> float:
    first, second = sketch(name, a), sketch(name, b)
    return float(first @ second / (first.norm() * second.norm()))


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16), (1, 9)])
def test_the_numbers_are_numpy_s(shape: tuple[int, int]) -> None:
    """Stable ranks, spread and ratio by numpy's norms and singular values, in float64."""
    weight, update = draw(*shape), 0.01 * draw(*shape, seed=1)
    found = matrix_geometry(weight, update)
    w, u = weight.double().numpy(), update.double().numpy()
    values = np.linalg.svd(u, compute_uv=False)
    assert found == {
        "stable_rank": pytest.approx(np.linalg.norm(w) ** 2 / np.linalg.norm(w, 2) ** 2, rel=1e-5),
        "update_stable_rank": pytest.approx(np.linalg.norm(u) ** 2 / np.linalg.norm(u, 2) ** 2, rel=1e-5),
        "update_spread": pytest.approx(values.std() / values.mean(), rel=1e-5),
        "update_ratio": pytest.approx(np.linalg.norm(u) / np.linalg.norm(w), rel=1e-5),
    }


def test_an_orthogonal_update_has_no_spread() -> None:
    """All singular values alike: spread 0, and the stable rank is the whole rank. Of rank 1: 1."""
    orthogonal = torch.linalg.qr(draw(32, 12)).Q * 0.3
    found = matrix_geometry(draw(32, 12, seed=1), orthogonal)
    assert found["update_spread"] == pytest.approx(0, abs=1e-5)
    assert found["update_stable_rank"] == pytest.approx(12, rel=1e-5)
    one = matrix_geometry(torch.outer(draw(32), draw(12)), torch.outer(draw(32), draw(12)))
    assert one["stable_rank"] == pytest.approx(1, rel=1e-5)
    assert one["update_spread"] == pytest.approx(math.sqrt(11), rel=1e-4)  # one value of 12: sd / mean


def test_a_matrix_of_zeros_gives_none_and_no_nan() -> None:
    """W_o begins at zero, and an update may be none."""
    zero = torch.zeros(8, 4)
    assert matrix_geometry(zero, zero) == dict.fromkeys(
        ("stable_rank", "update_stable_rank", "update_spread", "update_ratio")
    )
    found = matrix_geometry(zero, draw(8, 4))
    assert (found["stable_rank"], found["update_ratio"]) == (None, None)
    assert found["update_stable_rank"] is not None
    assert matrix_geometry(draw(8, 4), zero)["update_ratio"] == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38])
def test_a_matrix_that_is_not_finite_gives_none(bad: float) -> None:
    """Nor does one whose norm is none in float32 give NaN or infinity."""
    whole = draw(8, 4)
    broken = whole.clone()
    broken[1, 2] = bad
    for pair in ((broken, whole), (whole, broken), (broken, broken)):
        assert all(value is None or math.isfinite(value) for value in matrix_geometry(*pair).values())
    assert matrix_geometry(whole, broken)["stable_rank"] == matrix_geometry(whole, whole)["stable_rank"]
    if not math.isfinite(bad):
        assert matrix_geometry(whole, broken)["update_spread"] is None


def test_what_is_measured_is_not_touched() -> None:
    """bfloat16 and float32 parameters that want gradients: the same values, and no graph."""
    for dtype in (torch.float32, torch.bfloat16):
        weight = draw(8, 4).to(dtype).requires_grad_()
        before = weight.detach().clone()
        random = torch.random.get_rng_state()
        matrix_geometry(weight, weight)
        assert not sketch("w", weight).requires_grad
        assert torch.equal(weight.detach(), before)
        assert weight.grad is None
        assert torch.equal(torch.random.get_rng_state(), random)


def test_a_sketch_is_a_function_of_name_and_shape() -> None:
    """Equal for equal (name, shape, update); other signs and places for another name or shape; linear in the update."""
    a, b = draw(30, 20), draw(30, 20, seed=1)
    assert sketch("w", a).shape == (SKETCH,)
    assert sketch("w", a).dtype == torch.float32
    assert torch.equal(sketch("w", a), sketch("w", a.clone()))
    assert not torch.equal(sketch("w", a), sketch("v", a))
    assert not torch.equal(sketch("w", a), sketch("w", a.view(20, 30)))
    torch.testing.assert_close(sketch("w", 2 * a - b), 2 * sketch("w", a) - sketch("w", b), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(64, 64), (256, 64), (10, 10)])
@pytest.mark.parametrize("cosine", [-0.5, 0.0, 0.3, 0.95])
def test_the_cosine_of_two_sketches_is_near_the_updates_own(cosine: float, shape: tuple[int, int]) -> None:
    """Within 4 / √1024, for 20 matrix names each."""
    for seed in range(20):
        a, other = draw(*shape, seed=seed), draw(*shape, seed=100 + seed)
        b = cosine * a / a.norm() + math.sqrt(1 - cosine**2) * other / other.norm()
        own = float((a * b).sum() / (a.norm() * b.norm()))
        assert abs(plain_sketch_cosine(f"layer{seed}", a, b) - own) < 4 / math.sqrt(SKETCH)


def test_inner_products_are_unbiased() -> None:
    """The mean over 400 names is the updates' own inner product, within 4 standard errors; signs are needed for it."""
    a, b = draw(40, 50) + 1, draw(40, 50, seed=1) + 1  # of one sign: without random signs collisions would add up
    found = [float(sketch(str(i), a) @ sketch(str(i), b)) for i in range(400)]
    error = np.std(found) / math.sqrt(len(found))
    assert abs(np.mean(found) - float((a * b).sum())) < 4 * error
    assert error < 0.05 * float((a * b).sum())
