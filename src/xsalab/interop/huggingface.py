"""Exclusive self-attention in Hugging Face decoders that exist: z = y − α (⟨y,v⟩/⟨v,v⟩) v, put in and taken out again.

    from xsalab.interop.huggingface import use_exclusive_attention

    handle = use_exclusive_attention(model, alpha=1.0, layers="last:4")
    ...                    # forward, training, generate, with any cache
    handle.remove()        # the model's former attention

transformers calls attention by a name in the model's configuration (AttentionInterface), and builds masks by the same
name (AttentionMaskInterface). Registered here is one name for each attention that may lie underneath; a function under
it calls that attention and then excludes. α and the own value come with each call of a layer: a hook before the layer
puts a note of both among its arguments, which transformers hands on to the attention function.

The own value is taken where the layer gives it to its cache, before it is stored. What attention is handed with a cache
are the stored values, and caches differ in where among them the new tokens stand: last (dynamic, sliding), at their
position (static), or at the end of a buffer that was rolled (static and sliding).

α is not stored with the model: ``save_pretrained`` writes the weights and the model's own configuration, and what
``from_pretrained`` gives back has standard attention. Put it in again after loading.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..model import ModelConfig, exclude_self
from .strengths import strengths

FAMILIES = ("gpt2", "llama", "mistral", "qwen2", "qwen3")  # config.model_type of what is tested
NAMES = {"sdpa": "xsalab_exclusive", "eager": "xsalab_exclusive_eager"}  # by the attention underneath
OURS = ("with-ve", "without-ve", "full-window", "sliding-window")  # layers by properties of our own model
NOTE = "xsalab_note"


@dataclass(frozen=True)
class ExclusiveAttention:
    """What was put into a model: ``alpha`` of every layer, 0 where there is none. ``remove`` takes it out."""

    model: Any
    alpha: tuple[float, ...]
    former: str  # the attention's name before
    hooks: tuple[Any, ...]

    def remove(self) -> None:
        """Gives the model its former attention back; once more does nothing."""
        for hook in self.hooks:
            hook.remove()
        if self.model.config._attn_implementation in NAMES.values():
            self.model.set_attn_implementation(self.former)


def use_exclusive_attention(
    model: Any, alpha: float | Sequence[float] = 1.0, layers: str = "all"
) -> ExclusiveAttention:
    """Puts XSA of strength ``alpha`` on ``layers`` of a Hugging Face decoder, in place, until ``remove`` is called.

    model: a ``PreTrainedModel`` of one of FAMILIES, with or without a head, on any device and in any dtype; its
    attention sdpa (the default) or eager. alpha: a number in [0, 1], or one a layer; 0 leaves every result as it was,
    to the bit. layers: all, none, first:4, last:4, slices such as 0::2, lists such as 1,3,4.

    Raises ValueError where transformers is not installed, where the model is of a family that is not understood,
    has exclusive attention already or uses another kernel, and for an α or a layer out of range.
    """
    transformers = _transformers()
    modules = _attention_layers(model, transformers)
    if layers.strip() in OURS:
        raise ValueError(f"layers = {layers!r}: speaks of xsalab's own model; write all, first:4, 0::2 or 1,3,4")
    alphas = strengths(alpha, layers, ModelConfig(depth=len(modules)))
    former = model.config._attn_implementation
    underneath = {name: kind for kind, name in NAMES.items()}.get(former, former)  # a shared configuration may be ours
    if underneath not in NAMES:
        raise ValueError(
            f"this model's attention is {former!r}; exclusion stands on sdpa or eager: "
            'call model.set_attn_implementation("sdpa") before'
        )
    if underneath == "eager" and getattr(model.config, "reorder_and_upcast_attn", False):
        raise ValueError("reorder_and_upcast_attn is an eager attention of GPT-2's own; set it to false before")
    _register(transformers)
    model.set_attn_implementation(NAMES[underneath])
    hooks = tuple(
        module.register_forward_pre_hook(_Before(strength, transformers.Cache), with_kwargs=True)
        for module, strength in zip(modules, alphas, strict=True)
    )
    return ExclusiveAttention(model, alphas, former, hooks)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise ValueError("exclusive attention for Hugging Face models needs: pip install 'xsalab[hf]'") from None
    if not hasattr(transformers, "AttentionMaskInterface"):
        raise ValueError(f"transformers {transformers.__version__} cannot register masks: pip install 'xsalab[hf]'")
    return transformers


def _attention_layers(model: Any, transformers: Any) -> list[nn.Module]:
    """The self-attention of each layer, first to last. ValueError naming what is no decoder of a known family."""
    if not isinstance(model, transformers.PreTrainedModel):
        raise ValueError(f"{type(model).__name__} is no Hugging Face model; hand over the PreTrainedModel itself")
    config: Any = model.config
    family, known = config.model_type, f"families understood: {', '.join(FAMILIES)}"
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        raise ValueError(f"{family!r}: attends to an encoder as well, where no value is a token's own; {known}")
    kinds = {kind for kind in getattr(config, "layer_types", None) or () if "attention" not in kind or "linear" in kind}
    if kinds:
        raise ValueError(f"{family!r}: has layers without softmax attention ({', '.join(sorted(kinds))}); {known}")
    if family not in FAMILIES:
        raise ValueError(f"{family!r}: this model family is not understood; {known}")
    found = [module for module in model.modules() if type(module).__name__.endswith("Attention")]
    found.sort(key=lambda module: module.layer_idx)  # pyright: ignore[reportCallIssue, reportArgumentType]
    if [module.layer_idx for module in found] != list(range(config.num_hidden_layers)):
        raise ValueError(
            f"{type(model).__name__} of {family!r}: {len(found)} attention layers for {config.num_hidden_layers}; "
            f"this transformers {transformers.__version__} builds it in another way"
        )
    if any(isinstance(hook, _Before) for module in found for hook in module._forward_pre_hooks.values()):
        raise ValueError("this model has exclusive attention already; call remove() of the handle before")
    return found


# What happens in a call of a layer


class _Recorder:
    """Stands before the cache in one call of one layer, and keeps the new tokens' values (b, g, t, d)."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.values: Tensor | None = None

    def update(self, keys: Tensor, values: Tensor, *rest: Any, **named: Any) -> Any:
        self.values = values
        return self.cache.update(keys, values, *rest, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)


