"""The whole network: causality, long prompts, switches, and parts written out a second time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from xsalab.model import GPT, KVCache, VariantChoice
from xsalab.model.causality import check_causality
from xsalab.model.layers import rms_norm, rotary_tables, rotate
from xsalab.model.variant import VARIANTS, Variant

Tiny = Callable[..., GPT]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def norm(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 2.0**-23).sqrt()


def turned(x: Tensor) -> Tensor:
    """Rotary embedding of (t, d) by complex numbers: the two halves are real and imaginary part, angle −p·f."""
    t, d = x.shape
    frequency = 100_000.0 ** (-2 * torch.arange(d // 2, dtype=torch.float64) / d)
    angle = -torch.arange(t, dtype=torch.float64)[:, None] * frequency
    z = torch.complex(x[:, : d // 2], x[:, d // 2 :]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((z.real, z.imag), dim=-1)


def by_formula(model: GPT, tokens: Tensor, alpha: float) -> Tensor:
    """The logits of one row of tokens (t,), from docs/model.md, one head at a time, in float64."""
    c = model.config
    w = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    t, size, group = len(tokens), c.head_size, c.heads // c.groups
    x = norm(w["embedding.weight"][tokens])
    gate = torch.sigmoid(x[:, : c.smear_channels] @ w["smear_gate.weight"].T)
    x = torch.cat((x[:1], x[1:] + w["smear"] * gate[1:] * x[:-1]))
    x0 = x
    middle = x
    distance = torch.arange(t)[:, None] - torch.arange(t)[None, :]
    for layer in range(c.depth):
        block = f"blocks.{layer}."
        x = w["residual"][layer] * x + w["x0"][layer] * x0
        n = norm(x)
        q, k, v = (n @ w[f"{block}attention.w_{name}.weight"].T for name in "qkv")
        if layer % 2 == (c.depth - 1) % 2:
            g = 3 * torch.sigmoid(n[:, : c.value_gate_channels] @ w[f"{block}attention.value_gate.weight"].T)
            v = v + g.repeat_interleave(size, dim=1) * w[f"value_embeddings.{layer}.weight"][tokens]
        window = 4 if c.window[layer % len(c.window)] == "S" and layer < c.depth - 1 else c.context
        heads = []
        for head in range(c.heads):
            mine = slice(head * size, head * size + size)
            served = slice(head // group * size, head // group * size + size)
            scores = (1.2 * norm(turned(q[:, mine]))) @ (1.2 * norm(turned(k[:, served]))).T / size**0.5
            weights = scores.masked_fill((distance < 0) | (distance > window), -torch.inf).softmax(-1)
            y, own = weights @ v[:, served], v[:, served]
            heads.append(y - alpha * (y * own).sum(-1, keepdim=True) / own.square().sum(-1, keepdim=True) * own)
        x = x + torch.cat(heads, dim=1) @ w[f"{block}attention.w_o.weight"].T
        x = x + (norm(x) @ w[f"{block}mlp.w1.weight"].T).relu().square() @ w[f"{block}mlp.w2.weight"].T
        if layer == c.depth // 2:
            middle = x
    x = norm(x - w["backout"] * middle)
    return 15 * torch.tanh(x @ w["head.weight"][: c.vocab_size].T / 15)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("depth", [3, 4])
def test_logits_follow_the_formulas(tiny: Tiny, tokens: Tensor, alpha: float, depth: int) -> None:
    """Grouped heads, windows and every constant, with a second, slow implementation."""
    model = tiny("xsa", {"alpha": alpha}, depth=depth, dtype=torch.float64)
    with torch.no_grad():
        logits = model(tokens[:1])[0]
    # rotary tables and the last logits are float32
    torch.testing.assert_close(logits.double(), by_formula(model, tokens[0], alpha), atol=2e-5, rtol=0)


def test_rotary_turns_by_the_position() -> None:
    """⟨turned q at i, turned k at j⟩ depends on i − j alone, and lengths stay."""
    cos, sin = rotary_tables(12, 8, 100_000.0)
    q, k = draw(8), draw(8, seed=1)
    at = [rotate(x.expand(1, 12, 1, 8), cos, sin)[0, :, 0] for x in (q, k)]
    torch.testing.assert_close(at[0], turned(q.expand(12, 8)), atol=1e-6, rtol=0)
    torch.testing.assert_close(at[0].norm(dim=-1), q.norm().expand(12), atol=1e-6, rtol=0)
    for i, j in ((3, 1), (7, 5), (11, 9)):
        torch.testing.assert_close(at[0][i].dot(at[1][j]), at[0][2].dot(at[1][0]), atol=1e-6, rtol=0)


def test_rms_norm_has_no_gain_and_floors_at_its_eps() -> None:
    x = draw(3, 8)
    torch.testing.assert_close(rms_norm(x, 2.0**-23), norm(x))
    assert not rms_norm(torch.zeros(2, 4), 1e-7).any()


# --- causality


@pytest.mark.parametrize("kernel", ["sdpa", "blocked", "explicit"])
@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_a_changed_last_token_changes_no_earlier_logit(tiny: Tiny, tokens: Tensor, name: str, kernel: str) -> None:
    """F008: for every registered variant, not by one bit."""
    model = tiny(name, kernel=kernel)
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 50
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :-1], after[:, :-1])
    assert not torch.equal(before[:, -1], after[:, -1])


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_every_registered_variant_passes_the_check(tiny: Tiny, name: str) -> None:
    check_causality(tiny().config, VariantChoice(name))


class Mean(Variant):
    """Takes the mean output over all positions off, later ones included."""

    def forward(self, t, attend) -> Tensor:
        y = attend(t.q, t.k, t.v)
        return y - y.mean(1, keepdim=True)


class Neighbour(Variant):
    """Takes off the mean over the rows of the batch."""

    def forward(self, t, attend) -> Tensor:
        y = attend(t.q, t.k, t.v)
        return y - y.mean(0, keepdim=True)


@pytest.mark.parametrize(("cls", "message"), [(Mean, "looks at future tokens"), (Neighbour, "mixes the rows")])
def test_a_leak_is_refused(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, cls: type[Variant], message: str) -> None:
    """F008: the form that scored 0.9051 bpb elsewhere, and one that reads its neighbours."""
    monkeypatch.setitem(VARIANTS, "leaky", cls)
    with pytest.raises(ValueError, match=f"'leaky' {message}"):
        check_causality(tiny().config, VariantChoice("leaky", "last:1"))


# --- windows and lengths


def test_a_layer_sees_itself_and_its_window(tiny: Tiny) -> None:
    """One layer would be full; with two, the first looks back 4 and only its output reaches further."""
    model = tiny(depth=2, window="S", smear=False, backout=False, value_embeddings=False)
    cfg = model.config
    assert [cfg.window_of(layer) for layer in range(2)] == [4, 16]
    tokens = torch.arange(12)[None]
    taken: list[Tensor] = []
    model.variants()[0].register_forward_hook(lambda _m, _given, out: taken.append(out))
    for changed in range(12):
        other = tokens.clone()
        other[0, changed] = 40
        model(other)
    model(tokens)
    base = taken.pop()
    reach = [[i for i in range(12) if not torch.equal(out[0, i], base[0, i])] for out in taken]
    assert reach == [[i for i in range(12) if j <= i <= j + 4] for j in range(12)]


def test_the_rotary_table_grows(tiny: Tiny) -> None:
    """F018: prompts longer than the context, in one pass and through the cache; the beginning does not change."""
    model = tiny("xsa")
    before = model.cos.clone()
    long = torch.randint(0, 50, (1, 100), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        short, logits = model(long[:, :16]), model(long)
        cache = KVCache(4)
        parts = torch.cat([model(chunk, cache) for chunk in long.split([10, 30, 60], dim=1)], dim=1)
    assert model.cos.shape[1] >= 100
    assert torch.equal(model.cos[:, :16], before)
    torch.testing.assert_close(logits[:, :16], short, atol=2e-5, rtol=0)
    torch.testing.assert_close(parts, logits, atol=5e-5, rtol=0)


def test_the_rotary_table_is_not_in_the_weights(tiny: Tiny) -> None:
    assert not [name for name in tiny().state_dict() if name in ("cos", "sin")]


@pytest.mark.parametrize("size", [2, 20, 50], ids=lambda d: f"d{d}")
def test_odd_head_sizes_work(tiny: Tiny, tokens: Tensor, size: int) -> None:
    """F019: a head size that is no multiple of 8; the fused kernel gives what the explicit one does."""
    logits = [tiny("xsa", head_dim=size, kernel=kernel)(tokens) for kernel in ("sdpa", "explicit")]
    torch.testing.assert_close(logits[0], logits[1], atol=5e-5, rtol=0)


@pytest.mark.parametrize("name", sorted(VARIANTS))
@pytest.mark.parametrize("groups", [1, 2, 4], ids=lambda g: f"g{g}")
def test_every_variant_trains_with_grouped_heads(tiny: Tiny, tokens: Tensor, name: str, groups: int) -> None:
    """F001: one forward and backward; every parameter gets a finite gradient."""
    model = tiny(name, kv_heads=groups)
    model.token_nats(tokens[:, :-1], tokens[:, 1:]).mean().backward()
    for label, parameter in model.named_parameters():
        assert parameter.grad is not None, label
        assert parameter.grad.isfinite().all(), label
        assert parameter.grad.any(), label


# --- rows of different length in one cache


@torch.no_grad()
@pytest.mark.parametrize("change", [{}, {"kv_heads": 2}, {"smear": False}], ids=["all", "grouped", "unsmeared"])
@pytest.mark.parametrize("kernel", ["sdpa", "blocked", "explicit"])
@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_rows_of_different_length_share_a_cache(tiny: Tiny, name: str, kernel: str, change: dict) -> None:
    """F145: padded on the right, kept, reordered and continued twice, each row has the logits that it has alone."""
    model = tiny(name, kernel=kernel, **change)
    draws = torch.Generator().manual_seed(5)
    rows = [torch.randint(0, 50, (1, n), generator=draws) for n in (13, 4, 9, 1)]
    more = [torch.randint(0, 50, (1, n), generator=draws) for n in (3, 5, 1, 4)]
    alone = [model(torch.cat((row, rest, row[:, :1]), dim=1)) for row, rest in zip(rows, more, strict=True)]

    def padded(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
        counts = torch.tensor([part.shape[1] for part in parts])
        full = torch.full((len(parts), int(counts.max())), 7)
        for i, part in enumerate(parts):
            full[i, : part.shape[1]] = part
        return full, counts

    cache, order = KVCache(4), [2, 0, 3, 1]
    full, counts = padded(rows)
    model(full, cache)
    cache.keep(counts)
    cache = cache.select(torch.tensor(order))
    full, counts = padded([more[i] for i in order])
    second = model(full, cache)
    cache.keep(counts)
    assert cache.lengths is not None
    assert cache.lengths.tolist() == [rows[i].shape[1] + more[i].shape[1] for i in order]
    third = model(torch.cat([rows[i][:, :1] for i in order]), cache)
    for place, i in enumerate(order):
        begin, n = rows[i].shape[1], more[i].shape[1]
        torch.testing.assert_close(second[place, :n], alone[i][0, begin : begin + n], atol=5e-5, rtol=0)
        torch.testing.assert_close(third[place, 0], alone[i][0, -1], atol=5e-5, rtol=0)


@torch.no_grad()
def test_a_row_of_a_cache_may_be_repeated(tiny: Tiny, tokens: Tensor) -> None:
    """A prompt that several samples share is run once; the copies do not write into each other."""
    model, cache = tiny("xsa"), KVCache(4)
    model(tokens[:1, :6], cache)
    both = cache.select(torch.tensor([0, 0]))
    tails = torch.stack((tokens[0, 6:], tokens[1, 6:]))
    logits = model(tails, both)
    assert cache.length == 6
    for row, tail in enumerate(tails):
        want = model(torch.cat((tokens[0, :6], tail))[None])[0, 6:]
        torch.testing.assert_close(logits[row], want, atol=5e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("counts", [[0, 3], [1, 7], [2]], ids=str)
def test_a_cache_keeps_at_least_one_token_of_a_row_and_no_more_than_came(tiny: Tiny, counts: list[int]) -> None:
    model, cache = tiny(), KVCache(4)
    model(torch.zeros(2, 6, dtype=torch.long), cache)
    with pytest.raises(ValueError, match="from 1 to the 6 tokens of the last pass"):
        cache.keep(torch.tensor(counts))


# --- switches


SWITCHES = {
    "value_embeddings": {"value_embeddings": False},
    "smear": {"smear": False},
    "backout": {"backout": False},
    "residual_scalars": {"residual_scalars": False},
    "qk_norm": {"qk_norm": False},
    "soft_cap": {"soft_cap": 0.0},
    "windows": {"window": "L"},
}
PLAIN = {key: value for change in SWITCHES.values() for key, value in change.items()}


@pytest.mark.parametrize("change", [*SWITCHES.values(), PLAIN], ids=[*SWITCHES, "all"])
@pytest.mark.parametrize("name", ["standard", "xsa"])
def test_each_part_can_be_switched_off(tiny: Tiny, tokens: Tensor, name: str, change: dict) -> None:
    """It runs, trains, decodes through the cache, and is another function than with the part."""
    model, cache = tiny(name, **change), KVCache(4)
    logits = model(tokens)
    model.token_nats(tokens[:, :-1], tokens[:, 1:]).mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with torch.no_grad():
        parts = torch.cat([model(chunk, cache) for chunk in tokens.split([6, 1, 6], dim=1)], dim=1)
    torch.testing.assert_close(parts, logits, atol=1e-4, rtol=0)
    assert not torch.allclose(logits, tiny(name)(tokens), atol=1e-3)


def test_the_plain_model_has_no_trace_of_the_extras(tiny: Tiny) -> None:
    names = {name.split(".")[0] for name, _ in tiny(**PLAIN).named_parameters()}
    assert names == {"embedding", "blocks", "head"}
    assert not [name for name, _ in tiny(**PLAIN).named_parameters() if "gate" in name]


# --- dtypes


def test_loss_and_logits_agree(tiny: Tiny, tokens: Tensor) -> None:
    model = tiny("xsa")
    nats = model.token_nats(tokens[:, :-1], tokens[:, 1:])
    want = F.cross_entropy(model(tokens[:, :-1]).mT, tokens[:, 1:], reduction="none")
    torch.testing.assert_close(nats, want, atol=1e-5, rtol=1e-6)


def test_bfloat16_keeps_float32_masters_and_stores_its_tables(tiny: Tiny, tokens: Tensor) -> None:
    model = tiny("xsa", dtype=torch.bfloat16)
    tables = {name for name, parameter in model.named_parameters() if parameter.dtype == torch.bfloat16}
    assert tables == {"embedding.weight", "value_embeddings.1.weight", "value_embeddings.3.weight"}
    assert model.hidden(tokens).dtype == torch.bfloat16
    assert model(tokens).dtype == torch.float32
    assert model.token_nats(tokens, tokens).dtype == torch.float32


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_a_step_through_a_variant_keeps_the_dtype(tiny: Tiny, tokens: Tensor, name: str) -> None:
    """A float32 parameter of a variant must not lift bfloat16 activations."""
    model = tiny(name, dtype=torch.bfloat16)
    dtypes: set[torch.dtype] = set()
    for variant in model.variants():
        variant.register_forward_hook(lambda _m, _given, out: dtypes.add(out.dtype))
    model(tokens)
    assert dtypes == {torch.bfloat16}


def test_the_progress_reaches_every_layer(tiny: Tiny) -> None:
    model = tiny("xsa", {"alpha": {"from": 0, "to": 1}}, layers="last:2")
    model.set_progress(0.25)
    assert [variant.logged() for variant in model.variants()] == [{}, {}, {"alpha": 0.25}, {"alpha": 0.25}]
