"""Which parameter goes where, and one step of all of them against torch's own optimizers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from xsalab.config import build, dump
from xsalab.model import GPT, ModelConfig, VariantChoice, count_parameters, init_weights, native
from xsalab.optim import Hybrid, OptimConfig, assign_groups, effective_rates
from xsalab.optim.hybrid import GROUPS, Rates
from xsalab.optim.muon import POLAR_EXPRESS

CONFIG = ModelConfig(
    depth=2, width=32, heads=4, kv_heads=2, context=16, vocab_size=50, vocab_multiple=16,
    value_gate_channels=4, smear_channels=8,
)  # fmt: skip
LEARNED = VariantChoice("xsa", options={"alpha": {"learned": "tanh", "start": 0.0}})
RATES = Rates(dict.fromkeys(GROUPS, 0.01), matrix_weight_decay=0.1)


def model_of(choice: VariantChoice | None = None, dtype: torch.dtype = torch.float32) -> GPT:
    model = GPT(CONFIG, choice, dtype=dtype)
    init_weights(model, 0)
    return model


class Matrices(nn.Module):
    """Matrices under names that Muon claims."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.blocks = nn.ParameterList(draw(*shape, seed=i) for i, shape in enumerate(shapes))


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def give_gradients(model: nn.Module, step: int) -> None:
    for i, parameter in enumerate(model.parameters()):
        parameter.grad = draw(*parameter.shape, seed=100 * step + i).to(parameter.dtype)


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


# --- groups


def test_the_table_of_groups() -> None:
    """F030: by name, not by "has two dimensions"; smear's gate is no matrix of the blocks, value gates are."""
    block = ("attention.w_q", "attention.w_k", "attention.w_v", "attention.w_o", "mlp.w1", "mlp.w2")
    assert assign_groups(model_of(LEARNED)) == {
        **{f"blocks.{i}.{name}.weight": "matrix" for i in range(2) for name in block},
        "blocks.1.attention.value_gate.weight": "matrix",
        "blocks.0.attention.variant.strength.raw": "variant",
        "blocks.1.attention.variant.strength.raw": "variant",
        "embedding.weight": "embedding",
        "head.weight": "head",
        "value_embeddings.1.weight": "value_embedding",
        "residual": "residual",
        "x0": "x0",
        "smear_gate.weight": "smear",
        "smear": "smear",
        "backout": "smear",
    }


def test_a_head_gate_is_a_matrix_that_muon_does_not_get() -> None:
    """F030."""
    groups = assign_groups(model_of(VariantChoice("head-gate")))
    assert groups["blocks.0.attention.variant.gate"] == "variant"


@pytest.mark.parametrize(
    "choice", [VariantChoice(), LEARNED, VariantChoice("head-gate"), VariantChoice("sink")], ids=str
)
@pytest.mark.parametrize("kind", ["hybrid", "muon", "adamw"])
def test_every_parameter_is_in_exactly_one_group(choice: VariantChoice, kind: str) -> None:
    model = model_of(choice)
    optimizer = Hybrid(model, OptimConfig(kind=kind), RATES)
    claimed = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert len(claimed) == len(set(claimed)) == len(list(model.parameters()))
    algorithms = {group["role"]: group["algorithm"] for group in optimizer.param_groups}
    assert algorithms.pop("matrix") == kind
    assert set(algorithms.values()) == {"adamw"}


@pytest.mark.parametrize("shape", [(8,), (2, 3, 4), ()], ids=str)
def test_what_is_no_matrix_does_not_reach_muon(shape: tuple[int, ...]) -> None:
    """F029: refused when the optimizer is built, by name and shape."""
    model = Matrices((4, 4), shape)
    with pytest.raises(ValueError, match=rf"parameter blocks\.1 \({', '.join(map(str, shape))}.*is not a matrix"):
        Hybrid(model, OptimConfig(), RATES)


def test_a_parameter_that_no_rule_claims_is_named() -> None:
    model = model_of()
    model.extra = nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(ValueError, match=r"claims parameter extra \(3, 3\)"):
        assign_groups(model)


