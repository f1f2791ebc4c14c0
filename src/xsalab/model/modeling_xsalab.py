"""The network as a Hugging Face model. Copied into exports with the rest of this folder, and imported there alone.

``AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)`` imports this file; it needs torch and
transformers. It computes nothing of its own: tokens go to ``GPT``, and what transformers asks is put in its terms.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

# Every file that the network needs is named here: older releases of transformers look no further. Controls and xsa are
# imported so that their variants are known.
from .attend import KVCache
from .attention import Attention as Attention
from .config import ModelConfig
from .controls import HeadGate as HeadGate
from .cuda import fa3_active as fa3_active
from .exclude_triton import exclude_forward as exclude_forward
from .fused import serves as serves
from .gpt import GPT
from .head import capped_logits
from .head_triton import head_nats as head_nats
from .init import init_weights
from .layers import rotary_tables
from .linear import linear as linear
from .native import takes as takes
from .strength import Strength as Strength
from .variant import VariantChoice
from .xsa import Exclusive as Exclusive

# Releases of transformers differ in how they call a cache.
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
IGNORED = -100  # a label that is not scored, by transformers' convention
ALIGNED = 64  # bytes: torch's own memory on CPUs begins at a multiple of it


class XsalabConfig(PretrainedConfig):
    """``network``: the fields of ModelConfig; ``attention``: name, layers and options of the variant; ``kernel``."""

    model_type = "xsalab"

    def __init__(
        self,
        network: dict[str, Any] | None = None,
        attention: dict[str, Any] | None = None,
        kernel: str = "sdpa",
        **kwargs: Any,
    ) -> None:
        self.network, self.attention, self.kernel = network or {}, attention or {}, kernel
        super().__init__(**{"tie_word_embeddings": False, **kwargs})

    def model_config(self) -> ModelConfig:
        """ValueError or TypeError where ``network`` holds what no ModelConfig does."""
        return ModelConfig(**self.network)

    # What other tools ask a configuration for, under transformers' names.

    @property
    def vocab_size(self) -> int:
        return self.model_config().vocab_size

    @property
    def hidden_size(self) -> int:
        return self.model_config().width

    @property
    def num_hidden_layers(self) -> int:
        return self.model_config().depth

    @property
    def num_attention_heads(self) -> int:
        return self.model_config().heads

    @property
    def num_key_value_heads(self) -> int:
        return self.model_config().groups

    @property
    def head_dim(self) -> int:
        return self.model_config().head_size

    @property
    def max_position_embeddings(self) -> int:
        return self.model_config().context


class XsalabCache(Cache):
    """A KVCache under transformers' protocol. It cannot go back: what smear needs of earlier tokens is not kept."""

    is_croppable = False  # pyright: ignore
    is_compileable = False  # pyright: ignore

    def __init__(self, depth: int) -> None:
        super().__init__(layers=[])
        self.store = KVCache(depth)

    @property
    def is_linear(self) -> list[bool]:
        """Not recurrent: ``generate`` then hands over the tokens alone that are not in here yet."""
        return [False] * len(self.store.keys)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns held, padding included."""
        return self.store.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beam search: row i goes on from row ``beam_idx[i]``."""
        self.store = self.store.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """The rows with these indices alone."""
        self.store = self.store.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row ``repeats`` times, next to each other."""
        if self.store.keys[0] is not None:
            rows = torch.arange(len(self.store.keys[0]), device=self.store.keys[0].device)
            self.store = self.store.select(rows.repeat_interleave(repeats))

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Raises ValueError."""
        raise ValueError("this model's cache cannot be shortened; start again from the tokens")


