"""THE OPERATION: Exclusive Self-Attention (Zhai 2026, arXiv 2603.09078).

    z = y − α c v        c = ⟨y, v⟩ / ⟨v, v⟩

y is a head's attention output at one position and v the value vector of the same token: z is y without
α of its part along v. Two facts hold it in the tests: at α = 1 the output is orthogonal to the own
value, and position 0, which sees only itself, comes out exactly 0.

``_plain`` and ``_plain_backward`` are the formulas, and the oracle; csrc/exclude.cpp on CPUs and exclude_triton.py on
GPUs do the same in one pass.
The strength α and the layer selection follow "Exclusive Self-Attention Beyond AdamW" (Dayapule 2026).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attend import Attend
from .exclude_triton import available, exclude_backward, exclude_forward
from .layers import Linear
from .linear import input_gradient, linear, served, weight_gradient
from .native import AFTER_LOADING, takes, with_rows
from .strength import Strength
from .variant import QKV, Site, Variant, variant

WIDEST = 256  # largest head size of the kernel; it takes multiples of 32
BLOCK = 1 << 17  # elements of y that the plain form widens at a time: their float32 stays in a core's cache


def exclude_self(y: Tensor, v: Tensor, alpha: float | Tensor = 1.0) -> Tensor:
    """z = y − α (⟨y,v⟩/⟨v,v⟩) v.

    y (b, t, h, d); v (b, t, g, d), g dividing h: the value head that serves a query head, broadcast.
    alpha: a number, or a tensor () or (h,). Inner products and the subtraction are in float32 (float64
    stays so); the result has y's dtype. v = 0 gives z = y with finite gradients. The number 0 returns
    y itself. Raises ValueError where the shapes do not fit.
    """
    if isinstance(alpha, (int, float)) and alpha == 0:
        return y
    _check(y, v, alpha)
    return _ExcludeSelf.apply(y, v, alpha)


def exclude_and_project(y: Tensor, v: Tensor, alpha: float | Tensor, weight: Tensor) -> Tensor:
    """W z with z = exclude_self(y, v, alpha), to the bit, forward and backward: z is made again there and not kept.

    weight (c, h·d) in any dtype is cast to y's, as layers.Linear does -> (b, t, c). Attention keeps y and v for its
    own backward, so that XSA keeps nothing more. Raises ValueError where the shapes do not fit.
    """
    _check(y, v, alpha)
    return _ExcludeAndProject.apply(y, v, alpha, weight)


def _check(y: Tensor, v: Tensor, alpha: float | Tensor) -> None:
    if y.shape[:2] != v.shape[:2] or y.shape[-1] != v.shape[-1] or y.shape[2] % v.shape[2]:
        raise ValueError(
            f"y is (b, t, h, d) and v (b, t, g, d) with g dividing h; got {tuple(y.shape)} and {tuple(v.shape)}"
        )
    if isinstance(alpha, Tensor) and alpha.ndim and alpha.shape != y.shape[2:3]:
        raise ValueError(f"alpha is a number, () or (h,) = ({y.shape[2]},); got {tuple(alpha.shape)}")


# --- the formulas


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


def _plain(y: Tensor, v: Tensor, alpha: float | Tensor) -> Tensor:
    """z, of y's shape and dtype."""
    yf, vf, strength = _split(y, v, alpha)
    # The floor is the smallest normal number: a larger one would leave part of a short v in place.
    c = _dot(yf, vf) / _dot(vf, vf).clamp_min(torch.finfo(yf.dtype).tiny)
    return torch.addcmul(yf, strength * c, vf, value=-1).flatten(2, 3).to(y.dtype)


