"""Each kernel, forward and backward, against what PyTorch gives for the same work.

    python bench/kernels.py [--rounds N] [--quick] [--only exclude attention head optimizer]

exclude_self against copy_ of the same bytes; attention against SDPA in bfloat16 at context 512; head and loss against
torch.compile of the plain form, with kernels and in PyTorch; Muon's step against torch.optim.Muon, 12 layers of width
384. Memory is counted in processes of their own: of attention at context 4,096, and of head and loss.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from measure import Ratio, Result, arguments, busy, emit, interleave, judge, not_run, parsed, ratio
from states import CONTEXT, HEAD, ROWS, VOCABULARY, peak_memory, random_tokens, resident_memory
from torch import Tensor, nn

from xsalab.model import LayerAttend, exclude_self, native
from xsalab.model.head import token_nats
from xsalab.optim import Hybrid, OptimConfig
from xsalab.optim.hybrid import GROUPS, Rates
from xsalab.train import TrainConfig
from xsalab.train.loop import DTYPES, fast_bfloat16

CAP = 15.0
DTYPE = "bfloat16" if fast_bfloat16("cpu") else "float32"
MILLION = 1e6
Call = Callable[[], object]
Rows = list[Result]


def drawn(*shape: int, grad: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    """Normal numbers, of the dtype that a run has here."""
    return torch.randn(*shape).to(dtype or DTYPES[DTYPE]).requires_grad_(grad)


def in_pytorch(call: Call) -> Call:
    """The same without our kernels."""

    def run() -> None:
        with native.plain():
            call()

    return run


def against(name: str, times: dict[str, list[float]], ours: str, peer: str, *, note: str = "") -> Result:
    """How many times as fast as the peer; milliseconds."""
    own, other = (1e3 * statistics.median(times[side]) for side in (ours, peer))
    return judge(name, ratio(times[peer], times[ours]), unit="ms", ours=own, peer=other, note=note)


# exclude_self


def exclude(rounds: int, quick: bool) -> Rows:
    """Forward reads y, v and writes z, backward reads ∂z, y, v and writes ∂y, ∂v: eight tensors pass, as in four
    copies of one. y has 6.3 MB in bfloat16, and no copy finds its source in the cache.
    """
    b, t, h = (1, 32, 2) if quick else (ROWS, CONTEXT, 6)
    y, v = (drawn(b, t, h, HEAD, grad=True) for _ in range(2))
    grad = drawn(b, t, h, HEAD)
    source, sink = drawn(4, b, t, h, HEAD), torch.empty(4, b, t, h, HEAD, dtype=y.dtype)

    def ours() -> object:
        return torch.autograd.grad(exclude_self(y, v), (y, v), grad)

    times = interleave({"ours": ours, "copy": lambda: sink.copy_(source)}, rounds, warmup=5, label="exclude_self")
    own, other = (1e3 * statistics.median(times[side]) for side in ("ours", "copy"))
    name = "exclude_self, against copy_ of the same bytes"
    return [judge(name, ratio(times["ours"], times["copy"]), unit="ms", ours=own, peer=other)]


# Attention


def attention_call(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, kernel: str) -> Call:
    """Causal attention over the whole context, forward and backward."""
    attend = LayerAttend(q.shape[1], kernel)
    return lambda: torch.autograd.grad(attend(q, k, v), (q, k, v), grad)


def attention(rounds: int, quick: bool) -> Rows:
    """With the kernel that a run uses, against SDPA. The peer is handed the same tensors."""
    b, t, h = (1, 32, 2) if quick else (ROWS, CONTEXT, 4)
    q, k, v = (drawn(b, t, h, HEAD, grad=True) for _ in range(3))
    grad = drawn(b, t, h, HEAD)
    sides = {"ours": attention_call(q, k, v, grad, TrainConfig().attention)}
    sides["sdpa"] = in_pytorch(attention_call(q, k, v, grad, "sdpa"))
    times = interleave(sides, rounds, warmup=3, label="attention")
    rows = [against("attention at context 512, against SDPA in bfloat16", times, "ours", "sdpa")]
    t = 256 if quick else 4096
    name = "attention at context 4096, extra memory over one T × T"
    extra, one = memory("attention", t), t * t * 2
    if extra is None:
        return [*rows, not_run(name, "this system does not tell a process's memory")]
    found = Ratio.exactly(extra / one)
    return [*rows, judge(name, found, unit="MB", ours=extra / MILLION, peer=one / MILLION)]


def attention_memory(t: int) -> int | None:
    """Bytes at the peak of a pass over one row of ``t`` tokens and 4 heads, beyond q, k, v, their gradients and the
    output with its own.
    """
    q, k, v = (drawn(1, t, 4, HEAD, grad=True) for _ in range(3))
    grad = drawn(1, t, 4, HEAD)
    few = tuple(x[:, :64].detach().contiguous().requires_grad_() for x in (q, k, v))
    attention_call(few[0], few[1], few[2], grad[:, :64].contiguous(), TrainConfig().attention)()  # code, threads: there
    return beyond(attention_call(q, k, v, grad, TrainConfig().attention), 4 * q.nbytes)


# Head and loss


def head_call(x: Tensor, weight: Tensor, targets: Tensor) -> Call:
    """Ours: mean nats and both gradients."""

    def run() -> object:
        return torch.autograd.grad(token_nats(x, weight, targets, CAP, len(weight)).mean(), (x, weight))

    return run


def plain_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The form that everybody writes: all logits at once."""
    logits = F.linear(x, weight.to(x.dtype)).float()
    return F.cross_entropy((CAP * torch.tanh(logits / CAP)).flatten(0, 1), targets.flatten())


