"""The rivals that could explain a win of XSA: no self weight, a gate on each head, a place to sink weight into."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .attend import Attend
from .variant import QKV, Site, Variant, variant


@variant("self-masked")
class SelfMasked(Variant):
    """The diagonal is taken out of the softmax; position 0, which sees only itself, gives 0."""

    def forward(self, t: QKV, attend: Attend) -> Tensor:
        return attend(t.q, t.k, t.v, score_mod=_no_self)


def _no_self(scores: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return scores.masked_fill(query == key, -math.inf)


@variant("head-gate")
class HeadGate(Variant):
    """Each head's output times 2 σ(W_g x), one number a head and token; W_g = 0 starts as plain attention."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.gate = nn.Parameter(torch.zeros(site.heads, site.width))

    def forward(self, t: QKV, attend: Attend) -> Tensor:
        gate = 2 * torch.sigmoid(t.x @ self.gate.to(t.x.dtype).T)
        return attend(t.q, t.k, t.v) * gate.unsqueeze(-1)

    def extra_flops(self) -> int:
        return 2 * self.site.heads * self.site.width + self.site.heads * self.site.head_dim


@variant("sink")
class Sink(Variant):
    """One learned logit a head joins the softmax's denominator and carries no value."""

    def __init__(self, site: Site, start: float = 0.0) -> None:
        super().__init__(site)
        self.logit = nn.Parameter(torch.full((site.heads,), float(start)))

    def forward(self, t: QKV, attend: Attend) -> Tensor:
        return attend(t.q, t.k, t.v, sink=self.logit)

    def logged(self) -> dict[str, float]:
        return {f"sink.{head}": value for head, value in enumerate(self.logit.tolist())}
