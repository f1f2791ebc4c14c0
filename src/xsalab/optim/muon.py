"""Muon as functions over stacks of equal matrices (k, m, n), m outputs and n inputs.

Two forms. ``muon_update`` is nanochat's: rows to their root-mean norm, five Polar Express steps (arXiv 2505.16932),
renormalisation, variance reduction (NorMuon, arXiv 2510.05491). ``plain_muon_update`` is Newton–Schulz as in
torch.optim.Muon, which is its oracle. ``nesterov_`` goes before both. csrc/muon.cpp carries out a whole step, matrix
by matrix; these functions are its oracle.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ..model import native

Coefficients = Sequence[tuple[float, float, float]]

POLAR_EXPRESS: Coefficients = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
NEWTON_SCHULZ: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)

# (safety, floor): the iteration starts from G / (safety · ‖G‖ + floor)
START, PLAIN_START = (1.01, 1e-6), (1.0, 1e-7)


STACK_ENTRIES = 2**22  # of the matrices that PyTorch works on at once on a CPU: its shared cache still holds them


def flat(coefficients: Coefficients) -> list[float]:
    """The numbers of all steps one after the other, as the kernels take them."""
    return [number for step in coefficients for number in step]


def orthogonalize(
    g: Float[Tensor, "k m n"],
    coefficients: Coefficients = POLAR_EXPRESS,
    *,
    start: tuple[float, float] = START,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "k m n"]:
    """The matrices with all singular values brought near 1, by X ← aX + (bA + cA²)X with A = XXᵀ.

    A step for each (a, b, c). The iteration runs in ``dtype`` on the wide side; the result has it too.
    A zero matrix gives zero. In bfloat16 on the CPU csrc/polar.cpp does it, symmetric products once.
    """
    x = g.to(dtype)
    if native.takes(x):
        return torch.ops.xsalab.polar(x, flat(coefficients), *start)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    safety, floor = start
    x = x / (safety * x.norm(dim=(-2, -1), keepdim=True) + floor)
    for a, b, c in coefficients:
        square = x @ x.mT
        polynomial = torch.baddbmm(square, square, square, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x


def stacks(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """The matrices by shape; on a CPU in stacks of at most ``STACK_ENTRIES`` numbers, or one matrix."""
    by_shape: dict[torch.Size, list[Tensor]] = {}
    for parameter in parameters:
        by_shape.setdefault(parameter.shape, []).append(parameter)
    found = []
    for shape, members in by_shape.items():
        size = max(1, STACK_ENTRIES // shape.numel()) if members[0].device.type == "cpu" else len(members)
        found += [members[start : start + size] for start in range(0, len(members), size)]
    return found


def nesterov_(
    gradients: list[Float[Tensor, "m n"]], momenta: list[Float[Tensor, "m n"]], momentum: float
) -> Float[Tensor, "k m n"]:
    """Nesterov's direction in float32, stacked; ``momenta`` change in place."""
    torch._foreach_lerp_(momenta, gradients, 1 - momentum)
    return torch.stack(torch._foreach_lerp(gradients, momenta, momentum))


def muon_update(
    g: Float[Tensor, "k m n"],
    variance_buffer: Float[Tensor, "k p q"],
    *,
    beta2: float,
    coefficients: Coefficients = POLAR_EXPRESS,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "k m n"]:
    """nanochat's update in float32, of Nesterov's direction; the variance changes in place, and g may be overwritten.

    ``variance_buffer`` holds a value a row (k, m, 1) where m ≥ n, a value a column (k, 1, n) otherwise.
    """
    rows, columns = g.shape[-2:]
    # 2. rows scaled to their root-mean norm
    size = g.norm(dim=-1, keepdim=True)
    g = g.mul_(size.norm(dim=-2, keepdim=True) / math.sqrt(rows) / size.clamp_min(1e-6))
    # 3, 4. the polar factor, renormalised. Behind a matrix that starts at zero the first gradient is
    # exactly zero: the floors make the update 0 there, not NaN. Everything from here on is one factor a line,
    # a row or a column, found from the lines' sums of squares.
    x = orthogonalize(g, coefficients, dtype=dtype).float()
    squares = x.square().sum(dim=-1 if rows >= columns else -2, keepdim=True)
    norm = squares.sum(dim=(-2, -1), keepdim=True).sqrt()
    renormal = math.sqrt(min(rows, columns)) / norm.clamp_min(1e-10)
    squares = squares * renormal.square()
    # 5. variance reduction, norm kept
    variance_buffer.lerp_(squares / min(rows, columns), 1 - beta2)
    factor = variance_buffer.clamp_min(1e-10).rsqrt()
    reduced = (squares * factor.square()).sum(dim=(-2, -1), keepdim=True).sqrt()
    return x.mul_(factor * (renormal * (renormal * norm / reduced.clamp_min(1e-10))))


def plain_muon_update(
    g: Float[Tensor, "k m n"],
    *,
    coefficients: tuple[float, float, float] = NEWTON_SCHULZ,
    steps: int = 5,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "k m n"]:
    """torch.optim.Muon's, of Nesterov's direction: Newton–Schulz with one set of coefficients. In ``dtype``."""
    return orthogonalize(g, [coefficients] * steps, start=PLAIN_START, dtype=dtype)


def rate_factor(rows: int, columns: int) -> float:
    """√max(1, m/n): the factor on Muon's rate for a matrix of m outputs and n inputs."""
    return math.sqrt(max(1.0, rows / columns))


def cautious_decay_(
    weights: list[Float[Tensor, "m n"]], updates: Float[Tensor, "k m n"], rate: float, decay: float
) -> None:
    """W ← W − rate · X − rate · decay · W where X · W ≥ 0 elementwise, in place; ``updates`` may be overwritten."""
    if decay:
        pull = torch.stack(weights)
        updates.add_(pull.mul_(updates * pull >= 0), alpha=decay)
    torch._foreach_sub_(weights, updates.unbind(), alpha=rate)