def head(rounds: int, quick: bool) -> Rows:
    """Ours, ours without kernels, and torch.compile of the plain form."""
    rows: Rows = []
    b, t, vocabulary = (1, 32, 64) if quick else (ROWS, CONTEXT, VOCABULARY)
    for width in (256, 384):
        # a function of its own a width: compiled once more for other shapes it would be compiled for any
        compiled = torch.compile(lambda x, w, y: plain_loss(x, w, y), dynamic=False, fullgraph=True)
        x, weight = drawn(b, t, width, grad=True), drawn(vocabulary, width, grad=True, dtype=torch.float32)
        with torch.no_grad():
            weight.mul_(0.05)
        targets = random_tokens(b, t, vocabulary, 0)[1]
        ours = head_call(x, weight, targets)
        sides: dict[str, Call] = {
            "ours": ours,
            "plain": in_pytorch(ours),
            "compiled": lambda c=compiled, x=x, w=weight, y=targets: torch.autograd.grad(c(x, w, y), (x, w)),
        }
        times = interleave(sides, rounds, warmup=2, label=f"head and loss {width}")
        rows.append(against(f"head and loss {width}, against torch.compile", times, "ours", "compiled"))
        rows.append(against(f"head and loss {width} in PyTorch, against torch.compile", times, "plain", "compiled"))
    extra, name = memory("head", b, t, vocabulary), "head and loss, extra memory in MB"
    if extra is None:
        return [*rows, not_run(name, "this system does not tell a process's memory")]
    extra /= MILLION
    logits = b * t * vocabulary * 4 / MILLION
    note = f"the logits in float32 would be {logits:.0f} MB"
    return [*rows, judge(name, Ratio.exactly(extra), unit="MB", ours=extra, peer=logits, note=note)]


def head_memory(b: int, t: int, vocabulary: int, width: int = 384) -> int | None:
    """Bytes at the peak of forward and backward, beyond x, W and their gradients."""
    x, weight = drawn(b, t, width, grad=True), drawn(vocabulary, width, grad=True, dtype=torch.float32)
    targets = random_tokens(b, t, vocabulary, 0)[1]
    head_call(x[:1, :32].detach().requires_grad_(), weight[:64].detach().requires_grad_(), targets[:1, :32] % 64)()
    return beyond(head_call(x, weight, targets), x.nbytes + weight.nbytes)


# Optimizer


