"""The kernels of csrc/elementwise.cpp, heads.cpp and linear.cpp against the plain path in float32 of the same inputs.

Inside, the kernels count in float32; what they give and what they keep for backward is rounded to bfloat16, each number
by at most 2^-9 of itself. Two such roundings in a row stay below ``ROUNDING`` in the norm of the difference.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from xsalab.model import ModelConfig, VariantChoice, build_variant, native
from xsalab.model.attention import Attention
from xsalab.model.layers import MLP, Linear, add_norm, rms_norm, rotary_tables, smear

ROUNDING = 2.0**-8
EPS = 2.0**-23

needs_kernels = pytest.mark.skipif(bool(native.reason()), reason=native.reason() or "-")


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Numbers that bfloat16 has, so that both sides start from the same."""
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).bfloat16().float()


def weights_of(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.copy_(draw(*parameter.shape, seed=50 + i, scale=parameter.shape[-1] ** -0.5))
    return module


def run(case: Callable[..., tuple[Tensor, ...]], given: list[Tensor], kept: list[Tensor], fast: bool) -> list[Tensor]:
    """Results of ``case`` and the gradients of ``given``, in bfloat16 by the kernels or plainly in float32, and of
    ``kept``, which stay in float32 on both sides; all under the same gradients of the results.
    """
    dtype = torch.bfloat16 if fast else torch.float32
    leaves = [x.to(dtype).requires_grad_() for x in given] + [x.clone().requires_grad_() for x in kept]
    with nullcontext() if fast else native.plain():
        results = case(*leaves)
        seeds = [draw(*y.shape, seed=100 + i).to(y.dtype) for i, y in enumerate(results)]
        return [*results, *torch.autograd.grad(results, leaves, seeds)]


def norms(x: Tensor) -> tuple[Tensor, ...]:
    return (rms_norm(x, EPS, 1.2),)


def norms_of_small_numbers(x: Tensor) -> tuple[Tensor, ...]:
    return (rms_norm(x / 64, 1e-3),)


def sums(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return add_norm(x, y, EPS)


def mixtures(x: Tensor, y: Tensor, r: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    return add_norm(x, y, EPS, r, b)


def differences(x: Tensor, y: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    return add_norm(x, y, EPS, b=-b)


def smeared(x: Tensor, weight: Tensor, strength: Tensor) -> tuple[Tensor, ...]:
    gate = Linear(weight.shape[1], 1)
    del gate.weight
    gate.weight = weight  # pyright: ignore
    return (smear(x, gate, strength),)


def products(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    return (torch.func.functional_call(Linear(x.shape[-1], 96), {"weight": weights[0]}, (x,)),)


def mlps(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    names = {"w1.weight": weights[0], "w2.weight": weights[1]}
    return (torch.func.functional_call(MLP(x.shape[-1], 160), names, (x,)),)


R, B = torch.tensor(1.15), torch.tensor([0.2])
CASES: dict[str, tuple[Callable[..., tuple[Tensor, ...]], list[Tensor], list[Tensor]]] = {
    "norm": (norms, [draw(2, 37, 96)], []),
    "norm-of-heads": (norms, [draw(3, 5, 2, 32)], []),
    "norm-with-eps": (norms_of_small_numbers, [draw(70, 64)], []),
    "sum": (sums, [draw(2, 37, 96), draw(2, 37, 96, seed=1)], []),
    "mixture": (mixtures, [draw(3, 50, 64), draw(3, 50, 64, seed=1)], [R, B]),
    "difference": (differences, [draw(3, 50, 64), draw(3, 50, 64, seed=1)], [B]),
    "smear": (smeared, [draw(3, 45, 64)], [draw(1, 24, seed=1, scale=0.5), torch.tensor([0.7])]),
    "smear-odd": (smeared, [draw(2, 3, 32)], [draw(1, 5, seed=1, scale=0.5), torch.tensor([0.7])]),
    "linear-few-rows": (products, [draw(2, 7, 64)], [draw(96, 64, seed=2, scale=0.1)]),
    "linear": (products, [draw(3, 99, 64)], [draw(96, 64, seed=2, scale=0.1)]),
    "mlp-few-rows": (mlps, [draw(5, 64)], [draw(160, 64, seed=2, scale=0.1), draw(64, 160, seed=3, scale=0.1)]),
    "mlp": (mlps, [draw(3, 99, 64)], [draw(160, 64, seed=2, scale=0.1), draw(64, 160, seed=3, scale=0.1)]),
}


def distance(got: Tensor, want: Tensor) -> float:
    return float(((got.float() - want).norm() / want.norm()).detach())


@needs_kernels
@pytest.mark.parametrize("name", CASES)
def test_kernels_give_the_plain_results_and_gradients(name: str) -> None:
    got, want = run(*CASES[name], fast=True), run(*CASES[name], fast=False)
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert distance(a, b) < (2 if "mlp" in name else 1) * ROUNDING  # an MLP rounds its hidden numbers too


@needs_kernels
@pytest.mark.parametrize("name", [name for name in CASES if "few" not in name])  # few rows: torch's own products
def test_kernels_repeat_themselves_with_any_number_of_threads(name: str) -> None:
    before = torch.get_num_threads()
    try:
        runs = []
        for threads in (1, 2, 2):
            torch.set_num_threads(threads)
            runs.append(run(*CASES[name], fast=True))
    finally:
        torch.set_num_threads(before)
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


@needs_kernels
def test_other_widths_and_dtypes_go_the_plain_way() -> None:
    x = draw(4, 40).bfloat16()
    with native.plain():
        want = rms_norm(x, EPS), *add_norm(x, x, EPS)
    assert all(torch.equal(a, b) for a, b in zip((rms_norm(x, EPS), *add_norm(x, x, EPS)), want, strict=True))
    assert rms_norm(draw(4, 64), EPS).dtype == torch.float32


# --- queries, keys, values


class Taker(nn.Module):
    """In the place of a variant: hands out what it was given, each part in its place."""

    def __init__(self, projected: bool) -> None:
        super().__init__()
        self.projected = projected

    def project(self, t, attend, w_o) -> Tensor:
        taken = (t.q, t.k, t.v, t.v_projected) if self.projected else (t.q, t.k, t.v)
        return torch.cat(taken, dim=2)


ATTENTIONS = {
    "grouped": {},
    "ungrouped": {"heads": 2},
    "many-groups": {"heads": 40, "kv_heads": 20, "head_dim": 32},
    "wide-heads": {"head_dim": 96},
    "no-norm": {"qk_norm": False},
    "no-scale": {"qk_scale": 1.0},
    "no-embedding": {"value_embeddings": False},
}


@needs_kernels
@pytest.mark.parametrize("rows_differ", [False, True], ids=["one-place", "own-places"])
@pytest.mark.parametrize("projected", [False, True], ids=["mixed", "projected"])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_queries_keys_and_values_are_the_plain_ones(name: str, projected: bool, rows_differ: bool) -> None:
    """Results and the gradients of the input, all weights, the gate and the value embedding."""
    config = ModelConfig(
        **{"depth": 1, "width": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "context": 64} | ATTENTIONS[name]
    )
    attention = Attention(config, 0, build_variant(VariantChoice(), config, 0))
    attention.variant = Taker(projected)  # pyright: ignore
    weights_of(attention)
    b, t = 3, 29
    cos, sin = rotary_tables(64, config.head_size, 100_000.0)
    places = torch.stack([torch.arange(t) + shift for shift in (0, 7, 30)])
    cos, sin = (table[0, places] if rows_differ else table[:, 5 : 5 + t] for table in (cos, sin))
    names = [label for label, _ in attention.named_parameters() if not label.startswith("w_o")]
    kept = [parameter.detach() for label, parameter in attention.named_parameters() if label in names]
    given = [draw(b, t, 64), draw(b, t, config.groups * config.head_size, seed=1)]

    def case(x: Tensor, rows: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        used = rows if config.value_embeddings else None
        made = torch.func.functional_call(
            attention, dict(zip(names, weights, strict=True)), (x, used, cos, sin, lambda q, k, v: v)
        )
        return made, rows * 1  # a gradient for rows where nothing else uses them

    for a, want in zip(run(case, given, kept, fast=True), run(case, given, kept, fast=False), strict=True):
        assert distance(a, want) < 2 * ROUNDING  # the joined product is rounded between


# --- what is kept for backward


def kept_bytes(case: Callable[..., tuple[Tensor, ...]], given: list[Tensor], kept: list[Tensor]) -> int:
    """Bytes kept beside the inputs and the results, which others keep."""
    leaves = [x.bfloat16().requires_grad_() for x in given] + [x.clone().requires_grad_() for x in kept]
    stores: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        stores[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        results = case(*leaves)
    known = {x.untyped_storage().data_ptr() for x in (*leaves, *results)}
    return sum(size for store, size in stores.items() if store not in known)


@needs_kernels
@pytest.mark.parametrize(
    ("name", "bytes_"), [("norm", 4 * 2 * 37), ("sum", 4 * 2 * 37), ("linear", 0), ("mlp", 2 * 3 * 99 * 160)]
)
def test_kernels_keep_no_more_than_they_say(name: str, bytes_: int) -> None:
    """A norm one float32 a row; a product nothing; the MLP one number in bfloat16 a hidden channel."""
    assert kept_bytes(*CASES[name]) == bytes_


@needs_kernels
def test_a_model_wholly_in_bfloat16_runs() -> None:
    """Scalars, gates and rotary tables too, as a library that casts a whole model has them."""
    from xsalab.model import GPT

    config = ModelConfig(depth=2, width=64, heads=2, context=32, vocab_size=50)
    model = weights_of(GPT(config, dtype=torch.bfloat16)).to(torch.bfloat16)
    tokens = torch.arange(40).view(2, 20)
    model.token_nats(tokens, tokens).mean().backward()  # pyright: ignore
    assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in model.parameters())
