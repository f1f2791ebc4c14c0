"""The verb: what it prints and how it ends; the bank that it reads, from the package or from runs of one's own."""

from __future__ import annotations

import dataclasses
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from xsalab import calibrate
from xsalab.experiment.design import Experiment, Metric, expand, tables_of
from xsalab.experiment.reading import load_experiment
from xsalab.experiment.store import RunFolder, RunStore, write_rows
from xsalab.stats import SignFlip
from xsalab.stats import calibration as cal

ROOT = Path(__file__).resolve().parents[1]
ARMS = {"standard": 0.0, "xsa": 0.03, "null": 0.0, "positive": 0.3}


def runs(seeds: int = 12, spread: Callable[[np.random.Generator], float] = lambda rng: rng.normal()) -> calibrate.Bank:
    """A made-up bank of one point: 25 documents, arms that differ as ARMS says, runs that differ by ``spread``."""
    rng = np.random.default_rng(0)
    size = rng.integers(100, 5000, 25).astype(float)
    nats = {
        ("base", arm): {
            seed: size * (1.5 + effect + 0.005 * spread(rng) + rng.normal(0, 0.01, 25)) for seed in range(seeds)
        }
        for arm, effect in ARMS.items()
    }
    return calibrate.Bank("made-up", "standard", "xsa", nats, {"base": size})


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """One simulated world and a made-up bank."""
    monkeypatch.setattr(cal, "SIMULATED", cal.SIMULATED[:1])
    monkeypatch.setattr(calibrate, "shipped_bank", runs)


@pytest.mark.usefixtures("small")
def test_it_prints_both_tables_and_ends_with_0(xsalab: Any) -> None:
    ran = xsalab("calibrate", "--experiments", 20, "--jobs", 1)
    assert ran.code == 0, ran.out
    lines = ran.out.splitlines()
    assert lines[0].startswith("20 experiments a setting; errors in %, nominal 5. ")
    headings = [line for line in lines if line.startswith("| setting")]
    assert [heading.count("seeds") for heading in headings] == [5, 5]
    tables = [line.count("|") for line in lines if line.startswith("|")]
    assert set(tables) == {10, 9}, "as many cells in each line of a table"
    assert any(line.startswith("| bank, base: xsa - standard | 25 | interval misses the truth |") for line in lines)
    truth = [line for line in lines if line.startswith("| simulated, normal | 40 | interval misses the truth |")]
    assert [line.rpartition(" | ")[2] for line in truth] == ["3, 4 seeds: up to 25.0; 6, 8, 12 seeds: 0.0 to 25.0 |"]
    assert any("| positive control not found worse |  | 0.0 |" in line for line in lines)
    assert lines[-1].endswith(" passed, 0 failed")


@pytest.mark.usefixtures("small")
def test_a_failure_is_named_and_ends_with_1(xsalab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that calls everything significant: its rows are marked and listed with their band."""
    monkeypatch.setattr(cal, "sign_flip", lambda pairs: SignFlip(0.01, 0.01))
    ran = xsalab("calibrate", "--experiments", 20, "--jobs", 1)
    assert ran.code == 1
    failed = [line for line in ran.out.splitlines() if line.startswith("FAIL")]
    assert len(failed) == 2 * 3
    assert failed[0].startswith(
        "FAIL simulated, normal, 40 documents, 6 seeds: sign-flip p ≤ 0.05, truth 0: 20 of 20, "
    )
    assert ran.out.count("100.0 FAIL") == 6
    assert ran.out.rstrip().endswith("6 failed")
    ran = xsalab("calibrate", "--experiments", 20, "--jobs", 1, "--json")
    result = json.loads(ran.out)
    assert (ran.code, result["failed"]) == (1, 6)
    assert sum(not row["passed"] for row in result["rows"]) == 6


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_the_numbers_do_not_depend_on_the_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every chunk has a stream of its own, so another way to share the work changes nothing."""
    monkeypatch.setattr(cal, "SIMULATED", cal.SIMULATED[:0])
    shares: list[float] = []
    one = calibrate.calibrate(runs(), experiments=51, jobs=1, progress=shares.append)
    two = calibrate.calibrate(runs(), experiments=51, jobs=2)
    assert {**one, "seconds": 0} == {**two, "seconds": 0}
    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert {row["experiments"] for row in one["rows"]} == {51}


def test_a_long_tail_is_judged_from_above_alone() -> None:
    calm, _ = calibrate.bank_settings(runs(24))
    wild, _ = calibrate.bank_settings(runs(24, lambda rng: rng.standard_t(1)))
    assert {setting.rule for setting in calm} == {"two-sided"}
    assert {setting.rule for setting in wild} == {"one-sided"}


@pytest.mark.parametrize("arm", ["null", "xsa", "positive"])
def test_a_bank_with_few_pairs_is_refused(arm: str) -> None:
    few = runs()
    del few.nats["base", arm][3]  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=f"bank made-up: 11 pairs {arm} - standard at point base; 12 or more"):
        calibrate.bank_settings(few)


# --- runs of one's own ------------------------------------------------------------------------------------------------


