"""The fast and the memory-neutral forms of the operation, against the plain one; what a model keeps for backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from xsalab.data import Batch
from xsalab.eval.throughput import saved_bytes
from xsalab.model import GPT, QKV, LayerAttend, ModelConfig, Site, Variant, VariantChoice, exclude_self, native
from xsalab.model.layers import Linear
from xsalab.model.xsa import Exclusive, exclude_and_project
from xsalab.train import TrainState

Tiny = Callable[..., GPT]

kernels = pytest.mark.skipif(bool(native.reason()), reason=native.reason() or "kernels are there")

# float32 inside, one rounding to bfloat16 (2⁻⁸ relative) at the end; the rest is sums in another order
RELATIVE, ABSOLUTE = 2.0**-8 + 1e-5, 1e-5

SHAPES = {  # b, t, h, g, d
    "plain": (2, 33, 2, 2, 64),
    "grouped": (2, 70, 6, 2, 32),
    "one value head": (1, 65, 3, 1, 128),
    "wide": (1, 5, 4, 2, 256),
    "odd size": (3, 7, 2, 2, 96),
    "one token": (1, 1, 1, 1, 32),
}


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def joined(b: int, t: int, h: int, g: int, d: int) -> tuple[Tensor, Tensor]:
    """y, and v as a view of the product of q, k and v together."""
    return draw(b, t, h, d), draw(b, t, (h + 2 * g) * d, seed=1)[..., (h + g) * d :].unflatten(-1, (g, d))


def run(y: Tensor, v: Tensor, alpha: float | Tensor, grad: Tensor) -> list[Tensor]:
    """z and the gradients of y, v and, where it is a tensor, α."""
    leaves = [x.detach().requires_grad_() for x in (y, v, *([alpha] if isinstance(alpha, Tensor) else []))]
    z = exclude_self(leaves[0], leaves[1], leaves[2] if len(leaves) == 3 else alpha)
    z.backward(grad)
    return [z.detach(), *(leaf.grad for leaf in leaves)]  # pyright: ignore


# --- the kernel


@kernels
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("strength", ["number", "scalar", "heads"])
def test_the_kernel_gives_the_plain_numbers(shape: tuple[int, ...], strength: str) -> None:
    y, v = joined(*shape)
    grad = draw(*y.shape, seed=2)
    alpha = {"number": 0.7, "scalar": torch.tensor(0.7), "heads": torch.linspace(-0.5, 1, shape[2])}[strength]
    fast = run(y, v, alpha, grad)
    with native.plain():
        oracle = run(y.float(), v.float(), alpha, grad.float())
    assert [x.dtype for x in fast[:3]] == [torch.bfloat16] * 3
    for got, want in zip(fast[:3], oracle[:3], strict=True):
        torch.testing.assert_close(got.float(), want, rtol=RELATIVE, atol=ABSOLUTE)
    if strength != "number":
        torch.testing.assert_close(fast[3], oracle[3], atol=1e-4, rtol=1e-5)


@kernels
def test_the_kernel_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows that the tests around it ask for something."""
    import xsalab.model.xsa as module

    monkeypatch.setattr(module, "_plain", None)
    monkeypatch.setattr(module, "_plain_backward", None)
    y, v = joined(*SHAPES["grouped"])
    run(y, v, 1.0, y)
    with native.plain(), pytest.raises(TypeError):
        exclude_self(y, v)


@kernels
@pytest.mark.parametrize("size", range(32, 257, 32))
def test_a_token_that_sees_only_itself_comes_out_exactly_0(size: int) -> None:
    for length in (1.0, 4e-4, 3e8):
        v = draw(3, 5, 2, size) * length
        assert not exclude_self(v.repeat_interleave(3, dim=2), v).any()


@kernels
def test_a_zero_value_leaves_the_output_and_its_gradient() -> None:
    """F007, in the kernel."""
    y, grad = draw(2, 3, 4, 64), draw(2, 3, 4, 64, seed=1)
    z, grad_y, grad_v, grad_alpha = run(y, torch.zeros(2, 3, 2, 64).bfloat16(), torch.tensor(1.0), grad)
    assert torch.equal(z, y)
    assert torch.equal(grad_y, grad)
    assert not grad_v.any()
    assert grad_alpha == 0


