"""The equivalence checks that a user can run: one line each, with the figure and the tolerance it must keep.

The list is that of docs/xsa.md. Every check measures something that is exactly known, or compares two
independent ways to the same number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .data import Batch
from .model import GPT, KVCache, LayerAttend, ModelConfig, VariantChoice, exclude_self, init_weights, layers, native
from .model import attend as kernels
from .model import head as head_module
from .model.causality import check_causality
from .model.init import stream
from .model.variant import VARIANTS
from .model.xsa import exclude_and_project
from .optim import Hybrid, OptimConfig, Schedule
from .optim.hybrid import GROUPS, Rates
from .train import TrainState, train_step

SMALL = ModelConfig(
    depth=3, width=48, heads=6, kv_heads=2, context=48, vocab_size=200, window="SL", window_share=4, window_block=8
)
SERVED = dataclasses.replace(SMALL, width=192)  # heads of 32, which the C++ kernels take


def model_size(dtype: torch.dtype) -> ModelConfig:
    """The smallest that takes all paths: in bfloat16 the C++ kernels', where they are there."""
    return SERVED if dtype == torch.bfloat16 else SMALL


DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Check:
    """``figure`` must not exceed ``tolerance``; a tolerance of 0 means to the bit."""

    name: str
    figure: float
    tolerance: float
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.figure <= self.tolerance  # False for NaN

    def __str__(self) -> str:
        word = "ok  " if self.passed else "FAIL"
        bound = "exact" if self.tolerance == 0 else f"≤ {self.tolerance:g}"
        return f"{word} {self.name}: {self.figure:.3g} ({bound}){'; ' + self.note if self.note else ''}"


def all_checks(compiled: bool = False, extra: tuple[tuple[ModelConfig, VariantChoice], ...] = ()) -> Iterator[Check]:
    """Every check in turn. ``compiled`` adds torch.compile; ``extra`` adds the causality of an experiment's arms."""
    for dtype in DTYPES:
        yield from neutral_at_zero(dtype)
    for dtype in (*DTYPES, torch.float64):
        yield from orthogonal_at_one(dtype)
    yield from gradients()
    for dtype in DTYPES:
        yield from cached_decoding(dtype)
    yield from causality(extra)
    for dtype in DTYPES:
        yield from fast_paths(dtype)
        yield from memory_neutral(dtype)
    if compiled:
        yield from compiled_paths()


def _model(choice: VariantChoice, dtype: torch.dtype, kernel: str = "auto", disturb: bool = True) -> GPT:
    """A small model; ``disturb`` moves every shared weight off its start, where W_o is zero and hides attention."""
    model = GPT(model_size(dtype), choice, dtype=dtype, kernel=kernel)
    init_weights(model, 0)
    if disturb:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".variant." not in name:
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=stream(1, name)).to(parameter.dtype))
    return model


def _tokens(rows: int = 2, length: int = SMALL.context, seed: int = 3) -> Tensor:
    return torch.randint(SMALL.vocab_size, (rows, length), generator=stream(seed, "tokens"))


def _difference(a: Tensor, b: Tensor) -> float:
    """Largest absolute difference; infinite where the tensors are equal in no sense (shape, NaN)."""
    if a.shape != b.shape:
        return float("inf")
    gap = (a.double() - b.double()).abs().max().item()
    return gap if gap == gap else float("inf")


ZERO_FORMS: dict[str, Any] = {
    "static 0": 0.0,
    "schedule held at 0": {"from": 0.0, "to": 0.0},
    "learned, rate 0": {"learned": "tanh", "per": "head", "start": 0.0},
}