def test_the_table_of_betas_and_decay() -> None:
    optimizer = Hybrid(model_of(LEARNED), OptimConfig(), RATES)
    got = {group["role"]: (group["betas"], group["weight_decay"]) for group in optimizer.param_groups}
    assert got.pop("matrix")[1] == 0.1
    assert got == {
        "head": ((0.8, 0.96), 0.01),
        "embedding": ((0.8, 0.995), 0.001),
        "value_embedding": ((0.8, 0.995), 0.01),
        "residual": ((0.8, 0.95), 0.05),
        "x0": ((0.96, 0.95), 0.0),
        "smear": ((0.8, 0.95), 0.0),
        "variant": ((0.8, 0.95), 0.0),
    }


# --- rates


def rates(config: OptimConfig | None = None, *, depth: int = 4, batch: int = 4096) -> Rates:
    def scaling(depth: int) -> int:
        model = GPT(ModelConfig(depth=depth, width=32 * depth, heads=depth, context=512, vocab_size=2048))
        return count_parameters(model).scaling

    return effective_rates(
        config or OptimConfig(), width=32 * depth, batch_tokens=batch, scaling_parameters=scaling(depth),
        reference_parameters=scaling(12),
    )  # fmt: skip


def test_rates_are_scaled_as_nanochat_prints_it() -> None:
    """The console of a real run of depth 4 × 128 and batches of 4,096 tokens prints the three numbers."""
    by_batch, by_width, decay = 0.0884, 2.449490, 0.519696
    got = rates()
    assert got.matrix_weight_decay == pytest.approx(decay, abs=5e-7)
    want = {
        "matrix": 0.02 * by_batch,
        "head": 0.008 * by_batch * by_width,
        "embedding": 0.3 * by_batch * by_width,
        "value_embedding": 0.15 * by_batch * by_width,
        "residual": 0.005 * by_batch,
        "x0": 0.5 * by_batch,
        "variant": 0.02 * by_batch,
        "smear": 0.2,
    }
    assert got.lr == pytest.approx(want, rel=6e-4)  # 0.0884 has three digits


def test_at_the_reference_nothing_is_scaled() -> None:
    config = OptimConfig(reference_width=384)
    got = rates(config, depth=12, batch=524_288)
    assert got.lr == {group: getattr(config, f"{group}_lr") for group in GROUPS}
    assert got.matrix_weight_decay == 0.28


def test_scaling_can_be_switched_off_and_lr_scale_is_on_every_rate() -> None:
    plain = rates(OptimConfig(scale_by_width=False, scale_by_batch=False))
    assert plain.lr == {group: getattr(OptimConfig(), f"{group}_lr") for group in GROUPS}
    assert plain.matrix_weight_decay == 0.28
    for kind in ("hybrid", "muon", "adamw"):
        full, half = rates(OptimConfig(kind=kind)), rates(OptimConfig(kind=kind, lr_scale=0.5))
        assert half.lr == pytest.approx({group: rate / 2 for group, rate in full.lr.items()})
        assert half.matrix_weight_decay == full.matrix_weight_decay


def test_adamw_alone_has_one_rate() -> None:
    assert set(rates(OptimConfig(kind="adamw", adamw_lr=3e-4)).lr.values()) == {3e-4}


# --- steps


def test_the_first_step_from_a_zero_output_is_finite() -> None:
    """F028: W_o and W_2 start at zero, so the matrices before them get a zero gradient: they decay alone."""
    model = model_of(LEARNED)
    optimizer = Hybrid(model, OptimConfig(), RATES)
    tokens = torch.randint(0, 50, (2, 16), generator=torch.Generator().manual_seed(0))
    before = values(model)
    model.token_nats(tokens[:, :-1], tokens[:, 1:]).mean().backward()
    optimizer.step()
    after = values(model)
    assert all(tensor.isfinite().all() for tensor in after.values())
    w_q = "blocks.0.attention.w_q.weight"
    torch.testing.assert_close(after[w_q], before[w_q] * (1 - 0.01 * 0.1))
    assert not torch.equal(after["blocks.0.attention.w_o.weight"], before["blocks.0.attention.w_o.weight"])
    assert not torch.equal(after["embedding.weight"], before["embedding.weight"])


