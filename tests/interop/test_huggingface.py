"""XSA in Hugging Face decoders, on small ones with random weights: by hand, with caches, and out again."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="needs xsalab[hf]")

from xsalab.interop import huggingface  # noqa: E402
from xsalab.interop.huggingface import FAMILIES, use_exclusive_attention  # noqa: E402

LAYERS, HEADS, SIZE, VOCABULARY = 3, 4, 8, 60
GROUPED = {
    "hidden_size": HEADS * SIZE, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": 2,
    "intermediate_size": 48, "head_dim": SIZE,
}  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": HEADS * SIZE, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64},
    "llama": GROUPED,
    "mistral": {**GROUPED, "sliding_window": 4},
    "qwen2": GROUPED,
    "qwen3": GROUPED,
}


def build(family: str, kernel: str = "sdpa", **changes: Any) -> Any:
    """A model of ``family`` with random weights; large ones, so that what attention does is seen."""
    torch.manual_seed(0)
    values = {
        **SMALL[family], "vocab_size": VOCABULARY, "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": None,
        **changes,
    }  # fmt: skip
    config = transformers.AutoConfig.for_model(family, **values)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=kernel).eval()


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(1))


def logits(model: Any, tokens: Tensor, **named: Any) -> Tensor:
    with torch.no_grad():
        return model(tokens, use_cache="cache" in named, **named).logits


@contextmanager
def watched(model: Any, layer: int) -> Iterator[dict[str, np.ndarray]]:
    """What enters a layer's output projection, (b, t, h, d), and its values, (b, t, g, d), in float64."""
    (attention,) = [
        module
        for module in model.modules()
        if type(module).__name__.endswith("Attention") and module.layer_idx == layer
    ]
    seen: dict[str, np.ndarray] = {}

    def heads(x: Tensor) -> np.ndarray:
        return x.detach().double().unflatten(-1, (-1, SIZE)).numpy()

    def values(module: Any, args: Any, out: Tensor) -> None:
        seen["v"] = heads(out[..., -HEADS * SIZE :] if hasattr(attention, "c_attn") else out)

    def output(module: Any, args: Any) -> None:
        seen["z"] = heads(args[0])

    hooks = [
        getattr(attention, "c_attn" if hasattr(attention, "c_attn") else "v_proj").register_forward_hook(values),
        getattr(attention, "c_proj" if hasattr(attention, "c_proj") else "o_proj").register_forward_pre_hook(output),
    ]
    yield seen
    for hook in hooks:
        hook.remove()


def by_hand(y: np.ndarray, v: np.ndarray, alpha: float) -> np.ndarray:
    v = np.repeat(v, y.shape[2] // v.shape[2], axis=2)
    return y - alpha * (y * v).sum(-1, keepdims=True) / (v * v).sum(-1, keepdims=True) * v


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_s_output_is_the_formula_s(family: str, kernel: str, tokens: Tensor) -> None:
    """F001: what enters the projection is y − α (⟨y,v⟩/⟨v,v⟩) v of the same layer without exclusion, by numpy."""
    model, layer, alpha = build(family, kernel), 1, 0.75
    with watched(model, layer) as seen:
        logits(model, tokens)
    y, v = seen["z"], seen["v"]
    use_exclusive_attention(model, alpha, str(layer))
    with watched(model, layer) as seen:
        logits(model, tokens)
    assert abs(seen["v"] - v).max() == 0, "the layers before it are standard"
    assert abs(seen["z"] - y).max() > 0.01
    np.testing.assert_allclose(seen["z"], by_hand(y, v, alpha), atol=1e-6)


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_strength_0_changes_no_bit(family: str, kernel: str, tokens: Tensor) -> None:
    """Logits, gradients and what is generated; also on the layers that are not named."""
    model = build(family, kernel)

    def all_of_it() -> list[Tensor]:
        model.zero_grad()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        new = model.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0)
        return [logits(model, tokens), loss, new, *(p.grad.clone() for p in model.parameters())]

    before = all_of_it()
    for alpha, layers in ((0.0, "all"), (1.0, "none"), ([0, 0, 0], "first:2")):
        handle = use_exclusive_attention(model, alpha, layers)
        assert handle.alpha == (0, 0, 0)
        assert all(map(torch.equal, all_of_it(), before))
        handle.remove()


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_what_sees_itself_alone_becomes_exactly_0(family: str, kernel: str, tokens: Tensor) -> None:
    """Position 0, and behind padding on the left the first real token; no number there is NaN."""
    model = build(family, kernel)
    use_exclusive_attention(model)
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    with watched(model, 0) as seen:
        assert logits(model, tokens, attention_mask=mask).isfinite().all()
    assert (seen["z"][0, 0] == 0).all()
    assert (seen["z"][1, 3] == 0).all()
    assert (abs(seen["z"][1, 4:]).max(-1) > 1e-4).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_on_the_left_changes_nothing(family: str, tokens: Tensor) -> None:
    model = build(family)
    use_exclusive_attention(model)
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    padded = logits(model, tokens, attention_mask=mask, position_ids=positions)
    torch.testing.assert_close(padded[1, 3:], logits(model, tokens[1:, 3:])[0], atol=2e-5, rtol=0)