def neutral_at_zero(dtype: torch.dtype) -> Iterator[Check]:
    """1. α = 0 is standard attention: logits, loss, every gradient, and 50 steps of training, to the bit."""
    tokens, targets = _tokens(), _tokens(seed=4)
    plain = _model(VariantChoice(), dtype)
    plain.token_nats(tokens, targets).mean().backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    for form, alpha in ZERO_FORMS.items():
        model = _model(VariantChoice("xsa", options={"alpha": alpha}), dtype)
        gap = _difference(model(tokens), plain(tokens))
        nats = model.token_nats(tokens, targets)
        gap = max(gap, _difference(nats, plain.token_nats(tokens, targets)))
        nats.mean().backward()
        for name, parameter in model.named_parameters():
            if name in expected and (parameter.grad is None) != (expected[name] is None):
                gap = float("inf")
            elif name in expected and parameter.grad is not None:
                gap = max(gap, _difference(parameter.grad, expected[name]))  # pyright: ignore
        yield Check(f"α = 0 ({form}) is standard attention, {_name(dtype)}", gap, 0.0, "logits, loss, gradients")
    losses = [_training_losses(choice, dtype, 50) for choice in _zero_choices()]
    worst = max(_difference(torch.tensor(other), torch.tensor(losses[0])) for other in losses[1:])
    yield Check(f"α = 0 trains as standard attention, {_name(dtype)}", worst, 0.0, "50 losses, each form")


def _zero_choices() -> list[VariantChoice]:
    return [VariantChoice(), *(VariantChoice("xsa", options={"alpha": alpha}) for alpha in ZERO_FORMS.values())]


def _training_losses(choice: VariantChoice, dtype: torch.dtype, steps: int, compiled: bool = False) -> list[float]:
    model = _model(choice, dtype, disturb=False)
    rates = Rates({**dict.fromkeys(GROUPS, 0.003), "variant": 0.0}, 0.0)
    state = TrainState(model, Hybrid(model, OptimConfig(), rates, dtype))
    if compiled:
        hidden = torch.compile(model.hidden, dynamic=False, fullgraph=True)
        state.token_nats = lambda tokens, targets: model.nats_of_hidden(hidden(tokens), targets)
    schedule = Schedule("nanochat", steps, warmup=5)
    losses = []
    for step in range(steps):
        data = _tokens(length=SMALL.context + 1, seed=100 + step % 4)
        batch = Batch(data[:, :-1], data[:, 1:], torch.arange(2))
        losses.append(train_step(state, batch, schedule).loss)
    return losses