@pytest.fixture
def finished(write_experiment: Callable[..., Path], tmp_path: Path) -> tuple[Path, Path]:
    """An experiment whose twelve seeds are in the store as if they had been run, scores made up; its out folder."""
    controls = {"null": True, "positive": {"optim.lr_scale": 0.5}, "twin": False, "timing": False}
    path = write_experiment(
        seeds=list(range(12)), controls=controls, train__batch_tokens=256, primary={"contrast": "xsa - standard"}
    )
    experiment = load_experiment(path)
    for cell in expand(experiment):
        folder = RunStore.of(experiment, tmp_path / "out").run(cell)
        folder.path.mkdir(parents=True)
        pretend(experiment, cell, folder)
    return path, tmp_path / "out"


def pretend(experiment: Experiment, cell: Any, folder: RunFolder) -> None:
    """The files of a finished run that pairing looks at."""
    config = tables_of(experiment, cell)
    shared = {"rows": "r", "corpus": "c", "evaluation": "e", "code": "k", "machine": "m", "environment": {}}
    folder.write("fingerprint", {"config": config, "start": {}, "plugins": {}, **shared})
    folder.write("status", {"state": "finished", "step": 4, "steps": 4, "val_bpb": 2.0})
    source = runs().nats["base", cell.arm][cell.seed]
    size = runs().size["base"]
    scores = enumerate(zip(source, size, strict=True))
    rows = [{"task": "bpb", "item": f"d{d}", "value": value, "weight": weight} for d, (value, weight) in scores]
    write_rows(folder.path / "scores.parquet", rows)


def test_runs_of_ones_own_are_resampled_and_come_back_as_they_were(
    finished: tuple[Path, Path], xsalab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = finished
    experiment = load_experiment(path)
    table = calibrate.collect(experiment, RunStore.of(experiment, out))
    assert table.num_rows == 4 * 12 * 25
    bank, original = calibrate.read_bank(table), runs()
    assert (bank.baseline, bank.treatment, bank.points) == ("standard", "xsa", ["base"])
    assert bank.size["base"] == pytest.approx(original.size["base"], abs=0)
    for key, found in original.nats.items():
        assert list(bank.nats[key]) == list(found)
        assert all(np.array_equal(bank.nats[key][seed], found[seed]) for seed in found)
    monkeypatch.setattr(cal, "SIMULATED", ())
    ran = xsalab("calibrate", "--bank", path, "--out", out, "--experiments", 20, "--jobs", 1, "--json")
    assert ran.code in (0, 1), ran.err
    assert {row["setting"].split(",")[0] for row in json.loads(ran.out)["rows"]} == {"bank"}


def test_an_unfinished_experiment_is_no_bank(finished: tuple[Path, Path], xsalab: Any) -> None:
    path, out = finished
    folder = RunFolder(out / "experiments" / "tiny" / "runs" / "base.null.s7")
    folder.write("status", {"state": "running", "step": 1, "steps": 4})
    xsalab("calibrate", "--bank", path, "--out", out).refused("null - standard: 1 of 12 pairs are not finished")


def test_another_metric_is_no_bank(write_experiment: Callable[..., Path], tmp_path: Path) -> None:
    experiment = load_experiment(write_experiment())
    other = dataclasses.replace(experiment, metric=Metric("accuracy", 1.0, False, "items"))
    with pytest.raises(ValueError, match="a bank holds nats of documents, this experiment measures accuracy"):
        calibrate.collect(other, RunStore.of(other, tmp_path / "out"))


def test_another_table_is_no_bank() -> None:
    with pytest.raises(ValueError, match="not a bank"):
        calibrate.read_bank(pa.table({"point": ["a"]}))


def test_the_script_writes_the_same_table(
    finished: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = finished
    target = tmp_path / "bank.parquet"
    monkeypatch.setattr(sys, "argv", ["bank.py", str(path), "--out", str(out), str(target)])
    runpy.run_path(str(ROOT / "bench" / "bank.py"), run_name="__main__")
    assert "base, positive: 12 runs × 25 documents" in capsys.readouterr().out
    experiment = load_experiment(path)
    assert pq.read_table(target).equals(calibrate.collect(experiment, RunStore.of(experiment, out)))


# --- the bank that ships ----------------------------------------------------------------------------------------------


def test_the_shipped_bank_is_what_its_recipe_says() -> None:
    """Complete, small, of the declared seeds, points and arms, and finite."""
    experiment = load_experiment(ROOT / "experiments" / "bank.toml")
    bank = calibrate.shipped_bank()
    assert (bank.name, bank.baseline, bank.treatment) == ("bank", "standard", "xsa")
    assert {(p, a, s) for (p, a), found in bank.nats.items() for s in found} == {
        (cell.point, cell.arm, cell.seed) for cell in expand(experiment)
    }
    assert all(np.isfinite(nats).all() and (nats > 0).all() for found in bank.nats.values() for nats in found.values())
    assert (ROOT / "src" / "xsalab" / calibrate.BANK).stat().st_size < 2_000_000


def test_the_positive_control_is_found_in_95_of_100_plasmode_experiments() -> None:
    """At the planned 4 seeds, at every point of the shipped bank."""
    _, controls = calibrate.bank_settings(calibrate.shipped_bank())
    assert [control.documents for control in controls] == [90, 90]
    for control in controls:
        missed = cal.tally_control(control, 300, np.random.default_rng(0))[cal.MISSED, cal.PLANNED]
        assert missed <= 0.05 * 300, control.name


def test_help_has_an_example(xsalab: Any) -> None:
    ran = xsalab("calibrate", "--help")
    assert ran.code == 0
    assert "Example: xsalab calibrate " in ran.out