CACHES = {
    "dynamic": lambda config: transformers.DynamicCache(config=config),
    "grown": lambda config: transformers.DynamicCache(),
    "static": lambda config: transformers.StaticCache(config=config, max_cache_len=16),
}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "qwen3"])
def test_chunks_through_a_cache_give_the_logits_of_one_pass(family: str, cache: str, tokens: Tensor) -> None:
    """F003: new tokens stand last, at their position, or at the end of a buffer that was rolled (mistral, window 4)."""
    model = build(family)
    use_exclusive_attention(model, [1.0, 0.5, 1.0])
    held = CACHES[cache](model.config)
    parts = [logits(model, part, cache=held) for part in tokens.split([3, 1, 1, 3, 1, 2], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), logits(model, tokens), atol=2e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_needs_no_cache_and_is_the_same_with_one(family: str, tokens: Tensor) -> None:
    model = build(family)
    plain = model.generate(tokens, max_new_tokens=5, do_sample=False, pad_token_id=0)
    use_exclusive_attention(model)
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    without = model.generate(tokens, use_cache=False, **settings)
    assert not torch.equal(without, plain)
    assert torch.equal(model.generate(tokens, **settings), without)
    assert torch.equal(model.generate(tokens, cache_implementation="static", **settings), without)
    beams = {**settings, "num_beams": 2}
    assert torch.equal(model.generate(tokens, **beams), model.generate(tokens, use_cache=False, **beams))


def test_a_gradient_is_that_of_finite_differences(tokens: Tensor) -> None:
    """In float64, of a weight that makes values; GPT-2, as the others' norms compute in float32."""
    model = build("gpt2").double()
    use_exclusive_attention(model)
    weight, step = model.transformer.h[1].attn.c_attn.weight, 1e-5
    model(tokens).logits.square().mean().backward()
    found, around = weight.grad[2, -3].item(), []
    with torch.no_grad():
        for change in (step, -2 * step):
            weight[2, -3] += change
            around.append(model(tokens).logits.square().mean().item())
    assert abs(found) > 1e-3
    assert abs(found - (around[0] - around[1]) / (2 * step)) < 1e-6 * abs(found)


def test_in_bfloat16_the_output_is_orthogonal_to_the_value(tokens: Tensor) -> None:
    """The operation is in float32 inside: rounding of the result alone is left (docs/xsa.md)."""
    model = build("llama").bfloat16()
    use_exclusive_attention(model)
    with watched(model, 2) as seen:
        logits(model, tokens)
    z, v = seen["z"][:, 1:], np.repeat(seen["v"], 2, axis=2)[:, 1:]
    cosine = (z * v).sum(-1) / np.sqrt((z * z).sum(-1) * (v * v).sum(-1))
    assert abs(cosine).max() < 5e-3


def test_the_mask_is_that_of_the_attention_underneath(tokens: Tensor) -> None:
    """transformers builds none for a name that it does not know, and a sliding window or padding would be lost."""
    model = build("mistral")
    before = logits(model, tokens)
    use_exclusive_attention(model, 0.0)
    assert torch.equal(logits(model, tokens), before)
    transformers.AttentionMaskInterface._global_mapping.pop(huggingface.NAMES["sdpa"])
    assert not torch.allclose(logits(model, tokens), before)


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_removal_gives_the_former_attention_back(kernel: str, tokens: Tensor) -> None:
    model = build("qwen2", kernel)
    before = logits(model, tokens)
    for _ in range(2):
        handle = use_exclusive_attention(model, layers="-2:")
        assert not torch.allclose(logits(model, tokens), before)
        with pytest.raises(ValueError, match="has exclusive attention already"):
            use_exclusive_attention(model)
        handle.remove()
        handle.remove()
        assert model.config._attn_implementation == kernel
        assert torch.equal(logits(model, tokens), before)
    assert not [hook for module in model.modules() for hook in module._forward_pre_hooks]


def test_models_that_share_a_configuration_do_not_share_exclusion(tokens: Tensor) -> None:
    first = build("llama")
    second = type(first)(first.config).eval()
    second.load_state_dict(first.state_dict())
    before = logits(second, tokens)
    handle = use_exclusive_attention(first)
    assert torch.equal(logits(second, tokens), before)
    own = use_exclusive_attention(second, 0.5)
    assert not torch.allclose(logits(second, tokens), logits(first, tokens))
    own.remove()
    assert not torch.allclose(logits(first, tokens), before)
    handle.remove()
    assert torch.equal(logits(first, tokens), before)


def test_another_attention_set_meanwhile_does_not_drop_exclusion_in_silence(tokens: Tensor) -> None:
    model = build("llama")
    handle = use_exclusive_attention(model)
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match=r"set to 'eager' while exclusive attention was in: call remove\(\)"):
        logits(model, tokens)
    handle.remove()
    assert model.config._attn_implementation == "eager"
    logits(model, tokens)


