"""One more token for every row of a batch, with all that a generation needs prepared once.

``stepper`` chooses between two ways to the same logits, up to rounding. ``NativeSteps``: one call of csrc/decode.cpp a
step, for float32 and bfloat16 on CPUs with the kernels, layers standard or exclusive. ``PlainSteps``: PyTorch, for any
variant, dtype and device. Both go on from the KVCache that a pass over the prompts has filled, and neither touches the
model: a rotary table that grows here is their own. Forward hooks on variants run in ``PlainSteps`` alone, those on
blocks in neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..model import GPT, QKV, KVCache
from ..model import native as kernels
from ..model.attend import Places, ScoreMod, explicit, visible
from ..model.head import capped_logits
from ..model.layers import rotary_tables
from ..model.variant import Standard
from ..model.xsa import Exclusive

UNIT = 32  # the kernels' widths and head sizes are multiples of it
CHUNK = 16  # and a cache's capacity is one of this


class Store(Protocol):
    """Keys and values of the rows so far."""

    def select(self, rows: Tensor) -> Store:
        """Those of the rows with these indices (n,), in this order; one may come several times."""
        ...


class Steps(Protocol):
    """Feeds one token a row."""

    def __call__(self, tokens: Sequence[int], store: Any) -> tuple[Tensor, Store]:
        """Logits (rows, vocabulary) in float32 on the CPU, and the store to go on from; the one given is used up."""
        ...


def stepper(model: GPT) -> Steps:
    """Prepares the weights as they are now. The kernels are built where this is the first that wants them."""
    return NativeSteps(model) if served(model) else PlainSteps(model)


# --- one call a step


def served(model: GPT) -> bool:
    """Whether csrc/decode.cpp does all of this model's layers, here and now."""
    config, weight = model.config, model.head.weight
    return (
        weight.device.type == "cpu"
        and model.dtype in (torch.float32, torch.bfloat16)
        and model.embedding.weight.dtype == model.dtype
        and model.kernel != "explicit"  # the oracle was asked for
        and config.width % UNIT == config.head_size % UNIT == 0
        and all(type(variant) in (Standard, Exclusive) for variant in model.variants())
        and kernels.load()
        and kernels.instructions() != "plain"
    )


@dataclass
class Held:
    """Keys and values (depth, rows, groups, capacity, size), each row's token at its own position; no padding."""

    keys: Tensor
    values: Tensor
    positions: Tensor  # (rows,) int64: how many tokens a row holds
    before: Tensor  # (rows, width): the last token's embedding before smearing
    longest: int

    @classmethod
    def of(cls, cache: KVCache, width: int) -> Held:
        """Of a cache that one pass over prompts has filled, padded behind: a column is a position."""
        columns = [*cache.keys, *cache.values]
        assert all(store is not None for store in columns)
        stored = torch.stack([store[:, : cache.length] for store in columns if store is not None]).transpose(2, 3)
        keys, values = (_roomy(part, cache.length) for part in stored.chunk(2))
        rows = keys.shape[1]
        positions = torch.full((rows,), cache.length) if cache.lengths is None else cache.lengths.clone()
        last = cache.last_embedding
        before = keys.new_zeros(rows, width) if last is None or not last.shape[-1] else last[:, 0].clone()
        return cls(keys, values, positions, before, int(positions.max()))

    def select(self, rows: Tensor) -> Held:
        """As of a KVCache."""
        positions = self.positions[rows]
        return Held(self.keys[:, rows], self.values[:, rows], positions, self.before[rows], int(positions.max()))

    def make_room(self) -> None:
        """For one more token."""
        if self.longest == self.keys.shape[3]:
            self.keys, self.values = (_roomy(part, self.longest) for part in (self.keys, self.values))


