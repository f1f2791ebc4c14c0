"""exclude_self (xsa.py) as Triton kernels for CUDA: one read of y and v, one write of z; backward likewise.

A program takes the same key/value head of a few tokens, holds its v in registers and goes through the query heads that
share it, in order. So v is never copied, and its gradient is summed in one place: no atomics, and the same bits in
every run. The bound is the memory's bandwidth: 3 rows of D move forward and 5 backward (6 with z again), a few
operations each.

Triton is imported at the first launch. On a machine without it ``available`` says no, and the plain way is taken.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .native import with_rows

INSTALLED = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's own switch: kernels run in Python, on any device
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TILE = 2048  # elements of a tile: 16 a thread, which is two loads of 16 bytes in bfloat16

# pyright: reportInvalidTypeForm=false
tl: Any = None  # triton.language from the first launch on, which annotations name


def available(y: Tensor) -> bool:
    """Whether the kernels serve tensors such as this: on CUDA, bfloat16, float16 or float32, Triton installed."""
    return INSTALLED and (y.is_cuda or INTERPRETED) and y.dtype in DTYPES


def exclude_forward(y: Tensor, v: Tensor, alpha: float | Tensor) -> Tensor:
    """z = y − α (⟨y,v⟩/⟨v,v⟩) v, contiguous (b, t, h, d) in y's dtype, computed in float32.

    y (b, t, h, d), v (b, t, g, d), g dividing h, any strides; alpha a number, or a tensor () or (h,).
    """
    if isinstance(alpha, Tensor):
        return _exclude(y, v, alpha, 0.0)
    return _exclude(y, v, None, float(alpha))


def exclude_backward(
    grad: Tensor, y: Tensor, v: Tensor, alpha: float | Tensor, with_z: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """∂L/∂y, ∂L/∂v, each head's ∂L/∂α (h,), and z again, by the formulas of xsa.py.

    ∂L/∂α is empty where alpha is a number, z where it is not asked for. Made in the backward by another operation than
    the forward's, a compiler cannot see that z is the same, and does not keep it from there.
    """
    number = not isinstance(alpha, Tensor)
    grad_y, grad_v, parts, z = _exclude_backward(
        grad, y, v, None if number else alpha, float(alpha) if number else 0.0, with_z
    )
    return grad_y, grad_v, parts.flatten() if number else parts.sum(0), z


# --- operations: opaque to torch.compile, which sees their shapes; autograd is that of exclude_self


@torch.library.custom_op(
    "xsalab::exclude_triton", mutates_args=(), schema="(Tensor y, Tensor v, Tensor? alpha, float strength) -> Tensor"
)
def _exclude(y: Tensor, v: Tensor, alpha: Tensor | None, strength: float) -> Tensor:
    y, v = with_rows(y), with_rows(v)
    z = y.new_empty(y.shape)
    with torch.cuda.device_of(y):  # Triton launches on the current device
        _kernel("forward")[_grid(v)](y, v, alpha, z, strength, *_numbers(y, v, alpha), **_sizes(y, v))
    return z


@_exclude.register_fake
def _(y: Tensor, v: Tensor, alpha: Tensor | None, strength: float) -> Tensor:
    return y.new_empty(y.shape)


@torch.library.custom_op(
    "xsalab::exclude_triton_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor y, Tensor v, Tensor? alpha, float strength, bool with_z) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)
def _exclude_backward(
    grad: Tensor, y: Tensor, v: Tensor, alpha: Tensor | None, strength: float, with_z: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad, y, v = with_rows(grad), with_rows(y), with_rows(v)
    grad_y, grad_v, parts, z = found = _gradients(y, v, alpha, with_z)
    numbers = (*_numbers(y, v, alpha), *grad.stride()[:3])
    with torch.cuda.device_of(y):
        _kernel("backward")[_grid(v)](
            grad, y, v, alpha, grad_y, grad_v, parts, z if with_z else None, strength, *numbers, **_sizes(y, v)
        )
    return found


@_exclude_backward.register_fake
def _(
    grad: Tensor, y: Tensor, v: Tensor, alpha: Tensor | None, strength: float, with_z: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _gradients(y, v, alpha, with_z)


def _gradients(y: Tensor, v: Tensor, alpha: Tensor | None, with_z: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Room for ∂L/∂y, ∂L/∂v, a part of ∂L/∂α for each block of tokens, (blocks, h) or none, and z or nothing."""
    blocks = 0 if alpha is None else _blocks(v)
    parts = torch.empty((blocks, y.shape[2]), dtype=torch.float32, device=y.device)
    return y.new_empty(y.shape), v.new_empty(v.shape), parts, y.new_empty(y.shape if with_z else 0)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _block(d: int) -> int:
    """Tokens of a tile."""
    return max(1, TILE // _power_of_two(d))


def _blocks(v: Tensor) -> int:
    return -(-v.shape[0] * v.shape[1] // _block(v.shape[3]))


def _grid(v: Tensor) -> tuple[int]:
    """A program for each block of tokens and key/value head; those of one block are neighbours, as in memory."""
    return (max(1, _blocks(v)) * v.shape[2],)


def _numbers(y: Tensor, v: Tensor, alpha: Tensor | None) -> tuple[int, ...]:
    """Tokens in all and of a row, then strides."""
    step = alpha.stride(0) if alpha is not None and alpha.ndim else 0
    return (y.shape[0] * y.shape[1], y.shape[1], step, *y.stride()[:3], *v.stride()[:3])


def _sizes(y: Tensor, v: Tensor) -> dict[str, Any]:
    """What a kernel is compiled for. Products and sums stay apart, so that ⟨y,v⟩ is ⟨v,v⟩ to the bit where y = v."""
    (h, d), g = y.shape[2:], v.shape[2]
    width = _power_of_two(d)
    launch = {"num_warps": min(16, max(4, width // 512)), "enable_fp_fusion": False}
    return {"G": g, "R": h // g, "D": d, "BLOCK": _block(d), "WIDTH": width, **launch}


@cache
def _kernel(name: str) -> Any:
    return jit({"forward": _forward_kernel, "backward": _backward_kernel}[name])


def jit(kernel: Callable[..., None]) -> Any:
    """The kernel as Triton compiles it; its file gets Triton's language as ``tl``.

    No import statement: transformers refuses an export that has one, of a package that is not installed.
    """
    kernel.__globals__["tl"] = importlib.import_module("triton.language")
    return importlib.import_module("triton").jit(kernel)


# --- kernels. y, v, grad by strides; z, grad_y, grad_v contiguous. TOKENS = b t; program = block · G + group.


def _forward_kernel(
    y, v, alpha, z, strength, TOKENS, T, alpha_h, y_b, y_t, y_h, v_b, v_t, v_g,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0) % G
    token = (tl.program_id(0) // G).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, WIDTH)
    mask = (token < TOKENS)[:, None] & (column < D)[None, :]
    b, t = token // T, token % T
    vs = tl.load(v + (b * v_b + t * v_t + group * v_g)[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    # The floor is float32's smallest normal number: a larger one would leave part of a short v in place.
    norm = tl.maximum(tl.sum(vs * vs, axis=1), 1.1754943508222875e-38)
    for r in range(R):
        head = group * R + r
        at = (b * y_b + t * y_t + head * y_h)[:, None] + column[None, :]
        ys = tl.load(y + at, mask=mask, other=0.0).to(tl.float32)
        a = strength if alpha is None else tl.load(alpha + head * alpha_h).to(tl.float32)
        c = tl.div_rn(tl.sum(ys * vs, axis=1), norm)
        zs = ys - (a * c)[:, None] * vs
        tl.store(z + (token * (G * R) + head)[:, None] * D + column[None, :], zs.to(z.dtype.element_ty), mask=mask)


def _backward_kernel(
    grad, y, v, alpha, grad_y, grad_v, parts, z, strength,
    TOKENS, T, alpha_h, y_b, y_t, y_h, v_b, v_t, v_g, g_b, g_t, g_h,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0) % G
    block = (tl.program_id(0) // G).to(tl.int64)
    token = block * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, WIDTH)
    mask = (token < TOKENS)[:, None] & (column < D)[None, :]
    b, t = token // T, token % T
    vs = tl.load(v + (b * v_b + t * v_t + group * v_g)[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    tiny = 1.1754943508222875e-38
    norm = tl.sum(vs * vs, axis=1)
    n = tl.maximum(norm, tiny)
    sums = tl.zeros((BLOCK, WIDTH), dtype=tl.float32)
    for r in range(R):
        head = group * R + r
        y_at = (b * y_b + t * y_t + head * y_h)[:, None] + column[None, :]
        g_at = (b * g_b + t * g_t + head * g_h)[:, None] + column[None, :]
        ys = tl.load(y + y_at, mask=mask, other=0.0).to(tl.float32)
        gs = tl.load(grad + g_at, mask=mask, other=0.0).to(tl.float32)
        a = strength if alpha is None else tl.load(alpha + head * alpha_h).to(tl.float32)
        gv = tl.sum(gs * vs, axis=1)
        c = tl.div_rn(tl.sum(ys * vs, axis=1), n)
        d = tl.div_rn(gv, n)
        out = (token * (G * R) + head)[:, None] * D + column[None, :]
        tl.store(grad_y + out, (gs - (a * d)[:, None] * vs).to(grad_y.dtype.element_ty), mask=mask)
        if z is not None:
            zs = ys - (a * c)[:, None] * vs
            tl.store(z + out, zs.to(z.dtype.element_ty), mask=mask)
        # −α (d y + c (g − 2 (d v))); below the floor n is a constant and 2 (d v), its derivative, is 0
        along = tl.where(norm > tiny, 2 * d, 0.0)
        sums -= (a * d)[:, None] * ys + (a * c)[:, None] * (gs - along[:, None] * vs)
        if alpha is not None:
            tl.store(parts + block * (G * R) + head, -tl.sum(c * gv, axis=0))
    v_out = (token * G + group)[:, None] * D + column[None, :]
    tl.store(grad_v + v_out, sums.to(grad_v.dtype.element_ty), mask=mask)