@kernels
@pytest.mark.parametrize("length", [1e-38, 1e-25, 1.2e-19, *(10.0**-n for n in range(19, 12, -1))])
def test_short_values_are_removed_in_full_and_have_finite_gradients(length: float) -> None:
    """The same floor as the plain form: nothing larger than float32's smallest normal number, and no overflow."""
    y, v = 10 * draw(2, 3, 4, 64), draw(2, 3, 2, 64, seed=1).float()
    v = (v / v.norm(dim=-1, keepdim=True) * length).bfloat16()
    grad = 10 * draw(2, 3, 4, 64, seed=2)
    fast = run(y, v, torch.ones(4), grad)
    assert all(x.isfinite().all() for x in fast)
    with native.plain():
        oracle = run(y.float(), v.float(), torch.ones(4), grad.float())
    torch.testing.assert_close(fast[0].float(), oracle[0], rtol=2.0**-8, atol=1e-2)


@kernels
def test_the_result_depends_neither_on_threads_nor_on_the_run() -> None:
    y, v = joined(4, 300, 4, 2, 64)
    alpha, threads = torch.linspace(0, 1, 4), torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 2):
            torch.set_num_threads(count)
            results.append(run(y, v, alpha, y.flip(1)))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@kernels
def test_large_outputs_go_past_the_cache_with_the_same_numbers() -> None:
    """6 MB and more take another way of storing; parts of it do not."""
    y, v = joined(2, 6100, 4, 4, 64)
    assert y.nbytes > 6e6
    for got, want in zip(
        run(y, v, 0.7, y.flip(1)),
        zip(*(run(y[i : i + 1], v[i : i + 1], 0.7, y.flip(1)[i : i + 1]) for i in range(2)), strict=True),
        strict=True,
    ):
        assert torch.equal(got, torch.cat(want))


@kernels
def test_any_strides_will_do() -> None:
    """y as (b, h, t, d) in memory, v with its channels apart, a gradient that is one number spread out."""
    y, v = joined(2, 9, 4, 2, 64)
    want = run(y, v, 0.7, torch.ones_like(y))
    other = v.transpose(-1, -2).contiguous().transpose(-1, -2)
    assert other.stride(-1) != 1
    for got in (
        run(y.transpose(1, 2).contiguous().transpose(1, 2), v, 0.7, torch.ones(()).bfloat16().expand_as(y)),
        run(y, other, 0.7, torch.ones_like(y)),
    ):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@kernels
@pytest.mark.parametrize(
    ("y", "v", "alpha", "message"),
    [
        ((2, 3, 4, 48), (2, 3, 4, 48), (), "multiple of 32 up to 256; got 48"),
        ((2, 3, 4, 288), (2, 3, 4, 288), (), "got 288"),
        ((2, 3, 4, 64), (2, 3, 3, 64), (), "g dividing"),
        ((2, 3, 4, 64), (2, 2, 4, 64), (), "g dividing"),
        ((2, 3, 4, 64), (2, 3, 2, 64), (2,), "alpha is"),
        ((3, 4, 64), (2, 3, 4, 64), (), "y is bfloat16"),
    ],
    ids=["size", "wide", "groups", "length", "alpha", "axes"],
)
def test_the_operation_refuses_what_it_cannot_take(y: tuple, v: tuple, alpha: tuple, message: str) -> None:
    tensors = draw(*y), draw(*v), torch.ones(alpha)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.xsalab.exclude(*tensors)


@kernels
def test_other_head_sizes_go_the_plain_way() -> None:
    for size in (8, 48, 288):
        y, v = joined(2, 3, 4, 2, size)
        fast = exclude_self(y, v)
        with native.plain():
            assert torch.equal(fast, exclude_self(y, v))


