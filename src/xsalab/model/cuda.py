"""Attention on CUDA behind the signature of attend.Kernel, and which of it serves which shape.

    full window                          flash attention or cuDNN's, through torch's SDPA
    sliding window, FA3 active           FlashAttention-3's own windows
    sliding window, in a compiled graph  FlexAttention with block masks
    anything else                        None: attend.py's kernels, which serve every device

None of them makes a T × T mask. FlexAttention has no backward on CPUs, and outside torch.compile it would be compiled
anew for every length: so ``attention`` takes it in compiled graphs of CUDA tensors alone.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

if TYPE_CHECKING:
    from .attend import Places  # attend.py imports this file

BLOCK = 128  # queries and keys of a block, FlexAttention's own size
HALF = (torch.bfloat16, torch.float16)
FA3_MODULE = "flash_attn_interface"  # what the package of FlashAttention-3 installs
# No plain form among them: a shape that none serves is an error, and never a T × T matrix in silence.
FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]

# Of (t, s, window, device). What is here when a graph is compiled becomes its input; else the graph makes it each time.
_masks: dict[tuple[int, int, int, str], BlockMask] = {}
_fa3_active = False
_varlen_is_told_groups = False  # torch 2.11's varlen_attn takes grouped heads as they are, later ones want to be told


def attention(q: Tensor, k: Tensor, v: Tensor, window: int, places: Places | None = None) -> Tensor | None:
    """Causal attention within ``window`` by the fastest kernel for these tensors, or None where none is for them.

    q (b, t, h, d), k and v (b, s, g, d) -> (b, t, h, d). For whole sequences (t = s) in bfloat16 or float16 on CUDA;
    cached decoding, float32 and other devices are left to attend.py.
    """
    if not q.is_cuda or places is not None or q.shape[1] != k.shape[1] or q.dtype not in HALF:
        return None
    if window >= k.shape[1] - 1:
        return flash(q, k, v, window)
    if _fa3_active:
        return flash_windowed(q, k, v, window)
    return flex(q, k, v, window) if torch.compiler.is_compiling() else None


def flash(q: Tensor, k: Tensor, v: Tensor, window: int, places: Places | None = None) -> Tensor:
    """Full windows of whole sequences, by flash attention or cuDNN's, as torch prefers; FlashAttention-3 if active."""
    assert places is None, "rows at different positions take another kernel"
    assert q.shape[1] == k.shape[1] <= window + 1, "whole sequences, full windows"
    with sdpa_kernel(FUSED):
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            enable_gqa=k.shape[2] != q.shape[2],
        )
    return y.transpose(1, 2)


def flex(q: Tensor, k: Tensor, v: Tensor, window: int, places: Places | None = None) -> Tensor:
    """FlexAttention: blocks that no query sees are skipped, a block seen in part costs a comparison a score.

    The last query stands at the last key. Raises ValueError for gradients on a CPU.
    """
    assert places is None, "rows at different positions take another kernel"
    if not q.is_cuda and torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise ValueError("FlexAttention has no backward on CPUs: take the kernel 'sdpa' or 'blocked' there")
    function = flex_attention if torch.compiler.is_compiling() else _compiled_flex()
    y = function(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        block_mask=_mask(q.shape[1], k.shape[1], window, str(q.device)),
        enable_gqa=k.shape[2] != q.shape[2],
    )
    return y.transpose(1, 2)


def prepare(windows: set[int], context: int, device: torch.device | str) -> None:
    """Makes the block masks of a model's windows before it is compiled, so that its graph takes them as inputs."""
    for window in windows:
        if window < context - 1:
            _mask(context, context, window, str(torch.empty(0, device=device).device))


def block_mask(t: int, s: int, window: int, device: str) -> BlockMask:
    """Which blocks of keys a block of queries sees, in part and in full, by arithmetic on their edges.

    torch's create_block_mask gives the same (a test compares them), by way of a t × s mask.
    """
    offset = s - t

    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query + offset) & (key >= query + offset - window)

    first_query = torch.arange(-(-t // BLOCK), device=device)[:, None] * BLOCK  # of each block
    first_key = torch.arange(-(-s // BLOCK), device=device)[None, :] * BLOCK
    last_query, last_key = first_query + BLOCK - 1, first_key + BLOCK - 1
    low, high = first_query.clamp(max=t - 1) + offset, last_query.clamp(max=t - 1) + offset  # positions among the keys
    seen = (first_key <= high) & (last_key >= low - window)
    whole = (last_key <= low) & (first_key >= high - window) & (last_query < t) & (last_key < s)
    lists = []
    for blocks in (seen & ~whole, whole):
        count = blocks.sum(-1, dtype=torch.int32)
        # the blocks seen come first, in order
        order = blocks.to(torch.int32).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
        lists += [count[None, None], order[None, None]]
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(t, s))


def _mask(t: int, s: int, window: int, device: str) -> BlockMask:
    key = (t, s, window, device)
    if key in _masks:
        return _masks[key]
    made = block_mask(t, s, window, device)
    if not torch.compiler.is_compiling():
        _masks[key] = made
    return made


@cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


# --- FlashAttention-3


def activate_fa3() -> str:
    """Makes torch's flash attention FlashAttention-3 for this process; says in one line why not, else nothing.

    Wants a GPU of compute capability 9 (H100, H200), torch with ``activate_flash_attention_impl`` (2.11), and the
    package of FlashAttention-3. Rounds otherwise than FlashAttention-2: what a run used belongs in its fingerprint.
    """
    global _fa3_active, _varlen_is_told_groups
    if not _fa3_active:
        reason = _cannot_fa3()
        if reason:
            return reason
        from torch.nn.attention.varlen import varlen_attn

        torch.nn.attention.activate_flash_attention_impl("FA3")
        _varlen_is_told_groups = "enable_gqa" in inspect.signature(varlen_attn).parameters
        _fa3_active = True
    return ""


def fa3_active() -> bool:
    """Whether flash attention is FlashAttention-3 in this process."""
    return _fa3_active


def _cannot_fa3() -> str:
    if not torch.cuda.is_available():
        return "FlashAttention-3: there is no CUDA device"
    if torch.cuda.get_device_capability()[0] != 9:
        return f"FlashAttention-3 is for H100 and H200, this is {torch.cuda.get_device_name()}"
    if not hasattr(torch.nn.attention, "activate_flash_attention_impl"):
        return f"FlashAttention-3: torch {torch.__version__} cannot activate it, 2.11 can"
    if importlib.util.find_spec(FA3_MODULE) is None:
        return f"FlashAttention-3 is not installed (module {FA3_MODULE}): flash attention is torch's own"
    return ""


def flash_windowed(q: Tensor, k: Tensor, v: Tensor, window: int, places: Places | None = None) -> Tensor:
    """Flash attention that skips what lies outside the window: torch's varlen_attn over the rows of the batch."""
    from torch.nn.attention.varlen import varlen_attn

    assert places is None, "rows at different positions take another kernel"
    assert q.shape[1] == k.shape[1], "whole sequences"
    b, t = q.shape[:2]
    ends = torch.arange(0, b * t + 1, t, dtype=torch.int32, device=q.device)
    grouped: dict[str, Any] = {"enable_gqa": True} if _varlen_is_told_groups and q.shape[2] != k.shape[2] else {}
    y = varlen_attn(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), ends, ends, t, t, window_size=(window, 0), **grouped
    )  # fmt: skip
    assert isinstance(y, Tensor)
    return y.unflatten(0, (b, t))