def _plain_backward(grad: Tensor, y: Tensor, v: Tensor, alpha: float | Tensor, with_z: bool) -> tuple[Tensor, ...]:
    """∂L/∂y, ∂L/∂v, each head's ∂L/∂α (h,), and z again where it is asked for. Finite where differentiating the
    quotient overflows. With g = ∂L/∂z, n = ⟨v,v⟩, d = ⟨g,v⟩/n:

    ∂L/∂y = g − α d v;  ∂L/∂v = −α (d y + c g − 2 c (d v));  ∂L/∂α = −Σ c ⟨g,v⟩.
    """
    yf, vf, strength = _split(y, v, alpha)
    g = grad.to(yf.dtype).unflatten(2, (v.shape[2], -1))
    tiny = torch.finfo(yf.dtype).tiny
    norm = _dot(vf, vf)
    n = norm.clamp_min(tiny)
    gv = _dot(g, vf)
    c, d = _dot(yf, vf) / n, gv / n
    z = torch.addcmul(yf, strength * c, vf, value=-1).flatten(2, 3).to(y.dtype) if with_z else y[:0]
    grad_y = torch.addcmul(g, strength * d, vf, value=-1).flatten(2, 3).to(y.dtype)
    # c (g − 2 (d v)) + d y, in as few passes; below the floor n is a constant and 2 (d v), its derivative, is 0
    inner = torch.addcmul(g, torch.where(norm > tiny, 2 * d, 0.0), vf, value=-1)
    inner = inner.mul_(-strength * c).addcmul_(-strength * d, yf)
    grad_v = (inner.sum(3) if inner.shape[3] > 1 else inner.squeeze(3)).to(v.dtype)
    return grad_y, grad_v, -(c * gv).sum((0, 1)).view(-1), z


# --- who does it: the kernels where they are there, else the formulas, of narrow numbers a block of tokens at a time


def _by_kernel(y: Tensor, v: Tensor) -> bool:
    return takes(y, v) and y.shape[-1] % 32 == 0 and y.shape[-1] <= WIDEST


def _by_block(y: Tensor) -> bool:
    return y.device.type == "cpu" and y.element_size() == 2 and y.numel() > BLOCK and not torch.compiler.is_compiling()


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same tokens of each (b, t, heads, d) tensor, as (1, tokens, heads, d) views; the first gives the size."""
    tokens = max(1, BLOCK // tensors[0].shape[2:].numel())
    return zip(*(x.flatten(0, 1).unsqueeze(0).split(tokens, dim=1) for x in tensors), strict=True)


def _forward(y: Tensor, v: Tensor, alpha: float | Tensor) -> Tensor:
    if available(y):
        return exclude_forward(y, v, alpha)
    if _by_kernel(y, v):
        return torch.ops.xsalab.exclude(with_rows(y), with_rows(v), torch.as_tensor(alpha, dtype=torch.float32))
    if not _by_block(y):
        return _plain(y, v, alpha)
    z = y.new_empty(y.shape)
    for z_part, y_part, v_part in _blocks(z, y, v):
        z_part.copy_(_plain(y_part, v_part, alpha))
    return z


def _backward(grad: Tensor, y: Tensor, v: Tensor, alpha: float | Tensor, with_z: bool) -> tuple[Tensor, ...]:
    """As ``_plain_backward``."""
    if available(y):
        return exclude_backward(grad, y, v, alpha, with_z)
    if _by_kernel(y, v):
        strength = torch.as_tensor(alpha, dtype=torch.float32)
        return torch.ops.xsalab.exclude_backward(with_rows(grad), with_rows(y), with_rows(v), strength, with_z)
    if not _by_block(y):
        return _plain_backward(grad, y, v, alpha, with_z)
    outputs = [y.new_empty(y.shape), v.new_empty(v.shape), *([y.new_empty(y.shape)] if with_z else [])]
    each = y.new_zeros(y.shape[2], dtype=torch.float32)
    for *places, g_part, y_part, v_part in _blocks(*outputs, grad, y, v):
        grad_y, grad_v, more, z = _plain_backward(g_part, y_part, v_part, alpha, with_z)
        each += more
        for place, result in zip(places, (grad_y, grad_v, z), strict=False):
            place.copy_(result)
    return outputs[0], outputs[1], each, outputs[2] if with_z else y[:0]


def _for_alpha(each: Tensor, alpha: float | Tensor) -> Tensor | None:
    """∂L/∂α from that of each head."""
    if not isinstance(alpha, Tensor):
        return None
    return (each if alpha.ndim else each.sum()).to(alpha.dtype)


def _keep(ctx: Any, alpha: float | Tensor, *tensors: Tensor) -> None:
    ctx.save_for_backward(*tensors, *([alpha] if isinstance(alpha, Tensor) else []))
    ctx.alpha = None if isinstance(alpha, Tensor) else alpha


class _ExcludeSelf(torch.autograd.Function):
    """Keeps y, v and α alone for its backward."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, v: Tensor, alpha: float | Tensor) -> Tensor:  # pyright: ignore
        _keep(ctx, alpha, y, v)
        return _forward(y, v, alpha)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        y, v, *rest = ctx.saved_tensors
        alpha = rest[0] if rest else ctx.alpha
        grad_y, grad_v, each, _ = _backward(grad, y, v, alpha, False)
        return grad_y, grad_v, _for_alpha(each, alpha)


