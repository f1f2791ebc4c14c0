"""The blocked loss against torch's cross-entropy of the whole matrix of logits; the kernel against the plain path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from xsalab.model import native
from xsalab.model.head import capped_logits, token_nats

VOCABULARY, ROWS = 50, 64
needs_kernels = pytest.mark.skipif(bool(native.reason()), reason=native.reason() or "kernels are there")


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def reference(x: Tensor, weight: Tensor, targets: Tensor, cap: float) -> Tensor:
    logits = (x @ weight.to(x.dtype).T)[..., :VOCABULARY].float()
    logits = cap * torch.tanh(logits / cap) if cap else logits
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=-1, reduction="none").view(
        targets.shape
    )


@pytest.fixture
def targets() -> Tensor:
    targets = torch.randint(0, VOCABULARY, (3, 70), generator=torch.Generator().manual_seed(1))
    targets[0, :5] = targets[2, -1] = -1
    return targets


@pytest.mark.parametrize("cap", [15.0, 2.0, 0.0])
@pytest.mark.parametrize("block", [1, 1 << 20], ids=["many-blocks", "one-block"])
def test_nats_and_gradients_are_those_of_cross_entropy(
    monkeypatch: pytest.MonkeyPatch, targets: Tensor, cap: float, block: int
) -> None:
    """205 rows that count in blocks of 64 with pieces of 16, the last ones short, and in one."""
    monkeypatch.setattr("xsalab.model.head.BLOCK_BYTES", {"cpu": 64 * 4 * VOCABULARY * block})
    monkeypatch.setattr("xsalab.model.head.CACHE_BYTES", {"cpu": block})
    results = []
    for ours in (True, False):
        x, weight = draw(3, 70, 16).requires_grad_(), draw(ROWS, 16, seed=2).requires_grad_()
        nats = token_nats(x, weight, targets, cap, VOCABULARY) if ours else reference(x, weight, targets, cap)
        nats.backward(draw(3, 70, seed=3))
        results.append((nats.detach(), x.grad, weight.grad))
    # float32, sums of up to 210 products of order 1 in another order
    torch.testing.assert_close(results[0], results[1], atol=2e-5, rtol=1e-5)


def test_masked_targets_cost_nothing_and_teach_nothing(targets: Tensor) -> None:
    x, weight = draw(3, 70, 16).requires_grad_(), draw(ROWS, 16, seed=2).requires_grad_()
    nats = token_nats(x, weight, targets, 15.0, VOCABULARY)
    nats.sum().backward()
    assert not nats[targets == -1].any()
    assert (nats[targets >= 0] > 0).all()
    assert x.grad is not None
    assert not x.grad[targets == -1].any()
    assert x.grad[targets >= 0].any(-1).all()


def test_rows_beyond_the_vocabulary_take_no_part(targets: Tensor) -> None:
    """F045: padding of the table neither raises the loss nor gets a gradient."""
    x, weight = draw(3, 70, 16), draw(ROWS, 16, seed=2)
    spoiled = weight.clone()
    spoiled[VOCABULARY:] = 1e6
    spoiled.requires_grad_()
    nats = token_nats(x, spoiled, targets, 15.0, VOCABULARY)
    assert torch.equal(nats, token_nats(x, weight, targets, 15.0, VOCABULARY))
    nats.sum().backward()
    assert spoiled.grad is not None
    assert not spoiled.grad[VOCABULARY:].any()
    assert spoiled.grad[:VOCABULARY].any()


def test_an_infinite_loss_at_a_masked_place_stays_there() -> None:
    """F119: selected, not multiplied by 0: totals and gradients of the others are finite."""
    x, weight = draw(4, 16), draw(ROWS, 16, seed=2).requires_grad_()
    x[1] = 3e38
    x.requires_grad_()
    targets = torch.tensor([3, -1, 4, 5])
    nats = token_nats(x, weight, targets, 0.0, VOCABULARY)
    assert nats.isfinite().all()
    nats.sum().backward()
    assert x.grad is not None
    assert x.grad[[0, 2, 3]].isfinite().all()


def test_bfloat16_states_float32_nats(targets: Tensor) -> None:
    """The products are bfloat16's; logits, loss and sums are float32. 8 bits of mantissa on logits of order 4: 2e-2."""
    x, weight = draw(3, 70, 16, dtype=torch.bfloat16).requires_grad_(), draw(ROWS, 16, seed=2).requires_grad_()
    nats = token_nats(x, weight, targets, 15.0, VOCABULARY)
    nats.sum().backward()
    assert (nats.dtype, x.grad.dtype, weight.grad.dtype) == (torch.float32, torch.bfloat16, torch.float32)  # pyright: ignore
    torch.testing.assert_close(nats, reference(x.float(), weight, targets, 15.0), atol=6e-2, rtol=0)


