"""Averages undone, offsets found or refused, and the verb that says which."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.signal import lfilter

from xsalab.align import Match, Smoothing, align, find_offset_and_smoothing, undo
from xsalab.interop.logs import Log, Series, read_log


def ema(values: np.ndarray, beta: float, corrected: bool, late: int = 0) -> np.ndarray:
    """The definition, by scipy's filter. late: by how much the exponent of the correction is off (F123)."""
    raw = np.asarray(values, dtype=np.float64)
    start = 0.0 if corrected else float(raw[0])
    average = lfilter([1 - beta], [1, -beta], raw, zi=[beta * start])[0]
    return average / (1 - beta ** (np.arange(len(raw)) + 1.0 + late)) if corrected else average


def losses(n: int = 160, seed: int = 0) -> np.ndarray:
    """A falling curve with noise between batches, as training losses are."""
    draw = np.random.default_rng(seed)
    return 3 + 4 * np.exp(-np.arange(n) / 40) + draw.normal(0, 0.05, n)


def series(values: np.ndarray, first: int = 0, keep: Any = slice(None)) -> Series:
    return Series((np.arange(len(values)) + first)[keep], values[keep])


def log(tmp_path: Path, steps: Any, values: Any, name: str = "a.csv", metric: str = "loss") -> Log:
    path = tmp_path / name
    path.write_text(f"step,{metric}\n" + "".join(f"{s},{v!r}\n" for s, v in zip(steps, values, strict=True)))
    return read_log(path)


# ---------------------------------------------------------------------------------------------- undoing


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.99])
def test_an_average_is_undone_and_rounding_comes_back_no_larger_than_is_said(beta: float, corrected: bool) -> None:
    raw = losses(300)
    smoothing = Smoothing(beta, 0 if corrected else None)
    logged = ema(raw, beta, corrected)
    np.testing.assert_allclose(undo(series(logged), smoothing).values, raw, atol=1e-12 * smoothing.amplification)
    error = float(np.abs(undo(series(np.round(logged, 4)), smoothing).values - raw).max())
    assert 0.2 * 0.5e-4 * smoothing.amplification < error <= 0.5e-4 * smoothing.amplification * 1.0001
    assert Smoothing(0.9).amplification == pytest.approx(19)


def test_a_constant_stays_itself_from_the_first_step() -> None:
    """F123: with the exponent off by one, the first value of a constant 5 would be 5 (1 − β)/(1 − β²)."""
    five = np.full(20, 5.0)
    for origin in (0, None):
        np.testing.assert_allclose(undo(series(five), Smoothing(0.9, origin)).values, five, rtol=1e-13)
    wrong = ema(five, 0.9, True, late=1)
    assert wrong[0] == pytest.approx(5 * 0.1 / 0.19)
    np.testing.assert_allclose(undo(series(wrong, 1), Smoothing(0.9, 0, first=1)).values, five, rtol=1e-13)


@pytest.mark.parametrize("beta", [1.0, -0.1, math.nan])
def test_an_impossible_beta_is_refused(beta: float) -> None:
    with pytest.raises(ValueError, match="beta = "):
        Smoothing(beta)


def test_after_a_gap_the_raw_value_is_left_out_and_not_guessed() -> None:
    raw = losses(30)
    keep = np.array([i for i in range(30) if i not in (0, 10, 11)])
    for origin in (0, None):
        undone = undo(series(ema(raw, 0.9, origin == 0), keep=keep), Smoothing(0.9, origin))
        assert undone.steps.tolist() == [s for s in range(30) if s not in (0, 1, 10, 11, 12)]
        np.testing.assert_allclose(undone.values, raw[undone.steps], atol=1e-11)


# ---------------------------------------------------------------------------------------------- finding


