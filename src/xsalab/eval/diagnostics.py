"""WHY A VARIANT ACTS AS IT DOES: what attention does in every layer and head, measured on fixed rows.

A watcher stands around ``attend`` and behind the variant, so every variant is measured without a line in it, and
the path that trains is not touched. With y the attention output, z what the variant makes of it and v the token's
own value:

    cos(y, v), cos(z, v)     before and after the variant, mean over positions
    energy                   Σ ⟨y,v⟩²/⟨v,v⟩ / Σ ⟨y,y⟩: the share of the output that lies along the own value
    removed                  Σ ‖y − z‖ / Σ ‖y‖
    self_weight              a_ii; ``uniform`` is what it would be if all that is seen had the same weight
    first_weight             a_i0
    entropy, reach           H(a_i) in nats, and exp H: how many tokens attention effectively reads; ``distance``
                             is the mean of i − j under a_ij
    effective rank           exp of the entropy of the normalised singular values of the (positions, d) matrix of
                             outputs (Roy & Vetterli 2007)
    alpha_gradient           ∂L/∂α = −Σ c ⟨∂L/∂z, v⟩ with c = ⟨y,v⟩/⟨v,v⟩, L in nats a token: what removing more of
                             the own value would do. At α = 0, so for standard attention too, the first-order gain

Weights come from q·k and the log-sum-exp of a block of queries at a time, never from a T × T matrix.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..data import Corpus, nanochat_rows
from ..model import GPT
from ..model.attend import Attend, LayerAttend, ScoreMod, positions, visible
from ..model.variant import QKV
from .bits_per_byte import MASKED
from .validation import EvalConfig, evaluation_documents

BLOCK = 2**21  # scores that exist at once: 8 MB in float32, four times that with what is made of them
Row = dict[str, Any]


@dataclass(frozen=True)
class Mechanism:
    """``loss``: mean nats a token of the rows. ``rows``: one a layer, head and range of positions ``start`` to ``end``
    (exclusive), the whole context first; columns as in the module's text, None where there is no number or none that is
    finite. ``tokens``: positions that were read.
    """

    loss: float
    tokens: int
    rows: list[Row]


def validation_rows(corpus: Corpus, config: EvalConfig, context: int, count: int) -> tuple[Tensor, Tensor]:
    """(inputs, targets), each (count, context) int64: rows of the evaluated documents, packed as in training.

    Special targets are −1. ValueError where the text fills fewer rows.
    """
    documents = evaluation_documents(corpus, config.max_bytes)
    rows = nanochat_rows([document.tokens for document in documents], corpus.tokenizer.bos, context + 1)
    if not 1 <= count <= len(rows):
        legal = f"ask for 1 to {len(rows)}, or " if len(rows) else ""
        raise ValueError(
            f"rows = {count}: the {len(documents)} validation documents that are scored fill {len(rows)} rows of the "
            f"model's context, {context} tokens; {legal}raise eval.max_bytes, or give more validation text"
        )
    sizes = np.asarray(corpus.tokenizer.bytes_per_token())
    targets = np.where(sizes[rows[:count, 1:]] > 0, rows[:count, 1:], MASKED)
    return torch.from_numpy(rows[:count, :-1].copy()), torch.from_numpy(targets)


def diagnose(model: GPT, inputs: Int[Tensor, "n t"], targets: Int[Tensor, "n t"], batch_rows: int = 1) -> Mechanism:
    """One forward and one backward pass over the rows, ``batch_rows`` at a time; the model is left as it was.

    ValueError for rows of another length than the model's context, and for a variant whose attention cannot be
    measured.
    """
    if inputs.shape != targets.shape or inputs.ndim != 2 or inputs.shape[1] != model.config.context:
        raise ValueError(
            f"rows of {inputs.shape[-1]} tokens: the model's context is {model.config.context}; diagnostics by "
            "position need rows of the whole context"
        )
    device, counted = model.head.weight.device, int((targets >= 0).sum())
    if not counted:
        raise ValueError(f"{len(inputs)} rows hold no target that counts: every one is a special token")
    layers = [_Layer(model.choice.name) for _ in model.blocks]
    loss = 0.0
    for first in range(0, len(inputs), batch_rows):
        some = slice(first, first + batch_rows)
        with _watching(model, layers), torch.enable_grad():
            nats = model.token_nats(inputs[some].to(device), targets[some].to(device)).sum() / counted
        loss += float(nats.detach())
        # Gradients of the variants' outputs alone: no parameter's is made or changed.
        gradients = torch.autograd.grad(nats, [layer.seen().z for layer in layers], allow_unused=True)
        for layer, gradient in zip(layers, gradients, strict=True):
            if gradient is None:
                raise ValueError(
                    f"variant {layer.variant!r}: project does not pass on what the variant's forward gives"
                )
            layer.end(gradient)
    rows = [row for number, layer in enumerate(layers) for row in layer.rows(number)]
    return Mechanism(loss, inputs.numel(), rows)


class Weights(NamedTuple):
    """Of every query and head, (b, t, h) in float32 (float64 stays float64)."""

    own: Tensor  # a_ii
    first: Tensor  # a_i0; 0 where the window does not reach back so far
    uniform: Tensor  # 1 / number of keys that the query sees
    entropy: Tensor  # of the weights, the sink's among them, nats
    distance: Tensor  # Σ a_ij (i − j)
    logit: Tensor  # the largest score; −inf where a query sees no key


@torch.no_grad()
def attention_weights(
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b t g d"],
    window: int,
    *,
    score_mod: ScoreMod | None = None,
    sink: Float[Tensor, " h"] | None = None,
) -> Weights:
    """What ``attend.explicit`` weighs the values with, a block of queries at a time."""
    (b, t, heads, size), groups = q.shape, k.shape[2]
    if k.shape[1] != t:
        raise ValueError(f"{t} queries and {k.shape[1]} keys: weights are of a whole sequence, a key for each query")
    dtype = torch.promote_types(q.dtype, torch.float32)
    query, key = positions(q, k)
    # n queries meet at most min(t, n + window) keys: the largest n for which n times that is within the share of a head
    share = BLOCK // (b * heads)
    block = max(1, share // t, (math.isqrt(window**2 + 4 * share) - window) // 2)
    found = []
    for start in range(0, t, block):
        end = min(start + block, t)
        near = max(0, start - window)
        queries = q[:, start:end].to(dtype).unflatten(2, (groups, -1))
        keys = k[:, near:end].to(dtype)
        scores = torch.einsum("btgrd,bsgd->bgrts", queries, keys).flatten(1, 2) / math.sqrt(size)
        at, of = query[start:end], key[:, near:end]
        if score_mod is not None:
            scores = score_mod(scores, at, of)
        seen = visible(at, of, window) & (scores > -math.inf)
        scores = scores.masked_fill(~seen, -math.inf)
        top = scores.amax(-1, keepdim=True)
        level = top.clamp_min(torch.finfo(dtype).min) if sink is None else torch.maximum(top, _column(sink, dtype))
        weights = (scores - level).exp()
        total = weights.sum(-1, keepdim=True)
        asleep = torch.zeros_like(total) if sink is None else (_column(sink, dtype) - level).exp()
        total = (total + asleep).clamp_min(torch.finfo(dtype).tiny)
        weights, asleep = weights / total, asleep / total
        mean = (weights * scores.masked_fill(~seen, 0)).sum(-1)
        if sink is not None:
            mean = mean + asleep[..., 0] * sink[:, None]
        entropy = ((level + total.log())[..., 0] - mean).masked_fill(~seen.any(-1), 0)
        own = weights.gather(-1, (at - near).expand(b, heads, end - start, 1))[..., 0]
        start_weight = weights[..., 0] if near == 0 else torch.zeros_like(own)
        distance = (weights * (at - of)).sum(-1)
        uniform = 1 / seen.sum(-1).clamp_min(1).to(dtype)
        found.append((own, start_weight, uniform.expand_as(own), entropy, distance, top[..., 0]))
    return Weights(*(torch.cat(parts, dim=-1).transpose(1, 2) for parts in zip(*found, strict=True)))


def _column(sink: Tensor, dtype: torch.dtype) -> Tensor:
    return sink.to(dtype).view(1, -1, 1, 1)


def position_ranges(length: int) -> list[tuple[int, int]]:
    """[0, length) first, then [0, 1), [1, 2), [2, 4), [4, 8), …: attention changes with the logarithm of position."""
    edges = [0, *(2**i for i in range(length.bit_length()) if 2**i < length), length]
    return [(0, length), *(pair for pair in itertools.pairwise(edges) if length > 1)]


# --- what stands around attention while rows are read


class _Seen(NamedTuple):
    y: Tensor
    z: Tensor
    v: Tensor  # the own value


@dataclass
class _Layer:
    """Collects one layer: sums over rows by head and position, in float64."""

    variant: str
    sums: dict[str, Tensor] = field(default_factory=dict)  # name -> (h, t)
    logit: Tensor = field(default_factory=lambda: torch.tensor(-math.inf))  # (h, t)
    grams: list[Tensor] = field(default_factory=list)  # of y and z, (h, d, d)
    slope: Tensor = field(default_factory=lambda: torch.zeros(1))  # (h,) ∂L/∂α
    alpha: Tensor = field(default_factory=lambda: torch.zeros(1))
    count: int = 0  # rows
    now: _Seen | None = None
    calls: list[tuple[Tensor, Weights]] = field(default_factory=list)  # of ``attend`` in this pass: y and its weights

    def seen(self) -> _Seen:
        if self.now is None:
            raise ValueError(f"variant {self.variant!r} was not called as a module: its output cannot be watched")
        return self.now

    def attended(self, attend: LayerAttend) -> Attend:
        """``attend``, watched. Without ``exclusive``: the attention output itself is wanted."""

        def watched(
            q: Tensor, k: Tensor, v: Tensor, *, score_mod: ScoreMod | None = None, sink: Tensor | None = None
        ) -> Tensor:
            y = attend(q, k, v, score_mod=score_mod, sink=sink)
            self.calls.append((y.detach(), attention_weights(q, k, attend.window, score_mod=score_mod, sink=sink)))
            return y

        return watched

    def called(self, module: nn.Module, given: tuple[Any, ...], z: Tensor) -> Tensor:
        """The hook behind the variant."""
        t: QKV = given[0]
        if not self.calls:
            raise ValueError(f"variant {self.variant!r} never calls attend: it has no attention to diagnose")
        y, weights = self.calls[0]
        v = module.own_value(t)  # pyright: ignore
        if y.shape != z.shape or v.shape[:2] != y.shape[:2] or v.shape[3] != y.shape[3] or y.shape[2] % v.shape[2]:
            raise ValueError(
                f"variant {self.variant!r} has no own value for its output: attention gives {tuple(y.shape)}, the "
                f"variant {tuple(z.shape)}, the own value is {tuple(v.shape)}; they must be (b, t, heads, d) of one d"
            )
        if not z.requires_grad:
            z = z.detach().requires_grad_()
        self.now, self.calls = _Seen(y, z, v.detach()), []
        with torch.no_grad():
            self._add(y, z.detach(), v.detach(), weights)
            self.alpha = torch.as_tensor(module.alpha()).detach().double().expand(z.shape[2])  # pyright: ignore
        return z

    def _add(self, y: Tensor, z: Tensor, v: Tensor, weights: Weights) -> None:
        y, z = (x.double() for x in (y, z))
        v = _by_head(v.double(), y.shape[2])
        yv, zv, vv = ((a * v).sum(-1) for a in (y, z, v))
        yy, zz = ((a * a).sum(-1) for a in (y, z))
        tiny = torch.finfo(torch.float64).tiny
        vv_safe = vv.clamp_min(tiny)
        values = {
            "cos_before": yv / (yy * vv).sqrt().clamp_min(tiny),
            "cos_after": zv / (zz * vv).sqrt().clamp_min(tiny),
            "along_before": yv.square() / vv_safe,
            "along_after": zv.square() / vv_safe,
            "square_before": yy,
            "square_after": zz,
            "gone": (y - z).square().sum(-1).sqrt(),
            "norm_before": yy.sqrt(),
            "norm_after": zz.sqrt(),
            "norm_value": vv.sqrt(),
            "self_weight": weights.own,
            "uniform": weights.uniform,
            "first_weight": weights.first,
            "entropy": weights.entropy,
            "reach": weights.entropy.exp(),
            "distance": weights.distance,
        }
        for name, value in values.items():
            total = value.double().sum(0).T.cpu()
            self.sums[name] = self.sums[name] + total if name in self.sums else total
        self.logit = torch.maximum(self.logit, weights.logit.amax(0).T.double().cpu())
        grams = [torch.einsum("bthd,bthe->hde", a, a).cpu() for a in (y, z)]
        self.grams = [old + new for old, new in zip(self.grams, grams, strict=True)] if self.grams else grams
        self.count += len(y)

    @torch.no_grad()
    def end(self, gradient: Tensor) -> None:
        """Takes the pass's gradient of the loss by z."""
        y, _, v = self.seen()
        y, g = y.double(), gradient.double()
        v = _by_head(v.double(), y.shape[2])
        c = (y * v).sum(-1) / (v * v).sum(-1).clamp_min(torch.finfo(torch.float32).tiny)
        self.slope = self.slope - (c * (g * v).sum(-1)).sum((0, 1)).cpu()
        self.now = None

    def rows(self, layer: int) -> Iterator[Row]:
        heads, length = self.sums["self_weight"].shape
        ranks = [effective_rank(gram) for gram in self.grams]
        for head in range(heads):
            for start, end in position_ranges(length):
                total = {name: float(value[head, start:end].sum()) for name, value in self.sums.items()}
                n = self.count * (end - start)
                whole = (start, end) == (0, length)
                numbers = {
                    **{name: total[name] / n for name in MEANS},
                    "energy_before": _share(total["along_before"], total["square_before"]),
                    "energy_after": _share(total["along_after"], total["square_after"]),
                    "removed": _share(total["gone"], total["norm_before"]),
                    "logit": float(self.logit[head, start:end].max()),
                    "rank_before": float(ranks[0][head]) if whole else math.nan,
                    "rank_after": float(ranks[1][head]) if whole else math.nan,
                    "alpha": float(self.alpha[head]) if whole else math.nan,
                    "alpha_gradient": float(self.slope[head]) if whole else math.nan,
                }
                place = {"layer": layer, "head": head, "start": start, "end": end}
                yield {**place, **{name: n if math.isfinite(n) else None for name, n in numbers.items()}}


