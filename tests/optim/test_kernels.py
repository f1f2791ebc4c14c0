"""The optimizer's C++ kernels against PyTorch: polar factors, a step of Muon, a step of AdamW."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from xsalab.model import native
from xsalab.optim import Hybrid, OptimConfig, orthogonalize
from xsalab.optim.adamw import adamw_
from xsalab.optim.hybrid import GROUPS, Rates
from xsalab.optim.muon import POLAR_EXPRESS

pytestmark = pytest.mark.skipif(bool(native.reason()), reason=native.reason() or "kernels are there")

RATES = Rates(dict.fromkeys(GROUPS, 0.02), matrix_weight_decay=0.1)
SHAPES = [(32, 32), (1, 12), (12, 1), (4, 12), (33, 65), (65, 33), (70, 70), (64, 200), (1100, 40), (160, 160)]


class Matrices(nn.Module):
    """Matrices under names that Muon claims."""

    def __init__(self, matrices: list[Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ParameterList(matrix.clone() for matrix in matrices)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def error(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).norm() / exact.norm())


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --- polar factors


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_polar_factor_is_as_good_as_pytorchs(shape: tuple[int, int]) -> None:
    """Both iterate in bfloat16, with the same roundings in another order, so they differ by as much as each is off
    from the iteration in float64; ours may be off by no more than PyTorch's (a fifth for luck, and a rounding)."""
    g = draw(12, *shape).bfloat16()
    exact = orthogonalize(g.double(), dtype=torch.float64)
    with native.plain():
        plain = orthogonalize(g, dtype=torch.bfloat16)
    ours = orthogonalize(g, dtype=torch.bfloat16)
    assert (ours.dtype, ours.shape) == (torch.bfloat16, g.shape)
    assert error(ours, exact) <= 1.2 * error(plain, exact) + 2**-8


@pytest.mark.parametrize("shape", [(33, 65), (65, 33), (96, 96)], ids=str)
def test_one_step_is_rounded_like_pytorchs(shape: tuple[int, int]) -> None:
    """One step has four roundings (start, A, bA + cA², X), each 2⁻⁹ of what it rounds: no room to hide a wrong sum."""
    g, steps = draw(2, *shape).bfloat16(), [(2.0, -1.5, 0.5)]
    exact = orthogonalize(g.double(), steps, dtype=torch.float64)
    assert error(orthogonalize(g, steps, dtype=torch.bfloat16), exact) < 4 * 2**-9


def test_a_zero_matrix_stays_zero_and_the_others_do_not_see_it() -> None:
    """F028, F032."""
    g = draw(3, 40, 70).bfloat16()
    g[1] = 0
    ours = orthogonalize(g, dtype=torch.bfloat16)
    assert not ours[1].any()  # NaN counts as something
    for i in (0, 2):
        assert torch.equal(ours[i], orthogonalize(g[i : i + 1], dtype=torch.bfloat16)[0])


def test_what_is_not_contiguous_is_read_as_it_is_meant() -> None:
    g = draw(2, 40, 70).bfloat16()
    turned = orthogonalize(g.mT, dtype=torch.bfloat16)
    assert torch.equal(turned, orthogonalize(g.mT.contiguous(), dtype=torch.bfloat16))
    assert orthogonalize(g[:0], dtype=torch.bfloat16).shape == (0, 40, 70)


@pytest.mark.parametrize("count", [1, 5])
def test_threads_change_no_bit(count: int) -> None:
    """One matrix is shared by the threads, five are dealt out; alone, a thread does the same."""
    g = draw(count, 100, 200).bfloat16()
    with threads(1):
        alone = orthogonalize(g, dtype=torch.bfloat16)
    for number in (2, 3):
        with threads(number):
            assert torch.equal(orthogonalize(g, dtype=torch.bfloat16), alone)


def test_float32_is_not_taken() -> None:
    """F041."""
    g = draw(1, 40, 40)
    with native.plain():
        want = orthogonalize(g)
    assert torch.equal(orthogonalize(g), want)


# --- a step of Muon


def steps_of(kind: str, dtype: torch.dtype, gradients: list[list[Tensor | None]], starts: list[Tensor]) -> Hybrid:
    """The optimizer after a step for each list of gradients."""
    model = Matrices(starts)
    optimizer = Hybrid(model, OptimConfig(kind=kind), RATES, dtype)
    for each in gradients:
        for parameter, gradient in zip(model.parameters(), each, strict=True):
            parameter.grad = gradient
        optimizer.step()
    return optimizer


def weights(optimizer: Hybrid) -> list[Tensor]:
    return [parameter.detach() for parameter in optimizer.param_groups[0]["params"]]