def orthogonal_at_one(dtype: torch.dtype) -> Iterator[Check]:
    """2. α = 1 leaves nothing along the own value; position 0 is exactly 0."""
    # One rounding of z to dtype bounds what can be left: measured 1.2e-3 in bfloat16, varying by 3 with the input.
    tolerance = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 5e-3}[dtype]
    q, k, v = _qkv(dtype)
    y = LayerAttend(SMALL.context)(q, k, v)
    z = exclude_self(y, v, 1.0)
    own = v.repeat_interleave(q.shape[2] // v.shape[2], dim=2).double()
    cosine = (z.double() * own).sum(-1) / (z.double().norm(dim=-1) * own.norm(dim=-1) + 1e-300)
    yield Check(f"α = 1: largest |cos(z, v)|, {_name(dtype)}", cosine[:, 1:].abs().max().item(), tolerance)
    yield Check(f"α = 1: position 0, {_name(dtype)}", z[:, 0].abs().max().item(), 0.0)


def _qkv(dtype: torch.dtype, length: int = 33) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((2, length, 6, 32), (2, length, 2, 32), (2, length, 2, 32))
    q, k, v = (torch.randn(s, generator=stream(5, str(i)), dtype=torch.float64) for i, s in enumerate(shapes))
    return q.to(dtype), k.to(dtype), v.to(dtype)


def gradients() -> Iterator[Check]:
    """3. Analytic gradients of y, v and α against central differences in float64, with grouped heads."""
    y, _, v = _qkv(torch.float64, length=4)
    weight = torch.randn(y.shape, generator=stream(6, "weight"), dtype=torch.float64)
    alpha = torch.linspace(0.1, 0.9, 6, dtype=torch.float64)
    inputs = [tensor.clone().requires_grad_() for tensor in (y, v, alpha)]
    (exclude_self(*inputs) * weight).sum().backward()
    for name, index in (("y", 0), ("v", 1), ("α", 2)):
        worst, step = 0.0, 1e-6
        flat = inputs[index].detach().view(-1)
        for position in range(0, flat.numel(), max(1, flat.numel() // 40)):
            sides = []
            for sign in (1, -1):
                moved = [tensor.detach().clone() for tensor in inputs]
                moved[index].view(-1)[position] += sign * step
                sides.append((exclude_self(*moved) * weight).sum().item())
            numeric = (sides[0] - sides[1]) / (2 * step)
            analytic = inputs[index].grad.view(-1)[position].item()  # pyright: ignore
            worst = max(worst, abs(numeric - analytic) / (1 + abs(numeric)))
        yield Check(f"gradient of {name} against differences, float64", worst, 1e-7)


def cached_decoding(dtype: torch.dtype) -> Iterator[Check]:
    """4. Prefill and decode give the logits of one full pass, however the tokens are split."""
    # Sums of other lengths round differently: about 1e-6 of logits up to 15 in float32, one rounding in bfloat16.
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 0.15}[dtype]
    tokens = _tokens(length=40)
    for name in ("standard", "xsa", "self-masked", "head-gate", "sink"):
        model = _model(VariantChoice(name), dtype)
        with torch.no_grad():
            full, worst = model(tokens), 0.0
            for split in ((7, 1, 3, 1, 28), (1,) * 12 + (28,), (39, 1)):
                cache, start, parts = KVCache(SMALL.depth), 0, []
                for size in split:
                    parts.append(model(tokens[:, start : start + size], cache))
                    start += size
                worst = max(worst, _difference(torch.cat(parts, 1), full))
        yield Check(f"cached decoding of {name}, {_name(dtype)}", worst, tolerance, "3 splits, windows, 6 heads over 2")


def causality(extra: tuple[tuple[ModelConfig, VariantChoice], ...] = ()) -> Iterator[Check]:
    """5. A changed token changes no earlier logit and no other row, for every registered variant."""
    for config, choice in (*((SMALL, VariantChoice(name)) for name in sorted(VARIANTS)), *extra):
        try:
            check_causality(config, choice)
            yield Check(f"causality of {choice.name}", 0.0, 0.0, f"layers {choice.layers}")
        except (ValueError, TypeError) as error:
            yield Check(f"causality of {choice.name}", 1.0, 0.0, str(error))


def fast_paths(dtype: torch.dtype) -> Iterator[Check]:
    """6. Each fast path against the plain one, outputs and gradients."""
    # Relative to the largest entry; bfloat16 kernels round inside, the plain one at the end.
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    kernels_used = native.instructions() if native.takes(torch.empty(0, dtype=dtype)) else "as PyTorch has it"
    for name, window, length in (
        ("sdpa", 64, 33),
        ("sdpa", 8, 33),
        ("blocked", 8, 48),
        ("auto", 64, 33),
        ("auto", 8, 48),
    ):
        q, k, v = _qkv(dtype, length)
        gap = _compare(
            lambda q, k, v, name=name, window=window: kernels.KERNELS[name](q, k, v, window),
            lambda q, k, v, window=window: kernels.explicit(q, k, v, window), (q, k, v),
        )  # fmt: skip
        told = f"against T × T; {kernels_used}" if name == "auto" else "against T × T"
        yield Check(f"attention kernel {name}, window {window}, {_name(dtype)}", gap, tolerance, told)
    q, k, v = _qkv(dtype)
    attend = LayerAttend(64)
    gap = _compare(
        lambda q, k, v: _exclusive(attend, q, k, v, 0.7),
        lambda q, k, v: _plain_exclusion(kernels.explicit(q, k, v, 64), v, 0.7), (q, k, v),
    )  # fmt: skip
    yield Check(f"attention and exclusion together, {_name(dtype)}", gap, tolerance, kernels_used)
    q, _, v = _qkv(dtype)
    gap = _compare(lambda y, v: exclude_self(y, v, 0.7), lambda y, v: _plain_exclusion(y, v, 0.7), (q, v))
    yield Check(f"exclude_self, {_name(dtype)}", gap, tolerance, "against the formula under autograd")
    x = torch.randn(90, 32, generator=stream(7, "x")).to(dtype)
    gap = _compare(
        lambda x: layers.rms_norm(x, 1e-6, 1.2),
        lambda x: (1.2 * F.rms_norm(x.float(), (32,), eps=1e-6)).to(dtype),
        (x,),
    )
    yield Check(f"rms_norm, {_name(dtype)}", gap, tolerance, "against torch's in float32")
    mlp = layers.MLP(32, 64)
    with torch.no_grad():
        for parameter in mlp.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=stream(7, "mlp")) / 8)
    gap = _compare(
        mlp, lambda x: F.linear(F.linear(x, mlp.w1.weight.to(dtype)).relu() ** 2, mlp.w2.weight.to(dtype)), (x,)
    )
    yield Check(f"MLP, {_name(dtype)}", gap, tolerance, "against the formula under autograd")
    weight = torch.randn(64, 32, generator=stream(7, "w"))
    targets = torch.randint(-1, 60, (90,), generator=stream(7, "t"))
    gap = _compare(
        lambda x, w: head_module.token_nats(x, w, targets, 15.0, 60),
        lambda x, w: _plain_nats(x, w, targets, 60),
        (x, weight),
    )
    yield Check(f"head and loss in blocks, {_name(dtype)}", gap, tolerance, "against cross_entropy")


