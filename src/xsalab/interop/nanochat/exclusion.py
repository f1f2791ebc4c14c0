"""XSA inside nanochat's own model, in memory: no file of the checkout is touched.

nanochat calls attention through one object, ``nanochat.flash_attention.flash_attn``, whose two functions return
y (B, T, H, D): one for training, one with the key/value cache for inference. Both get v (B, T, G, D) of the tokens
given now, value embedding mixed in, and are replaced here by themselves followed by exclusion. They are not told the
layer: ``CausalSelfAttention.forward`` is wrapped to say whose turn it is. α of each layer is set where a model gets its
weights, ``GPT.init_weights``, which nanochat calls for every model that it trains or loads. A compiled model stays one
graph: α is a constant of each layer in it.

Read in karpathy/nanochat 92d63d4.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import asdict
from functools import wraps
from typing import Any

from ...model import ModelConfig, exclude_self
from ..strengths import strengths
from .checkpoint import FIELDS


class _Turn:
    """Whose turn it is: α of the layer that is being computed. A class of its own, as dynamo traces writing to one."""

    alpha = 0.0


class NotThisModel(ValueError):
    """What was asked for does not fit nanochat's model; said once the model is known."""


def insert_exclusion(alpha: float | Sequence[float] = 1.0, layers: str = "all") -> None:
    """Every model that nanochat makes in this process from now on has XSA of strength ``alpha`` on ``layers``.

    alpha: a number in [0, 1], or one a layer; 0 changes no bit. layers: the grammar of docs/xsa.md; with-ve,
    without-ve, full-window and sliding-window go by nanochat's own model. nanochat must be importable. Raises
    ValueError where this nanochat is built in another way; models raise NotThisModel where α or a layer is out of
    range for them.
    """
    gpt, attention = (importlib.import_module(f"nanochat.{name}") for name in ("gpt", "flash_attention"))
    turn = _Turn()
    _wrap_attention(part_of(attention, "flash_attn"), turn)
    _wrap_layers(part_of(gpt, "CausalSelfAttention"), turn)
    _wrap_models(part_of(gpt, "GPT"), alpha, layers)


def part_of(owner: Any, name: str) -> Any:
    """What a module or class of nanochat has by this name. ValueError where it has none."""
    if not hasattr(owner, name):
        raise ValueError(f"this nanochat is not understood: {getattr(owner, '__name__', owner)} has no {name}")
    return getattr(owner, name)


def _wrap_attention(attention: Any, turn: _Turn) -> None:
    train, infer = part_of(attention, "flash_attn_func"), part_of(attention, "flash_attn_with_kvcache")

    @wraps(train)
    def flash_attn_func(q: Any, k: Any, v: Any, *rest: Any, **settings: Any) -> Any:
        return exclude_self(train(q, k, v, *rest, **settings), v, turn.alpha)

    @wraps(infer)
    def flash_attn_with_kvcache(q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, *rest: Any, **settings: Any) -> Any:
        return exclude_self(infer(q, k_cache, v_cache, k, v, *rest, **settings), v, turn.alpha)

    attention.flash_attn_func, attention.flash_attn_with_kvcache = flash_attn_func, flash_attn_with_kvcache


def _wrap_layers(layer: Any, turn: _Turn) -> None:
    forward = part_of(layer, "forward")

    @wraps(forward)
    def forward_in_turn(self: Any, *inputs: Any, **settings: Any) -> Any:
        turn.alpha = self.xsalab_alpha
        return forward(self, *inputs, **settings)

    layer.forward = forward_in_turn


def _wrap_models(model: Any, alpha: float | Sequence[float], layers: str) -> None:
    init_weights = part_of(model, "init_weights")

    @wraps(init_weights)
    def init_weights_and_strengths(self: Any) -> None:
        init_weights(self)
        config = {ours: value for theirs, value in asdict(self.config).items() if (ours := FIELDS.get(theirs))}
        try:
            alphas = strengths(alpha, layers, ModelConfig(**config))
        except ValueError as error:
            raise NotThisModel(str(error)) from None
        for block, strength in zip(self.transformer.h, alphas, strict=True):
            block.attn.xsalab_alpha = strength
        if os.environ.get("RANK", "0") == "0":
            where = ", ".join(f"{layer}: {strength:g}" for layer, strength in enumerate(alphas))
            print(f"xsalab: XSA, alpha by layer {{{where}}}", flush=True)

    model.init_weights = init_weights_and_strengths
