"""Rates, momentum and decay as pure functions of the step (0 to N − 1 of N)."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """``kind`` "nanochat": warm-up, flat, linear warm-down. "cosine": warm-up, then half a cosine.

    The factors multiply each group's own rate. ``final`` belongs to step N, which is never trained.
    """

    kind: str
    steps: int
    warmup: int = 40
    warmdown: float = 0.65  # share of the steps
    final: float = 0.05
    momentum_start: float = 0.85
    momentum_peak: float = 0.97
    momentum_end: float = 0.90
    momentum_steps: int = 400

    def lr(self, step: int) -> float:
        """Factor on every learning rate."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.kind == "cosine":
            done = (step - self.warmup) / max(self.steps - self.warmup, 1)
            return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
        down = self.warmdown * self.steps
        if step <= self.steps - down:
            return 1.0
        return self.final + (1 - self.final) * max(self.steps - step, 0) / down

    def momentum(self, step: int) -> float:
        """Muon's momentum. The climb wins where it overlaps the warm-down."""
        if step < self.momentum_steps:
            return self.momentum_start + (self.momentum_peak - self.momentum_start) * step / self.momentum_steps
        down = self.warmdown * self.steps
        if step <= self.steps - down:
            return self.momentum_peak
        done = 1 - max(self.steps - step, 0) / down
        return self.momentum_peak + (self.momentum_end - self.momentum_peak) * done

    def weight_decay(self, step: int) -> float:
        """Factor on Muon's decay: half a cosine to 0."""
        return 0.5 * (1 + math.cos(math.pi * step / max(self.steps, 1)))
