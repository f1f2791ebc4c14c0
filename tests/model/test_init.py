"""First weights: where every number comes from."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from xsalab.model import GPT, ModelConfig, VariantChoice, count_parameters, init_weights

CONFIG = ModelConfig(depth=4, width=96, heads=4, kv_heads=2, vocab_size=1000)
LEARNED = VariantChoice("xsa", options={"alpha": {"learned": "tanh", "start": 0.0}})


def built(seed: int = 0, choice: VariantChoice | None = None, config: ModelConfig = CONFIG, **how) -> dict[str, Tensor]:
    model = GPT(config, choice, **how)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".variant." not in name:
                parameter.fill_(math.nan)
    init_weights(model, seed)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", ["standard", "xsa", "self-masked", "head-gate", "sink"])
def test_nothing_keeps_what_was_in_memory(name: str) -> None:
    """F047: memory is filled with NaN first; parameters and buffers are looked through by name."""
    model = GPT(CONFIG, VariantChoice(name))
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            if ".variant." not in label:  # its constructor has filled these
                parameter.fill_(math.nan)
    init_weights(model, 0)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert [label for label, tensor in tensors.items() if not tensor.isfinite().all()] == []


ARMS = {
    "xsa": VariantChoice("xsa"),
    "xsa-learned": LEARNED,
    "xsa-last": VariantChoice("xsa", "last:2"),
    "head-gate": VariantChoice("head-gate"),
    "sink": VariantChoice("sink", "first:1"),
    "self-masked": VariantChoice("self-masked"),
}


@pytest.mark.parametrize("arm", ARMS)
def test_arms_share_every_weight_that_both_have(arm: str) -> None:
    """F048: a feature that is on draws nothing from a common stream."""
    standard, other = built(), built(choice=ARMS[arm])
    assert standard.keys() <= other.keys()
    assert [name for name in standard if not torch.equal(standard[name], other[name])] == []


def test_a_part_that_is_off_shifts_no_other_weight() -> None:
    """F048, for the model's own switches."""
    full = built()
    less = built(config=ModelConfig(**{**vars(CONFIG), "smear": False, "value_embeddings": False, "backout": False}))
    assert less.keys() < full.keys()
    assert [name for name in less if not torch.equal(less[name], full[name])] == []


def test_deeper_models_begin_alike() -> None:
    deeper = built(config=ModelConfig(**{**vars(CONFIG), "depth": 6}))
    shared = [name for name in built() if name.startswith("blocks.") and "value_gate" not in name]
    assert all(torch.equal(built()[name], deeper[name]) for name in shared)


def test_seeds_differ_and_repeat() -> None:
    """F051: the seed reaches every drawn tensor; the same seed gives the same bits; the global stream is not used."""
    first, again, other = built(1), built(1), built(2)
    torch.manual_seed(123)
    later = built(1)
    drawn = [name for name in first if first[name].unique().numel() > 8 or "gate" in name]
    assert len(drawn) >= 20
    for name in first:
        assert torch.equal(first[name], again[name])
        assert torch.equal(first[name], later[name])
        assert torch.equal(first[name], other[name]) == (name not in drawn)


def test_no_number_is_drawn_from_the_global_stream() -> None:
    before = torch.get_rng_state()
    built(choice=VariantChoice("head-gate"))
    assert torch.equal(torch.get_rng_state(), before)


def test_bfloat16_is_the_same_start_rounded() -> None:
    """Drawn in float32, then cast."""
    exact, cast = built(), built(dtype=torch.bfloat16)
    assert all(torch.equal(exact[name].to(cast[name].dtype), cast[name]) for name in exact)


def test_two_tensors_never_share_a_stream() -> None:
    weights = built()
    first = [
        weights[f"blocks.{layer}.attention.w_{name}.weight"].flatten()[:50] for layer in range(4) for name in "qkv"
    ]
    assert len({tuple(tensor.tolist()) for tensor in first}) == 12


def moments(tensor: Tensor) -> tuple[float, float]:
    return tensor.mean().item(), tensor.std().item()