class _ExcludeAndProject(torch.autograd.Function):
    """Keeps y, v, α and the weight, never z nor the cast weight. One pass of backward gives z and the gradients."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, v: Tensor, alpha: float | Tensor, weight: Tensor) -> Tensor:  # pyright: ignore
        _keep(ctx, alpha, y, v, weight)
        z = _forward(y, v, alpha).flatten(2)
        return linear(z, weight) if served(z) else F.linear(z, weight.to(z.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        y, v, weight, *rest = ctx.saved_tensors
        alpha = rest[0] if rest else ctx.alpha
        fast = served(grad)
        grad_z = input_gradient(grad, weight) if fast else grad @ weight.to(grad.dtype)
        grad_y, grad_v, each, z = _backward(grad_z.unflatten(-1, y.shape[2:]), y, v, alpha, True)
        z = z.flatten(2)
        grad_weight = weight_gradient(grad, z, weight) if fast else grad.flatten(0, 1).T @ z.flatten(0, 1)
        return grad_y, grad_v, _for_alpha(each, alpha), grad_weight.to(weight.dtype)


def _tell_shapes() -> None:
    """What the operations give, without doing it: for torch.compile."""

    @torch.library.register_fake("xsalab::exclude")
    def _(y: Tensor, v: Tensor, alpha: Tensor) -> Tensor:
        return y.new_empty(y.shape)

    @torch.library.register_fake("xsalab::exclude_backward")
    def _(grad: Tensor, y: Tensor, v: Tensor, alpha: Tensor, with_z: bool) -> tuple[Tensor, ...]:
        each, z = y.new_empty(y.shape[2], dtype=torch.float32), y.new_empty(y.shape if with_z else 0)
        return y.new_empty(y.shape), v.new_empty(v.shape), each, z


AFTER_LOADING.append(_tell_shapes)


# --- the variant


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
        self.strength = Strength(alpha, site, allow_any_alpha)

    def forward(self, t: QKV, attend: Attend) -> Tensor:
        alpha = self.alpha()
        z = self._in_one_kernel(t, attend, alpha)
        return exclude_self(attend(t.q, t.k, t.v), self.own_value(t), alpha) if z is None else z

    def project(self, t: QKV, attend: Attend, w_o: Linear) -> Tensor:
        alpha = self.alpha()
        if self.strength.fixed == 0 or type(w_o) is not Linear or _watched(self) or _watched(w_o):
            return super().project(t, attend, w_o)
        z = self._in_one_kernel(t, attend, alpha)
        if z is not None:
            return w_o(z.flatten(2))
        return exclude_and_project(attend(t.q, t.k, t.v), self.own_value(t), alpha, w_o.weight)

    def _in_one_kernel(self, t: QKV, attend: Attend, alpha: float | Tensor) -> Tensor | None:
        """z from a kernel that does attention and exclusion together, where ``attend`` has one for these tensors."""
        together = getattr(attend, "exclusive", None)
        if together is None or self.against != "mixed" or self.strength.fixed == 0:
            return None
        return together(t.q, t.k, t.v, alpha)

    def own_value(self, t: QKV) -> Tensor:
        if self.against == "mixed" or t.v_projected is t.v:
            return t.v
        return t.v_projected.contiguous()  # kept for backward: a view would keep the whole product of q, k and v

    def alpha(self) -> float | Tensor:
        return self.strength()

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


def _watched(module: nn.Module) -> bool:
    """Whether something waits to be called with the module, so that it has to be called."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)