@pytest.mark.parametrize(("shape", "size"), [((16, 4), 4.0), ((4, 16), 2.0), ((9, 9), 3.0)], ids=str)
def test_the_size_of_an_update_is_the_formula(shape: tuple[int, int], size: float) -> None:
    """F033: ‖ΔW‖ = η · √max(1, m/n) · √min(m, n) for m outputs and n inputs, tall and wide."""
    model = Matrices(shape)
    before = values(model)["blocks.0"]
    give_gradients(model, 1)
    Hybrid(model, OptimConfig(), Rates(dict.fromkeys(GROUPS, 0.01), 0.0)).step()
    assert (values(model)["blocks.0"] - before).norm().item() == pytest.approx(0.01 * size, rel=1e-4)


@pytest.mark.parametrize("kind", ["hybrid", "muon"])
def test_query_key_and_value_are_updated_each_on_its_own(kind: str) -> None:
    """F032: the three are separate matrices; each moves as if it were alone."""
    together = Matrices((8, 8), (8, 8), (8, 8))
    optimizer = Hybrid(together, OptimConfig(kind=kind), RATES)
    for step in range(3):
        give_gradients(together, step)
        optimizer.step()
    for i in range(3):
        alone = Matrices((8, 8))
        with torch.no_grad():
            alone.blocks[0].copy_(draw(8, 8, seed=i))
        optimizer = Hybrid(alone, OptimConfig(kind=kind), RATES)
        for step in range(3):
            alone.blocks[0].grad = draw(8, 8, seed=100 * step + i)
            optimizer.step()
        torch.testing.assert_close(alone.blocks[0], together.blocks[i], atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["hybrid", "muon", "adamw"])
def test_what_has_no_gradient_does_not_move(kind: str) -> None:
    """F035: bit-identical after 10 steps with decay, though others of its shape move."""
    model = model_of()
    frozen = ("blocks.0.attention.w_q.weight", "blocks.1.mlp.w2.weight", "embedding.weight", "x0")
    with torch.no_grad():
        model.blocks[1].mlp.w2.weight.add_(1.0)  # pyright: ignore
    before = values(model)
    optimizer = Hybrid(model, OptimConfig(kind=kind), RATES)
    for step in range(10):
        give_gradients(model, step)
        for name, parameter in model.named_parameters():
            if name in frozen:
                parameter.grad = None
        optimizer.step()
    after = values(model)
    assert {name for name in before if torch.equal(before[name], after[name])} == set(frozen)


def test_it_needs_no_process_group() -> None:
    """F038."""
    assert not torch.distributed.is_initialized()
    model = model_of()
    optimizer = Hybrid(model, OptimConfig(), RATES)
    give_gradients(model, 0)
    optimizer.step()


def test_steps_repeat_to_the_bit() -> None:
    results = []
    for _ in range(2):
        model = model_of(LEARNED)
        optimizer = Hybrid(model, OptimConfig(), RATES)
        for step in range(3):
            give_gradients(model, step)
            optimizer.step()
        results.append(values(model))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


# torch.optim.Muon iterates in bfloat16. Measured after five steps: with PyTorch's iteration in bfloat16 the weights are
# the same to the bit (the same products in the same order; the kernels add in another), in float32 they are 7e-4
# apart, which is the rounding of the bfloat16 iteration (entries of about 0.2, off by 1 %) times the rate of 0.02, √3
# for the tall one, and 5 steps.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-4), (torch.float32, 2e-3)], ids=str)
@pytest.mark.parametrize("shape", [(24, 24), (48, 16), (16, 48)], ids=str)
def test_plain_muon_is_torchs(shape: tuple[int, int], dtype: torch.dtype, tolerance: float) -> None:
    ours, theirs = Matrices(shape, shape), Matrices(shape, shape)
    rates = Rates(dict.fromkeys(GROUPS, 0.02), matrix_weight_decay=0.1)
    optimizer = Hybrid(ours, OptimConfig(kind="muon"), rates, dtype=dtype)
    oracle = torch.optim.Muon(theirs.parameters(), lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=True)
    start = values(ours)
    for step in range(5):
        for model in (ours, theirs):
            give_gradients(model, step)
        with native.plain():
            optimizer.step()
        oracle.step()
    for name, value in values(theirs).items():
        assert (value - start[name]).abs().max() > 0.02
        torch.testing.assert_close(values(ours)[name], value, atol=tolerance, rtol=0)


