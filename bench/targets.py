"""The targets of the benchmarks, by name and by the kind of machine that they are stated for.

A ratio is how many times as fast as the peer where more is better (">="), and how many times as much as without where
less is better ("<="). ``STATED`` are the project's targets: "amx" is 2 cores with AMX, "any" is every machine.
``FLOORS`` are our own, for processors that no target is stated for: set a little below what was reached on one of them
(docs/performance.md), so that a loss of speed is noticed. They are no claim of what is possible.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

AMX, AVX512, PLAIN, ANY = "amx", "avx512-bf16", "plain", "any"


@dataclass(frozen=True)
class Target:
    """``values``: a target for each kind of machine. ``timed``: a busy machine would spoil it."""

    direction: str
    values: Mapping[str, float] = field(default_factory=dict)
    timed: bool = True

    def __post_init__(self) -> None:
        assert self.direction in (">=", "<="), self.direction


STATED: dict[str, Target] = {
    # ranks.py
    "2 processes on 2 cores, against 1 with 2 threads": Target(">=", {ANY: 0.85}),
    # training.py
    "training 4 × 256, against nanochat float32": Target(">=", {AMX: 6.0}),
    "training 4 × 256, against nanochat bfloat16": Target(">=", {AMX: 3.0}),
    "training 6 × 384, against nanochat float32": Target(">=", {AMX: 4.0}),
    "training 6 × 384, against nanochat bfloat16": Target(">=", {AMX: 2.2}),
    "model FLOPs 6 × 384, share of the best at::mm": Target(">=", {AMX: 0.35}),
    # kernels.py
    "exclude_self, against copy_ of the same bytes": Target("<=", {AMX: 1.15}),
    "optimizer step, against torch.optim.Muon": Target(">=", {AMX: 3.0}),
    "optimizer step in PyTorch, against torch.optim.Muon": Target(">=", {AMX: 2.0}),
    "optimizer step of the main job, against torch.optim.Muon": Target(">=", {AMX: 3.0}),
    "optimizer update, distance from torch.optim.Muon's": Target("<=", {ANY: 0.05}, timed=False),
    "head and loss 256, against torch.compile": Target(">=", {AMX: 5.0}),
    "head and loss 384, against torch.compile": Target(">=", {AMX: 4.0}),
    "head and loss 256 in PyTorch, against torch.compile": Target(">=", {AMX: 1.5}),
    "head and loss 384 in PyTorch, against torch.compile": Target(">=", {AMX: 1.5}),
    "head and loss, extra memory in MB": Target("<=", {ANY: 32.0}, timed=False),
    "attention at context 512, against SDPA in bfloat16": Target(">=", {AMX: 4.0}),
    "attention at context 4096, extra memory over one T × T": Target("<=", {ANY: 1.0}, timed=False),
    # variants.py
    "step time with XSA, over without": Target("<=", {AMX: 1.01}),
    "step time with XSA in PyTorch, over without": Target("<=", {AMX: 1.03}),
    "step time of standard, over standard": Target("<=", {}),  # no target: what the method itself gives
    "step time of standard in PyTorch, over standard": Target("<=", {}),
    "bytes saved for backward with XSA, over without": Target("<=", {AMX: 1.01}, timed=False),
    "bytes saved for backward with XSA in PyTorch, over without": Target("<=", {}, timed=False),
    "peak memory with XSA, over without": Target("<=", {AMX: 1.01}, timed=False),
    # growth.py
    "growth with tokens, over linear": Target("<=", {ANY: 1.10}),
    "growth with depth, over linear": Target("<=", {ANY: 1.10}),
    "growth with context, over linear without attention": Target("<=", {ANY: 1.10}),
    # startup.py, tokenizer.py, generation.py
    "start to first step in seconds, second run": Target("<=", {AMX: 8.0}),
    "tokenizing and packing, against nanochat": Target(">=", {AMX: 1.0}),
    "generation at batch 1, against nanochat": Target(">=", {AMX: 2.0}),
    "generation at batch 16, against nanochat": Target(">=", {AMX: 2.0}),
}

# Ours, of AVX512-BF16 without AMX. Filled from what docs/performance.md reports.
FLOORS: dict[str, float] = {
    "training 4 × 256, against nanochat float32": 2.6,
    "training 4 × 256, against nanochat bfloat16": 1.65,
    "training 6 × 384, against nanochat float32": 2.3,
    "training 6 × 384, against nanochat bfloat16": 1.4,
    "model FLOPs 6 × 384, share of the best at::mm": 0.7,
    "exclude_self, against copy_ of the same bytes": 1.15,
    "optimizer step, against torch.optim.Muon": 1.4,
    "optimizer step in PyTorch, against torch.optim.Muon": 0.85,
    "optimizer step of the main job, against torch.optim.Muon": 1.4,
    "head and loss 256, against torch.compile": 1.85,
    "head and loss 384, against torch.compile": 1.65,
    "head and loss 256 in PyTorch, against torch.compile": 1.4,
    "head and loss 384 in PyTorch, against torch.compile": 1.25,
    "attention at context 512, against SDPA in bfloat16": 3.4,
    "step time with XSA, over without": 1.01,
    "step time with XSA in PyTorch, over without": 1.03,
    "bytes saved for backward with XSA, over without": 1.01,
    "peak memory with XSA, over without": 1.01,
    "start to first step in seconds, second run": 8.0,
    "tokenizing and packing, against nanochat": 1.0,
    "generation at batch 1, against nanochat": 2.0,
    "generation at batch 16, against nanochat": 2.0,
}


def target_of(name: str, machine: str) -> tuple[str, float | None, str, bool]:
    """Direction, target (None: none is set for this machine), the kind of machine it is stated for ("": none at all, it
    stands beside another row), whether timed.

    Raises KeyError for a name that is not known.
    """
    target = STATED[name]
    for kind in (machine, ANY):
        if kind in target.values:
            return target.direction, target.values[kind], kind, target.timed
    if machine == AVX512 and name in FLOORS:
        return target.direction, FLOORS[name], f"{AVX512}, our own floor", target.timed
    return target.direction, None, " or ".join(target.values), target.timed
