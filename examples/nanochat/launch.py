"""Starts a module of an unmodified nanochat checkout with another seed and with XSA, both from the environment.

    XSALAB_SEED=3 XSALAB_XSA_ALPHA=1 python launch.py scripts.base_train --depth=2 ...      in the checkout's folder

nanochat fixes its seed in code, torch.manual_seed(42): here that call gets ours. Its attention is called through one
object, ``nanochat.flash_attention.flash_attn``, whose two functions return y (B, T, H, D): here what they return has
its part along the own value taken out. Nothing else is changed, and nothing in the checkout.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from types import SimpleNamespace
from typing import Any

import torch

from xsalab.model import exclude_self


def main() -> None:
    """Reads the environment, wraps, and runs the module as ``python -m`` would."""
    module, seed, alpha = sys.argv[1], int(os.environ["XSALAB_SEED"]), float(os.environ["XSALAB_XSA_ALPHA"])
    sys.path[0] = os.getcwd()
    sys.argv = sys.argv[1:]
    seed_with(seed)
    if importlib.util.find_spec("wandb") is None:  # imported by nanochat and, with --run=dummy, never used
        sys.modules["wandb"] = SimpleNamespace()  # pyright: ignore
    if alpha:
        from nanochat.flash_attention import flash_attn  # pyright: ignore[reportMissingImports]

        exclude_self_in(flash_attn, alpha)
    print(f"launch: seed {seed}, XSA alpha {alpha:g}", flush=True)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def seed_with(seed: int) -> None:
    """Whatever number the code asks for, torch's generators get this one."""
    for owner in (torch, torch.cuda):
        original = owner.manual_seed
        owner.manual_seed = lambda _, original=original: original(seed)  # pyright: ignore


def exclude_self_in(attention: Any, alpha: float) -> None:
    """Wraps both functions of nanochat's attention; v (B, T, G, D), G dividing H, is the new tokens' value."""
    train, infer = attention.flash_attn_func, attention.flash_attn_with_kvcache

    def flash_attn_func(q: Any, k: Any, v: Any, **settings: Any) -> Any:
        return exclude_self(train(q, k, v, **settings), v, alpha)

    def flash_attn_with_kvcache(q: Any, k_cache: Any, v_cache: Any, *, v: Any, **settings: Any) -> Any:
        return exclude_self(infer(q, k_cache, v_cache, v=v, **settings), v, alpha)

    attention.flash_attn_func, attention.flash_attn_with_kvcache = flash_attn_func, flash_attn_with_kvcache


if __name__ == "__main__":
    main()