MEANS = (
    "cos_before", "cos_after", "norm_before", "norm_after", "norm_value",
    "self_weight", "uniform", "first_weight", "entropy", "reach", "distance",
)  # fmt: skip


def _by_head(v: Tensor, heads: int) -> Tensor:
    """(b, t, g, d) to (b, t, h, d): each head's own value."""
    return v.unsqueeze(3).expand(-1, -1, -1, heads // v.shape[2], -1).flatten(2, 3)


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def effective_rank(gram: Float[Tensor, "h d d"]) -> Float[Tensor, " h"]:
    """exp H(σ / Σσ) of the matrices with these Gram matrices; 0 for a zero matrix, NaN for one that is not finite."""
    finite = gram.isfinite().flatten(1).all(1)
    singular = torch.linalg.eigvalsh(gram.where(finite[:, None, None], 0)).clamp_min(0).sqrt()
    share = singular / singular.sum(-1, keepdim=True).clamp_min(torch.finfo(gram.dtype).tiny)
    rank = torch.special.entr(share).sum(-1).exp()
    return rank.masked_fill(singular.sum(-1) == 0, 0).masked_fill(~finite, math.nan)


@contextmanager
def _watching(model: GPT, layers: list[_Layer]) -> Iterator[None]:
    """Hooks on every layer while the body runs, and none after it."""
    handles = []
    for block, layer in zip(model.blocks, layers, strict=True):
        attention: nn.Module = block.attention  # pyright: ignore
        handles.append(attention.register_forward_pre_hook(_with_watched(layer)))
        handles.append(attention.variant.register_forward_hook(layer.called))  # pyright: ignore
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _with_watched(layer: _Layer) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    return lambda module, given: (*given[:-1], layer.attended(given[-1]))