def test_adamw_for_everything_is_torchs() -> None:
    """Five steps; matrices and tables decay, scalars and a variant's own parameters do not."""
    ours, theirs = model_of(LEARNED), model_of(LEARNED)
    config = OptimConfig(kind="adamw", adamw_lr=1e-2, adamw_betas=(0.9, 0.95), adamw_weight_decay=0.1)
    optimizer = Hybrid(ours, config, Rates(dict.fromkeys(GROUPS, 1e-2), 0.1))
    decayed = {"matrix", "head", "embedding", "value_embedding"}
    named = dict(theirs.named_parameters())
    oracle = torch.optim.AdamW(
        [
            {
                "params": [named[n] for n, g in assign_groups(theirs).items() if (g in decayed) == yes],
                "weight_decay": decay,
            }
            for yes, decay in ((True, 0.1), (False, 0.0))
        ],
        lr=1e-2,
        betas=(0.9, 0.95),
        eps=1e-10,
    )
    for step in range(5):
        for model in (ours, theirs):
            give_gradients(model, step)
        optimizer.step()
        oracle.step()
    for name, value in values(theirs).items():
        torch.testing.assert_close(values(ours)[name], value, atol=1e-6, rtol=1e-5)


def test_tables_in_bfloat16_are_updated_in_float32() -> None:
    """F042: float32 state and maths, rounded once on the way back."""
    half, full = model_of(dtype=torch.bfloat16), model_of()
    with torch.no_grad():
        full.embedding.weight.copy_(half.embedding.weight)
    optimizers = [Hybrid(model, OptimConfig(), RATES) for model in (half, full)]
    gradient = draw(*half.embedding.weight.shape, seed=1).bfloat16()
    half.embedding.weight.grad, full.embedding.weight.grad = gradient, gradient.float()
    for optimizer in optimizers:
        optimizer.step()
    assert half.embedding.weight.dtype == torch.bfloat16
    assert torch.equal(half.embedding.weight, full.embedding.weight.bfloat16())
    state = optimizers[0].state[half.embedding.weight]
    assert (state["mean"].dtype, state["square"].dtype) == (torch.float32, torch.float32)


def test_a_step_sets_rate_momentum_and_decay() -> None:
    config = OptimConfig(warmup_steps=10)
    optimizer = Hybrid(model_of(), config, RATES)
    schedule = config.schedule_over(1000)
    for step in (0, 5, 100, 999):
        optimizer.set_step(schedule, step)
        by_role = {group["role"]: group for group in optimizer.param_groups}
        assert all(group["lr"] == 0.01 * schedule.lr(step) for group in by_role.values())
        assert by_role["matrix"]["momentum"] == schedule.momentum(step)
        assert by_role["matrix"]["weight_decay"] == 0.1 * schedule.weight_decay(step)
        assert by_role["head"]["weight_decay"] == 0.01  # AdamW's decay is not scheduled


def test_plain_muon_keeps_its_momentum_and_decay() -> None:
    config = OptimConfig(kind="muon")
    optimizer = Hybrid(model_of(), config, RATES)
    optimizer.set_step(config.schedule_over(1000), 700)
    (group,) = (group for group in optimizer.param_groups if group["role"] == "matrix")
    assert (group["momentum"], group["weight_decay"]) == (0.95, 0.1)


# --- state