class XsalabForCausalLM(PreTrainedModel, GenerationMixin):
    """``GPT`` in ``network``. Its dtype is that of the weights; those of the variant stay float32 when loaded."""

    config_class = XsalabConfig
    base_model_prefix = "network"
    main_input_name = "input_ids"
    _no_split_modules = ["GPT"]  # noqa: RUF012 (what all layers share would lie on one device alone)
    _supports_sdpa = True
    _is_stateful = True  # no assisted generation: it takes tokens back

    def __init__(self, config: XsalabConfig) -> None:
        super().__init__(config)
        dtype, loading = torch.get_default_dtype(), torch.get_default_device().type == "meta"
        torch.set_default_dtype(torch.float32)  # what a variant's constructor computes is float32, as in training
        try:
            # On the CPU while transformers loads on "meta": tables and fixed numbers are made here, not loaded.
            with torch.device("cpu"):
                network, choice = config.model_config(), VariantChoice(**config.attention)
                self.network = GPT(network, choice, dtype=dtype, kernel=config.kernel)
                self.network.set_progress(1.0)
                # before 5 the weights are put on "meta" one by one, and the tables had followed them
                tables = rotary_tables(network.context, network.head_size, network.rotary_base)
                self.network.cos, self.network.sin = tables
        finally:
            torch.set_default_dtype(dtype)
        for name, parameter in self.network.named_parameters():
            if ".variant." not in name:
                parameter.data = parameter.data.to(dtype)
        self._drawn = not loading and not self.network.head.weight.is_meta
        if self._drawn:
            init_weights(self.network, torch.initial_seed())
        self._unsaved = [
            (module, name, buffer.clone())
            for module in self.network.modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name in module._non_persistent_buffers_set
        ]
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As of every model, with the weights in memory of their own.

        They may point into the mapped file, at any address, and products of matrices round by where numbers lie: only
        on an address that torch itself would give do logits equal the run's to the last bit.
        """
        loaded = super().from_pretrained(*args, **kwargs)
        for parameter in (loaded[0] if isinstance(loaded, tuple) else loaded).parameters():
            if parameter.data_ptr() % ALIGNED:
                parameter.data = parameter.data.clone()
        return loaded

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Puts back the tables that transformers empties when it loads. ValueError for a weight that no file held."""
        lacking = [
            name
            for name, parameter in module.named_parameters(recurse=False)
            if not getattr(parameter, "_is_hf_initialized", False)
        ]
        if lacking and not self._drawn:
            kind = type(module).__name__
            raise ValueError(f"model.safetensors holds no {lacking[0]} of a {kind}; it was shortened, or is another's")
        for owner, name, value in self._unsaved:
            if owner is module:
                setattr(module, name, value.to(getattr(module, name).device))

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.network.embedding

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.network.head

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> torch.nn.Embedding:
        """Raises ValueError: value embeddings and padded rows are tables over the vocabulary as well."""
        raise ValueError("the vocabulary of this model is fixed: every value embedding is a table over it too")

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """``generate`` brings no cache of its own: ``forward`` makes one and hands it back."""
        return False

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """What ``forward`` takes; releases before 5 add positions, which the cache knows, and embeddings."""
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)  # pyright: ignore
        return {name: value for name, value in inputs.items() if name not in ("cache_position", "inputs_embeds")}

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: XsalabCache | None = None,
        past_key_values: XsalabCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> CausalLMOutputWithPast | tuple[Tensor, ...]:
        """input_ids (b, t) int64 -> logits (b, t, vocabulary) in float32; ``logits_to_keep`` > 0: the last alone.

        attention_mask (b, columns in the cache + t), 0 for padding, on whichever side; the logits at padding mean
        nothing. labels (b, t), shifted here, −100 for what is not scored: the loss is a mean over the rest, in nats.
        With ``use_cache`` or a cache the keys and values are handed back. Raises ValueError for what is not offered.
        """
        if input_ids is None:
            raise ValueError("input_ids are needed: this model takes no embeddings, as it looks values up by token")
        if output_attentions or output_hidden_states:
            raise ValueError("attentions and hidden states are not handed out: put hooks on model.network.blocks")
        cache = past_key_values if cache is None else cache
        if cache is None and use_cache:
            cache = XsalabCache(len(self.network.blocks))
        if cache is not None and not isinstance(cache, XsalabCache):
            raise ValueError(f"this model keeps a cache of its own kind, got a {type(cache).__name__}: pass none")
        real = None if attention_mask is None else self._new_columns(attention_mask, input_ids, cache)

        self.network.dtype = self.network.head.weight.dtype  # .to(dtype) and .half() reach the weights alone
        store = cache.store if cache is not None else None
        if real is None:
            packed, order = self.network.hidden(input_ids, store), None
        else:  # real tokens first, in their order, so that the padding behind them is seen by none of them
            order = torch.argsort((~real).to(torch.uint8), dim=1, stable=True)
            packed = self.network.hidden(input_ids.gather(1, order), store)
            if store is not None:
                store.keep(real.sum(1))
        hidden = packed if order is None else packed.gather(1, order.argsort(1)[..., None].expand_as(packed))

        loss = None
        if labels is not None:
            wanted = labels if order is None or real is None else labels.masked_fill(~real, IGNORED).gather(1, order)
            targets = torch.where(wanted == IGNORED, -1, wanted)[:, 1:]
            nats = self.network.nats_of_hidden(packed[:, :-1], targets)
            loss = nats.sum() / (targets >= 0).sum().clamp_min(1)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        network = self.network.config
        logits = capped_logits(hidden[:, kept], self.network.head.weight, network.soft_cap)[..., : network.vocab_size]
        output = CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: cache})  # pyright: ignore
        return output.to_tuple() if return_dict is False else output

    def _new_columns(self, mask: Tensor, tokens: Tensor, cache: XsalabCache | None) -> Tensor | None:
        """Which of the new tokens are real, (b, t) booleans; None where all are."""
        held = cache.get_seq_length() if cache is not None else 0
        rows, t = tokens.shape
        if mask.shape != (rows, held + t):
            wanted = f"({rows}, {held + t}): a column for each of {held} tokens in the cache and {t} new ones"
            raise ValueError(f"attention_mask is {tuple(mask.shape)}, it must be {wanted}")
        real = mask[:, held:].to(tokens.device) != 0
        return None if bool(real.all()) else real
