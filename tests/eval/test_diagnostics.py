"""Diagnostics against the T × T softmax written out, finite differences, and heads whose weights are set by hand."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from xsalab.eval import diagnostics
from xsalab.eval.diagnostics import attention_weights, diagnose, effective_rank, position_ranges, validation_rows
from xsalab.eval.validation import EvalConfig
from xsalab.model import GPT, QKV, ModelConfig, Variant, VariantChoice, exclude_self, init_weights
from xsalab.model.variant import VARIANTS

CONTEXT = 20
SMALL: dict[str, Any] = {
    "depth": 3, "width": 32, "heads": 4, "kv_heads": 2, "context": CONTEXT, "vocab_size": 50, "vocab_multiple": 16,
    "window": "SSL", "window_block": 4, "value_gate_channels": 4, "smear_channels": 8,
}  # fmt: skip
EDGES = [(0, 20), (0, 1), (1, 2), (2, 4), (4, 8), (8, 16), (16, 20)]


def build(name: str = "standard", options: dict[str, Any] | None = None, *, layers: str = "all", **changes: Any) -> GPT:
    """Grouped heads, short windows, value embeddings in layers 0 and 2; every parameter has numbers of its own."""
    model = GPT(ModelConfig(**{**SMALL, **changes}), VariantChoice(name, layers, options or {}), kernel="explicit")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".strength." not in name:
                random = torch.Generator().manual_seed(sum(name.encode()))
                parameter.copy_(torch.empty(parameter.shape).normal_(0, 0.3, generator=random))
    return model


def rows_of(n: int = 3, context: int = CONTEXT, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random tokens; every seventh target is a special token's."""
    tokens = torch.randint(0, 50, (n, context + 1), generator=torch.Generator().manual_seed(seed))
    targets = tokens[:, 1:].clone()
    targets.flatten()[::7] = -1
    return tokens[:, :-1], targets


# --------------------------------------------------------------------------------------- the oracle: T × T, float64


def recorded(model: GPT, inputs: Tensor) -> list[tuple[QKV, Tensor]]:
    """Of each layer what the variant is given, and the heads' outputs that W_o gets, (b, t, h, d)."""
    given: list[QKV] = []
    z: list[Tensor] = []
    handles = []
    for block in model.blocks:
        attention: Any = block.attention
        handles.append(attention.variant.register_forward_pre_hook(lambda _, arguments: given.append(arguments[0])))
        handles.append(attention.w_o.register_forward_pre_hook(lambda _, arguments: z.append(arguments[0])))
    with torch.no_grad():
        model(inputs)
    for handle in handles:
        handle.remove()
    return [(t, out.unflatten(-1, t.q.shape[2:])) for t, out in zip(given, z, strict=True)]


