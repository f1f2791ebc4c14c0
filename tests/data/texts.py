"""Synthetic documents."""

from __future__ import annotations

import random

WORDS = (
    *("the", "a", "model", "token", "of", "and", "attention", "to", "value", "row", "layer"),
    *("is", "was", "every", "self", "other", "sum", "weight", "step", "loss"),
)


def sentences(count: int, seed: int = 0, words: int = 40) -> list[str]:
    """Distinct documents of English words, with a number each."""
    draw = random.Random(seed)
    return [f"{seed}-{i}: " + " ".join(draw.choices(WORDS, k=words)) + ".\n" for i in range(count)]