@dataclass(frozen=True)
class _Note:
    """What a layer's call hands to its attention function."""

    alpha: float
    recorder: _Recorder | None  # None: no cache, and the values at hand are the tokens' own


@dataclass(frozen=True)
class _Before:
    """The hook before a layer: a note among the arguments, and a recorder before the cache."""

    alpha: float
    cache: type

    def __call__(self, module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if module.config._attn_implementation not in NAMES.values():
            raise ValueError(
                f"the attention was set to {module.config._attn_implementation!r} while exclusive attention was in: "
                "call remove(), set it, and put exclusive attention in again"
            )
        recorder = None
        for name, value in named.items():
            if isinstance(value, self.cache):
                recorder = _Recorder(value)
                named = {**named, name: recorder}
        return args, {**named, NOTE: _Note(self.alpha, recorder)}


def _exclusive(underneath: Callable[[Any], Callable[..., Any]]) -> Callable[..., Any]:
    """An attention function of transformers' interface: the one underneath, and then exclusion where a note asks."""

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> Any:
        note: _Note | None = named.pop(NOTE, None)
        y, weights = underneath(module)(module, query, key, value, *rest, **named)
        if note is None:
            return y, weights
        own = value if note.recorder is None else note.recorder.values
        if own is None or own.shape[2] != query.shape[2]:
            raise ValueError(
                f"layer {module.layer_idx}: the new tokens' own values did not pass through the cache; "
                "exclusive attention does not know this cache"
            )
        return exclude_self(y, own.transpose(1, 2), note.alpha), weights

    return attend


def _eager(module: Any) -> Callable[..., Any]:
    """The plain attention that a family writes out beside its model."""
    return sys.modules[type(module).__module__].eager_attention_forward


def _register(transformers: Any) -> None:
    """The names in transformers' tables: attention and, under the same name, the mask of the attention underneath."""
    sdpa = transformers.AttentionInterface()["sdpa"]
    masks = transformers.AttentionMaskInterface()
    for kind, function in (("sdpa", lambda module: sdpa), ("eager", _eager)):
        transformers.AttentionInterface.register(NAMES[kind], _exclusive(function))
        transformers.AttentionMaskInterface.register(NAMES[kind], masks[kind])