def found_again(match: Match, logged: Series, raw: np.ndarray, first: int, offset: int, beta: float) -> Series:
    """The planted numbers, and the raw values at the steps that can be known."""
    assert match.offset == offset
    assert match.smoothing.beta == pytest.approx(beta, abs=1e-9)
    undone = undo(logged, match.smoothing)
    expected = raw[undone.steps - offset - first]
    np.testing.assert_allclose(undone.values, expected, atol=1e-11 * match.smoothing.amplification, rtol=0)
    return undone


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.98])
@pytest.mark.parametrize("offset", [0, 7, -12])
def test_a_planted_offset_and_average_are_found_exactly(offset: int, beta: float, corrected: bool) -> None:
    raw = losses()
    logged = series(ema(raw, beta, corrected), 20 + offset)
    match = find_offset_and_smoothing(logged, series(raw, 20))
    undone = found_again(match, logged, raw, 20, offset, beta)
    assert len(undone) == len(raw)
    assert match.smoothing.origin == (20 + offset if corrected and beta else None)


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize(("offset", "beta"), [(5, 0.9), (-9, 0.95), (0, 0.5)])
def test_missing_steps_and_other_first_steps_change_nothing(offset: int, beta: float, corrected: bool) -> None:
    """Both logs lack a tenth of their steps; one begins 9, the other 14 steps into the run."""
    raw, draw = losses(200), np.random.default_rng(1)
    keeps = [np.sort(draw.choice(np.arange(first, 200), 170, replace=False)) for first in (9, 14)]
    logged = series(ema(raw, beta, corrected), 30 + offset, keeps[0])
    match = find_offset_and_smoothing(logged, series(raw, 30, keeps[1]))
    undone = found_again(match, logged, raw, 30, offset, beta)
    assert len(undone) > 130


def test_logs_of_every_tenth_step_are_matched_where_they_are_raw_and_else_refused() -> None:
    """An average over steps that were not logged cannot be undone, and the log may not be taken for another run's."""
    raw = losses(600)
    match = find_offset_and_smoothing(series(raw, 40, slice(None, None, 10)), series(raw))
    assert (match.offset, match.smoothing.beta) == (40, 0.0)
    with pytest.raises(ValueError, match="every 10 steps: residual"):
        find_offset_and_smoothing(series(ema(raw, 0.9, True), 3, slice(None, None, 10)), series(raw))
    of_logged = Series(np.arange(0, 600, 10), ema(raw[::10], 0.9, True))
    with pytest.raises(ValueError, match="every 10 steps: residual"):
        find_offset_and_smoothing(of_logged, series(raw))


def test_nothing_is_undone_where_the_form_is_not_known() -> None:
    """A reference from step 60 on cannot tell the two forms apart; before that their raw values differ."""
    raw = losses()
    logged = series(ema(raw, 0.5, True))
    match = find_offset_and_smoothing(logged, series(raw, keep=slice(60, None)))
    assert match.smoothing.since == 60
    assert found_again(match, logged, raw, 0, 0, 0.5).steps[0] == 60


def test_a_correction_off_by_one_step_is_found_as_such() -> None:
    """F123, as a log from a faulty trainer shows it."""
    raw = losses()
    logged = series(ema(raw, 0.9, True, late=1), 1)
    match = find_offset_and_smoothing(logged, series(raw))
    assert (match.offset, match.smoothing.first, match.smoothing.origin) == (1, 1, 0)
    assert "begins at 2" in str(match.smoothing)
    found_again(match, logged, raw, 0, 1, 0.9)


def test_printed_digits_are_enough() -> None:
    raw = losses(400)
    match = find_offset_and_smoothing(series(np.round(ema(raw, 0.9, True), 6), 4), series(raw))
    assert match.offset == 4
    assert match.smoothing.beta == pytest.approx(0.9, abs=1e-4)
    assert match.residual < 1e-6 < 1e-3 < (match.runner_up or 0)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("beta", [0.0, 0.9, 0.99])
def test_other_batches_on_the_same_curve_are_refused(seed: int, beta: float) -> None:
    """The falls agree, the noise does not: an offset would be found in anything."""
    with pytest.raises(ValueError, match=r"not the same batches: residual 0\.\d+"):
        find_offset_and_smoothing(series(ema(losses(seed=seed), beta, True)), series(losses(seed=seed + 100)))


