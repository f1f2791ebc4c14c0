"""The strength α of XSA at one layer: fixed, scheduled over the run, or learned, in the terms of a recipe."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .variant import Site


class Strength(nn.Module):
    """α of one layer: fixed, scheduled over the run, or learned per layer or per head."""

    value: Tensor  # of a schedule: () in float32, so that a compiled step sees a tensor and no new number

    def __init__(self, alpha: Any, site: Site, allow_any: bool) -> None:
        super().__init__()
        self.fixed: float | None = None
        self.ramp: tuple[float, float, float, float] | None = None
        self.squash = ""
        if isinstance(alpha, (int, float)) and not isinstance(alpha, bool):
            self.fixed = _in_range("alpha", alpha, allow_any)
        elif isinstance(alpha, Sequence) and not isinstance(alpha, str):
            if len(alpha) != site.depth:
                count = f"{len(alpha)} numbers for {site.depth} layers"
                raise ValueError(f"alpha = {list(alpha)}: {count}; give one a layer")
            self.fixed = _in_range(f"alpha[{site.layer}]", alpha[site.layer], allow_any)
        elif isinstance(alpha, Mapping) and "learned" in alpha:
            self._learn(alpha, site)
        elif isinstance(alpha, Mapping) and {"from", "to"} <= set(alpha):
            self._schedule(alpha, allow_any)
        else:
            raise ValueError(
                f"alpha = {alpha!r}: give a number, one number a layer, {{ from = 0, to = 1, between = [0.1, 0.4] }} "
                'or { learned = "tanh", per = "head", start = 0.0 }'
            )

    def _learn(self, alpha: Mapping[str, Any], site: Site) -> None:
        _only(alpha, {"learned", "per", "start"})
        self.squash, per, start = alpha["learned"], alpha.get("per", "head"), alpha.get("start", 0.5)
        low = -1.0 if self.squash == "tanh" else 0.0
        if self.squash not in ("sigmoid", "tanh"):
            raise ValueError(f"alpha.learned = {self.squash!r}: use 'sigmoid', in (0, 1), or 'tanh', in (−1, 1)")
        if per not in ("head", "layer"):
            raise ValueError(f"alpha.per = {per!r}: use 'head' or 'layer'")
        if not (isinstance(start, (int, float)) and low < start < 1):
            between = f"strictly between {low:g} and 1 with {self.squash}"
            raise ValueError(f"alpha.start = {start!r}: it is α itself, {between}")
        raw = math.atanh(start) if self.squash == "tanh" else math.log(start / (1 - start))
        self.raw = nn.Parameter(torch.full((site.heads if per == "head" else 1,), raw))

    def _schedule(self, alpha: Mapping[str, Any], allow_any: bool) -> None:
        _only(alpha, {"from", "to", "between"})
        match alpha.get("between", (0.0, 1.0)):
            case [float() | int() as begin, float() | int() as end] if 0 <= begin < end <= 1:
                pass
            case other:
                raise ValueError(f"alpha.between = {other!r}: two fractions of the run, 0 ≤ first < second ≤ 1")
        low, high = (_in_range(f"alpha.{key}", alpha[key], allow_any) for key in ("from", "to"))
        self.ramp = (low, high, begin, end)
        self.register_buffer("value", torch.tensor(float(low)))

    def set_progress(self, fraction: float) -> None:
        if self.ramp is not None:
            low, high, begin, end = self.ramp
            self.value.fill_(low + (high - low) * min(max((fraction - begin) / (end - begin), 0.0), 1.0))

    def forward(self) -> float | Tensor:
        if self.fixed is not None:
            return self.fixed
        if self.ramp is not None:
            return self.value
        squashed = self.raw.tanh() if self.squash == "tanh" else self.raw.sigmoid()
        return squashed if squashed.shape[0] > 1 else squashed[0]


def _in_range(name: str, alpha: Any, allow_any: bool) -> float:
    if not isinstance(alpha, (int, float)) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise ValueError(f"{name} = {alpha!r}: must be a number")
    if not allow_any and not 0 <= alpha <= 1:
        raise ValueError(f"{name} = {alpha}: must be in [0, 1]; allow_any_alpha = true permits other strengths")
    return float(alpha)


def _only(table: Mapping[str, Any], known: set[str]) -> None:
    if unknown := set(table) - known:
        raise ValueError(f"alpha.{sorted(unknown)[0]} is not known; known: {', '.join(sorted(known))}")
