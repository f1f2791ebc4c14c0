"""Sweeps of a rate: what is best, how far an arm still trains, and best against best without the choice's flattery."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from fake_runs import ARMS, HEAD, fake
from xsalab.experiment.design import Cell
from xsalab.experiment.outcome import outcome
from xsalab.experiment.rates import Sweep, rate_sweeps
from xsalab.experiment.store import RunStore

TOML = (
    HEAD.replace("seeds = [0, 1, 2, 3, 4, 5]", "seeds = [0, 1, 2]")
    + """
[factors.attention]
standard = { variant = "standard" }
xsa = { variant = "xsa" }
[factors.optim]
lr_scale = [2.0, 1.0, 4.0]
[controls]
null = false
twin = false
"""
)
# bpb beside that of the seed; the noise of a run is 0.002
SHIFT = {"standard": {1: 0.05, 2: 0.0, 4: 0.2}, "xsa": {1: 0.08, 2: 0.03, 4: -0.02}}
KEYS = ["levels", "arms", "means", "sds", "finished", "diverged", "best", "edge", "widest", "sentence"]


def rate_of(cell: Cell) -> int:
    return int(cell.arm.rpartition("-")[2])


def shift(cell: Cell) -> float:
    return SHIFT[cell.arm.partition("-")[0]][rate_of(cell)]


def swept(
    folder: Path,
    change: Callable[[Cell], Mapping[str, Any]] = lambda cell: {},
    shift: Callable[[Cell], float] = shift,
    toml: str = TOML,
) -> tuple[dict[str, Any], RunStore]:
    """The entry of the only point, and the store."""
    experiment, store = fake(folder, toml, change, steps=9, shift=shift)
    (entry,) = rate_sweeps(experiment, store, [])
    return entry, store


def bpb(store: RunStore, attention: str, rate: int, seed: int) -> float:
    return store.run(Cell("base", f"{attention}-lr_scale-{rate}", seed)).status["val_bpb"]


def test_a_table_by_rate(tmp_path: Path) -> None:
    """The lowest rate first, whatever the file's order; means and deviations are those of the runs."""
    entry, store = swept(tmp_path)
    assert (entry["point"], entry["factor"], entry["rates"]) == ("base", "optim.lr_scale", [1, 2, 4])
    standard, xsa = entry["rows"]
    assert list(standard) == KEYS
    assert standard["arms"] == [f"standard-lr_scale-{rate}" for rate in (1, 2, 4)]
    for row, name in ((standard, "standard"), (xsa, "xsa")):
        values = [[bpb(store, name, rate, seed) for seed in range(3)] for rate in (1, 2, 4)]
        assert row["means"] == pytest.approx([statistics.fmean(of) for of in values])
        assert row["sds"] == pytest.approx([statistics.stdev(of) for of in values])
    json.dumps(entry, allow_nan=False)


def test_the_best_rate_and_whether_it_is_at_the_end(tmp_path: Path) -> None:
    """Standard is best inside; xsa at the highest rate, and it is said that nothing beyond was tried."""
    standard, xsa = swept(tmp_path)[0]["rows"]
    assert (standard["best"], standard["edge"]) == (2, False)
    assert (xsa["best"], xsa["edge"]) == (4, True)
    assert "the highest rate tried, so it is not known to be the best" in xsa["sentence"]
    assert "not known" not in standard["sentence"]


def test_how_far_an_arm_still_trains(tmp_path: Path) -> None:
    """0.2 of 2.1 bpb is beyond 5 % of the best, 0.05 and 0.1 are within it."""
    entry, _ = swept(tmp_path)
    assert [row["widest"] for row in entry["rows"]] == [[1, 2], [1, 4]]
    assert "5 %" in entry["rule"]


def test_a_rate_beyond_a_gap_is_not_in_the_range(tmp_path: Path) -> None:
    """With rate 2 broken at one seed, standard is best at 1, and 4 is not reached although it trains."""
    entry, _ = swept(
        tmp_path,
        lambda cell: {"state": "diverged"} if cell == Cell("base", "standard-lr_scale-2", 1) else {},
        lambda cell: 0.05 if rate_of(cell) == 4 else 0.0,
    )
    row = entry["rows"][0]
    assert (row["best"], row["widest"], row["finished"], row["diverged"]) == (1, [1, 1], [3, 2, 3], [0, 1, 0])
    assert "every seed finished up to 1" in row["sentence"]


