"""AdamW with float32 moments for float32 and bfloat16 parameters, in one pass over them.

csrc/adamw.cpp         on the CPU where the kernels are used
PyTorch's fused one    else; it wants moments of the parameter's dtype, so that bfloat16 goes by a float32 copy
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..model import native

KINDS = (torch.float32, torch.bfloat16)  # of parameters that the kernel takes


def adamw_(
    parameters: list[Tensor],
    gradients: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    steps: list[int],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    decay: float,
    kernel: bool,
) -> None:
    """One update in place, with bias correction and decoupled decay (arXiv 1711.05101), eps beside the corrected root:

    p ← (1 − lr · decay) p − lr / (1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + eps), float32 throughout and rounded once.

    ``steps`` are the parameters' own t, this update counted. ``means`` m and ``squares`` v are float32. ``kernel``:
    whether the C++ kernel may take it. What a run's numbers are must not depend on what else its process has loaded.
    """
    beta1, beta2 = betas
    here = all(p.device.type == "cpu" and p.dtype in KINDS and p.is_contiguous() for p in parameters)
    if kernel and here and native.takes():
        gradients = [g.to(p.dtype).contiguous() for g, p in zip(gradients, parameters, strict=True)]
        torch.ops.xsalab.adamw_(parameters, gradients, means, squares, steps, lr, beta1, beta2, eps, decay)
        return
    values = [p.float() for p in parameters]  # the parameter itself where it is float32
    counts = [torch.full((), float(t), device=p.device) for t, p in zip(steps, parameters, strict=True)]
    torch._fused_adamw_(
        values, [g.float() for g in gradients], means, squares, [], counts,
        lr=lr, beta1=beta1, beta2=beta2, weight_decay=decay, eps=eps, amsgrad=False, maximize=False,
    )  # fmt: skip
    for parameter, value in zip(parameters, values, strict=True):
        if value is not parameter:
            parameter.copy_(value)
