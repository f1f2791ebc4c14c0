"""Every check passes; and each property, broken once, is found by its check."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from xsalab import check
from xsalab.check import Check
from xsalab.model import KVCache, ModelConfig, VariantChoice, exclude_self, layers, xsa
from xsalab.model import attend as kernels
from xsalab.model import head as head_module
from xsalab.model.variant import VARIANTS, Standard

FLOAT, BFLOAT, DOUBLE = torch.float32, torch.bfloat16, torch.float64


def failed(checks: Iterator[Check]) -> list[str]:
    return [result.name for result in checks if not result.passed]


CHECKS: dict[str, Callable[[], Iterator[Check]]] = {
    "orthogonal float32": lambda: check.orthogonal_at_one(FLOAT),
    "orthogonal bfloat16": lambda: check.orthogonal_at_one(BFLOAT),
    "orthogonal float64": lambda: check.orthogonal_at_one(DOUBLE),
    "gradients": check.gradients,
    "cache float32": lambda: check.cached_decoding(FLOAT),
    "cache bfloat16": lambda: check.cached_decoding(BFLOAT),
    "causality": check.causality,
    "fast paths float32": lambda: check.fast_paths(FLOAT),
    "fast paths bfloat16": lambda: check.fast_paths(BFLOAT),
}


@pytest.mark.parametrize("name", CHECKS)
def test_every_check_passes(name: str) -> None:
    """With the figure as a number and a line that says so."""
    found = list(CHECKS[name]())
    assert found
    for result in found:
        assert result.passed, str(result)
        assert math.isfinite(result.figure)
        assert str(result).startswith("ok ")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT], ids=["float32", "bfloat16"])
def test_alpha_0_is_standard_attention(dtype: torch.dtype) -> None:
    """Three forms of α = 0: logits, loss, gradients and 50 steps of training to the bit."""
    found = list(check.neutral_at_zero(dtype))
    assert len(found) == 4
    assert [str(result) for result in found if not result.passed or result.tolerance or result.figure] == []


@pytest.fixture
def operation(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Tensor]], None]:
    """Puts another function in the place of exclude_self, in the model and in the checks."""

    def replace(function: Callable[..., Tensor]) -> None:
        monkeypatch.setattr(check, "exclude_self", function)
        monkeypatch.setattr(xsa, "exclude_self", function)

    return replace


def own(y: Tensor, v: Tensor) -> Tensor:
    return v.repeat_interleave(y.shape[2] // v.shape[2], dim=2)


def test_a_value_that_is_normalised_first_is_found(operation: Any) -> None:
    """operation.md: 8.5e-2 in bfloat16 with a normalised v, and 1.6e-2 at position 0."""

    def normalised(y: Tensor, v: Tensor, alpha: float = 1.0) -> Tensor:
        unit = own(y, v)
        unit = unit / unit.norm(dim=-1, keepdim=True)
        return y - alpha * (y * unit).sum(-1, keepdim=True) * unit

    operation(normalised)
    assert len(failed(check.orthogonal_at_one(BFLOAT))) == 2
    assert "α = 1: position 0, float32" in failed(check.orthogonal_at_one(FLOAT))


def test_a_ratio_in_bfloat16_is_found(operation: Any) -> None:
    def rounded(y: Tensor, v: Tensor, alpha: float = 1.0) -> Tensor:
        value = own(y, v)
        ratio = (y.float() * value.float()).sum(-1, keepdim=True) / value.float().square().sum(-1, keepdim=True)
        return y - alpha * ratio.to(y.dtype) * value

    operation(rounded)
    assert failed(check.orthogonal_at_one(BFLOAT)) == ["α = 1: largest |cos(z, v)|, bfloat16"]


def test_a_wrong_gradient_is_found(operation: Any) -> None:
    """The last term of ∂L/∂v forgotten: found against differences, and against autograd of the formula."""

    class Forgets(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor, v: Tensor, alpha: Any) -> Tensor:  # pyright: ignore
            ctx.save_for_backward(y, v)
            ctx.alpha = alpha
            with torch.no_grad():
                return exclude_self(y, v, alpha)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
            y, v = ctx.saved_tensors
            with torch.enable_grad():
                leaves = [tensor.detach().requires_grad_() for tensor in (y, v)]
                exclude_self(leaves[0], leaves[1], ctx.alpha).backward(grad)
                value = own(y, v)
                norm = value.square().sum(-1, keepdim=True)
                c, d = (((t * value).sum(-1, keepdim=True) / norm) for t in (y, grad))
                alpha = ctx.alpha.view(-1, 1) if isinstance(ctx.alpha, Tensor) else ctx.alpha
                lost = (2 * alpha * c * d * value).unflatten(2, (v.shape[2], -1)).sum(3)
            return leaves[0].grad, leaves[1].grad - lost, None  # pyright: ignore

    operation(lambda y, v, alpha=1.0: Forgets.apply(y, v, alpha))
    alpha = torch.linspace(0.1, 0.9, 6, dtype=DOUBLE)
    y, _, v = check._qkv(DOUBLE, length=4)
    assert torch.equal(check.exclude_self(y, v, alpha), exclude_self(y, v, alpha)), "its forward pass is right"
    assert "exclude_self, float32" in failed(check.fast_paths(FLOAT))
    assert failed(check.gradients()) == ["gradient of v against differences, float64"]


def test_a_cache_that_slices_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values of the first tokens in place of the newest."""
    plain = KVCache.extend

    def shifted(self: KVCache, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = plain(self, layer, k, v)
        return keys, values.roll(1, dims=1) if self.length else values

    monkeypatch.setattr(KVCache, "extend", shifted)
    for dtype in (FLOAT, BFLOAT):
        assert len(failed(check.cached_decoding(dtype))) == 5


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[[type], None]:
    return lambda cls: monkeypatch.setitem(VARIANTS, "mine", cls)


@pytest.mark.parametrize("axis", [0, 1], ids=["rows", "positions"])
def test_a_variant_that_leaks_is_found(axis: int, register: Any) -> None:
    """F008: a mean over positions sees the future, a mean over rows another row."""

    class Leak(Standard):
        def forward(self, t: Any, attend: Any) -> Tensor:
            y = attend(t.q, t.k, t.v)
            return y + y.mean(axis, keepdim=True)

    register(Leak)
    assert failed(check.causality()) == ["causality of mine"]


def test_an_experiments_own_arms_are_checked(register: Any) -> None:
    """With its model: a leak in the second layer alone, of a model of three."""

    class Leak(Standard):
        def forward(self, t: Any, attend: Any) -> Tensor:
            y = attend(t.q, t.k, t.v)
            return y.flip(1) if self.site.layer == 1 and self.site.depth == 3 else y

    register(Leak)
    config = ModelConfig(depth=3, width=32, heads=2, context=16, vocab_size=50)
    assert failed(check.causality()) == ["causality of mine"]
    config2 = ModelConfig(depth=2, width=32, heads=2, context=16, vocab_size=50)
    found = list(check.causality(((config, VariantChoice("mine", "1")), (config2, VariantChoice("mine")))))
    assert [result.passed for result in found[-2:]] == [False, True]


@pytest.mark.parametrize("by", [-1, 1], ids=["shorter", "longer"])
@pytest.mark.parametrize("name", ["sdpa", "blocked"])
def test_a_window_off_by_one_is_found(name: str, by: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kernels.KERNELS, name, lambda q, k, v, window: kernels.explicit(q, k, v, window + by))
    found = failed(check.fast_paths(FLOAT))
    assert f"attention kernel {name}, window 8, float32" in found
    assert all(name in entry for entry in found)


def test_a_head_that_counts_its_padding_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = head_module.token_nats
    monkeypatch.setattr(head_module, "token_nats", lambda x, w, targets, cap, vocabulary: plain(x, w, targets, cap, 64))
    assert failed(check.fast_paths(FLOAT)) == ["head and loss in blocks, float32"]


@pytest.mark.parametrize(("function", "check_name"), [("_RMSNorm", "rms_norm"), ("_ReluSquared", "MLP")])
def test_a_wrong_backward_of_a_small_part_is_found(
    function: str, check_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = getattr(layers, function).backward

    def wrong(ctx: Any, grad: Tensor) -> Any:
        found = plain(ctx, grad)
        return 1.01 * found if isinstance(found, Tensor) else (1.01 * found[0], *found[1:])

    monkeypatch.setattr(getattr(layers, function), "backward", staticmethod(wrong))
    assert failed(check.fast_paths(FLOAT)) == [f"{check_name}, float32"]


def test_a_live_path_with_noise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """α = 0 through the formula with one rounding more: the static form is exact, the live ones are not."""
    plain = xsa._forward
    monkeypatch.setattr(xsa, "_forward", lambda y, v, alpha: plain(y, v, alpha) * (1 + 1e-6))
    found = list(islice(check.neutral_at_zero(FLOAT), 3))
    assert [result.passed for result in found] == [True, False, False]


@pytest.mark.slow
def test_training_that_parts_from_standard_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A learned α that moves although its rate is 0: found by the 50 steps alone."""
    plain = check.Hybrid.step

    def moves(self: Any, closure: None = None) -> None:
        plain(self, closure)
        for parameter, name in self.names.items():
            if name.endswith(".raw"):
                parameter.data += 1e-3

    monkeypatch.setattr(check.Hybrid, "step", moves)
    assert failed(check.neutral_at_zero(FLOAT)) == ["α = 0 trains as standard attention, float32"]


@pytest.mark.parametrize("figure", [2.0, math.nan, math.inf])
def test_a_figure_beyond_its_tolerance_fails(figure: float) -> None:
    """NaN passes nothing."""
    result = Check("property", figure, 1.0, "note")
    assert not result.passed
    assert str(result).startswith("FAIL property: ")


def test_differences_of_what_cannot_be_compared_are_infinite() -> None:
    nan = torch.tensor([math.nan])
    assert check._difference(nan, nan) == math.inf
    assert check._difference(torch.zeros(2), torch.zeros(3)) == math.inf
    assert check._difference(torch.ones(2), torch.ones(2)) == 0


def test_the_command_ends_with_1_where_a_check_fails(xsalab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line a check with figure and tolerance, a count at the end, and an exit code; JSON the same."""
    results = [Check("good", 1e-7, 1e-6, "note"), Check("exact", 0.0, 0.0), Check("bad", 2.0, 1.0)]
    monkeypatch.setattr(check, "all_checks", lambda *_: iter(results))
    ran = xsalab("check")
    assert ran.code == 1
    assert ran.out.splitlines() == [
        "ok   good: 1e-07 (≤ 1e-06); note", "ok   exact: 0 (exact)", "FAIL bad: 2 (≤ 1)", "2 passed, 1 failed",
    ]  # fmt: skip
    ran = xsalab("check", "--json")
    assert ran.code == 1
    assert [entry["passed"] for entry in json.loads(ran.out)] == [True, True, False]
    monkeypatch.setattr(check, "all_checks", lambda *_: iter(results[:2]))
    assert xsalab("check").code == 0


def test_the_command_takes_the_arms_of_an_experiment(
    xsalab: Any, write_experiment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def fake(compiled: bool, extra: Any) -> Iterator[Check]:
        seen.append((compiled, [(config.depth, choice.name, choice.layers) for config, choice in extra]))
        return iter([])

    monkeypatch.setattr(check, "all_checks", fake)
    path = write_experiment(arms__last={"variant": "xsa", "layers": "last:1"}, controls__null=True)
    assert xsalab("check", path).code == 0
    assert seen == [(False, [(2, "standard", "all"), (2, "xsa", "all"), (2, "xsa", "last:1")])]


def test_all_checks_are_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both dtypes of each; float64 where it is exact; compiled paths when asked."""
    for name in (
        "neutral_at_zero", "orthogonal_at_one", "gradients", "cached_decoding", "causality", "fast_paths",
        "memory_neutral", "compiled_paths",
    ):  # fmt: skip
        monkeypatch.setattr(
            check, name, lambda *a, name=name: iter([f"{name} {a[0] if a and name != 'causality' else ''}"])
        )
    plain = list(check.all_checks())
    assert plain == [
        "neutral_at_zero torch.float32", "neutral_at_zero torch.bfloat16", "orthogonal_at_one torch.float32",
        "orthogonal_at_one torch.bfloat16", "orthogonal_at_one torch.float64", "gradients ",
        "cached_decoding torch.float32", "cached_decoding torch.bfloat16", "causality ", "fast_paths torch.float32",
        "memory_neutral torch.float32", "fast_paths torch.bfloat16", "memory_neutral torch.bfloat16",
    ]  # fmt: skip
    assert list(check.all_checks(compiled=True)) == [*plain, "compiled_paths "]
