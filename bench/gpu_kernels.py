"""The parts of bench/gpu.py that time single operations: the peak, exclude_self, attention, the head."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from gpu_bench import KERNEL, PEAKS, Bench, extra_bytes, milliseconds
from measure import interleave, ratio
from torch import Tensor


def machine(b: Bench) -> None:
    """The peak that shares are of: by the device's name, else the best back-to-back product; that is told as well."""
    best = 0.0
    for n in b.plan.mm:
        x, w = (torch.randn(n, n, device=b.device).bfloat16() for _ in range(2))
        out = torch.empty_like(x)
        calls = 8
        times = interleave({"mm": b.waiting(lambda x=x, w=w, out=out: torch.mm(x, w, out=out), calls)}, 5, 2)["mm"]
        best = max(best, 2 * n**3 * calls / statistics.median(times))
    name = torch.cuda.get_device_name() if b.device == "cuda" else platform.processor()
    known = next((rate for part, rate in PEAKS.items() if all(word in name for word in part.split())), None)
    b.peak = known or best
    source = "data sheet" if known else "best product"
    b.figures["machine"] = {"device": name, "peak": b.peak, "peak_from": source, "best_product": best}


def exclude(b: Bench) -> None:
    """exclude_self forward and backward against copy_: 8 rows of D move, a copy moves 2."""
    from xsalab.model import exclude_self

    heads, size = b.plan.d12.heads, b.plan.d12.width // b.plan.d12.heads
    shape = (b.plan.elements // (64 * heads * size), 64, heads, size)
    y, v, g = (torch.randn(shape, device=b.device).bfloat16() for _ in range(3))
    y.requires_grad_()
    v.requires_grad_()
    target, source = torch.empty_like(g), g.clone()
    calls = 10 if b.device == "cuda" else 1
    sides = {
        "exclude": b.waiting(lambda: torch.autograd.grad(exclude_self(y, v), (y, v), g), calls),
        "copy": b.waiting(lambda: target.copy_(source), calls * 4),  # as many bytes
    }
    times = interleave(sides, 3 * b.plan.rounds, 3)
    moved = 8 * y.numel() * 2 * calls
    rates = {name: moved / statistics.median(times[name]) / 1e9 for name in sides}
    b.figures["exclude"] = {"shape": shape, "kernel": _kernel(y), "bytes": moved // calls, "GB_s": rates}
    b.judge(
        "exclude_self, share of the copy bandwidth", ratio(times["copy"], times["exclude"]), unit="GB/s",
        ours=rates["exclude"], peer=rates["copy"], note=_kernel(y),
    )  # fmt: skip


def _kernel(x: Tensor) -> str:
    from xsalab.model.exclude_triton import available

    return "Triton" if available(x) else "not Triton"


def attention(b: Bench) -> None:
    """Milliseconds of attention forward and backward by kernel, full and short windows, to choose by. No target."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from xsalab.model import attend, cuda

    size = b.plan.d12
    shape = (size.micro, size.context, size.heads, size.width // size.heads)
    short = -(-size.context // 512) * 128
    q, k, v, g = (torch.randn(shape, device=b.device).bfloat16() for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()

    def sdpa(*only: SDPBackend) -> Callable[..., Tensor]:
        def run(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
            with sdpa_kernel(list(only)):
                return attend.sdpa(q, k, v, window)

        return run

    kernels: dict[str, tuple[Callable[..., Tensor | None], int]] = {
        "chosen, full": (attend.KERNELS[KERNEL], size.context),
        "chosen, short": (attend.KERNELS[KERNEL], short),
        "blocked, short": (attend.blocked, short),
    }
    if b.device == "cuda":
        kernels |= {
            "flash, full": (sdpa(SDPBackend.FLASH_ATTENTION), size.context),
            "cuDNN, full": (sdpa(SDPBackend.CUDNN_ATTENTION), size.context),
            "cuda.attention compiled, full": (b.compiled(cuda.attention), size.context),
            "flex, short": (cuda.flex, short),
            "flash with window, short": (cuda.flash_windowed, short),
        }
    found: dict[str, Any] = {"shape": shape, "short": short, "flash_attention_3": cuda.activate_fa3() or "active"}
    for name, (kernel, window) in kernels.items():

        def once(kernel: Callable[..., Any] = kernel, window: int = window) -> None:
            torch.autograd.grad(kernel(q, k, v, window), (q, k, v), g)

        try:
            found[name] = milliseconds(b, once)
        except (RuntimeError, ImportError, NotImplementedError) as error:  # a kernel that this device or torch has not
            found[name] = f"not here: {str(error).splitlines()[0][:200]}"
    b.figures["attention"] = found


def head(b: Bench) -> None:
    """Head and loss, gradients included, in three forms: milliseconds and extra memory. No target here."""
    from xsalab.model.head import _plain, token_nats

    size = b.plan.d12
    tokens, cap = size.micro * size.context // 2, 15.0
    x = torch.randn(tokens, size.width, device=b.device).bfloat16().requires_grad_()
    w = (torch.randn(size.vocabulary, size.width, device=b.device) / size.width**0.5).requires_grad_()
    targets = torch.randint(size.vocabulary, (tokens,), device=b.device)

    def whole(x: Tensor, w: Tensor) -> Tensor:
        logits = F.linear(x, w.to(x.dtype)).float()
        return F.cross_entropy(cap * torch.tanh(logits / cap), targets, reduction="sum")

    def ours(x: Tensor, w: Tensor) -> Tensor:
        return token_nats(x, w, targets, cap, size.vocabulary).sum()

    def in_blocks() -> object:
        with torch.no_grad():
            return _plain(x, w, targets, None, cap, size.vocabulary, gradients=True)

    compiled = b.compiled(whole)
    forms: dict[str, Callable[[], object]] = {
        "ours": lambda: torch.autograd.grad(ours(x, w), (x, w)),
        "blocks without Triton": in_blocks,
        "whole, compiled": lambda: torch.autograd.grad(compiled(x, w), (x, w)),
    }
    found: dict[str, Any] = {
        "tokens": tokens, "vocabulary": size.vocabulary, "width": size.width, "kernel": _kernel(x),
    }  # fmt: skip
    for name, form in forms.items():
        taken = milliseconds(b, form)
        found[name] = {
            "ms": taken, "extra_bytes": extra_bytes(b, form),
            "TFLOP_s": 6 * tokens * size.width * size.vocabulary / taken / 1e9,
        }  # fmt: skip
    b.figures["head"] = found
