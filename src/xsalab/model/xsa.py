"""THE OPERATION: Exclusive Self-Attention (Zhai 2026, arXiv 2603.09078).

    z = y − α c v        c = ⟨y, v⟩ / ⟨v, v⟩

y is a head's attention output at one position and v the value vector of the same token: z is y without
α of its part along v. Two facts hold it in the tests: at α = 1 the output is orthogonal to the own
value, and position 0, which sees only itself, comes out exactly 0.

The strength α and the layer selection follow "Exclusive Self-Attention Beyond AdamW" (Dayapule 2026).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .attend import Attend
from .variant import QKV, Site, Variant, variant


def exclude_self(y: Tensor, v: Tensor, alpha: float | Tensor = 1.0) -> Tensor:
    """z = y − α (⟨y,v⟩/⟨v,v⟩) v.

    y (b, t, h, d); v (b, t, g, d), g dividing h: the value head that serves a query head, broadcast.
    alpha: a number, or a tensor () or (h,). Inner products and the subtraction are in float32 (float64
    stays so); the result has y's dtype. v = 0 gives z = y with finite gradients. The number 0 returns
    y itself. Raises ValueError where the shapes do not fit.
    """
    if isinstance(alpha, (int, float)) and alpha == 0:
        return y
    if y.shape[:2] != v.shape[:2] or y.shape[-1] != v.shape[-1] or y.shape[2] % v.shape[2]:
        raise ValueError(
            f"y is (b, t, h, d) and v (b, t, g, d) with g dividing h; got {tuple(y.shape)} and {tuple(v.shape)}"
        )
    if isinstance(alpha, Tensor) and alpha.ndim and alpha.shape != y.shape[2:3]:
        raise ValueError(f"alpha is a number, () or (h,) = ({y.shape[2]},); got {tuple(alpha.shape)}")
    return _ExcludeSelf.apply(y, v, alpha)


def _split(y: Tensor, v: Tensor, alpha: float | Tensor) -> tuple[Tensor, Tensor, float | Tensor]:
    """y (b,t,g,r,d), v (b,t,g,1,d) and α in the computing dtype, shaped to broadcast."""
    dtype, groups = torch.promote_types(y.dtype, torch.float32), v.shape[2]
    if isinstance(alpha, Tensor):
        alpha = alpha.to(dtype)
        alpha = alpha.view(groups, -1, 1) if alpha.ndim else alpha
    return y.to(dtype).unflatten(2, (groups, -1)), v.to(dtype).unsqueeze(3), alpha


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """⟨a, b⟩ over the last axis, kept. One operation for all of them: ⟨y,v⟩ = ⟨v,v⟩ exactly where y = v."""
    return (a * b).sum(-1, keepdim=True)


class _ExcludeSelf(torch.autograd.Function):
    """Keeps y, v and α alone for its backward, and stays finite where differentiating the quotient overflows.

    With g = ∂L/∂z, n = ⟨v,v⟩, d = ⟨g,v⟩/n:
    ∂L/∂y = g − α d v;  ∂L/∂v = −α (d y + c g − 2 c (d v));  ∂L/∂α = −Σ c ⟨g,v⟩.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, v: Tensor, alpha: float | Tensor) -> Tensor:  # pyright: ignore
        ctx.save_for_backward(y, v, *([alpha] if isinstance(alpha, Tensor) else []))
        ctx.alpha = None if isinstance(alpha, Tensor) else alpha
        yf, vf, strength = _split(y, v, alpha)
        # The floor is the smallest normal number: a larger one would leave part of a short v in place.
        c = _dot(yf, vf) / _dot(vf, vf).clamp_min(torch.finfo(yf.dtype).tiny)
        return torch.addcmul(yf, strength * c, vf, value=-1).flatten(2, 3).to(y.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        y, v, *rest = ctx.saved_tensors
        alpha = rest[0] if rest else ctx.alpha
        yf, vf, strength = _split(y, v, alpha)
        g = grad.to(yf.dtype).unflatten(2, (v.shape[2], -1))
        tiny = torch.finfo(yf.dtype).tiny
        norm = _dot(vf, vf)
        n = norm.clamp_min(tiny)
        gv = _dot(g, vf)
        c, d = _dot(yf, vf) / n, gv / n
        grad_y = grad_v = grad_alpha = None
        if ctx.needs_input_grad[0]:
            grad_y = torch.addcmul(g, strength * d, vf, value=-1).flatten(2, 3).to(y.dtype)
        if ctx.needs_input_grad[1]:
            # c (g − 2 (d v)) + d y, in as few passes; below the floor n is a constant and 2 (d v), its derivative, is 0
            inner = torch.addcmul(g, torch.where(norm > tiny, 2 * d, 0.0), vf, value=-1)
            grad_v = (inner.mul_(-strength * c).addcmul_(-strength * d, yf)).sum(3).to(v.dtype)
        if isinstance(alpha, Tensor) and ctx.needs_input_grad[2]:
            each = -(c * gv).sum((0, 1)).view(-1)  # (h,)
            grad_alpha = (each if alpha.ndim else each.sum()).to(alpha.dtype)
        return grad_y, grad_v, grad_alpha


class _Strength(nn.Module):
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


@variant("xsa")
class Exclusive(Variant):
    """Attention output without α of its part along the token's own value.

    ``against``: "mixed" (the value that attention mixes, value embedding included) or "projected"
    (the plain W_v x).
    """

    def __init__(self, site: Site, alpha: Any = 1.0, against: str = "mixed", allow_any_alpha: bool = False) -> None:
        super().__init__(site)
        if not isinstance(allow_any_alpha, bool):
            raise ValueError(f"allow_any_alpha = {allow_any_alpha!r}: use true or false")
        if against not in ("mixed", "projected"):
            raise ValueError(f"against = {against!r}: use 'mixed' (value embedding included) or 'projected'")
        self.against = against
        self.strength = _Strength(alpha, site, allow_any_alpha)

    def forward(self, t: QKV, attend: Attend) -> Tensor:
        y = attend(t.q, t.k, t.v)
        return exclude_self(y, t.v if self.against == "mixed" else t.v_projected, self.strength())

    def set_progress(self, fraction: float) -> None:
        self.strength.set_progress(fraction)

    def extra_flops(self) -> int:
        return 0 if self.strength.fixed == 0 else 7 * self.site.heads * self.site.head_dim

    def logged(self) -> dict[str, float]:
        if self.strength.fixed is not None:
            return {}
        with torch.no_grad():
            alpha = torch.as_tensor(self.strength()).reshape(-1).tolist()
        if len(alpha) == 1:
            return {"alpha": alpha[0]}
        return {f"alpha.{head}": value for head, value in enumerate(alpha)}
