"""Benchmarks are programs beside the package. Their folder goes behind all others: some are called like libraries."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
sys.path.append(str(BENCH))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> str:
    """A machine that targets are stated for, whatever this one is; nobody else uses it."""
    import measure

    monkeypatch.setattr(measure, "machine_class", lambda: "amx")
    monkeypatch.setattr(measure, "environment", lambda: {"machine": "amx"})
    monkeypatch.setattr(measure, "busy", lambda: 0.0)
    return "amx"
