"""The tables of stability against stores whose losses, norms and logits were made by hand."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fake_runs import ARMS, HEAD, fake
from xsalab.experiment.design import Cell
from xsalab.experiment.outcome import outcome
from xsalab.experiment.stability import stability
from xsalab.experiment.store import RunStore, write_rows
from xsalab.report import render

TOML = HEAD.replace("seeds = [0, 1, 2, 3, 4, 5]", "seeds = [0, 1, 2]") + ARMS
ARM_KEYS = [
    "point", "arm", "runs", "finished", "diverged", "low", "high", "spikes", "runs_with_spikes", "largest_z",
    "largest_grad_norm", "nonfinite", "largest_logit", "logit_growth",
]  # fmt: skip
RUN_KEYS = [
    "name", "point", "arm", "seed", "spikes", "largest_z", "spike_steps", "grad_norm_median", "largest_grad_norm",
    "nonfinite", "first_logit", "last_logit", "largest_logit",
]  # fmt: skip


def curve(
    store: RunStore, cell: Cell, bumps: Sequence[int] = (), norms: Sequence[float] = (), broke: int | None = None
) -> None:
    """A calm loss from 4 downwards with 2 nats more at ``bumps``, validated on the way; at ``broke`` it ended."""
    noise = random.Random(cell.name)
    rows: list[dict[str, Any]] = [{"step": 0, "val_bpb": 3.0}]
    for step in range(100 if broke is None else broke):
        loss = 4 - 0.01 * step + noise.gauss(0, 0.02) + 2.0 * (step in bumps)
        rows.append({"step": step, "loss": loss, "grad_norm": dict(enumerate(norms)).get(step, 0.5)})
    if broke is not None:
        rows.append({"step": broke, "grad_norm": 9e9, "diverged": True})
    path = store.run(cell).path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def logits(store: RunStore, cell: Cell, step: int, heads: Sequence[float | None]) -> None:
    """A diagnosis of one layer; a range of positions that has, wrongly, more than the whole context."""
    rows = [
        {"step": step, "layer": 0, "head": head, "start": start, "end": end, "logit": value and value + start}
        for head, value in enumerate(heads)
        for start, end in ((0, 128), (64, 128))
    ]
    folder = store.run(cell).path / "mechanism"
    folder.mkdir(exist_ok=True)
    write_rows(folder / f"step-{step:09d}.parquet", rows)


@pytest.fixture
def rows(tmp_path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """xsa: seed 0 with two spikes, seed 1 diverged at step 30, seed 2 not run; standard calm."""
    states = {("xsa", 1): {"state": "diverged", "step": 30}, ("xsa", 2): {"state": "waiting"}}
    experiment, store = fake(tmp_path, TOML, lambda cell: states.get((cell.arm, cell.seed), {}))
    for seed in range(3):
        curve(store, Cell("base", "standard", seed), norms=[seed + 1.0, 0.25])
    curve(store, Cell("base", "xsa", 0), bumps=[50, 51, 70], norms=[7.0, 0.25])
    curve(store, Cell("base", "xsa", 1), broke=30)
    for seed, last in ((0, 9.0), (1, 12.0)):
        logits(store, Cell("base", "standard", seed), 0, [3.0, 4.0])
        logits(store, Cell("base", "standard", seed), 50, [20.0, 1.0])
        logits(store, Cell("base", "standard", seed), 100, [last, None])
    logits(store, Cell("base", "xsa", 0), 100, [6.0, 5.0])
    arms, runs = stability(experiment, store)
    return {row["arm"]: row for row in arms}, {row["name"]: row for row in runs}


def test_the_keys_are_those_of_the_page(rows: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """A row for every point and arm, and for every run that began."""
    arms, runs = rows
    assert list(arms) == ["standard", "xsa"]
    assert all(list(row) == ARM_KEYS for row in arms.values())
    assert list(runs) == [f"base.{arm}.s{seed}" for seed in range(3) for arm in ("standard", "xsa")][:-1]
    assert all(list(row) == RUN_KEYS for row in runs.values())


def test_spikes_are_counted_where_they_are(rows: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """A spike of two steps once, one later again, by the steps of the run."""
    arms, runs = rows
    assert runs["base.xsa.s0"]["spike_steps"] == [50, 70]
    assert (arms["xsa"]["spikes"], arms["xsa"]["runs_with_spikes"]) == (2, 1)
    assert (arms["standard"]["spikes"], arms["standard"]["runs_with_spikes"]) == (0, 0)
    assert arms["xsa"]["largest_z"] == runs["base.xsa.s0"]["largest_z"] > 30
    assert 0 < arms["standard"]["largest_z"] < 6


def test_what_broke_is_counted_and_has_its_step(rows: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """One of the two runs that ended; its interval solves (1 − p)² = 0.975 and p² = 0.975."""
    arms, runs = rows
    row = arms["xsa"]
    assert (row["runs"], row["finished"], row["diverged"], row["nonfinite"]) == (3, 1, 1, 1)
    assert (row["low"], row["high"]) == pytest.approx((1 - 0.975**0.5, 0.975**0.5))
    assert (arms["standard"]["low"], arms["standard"]["high"]) == pytest.approx((0, 1 - 0.025 ** (1 / 3)))
    assert runs["base.xsa.s1"]["nonfinite"] == 30
    assert runs["base.xsa.s0"]["nonfinite"] is None


def test_gradient_norms(rows: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """The largest and the median of a run, the largest of an arm; the step that broke is part of it."""
    arms, runs = rows
    assert [runs[f"base.standard.s{seed}"]["largest_grad_norm"] for seed in range(3)] == [1, 2, 3]
    assert runs["base.standard.s0"]["grad_norm_median"] == 0.5
    assert (arms["standard"]["largest_grad_norm"], arms["xsa"]["largest_grad_norm"]) == (3, 9e9)


def test_growth_of_the_logits(rows: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Over heads at the whole context; from the first to the last diagnosis, and over all of them."""
    arms, runs = rows
    row = runs["base.standard.s0"]
    assert (row["first_logit"], row["last_logit"], row["largest_logit"]) == (4, 9, 20)
    assert arms["standard"]["logit_growth"] == ((9 - 4) + (12 - 4)) / 2
    assert arms["standard"]["largest_logit"] == 20
    assert runs["base.standard.s2"]["first_logit"] is None, "was not diagnosed"
    assert (runs["base.xsa.s0"]["last_logit"], arms["xsa"]["logit_growth"]) == (None, None), "once is no growth"