@pytest.mark.parametrize("kind", ["hybrid", "muon"])
def test_a_step_is_as_good_as_pytorchs(kind: str) -> None:
    """Three steps on all shapes at once, against float32; a matrix of zeros, and one without gradient now and then.

    The movement of each matrix in bfloat16 may be off by no more than PyTorch's bfloat16 is (a fifth for luck).
    Where that is a few numbers alone the luck is larger: there 0.1, which no mistake of a formula stays below.
    """
    starts = [0.1 * draw(*shape, seed=i) for i, shape in enumerate(SHAPES)]
    gradients: list[list[Tensor | None]] = [
        [1e-3 * draw(*shape, seed=100 * step + i) for i, shape in enumerate(SHAPES)] for step in range(1, 4)
    ]
    gradients[0][4] = torch.zeros(SHAPES[4])
    gradients[1][5] = None
    with native.plain():
        exact = steps_of(kind, torch.float32, gradients, starts)
        plain = steps_of(kind, torch.bfloat16, gradients, starts)
    ours = steps_of(kind, torch.bfloat16, gradients, starts)
    for start, want, theirs, got in zip(starts, *map(weights, (exact, plain, ours)), strict=True):
        moved = (want - start).double()
        least = 0.1 if start.numel() < 1000 else 2**-8
        assert error(got - start, moved) <= max(1.2 * error(theirs - start, moved), least), start.shape
    states = exact.named_state()
    assert ours.named_state().keys() == states.keys()
    for name, tensor in ours.named_state().items():
        # the momentum is float32 throughout; the variance is a mean of squares of entries off by a hundredth
        rtol, atol = (1e-5, 1e-9) if name.endswith("momentum") else (0.15, 1e-4)
        torch.testing.assert_close(tensor, states[name], rtol=rtol, atol=atol)


@pytest.mark.parametrize("shape", [(48, 48), (96, 40), (40, 96)], ids=str)
def test_plain_muon_is_torchs(shape: tuple[int, int]) -> None:
    """Five steps; torch's own bfloat16 iteration is as far from float32 as ours, a hundredth of the movement."""
    starts = [draw(*shape, seed=i) for i in range(3)]
    gradients: list[list[Tensor | None]] = [[draw(*shape, seed=10 * s + i) for i in range(3)] for s in range(1, 6)]
    ours = weights(steps_of("muon", torch.bfloat16, gradients, starts))
    theirs = Matrices(starts)
    oracle = torch.optim.Muon(theirs.parameters(), lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=True)
    for each in gradients:
        for parameter, gradient in zip(theirs.parameters(), each, strict=True):
            parameter.grad = gradient
        oracle.step()
    for start, got, want in zip(starts, ours, theirs.parameters(), strict=True):
        assert error(got - start, (want.detach() - start).double()) < 0.03


@pytest.mark.parametrize("shape", ["square", "tall", "wide"])
def test_it_follows_nanochats_muon(shared_data: Path, shape: str) -> None:
    """Real steps of nanochat in float32: ours in bfloat16 move the same way to a few hundredths, as PyTorch's do."""
    folder = shared_data / "nanochat_d4"
    if not folder.is_dir():
        pytest.skip(f"no nanochat run at {folder}")
    with np.load(folder / "optimizer.npz") as arrays:
        states, gradients = (torch.from_numpy(arrays[f"muon_{shape}_{what}"]) for what in ("params", "grads"))
    starts, moved = list(states[0]), states[-1] - states[0]
    how: list[list[Tensor | None]] = [list(each) for each in gradients]
    off = []
    for switch in (native.plain, contextmanager(lambda: iter([None]))):
        with switch():
            optimizer = steps_of("hybrid", torch.bfloat16, how, starts)
        off.append(error(torch.stack(weights(optimizer)) - states[0], moved.double()))
    assert off[1] <= 1.2 * off[0]
    assert off[1] < 0.05


def test_threads_change_no_bit_of_a_step() -> None:
    starts = [draw(*shape, seed=i) for i, shape in enumerate(SHAPES)]
    gradients: list[list[Tensor | None]] = [[draw(*shape, seed=50 + i) for i, shape in enumerate(SHAPES)]]
    results = []
    for number in (1, 2, 5):
        with threads(number):
            results.append(weights(steps_of("hybrid", torch.bfloat16, gradients, starts)))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("kind", ["hybrid", "muon"])
def test_a_resumed_optimizer_goes_on_to_the_bit(kind: str) -> None:
    shapes = [(40, 70), (40, 70), (33, 33)]
    starts = [draw(*shape, seed=i) for i, shape in enumerate(shapes)]
    gradients: list[list[Tensor | None]] = [
        [draw(*shape, seed=10 * step + i) for i, shape in enumerate(shapes)] for step in range(1, 4)
    ]
    whole = weights(steps_of(kind, torch.bfloat16, gradients, starts))
    half = steps_of(kind, torch.bfloat16, gradients[:2], starts)
    rest = steps_of(kind, torch.bfloat16, [], weights(half))
    rest.load_named_state(half.named_state())
    for parameter, gradient in zip(rest.param_groups[0]["params"], gradients[2], strict=True):
        parameter.grad = gradient
    rest.step()
    assert all(torch.equal(a, b) for a, b in zip(weights(rest), whole, strict=True))


