"""Attention for GPUs, as far as a CPU can tell: the masks, the windows, and that a CPU never trains by it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from xsalab.model import cuda
from xsalab.model.attend import explicit, positions, visible


def heads(t: int, h: int, g: int, d: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(2, t, n, d, generator=torch.Generator().manual_seed(t + i)) for i, n in enumerate((h, g, g)))
    return q, k, v


# t, s, window: whole and broken blocks, edges of windows on edges of blocks, full, and queries behind cached keys
SHAPES = [
    (300, 300, 70),
    (512, 512, 128),
    (384, 384, 127),
    (129, 129, 1),
    (256, 256, 1000),
    (300, 300, 290),
    (130, 500, 200),
    (1, 99, 9),
]


@pytest.mark.parametrize(("t", "s", "window"), SHAPES)
def test_blocks_are_those_of_a_mask_written_out(t: int, s: int, window: int) -> None:
    """Arithmetic on the edges of blocks finds what torch finds by looking at every score, backward's lists included."""
    found = cuda.block_mask(t, s, window, "cpu")
    query, key = positions(torch.empty(1, t), torch.empty(1, s))
    assert torch.equal(_written_out(found, t, s), visible(query, key, window))
    want = create_block_mask(found.mask_mod, None, None, t, s, device="cpu")
    assert found.shape == want.shape
    for kind in ("kv", "full_kv", "q", "full_q"):
        for part in ("num_blocks", "indices"):
            assert torch.equal(getattr(found, f"{kind}_{part}"), getattr(want, f"{kind}_{part}")), f"{kind}_{part}"


def _written_out(mask: BlockMask, t: int, s: int) -> Tensor:
    """Every pair of query and key that the mask lets meet."""
    met = torch.zeros(t, s, dtype=torch.bool)
    for kind in ("kv", "full_kv"):
        count, order = getattr(mask, f"{kind}_num_blocks")[0, 0], getattr(mask, f"{kind}_indices")[0, 0]
        for i, n in enumerate(count.tolist()):
            for j in order[i, :n].tolist():
                query = torch.arange(i * cuda.BLOCK, min((i + 1) * cuda.BLOCK, t))[:, None]
                key = torch.arange(j * cuda.BLOCK, min((j + 1) * cuda.BLOCK, s))[None, :]
                alone = torch.zeros((), dtype=torch.int64)
                seen = mask.mask_mod(alone, alone, query, key)  # pyright: ignore
                met[query, key] |= seen | (kind == "full_kv")  # pyright: ignore
    return met


@pytest.mark.slow
def test_windows_by_blocks_are_the_softmax_written_out() -> None:
    """Grouped heads, two windows, in one graph without breaks; with masks made beforehand, and by the graph itself."""
    q, k, v = heads(300, 4, 2)
    want = explicit(q, k, v, 70) + explicit(q, k, v, 140)

    def two_layers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return cuda.flex(q, k, v, 70) + cuda.flex(q, k, v, 140)

    for prepared in (False, True):
        cuda._masks.clear()
        torch._dynamo.reset()
        if prepared:
            cuda.prepare({70, 140, 300}, 300, "cpu")
            assert set(cuda._masks) == {(300, 300, 70, "cpu"), (300, 300, 140, "cpu")}, "a full window needs none"
        with torch.no_grad():
            got = torch.compile(two_layers, fullgraph=True, backend="eager", dynamic=False)(q, k, v)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=0)  # float32, sums in another order: 1e-6 measured
        assert len(cuda._masks) == (2 if prepared else 0), "a graph stores none: that would have it compiled again"
    cuda._masks.clear()


@pytest.mark.parametrize(("h", "g"), [(4, 4), (4, 2)])
def test_full_windows_are_the_softmax_written_out(h: int, g: int) -> None:
    """Forward and gradients, through the kernel that SDPA has for the CPU."""
    mine, theirs = heads(65, h, g), heads(65, h, g)
    for x in (*mine, *theirs):
        x.requires_grad_()
    got, want = cuda.flash(*mine, 64), explicit(*theirs, 64)
    (got * got).sum().backward()
    (want * want).sum().backward()
    pairs = [(got, want), *((a.grad, b.grad) for a, b in zip(mine, theirs, strict=True))]
    for a, b in pairs:
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("window", [8, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_of_the_cpu_are_left_to_the_other_kernels(window: int, dtype: torch.dtype) -> None:
    """FlexAttention has no backward on CPUs, so training there must never come to it, compiled or not."""
    q, k, v = (x.to(dtype).requires_grad_() for x in heads(65, 4, 2))
    assert cuda.attention(q, k, v, window) is None
    chosen = torch.compile(cuda.attention, backend="eager", fullgraph=True)(q, k, v, window)
    assert chosen is None


def test_gradients_through_blocks_on_a_cpu_are_refused_in_words() -> None:
    """Asked for by name it says what to take instead; without gradients it works."""
    q, k, v = heads(65, 4, 2)
    q.requires_grad_()
    with pytest.raises(ValueError, match="no backward on CPUs: take the kernel 'sdpa' or 'blocked'"):
        cuda.flex(q, k, v, 8)


def test_flash_attention_3_says_why_it_is_not_there() -> None:
    """One line, no exception and no change, where there is no Hopper GPU."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9:
        pytest.skip("this machine may have it")
    assert cuda.activate_fa3().startswith("FlashAttention-3")
    assert not cuda._fa3_active


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here: kernels of a GPU cannot run")
@pytest.mark.parametrize("window", [100, 511])
@pytest.mark.parametrize(("h", "g"), [(4, 4), (4, 2)])
def test_on_a_gpu_the_chosen_kernel_is_the_softmax_written_out(window: int, h: int, g: int) -> None:
    """Forward and gradients in bfloat16 inside one compiled graph: full and sliding windows, grouped heads."""
    q, k, v = (x.to("cuda", torch.bfloat16).requires_grad_() for x in heads(512, h, g, 64))
    wide = [x.detach().float().requires_grad_() for x in (q, k, v)]
    got = torch.compile(cuda.attention, fullgraph=True, dynamic=False)(q, k, v, window)
    want = explicit(wide[0], wide[1], wide[2], window)
    assert got is not None
    got.float().square().sum().backward()
    want.square().sum().backward()
    for a, b in [(got, want), *((a.grad, b.grad) for a, b in zip((q, k, v), wide, strict=True))]:
        assert a is not None
        assert b is not None
        # bfloat16 keeps 8 bits: of inputs, weights and result
        assert (a.float() - b).norm() < 0.02 * b.norm()
