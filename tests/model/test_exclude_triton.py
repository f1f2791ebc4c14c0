"""The Triton kernels of the operation, run by Triton's interpreter on the CPU, against the equation in float64.

The interpreter is chosen where Triton is imported first. So these tests run in a process of their own, that the first
test starts, and are skipped in pytest's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from triton_compiled import compile_for_hopper, run_under_the_interpreter
from xsalab.model import exclude_triton
from xsalab.model.exclude_triton import exclude_backward, exclude_forward

INSIDE = exclude_triton.INTERPRETED
installed = pytest.mark.skipif(not exclude_triton.INSTALLED, reason="Triton is not installed: pip install triton")
inside = pytest.mark.skipif(not INSIDE, reason="runs in the process that test_all_of_them starts")
outside = pytest.mark.skipif(INSIDE, reason="of the process that starts the others")


@installed
@outside
@pytest.mark.slow
def test_all_of_them_under_the_interpreter() -> None:
    """Every test below, in a process with TRITON_INTERPRET=1."""
    run_under_the_interpreter(__file__)


@installed
@outside
@pytest.mark.parametrize("name", ["forward", "backward"])
def test_it_compiles_for_an_h100_with_wide_loads_and_all_in_registers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter takes what the compiler refuses. Rows of a model: 16 bytes a load and store, nothing spilled."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    y, v = torch.empty(2, 64, 6, 128, dtype=torch.bfloat16), torch.empty(2, 64, 6, 128, dtype=torch.bfloat16)
    sizes = exclude_triton._sizes(y, v)
    options = {key: sizes.pop(key) for key in ("num_warps", "enable_fp_fusion")}
    kernel = exclude_triton._kernel(name)
    types: dict[str, str] = dict.fromkeys(kernel.arg_names, "i32")
    types |= dict.fromkeys(("y", "v", "z", "grad", "grad_y", "grad_v"), "*bf16")
    types |= {"strength": "fp32", "parts": "*fp32"}
    found = compile_for_hopper(kernel, types, {**sizes, "alpha": None}, options, tmp_path)
    assert found.accesses == {"ld.global.v4.b32", "st.global.v4.b32"}
    assert found.stack == 0
    assert found.registers <= 128  # four programs of 128 threads on a multiprocessor, at the least


@outside
def test_without_triton_or_without_a_gpu_the_plain_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of the CPU is never for these kernels; nor any where Triton is missing, nor float64."""
    assert not exclude_triton.available(torch.zeros(1, dtype=torch.bfloat16))
    monkeypatch.setattr(exclude_triton, "INTERPRETED", True)
    monkeypatch.setattr(exclude_triton, "INSTALLED", True)
    assert exclude_triton.available(torch.zeros(1, dtype=torch.bfloat16))
    assert not exclude_triton.available(torch.zeros(1, dtype=torch.float64))
    monkeypatch.setattr(exclude_triton, "INSTALLED", False)
    assert not exclude_triton.available(torch.zeros(1, dtype=torch.bfloat16))


# --- under the interpreter


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def strength(kind: str, h: int) -> Any:
    return {"number": 0.7, "one": torch.tensor(0.7), "per head": torch.linspace(-0.5, 1.0, h)}[kind]