def test_a_gradient_that_is_not_contiguous_is_read_as_it_is_meant() -> None:
    starts, gradient = [draw(40, 70)], draw(70, 40, seed=1)
    turned, straight = (
        weights(steps_of("hybrid", torch.bfloat16, [[each]], starts))
        for each in (gradient.mT, gradient.mT.contiguous())
    )
    assert torch.equal(turned[0], straight[0])


# --- a step of AdamW

update_ = partial(adamw_, lr=0.03, betas=(0.8, 0.96), eps=1e-10, decay=0.2, kernel=True)


@pytest.mark.parametrize("how", ["kernel", "torch"])
def test_adamw_is_torchs(how: str) -> None:
    """Three steps on lists of odd shapes, a scalar among them, against the unfused torch.optim.AdamW."""
    shapes = [(7, 5), (100, 33), (), (16,), (1,)]
    ours, theirs = ([draw(*shape, seed=i) for i, shape in enumerate(shapes)] for _ in range(2))
    means, squares = ([torch.zeros_like(each) for each in ours] for _ in range(2))
    oracle = torch.optim.AdamW(theirs, lr=0.03, betas=(0.8, 0.96), eps=1e-10, weight_decay=0.2, foreach=False)
    for step in range(1, 4):
        gradients = [draw(*shape, seed=10 * step + i) for i, shape in enumerate(shapes)]
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient
        oracle.step()
        if how == "kernel":
            update_(ours, gradients, means, squares, [step] * len(shapes))
        else:
            with native.plain():
                update_(ours, gradients, means, squares, [step] * len(shapes))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_adamw_of_a_bfloat16_table_is_rounded_once() -> None:
    """F042: as in float32 and then rounded, to the bit but for float32's last digits, which move few roundings."""
    half, gradient = draw(50, 33).bfloat16(), draw(50, 33, seed=1).bfloat16()
    full, moments = half.float(), [[torch.zeros(50, 33)] for _ in range(4)]
    for step in (1, 2):
        before = half.float()
        full.copy_(before)
        update_([half], [gradient], moments[0], moments[1], [step])
        update_([full], [gradient.float()], moments[2], moments[3], [step])
        assert torch.equal(half, full.bfloat16())
        assert (half.float() - before).abs().max() > 0.01
    torch.testing.assert_close(moments[0] + moments[1], moments[2] + moments[3], rtol=0, atol=0)


def test_each_parameter_has_its_own_count_of_steps() -> None:
    """At t = 1 the corrected moments are the gradient's own: a step of lr · sign, whatever the betas."""
    parameters = [torch.zeros(20), torch.zeros(20)]
    means, squares = ([torch.zeros(20), torch.full((20,), 0.5)] for _ in range(2))
    gradient = draw(20)
    update_(parameters, [gradient, gradient], means, squares, [1, 7])
    torch.testing.assert_close(parameters[0], -0.03 * gradient.sign())
    mean, square = 0.5 * 0.8 + 0.2 * gradient, 0.5 * 0.96 + 0.04 * gradient**2
    want = -0.03 * (mean / (1 - 0.8**7)) / (square / (1 - 0.96**7)).sqrt()
    torch.testing.assert_close(parameters[1], want)


def test_what_does_not_fit_is_refused() -> None:
    matrix = torch.zeros(4, 4)
    how = (0.1, 0.1, 0.9, 0.9, [number for step in POLAR_EXPRESS for number in step], 1.0, 1e-6)
    with pytest.raises(RuntimeError, match="lists of different lengths"):
        torch.ops.xsalab.muon_([matrix], [], [matrix], [], *how)
    with pytest.raises(RuntimeError, match="gradient"):
        torch.ops.xsalab.muon_([matrix], [torch.zeros(4, 5)], [matrix.clone()], [], *how)
    with pytest.raises(RuntimeError, match="variance"):
        torch.ops.xsalab.muon_([matrix], [matrix.clone()], [matrix.clone()], [torch.zeros(1, 4)], *how)
    with pytest.raises(RuntimeError, match="three coefficients"):
        torch.ops.xsalab.polar(torch.zeros(1, 4, 4, dtype=torch.bfloat16), [1.0], 1.0, 1e-6)
    double = [torch.zeros(3, dtype=torch.float64)]
    with pytest.raises(RuntimeError, match="float32 or bfloat16"):
        torch.ops.xsalab.adamw_(double, double, [torch.zeros(3)], [torch.zeros(3)], [1], 0.1, 0.8, 0.9, 1e-10, 0.0)