def test_logits_stay_within_the_cap() -> None:
    x, weight = 100 * draw(5, 16), draw(ROWS, 16, seed=2)
    assert capped_logits(x, weight, 15.0).abs().max() <= 15
    torch.testing.assert_close(capped_logits(x, weight, 0.0), x @ weight.T)
    small = 1e-3 * x
    torch.testing.assert_close(capped_logits(small, weight, 15.0), 15 * torch.tanh(small @ weight.T / 15))


# ---- the kernel for bfloat16 (csrc/head.cpp) beside the plain path


@pytest.fixture(params=["plain", pytest.param("kernel", marks=needs_kernels)])
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Both ways of doing it."""
    with native.plain() if request.param == "plain" else nullcontext():
        yield request.param


def run(
    x: Tensor, weight: Tensor, targets: Tensor, cap: float, vocabulary: int, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """nats, and the gradients of Σ scale · nats."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    nats = token_nats(x, weight, targets, cap, vocabulary)
    nats.backward(scale)
    assert x.grad is not None
    assert weight.grad is not None
    return nats.detach(), x.grad, weight.grad


def oracle(
    x: Tensor, weight: Tensor, targets: Tensor, cap: float, vocabulary: int, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The same of the same bfloat16 numbers in float32, the plain way."""
    with native.plain():
        return run(x.float(), weight.bfloat16().float(), targets, cap, vocabulary, scale)


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Of 2-norms, relative."""
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())


