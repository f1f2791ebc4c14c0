"""One token at a time against whole passes: both ways, every part of the model, rows that come, go and differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from xsalab.eval import decode
from xsalab.eval.decode import Held, NativeSteps, PlainSteps, Steps, stepper
from xsalab.eval.generate import generate, generate_batch, pick
from xsalab.model import GPT, KVCache, ModelConfig, VariantChoice, native

needs_kernels = pytest.mark.skipif(bool(native.reason()), reason=native.reason() or "kernels are there")
WAYS = [pytest.param(NativeSteps, marks=needs_kernels, id="native"), pytest.param(PlainSteps, id="plain")]
CHOICES = {
    "standard": VariantChoice(),
    "xsa": VariantChoice("xsa"),
    "xsa, some": VariantChoice("xsa", layers="1:"),
    "xsa, projected": VariantChoice("xsa", options={"against": "projected", "alpha": 0.5}),
    "xsa, learned": VariantChoice("xsa", options={"alpha": {"learned": "tanh", "per": "head", "start": -0.3}}),
    "xsa, scheduled": VariantChoice("xsa", options={"alpha": {"from": 0.2, "to": 0.9}}),
}
# what a model may lack, and shapes that are no power of two
CONFIGS: dict[str, dict[str, Any]] = {
    "all": {},
    "one-group": {"kv_heads": 1},
    "no-extras": {"smear": False, "backout": False, "value_embeddings": False, "residual_scalars": False},
    "no-norm-no-cap": {"qk_norm": False, "soft_cap": 0.0, "qk_scale": 0.7},
    "odd": {"width": 96, "heads": 3, "kv_heads": 3, "vocab_size": 77, "vocab_multiple": 1, "depth": 2, "mlp_ratio": 3},
    "wide-heads": {"width": 64, "heads": 2, "kv_heads": 2, "head_dim": 96},
}


def build(
    choice: VariantChoice | None = None, dtype: torch.dtype = torch.float32, kernel: str = "sdpa", **changes: Any
) -> GPT:
    """Weights that make every part count, and that bfloat16 holds exactly: both dtypes have the same."""
    shape = {
        "depth": 3, "width": 64, "heads": 2, "kv_heads": 2, "context": 24, "vocab_size": 80, "window_block": 4,
        "value_gate_channels": 4, "smear_channels": 8, **changes,
    }  # fmt: skip
    model, random = GPT(ModelConfig(**shape), choice, dtype=dtype, kernel=kernel), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".variant." not in name:
                drawn = torch.empty(parameter.shape).normal_(0, 0.15, generator=random)
                parameter.copy_(drawn.to(torch.bfloat16))
    model.set_progress(0.7)
    return model


def read(model: GPT, rows: Sequence[Sequence[int]]) -> KVCache:
    """What a pass over prompts leaves behind."""
    counts = torch.tensor([len(row) for row in rows])
    store = KVCache(model.config.depth)
    with torch.no_grad():
        model.hidden(torch.tensor([[*row, *[0] * (int(counts.max()) - len(row))] for row in rows]), store)
        store.keep(counts)
    return store


def prompts(*lengths: int) -> list[list[int]]:
    random = torch.Generator().manual_seed(1)
    return [torch.randint(0, 77, (length,), generator=random).tolist() for length in lengths]


def last_logits(model: GPT, rows: Sequence[Sequence[int]]) -> Tensor:
    with torch.no_grad(), native.plain():
        return torch.cat([model(torch.tensor([row]))[:, -1] for row in rows])


def follow(model: GPT, steps: Steps, lengths: Sequence[int], count: int) -> Iterator[tuple[list[list[int]], Tensor]]:
    """Rows and the logits behind them, token by token; half way rows are dropped, doubled and change places."""
    rows, random = prompts(*lengths), torch.Generator().manual_seed(2)
    store: Any = read(model, rows)
    for number in range(count):
        new = torch.randint(0, 77, (len(rows),), generator=random).tolist()
        rows = [[*row, token] for row, token in zip(rows, new, strict=True)]
        logits, store = steps(new, store)
        yield rows, logits
        if number == count // 2 and len(rows) > 2:
            chosen = [2, 0, 2]
            rows, store = [rows[i] for i in chosen], store.select(torch.tensor(chosen))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("choice", "changes"),
    [(choice, {}) for choice in CHOICES.values()]
    + [(CHOICES["xsa"], changes) for changes in list(CONFIGS.values())[1:]],
    ids=[*CHOICES, *list(CONFIGS)[1:]],
)
def test_a_step_gives_the_logits_of_a_whole_pass(
    way: Callable[[GPT], Steps], choice: VariantChoice, changes: dict[str, Any]
) -> None:
    """In float32 up to rounding; windows, grouped heads, prompts of different length, past the context of 24."""
    model = build(choice, **changes)
    for number, (rows, logits) in enumerate(follow(model, way(model), (5, 17, 30), 14)):
        if number % 3 == 1:
            torch.testing.assert_close(logits, last_logits(model, rows), atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("way", WAYS)
def test_a_step_of_a_bfloat16_model_is_as_good_as_its_dtype(way: Callable[[GPT], Steps]) -> None:
    """Against float32 with the same weights. Some 30 roundings of 2⁻⁹ lie on a logit's way: about 2 % of a deviation
    of the logits as root mean square. What whole passes in bfloat16 give is no nearer.
    """
    model, exact = build(CHOICES["xsa"], torch.bfloat16), build(CHOICES["xsa"])
    errors, whole, size = [], [], []
    for rows, logits in follow(model, way(model), (5, 17, 30), 14):
        expected = last_logits(exact, rows)
        errors.append((logits - expected).square().mean())
        whole.append((last_logits(model, rows) - expected).square().mean())
        size.append(expected.square().mean())
    assert sum(errors) < 0.03**2 * sum(size)
    assert sum(errors) < 1.5**2 * sum(whole)


@pytest.mark.parametrize("way", WAYS)
def test_stores_and_tables_grow(way: Callable[[GPT], Steps]) -> None:
    """150 tokens behind one: past 64 and 128 places, and past tables for a context of 24 that double three times."""
    model = build(CHOICES["xsa"])
    *_, (rows, logits) = follow(model, way(model), (1,), 150)
    torch.testing.assert_close(logits, last_logits(model, rows), atol=5e-5, rtol=5e-5)
    assert model.cos.shape[1] >= 151  # by the whole pass


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_is_the_same_to_the_last_bit_beside_any_others(dtype: torch.dtype) -> None:
    """1 to 27 rows: every size of block that a product is made of, and one, two and three blocks."""
    model = build(CHOICES["xsa"], dtype)
    steps = NativeSteps(model)
    store = Held.of(read(model, prompts(*range(1, 28))), 64)
    tokens = list(range(27))
    whole, _ = steps(tokens, store.select(torch.arange(27)))
    again, _ = steps(tokens, store.select(torch.arange(27)))
    assert torch.equal(whole, again)
    for count in range(1, 27):
        some = torch.arange(count) + (27 - count) // 2
        logits, _ = steps(some.tolist(), store.select(some))
        assert torch.equal(logits, whole[some]), count


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_threads_change_no_bit(dtype: torch.dtype) -> None:
    model, threads = build(CHOICES["xsa"], dtype), torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            logits, _ = NativeSteps(model)([1, 2, 3], Held.of(KVCacheOnce.of(model), 64))
            found.append(logits)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


class KVCacheOnce:
    """One pass for all counts of threads: PyTorch's own sums do depend on them."""

    held: dict[torch.dtype, KVCache] = {}  # noqa: RUF012

    @classmethod
    def of(cls, model: GPT) -> KVCache:
        if model.dtype not in cls.held:
            cls.held[model.dtype] = read(model, prompts(4, 9, 20))
        return cls.held[model.dtype]