def test_a_saved_model_comes_back_with_standard_attention(tokens: Tensor, tmp_path: Any) -> None:
    """As the page and the docstring say: α is not in the configuration."""
    model = build("llama")
    before = logits(model, tokens)
    use_exclusive_attention(model)
    model.save_pretrained(tmp_path)
    assert "xsalab" not in (tmp_path / "config.json").read_text(encoding="utf-8")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(logits(again, tokens), before)


@pytest.mark.slow
def test_the_model_stays_one_graph(tokens: Tensor) -> None:
    """F025: exclusion on some layers; traced whole, with a cache as well, and the numbers of eager mode."""
    model = build("llama")
    use_exclusive_attention(model, layers="last:2")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(logits(compiled, tokens), logits(model, tokens), atol=1e-5, rtol=0)
    held = transformers.StaticCache(config=model.config, max_cache_len=16)
    logits(model, tokens[:, :-1], cache=held)
    last = logits(compiled, tokens[:, -1:], cache=held)
    torch.testing.assert_close(last, logits(model, tokens)[:, -1:], atol=2e-5, rtol=0)
    torch._dynamo.reset()


# What is refused


@pytest.mark.parametrize(
    ("family", "values", "message"),
    [
        ("t5", {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}, "'t5': attends to an encoder"),
        ("gpt2", {**SMALL["gpt2"], "add_cross_attention": True}, "'gpt2': attends to an encoder"),
        ("bloom", {"hidden_size": 16, "n_layer": 1, "n_head": 2}, "'bloom': this model family is not understood"),
        ("mamba", {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}, "'mamba': has layers without softmax"),
        (
            "qwen3_next",
            {**GROUPED, "layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_experts": 0},
            r"'qwen3_next': has layers without softmax attention \(linear_attention\)",
        ),
    ],
    ids=["encoder-decoder", "cross-attention", "no-interface", "state-space", "linear"],
)  # fmt: skip
def test_a_family_that_is_not_understood_is_refused_by_name(family: str, values: dict[str, Any], message: str) -> None:
    """F005: never less than was asked, and never in silence."""
    config = transformers.AutoConfig.for_model(family, vocab_size=VOCABULARY, **values)
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    with pytest.raises(ValueError, match=f"{message}.*understood: gpt2, llama"):
        use_exclusive_attention(model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": 1.5}, r"alpha = 1.5: must be in \[0, 1\]"),
        ({"alpha": [1.0]}, "1 numbers for 3 layers"),
        ({"layers": "last:4"}, "this model has 3 layers"),
        ({"layers": "with-ve"}, "layers = 'with-ve': speaks of xsalab's own model"),
    ],
)
def test_what_is_out_of_range_is_refused_and_nothing_is_changed(settings: dict[str, Any], message: str) -> None:
    model = build("llama")
    with pytest.raises(ValueError, match=message):
        use_exclusive_attention(model, **settings)
    assert model.config._attn_implementation == "sdpa"


def test_other_kernels_and_other_objects_are_refused() -> None:
    model = build("llama", "flex_attention")
    with pytest.raises(ValueError, match="attention is 'flex_attention'; exclusion stands on sdpa or eager"):
        use_exclusive_attention(model)
    with pytest.raises(ValueError, match="Linear is no Hugging Face model"):
        use_exclusive_attention(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="reorder_and_upcast_attn"):
        use_exclusive_attention(build("gpt2", "eager", reorder_and_upcast_attn=True))


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"pip install 'xsalab\[hf\]'"):
        use_exclusive_attention(object())