def weights_of(t: QKV, window: int, diagonal: bool = True, sink: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(b, h, t, t) weights, entropy (b, h, t) in nats and largest scores, key by key as the formulas say."""
    q, k = t.q.double(), t.k.double().repeat_interleave(t.q.shape[2] // t.k.shape[2], dim=2)
    b, length, heads, size = q.shape
    scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(size)
    for i in range(length):
        for j in range(length):
            if j > i or i - j > window or (j == i and not diagonal):
                scores[:, :, i, j] = -math.inf
    column = torch.full((b, heads, length, 1), -math.inf, dtype=torch.float64)
    if sink is not None:
        column = sink.detach().double().view(1, -1, 1, 1).expand(b, heads, length, 1)
    every = torch.cat((scores, column), -1).softmax(-1).nan_to_num(0.0)  # a query that sees nothing weighs nothing
    entropy = -(every * every.clamp_min(1e-300).log()).sum(-1)
    return every[..., :-1], entropy, scores.amax(-1)


def expected(
    model: GPT, inputs: Tensor, own: Callable[[QKV], Tensor], diagonal: bool = True
) -> dict[tuple[int, int, int, int], dict[str, float]]:
    """(layer, head, start, end) -> every column but those of gradients, from plain formulas."""
    found: dict[tuple[int, int, int, int], dict[str, float]] = {}
    for layer, (t, z) in enumerate(recorded(model, inputs)):
        variant: Any = model.variants()[layer]
        window = model.config.window_of(layer)
        a, entropy, largest = weights_of(t, window, diagonal, getattr(variant, "logit", None))
        values, v = (x.double().repeat_interleave(t.q.shape[2] // x.shape[2], dim=2) for x in (t.v, own(t)))
        y, z = torch.einsum("bhts,bshd->bthd", a, values), z.double()
        b, _, length, _ = a.shape
        for head in range(a.shape[1]):
            for start, end in EDGES:
                sums: dict[str, list[float]] = {}
                for row in range(b):
                    for i in range(start, end):
                        near = max(0, i - window)
                        seen = i - near + (1 if diagonal else 0)
                        weights, yi, zi, vi = a[row, head, i], y[row, i, head], z[row, i, head], v[row, i, head]
                        one = {
                            "cos_before": _cos(yi, vi), "cos_after": _cos(zi, vi), "norm_before": float(yi.norm()),
                            "norm_after": float(zi.norm()), "norm_value": float(vi.norm()),
                            "self_weight": float(weights[i]), "uniform": 1 / max(seen, 1),
                            "first_weight": float(weights[0]), "entropy": float(entropy[row, head, i]),
                            "reach": math.exp(entropy[row, head, i]),
                            "distance": sum(float(weights[j]) * (i - j) for j in range(length)),
                            "along_y": float((yi @ vi) ** 2 / (vi @ vi)), "yy": float(yi @ yi),
                            "along_z": float((zi @ vi) ** 2 / (vi @ vi)), "zz": float(zi @ zi),
                            "gone": float((yi - zi).norm()), "logit": float(largest[row, head, i]),
                        }  # fmt: skip
                        for name, value in one.items():
                            sums.setdefault(name, []).append(value)
                entry = {name: float(np.mean(sums[name])) for name in diagnostics.MEANS}
                entry["energy_before"] = _ratio(sums["along_y"], sums["yy"])
                entry["energy_after"] = _ratio(sums["along_z"], sums["zz"])
                entry["removed"] = _ratio(sums["gone"], sums["norm_before"])
                entry["logit"] = max(sums["logit"])
                if (start, end) == EDGES[0]:
                    entry["rank_before"], entry["rank_after"] = (
                        numpy_rank(x[:, :, head].reshape(b * length, -1).numpy()) for x in (y, z)
                    )
                found[layer, head, start, end] = entry
    return found


def _cos(a: Tensor, b: Tensor) -> float:
    scale = float(a.norm() * b.norm())
    return float(a @ b) / scale if scale else 0.0


def _ratio(part: list[float], whole: list[float]) -> float:
    return sum(part) / sum(whole) if sum(whole) else 0.0


def numpy_rank(matrix: np.ndarray) -> float:
    """exp of the entropy of the normalised singular values, by numpy's SVD."""
    share = np.linalg.svd(matrix, compute_uv=False)
    share = share[share > 0] / share.sum()
    return float(np.exp(-(share * np.log(share)).sum()))


def mixed(t: QKV) -> Tensor:
    return t.v


def projected(t: QKV) -> Tensor:
    return t.v_projected


CASES: dict[str, tuple[str, dict[str, Any], Callable[[QKV], Tensor], bool]] = {
    "standard": ("standard", {}, mixed, True),
    "xsa": ("xsa", {}, mixed, True),
    "part": ("xsa", {"alpha": 0.3}, mixed, True),
    "projected": ("xsa", {"against": "projected"}, projected, True),
    "learned": ("xsa", {"alpha": {"learned": "tanh", "start": 0.4}}, mixed, True),
    "scheduled": ("xsa", {"alpha": {"from": 0.1, "to": 0.9}}, mixed, True),
    "self-masked": ("self-masked", {}, mixed, False),
    "sink": ("sink", {}, mixed, True),
    "head-gate": ("head-gate", {}, mixed, True),
}


@pytest.mark.parametrize(
    ("case", "block"), [*((case, 700) for case in CASES), ("standard", 1), ("sink", 1), ("self-masked", 2**21)]
)
def test_every_number_is_that_of_the_softmax_written_out(case: str, block: int, monkeypatch: Any) -> None:
    """F171: grouped heads, short windows, value embeddings, score hooks, sinks; one query a block, several, and all."""
    name, options, own, diagonal = CASES[case]
    monkeypatch.setattr(diagnostics, "BLOCK", block)
    model, (inputs, targets) = build(name, options), rows_of(2)
    model.set_progress(0.5)
    want = expected(model, inputs, own, diagonal)
    found = diagnose(model, inputs, targets)
    assert len(found.rows) == len(want)
    assert found.tokens == 2 * CONTEXT
    for row in found.rows:
        oracle = want[row["layer"], row["head"], row["start"], row["end"]]
        for column, value in oracle.items():
            near_zero = column in ("cos_after", "energy_after") and case in ("xsa", "projected")
            if column == "logit" and math.isinf(value):
                assert row[column] is None, (column, row)
            elif near_zero:  # of float32: the rest of a subtraction beside a short z
                assert abs(row[column]) < 2e-5, (column, row)
            else:
                assert row[column] == pytest.approx(value, rel=1e-5, abs=1e-5), (column, oracle, row)
        whole = (row["start"], row["end"]) == EDGES[0]
        assert all((row[column] is not None) == whole for column in ("rank_before", "rank_after", "alpha_gradient"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("window", [1, 3, 7, 40])
def test_weights_of_a_block_are_those_of_the_whole_matrix(window: int, dtype: torch.dtype, monkeypatch: Any) -> None:
    """In the computing dtype's own precision, with blocks of 1, 2, … queries."""
    random = torch.Generator().manual_seed(window)
    q, k = (torch.randn(2, 23, heads, 8, generator=random, dtype=torch.float64).to(dtype) * 2 for heads in (6, 3))
    a, entropy, largest = weights_of(QKV(q, k, k, k, q), window)
    i = torch.arange(23)
    for block in (1, 23 * 12 * 2, 23 * 12 * 5, 2**21):
        monkeypatch.setattr(diagnostics, "BLOCK", block)
        found = attention_weights(q, k, window)
        want = {
            "own": a.diagonal(dim1=2, dim2=3), "first": a[..., 0], "entropy": entropy, "logit": largest,
            "distance": (a * (i[:, None] - i)).sum(-1), "uniform": (1 / (i.clamp_max(window) + 1.0)).expand(2, 6, 23),
        }  # fmt: skip
        for name, value in want.items():
            close = 1e-12 if dtype == torch.float64 and name != "uniform" else 1e-5
            torch.testing.assert_close(
                getattr(found, name).transpose(1, 2).double(), value.double(), rtol=close, atol=close
            )


@pytest.mark.parametrize("window", [1, 16, 300, 2048])
def test_no_block_has_more_scores_than_said(window: int, monkeypatch: Any) -> None:
    """Nor are blocks needlessly short. A short window must not make blocks long: their keys would be as many."""
    shapes = []
    plain = torch.einsum

    def watched(equation: str, *tensors: Tensor) -> Tensor:
        made = plain(equation, *tensors)
        shapes.append(made.numel())
        return made

    monkeypatch.setattr(torch, "einsum", watched)
    monkeypatch.setattr(diagnostics, "BLOCK", 2**17)
    q = torch.randn(1, 2048, 2, 4, generator=torch.Generator().manual_seed(0))
    attention_weights(q, q, window)
    assert len(shapes) > 1
    assert 2**16 < max(shapes) <= 2**17


@pytest.mark.parametrize("kernel", ["auto", "sdpa", "blocked"])
def test_a_fused_kernel_s_weights_are_there(kernel: str) -> None:
    """F171: kernels that keep no weights give the numbers of the one that writes them out."""
    rows = rows_of(2)
    fused, plain = build("xsa", {"alpha": 0.5}), build("xsa", {"alpha": 0.5})
    fused.kernel = kernel
    assert_close(diagnose(fused, *rows).rows, diagnose(plain, *rows).rows, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("name", ["standard", "xsa"])
def test_bfloat16_and_its_kernels_are_measured(name: str) -> None:
    """F171: heads of 32, which the C++ kernels take where they are there: near the written-out softmax."""
    rows, found = rows_of(2), []
    for kernel in ("auto", "explicit"):
        model = GPT(
            ModelConfig(**{**SMALL, "width": 64, "heads": 2, "kv_heads": 1}), VariantChoice(name),
            dtype=torch.bfloat16, kernel=kernel,
        )  # fmt: skip
        init_weights(model, 0)
        with torch.no_grad():
            for block in model.blocks:
                block.attention.w_o.weight.normal_(0, 0.1, generator=torch.Generator().manual_seed(0))  # pyright: ignore
        found.append(diagnose(model, *rows).rows)
    for a, b in zip(*found, strict=True):
        for column in ("cos_before", "energy_before", "removed", "self_weight", "first_weight", "norm_after"):
            assert a[column] == pytest.approx(b[column], rel=0.03, abs=0.01), column


def test_rows_may_come_in_batches() -> None:
    """One row, two or all at a time: the same means, sums and gradients."""
    model, (inputs, targets) = build("xsa", {"alpha": 0.5}), rows_of(3)
    one, two, three = (diagnose(model, inputs, targets, batch_rows=n) for n in (1, 2, 3))
    for other in (two, three):
        assert other.loss == pytest.approx(one.loss, rel=1e-6)
        assert_close(one.rows, other.rows, rel=1e-4, abs=1e-6)


def assert_close(some: list[dict[str, Any]], others: list[dict[str, Any]], rel: float, abs: float) -> None:
    """The same columns, absent in the same places, and near one another."""
    for a, b in zip(some, others, strict=True):
        assert {name for name, value in a.items() if value is None} == {
            name for name, value in b.items() if value is None
        }
        assert a.keys() == b.keys()
        for name, value in a.items():
            assert value is None or value == pytest.approx(b[name], rel=rel, abs=abs), (name, a, b)


def test_a_row_without_a_target_that_counts_beside_others() -> None:
    """Its positions are read; the loss is the mean over the others' targets, as by the logits."""
    model, (inputs, targets) = build(), rows_of(2)
    targets[0] = -1
    found = diagnose(model, inputs, targets)
    with torch.no_grad():
        logits = model(inputs)
    want = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
    assert found.loss == pytest.approx(float(want), rel=1e-5)


# ------------------------------------------------------------------------------------------------------ ∂L/∂α


class PerHead(nn.Module):
    """A strength for each head, to be turned by a test."""

    fixed = None

    def __init__(self, alpha: Tensor) -> None:
        super().__init__()
        self.alpha = alpha

    def forward(self) -> Tensor:
        return self.alpha


def differences(model: GPT, inputs: Tensor, targets: Tensor) -> dict[tuple[int, int], float]:
    """∂L/∂α of each layer and head of XSA by central differences of a float64 copy's loss, from its logits.

    Float32 losses would need steps over which the loss is curved: at α = 1 the first position's output is 0.
    """
    exact, found = copy.deepcopy(model).double(), {}
    exact.dtype, step, cap = torch.float64, 1e-6, model.config.soft_cap

    @torch.no_grad()
    def loss() -> float:
        logits = cap * torch.tanh(exact.hidden(inputs) @ exact.head.weight[: model.config.vocab_size].T / cap)
        return float(nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1))

    for layer, variant in enumerate(exact.variants()):
        before, start = variant.strength, torch.as_tensor(variant.alpha()).detach().double().expand(model.config.heads)
        for head in range(model.config.heads):
            ends = []
            for sign in (1, -1):
                moved = start.clone()
                moved[head] += sign * step
                variant.strength = PerHead(moved)
                ends.append(loss())
            found[layer, head] = (ends[0] - ends[1]) / (2 * step)
        variant.strength = before
    return found


def gradients(model: GPT, inputs: Tensor, targets: Tensor) -> dict[tuple[int, int], float]:
    rows = diagnose(model, inputs, targets).rows
    return {(row["layer"], row["head"]): row["alpha_gradient"] for row in rows if row["alpha_gradient"] is not None}


ALPHAS: dict[str, dict[str, Any]] = {
    "1": {},
    "0.3": {"alpha": 0.3},
    "learned": {"alpha": {"learned": "sigmoid", "start": 0.6}},
    "scheduled": {"alpha": {"from": 0.2, "to": 0.8, "between": [0.0, 0.5]}},
    "projected": {"alpha": 0.7, "against": "projected"},
}


@pytest.mark.parametrize("case", [*ALPHAS, "standard"])
def test_the_gradient_by_alpha_is_that_of_finite_differences(case: str) -> None:
    """For each layer and head at the α in use; of standard attention against XSA with the same weights at α = 0."""
    model = build("xsa", {"alpha": 0.0} if case == "standard" else ALPHAS[case])
    model.set_progress(0.25)
    inputs, targets = rows_of(3, seed=1)
    want = differences(model, inputs, targets)
    measured = model
    if case == "standard":
        measured = build()
        measured.load_state_dict(model.state_dict())
    found = gradients(measured, inputs, targets)
    assert found.keys() == want.keys()
    largest = max(map(abs, want.values()))
    assert largest > 1e-2
    for key, value in want.items():
        assert found[key] == pytest.approx(value, abs=2e-5 * largest), (key, want, found)


def test_layers_without_the_variant_are_measured_as_standard_ones() -> None:
    """layers = "first:1": layer 0 has α = 1, the others 0, with the gradient at 0."""
    model, (inputs, targets) = build("xsa", layers="first:1"), rows_of(2, seed=2)
    everywhere = build("xsa", {"alpha": [1.0, 0.0, 0.0]})
    everywhere.load_state_dict(model.state_dict())
    rows = [row for row in diagnose(model, inputs, targets).rows if row["alpha"] is not None]
    assert [row["alpha"] for row in rows] == [1.0] * 4 + [0.0] * 8
    assert all(row["removed"] > 0 and abs(row["cos_after"]) < 1e-5 for row in rows[:4])
    assert all(row["removed"] == 0 and row["cos_after"] == row["cos_before"] for row in rows[4:])
    want = differences(everywhere, inputs, targets)
    for row in rows:
        assert row["alpha_gradient"] == pytest.approx(want[row["layer"], row["head"]], abs=2e-5), row


def test_the_alpha_in_use_is_told() -> None:
    """A schedule's at this moment, a learned one's of every head."""
    inputs, targets = rows_of(1)
    model = build("xsa", {"alpha": {"from": 0.0, "to": 1.0}})
    model.set_progress(0.25)
    assert {row["alpha"] for row in diagnose(model, inputs, targets).rows} == {None, 0.25}
    model = build("xsa", {"alpha": {"learned": "tanh", "start": 0.5}})
    with torch.no_grad():
        model.variants()[1].strength.raw.copy_(torch.tensor([-1.0, 0.0, 0.5, 2.0]))
    found = [row["alpha"] for row in diagnose(model, inputs, targets).rows if row["layer"] == 1]
    assert [alpha for alpha in found if alpha is not None] == pytest.approx([math.tanh(x) for x in (-1, 0, 0.5, 2)])


# ------------------------------------------------------------------------------------------ heads set by hand


def whole(model: GPT, inputs: Tensor, targets: Tensor) -> list[dict[str, Any]]:
    return [row for row in diagnose(model, inputs, targets).rows if (row["start"], row["end"]) == EDGES[0]]


def distinct(n: int = 2) -> tuple[Tensor, Tensor]:
    """Rows in which no token comes twice."""
    tokens = torch.stack(
        [torch.randperm(50, generator=torch.Generator().manual_seed(i))[: CONTEXT + 1] for i in range(n)]
    )
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize("name", ["standard", "xsa"])
def test_a_planted_copy_head(name: str) -> None:
    """W_q = W_k of one head, and long vectors: the own key wins; XSA takes all of that head's output."""
    model = build(name, kv_heads=4, qk_scale=12.0, value_embeddings=False)
    attention: Any = model.blocks[1].attention  # pyright: ignore
    with torch.no_grad():
        attention.w_q.weight[16:24] = attention.w_k.weight[16:24]
    found = whole(model, *distinct())
    planted = next(row for row in found if (row["layer"], row["head"]) == (1, 2))
    assert planted["self_weight"] > 0.999
    assert planted["cos_before"] > 0.999
    assert planted["energy_before"] > 0.999
    assert planted["reach"] < 1.01
    assert planted["distance"] < 0.01
    if name == "xsa":
        assert planted["removed"] > 0.999
        assert planted["norm_after"] < 1e-3 * planted["norm_before"]
    assert all(row["self_weight"] < 0.9 for row in found if (row["layer"], row["head"]) != (1, 2))


def test_a_head_that_reads_the_first_token_alone() -> None:
    """The first token alone has a key that the query, the same everywhere, points at."""
    model = build(depth=1, kv_heads=4, window="L", qk_scale=6.0, rotary_base=1e12, smear=False, value_embeddings=False)
    attention: Any = model.blocks[0].attention  # pyright: ignore
    with torch.no_grad():
        model.embedding.weight.uniform_(-0.1, 0.1, generator=torch.Generator().manual_seed(0))
        model.embedding.weight[:, 0] = 1.0  # every token
        model.embedding.weight[0, 1] = 3.0  # token 0 alone
        for weight in (attention.w_q.weight, attention.w_k.weight):
            weight[:8] = 0.0
        attention.w_q.weight[3, 0] = 1.0  # channel 3 of 8: the slowest to turn
        attention.w_k.weight[3, 0], attention.w_k.weight[3, 1] = -1.0, 1.0
    inputs, targets = rows_of(2)
    inputs = inputs.clamp_min(1)
    inputs[:, 0] = 0
    found = diagnose(model, inputs, targets).rows
    head = {(row["start"], row["end"]): row for row in found if row["head"] == 0}
    assert head[0, 20]["first_weight"] > 0.999
    assert head[0, 20]["self_weight"] == pytest.approx(1 / 20, abs=1e-3)  # of the first position
    assert head[16, 20]["distance"] == pytest.approx(17.5, abs=1e-2)
    assert head[16, 20]["first_weight"] > 0.999
    assert all(row["first_weight"] < 0.9 for row in found if row["head"] != 0 and (row["start"], row["end"]) == (0, 20))


def test_queries_of_zeros_read_everything_alike() -> None:
    """Entropy ln n, reach n, a_ii as uniform attention has it, of the n tokens in the window."""
    model = build()
    with torch.no_grad():
        for block in model.blocks:
            block.attention.w_q.weight.zero_()  # pyright: ignore
    for row in diagnose(model, *rows_of(2)).rows:
        window = model.config.window_of(row["layer"])
        n = [min(i, window) + 1 for i in range(row["start"], row["end"])]
        assert row["entropy"] == pytest.approx(np.mean(np.log(n)), rel=1e-5, abs=1e-6)
        assert row["reach"] == pytest.approx(np.mean(n), rel=1e-5)
        assert row["self_weight"] == pytest.approx(row["uniform"], rel=1e-5)
        assert row["uniform"] == pytest.approx(np.mean([1 / x for x in n]), rel=1e-5)
        assert row["logit"] == 0


# ------------------------------------------------------------------------------------------ ranges and ranks


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 16, 17, 1000, 8192])
def test_the_ranges_cover_the_context_once(length: int) -> None:
    first, *parts = position_ranges(length)
    assert first == (0, length)
    covered = [position for start, end in parts or [first] for position in range(start, end)]
    assert covered == list(range(length))
    assert all(end - start <= max(start, 1) for start, end in parts)  # none longer than what lies before it


def test_the_effective_rank_is_numpy_s() -> None:
    """Of full rank, of rank 1, of equal singular values, and 0 for zeros."""
    random = np.random.default_rng(0)
    matrices = [
        random.normal(size=(40, 6)), np.outer(random.normal(size=40), random.normal(size=6)), np.eye(40, 6) * 3,
    ]  # fmt: skip
    found = effective_rank(torch.from_numpy(np.stack([m.T @ m for m in matrices])))
    assert found.tolist() == pytest.approx([numpy_rank(m) for m in matrices], rel=1e-6)
    assert found[1:].tolist() == pytest.approx([1, 6], rel=1e-6)
    assert effective_rank(torch.zeros(1, 6, 6)).tolist() == [0]


# ------------------------------------------------------------------------------------------ nothing is left behind


def picture(model: GPT) -> dict[str, Any]:
    """All of a model that diagnosing must leave alone."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {
        "parameters": {name: (p.detach().clone(), p.requires_grad, p.grad) for name, p in model.named_parameters()},
        "buffers": {name: buffer.clone() for name, buffer in model.named_buffers()},
        "hooks": [len(getattr(module, name)) for module in model.modules() for name in hooks],
        "training": [module.training for module in model.modules()],
    }


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert (before["hooks"], before["training"]) == (after["hooks"], after["training"])
    for name, buffer in before["buffers"].items():
        assert torch.equal(buffer, after["buffers"][name]), name
    assert before["parameters"].keys() == after["parameters"].keys()
    for name, (values, wanted, grad) in before["parameters"].items():
        now, wanted_now, grad_now = after["parameters"][name]
        assert torch.equal(values, now), name
        assert wanted is wanted_now
        assert grad is grad_now, name


@pytest.mark.parametrize("case", ["standard", "xsa", "learned", "sink"])
def test_the_model_is_left_as_it_was(case: str) -> None:
    """Weights, gradients, buffers, requires_grad and hooks; frozen parameters too; the random stream as well."""
    name, options, *_ = CASES[case]
    model, (inputs, targets) = build(name, options), rows_of(2)
    model.head.weight.requires_grad_(False)
    model.embedding.weight.grad = torch.ones_like(model.embedding.weight)
    before, random = picture(model), torch.random.get_rng_state()
    with torch.no_grad():
        found = diagnose(model, inputs, targets)
    assert_same(before, picture(model))
    assert torch.equal(random, torch.random.get_rng_state())
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    frozen = diagnose(model, inputs, targets)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert_close(found.rows, frozen.rows, rel=1e-3, abs=1e-6)


def test_nothing_is_left_after_an_exception(monkeypatch: Any) -> None:
    """It is raised in the middle of the second layer's attention."""
    model, (inputs, targets) = build("xsa"), rows_of(2)
    before, calls = picture(model), []

    def fails(*given: Any, **named: Any) -> Any:
        calls.append(given)
        if len(calls) == 2:
            raise MemoryError
        return attention_weights(*given, **named)

    monkeypatch.setattr(diagnostics, "attention_weights", fails)
    with pytest.raises(MemoryError):
        diagnose(model, inputs, targets)
    assert_same(before, picture(model))


# ------------------------------------------------------------------------------------------------------ bad input


@pytest.fixture
def plugin() -> Iterator[Callable[[type[Variant]], GPT]]:
    """A model of a variant class that is known for the length of a test."""

    def make(kind: type[Variant]) -> GPT:
        VARIANTS["plugin"] = kind
        return build("plugin")

    yield make
    VARIANTS.pop("plugin", None)


class Silent(Variant):
    """Never attends."""

    def forward(self, t: QKV, attend: Any) -> Tensor:
        return t.q


class Around(Variant):
    """Overrides project and is never called itself."""

    def forward(self, t: QKV, attend: Any) -> Tensor:
        return attend(t.q, t.k, t.v)

    def project(self, t: QKV, attend: Any, w_o: Any) -> Tensor:
        return w_o(self.forward(t, attend).flatten(2))


class Idle(Around):
    """Is called, and what it gives goes nowhere."""

    def project(self, t: QKV, attend: Any, w_o: Any) -> Tensor:
        self(t, attend)
        return w_o(t.q.flatten(2))


class Narrow(Around):
    """An own value of half the channels."""

    project = Variant.project

    def own_value(self, t: QKV) -> Tensor:
        return t.v[..., : t.v.shape[-1] // 2]


class Pairs(Around):
    """Two attentions of half the channels, put together: the output is wider than attention's."""

    project = Variant.project

    def forward(self, t: QKV, attend: Any) -> Tensor:
        halves = t.v.chunk(2, dim=-1)
        return torch.cat([attend(t.q, t.k, half.contiguous()) for half in halves], dim=-1)


class Halved(Around):
    """Twice the heads of half the channels come out."""

    project = Variant.project

    def forward(self, t: QKV, attend: Any) -> Tensor:
        return attend(t.q, t.k, t.v).unflatten(-1, (2, -1)).flatten(2, 3)


class Longer(Around):
    """One more key than queries."""

    project = Variant.project

    def forward(self, t: QKV, attend: Any) -> Tensor:
        k, v = (torch.cat((x[:, :1], x), dim=1) for x in (t.k, t.v))
        return attend(t.q, k, v)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Silent, "variant 'plugin' never calls attend"),
        (Around, "variant 'plugin' was not called as a module"),
        (Idle, "variant 'plugin': project does not pass on"),
        (Narrow, r"variant 'plugin' has no own value for its output.*\(1, 20, 2, 4\)"),
        (Pairs, r"variant 'plugin' has no own value for its output: attention gives \(1, 20, 4, 4\)"),
        (Halved, r"attention gives \(1, 20, 4, 8\), the variant \(1, 20, 8, 4\)"),
        (Longer, "20 queries and 21 keys"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_variant_that_cannot_be_measured_is_named(kind: type[Variant], words: str, plugin: Any) -> None:
    model = plugin(kind)
    before = picture(model)
    with pytest.raises(ValueError, match=words):
        diagnose(model, *rows_of(1))
    assert_same(before, picture(model))


def test_a_user_s_variant_is_measured_without_a_line_in_it(plugin: Any) -> None:
    """An exclusion of one's own, with α told: the same numbers as the one of the package."""

    class Mine(Variant):
        def forward(self, t: QKV, attend: Any) -> Tensor:
            return exclude_self(attend(t.q, t.k, t.v), t.v, 0.6)

        def alpha(self) -> float:
            return 0.6

    model, rows = plugin(Mine), rows_of(2)
    own = diagnose(build("xsa", {"alpha": 0.6}), *rows)
    assert_close(diagnose(model, *rows).rows, own.rows, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("length", [CONTEXT - 1, CONTEXT + 1])
def test_rows_of_another_length_than_the_context(length: int) -> None:
    """Shorter ones lack the late positions; longer ones would make the model's tables grow."""
    model = build()
    before = picture(model)
    with pytest.raises(ValueError, match=rf"rows of {length} tokens: the model's context is {CONTEXT}"):
        diagnose(model, *rows_of(1, length))
    assert_same(before, picture(model))


def test_rows_in_which_nothing_counts() -> None:
    inputs, targets = rows_of(2)
    with pytest.raises(ValueError, match="2 rows hold no target that counts"):
        diagnose(build(), inputs, torch.full_like(targets, -1))


class Words:
    """As much of a corpus as is needed: documents of ordinary tokens, token 49 being special."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        sizes = np.array([2] * 49 + [0])
        self.tokenizer = SimpleNamespace(bos=49, bytes_per_token=lambda: sizes)

    def validation_documents(self) -> list[Any]:
        random = np.random.default_rng(0)
        return [
            SimpleNamespace(id=str(i), tokens=random.integers(0, 49, n).astype(np.uint16), bytes=2 * n)
            for i, n in enumerate(self.lengths)
        ]


def test_validation_rows_are_packed_and_their_special_targets_masked() -> None:
    corpus: Any = Words([8, 9, 7, 30, 25, 40, 11])
    inputs, targets = validation_rows(corpus, EvalConfig(), CONTEXT, 3)
    assert (inputs[:, 1:] == 49).any()  # a second document begins within a row
    assert inputs.shape == targets.shape == (3, CONTEXT)
    assert inputs.dtype == targets.dtype == torch.int64
    assert (inputs[:, 0] == 49).all()
    known = targets[:, :-1]
    assert torch.equal(torch.where(inputs[:, 1:] == 49, -1, inputs[:, 1:]), known)
    assert (targets != 49).all()


@pytest.mark.parametrize(
    ("lengths", "count", "words"),
    [
        ([30, 25, 40, 33], 99, r"rows = 99: .* fill 4 rows .*context, 20 tokens; ask for 1 to 4"),
        ([30, 25, 40, 33], 0, "rows = 0: "),
        ([5], 1, "the 1 validation documents that are scored fill 0 rows .* 20 tokens; raise eval.max_bytes"),
    ],
)
def test_more_rows_than_the_text_fills(lengths: list[int], count: int, words: str) -> None:
    corpus: Any = Words(lengths)
    with pytest.raises(ValueError, match=words):
        validation_rows(corpus, EvalConfig(), CONTEXT, count)


# ------------------------------------------------------------------------------------------------------ memory

LONG = """
import resource, torch
from xsalab.eval.diagnostics import diagnose
from xsalab.model import GPT, ModelConfig, init_weights
config = ModelConfig(depth=2, width=32, heads=2, context=8192, vocab_size=64, window="SL", window_share=64)
model = GPT(config)
init_weights(model, 0)
tokens = torch.randint(0, 64, (1, 8193), generator=torch.Generator().manual_seed(0))
found = diagnose(model, tokens[:, :-1], tokens[:, 1:])
assert len(found.rows) == 2 * 2 * 15
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kB on Linux alone")
def test_a_context_of_8192_fits_in_2_gb() -> None:
    """A short window and a full one; one T × T matrix of two heads in float32 is 0.5 GB, and there would be many."""
    done = subprocess.run([sys.executable, "-c", LONG], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * 1024 < 2e9