def written_out(grad: Tensor, y: Tensor, v: Tensor, alpha: Any) -> list[Tensor]:
    """z and the gradients in float64: the equation as it stands, value heads copied, differentiated by autograd."""
    leaves = [x.double().requires_grad_() for x in (y, v, *([alpha] if isinstance(alpha, Tensor) else []))]
    repeated = leaves[1].repeat_interleave(y.shape[2] // v.shape[2], dim=2)
    a = (leaves[2].view(-1, 1) if leaves[2].ndim else leaves[2]) if len(leaves) == 3 else alpha
    c = (leaves[0] * repeated).sum(-1, keepdim=True) / (repeated * repeated).sum(-1, keepdim=True)
    z = leaves[0] - a * c * repeated
    return [z.detach(), *torch.autograd.grad(z, leaves, grad.double())]


# One rounding of the result: half a unit in its last place, relative to it. Float32: sums in another order.
ROUNDING = {torch.float32: 2e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}
INTERPRETER = {**ROUNDING, torch.bfloat16: 2**-7}  # cuts bfloat16 off where a GPU rounds

CASES = [  # (b, t, h, g, d), α, dtype
    ((2, 33, 6, 2, 16), "per head", torch.float32),
    ((2, 33, 6, 2, 16), "number", torch.bfloat16),
    ((1, 40, 4, 4, 64), "one", torch.float16),
    ((1, 40, 4, 4, 64), "per head", torch.bfloat16),
    ((2, 5, 3, 1, 80), "number", torch.float32),  # wider than a power of two, all heads share one value
    ((1, 3, 2, 2, 5), "one", torch.float32),
    ((1, 1, 1, 1, 1), "per head", torch.bfloat16),
]


@inside
@pytest.mark.parametrize(("shape", "kind", "dtype"), CASES, ids=str)
def test_forward_and_gradients_are_those_of_the_equation(shape: tuple[int, ...], kind: str, dtype: torch.dtype) -> None:
    """Odd shapes, grouped heads, every form of α, every dtype; α's own gradient is in float32."""
    b, t, h, g, d = shape
    y, v, grad = (draw(b, t, n, d, seed=seed, dtype=dtype) for seed, n in enumerate((h, g, h)))
    alpha = strength(kind, h)
    z, (grad_y, grad_v, each, none) = exclude_forward(y, v, alpha), exclude_backward(grad, y, v, alpha)
    again = exclude_backward(grad, y, v, alpha, True)
    assert none.numel() == 0
    assert all(torch.equal(a, b) for a, b in zip(again, (grad_y, grad_v, each, z), strict=True))
    want = written_out(grad, y, v, alpha)
    # Terms cancel where D is small: float32's own error is that of the terms, relative to the largest
    for got, exact in zip((z, grad_y, grad_v), want, strict=False):
        assert got.dtype == dtype
        assert got.shape == exact.shape
        assert got.is_contiguous()
        room = 1e-5 * exact.abs().max().item() + 1e-6
        torch.testing.assert_close(got.double(), exact, atol=room, rtol=1.01 * INTERPRETER[dtype])
    if kind == "number":
        assert each.numel() == 0
    else:
        assert each.shape == (h,)
        torch.testing.assert_close((each if alpha.ndim else each.sum()).double(), want[3], atol=1e-5, rtol=1e-5)


@inside
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_where_a_token_sees_only_itself_nothing_is_left(dtype: torch.dtype) -> None:
    """α = 1 and y = v give 0 to the bit: both sums are made by the same operation in the same order."""
    v = draw(2, 50, 3, 24, seed=0, dtype=dtype)
    assert exclude_forward(v, v, 1.0).abs().max() == 0


@inside
def test_the_floor_is_the_smallest_normal_number() -> None:
    """v = 0 gives z = y and finite gradients; a v of length 1e-15 is still taken out whole."""
    y, grad = draw(1, 4, 2, 8, seed=0), draw(1, 4, 2, 8, seed=1)
    zero = torch.zeros(1, 4, 2, 8)
    assert torch.equal(exclude_forward(y, zero, 1.0), y)
    grad_y, grad_v, *_ = exclude_backward(grad, y, zero, 1.0)
    assert torch.equal(grad_y, grad)
    assert torch.equal(grad_v, zero)
    short = draw(1, 4, 2, 8, seed=2) * 1e-15
    along = (exclude_forward(y, short, 1.0) * (short * 1e15)).sum(-1)
    assert along.abs().max() < 1e-5
    grads = exclude_backward(grad, y, short, torch.ones(2))
    assert all(bool(torch.isfinite(x).all()) for x in grads)


@inside
def test_any_strides_are_read_and_the_same_numbers_come_out() -> None:
    """Heads before tokens, slices of a joined projection, a gradient that is one number expanded, reversed channels."""
    y, v, grad = draw(2, 9, 4, 12, seed=0), draw(2, 9, 2, 12, seed=1), draw(2, 9, 4, 12, seed=2)
    joined = torch.cat((y, v, v), dim=2)
    forms = [
        (grad.transpose(1, 2).contiguous().transpose(1, 2), joined[:, :, :4], joined[:, :, 4:6]),
        (grad, y.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0), v),
    ]
    alpha = strength("per head", 4)
    want = (exclude_forward(y, v, alpha), *exclude_backward(grad, y, v, alpha))
    for g, a, b in forms:
        assert not a.is_contiguous()
        got = (exclude_forward(a, b, alpha), *exclude_backward(g, a, b, alpha))
        assert all(torch.equal(x, w) for x, w in zip(got, want, strict=True))  # pyright: ignore
    one = torch.ones(()).expand(2, 9, 4, 12)
    ones = torch.ones(2, 9, 4, 12)
    for x, w in zip(exclude_backward(one, y, v, alpha), exclude_backward(ones, y, v, alpha), strict=True):
        assert torch.equal(x, w)  # pyright: ignore