def problem(n: int, width: int, vocabulary: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of order 2, every seventh target masked; rows of padding that must not be read."""
    x, weight = draw(n, width, dtype=torch.bfloat16), 2 * draw(rows, width, seed=1) / width**0.5
    weight[vocabulary:] = torch.nan
    targets = torch.randint(0, vocabulary, (n,), generator=torch.Generator().manual_seed(2))
    targets[3::7] = -1
    return x, weight, targets


SCALES: dict[str, Callable[[int], Tensor]] = {
    "mean": lambda n: torch.full((n,), 0.3 / n),
    "each-its-own": lambda n: draw(n, seed=3),
    "half-of-them": lambda n: (torch.arange(n) % 2).float(),
}


@needs_kernels
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("cap", [15.0, 2.0, 64.0])
@pytest.mark.parametrize(
    ("n", "width", "vocabulary", "rows"),
    [(1, 32, 2, 2), (97, 64, 50, 64), (33, 32, 129, 129), (700, 96, 333, 340), (70, 256, 1000, 1024)],
)
def test_kernel_is_the_float32_loss_of_the_same_numbers(
    n: int, width: int, vocabulary: int, rows: int, cap: float, scale: str
) -> None:
    """The kernel keeps logits in float32: nats differ by float32's sums. Gradients by bfloat16's rounding (2⁻⁹ at
    most, 2⁻⁹ / √3 in the norm) of p, of x / Σ and of the result, twice where that is multiplied: < 3.5e-3 together.
    """
    x, weight, targets = problem(n, width, vocabulary, rows)
    ours = run(x, weight, targets, cap, vocabulary, SCALES[scale](n))
    theirs = oracle(x, weight, targets, cap, vocabulary, SCALES[scale](n))
    torch.testing.assert_close(ours[0], theirs[0], atol=2e-5, rtol=2e-6)
    if theirs[1].any():
        assert difference(ours[1], theirs[1]) < 3.5e-3
        assert difference(ours[2][:vocabulary], theirs[2][:vocabulary]) < 3.5e-3
    assert not ours[1][targets < 0].any()
    assert not ours[2][vocabulary:].any()


@needs_kernels
def test_where_the_model_is_sure_the_gradient_is_still_exact() -> None:
    """1 − p of 1e-3 to 2e-2: p rounded to bfloat16 is off by up to 2e-3, and the gradient would be something else."""
    size = torch.linspace(3.1, 3.6, 64)[:, None]
    weight = (torch.linalg.qr(draw(64, 64))[0] * size).bfloat16().float().contiguous()
    x, targets = weight[:32].bfloat16(), torch.arange(32)
    rest = 1 - (x.float() @ weight.T / 15).tanh().mul(15).softmax(-1)[range(32), range(32)]
    assert 1e-3 < rest.min() < rest.max() < 2e-2
    ours, theirs = (f(x, weight, targets, 15.0, 64, torch.ones(32)) for f in (run, oracle))
    for i in (1, 2):
        assert difference(ours[i], theirs[i]) < 3.5e-3


@pytest.mark.parametrize("cap", [0.0, 100.0])
def test_without_a_cap_and_with_a_wide_one_bfloat16_goes_the_plain_way(cap: float) -> None:
    """These need a maximum. Logits rounded to bfloat16: 2⁻⁹ of order 4, and so are the gradients' rounding errors."""
    x, weight, targets = problem(97, 64, 50, 64)
    ours, theirs = (f(x, weight, targets, cap, 50, draw(97, seed=3)) for f in (run, oracle))
    torch.testing.assert_close(ours[0], theirs[0], atol=4e-2, rtol=0)
    assert difference(ours[1], theirs[1]) < 1e-2
    assert difference(ours[2][:50], theirs[2][:50]) < 1e-2


def test_a_common_weight_is_not_rounded(path: str) -> None:
    """0.3 is 0.30078 in bfloat16: all gradients alike would be 0.26 % too large."""
    x, weight, targets = problem(97, 64, 50, 64)
    _, grad_x, grad_weight = run(x, weight, targets, 15.0, 50, torch.full((97,), 0.3))
    _, unit_x, unit_weight = run(x, weight, targets, 15.0, 50, torch.ones(97))
    for ours, unit in ((grad_x, unit_x), (grad_weight[:50], unit_weight[:50])):
        ratio = float((ours.double() * unit.double()).sum() / unit.double().square().sum())
        assert ratio == pytest.approx(0.3, rel=2e-4)  # 6,208 roundings of 2⁻⁹ in a mean


def test_backward_can_run_twice(path: str) -> None:
    """The gradients made in forward are given away by the first backward; the second makes its own."""
    x, weight, targets = problem(40, 64, 50, 64)
    x.requires_grad_()
    nats = token_nats(x, weight.requires_grad_(), targets, 15.0, 50).sum()
    first = [g.clone() for g in torch.autograd.grad(nats, (x, weight), retain_graph=True)]
    second = torch.autograd.grad(nats, (x, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_masked_rows_may_hold_anything(path: str) -> None:
    """Infinity at a masked place reaches neither the loss nor a gradient."""
    x, weight, targets = problem(40, 64, 50, 64)
    clean = run(x, weight, targets, 15.0, 50, torch.ones(40))
    x[targets < 0] = torch.inf
    for ours, theirs in zip(run(x, weight, targets, 15.0, 50, torch.ones(40)), clean, strict=True):
        assert torch.equal(ours, theirs)


def test_no_target_at_all_gives_zeros(path: str) -> None:
    x, weight, targets = problem(40, 64, 50, 64)
    for result in run(x, weight, torch.full_like(targets, -1), 15.0, 50, torch.ones(40)):
        assert not result.any()


def test_what_is_not_a_number_is_told(path: str) -> None:
    """NaN in a row of x is in its nats, and in no other's; NaN in a used row of the weights is in all."""
    x, weight, targets = problem(40, 64, 50, 64)
    x[0, 5] = torch.nan
    nats = run(x, weight, targets, 15.0, 50, torch.ones(40))[0]
    assert nats[0].isnan()
    assert nats[1:].isfinite().all()
    weight[7, 3] = torch.nan
    assert run(x, weight, targets, 15.0, 50, torch.ones(40))[0][targets >= 0].isnan().all()


def test_a_target_beyond_the_vocabulary_is_refused(path: str) -> None:
    x, weight, targets = problem(40, 64, 50, 64)
    targets[3] = 50
    with pytest.raises(RuntimeError, match="50"):
        token_nats(x, weight, targets, 15.0, 50)


class Watch(TorchDispatchMode):
    """Names of the operations, and the number of entries of their largest result."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.names.add(str(func))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor):
                self.largest = max(self.largest, value.numel())
        return result


def peak_bytes(action: Callable[[], object]) -> int:
    """By how much the process was larger during ``action`` than before."""
    status, clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not clear.exists():
        pytest.skip("the system does not tell a process's peak memory")

    def read(name: str) -> int:
        line = next(line for line in status.read_text(encoding="ascii").splitlines() if line.startswith(name))
        return int(line.split()[1]) << 10

    clear.write_text("5", encoding="ascii")  # the peak begins anew
    before = read("VmRSS")
    action()
    return read("VmHWM") - before


def test_no_tensor_of_tokens_by_vocabulary(path: str) -> None:
    """3,000 × 8,192 entries would be 49 MB in bfloat16. The gradients apart, both ways take 32 MB at most, whatever the
    weights of the rows, and no tensor has that many entries.
    """
    n, width, vocabulary = 3000, 32, 8192
    x, weight, targets = problem(n, width, vocabulary, vocabulary)
    run(x, weight, targets, 15.0, vocabulary, torch.ones(n))  # what PyTorch keeps for good
    for scale in (torch.ones(n), draw(n, seed=3)):
        gradients = 3 * (x.nbytes + weight.nbytes)  # those of forward, those of backward, and copies of the arguments
        assert peak_bytes(lambda: run(x, weight, targets, 15.0, vocabulary, scale)) < (32 << 20) + gradients  # noqa: B023
    with Watch() as watch:
        run(x, weight, targets, 15.0, vocabulary, torch.ones(n))
    assert watch.largest <= (1 << 24) // 2  # head.BLOCK_BYTES of bfloat16, 2.9 times smaller


def test_evaluation_makes_the_nats_alone(path: str) -> None:
    """Without grad, and where nothing asks for one: the same nats, no gradients on the way."""
    x, weight, targets = problem(70, 64, 50, 64)
    taught = run(x, weight, targets, 15.0, 50, torch.ones(70))[0]
    with Watch() as watch:
        plainly = token_nats(x, weight, targets, 15.0, 50)
    with torch.no_grad():
        unasked = token_nats(x, weight.requires_grad_(), targets, 15.0, 50)
    assert torch.equal(taught, plainly)
    assert torch.equal(taught, unasked)
    assert "xsalab.token_nats_and_gradients.default" not in watch.names
    assert ("xsalab.token_nats.default" in watch.names) == (path == "kernel")
    assert "aten.addcmul.out" not in watch.names  # the slope of tanh


@needs_kernels
def test_kernel_repeats_itself_bit_for_bit() -> None:
    """With one number of threads; another adds the vocabulary's pieces in another order, and no more than that."""
    x, weight, targets = problem(700, 64, 333, 340)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 1, 2, 2):
            torch.set_num_threads(threads)
            results.append(run(x, weight, targets, 15.0, 333, draw(700, seed=3)))
    finally:
        torch.set_num_threads(before)
    for i in (0, 2):
        assert all(torch.equal(a, b) for a, b in zip(results[i], results[i + 1], strict=True))
    torch.testing.assert_close(results[0][0], results[2][0], atol=4e-6, rtol=0)
    assert difference(results[0][1], results[2][1]) < 1e-3  # a result near the middle of two bfloat16 numbers
    assert difference(results[0][2], results[2][2]) < 1e-3


@needs_kernels
def test_kernel_tells_its_shapes() -> None:
    """For torch.compile."""
    x, weight, targets = problem(40, 64, 50, 64)
    checks = ("test_schema", "test_faketensor")
    ops = torch.ops.xsalab
    torch.library.opcheck(ops.token_nats.default, (x, weight, targets, 15.0, 50), test_utils=checks)
    for scale in (None, torch.ones(40)):
        args = (x, weight, targets, scale, 15.0, 50)
        torch.library.opcheck(ops.token_nats_and_gradients.default, args, test_utils=checks)


@needs_kernels
@pytest.mark.parametrize(
    ("broken", "told"),
    [
        ({"x": torch.zeros(4, 32)}, "bfloat16"),
        ({"weight": torch.zeros(8, 64)}, "multiple of 32"),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, "int64"),
        ({"cap": 0.0}, "cap 0"),
        ({"cap": 65.0}, "cap 65"),
        ({"vocabulary": 9}, "vocabulary 9 of 8 rows"),
    ],
)
def test_kernel_refuses_what_it_cannot_do(broken: dict[str, Any], told: str) -> None:
    arguments = {
        "x": torch.zeros(4, 32, dtype=torch.bfloat16),
        "weight": torch.zeros(8, 32),
        "targets": torch.zeros(4, dtype=torch.int64),
        "cap": 15.0,
        "vocabulary": 8,
    }
    with pytest.raises(RuntimeError, match=told):
        torch.ops.xsalab.token_nats(**(arguments | broken))