def test_nothing_is_known_of_what_has_not_begun(tmp_path: Path) -> None:
    """No run: no interval, no number, and the outcome has both tables."""
    experiment, store = fake(tmp_path, TOML, lambda cell: {"state": "waiting"})
    content = outcome(experiment, store)
    assert content["run_stability"] == []
    assert [row["runs"] for row in content["stability"]] == [3, 3]
    unknown = ("low", "high", "largest_z", "largest_grad_norm", "largest_logit", "logit_growth")
    assert {row[key] for row in content["stability"] for key in unknown} == {None}


def test_every_point_has_its_own_rows_and_the_twin_has_none(tmp_path: Path) -> None:
    """Two depths are two rows an arm; a short run is too short for z, and says nothing of it."""
    points = "[[points]]\nname = 'a'\ndepth = 2\n[[points]]\nname = 'b'\ndepth = 3\n"
    experiment, store = fake(tmp_path, TOML.replace("twin = false\n", "") + points, steps=22)
    arms, runs = stability(experiment, store)
    assert [(row["point"], row["arm"]) for row in arms] == [(p, a) for p in "ab" for a in ("standard", "xsa")]
    assert len(runs) == 12
    assert {row["runs"] for row in arms} == {3}
    assert {row["largest_z"] for row in arms} == {None}


def test_a_run_too_short_to_be_judged_has_no_count(tmp_path: Path) -> None:
    """22 steps are no evidence of calm: null, not 0."""
    experiment, store = fake(tmp_path, TOML, steps=22)
    arms, runs = stability(experiment, store)
    assert {row["spikes"] for row in runs} == {None}
    assert {(row["spikes"], row["runs_with_spikes"], row["largest_z"]) for row in arms} == {(None, None, None)}
    assert "too short to judge" in render(outcome(experiment, store), {}, {}, "x.toml")
