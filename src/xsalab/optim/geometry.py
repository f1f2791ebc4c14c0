"""What an update does to a matrix: its rank, its singular values, its size beside the weight, its direction.

Muon's update is meant to have singular values near one another, so a variant that disturbs it shows in their spread.
"""

from __future__ import annotations

import hashlib
import math

import torch
from jaxtyping import Float
from torch import Tensor

SKETCH = 1024  # numbers that stand for an update; a cosine of two sketches errs by about 1/√1024 = 0.03


def matrix_geometry(weight: Float[Tensor, "m n"], update: Float[Tensor, "m n"]) -> dict[str, float | None]:
    """Of a weight before its update, and of the update as it was made (rate and decay included).

    stable_rank, update_stable_rank: ‖·‖_F² / ‖·‖₂², from 1 to min(m, n). update_spread: standard deviation over mean of
    the update's singular values, 0 for an orthogonal matrix. update_ratio: ‖update‖_F / ‖weight‖_F. None where a
    matrix is zero, or holds a number that is not finite.
    """
    values, moved = _singular(weight), _singular(update)
    return {
        "stable_rank": _ratio(values.square().sum(), values[0].square()),
        "update_stable_rank": _ratio(moved.square().sum(), moved[0].square()),
        "update_spread": _ratio(moved.std(correction=0), moved.mean()),
        "update_ratio": _ratio(moved.norm(), values.norm()),
    }


def _singular(matrix: Tensor) -> Tensor:
    """Singular values, largest first; NaN where there are none, as of a step at which training breaks down."""
    matrix = matrix.detach().float()
    if not bool(matrix.isfinite().all()):
        return torch.full((min(matrix.shape),), math.nan)
    return torch.linalg.svdvals(matrix)


def _ratio(part: Tensor, whole: Tensor) -> float | None:
    ratio = float(part / whole)
    return ratio if math.isfinite(ratio) else None


def sketch(name: str, update: Float[Tensor, "m n"], size: int = SKETCH) -> Float[Tensor, " s"]:
    """A count sketch (Charikar, Chen & Farach-Colton 2002) of an update, in float32: every entry is added, with a sign,
    to one of ``size`` numbers. Signs and places depend on the matrix's name and shape alone, so that the inner product
    of two runs' sketches is an unbiased estimate of the updates' own.
    """
    seed = int.from_bytes(hashlib.sha256(f"{name} {tuple(update.shape)}".encode()).digest()[:8], "little") >> 1
    generator = torch.Generator().manual_seed(seed)
    flat = update.detach().float().cpu().flatten()
    places = torch.randint(size, flat.shape, generator=generator)
    signs = torch.randint(2, flat.shape, generator=generator).float().mul_(2).sub_(1)
    return torch.zeros(size).index_add_(0, places, flat * signs)
