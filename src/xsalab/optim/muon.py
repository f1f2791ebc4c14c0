"""Muon as pure functions over stacks of equal matrices (k, m, n), m outputs and n inputs.

Two forms. ``muon_update`` is nanochat's: momentum, rows to their root-mean norm, five Polar Express steps
(arXiv 2505.16932), renormalisation, variance reduction (NorMuon, arXiv 2510.05491). ``plain_muon_update``
is Newton–Schulz as in torch.optim.Muon, which is its oracle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

Coefficients = Sequence[tuple[float, float, float]]

POLAR_EXPRESS: Coefficients = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
NEWTON_SCHULZ: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)


def orthogonalize(
    g: Float[Tensor, "k m n"],
    coefficients: Coefficients = POLAR_EXPRESS,
    *,
    safety: float = 1.01,
    floor: float = 1e-6,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "k m n"]:
    """The matrices with all singular values brought near 1, by X ← aX + (bA + cA²)X with A = XXᵀ.

    A step for each (a, b, c). The iteration runs in ``dtype`` on the wide side; the result has it too.
    A zero matrix gives zero.
    """
    x = g.to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (safety * x.norm(dim=(-2, -1), keepdim=True) + floor)
    for a, b, c in coefficients:
        square = x @ x.mT
        polynomial = torch.baddbmm(square, square, square, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x


def muon_update(
    gradient: Float[Tensor, "k m n"],
    momentum_buffer: Float[Tensor, "k m n"],
    variance_buffer: Float[Tensor, "k p q"],
    *,
    momentum: float,
    beta2: float,
    coefficients: Coefficients = POLAR_EXPRESS,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "k m n"]:
    """nanochat's update direction in float32; the two buffers change in place.

    ``variance_buffer`` holds a value a row (k, m, 1) where m ≥ n, a value a column (k, 1, n) otherwise.
    """
    rows, columns = gradient.shape[-2:]
    momentum_buffer.lerp_(gradient, 1 - momentum)
    g = gradient.lerp(momentum_buffer, momentum)  # Nesterov
    # 2. rows scaled to their root-mean norm
    norm = g.norm(dim=(-2, -1), keepdim=True)
    g = g * (norm / math.sqrt(rows) / g.norm(dim=-1, keepdim=True).clamp_min(1e-6))
    # 3, 4. the polar factor, renormalised. Behind a matrix that starts at zero the first gradient is
    # exactly zero: the floors make the update 0 there, not NaN.
    x = orthogonalize(g, coefficients, dtype=dtype).float()
    x = x * (math.sqrt(min(rows, columns)) / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-10))
    # 5. variance reduction, norm kept
    size = x.norm(dim=(-2, -1), keepdim=True)
    variance_buffer.lerp_(x.square().mean(dim=-1 if rows >= columns else -2, keepdim=True), 1 - beta2)
    x = x / variance_buffer.clamp_min(1e-10).sqrt()
    return x * (size / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-10))


def plain_muon_update(
    gradient: Float[Tensor, "k m n"],
    momentum_buffer: Float[Tensor, "k m n"],
    *,
    momentum: float,
    coefficients: tuple[float, float, float] = NEWTON_SCHULZ,
    steps: int = 5,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "k m n"]:
    """torch.optim.Muon's direction: Nesterov momentum, then Newton–Schulz with one set of coefficients."""
    momentum_buffer.lerp_(gradient, 1 - momentum)
    g = gradient.lerp(momentum_buffer, momentum)
    return orthogonalize(g, [coefficients] * steps, safety=1.0, floor=1e-7, dtype=dtype).float()


def rate_factor(rows: int, columns: int) -> float:
    """√max(1, m/n): the factor on Muon's rate for a matrix of m outputs and n inputs."""
    return math.sqrt(max(1.0, rows / columns))


def cautious_decay_(weight: Tensor, update: Tensor, rate: float, decay: float) -> None:
    """W ← W − rate · X − rate · decay · W where X · W ≥ 0 elementwise, in place."""
    if decay:
        mask = (update * weight >= 0).to(weight.dtype)
        weight.sub_(rate * update + (rate * decay) * weight * mask)
    else:
        weight.sub_(update, alpha=rate)
