"""No variant may look at later tokens or at other rows: checked before anything trains."""

from __future__ import annotations

import dataclasses

import torch

from .config import ModelConfig
from .gpt import GPT
from .init import init_weights, stream
from .variant import VariantChoice


@torch.no_grad()
def check_causality(config: ModelConfig, choice: VariantChoice) -> None:
    """Raises ValueError where an earlier logit, or another row's, changes with a token; not by one bit.

    The model is the configured one on a short vocabulary, in float32, with every weight disturbed: at the
    usual start W_o is zero and nothing of attention would show. Schedules are tried at both ends and between.
    """
    length = min(config.context, 24)
    model = GPT(dataclasses.replace(config, vocab_size=64), choice, kernel="explicit")
    init_weights(model, 0)
    for name, parameter in model.named_parameters():
        parameter.add_(0.3 * torch.randn(parameter.shape, generator=stream(1, name)))
    tokens = torch.randint(64, (2, length), generator=stream(2, "tokens"))
    for progress in (0.0, 0.5, 1.0):
        model.set_progress(progress)
        before = model(tokens)
        if not torch.isfinite(before).all():
            raise ValueError(f"variant {choice.name!r} gives logits that are not finite")
        for position in (length - 1, length // 2, 1):
            changed = tokens.clone()
            changed[0, position] = (changed[0, position] + 1) % 64
            after = model(changed)
            if not torch.equal(before[0, :position], after[0, :position]):
                raise ValueError(
                    f"variant {choice.name!r} looks at future tokens: a change at position {position} changes "
                    "logits before it. It is refused; use what attend returns and positions up to the query's own"
                )
            if not torch.equal(before[1], after[1]):
                raise ValueError(
                    f"variant {choice.name!r} mixes the rows of a batch: one row's token changes another's"
                )
