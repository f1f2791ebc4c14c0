"""docs/study.md says what its published scores say: every difference worked out again from the tables beside it."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def bits() -> dict[tuple[str, str], np.ndarray]:
    """(point, arm) -> (seeds,) bits per byte, from nats and bytes of every document."""
    sums: dict[tuple[str, str, int], list[float]] = {}
    for row in pq.read_table(DOCS / "study" / "scores.parquet").to_pylist():
        total = sums.setdefault((row["point"], row["arm"], row["seed"]), [0.0, 0.0])
        total[0] += row["value"]
        total[1] += row["weight"]
    found: dict[tuple[str, str], np.ndarray] = {}
    for point, arm in {key[:2] for key in sums}:
        seeds = sorted(seed for p, a, seed in sums if (p, a) == (point, arm))
        values = [sums[point, arm, seed] for seed in seeds]
        found[point, arm] = np.array([nats / size / math.log(2) for nats, size in values])
    return found


ROWS = {
    "XSA − standard, Muon + AdamW (primary)": ("xsa-hybrid", "standard-hybrid"),
    "XSA − standard, AdamW alone": ("xsa-adamw", "standard-adamw"),
    "null control, Muon + AdamW": ("null", "standard-hybrid"),
    "null control, AdamW": ("null@standard-adamw", "standard-adamw"),
    "positive control, Muon + AdamW": ("positive", "standard-hybrid"),
}


def cells_of(name: str) -> list[str]:
    lines = (DOCS / "study.md").read_text(encoding="utf-8").splitlines()
    line = next(line for line in lines if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("name", ROWS)
def test_each_difference_is_that_of_the_scores(name: str, bits: dict[tuple[str, str], np.ndarray]) -> None:
    treatment, baseline = ROWS[name]
    for point, cell in zip(("d3", "d6"), cells_of(name)[1::2], strict=False):
        said = re.match(r"([+−][\d.]+) ± ([\d.]+)", cell)
        assert said, cell
        differences = bits[point, treatment] - bits[point, baseline]
        assert len(differences) == 5
        places = len(said[1].partition(".")[2])
        assert float(said[1].replace("−", "-")) == pytest.approx(differences.mean(), abs=0.51 * 10**-places)
        if relative := re.search(r"\(([+−][\d.]+) %\)", cell):
            share = 100 * differences.mean() / bits[point, baseline].mean()
            assert float(relative[1].replace("−", "-")) == pytest.approx(share, abs=0.051)


def test_the_interaction_is_the_difference_of_the_two(bits: dict[tuple[str, str], np.ndarray]) -> None:
    name = "(XSA − standard) under AdamW against under Muon + AdamW"
    for point, cell in zip(("d3", "d6"), cells_of(name)[1::2], strict=False):
        adamw, muon = (bits[point, f"xsa-{kind}"] - bits[point, f"standard-{kind}"] for kind in ("adamw", "hybrid"))
        assert float(cell.split(" ±")[0].replace("−", "-")) == pytest.approx((adamw - muon).mean(), abs=6e-4)


def test_the_mechanism_is_that_of_the_diagnoses() -> None:
    """Means over layers, heads and seeds at the end, at d6."""
    rows = pq.read_table(DOCS / "study" / "mechanism.parquet").to_pylist()
    last = max(row["step"] for row in rows)
    for name, arm in {
        "d6 standard, Muon + AdamW": "standard-hybrid", "d6 XSA, Muon + AdamW": "xsa-hybrid",
        "d6 standard, AdamW": "standard-adamw", "d6 XSA, AdamW": "xsa-adamw",
    }.items():  # fmt: skip
        mine = [row for row in rows if (row["point"], row["arm"], row["step"]) == ("d6", arm, last)]
        assert len(mine) == 5 * 6 * 6
        expected = [
            np.mean([row["cos_before"] for row in mine]),
            np.mean([row["self_weight"] / row["uniform"] for row in mine]),
            *(np.mean([row[key] for row in mine]) for key in ("reach", "rank_after", "norm_value")),
        ]
        said = [float(cell) for cell in cells_of(name)[1:]]
        assert said == pytest.approx([float(value) for value in expected], abs=0.051)
