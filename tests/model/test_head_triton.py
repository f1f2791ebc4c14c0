"""The head's Triton kernels, run by Triton's interpreter on the CPU, against softmax written out in float64.

In a process of their own, as those of test_exclude_triton.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from triton_compiled import compile_for_hopper
from xsalab.model import exclude_triton, head_triton
from xsalab.model.head_triton import head_backward, head_forward, mean_nats

INSIDE = exclude_triton.INTERPRETED
installed = pytest.mark.skipif(not exclude_triton.INSTALLED, reason="Triton is not installed: pip install triton")
inside = pytest.mark.skipif(not INSIDE, reason="runs in the process that test_all_of_them starts")


@installed
@pytest.mark.skipif(INSIDE, reason="of the process that starts the others")
@pytest.mark.slow
def test_all_of_them_under_the_interpreter() -> None:
    """Every test below, in a process with TRITON_INTERPRET=1."""
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-rs", __file__]
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[2]
    ran = subprocess.run(words, cwd=root, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    assert "runs in the process" not in ran.stdout, "none is skipped there"


@installed
@pytest.mark.skipif(INSIDE, reason="of the process that starts the others")
@pytest.mark.parametrize("name", ["statistics", "slopes"])
def test_it_compiles_for_an_h100_with_wide_loads_and_all_in_registers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter takes what the compiler refuses. Logits go 16 bytes at a time, nothing is spilled."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    kernel = head_triton._kernel(name)
    types = dict.fromkeys(kernel.arg_names, "*fp32")
    types |= {"logits": "*bf16", "targets": "*i64", "cap": "fp32", "columns": "i32"}
    constants = {"CAPPED": True, "BLOCK": head_triton.COLUMNS}
    found = compile_for_hopper(kernel, types, constants, {"num_warps": 8}, tmp_path)
    assert "ld.global.v4.b32" in found.accesses
    assert not any("b16" in access for access in found.accesses)
    assert found.stack == 0
    assert found.registers <= 64


N, C, VOCABULARY, ROWS = 10, 8, 90, 96  # padding behind the vocabulary


def drawn(dtype: torch.dtype, size: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, targets (some −1), and a gradient that is infinite where the target is −1."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(N, C, generator=draw).to(dtype)
    w = size * torch.randn(ROWS, C, generator=draw)
    targets = torch.randint(VOCABULARY, (N,), generator=draw)
    targets[::4] = -1
    grad = torch.randn(N, generator=draw).masked_fill(targets < 0, float("inf"))
    return x, w, targets, grad


def written_out(x: Tensor, w: Tensor, targets: Tensor, grad: Tensor, cap: float) -> list[Tensor]:
    """nats, log Σ exp and both gradients, in float64 of the logits that the product gives."""
    leaves = [x.double().requires_grad_(), w.to(x.dtype).double().requires_grad_()]
    logits = leaves[0] @ leaves[1][:VOCABULARY].T
    logits = cap * torch.tanh(logits / cap) if cap else logits
    log_total = logits.logsumexp(-1)
    counted = targets >= 0
    nats = torch.where(counted, log_total - logits.gather(1, targets.clamp_min(0)[:, None])[:, 0], 0.0)
    gradients = torch.autograd.grad(nats, leaves, torch.where(counted, grad, 0.0).double())
    return [nats.detach(), log_total.detach(), *gradients]


@inside
@pytest.mark.parametrize("columns", [4096, 32])  # one block of columns, and several
@pytest.mark.parametrize(("cap", "size"), [(15.0, 1.0), (2.0, 30.0), (0.0, 1.0), (0.0, 200.0)])
def test_losses_and_gradients_are_those_of_the_softmax(
    cap: float, size: float, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Capped and not, logits to ±600, masked targets with an infinite gradient, padded rows without any."""
    monkeypatch.setattr(head_triton, "COLUMNS", columns)
    monkeypatch.setattr(head_triton, "BLOCK_BYTES", 4 * 4 * VOCABULARY)  # blocks of 4 rows, the last of 2
    x, w, targets, grad = drawn(torch.float32, size)
    nats, log_total = head_forward(x, w, targets, cap, VOCABULARY)
    grad_x, grad_w = head_backward(grad, x, w, targets, log_total, cap, VOCABULARY)
    assert grad_w[VOCABULARY:].abs().max() == 0
    for got, want in zip((nats, log_total, grad_x, grad_w), written_out(x, w, targets, grad, cap), strict=True):
        # float32: 2e-7 of the largest logit, and of the largest term of a sum
        torch.testing.assert_close(got.double(), want, atol=2e-6 * (1 + want.abs().max().item()), rtol=1e-5)


