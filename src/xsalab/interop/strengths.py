"""The strength of exclusion, layer by layer, for models that are not built here."""

from __future__ import annotations

from collections.abc import Sequence

from ..model import ModelConfig, VariantChoice, build_variant
from ..model.xsa import Exclusive


def strengths(alpha: float | Sequence[float], layers: str, config: ModelConfig) -> tuple[float, ...]:
    """α of every layer, first to last; 0 on the layers that ``layers`` does not name.

    ``alpha``: a number in [0, 1], or one a layer. ``layers``: the grammar of docs/xsa.md. Raises ValueError naming
    the field, the value and what is valid.
    """
    given = alpha if isinstance(alpha, (int, float)) else list(alpha)
    choice = VariantChoice("xsa", layers, {"alpha": given})
    found = []
    for layer in range(config.depth):
        variant = build_variant(choice, config, layer)
        found.append(variant.strength.fixed if isinstance(variant, Exclusive) else 0.0)
    return tuple(found)