def test_equal_rates_are_the_contrasts_that_are_there(tmp_path: Path) -> None:
    """By name, with the estimate of the table of contrasts and no other."""
    experiment, store = fake(tmp_path, TOML, steps=9, shift=shift)
    content = outcome(experiment, store)
    known = {row["name"]: row for row in content["contrasts"]}
    rows = content["rates"][0]["equal_rate"]
    assert [(row["rate"], row["name"]) for row in rows] == [
        (rate, f"xsa-lr_scale-{rate} - standard-lr_scale-{rate}") for rate in (1, 2, 4)
    ]
    for row in rows:
        assert row["estimate"] == known[row["name"]]["estimate"]
        assert row["estimate"]["mean"] == pytest.approx(
            SHIFT["xsa"][row["rate"]] - SHIFT["standard"][row["rate"]], abs=0.01
        )


def test_best_against_best_is_the_difference_at_the_chosen_rates(tmp_path: Path) -> None:
    """Where all seeds agree: xsa at 4 against standard at 2, seed by seed."""
    entry, store = swept(tmp_path)
    row = entry["best_against_best"]
    assert row["chosen_treatment"] == {"0": 4, "1": 4, "2": 4}
    assert row["chosen_baseline"] == {"0": 2, "1": 2, "2": 2}
    expected = [bpb(store, "xsa", 4, seed) - bpb(store, "standard", 2, seed) for seed in range(3)]
    assert row["differences"] == pytest.approx(expected)
    assert row["estimate"]["mean"] == pytest.approx(statistics.fmean(expected))
    assert row["verdict"]["word"] == "better"
    assert row["sentence"].startswith("xsa at its best rate against standard at its best rate: Δ bpb −0.0")
    assert "Exploratory" in row["words"]
    assert "widened" not in row["words"] + row["estimate"]["method"], "all chose alike"
    assert "xsa: the best rate is at the end of those tried" in row["words"]


def test_the_rate_of_a_seed_is_chosen_on_the_others(tmp_path: Path) -> None:
    """Seed 0 is lucky by 0.3 at rate 1. Its luck decides for the others, and never for itself.

    Of standard without seed 0: 0.05 at rate 1, 0 at rate 2, so 2. With it: (0.05 − 0.25) / 2 = −0.1, so 1.
    """
    lucky = Cell("base", "standard-lr_scale-1", 0)
    entry, store = swept(tmp_path, shift=lambda cell: shift(cell) - 0.3 * (cell == lucky))
    assert entry["rows"][0]["best"] == 1, "the mean over all seeds, luck and all"
    row = entry["best_against_best"]
    assert row["chosen_baseline"] == {"0": 2, "1": 1, "2": 1}
    expected = [bpb(store, "xsa", 4, s) - bpb(store, "standard", rate, s) for s, rate in ((0, 2), (1, 1), (2, 1))]
    assert row["differences"] == pytest.approx(expected)
    assert "standard: its best rate is 1 or 2." in row["words"]
    spread = statistics.stdev(expected) * (1 / 3 + 1 / 2) ** 0.5  # of S = 3 that choose, each on 2
    assert row["estimate"]["standard_error"] == pytest.approx(spread)
    assert row["estimate"]["high"] - row["estimate"]["mean"] == pytest.approx(4.3027 * spread, rel=1e-4), "t, 2 df"
    assert "the interval is widened" in row["words"]


def test_a_run_that_diverged_at_a_chosen_rate_counts(tmp_path: Path) -> None:
    """Where xsa breaks at rate 4 and seed 1: the other two seeds chose 4 for it, and its rate is theirs no more."""
    broken = Cell("base", "xsa-lr_scale-4", 1)
    entry, _ = swept(tmp_path, lambda cell: {"state": "diverged"} if cell == broken else {})
    assert (entry["rows"][1]["best"], entry["rows"][1]["edge"]) == (2, False)
    row = entry["best_against_best"]
    assert row["chosen_treatment"] == {"0": 2, "1": 4, "2": 2}
    assert (row["seeds"], row["diverged_treatment"], row["diverged_baseline"]) == ([0, 2], [1], [])
    assert row["verdict"]["word"] == "diverged"
    assert "1 of 3 runs diverged" in row["sentence"]


def test_a_baseline_that_diverged_is_named(tmp_path: Path) -> None:
    """The same of standard at its best rate: the reason says whose runs they are."""
    broken = Cell("base", "standard-lr_scale-2", 1)
    entry, _ = swept(tmp_path, lambda cell: {"state": "diverged"} if cell == broken else {})
    row = entry["best_against_best"]
    assert row["diverged_baseline"] == [1]
    assert "1 of 3 runs of standard diverged" in row["sentence"]


