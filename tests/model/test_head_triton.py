"""The head's Triton kernel, run by Triton's interpreter on the CPU, against softmax written out in float64.

In a process of their own, as those of test_exclude_triton.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from triton_compiled import compile_for_hopper, run_under_the_interpreter
from xsalab.model import exclude_triton, head_triton
from xsalab.model.head import token_nats
from xsalab.model.head_triton import head_nats, head_nats_and_gradients

INSIDE = exclude_triton.INTERPRETED
installed = pytest.mark.skipif(not exclude_triton.INSTALLED, reason="Triton is not installed: pip install triton")
inside = pytest.mark.skipif(not INSIDE, reason="runs in the process that test_all_of_them starts")


@installed
@pytest.mark.skipif(INSIDE, reason="of the process that starts the others")
@pytest.mark.slow
def test_all_of_them_under_the_interpreter() -> None:
    """Every test below, in a process with TRITON_INTERPRET=1."""
    run_under_the_interpreter(__file__)


@installed
@pytest.mark.skipif(INSIDE, reason="of the process that starts the others")
@pytest.mark.parametrize("gradients", [False, True])
def test_it_compiles_for_an_h100_with_wide_loads_and_all_in_registers(
    gradients: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter takes what the compiler refuses. Logits go 16 bytes at a time, nothing is spilled."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    kernel = head_triton._jitted()
    types = dict.fromkeys(kernel.arg_names, "*fp32")
    types |= {"logits": "*bf16", "targets": "*i64", "cap": "fp32", "columns": "i32"}
    constants = {"CAPPED": True, "BLOCK": head_triton.COLUMNS, **({} if gradients else {"scale": None})}
    found = compile_for_hopper(kernel, types, constants, {"num_warps": 8}, tmp_path)
    assert "ld.global.v4.b32" in found.accesses
    assert not any("b16" in access for access in found.accesses)
    assert found.stack == 0
    assert found.registers <= 64


N, C, VOCABULARY, ROWS = 10, 8, 90, 96  # padding behind the vocabulary


def drawn(dtype: torch.dtype, size: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, targets (some −1, where x is infinite), and a scale that is infinite there as well."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(N, C, generator=draw).to(dtype)
    w = size * torch.randn(ROWS, C, generator=draw)
    targets = torch.randint(VOCABULARY, (N,), generator=draw)
    targets[::4] = -1
    scale = torch.randn(N, generator=draw)
    return x.masked_fill(targets[:, None] < 0, torch.inf), w, targets, scale.masked_fill(targets < 0, torch.inf)


def written_out(x: Tensor, w: Tensor, targets: Tensor, scale: Tensor, cap: float) -> list[Tensor]:
    """nats and both gradients, in float64 of the rows that count, 0 for the others."""
    counted = targets >= 0
    leaves = [x.double()[counted].requires_grad_(), w.to(x.dtype).double().requires_grad_()]
    logits = leaves[0] @ leaves[1][:VOCABULARY].T
    logits = cap * torch.tanh(logits / cap) if cap else logits
    nats = torch.nn.functional.cross_entropy(logits, targets[counted], reduction="none")
    grad_x, grad_w = torch.autograd.grad(nats, leaves, scale[counted].double())
    all_nats, all_x = torch.zeros(len(x)).double(), torch.zeros(x.shape).double()
    all_nats[counted], all_x[counted] = nats.detach(), grad_x
    return [all_nats, all_x, grad_w]


@inside
@pytest.mark.parametrize(("cap", "size"), [(15.0, 1.0), (2.0, 30.0), (0.0, 1.0), (0.0, 200.0)])
def test_losses_and_gradients_are_those_of_the_softmax(
    cap: float, size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Capped and not, logits to ±600, three blocks of columns, masked rows that hold infinity, padded rows."""
    monkeypatch.setattr(head_triton, "COLUMNS", 32)
    monkeypatch.setattr(head_triton, "BLOCK_BYTES", 4 * 4 * VOCABULARY)  # blocks of 4 rows, the last of 3
    x, w, targets, scale = drawn(torch.float32, size)
    got = head_nats_and_gradients(x, w, targets, scale, cap, VOCABULARY)
    for a, want in zip(got, written_out(x, w, targets, scale, cap), strict=True):
        # float32: 2e-7 of the largest logit, and of the largest term of a sum
        torch.testing.assert_close(a.double(), want, atol=2e-6 * (1 + want.abs().max().item()), rtol=1e-5)
        assert not a[targets < 0 if len(a) == N else slice(VOCABULARY, None)].any()
    assert torch.equal(head_nats(x, w, targets, cap, VOCABULARY), got[0]), "without gradients the same bits"