def test_the_plain_way_by_blocks_gives_the_numbers_of_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 21 tokens, the last of them not full, across the rows of a batch; α's gradient is summed in parts."""
    import xsalab.model.xsa as module

    y, v = joined(3, 35, 6, 2, 8)
    alpha, grad = torch.linspace(-0.5, 1, 6), y.flip(1)
    whole = run(y, v, alpha, grad)
    monkeypatch.setattr(module, "BLOCK", 22 * 6 * 8 - 1)
    assert module._by_block(y)
    parts = run(y, v, alpha, grad)
    assert all(torch.equal(a, b) for a, b in zip(whole[:3], parts[:3], strict=True))
    torch.testing.assert_close(whole[3], parts[3])
    weight = draw(16, 48, seed=5).float().requires_grad_()
    results = []
    for together in (True, False):
        leaves = [x.detach().requires_grad_() for x in (y, v)]
        if together:
            out = exclude_and_project(leaves[0], leaves[1], alpha, weight)
        else:
            out = torch.nn.functional.linear(exclude_self(leaves[0], leaves[1], alpha).flatten(2), weight.bfloat16())
        results.append([out, *torch.autograd.grad(out.sum(), (*leaves, weight))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# --- exclusion and projection together


FORMS = {"number": 0.7, "scalar": torch.tensor(0.7), "heads": torch.linspace(-0.5, 1, 4)}
PATHS = {"float32": (torch.float32, 8), "bfloat16, plain": (torch.bfloat16, 8), "bfloat16": (torch.bfloat16, 32)}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("strength", FORMS)
def test_together_they_give_the_bits_of_one_after_the_other(path: str, groups: int, strength: str) -> None:
    dtype, size = PATHS[path]
    w_o, grad = Linear(4 * size, 32), draw(2, 140, 32, seed=3, dtype=dtype)
    with torch.no_grad():
        w_o.weight.copy_(draw(32, 4 * size, seed=4).float())
    results = []
    for together in (True, False):
        w_o.weight.grad = None
        y, v = (x.to(dtype).requires_grad_() for x in joined(2, 140, 4, groups, size))
        alpha = FORMS[strength]
        if isinstance(alpha, Tensor):
            alpha = alpha.clone().requires_grad_()
        if together:
            out = exclude_and_project(y, v, alpha, w_o.weight)
        else:
            out = w_o(exclude_self(y, v, alpha).flatten(2))
        out.backward(grad)
        grads = [x.grad for x in (y, v, w_o.weight, *([alpha] if isinstance(alpha, Tensor) else []))]
        results.append([out.detach(), *grads])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


CHOICES: dict[str, dict] = {
    "fixed": {"alpha": 0.7},
    "scheduled": {"alpha": {"from": 0.2, "to": 1}},
    "learned": {"alpha": {"learned": "tanh", "start": 0.4}},
    "projected": {"against": "projected"},
    "learned, projected": {"alpha": {"learned": "sigmoid", "per": "layer"}, "against": "projected"},
}


@pytest.mark.parametrize("options", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kernel", ["sdpa", "auto"])
def test_a_model_that_keeps_less_gives_the_same_bits(
    tiny: Tiny, tokens: Tensor, monkeypatch: pytest.MonkeyPatch, options: dict, path: str, kernel: str
) -> None:
    """Losses and every gradient; with the seam's own way, which keeps z, in its place."""
    dtype, size = PATHS[path]
    results = []
    for way in (Exclusive.project, Variant.project):
        monkeypatch.setattr(Exclusive, "project", way)
        model = tiny("xsa", options, dtype=dtype, width=4 * size, kernel=kernel)
        model.set_progress(0.5)
        nats = model.token_nats(tokens[:, :-1], tokens[:, 1:])
        nats.mean().backward()
        results.append([nats.detach(), *(p.grad for p in model.parameters())])
    assert all(x is not None and torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_wrong_shapes_are_refused_there_too() -> None:
    with pytest.raises(ValueError, match="got"):
        exclude_and_project(torch.ones(2, 3, 4, 8), torch.ones(2, 3, 3, 8), 1.0, torch.ones(8, 32))


# --- what is kept


def kept(choice: VariantChoice, dtype: torch.dtype) -> int:
    config = ModelConfig(depth=4, width=128, heads=2, context=128, vocab_size=200)
    data = torch.randint(200, (4, 129), generator=torch.Generator().manual_seed(0))
    state = TrainState(GPT(config, choice, dtype=dtype), None)  # pyright: ignore
    return saved_bytes(state, Batch(data[:, :-1], data[:, 1:], torch.arange(4)))


@pytest.mark.parametrize(
    "alpha", [1.0, {"from": 0, "to": 1}, {"learned": "tanh"}], ids=["fixed", "scheduled", "learned"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", [native.plain, nullcontext], ids=["pytorch", "kernels"])
def test_it_keeps_nothing_more_for_backward(alpha: object, dtype: torch.dtype, way: Callable) -> None:
    """Within 1 % of the same model without it; keeping z as well is 3.6 % more."""
    with way():
        ratio = kept(VariantChoice("xsa", options={"alpha": alpha}), dtype) / kept(VariantChoice(), dtype)
    assert 0.9 < ratio <= 1.01


def test_the_measure_sees_one_more_activation_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows that the test above asks for something."""
    monkeypatch.setattr(Exclusive, "project", Variant.project)
    with native.plain():
        assert kept(VariantChoice("xsa"), torch.float32) > 1.02 * kept(VariantChoice(), torch.float32)


def test_against_the_projected_value_that_value_alone_is_kept() -> None:
    """Not the whole product of q, k and v: half of the layers, those with a value embedding, keep one activation."""
    with native.plain():
        standard = kept(VariantChoice(), torch.float32)
        more = kept(VariantChoice("xsa", options={"against": "projected"}), torch.float32) - standard
    assert more <= 2 * 4 * 128 * 128 * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_fixed_0_keeps_what_standard_attention_keeps(dtype: torch.dtype) -> None:
    assert kept(VariantChoice("xsa", options={"alpha": 0.0}), dtype) == kept(VariantChoice(), dtype)


# --- the seam


SITE = Site(layer=1, depth=3, heads=4, kv_heads=2, head_dim=8, width=32, has_value_embedding=True)


def values(dtype: torch.dtype = torch.float32) -> QKV:
    q, k, v, projected = (draw(2, 5, n, 8, seed=n + i, dtype=dtype) for i, n in enumerate((4, 2, 2, 2)))
    return QKV(q.requires_grad_(), k, v, projected, draw(2, 5, 32, dtype=dtype))


def output_projection() -> Linear:
    w_o = Linear(32, 32)
    with torch.no_grad():
        w_o.weight.copy_(draw(32, 32, seed=9).float())
    return w_o


def test_hooks_on_the_variant_and_on_w_o_are_called_while_it_trains() -> None:
    """Who watches a module sees its output, and the result is the same."""
    t, attend, w_o, variant = values(), LayerAttend(4), output_projection(), Exclusive(SITE)
    want = variant.project(t, attend, w_o)
    for module in (variant, w_o):
        seen: list[Tensor] = []
        handle = module.register_forward_hook(lambda _m, _given, out, seen=seen: seen.append(out))
        assert torch.equal(variant.project(t, attend, w_o), want)
        handle.remove()
        assert len(seen) == 1
        assert variant.project(t, attend, w_o) is not None
        assert len(seen) == 1


def test_without_gradients_nothing_is_made_for_them() -> None:
    t, attend, w_o = values(), LayerAttend(4), output_projection()
    assert "ExcludeAndProject" in Exclusive(SITE).project(t, attend, w_o).grad_fn.name()  # pyright: ignore
    with torch.no_grad():
        assert Exclusive(SITE).project(t, attend, w_o).grad_fn is None
    static = Exclusive(SITE, 0.0).project(t, attend, w_o)
    assert torch.equal(static, w_o(attend(t.q, t.k, t.v).flatten(2)))
    assert "Exclude" not in static.grad_fn.name()  # pyright: ignore


class Both:
    """An ``Attend`` with a kernel that does attention and exclusion, and counts."""

    def __init__(self, answer: Tensor | None) -> None:
        self.answer, self.asked, self.attend = answer, 0, LayerAttend(4)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
        return self.attend(q, k, v, **options)

    def exclusive(self, q: Tensor, k: Tensor, v: Tensor, alpha: float | Tensor) -> Tensor | None:
        self.asked += 1
        return self.answer


@pytest.mark.parametrize("gradients", [True, False])
def test_a_kernel_that_does_both_is_asked_first(gradients: bool) -> None:
    """Where it has no answer, where α is 0 or the value another one, attention and exclusion go their own ways."""
    t, w_o, answer = values(), output_projection(), torch.ones(2, 5, 4, 8)
    with torch.set_grad_enabled(gradients):
        assert torch.equal(Exclusive(SITE).project(t, Both(answer), w_o), w_o(answer.flatten(2)))
        assert torch.equal(Exclusive(SITE)(t, Both(answer)), answer)
        want = Exclusive(SITE).project(t, lambda *a, **o: LayerAttend(4)(*a, **o), w_o)  # a watcher without it
        silent = Both(None)
        assert torch.equal(Exclusive(SITE).project(t, silent, w_o), want)
        assert silent.asked > 0
        for variant in (Exclusive(SITE, against="projected"), Exclusive(SITE, 0.0)):
            attend = Both(answer)
            assert not torch.equal(variant.project(t, attend, w_o), want)
            assert attend.asked == 0
