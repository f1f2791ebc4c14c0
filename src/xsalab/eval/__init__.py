"""What a finished run is asked. Every evaluation returns rows, one an item; means are made in ``stats``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ItemScore:
    """One answer of one model: ``value`` over ``weight`` is the item's score, Σ value / Σ weight the task's.

    bpb: value in nats, weight in bytes. Tasks with right and wrong: value 0 or 1, weight 1, and ``options``
    holds each option's log-likelihood. ``cut``: the prompt did not fit and was shortened.
    """

    task: str
    item: str
    value: float
    weight: float
    options: tuple[float, ...] = ()
    cut: bool = False
