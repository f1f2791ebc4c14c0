"""What the parts of bench/gpu.py share: sizes, targets, where results go."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from measure import Result, interleave, verdict

HOPPER = "hopper"
# Dense bfloat16, from NVIDIA's data sheets; other devices are measured by their best product.
PEAKS = {"H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "A100": 312e12}
TARGETS = {  # name: (direction, target)
    "d12: model FLOPs, share of the dense bfloat16 peak": (">=", 0.45),
    "d24: model FLOPs, share of the dense bfloat16 peak": (">=", 0.50),
    "step time with XSA on all layers, over without": ("<=", 1.01),
    "peak memory with XSA on all layers, over without": ("<=", 1.01),
    "exclude_self, share of the copy bandwidth": (">=", 0.85),
    "training d12, against nanochat with the same kernels": (">=", 1.0),
}
KERNEL = "auto"  # the attention kernel of our runs


@dataclass(frozen=True)
class Size:
    """One model and batch; ``micro`` rows a forward pass."""

    depth: int
    width: int
    heads: int
    context: int
    vocabulary: int
    rows: int
    micro: int


@dataclass(frozen=True)
class Plan:
    """Sizes of a run of this program. ``seconds`` is for all of it."""

    d12: Size
    d24: Size
    rounds: int
    elements: int  # of y in exclude_self
    mm: tuple[int, ...]
    seconds: float


# nanochat's batch of 524,288 tokens at depth 12, half of it at depth 24 to save time. Heads of 128 at depth 12 as in
# its recipe, of 64 at depth 24 as in the study of XSA.
FULL = Plan(
    d12=Size(12, 768, 6, 2048, 32_768, 256, 32), d24=Size(24, 1024, 16, 2048, 32_768, 128, 16),
    rounds=6, elements=32 * 2048 * 768 * 4, mm=(4096, 8192, 16384), seconds=345.0,
)  # fmt: skip
SMOKE = Plan(
    d12=Size(2, 64, 2, 64, 256, 4, 2), d24=Size(3, 64, 4, 64, 256, 4, 2),
    rounds=2, elements=1 << 14, mm=(64,), seconds=600.0,
)  # fmt: skip


@dataclass
class Bench:
    """What the parts share, and what they found."""

    plan: Plan
    device: str
    compile: bool
    nanochat: Path | None
    ends: float  # monotonic
    processes: int = 1  # GPUs that one run takes, in the part that has several
    rows: list[Any] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    peak: float = 0.0  # floating-point operations a second
    kept: dict[str, tuple[Any, Callable[[], float]]] = field(default_factory=dict)  # the state of d12, once compiled

    def sync(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, dynamic=False) if self.compile else function

    def waiting(self, work: Callable[[], object], calls: int = 1) -> Callable[[], None]:
        """``work`` so many times, until the device is done with it."""

        def run() -> None:
            for _ in range(calls):
                work()
            self.sync()

        return run

    def judge(self, name: str, found: Any, **numbers: Any) -> None:
        """Adds the row of a target."""
        direction, target = TARGETS[name]
        row = Result(
            name, ratio=found.median, low=found.low, high=found.high, target=target, direction=direction,
            machine=HOPPER, rounds=found.rounds, timed=found.rounds > 0, **numbers,
        )  # fmt: skip
        kind = HOPPER if self.device == "cuda" and torch.cuda.get_device_capability() == (9, 0) else "other"
        if self.plan is SMOKE:
            said = "not judged: sizes that say nothing"
        else:
            said = verdict(row, kind) if kind == HOPPER else f"not judged: stated for {HOPPER}, this is {self.device}"
        self.rows.append(replace(row, verdict=said))


def milliseconds(b: Bench, work: Callable[[], object]) -> float:
    return 1e3 * statistics.median(interleave({"": b.waiting(work)}, b.plan.rounds, 3)[""])


def extra_bytes(b: Bench, work: Callable[[], object]) -> int | None:
    """Bytes at the peak of ``work`` beyond those held before; None where nobody counts them."""
    if b.device != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