def _roomy(part: Tensor, used: int) -> Tensor:
    """A copy of the first ``used`` places with room for as many again, at least 64."""
    grown = part.new_empty((*part.shape[:3], -(-max(64, 2 * used) // CHUNK) * CHUNK, part.shape[4]))
    grown[:, :, :, :used] = part[:, :, :, :used]
    return grown


class NativeSteps:
    """By csrc/decode.cpp. A row's logits are the same to the last bit whatever rows are beside it."""

    @torch.no_grad()
    def __init__(self, model: GPT) -> None:
        config, dtype = model.config, model.dtype
        self.config = config

        def number(scalar: Tensor | float) -> float:
            return float(torch.as_tensor(scalar).to(dtype))

        def panels(*weights: Tensor) -> Tensor:
            return torch.ops.xsalab.decode_panels([weight.contiguous() for weight in weights], dtype)

        def gate(weight: Tensor) -> Tensor:
            return weight.to(dtype).float().contiguous()

        self.native = torch.classes.xsalab.Decoder(
            config.heads, config.groups, config.head_size, config.vocab_size, config.depth // 2, config.norm_eps,
            config.qk_scale if config.qk_norm else 0.0, config.value_gate_range, config.soft_cap,
            number(model.smear) if config.smear else 0.0, number(model.backout) if config.backout else 0.0,
            model.embedding.weight.contiguous(), panels(model.head.weight),
            gate(model.smear_gate.weight[0]) if config.smear else None,
        )  # fmt: skip
        for layer, (block, table) in enumerate(zip(_blocks(model), _value_tables(model), strict=True)):
            attention = block.attention
            excluded = isinstance(attention.variant, Exclusive)
            alpha = torch.as_tensor(attention.variant.strength()).float() if excluded else None
            self.native.add_layer(
                number(model.residual[layer]) if config.residual_scalars else 1.0,
                number(model.x0[layer]) if config.residual_scalars else 0.0,
                config.window_of(layer),
                panels(attention.w_q.weight, attention.w_k.weight, attention.w_v.weight),
                panels(attention.w_o.weight), panels(block.mlp.w1.weight), panels(block.mlp.w2.weight),
                None if table is None else table.to(dtype).contiguous(),
                None if table is None else gate(attention.value_gate.weight),
                None if alpha is None else alpha.expand(config.heads).contiguous(),
                excluded and attention.variant.against == "projected",
            )  # fmt: skip
        self.cos, self.sin = _tables(model, config.context)

    def __call__(self, tokens: Sequence[int], store: KVCache | Held) -> tuple[Tensor, Held]:
        held = Held.of(store, self.config.width) if isinstance(store, KVCache) else store
        held.make_room()
        if held.longest >= len(self.cos):
            self.cos, self.sin = _tables(self, 2 * held.longest)
        new = torch.tensor(tokens)
        tables = self.cos, self.sin
        logits = self.native.step(new, held.positions, *tables, held.before, held.keys, held.values)
        held.positions += 1
        held.longest += 1
        return logits, held


def _tables(model: Any, length: int) -> tuple[Tensor, Tensor]:
    """cos and sin (length, D / 2) in float32."""
    config = model.config
    cos, sin = rotary_tables(length, config.head_size, config.rotary_base)
    return cos[0, :, 0].contiguous(), sin[0, :, 0].contiguous()


def _blocks(model: GPT) -> list[Any]:
    return list(model.blocks)


def _value_tables(model: GPT) -> list[Tensor | None]:
    """By layer, (vocabulary, groups · size)."""
    tables: Any = model.value_embeddings
    return [tables[str(i)].weight if model.config.has_value_embedding(i) else None for i in range(model.config.depth)]


# --- in PyTorch


class PlainSteps:
    """The same in few operations: joined weights in the computing dtype, laid out as a product of few rows reads them,
    no masks where all keys are seen.
    """

    @torch.no_grad()
    def __init__(self, model: GPT) -> None:
        config, dtype = model.config, model.dtype
        self.model, self.config, self.dtype, self.device = model, config, dtype, model.head.weight.device

        def number(scalar: Tensor) -> float:
            return float(scalar.to(dtype))

        def turned(*weights: Tensor) -> Tensor:
            return torch.cat(weights).to(dtype).T.contiguous()  # (inputs, outputs)

        scalars = zip(model.residual, model.x0, strict=True) if config.residual_scalars else ()
        self.scalars = [(number(residual), number(x0)) for residual, x0 in scalars]
        self.weights = [
            (
                turned(block.attention.w_q.weight, block.attention.w_k.weight, block.attention.w_v.weight),
                turned(block.attention.w_o.weight), turned(block.mlp.w1.weight), turned(block.mlp.w2.weight),
            )
            for block in _blocks(model)
        ]  # fmt: skip
        self.gates = [gate and turned(gate.weight) for gate in (block.attention.value_gate for block in _blocks(model))]
        self.tables = _value_tables(model)
        self.smear = (turned(model.smear_gate.weight), number(model.smear)) if config.smear else None
        self.backout = number(model.backout) if config.backout else 0.0
        self.head = model.head.weight.to(dtype)
        self.scale = torch.full((config.head_size,), config.qk_scale, dtype=dtype, device=self.device)
        self._tabulate(config.context)

    def _tabulate(self, length: int) -> None:
        cos, sin = _tables(self, length)
        # x cos + (the halves of x swapped) sin: one table each, as wide as a head
        self.cos = torch.cat((cos, cos), dim=1).to(self.device, self.dtype)
        self.sin = torch.cat((sin, -sin), dim=1).to(self.device, self.dtype)

    @torch.no_grad()
    def __call__(self, tokens: Sequence[int], store: KVCache) -> tuple[Tensor, KVCache]:
        config, rows = self.config, len(tokens)
        heads, groups, size = config.heads, config.groups, config.head_size
        store.check_rows(rows)
        if store.length >= len(self.cos):
            self._tabulate(2 * store.length)
        places = store.places(1)
        where = store.length if places is None else places.query
        cos, sin = self.cos[where][..., None, :], self.sin[where][..., None, :]
        masks: dict[int, Tensor] = {}

        def norm(x: Tensor, weight: Tensor | None = None) -> Tensor:
            return F.rms_norm(x, x.shape[-1:], weight, config.norm_eps)

        new = torch.tensor(tokens, device=self.device)
        x = embedded = norm(F.embedding(new, self.model.embedding.weight).to(self.dtype))
        if self.smear is not None and store.last_embedding is not None:
            gate, strength = self.smear
            share = torch.sigmoid(x[:, : config.smear_channels] @ gate) * strength
            x = torch.addcmul(x, share, store.last_embedding[:, 0])
        first, middle = x, x
        for layer, (w_qkv, w_o, w_1, w_2) in enumerate(self.weights):
            if self.scalars:
                residual, x0 = self.scalars[layer]
                x = torch.add(x * residual, first, alpha=x0)
            normed = norm(x)
            joined = (normed @ w_qkv).view(rows, 1, heads + 2 * groups, size)
            qk, v_projected = joined.split((heads + groups, groups), dim=2)
            v, table, gate = v_projected, self.tables[layer], self.gates[layer]
            if table is not None and gate is not None:
                share = torch.sigmoid(normed[:, : config.value_gate_channels] @ gate) * config.value_gate_range
                added = F.embedding(new, table).to(self.dtype).view(v.shape)
                v = torch.addcmul(v, share.view(rows, 1, groups, 1), added)
            qk = torch.addcmul(qk * cos, qk.roll(size // 2, -1), sin)
            if config.qk_norm:
                qk = norm(qk, self.scale)
            q, k = qk.split((heads, groups), dim=2)
            attend = _OneToken(config.window_of(layer), self.model.kernel, store, layer, places, masks)
            y = self.model.variants()[layer](QKV(q, k, v, v_projected, normed[:, None]), attend)
            x = torch.addmm(x, y.reshape(rows, heads * size), w_o)
            x = torch.addmm(x, (norm(x) @ w_1).relu_().square_(), w_2)
            if layer == config.depth // 2:
                middle = x
        store.advance(embedded[:, None] if config.smear else embedded[:, None, :0])
        if self.backout:
            x = torch.sub(x, middle, alpha=self.backout)
        logits = capped_logits(norm(x), self.head, config.soft_cap)
        return logits[:, : config.vocab_size].cpu(), store


class _OneToken:
    """``Attend`` for one new token a row. ``masks``: those of this step by window, which layers share."""

    def __init__(
        self, window: int, kernel: str, cache: KVCache, layer: int, places: Places | None, masks: dict[int, Tensor]
    ) -> None:
        self.window, self.kernel, self.cache, self.layer = window, kernel, cache, layer
        self.places, self.masks = places, masks

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, score_mod: ScoreMod | None = None, sink: Tensor | None = None
    ) -> Tensor:
        k, v = self.cache.extend(self.layer, k, v)
        if self.kernel == "explicit" or score_mod is not None or sink is not None:
            return explicit(q, k, v, self.window, self.places, score_mod=score_mod, sink=sink)
        mask = None
        if self.places is None:
            k, v = k[:, -self.window - 1 :], v[:, -self.window - 1 :]
        else:
            if self.window not in self.masks:
                query, key = self.places.query[:, None, :, None], self.places.key[:, None, None, :]
                self.masks[self.window] = visible(query, key, self.window)
            mask = self.masks[self.window]
        # the heads of a group as so many queries of its keys: nothing is repeated
        rows, _, heads, size = q.shape
        q = q.view(rows, k.shape[2], heads // k.shape[2], size)
        y = F.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask)
        return y.reshape(rows, 1, heads, size)

    def exclusive(self, q: Tensor, k: Tensor, v: Tensor, alpha: float | Tensor) -> Tensor | None:
        """As of a LayerAttend: no kernel does both here."""
        return None