def memory_neutral(dtype: torch.dtype) -> Iterator[Check]:
    """6, to the bit: the exclusion with W_o, which makes z again for backward, against one after the other."""
    for way, told in ((nullcontext, "kernels where they serve"), (native.plain, "PyTorch")):
        with way():
            y, _, v = _qkv(dtype)
            weight = torch.randn(64, y.shape[2] * y.shape[3], generator=stream(9, "w_o"))
            gap = _compare(
                lambda y, v, w: exclude_and_project(y, v, 0.7, w),
                lambda y, v, w: F.linear(exclude_self(y, v, 0.7).flatten(2), w.to(y.dtype)),
                (y, v, weight),
            )
            yield Check(f"exclusion and W_o, z made again, {_name(dtype)}", gap, 0.0, told)


def _exclusive(attend: LayerAttend, q: Tensor, k: Tensor, v: Tensor, alpha: float) -> Tensor:
    z = attend.exclusive(q, k, v, alpha)
    return exclude_self(attend(q, k, v), v, alpha) if z is None else z


def _plain_exclusion(y: Tensor, v: Tensor, alpha: float) -> Tensor:
    own = v.float().repeat_interleave(y.shape[2] // v.shape[2], dim=2)
    c = (y.float() * own).sum(-1, keepdim=True) / (own * own).sum(-1, keepdim=True)
    return (y.float() - alpha * c * own).to(y.dtype)


def _plain_nats(x: Tensor, weight: Tensor, targets: Tensor, vocabulary: int) -> Tensor:
    logits = 15 * torch.tanh(F.linear(x, weight.to(x.dtype)).float() / 15)
    return F.cross_entropy(logits[:, :vocabulary], targets, ignore_index=-1, reduction="none")


def _compare(fast: Callable[..., Tensor], plain: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> float:
    """Largest difference of outputs and gradients, each relative to its largest entry."""
    results = []
    for function in (fast, plain):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        out = function(*leaves)
        direction = torch.randn(out.shape, generator=stream(8, "direction")).to(out.dtype)
        out.backward(direction)
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    return max(
        _difference(a, b) / max(b.abs().max().item(), 1e-30)
        for a, b in zip(*results, strict=True)  # pyright: ignore
    )


def compiled_paths() -> Iterator[Check]:
    """torch.compile against eager mode: one step from a common state, and the losses of steps 0 to 4."""
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 1e-3)):
        for alpha in (1.0, {"from": 0.0, "to": 1.0}):
            choice = VariantChoice("xsa", options={"alpha": alpha})
            eager, compiled = (_training_losses(choice, dtype, 5, compiled=flag) for flag in (False, True))
            gap = _difference(torch.tensor(eager), torch.tensor(compiled))
            yield Check(f"compiled, alpha = {alpha}, {_name(dtype)}", gap, tolerance, "losses of steps 0 to 4")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def experiment_choices(configs: list[Any]) -> tuple[tuple[ModelConfig, VariantChoice], ...]:
    """(model, variant) of each distinct run configuration, for ``all_checks``."""
    found: dict[str, tuple[ModelConfig, VariantChoice]] = {}
    for config in configs:
        found.setdefault(repr((config.model, config.variant)), (dataclasses.replace(config.model), config.variant))
    return tuple(found.values())