@inside
def test_bfloat16_differs_by_the_rounding_of_its_logits() -> None:
    """Logits and slopes are rounded once each, 2⁻⁷ as the interpreter cuts off: 2 % of a gradient's norm is ample."""
    x, w, targets, grad = drawn(torch.bfloat16)
    nats, log_total = head_forward(x, w, targets, 15.0, VOCABULARY)
    got = (nats, log_total, *head_backward(grad, x, w, targets, log_total, 15.0, VOCABULARY))
    assert [a.dtype for a in got] == [torch.float32, torch.float32, torch.bfloat16, torch.float32]
    for a, want in zip(got, written_out(x, w, targets, grad, 15.0), strict=True):
        assert (a.double() - want).norm() < 0.02 * want.norm()


@inside
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mean_is_the_sum_of_the_losses_with_its_gradients(dtype: torch.dtype) -> None:
    """Made in one pass or in two: the same loss and, where the loss is the mean itself, the same bits of gradients."""
    x, w, targets, _ = drawn(dtype)
    x.requires_grad_()
    w.requires_grad_()
    scale = 1 / int((targets >= 0).sum())
    mean = mean_nats(x, w, targets, 15.0, VOCABULARY, scale)
    got = torch.autograd.grad(mean, (x, w))
    nats, log_total = head_forward(x.detach(), w.detach(), targets, 15.0, VOCABULARY)
    same = torch.full_like(nats, scale)
    want = head_backward(same, x.detach(), w.detach(), targets, log_total, 15.0, VOCABULARY)
    assert mean == scale * nats.sum()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    with torch.no_grad():
        assert mean_nats(x, w, targets, 15.0, VOCABULARY, scale) == mean


@inside
def test_the_operations_tell_their_shapes() -> None:
    """torch's own check of a custom operation: schema, fake tensors, no aliasing, no mutation."""
    x, w, targets, grad = drawn(torch.bfloat16)
    log_total, ops = torch.ones(N), torch.ops.xsalab
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.head_triton.default, (x, w, targets, 15.0, VOCABULARY), test_utils=checks)
    torch.library.opcheck(ops.head_triton_both.default, (x, w, targets, 15.0, VOCABULARY, 0.5), test_utils=checks)
    args = (grad.nan_to_num(), x, w, targets, log_total, 15.0, VOCABULARY)
    torch.library.opcheck(ops.head_triton_backward.default, args, test_utils=checks)


@pytest.mark.skipif(not torch.cuda.is_available() or INSIDE, reason="no CUDA device here: run on a GPU")
@installed
def test_on_a_gpu() -> None:
    """The kernels as they are compiled, a vocabulary of several blocks of columns, against float64."""
    draw = torch.Generator().manual_seed(0)
    x, w = torch.randn(300, 64, generator=draw).bfloat16().cuda(), torch.randn(10_048, 64, generator=draw).cuda() / 8
    targets = torch.randint(10_000, (300,), generator=draw).cuda()
    targets[::7] = -1
    leaves = [x.double().requires_grad_(), w.bfloat16().double().requires_grad_()]
    logits = 15 * torch.tanh(leaves[0] @ leaves[1][:10_000].T / 15)
    want = torch.nn.functional.cross_entropy(logits, targets, ignore_index=-1, reduction="sum")
    expected = torch.autograd.grad(want, leaves)
    x.requires_grad_()
    w.requires_grad_()
    got = mean_nats(x, w, targets, 15.0, 10_000, 1.0)
    torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=0)
    for a, b in zip(torch.autograd.grad(got, (x, w)), expected, strict=True):
        assert (a.double() - b).norm() < 0.02 * b.norm()