@inside
def test_it_gives_the_same_bits_again() -> None:
    """No atomics: α's gradient is summed over parts, v's over the heads of its group in order."""
    y, v, grad = draw(2, 300, 4, 32, seed=0), draw(2, 300, 2, 32, seed=1), draw(2, 300, 4, 32, seed=2)
    assert exclude_triton._blocks(v) > 1, "several parts"
    alpha = torch.tensor(0.5)
    first, again = (exclude_backward(grad, y, v, alpha) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))  # pyright: ignore


class _Function(torch.autograd.Function):
    """The pair as exclude_self uses it."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, v: Tensor, alpha: Tensor) -> Tensor:  # pyright: ignore
        ctx.save_for_backward(y, v, alpha)
        return exclude_forward(y, v, alpha)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        y, v, alpha = ctx.saved_tensors
        grad_y, grad_v, each, z = exclude_backward(grad, y, v, alpha, True)
        return grad_y + 0 * z, grad_v, each


@inside
def test_a_compiled_graph_has_no_break() -> None:
    """fullgraph through forward and backward, and the numbers of the call outside it."""
    alpha = torch.rand(4, generator=torch.Generator().manual_seed(3))

    def loss(y: Tensor, v: Tensor, a: Tensor) -> Tensor:
        return (_Function.apply(2 * y, v, a.tanh()) ** 2).sum()  # pyright: ignore

    both = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=False)):
        leaves = [x.clone().requires_grad_() for x in (draw(2, 9, 4, 12, seed=0), draw(2, 9, 2, 12, seed=1), alpha)]
        both.append([function(*leaves), *torch.autograd.grad(function(*leaves), leaves)])
    torch.testing.assert_close(both[1], both[0], atol=1e-6, rtol=1e-6)


@inside
def test_the_operations_tell_their_shapes_and_strides() -> None:
    """torch's own check of a custom operation: schema, fake tensors, no aliasing, no mutation."""
    y, v, grad = draw(2, 9, 4, 12, seed=0), draw(2, 9, 2, 12, seed=1), draw(2, 9, 4, 12, seed=2)
    checks = ("test_schema", "test_faketensor")
    for alpha in (None, torch.rand(4)):
        torch.library.opcheck(torch.ops.xsalab.exclude_triton.default, (y, v, alpha, 0.5), test_utils=checks)
        args = (grad, y, v, alpha, 0.5, alpha is None)
        torch.library.opcheck(torch.ops.xsalab.exclude_triton_backward.default, args, test_utils=checks)


@pytest.mark.skipif(not torch.cuda.is_available() or INSIDE, reason="no CUDA device here: run on a GPU")
@installed
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_on_a_gpu(dtype: torch.dtype) -> None:
    """The kernels as they are compiled, at the size of a model: against float64, exactly 0 where y = v, same bits."""
    y, v, grad = (draw(4, 1024, n, 128, seed=seed, dtype=dtype).cuda() for seed, n in enumerate((6, 2, 6)))
    alpha = torch.linspace(0, 1, 6).cuda()
    got = (exclude_forward(y, v, alpha), *exclude_backward(grad, y, v, alpha))
    want = written_out(grad, y, v, alpha)
    for a, b in zip(got[:3], want[:3], strict=True):
        torch.testing.assert_close(a.double(), b, atol=1e-5 * b.abs().max().item(), rtol=1.01 * ROUNDING[dtype])  # pyright: ignore
    torch.testing.assert_close(got[3].double(), want[3], atol=1e-3, rtol=1e-4)  # pyright: ignore
    assert exclude_forward(v, v, 1.0).abs().max() == 0
    again = exclude_backward(grad, y, v, alpha)
    assert all(torch.equal(a, b) for a, b in zip(got[1:], again, strict=True))  # pyright: ignore