@pytest.mark.parametrize(("name", "std"), [("embedding.weight", 0.8), ("head.weight", 0.001)])
def test_tables_are_normal(name: str, std: float) -> None:
    tensor = built()[name] / std
    n = tensor.numel()
    assert abs(tensor.mean().item()) < 4 / math.sqrt(n)
    assert abs(tensor.std().item() - 1) < 4 / math.sqrt(2 * n)
    for limit, share in ((1.0, 0.682689), (2.0, 0.954500)):
        inside = (tensor.abs() < limit).double().mean().item()
        assert abs(inside - share) < 4 * math.sqrt(share * (1 - share) / n)


BOUND = math.sqrt(3 / 96)
UNIFORM = {
    "blocks.0.attention.w_q.weight": (-BOUND, BOUND),
    "blocks.1.attention.w_k.weight": (-BOUND, BOUND),
    "blocks.2.attention.w_v.weight": (-BOUND, BOUND),
    "value_embeddings.3.weight": (-BOUND, BOUND),
    "blocks.3.mlp.w1.weight": (-0.4 * BOUND, 0.4 * BOUND),
    "blocks.1.attention.value_gate.weight": (0.0, 0.02),
    "smear_gate.weight": (0.0, 0.02),
}


@pytest.mark.parametrize("name", UNIFORM)
def test_matrices_are_uniform(name: str) -> None:
    """Within the bounds, reaching for both, with the mean and spread of a uniform distribution."""
    low, high = UNIFORM[name]
    unit = (built()[name] - low) / (high - low)
    n = unit.numel()
    assert 0 <= unit.min().item() < 12 / n
    assert 1 - 12 / n < unit.max().item() <= 1
    mean, std = moments(unit)
    assert abs(mean - 0.5) < 4 / math.sqrt(12 * n)
    assert abs(std - 1 / math.sqrt(12)) < 4 * math.sqrt(1 / 180) / (2 / math.sqrt(12)) / math.sqrt(n)


def test_output_matrices_and_smear_start_at_0() -> None:
    weights = built()
    zero = {name for name, tensor in weights.items() if not tensor.any()}
    assert zero == {f"blocks.{i}.{part}.weight" for i in range(4) for part in ("attention.w_o", "mlp.w2")} | {"smear"}


def test_residual_scalars_fall_linearly() -> None:
    weights = built()
    torch.testing.assert_close(weights["residual"], torch.tensor([1.15 - 0.10 * i / 3 for i in range(4)]))
    torch.testing.assert_close(weights["x0"], torch.tensor([0.20 - 0.15 * i / 3 for i in range(4)]))
    assert weights["backout"].tolist() == pytest.approx([0.2])


def test_a_single_layer_has_the_first_layers_scalars() -> None:
    weights = built(config=ModelConfig(**{**vars(CONFIG), "depth": 1}))
    assert (weights["residual"].item(), weights["x0"].item()) == pytest.approx((1.15, 0.20))


def test_constants_are_configuration() -> None:
    changed = built(config=ModelConfig(**{**vars(CONFIG), "embedding_std": 0.1, "mlp_bound": 1.0, "head_std": 0.0}))
    assert changed["embedding.weight"].std().item() == pytest.approx(0.1, rel=0.02)
    assert changed["blocks.0.mlp.w1.weight"].max().item() == pytest.approx(BOUND, rel=0.01)
    assert not changed["head.weight"].any()


def test_an_unknown_parameter_is_named() -> None:
    model = GPT(CONFIG)
    model.extra = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match=r"no rule gives parameter extra \(3,\)"):
        init_weights(model, 0)


@pytest.mark.parametrize("arm", [VariantChoice(), LEARNED, VariantChoice("head-gate")], ids=["standard", "xsa", "gate"])
def test_every_parameter_is_counted_once(arm: VariantChoice) -> None:
    model = GPT(CONFIG, arm)
    counts = count_parameters(model)
    assert counts.total == sum(parameter.numel() for parameter in model.parameters())
    assert counts.scaling == count_parameters(GPT(CONFIG)).scaling  # a variant's own parameters buy no tokens


def test_counts_are_those_that_nanochat_prints() -> None:
    """The console output of a real nanochat run of this shape (12 channels of a gate, 24 of smear)."""
    counts = count_parameters(GPT(ModelConfig(depth=4, width=128, heads=4, context=512, vocab_size=2048)))
    assert counts == (262_144, 524_288, 262_144, 786_528, 34)
    assert counts.total == 1_835_138