def test_an_arm_that_breaks_everywhere_is_not_compared(tmp_path: Path) -> None:
    """No best rate, no estimate, and a sentence that says why."""
    entry, _ = swept(tmp_path, lambda cell: {"state": "diverged"} if cell.arm.startswith("xsa") else {})
    assert (entry["rows"][1]["best"], entry["rows"][1]["widest"]) == (None, None)
    row = entry["best_against_best"]
    assert (row["estimate"], row["verdict"]) == (None, None)
    assert "xsa has no rate at which all the other seeds finished" in row["sentence"]


def test_a_seed_that_has_not_ended_is_left_out(tmp_path: Path) -> None:
    """And is listed; with one seed there are no others to choose on."""
    left = {(2,): [0, 1], (1, 2): []}
    for number, (waiting, seeds) in enumerate(left.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        entry, _ = swept(folder, lambda cell, w=waiting: {"state": "waiting"} if cell.seed in w else {})
        row = entry["best_against_best"]
        assert (row["seeds"], row["unfinished"]) == (seeds, list(waiting))
    assert "it takes two whose runs have all ended" in row["sentence"]


def test_choosing_on_the_other_seeds_does_not_flatter() -> None:
    """Seven rates of one and the same truth: the best mean is too good, the value at the chosen rate is not."""
    noise, rates = random.Random(0), tuple(float(k) for k in range(7))
    seeds, naive, honest = (0, 1, 2), list[float](), list[float]()
    finished = tuple(dict.fromkeys(seeds, "finished") for _ in rates)
    for _ in range(2000):
        values = tuple({seed: noise.gauss(0, 1) for seed in seeds} for _ in rates)
        sweep = Sweep("xsa", rates, tuple(map(str, rates)), seeds, finished, values, 1)
        best = sweep.best(seeds)
        assert best is not None
        naive.append(sweep.mean(best, seeds))
        for seed in seeds:
            chosen = sweep.best([other for other in seeds if other != seed])
            assert chosen is not None
            honest.append(values[chosen][seed])
    assert statistics.fmean(naive) == pytest.approx(-1.35 / 3**0.5, abs=0.03), "the least of 7 normals"
    assert statistics.fmean(honest) == pytest.approx(0, abs=0.05)


def test_further_settings_and_points(tmp_path: Path) -> None:
    """With an optimizer as third factor: each level against the first at each setting of the other."""
    toml = TOML.replace("[controls]", "[factors.optimizer]\nmuon = {}\nadamw = { optim.kind = 'adamw' }\n[controls]")
    toml = toml.replace("[2.0, 1.0, 4.0]", "[1.0, 2.0]") + "[[points]]\nname = 'a'\n[[points]]\nname = 'b'\ndepth = 3\n"
    experiment, store = fake(tmp_path, toml, steps=9, shift=lambda cell: 0.0)
    entries = rate_sweeps(experiment, store, [])
    assert [entry["point"] for entry in entries] == ["a", "b"]
    rows = entries[1]["rows"]
    assert [row["levels"] for row in rows] == ["standard, muon", "standard, adamw", "xsa, muon", "xsa, adamw"]
    first = entries[1]["best_against_best"]
    assert [(row["treatment"], row["baseline"]) for row in (first, *first["further"])] == [
        ("xsa, muon", "standard, muon"),
        ("xsa, adamw", "standard, adamw"),
        ("standard, adamw", "standard, muon"),
        ("xsa, adamw", "xsa, muon"),
    ]
    assert len(entries[1]["equal_rate"]) == 8


def test_a_sweep_of_one_arm_and_no_sweep(tmp_path: Path) -> None:
    """One arm has a table and nothing to compare; without such a factor there is no table."""
    toml = TOML.replace('standard = { variant = "standard" }\n', "")
    entry, _ = swept(tmp_path, shift=lambda cell: 0.0, toml=toml)
    assert [row["levels"] for row in entry["rows"]] == ["all"]
    assert (entry["equal_rate"], entry["best_against_best"]) == ([], None)
    depths = HEAD + "[factors]\nmodel.depth = [2, 3]\n" + TOML.partition("lr_scale = [2.0, 1.0, 4.0]")[2]
    for folder, other in (("b", HEAD + ARMS), ("c", depths)):
        (tmp_path / folder).mkdir()
        experiment, store = fake(tmp_path / folder, other, steps=9, shift=lambda cell: 0.0)
        assert rate_sweeps(experiment, store, []) == []