def test_too_few_steps_and_curves_without_noise_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 9"):
        find_offset_and_smoothing(series(losses(5)), series(losses()))
    even = series(np.linspace(7, 3, 50))
    with pytest.raises(ValueError, match="nothing to tell it by"):
        find_offset_and_smoothing(even, even)
    apart = series(losses(20), keep=slice(0, 10)), Series(np.arange(0, 400, 40), losses(10))
    with pytest.raises(ValueError, match=r"not the same batches|in common"):
        find_offset_and_smoothing(*apart)


def test_random_plants_are_all_found_and_random_pairs_all_refused() -> None:
    draw = np.random.default_rng(2)
    for trial in range(8):
        n, offset = int(draw.integers(50, 300)), int(draw.integers(-25, 25))
        beta, corrected = float(draw.choice([0.0, 0.5, 0.9, 0.95, 0.99])), bool(draw.integers(2))
        raw = losses(n, seed=trial)
        keep = np.sort(draw.choice(n, size=9 * n // 10, replace=False))
        logged = series(ema(raw, beta, corrected), 30 + offset, keep)
        reference = series(raw, 30, slice(int(draw.integers(0, n // 4)), None))
        found_again(find_offset_and_smoothing(logged, reference), logged, raw, 30, offset, beta)
        with pytest.raises(ValueError, match="not the same batches"):
            find_offset_and_smoothing(logged, series(losses(n, seed=1000 + trial), 30))


# ---------------------------------------------------------------------------------------------- whole logs


def test_the_real_console_is_undone_and_averaged_back_to_what_it_printed(shared_data: Path) -> None:
    """F131: and it is said that the loss is one micro-batch's."""
    aligned = align(read_log(shared_data / "nanochat_d4" / "console.log"))
    assert (aligned.source, aligned.offset, aligned.metric) == ("format", 0, "train/loss")
    assert aligned.train is not None
    assert aligned.train.steps.tolist() == list(range(60))
    assert np.isfinite(aligned.train.values).all()
    again = ema(aligned.train.values, 0.9, True)
    assert float(np.abs(again - aligned.logged.values).max()) < 0.5e-6
    assert np.std(np.diff(aligned.train.values)) > 2 * np.std(np.diff(aligned.logged.values))
    assert aligned.val is not None
    assert aligned.val.steps.tolist() == [0, 20, 40, 60]
    assert any("last of 2 micro-batches of rank 0" in text for text in aligned.statements)
    assert any("= 9.5e-06" in text for text in aligned.statements)


def test_fine_tunings_console_is_brought_to_step_0(tmp_path: Path) -> None:
    """nanochat's chat_sft counts the step before it corrects: step 1 is batch 0, and its exponent begins at 2."""
    raw = losses(20)
    values = ema(raw, 0.9, True, late=1)
    text = "".join(f"step {s + 1:05d} (1.00%) | loss: {v:.9f} | lrm: 1.00\n" for s, v in enumerate(values))
    (tmp_path / "sft.log").write_text(text)
    aligned = align(read_log(tmp_path / "sft.log"))
    assert aligned.train is not None
    assert aligned.train.steps.tolist() == list(range(20))
    np.testing.assert_allclose(aligned.train.values, raw, atol=1e-7)


def test_a_log_that_says_nothing_is_unknown_and_gets_no_raw_column(tmp_path: Path) -> None:
    aligned = align(log(tmp_path, range(20), losses(20).tolist()))
    assert (aligned.source, aligned.train, aligned.offset) == ("unknown", None, None)
    assert "give --beta and --form, or --reference" in aligned.statements[0]


def test_a_tracker_that_holds_every_hundredth_average_cannot_be_undone(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    rows = [{"_step": i, "step": 100 * i, "train/loss": 7.0 - i / 10, "train/lrm": 1.0} for i in range(9)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    aligned = align(read_log(path))
    assert aligned.train is None
    with pytest.raises(ValueError, match="no two steps that follow each other"):
        align(read_log(path), beta=0.9, form="corrected")


def test_a_given_average_is_undone_from_step_one_too(tmp_path: Path) -> None:
    raw = losses(30)
    for first, form in ((0, "corrected"), (1, "corrected"), (1, "plain")):
        values = ema(raw, 0.8, form == "corrected").tolist()
        aligned = align(log(tmp_path, range(first, 30 + first), values), beta=0.8, form=form)
        assert aligned.train is not None
        np.testing.assert_allclose(aligned.train.values, raw, atol=1e-12)


def test_a_run_of_xsalabs_own_is_on_the_convention_already(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    rows = [{"step": s, "loss": 7.0 - s / 10} for s in range(5)] + [{"step": 5, "val_bpb": 2.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    aligned = align(read_log(tmp_path))
    assert aligned.train is not None
    assert (aligned.source, aligned.train.values.tolist()) == ("format", [7.0, 6.9, 6.8, 6.7, 6.6])


# ---------------------------------------------------------------------------------------------- the verb


def test_the_verb_finds_and_writes_both_logs_on_one_convention(tmp_path: Path, xsalab: Any) -> None:
    raw = losses(80)
    log(tmp_path, range(5, 85), ema(raw, 0.9, True).tolist(), "smooth.csv")
    log(tmp_path, range(80), raw.tolist(), "raw.csv")
    out = tmp_path / "aligned.csv"
    ran = xsalab("align", tmp_path / "smooth.csv", "--reference", tmp_path / "raw.csv", "--out", out)
    assert ran.code == 0
    assert "batch s is step s +5 of the log" in ran.out
    assert "β = 0.9, bias-corrected" in ran.out
    with out.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["step", "train/loss", "reference", "loss as logged"]
    assert [int(row["step"]) for row in rows] == list(range(80))
    for row, value in zip(rows, raw.tolist(), strict=True):
        assert float(row["train/loss"]) == pytest.approx(value, abs=1e-12)
        assert float(row["reference"]) == value
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_the_verb_prints_one_json_value(tmp_path: Path, xsalab: Any) -> None:
    log(tmp_path, range(20), losses(20).tolist())
    ran = xsalab("align", tmp_path / "a.csv", "--json")
    content = json.loads(ran.out)
    assert (content["source"], content["train"], content["kind"]) == ("unknown", None, "csv")
    assert content["logged"]["steps"] == list(range(20))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--beta", 0.9), ("give both",)),
        (("--beta", 1.5, "--form", "plain"), ("beta = 1.5",)),
        (("--form", "other", "--beta", 0.5), ("corrected or plain",)),
        (("--metric", "accuracy"), ("no metric 'accuracy'", "loss")),
        (("--run", "b"), ("no run 'b'", "a.csv")),
    ],
)
def test_mistakes_are_one_message(
    tmp_path: Path, xsalab: Any, options: tuple[Any, ...], words: tuple[str, ...]
) -> None:
    log(tmp_path, range(20), losses(20).tolist())
    xsalab("align", tmp_path / "a.csv", *options).refused(*words)


def test_other_batches_are_refused_by_the_verb_with_both_names(tmp_path: Path, xsalab: Any) -> None:
    log(tmp_path, range(60), losses(60).tolist(), "one.csv")
    log(tmp_path, range(60), losses(60, seed=9).tolist(), "two.csv")
    ran = xsalab("align", tmp_path / "one.csv", "--reference", tmp_path / "two.csv", "--out", tmp_path / "x.csv")
    ran.refused("one.csv", "two.csv", "not the same batches: residual")
    assert not (tmp_path / "x.csv").exists()


def test_nothing_shown_is_ever_not_a_number(tmp_path: Path, xsalab: Any) -> None:
    values = losses(40).tolist()
    values[7], values[20] = math.nan, math.inf
    log(tmp_path, range(40), values)
    for more in ((), ("--beta", 0.9, "--form", "corrected")):
        ran = xsalab("align", tmp_path / "a.csv", *more, "--json")
        json.loads(ran.out, parse_constant=lambda text: pytest.fail(text))
