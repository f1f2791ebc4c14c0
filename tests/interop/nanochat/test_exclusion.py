"""XSA inside nanochat's model, on a stand-in with its calls; test_checkout.py has the real one."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from xsalab.interop.nanochat import insert_exclusion
from xsalab.interop.nanochat.exclusion import NotThisModel


def model_of(checkout: Path, **config: Any) -> Any:
    """A model of the stand-in, which is imported now: what was inserted before stays in."""
    gpt = importlib.import_module("nanochat.gpt")
    torch.manual_seed(0)
    model = gpt.GPT(gpt.GPTConfig(**config))
    model.init_weights()
    return model


def plain(model: Any, layer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of a layer's last call: y without exclusion, v of each query head, and what it returned; in float64."""
    q, k, v, z = model.transformer.h[layer].attn.seen
    y = importlib.import_module("nanochat.flash_attention").plain(q, k, v)
    y, v, z = (x.detach().double().numpy() for x in (y, v, z))
    return y, np.repeat(v, y.shape[2] // v.shape[2], axis=2), z


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("cache", [None, ("keys", "values")], ids=["training", "cache"])
def test_both_calls_of_attention_lose_each_layer_s_share_along_the_value(
    checkout: Path, tokens: Tensor, cache: Any
) -> None:
    """F001, F003: z = y − α (⟨y,v⟩/⟨v,v⟩) v by numpy; two value heads for four query heads; α of each layer its own."""
    alphas = [0.25, 0.0, 1.0]
    insert_exclusion(alphas, "all")
    model = model_of(checkout)
    model(tokens, kv_cache=cache)
    for layer, alpha in enumerate(alphas):
        y, v, z = plain(model, layer)
        expected = y - alpha * (y * v).sum(-1, keepdims=True) / (v * v).sum(-1, keepdims=True) * v
        np.testing.assert_allclose(z, expected, atol=1e-6)
        assert (abs(z - y).max() > 0.01) == (alpha > 0)


def test_strength_0_changes_no_bit(checkout: Path, tokens: Tensor) -> None:
    model = model_of(checkout)
    before = model(tokens, tokens)
    before.backward()
    insert_exclusion(0.0)
    again = model_of(checkout)
    after = again(tokens, tokens)
    after.backward()
    assert torch.equal(before, after)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize(
    ("layers", "expected"),
    [("last:2", [0, 0, 1, 1]), ("with-ve", [0, 1, 0, 1]), ("full-window", [0, 0, 1, 1]), ("none", [0, 0, 0, 0])],
)
def test_layers_go_by_nanochat_s_own_model(
    checkout: Path, layers: str, expected: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    """F005: windows and value embeddings are those of its configuration; what is in effect is said."""
    insert_exclusion(1.0, layers)
    model = model_of(checkout, n_layer=4, window_pattern="SSL")
    assert [block.attn.xsalab_alpha for block in model.transformer.h] == expected
    said = ", ".join(f"{layer}: {alpha}" for layer, alpha in enumerate(expected))
    assert capsys.readouterr().out == f"xsalab: XSA, alpha by layer {{{said}}}\n"


def test_a_model_that_is_only_counted_is_not_asked_for_its_layers(checkout: Path) -> None:
    """base_train builds a second model, of 12 layers, to reckon with its parameters."""
    insert_exclusion([1.0] * 3, "0,2")
    gpt = importlib.import_module("nanochat.gpt")
    gpt.GPT(gpt.GPTConfig(n_layer=12))
    model_of(checkout)
    with pytest.raises(NotThisModel, match="3 numbers for 12 layers"):
        gpt.GPT(gpt.GPTConfig(n_layer=12)).init_weights()


def test_a_layer_that_does_not_know_its_strength_fails(checkout: Path, tokens: Tensor) -> None:
    """F005: never standard attention in silence, as would be where weights are made in another place."""
    insert_exclusion()
    gpt = importlib.import_module("nanochat.gpt")
    with pytest.raises(AttributeError, match="xsalab_alpha"):
        gpt.GPT(gpt.GPTConfig())(tokens)


def test_a_nanochat_that_is_built_in_another_way_is_refused(checkout: Path) -> None:
    gpt = importlib.import_module("nanochat.gpt")
    del gpt.GPT.init_weights
    with pytest.raises(ValueError, match=r"this nanochat is not understood: GPT has no init_weights"):
        insert_exclusion()


@pytest.mark.slow
def test_a_compiled_model_is_one_graph(checkout: Path, tokens: Tensor) -> None:
    """F025, F023: α of each layer is a constant of the graph; training twice compiles once."""
    from torch._dynamo.testing import CompileCounterWithBackend

    insert_exclusion([1.0, 0.0, 0.5])
    model = model_of(checkout)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, dynamic=False, fullgraph=True)
    for _ in range(2):
        compiled(tokens, tokens).backward()
    assert counter.frame_count == 1
    torch.testing.assert_close(compiled(tokens, tokens), model(tokens, tokens))
    torch._dynamo.reset()