class Matrices(nn.Module):
    """The matrices of ``depth`` layers: four of the attention, two of the MLP, under the names that a model has."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        shapes = [(width, width)] * 4 + [(4 * width, width), (width, 4 * width)]
        self.blocks = nn.ParameterList(0.02 * torch.randn(shape) for _ in range(depth) for shape in shapes)


def optimizer(rounds: int, quick: bool) -> Rows:
    """Muon itself (``kind`` "muon"), which does what torch.optim.Muon does, and the update of the main job beside it.

    The first update of both is compared: a fast one that is another would be worth nothing.
    """
    depth, width, rate = (1, 32, 0.02) if quick else (12, 384, 0.02)
    names = ("optimizer step", "optimizer step in PyTorch", "optimizer step of the main job")
    names = tuple(f"{name}, against torch.optim.Muon" for name in names)
    distance = "optimizer update, distance from torch.optim.Muon's"
    if not hasattr(torch.optim, "Muon"):
        why = f"torch {torch.__version__} has no torch.optim.Muon"
        return [not_run(name, why) for name in (*names, distance)]
    torch.manual_seed(0)
    start = Matrices(depth, width)
    gradients = [torch.randn_like(p) for p in start.parameters()]

    def copy() -> Matrices:
        model = Matrices(depth, width)
        model.load_state_dict(start.state_dict())
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        return model

    def ours(kind: str) -> tuple[Matrices, Hybrid]:
        model, config = copy(), OptimConfig(kind=kind)
        rates = Rates(dict.fromkeys(GROUPS, rate), config.plain_muon_weight_decay)
        return model, Hybrid(model, config, rates, DTYPES[DTYPE])

    theirs = copy()
    peer = torch.optim.Muon(list(theirs.parameters()), lr=rate)
    (fast_model, fast), (_, plain), (_, hybrid) = ours("muon"), ours("muon"), ours("hybrid")
    fast.step()
    peer.step()
    moved = [
        torch.cat([(new - old).detach().flatten() for new, old in zip(m.parameters(), start.parameters(), strict=True)])
        for m in (fast_model, theirs)
    ]
    apart = float((moved[0] - moved[1]).norm() / moved[1].norm())
    sides: dict[str, Call] = {
        "ours": fast.step, "plain": in_pytorch(plain.step), "hybrid": hybrid.step, "torch": peer.step,
    }  # fmt: skip
    times = interleave(sides, rounds, warmup=2, label="optimizer step")
    rows = [against(name, times, side, "torch") for name, side in zip(names, ("ours", "plain", "hybrid"), strict=True)]
    return [*rows, judge(distance, Ratio.exactly(apart), unit="of its norm", ours=apart)]


# Memory, in a process of its own


def beyond(call: Call, kept: int) -> int | None:
    """Bytes by which the call raised this process's peak, less ``kept``; None where the system does not tell."""
    before = resident_memory()
    call()
    after = peak_memory()
    return None if before is None or after is None else max(0, after - before - kept)


COUNTED: dict[str, Callable[..., int | None]] = {"attention": attention_memory, "head": head_memory}


def memory(what: str, *sizes: int) -> int | None:
    """What a new process counts. Raises CalledProcessError where it fails; its stderr is ours."""
    words = [sys.executable, __file__, "--count", what, *map(str, sizes), "--threads", str(torch.get_num_threads())]
    return json.loads(subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout)


# (function, rounds beside the default's) by name
PARTS: dict[str, tuple[Callable[[int, bool], Rows], float]] = {
    "exclude": (exclude, 5), "attention": (attention, 1), "head": (head, 0.5), "optimizer": (optimizer, 0.5),
}  # fmt: skip


def main() -> None:
    """Measures and prints."""
    parser = arguments(__doc__ or "", rounds=20)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="which of them")
    parser.add_argument("--count", nargs="+", help=argparse.SUPPRESS)  # of a process that counts memory
    given = parsed(parser)
    native.load()
    if given.count:
        what, *sizes = given.count
        print(json.dumps(COUNTED[what](*map(int, sizes))))
        return
    others, results = busy(), []
    for name in given.only:
        part, times = PARTS[name]
        results += part(max(1, round(given.rounds * times)), given.quick)
    emit(results, others, quick=given.quick)


if __name__ == "__main__":
    main()
