"""THE SEAM: a variant of attention is one module that stands around the kernel.

``forward(t, attend)`` may change q, k, v before, hand a ``score_mod`` or ``sink`` to the kernel, and
change the output after. It never picks a kernel, a mask or a cache, and so works with windows, grouped
heads, cached decoding and every measurement. docs/add-a-variant.md walks through one.
"""

from __future__ import annotations

import difflib
import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeVar

from torch import Tensor, nn

from .attend import Attend
from .config import ModelConfig
from .layers import Linear


class QKV(NamedTuple):
    """What attention works on, for the tokens given now."""

    q: Tensor  # (b, t, h, d) rotated, normalised
    k: Tensor  # (b, t, g, d) rotated, normalised
    v: Tensor  # (b, t, g, d) what attention mixes: projection plus gated value embedding
    v_projected: Tensor  # (b, t, g, d) the projection alone
    x: Tensor  # (b, t, c) the block's normalised input, for gates


@dataclass(frozen=True)
class Site:
    """Where a variant sits: the numbers its parameters are sized by."""

    layer: int
    depth: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    has_value_embedding: bool


class Variant(nn.Module, ABC):
    """One way to do attention at one layer. Options are keyword arguments of the constructor.

    Parameters get their first values in the constructor, without random numbers or through
    ``init_weights`` by name; they are trained by AdamW without weight decay (group "variant").
    """

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.site = site

    @abstractmethod
    def forward(self, t: QKV, attend: Attend) -> Tensor:
        """The heads' outputs (b, t, h, d), before the output projection."""

    def project(self, t: QKV, attend: Attend, w_o: Linear) -> Tensor:
        """W_o of ``forward``, (b, t, c). A variant overrides it where knowing both saves memory, never to say more."""
        return w_o(self(t, attend).flatten(2))

    def own_value(self, t: QKV) -> Tensor:
        """The token's own value (b, t, g, d), against which diagnostics measure the heads' outputs."""
        return t.v

    def alpha(self) -> float | Tensor:
        """The strength with which the part along the own value is taken out now: a number, () or (h,)."""
        return 0.0

    def set_progress(self, fraction: float) -> None:
        """Called before each step with step / steps. A schedule writes a buffer here, never a Python number."""

    def extra_flops(self) -> int:
        """Floating-point operations a token that the variant adds to a forward pass."""
        return 0

    def logged(self) -> dict[str, float]:
        """Numbers worth a curve, such as a learned strength."""
        return {}


class Standard(Variant):
    """Softmax attention as it is."""

    def forward(self, t: QKV, attend: Attend) -> Tensor:
        return attend(t.q, t.k, t.v)


VARIANTS: dict[str, type[Variant]] = {"standard": Standard}


V = TypeVar("V", bound=Variant)


def variant(name: str) -> Callable[[type[V]], type[V]]:
    """Registers a class under ``name``: ``@variant("mine")`` above it is all that a new variant needs."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", name):
        raise ValueError(f"variant name {name!r}: use lower-case letters, digits and hyphens")

    def register(cls: type[V]) -> type[V]:
        known = VARIANTS.get(name)
        if known is not None and known.__qualname__ != cls.__qualname__:
            raise ValueError(f"variant {name!r} is already taken by {known.__module__}.{known.__qualname__}")
        VARIANTS[name] = cls
        return cls

    return register


@dataclass(frozen=True)
class VariantChoice:
    """A variant by name, the layers it applies to (the rest is standard), and its options."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    name: str = "standard"
    layers: str = "all"
    options: Mapping[str, Any] = field(default_factory=dict)


def check_choice(choice: VariantChoice, config: ModelConfig) -> tuple[int, ...]:
    """The layers that the choice applies to. ValueError for an unknown name, option or layer."""
    if choice.name not in VARIANTS:
        near = difflib.get_close_matches(choice.name, VARIANTS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"variant = {choice.name!r} is not known; {hint}known: {', '.join(sorted(VARIANTS))}")
    known = list(inspect.signature(VARIANTS[choice.name].__init__).parameters)[2:]
    for option in choice.options:
        if option not in known:
            near = difflib.get_close_matches(option, [*known, "layers", "variant"], n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            listed = ", ".join(known) or "none"
            raise ValueError(f"variant {choice.name!r} has no option {option!r}; {hint}its options: {listed}")
    return select_layers(choice.layers, config)


def build_variant(choice: VariantChoice, config: ModelConfig, layer: int) -> Variant:
    """The variant of one layer: the chosen one where it applies, else standard."""
    site = Site(
        layer, config.depth, config.heads, config.groups, config.head_size, config.width,
        config.has_value_embedding(layer),
    )  # fmt: skip
    if layer not in check_choice(choice, config):
        return Standard(site)
    return VARIANTS[choice.name](site, **choice.options)


GRAMMAR = (
    "write all, none, first:N, last:N, a slice such as 0::2, 3:9 or -4:, a list such as 1,3,4, "
    "or with-ve, without-ve, full-window, sliding-window"
)


def select_layers(text: str, config: ModelConfig) -> tuple[int, ...]:
    """The layer numbers that ``text`` names; ValueError with the valid range and examples otherwise."""
    depth, every, text = config.depth, range(config.depth), text.strip()
    named = {
        "all": every,
        "none": (),
        "with-ve": (i for i in every if config.has_value_embedding(i)),
        "without-ve": (i for i in every if not config.has_value_embedding(i)),
        "full-window": (i for i in every if config.is_full_window(i)),
        "sliding-window": (i for i in every if not config.is_full_window(i)),
    }
    if text in named:
        return tuple(named[text])
    if end := re.fullmatch(r"(first|last):(\d+)", text):
        count = int(end[2])
        if not 1 <= count <= depth:
            raise ValueError(f"layers = {text!r}: this model has {depth} layers; a count from 1 to {depth} is valid")
        return tuple(every[:count] if end[1] == "first" else every[-count:])
    if re.fullmatch(r"-?\d*:-?\d*(:-?\d*)?", text):
        parts = [int(part) if part else None for part in text.split(":")]
        if any(part is not None and not -depth <= part <= depth for part in parts[:2]):
            valid = f"bounds from {-depth} to {depth} are valid"
            raise ValueError(f"layers = {text!r}: this model has {depth} layers; {valid}")
        if len(parts) == 3 and (parts[2] is not None and parts[2] <= 0):
            raise ValueError(f"layers = {text!r}: the step must be positive, as in 0::2")
        chosen = tuple(every[slice(*parts)])
        if not chosen:
            raise ValueError(f"layers = {text!r} selects no layer of 0 to {depth - 1}; write none to mean that")
        return chosen
    if re.fullmatch(r"\d+(\s*,\s*\d+)*", text):
        chosen = tuple(int(part) for part in text.split(","))
        for layer in chosen:
            if layer >= depth:
                valid = f"this model has layers 0 to {depth - 1}"
                raise ValueError(f"layers = {text!r}: layer {layer} is out of range; {valid}")
        if len(set(chosen)) < len(chosen):
            raise ValueError(f"layers = {text!r} names a layer twice")
        return tuple(sorted(chosen))
    raise ValueError(f"layers = {text!r} is not understood; {GRAMMAR} (layers 0 to {depth - 1})")