@needs_kernels
def test_what_the_kernel_does_not_serve_goes_through_pytorch() -> None:
    """And what it does serve goes through it: else the parity above would compare PyTorch with itself."""
    assert isinstance(stepper(build()), NativeSteps)
    assert isinstance(stepper(build(CHOICES["xsa"], torch.bfloat16)), NativeSteps)
    for model in (
        build(VariantChoice("head-gate")),
        build(VariantChoice("sink", layers="1:")),
        build(kernel="explicit"),
        build(width=48, heads=3, kv_heads=1, head_dim=32),
        build(head_dim=16),
    ):
        assert isinstance(stepper(model), PlainSteps)
    with native.plain():
        assert isinstance(stepper(build()), PlainSteps)


@needs_kernels
def test_panels_hold_every_weight_in_its_place() -> None:
    """Panel p, word w, column c holds what row 32 p + c has there: one float32, or two neighbouring bfloat16."""
    a, b = torch.randn(64, 96), torch.randn(32, 96)
    for dtype, pair in ((torch.float32, 1), (torch.bfloat16, 2)):
        rows = torch.cat((a, b)).to(dtype)
        expected = rows.view(3, 32, 96 // pair, pair).transpose(1, 2).reshape(3, -1)
        assert torch.equal(torch.ops.xsalab.decode_panels([a, b], dtype), expected)
        assert torch.equal(torch.ops.xsalab.decode_panels([a.to(dtype), b.to(dtype)], dtype), expected)
        short = torch.ops.xsalab.decode_panels([a[:40]], dtype).view(2, 96 // pair, 32, pair)
        assert torch.equal(short[1, :, :8], expected.view(3, 96 // pair, 32, pair)[1, :, :8])
        assert not short[1, :, 8:].any()
    with pytest.raises(RuntimeError, match="multiples of 32"):
        torch.ops.xsalab.decode_panels([a[:, :40].contiguous()], torch.float32)


@needs_kernels
def test_the_kernel_refuses_what_would_leave_memory() -> None:
    model = build()
    steps, held = NativeSteps(model), Held.of(read(model, prompts(4)), 64)
    tables = steps.cos, steps.sin, held.before, held.keys, held.values
    for token, more, wrong in ((144, 0, "token outside the vocabulary"), (1, 60, "without a place")):
        with pytest.raises(RuntimeError, match=wrong):
            steps.native.step(torch.tensor([token]), held.positions + more, *tables)


@needs_kernels
@pytest.mark.parametrize("size", [5, 128, 1000, 8192])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_the_kernel_draws_what_pytorch_draws(size: int, temperature: float) -> None:
    """The same token for each of 300 chances, 0 and the largest below 1 among them; some tokens never come."""
    logits = 3 * torch.randn(300, size + 3, generator=torch.Generator().manual_seed(size))[:, :size]
    logits[:, ::5] = -torch.inf
    chances = [0.0, 1 - 2**-53, *torch.rand(298, dtype=torch.float64).tolist()]
    with native.plain():
        expected = pick(logits, temperature, 0, chances)
    assert pick(logits, temperature, 0, chances) == expected
    assert not {token for token in expected if token % 5 == 0}


@needs_kernels
def test_a_float32_sample_is_that_of_whole_passes() -> None:
    """With the kernels: cached or not, alone or in a batch, one text a seed."""
    model = build(CHOICES["xsa"])
    rows, options = prompts(5, 17, 3), {"temperature": 0.8, "stop": [3]}
    alone = [list(generate(model, row, 30, seed=seed, cache=False, **options)) for seed, row in enumerate(rows)]
    assert [list(generate(model, row, 30, seed=seed, **options)) for seed, row in enumerate(rows)] == alone
    assert generate_batch(model, rows, tokens=30, seeds=[0, 1, 2], limit=99, batch_rows=2, **options) == alone


def test_training_goes_on_after_steps_and_masks_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's way leaves no tensor behind that autograd refuses, and makes one mask a window and step."""
    made: list[int] = []
    visible = decode.visible
    monkeypatch.setattr(decode, "visible", lambda q, k, window: made.append(window) or visible(q, k, window))
    model = build(VariantChoice("head-gate"), depth=6)
    list(follow(model, PlainSteps(model), (3, 5), 1))
    assert sorted(made) == sorted({model.config.window_of(layer) for layer in range(6)})
    made.clear()
    list(follow(model, PlainSteps(model), (5, 5), 40))
    assert not made
    model.token_nats(torch.tensor([[1, 2, 3]]), torch.tensor([[2, 3, 4]])).sum().backward()