@inside
def test_bfloat16_differs_by_the_rounding_of_its_logits() -> None:
    """Logits and slopes are rounded once each, 2⁻⁷ as the interpreter cuts off: 2 % of a gradient's norm is ample."""
    x, w, targets, scale = drawn(torch.bfloat16)
    got = head_nats_and_gradients(x, w, targets, scale, 15.0, VOCABULARY)
    assert [a.dtype for a in got] == [torch.float32, torch.bfloat16, torch.float32]
    for a, want in zip(got, written_out(x, w, targets, scale, 15.0), strict=True):
        assert (a.double() - want).norm() < 0.02 * want.norm()


@inside
@pytest.mark.parametrize("scale", [torch.full((N,), 0.3), torch.arange(N) / 4])
def test_the_head_takes_it_with_one_weight_and_with_several(scale: Tensor) -> None:
    """``token_nats`` on a device that the kernel serves: the forward's gradients times 0.3, or made anew."""
    x, w, targets, _ = drawn(torch.float32)
    x.requires_grad_()
    w.requires_grad_()
    nats = token_nats(x, w, targets, 15.0, VOCABULARY)
    got = (nats.detach(), *torch.autograd.grad(nats, (x, w), scale))
    for a, want in zip(got, written_out(x.detach(), w.detach(), targets, scale, 15.0), strict=True):
        torch.testing.assert_close(a.double(), want, atol=1e-5, rtol=1e-5)
    calls = [event.name for event in recorded(lambda: token_nats(x.detach(), w.detach(), targets, 15.0, VOCABULARY))]
    assert "xsalab::head_triton" in calls


def recorded(work: Callable[[], object]) -> list[Any]:
    """The operations that it called."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        work()
    return list(found.events() or ())


@inside
def test_no_target_at_all_gives_zeros_and_one_beyond_the_vocabulary_is_refused() -> None:
    """The first without a launch, which takes no empty grid."""
    x, w, targets, scale = drawn(torch.float32)
    for a in head_nats_and_gradients(x, w, torch.full_like(targets, -1), scale, 15.0, VOCABULARY):
        assert not a.any()
    targets[1] = VOCABULARY
    with pytest.raises(RuntimeError, match="target 90 is beyond the vocabulary of 90"):
        head_nats(x, w, targets, 15.0, VOCABULARY)


@inside
def test_the_operations_tell_their_shapes() -> None:
    """torch's own check of a custom operation: schema, fake tensors, no aliasing, no mutation."""
    x, w, targets, scale = drawn(torch.bfloat16)
    ops, checks = torch.ops.xsalab, ("test_schema", "test_faketensor")
    x, scale = x.nan_to_num(posinf=1.0), scale.nan_to_num(posinf=1.0)  # the check compares them
    torch.library.opcheck(ops.head_triton.default, (x, w, targets, 15.0, VOCABULARY), test_utils=checks)
    for given in (None, scale):
        args = (x, w, targets, given, 15.0, VOCABULARY)
        torch.library.opcheck(ops.head_triton_gradients.default, args, test_utils=checks)


@pytest.mark.skipif(not torch.cuda.is_available() or INSIDE, reason="no CUDA device here: run on a GPU")
@installed
def test_on_a_gpu() -> None:
    """The kernel as it is compiled, a vocabulary of several blocks of columns, against float64."""
    draw = torch.Generator().manual_seed(0)
    x, w = torch.randn(300, 64, generator=draw).bfloat16().cuda(), torch.randn(10_048, 64, generator=draw).cuda() / 8
    targets = torch.randint(10_000, (300,), generator=draw).cuda()
    targets[::7] = -1
    leaves = [x.double().requires_grad_(), w.bfloat16().double().requires_grad_()]
    logits = 15 * torch.tanh(leaves[0] @ leaves[1][:10_000].T / 15)
    want = torch.nn.functional.cross_entropy(logits, targets, ignore_index=-1, reduction="sum")
    expected = torch.autograd.grad(want, leaves)
    nats, *got = head_nats_and_gradients(x, w, targets, None, 15.0, 10_000)
    torch.testing.assert_close(nats.double().sum(), want, rtol=1e-3, atol=0)
    assert torch.equal(head_nats(x, w, targets, 15.0, 10_000), nats)
    for a, b in zip(got, expected, strict=True):
        assert (a.double() - b).norm() < 0.02 * b.norm()