@pytest.mark.parametrize("kind", ["hybrid", "muon", "adamw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_five_steps_are_three_and_two(kind: str, dtype: torch.dtype) -> None:
    """The state by name, put into a new optimizer over a new model, goes on to the bit."""
    config = OptimConfig(kind=kind, warmup_steps=2)
    schedule = config.schedule_over(5)

    def advance(model: GPT, optimizer: Hybrid, steps: range) -> None:
        for step in steps:
            give_gradients(model, step)
            optimizer.set_step(schedule, step)
            optimizer.step()

    whole = model_of(LEARNED, dtype)
    advance(whole, Hybrid(whole, config, RATES), range(5))

    first = model_of(LEARNED, dtype)
    saved = Hybrid(first, config, RATES)
    advance(first, saved, range(3))
    state = {name: tensor.clone() for name, tensor in saved.named_state().items()}
    assert len(state) == sum(len(each) for each in saved.state.values())

    second = model_of(LEARNED, dtype)
    second.load_state_dict(first.state_dict())
    resumed = Hybrid(second, config, RATES)
    resumed.load_named_state(state)
    advance(second, resumed, range(3, 5))
    assert [name for name, value in values(whole).items() if not torch.equal(value, values(second)[name])] == []


def test_a_loaded_state_is_a_copy() -> None:
    model = Matrices((4, 4))
    optimizer = Hybrid(model, OptimConfig(), RATES)
    give_gradients(model, 0)
    optimizer.step()
    state = optimizer.named_state()
    other = Hybrid(model, OptimConfig(), RATES)
    other.load_named_state(state)
    before = {name: tensor.clone() for name, tensor in state.items()}
    other.step()
    assert all(torch.equal(state[name], before[name]) for name in state)


def test_state_of_an_unknown_parameter_is_named() -> None:
    with pytest.raises(ValueError, match=r"optimizer state for 'blocks\.7'"):
        Hybrid(Matrices((4, 4)), OptimConfig(), RATES).load_named_state({"blocks.7:momentum": torch.zeros(4, 4)})


# --- configuration


def test_coefficients_are_stored_with_the_run() -> None:
    """F043: they come from the configuration of the run, not from the code of the day."""
    stored = dump(OptimConfig())
    assert [tuple(step) for step in stored["polar_express"]] == list(POLAR_EXPRESS)
    assert build(OptimConfig, stored) == OptimConfig()
    updates: list[Tensor] = []
    for coefficients in (POLAR_EXPRESS, POLAR_EXPRESS[:2]):
        model = Matrices((6, 6))
        give_gradients(model, 0)
        Hybrid(model, OptimConfig(polar_express=tuple(coefficients)), RATES).step()
        updates.append(values(model)["blocks.0"])
    assert not torch.allclose(updates[0], updates[1], atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "sgd"}, "kind = 'sgd': use one of hybrid, muon, adamw"),
        ({"schedule": "linear"}, "schedule = 'linear': use one of nanochat, cosine"),
        ({"matrix_lr": -0.1}, "matrix_lr = -0.1: must be a finite number of at least 0"),
        ({"lr_scale": math.nan}, "lr_scale = nan"),
        ({"adamw_lr": math.inf}, "adamw_lr = inf"),
        ({"final_lr": -1.0}, "final_lr = -1.0"),
        ({"clip": -1.0}, "clip = -1.0"),
        ({"weight_decay": -1.0}, "weight_decay = -1.0"),
        ({"warmdown": 0.0}, "warmdown = 0.0: a share of the steps"),
        ({"warmdown": 1.5}, "warmdown = 1.5"),
        ({"warmup_steps": -1}, "warmup_steps = -1"),
    ],
    ids=str,
)
def test_a_wrong_number_is_named(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimConfig(**change)


@pytest.mark.parametrize(
    ("field", "value"),
    [("reference_batch", 0), ("reference_width", 0), ("plain_muon_steps", 0), ("polar_express", ()),
     ("adamw_betas", (1.0, 0.95)), ("momentum_peak", 5.0), ("adam_eps", 0.0)],
)  # fmt: skip
def test_constants_that_cannot_work_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        OptimConfig(**{field: value})  # pyright: ignore[reportArgumentType]
