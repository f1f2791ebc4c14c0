"""No variant may look at later tokens or at other rows: checked before anything trains."""

from __future__ import annotations

import dataclasses

import torch

from .config import ModelConfig
from .gpt import GPT
from .init import init_weights, stream
from .variant import VariantChoice


def _model(config: ModelConfig, choice: VariantChoice, seed: int) -> GPT:
    """The model as a process would build it whose random stream stands anywhere."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPT(dataclasses.replace(config, vocab_size=64), choice, kernel="explicit")
    init_weights(model, 0)
    return model


@torch.no_grad()
def check_causality(config: ModelConfig, choice: VariantChoice) -> None:
    """Raises ValueError where an earlier logit, or another row's, changes with a token; not by one bit.

    The model is the configured one on a short vocabulary, in float32, with every weight disturbed: at the
    usual start W_o is zero and nothing of attention would show. The whole context is used: a change of the last
    token finds a look-ahead of any length. Schedules are tried at both ends and between, in long contexts at the end.
    Refuses as well what would make a run depend on chance: random numbers in a constructor or in ``forward``.
    """
    length = config.context
    model, again = (_model(config, choice, seed) for seed in (1, 2))
    for (name, one), (_, other) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        if ".variant." in name and not torch.equal(one, other):
            raise ValueError(
                f"variant {choice.name!r} starts {name} with random or unset numbers: a seed would not be one start. "
                "Fill it with fixed numbers, such as zeros"
            )
    del again
    for name, parameter in model.named_parameters():
        parameter.add_(0.3 * torch.randn(parameter.shape, generator=stream(1, name)))
    tokens = torch.randint(64, (2, length), generator=stream(2, "tokens"))
    checked: torch.Tensor | None = None
    for progress in (0.0, 0.5, 1.0) if length <= 512 else (1.0,):
        model.set_progress(progress)
        before = model(tokens)
        if checked is not None and torch.equal(before, checked):
            continue  # no schedule changes it: the function that was just checked
        checked = before
        if not torch.isfinite(before).all():
            raise ValueError(f"variant {choice.name!r} gives logits that are not finite")
        if not torch.equal(before, model(tokens)):
            raise ValueError(
                f"variant {choice.name!r} gives other logits for the same tokens: no random numbers in forward"
            )
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
