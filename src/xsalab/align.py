"""Two logs on one convention: which step a value belongs to, and an exponential average undone exactly.

The convention (docs/statistics.md): train/loss[s] is the loss of batch s with the weights after s updates, s from 0;
a validation value at s is of the weights after s updates.

Averages, with β in [0, 1) and x the raw values from t = 0:

    corrected   m_t = β m_{t−1} + (1 − β) x_t with m_{−1} = 0;   logged: m_t / (1 − β^(t+1+k)), k = 0 where it is right
    plain       m_t = β m_{t−1} + (1 − β) x_t with m_0 = x_0;    logged: m_t

Both are linear in x, so x follows from two neighbouring logged values alone. A rounding of the logged values by ε comes
back as at most ε (1 + β)/(1 − β): 19 ε for β = 0.9.

Where two logs saw the same batches, step offset and β are found from them. The offsets come from the cross-correlation
of the log's differences with the reference; for each the β is sought that solves, over all neighbours a, b = a + k of
the log,

    c_b y_b = β^k c_a y_a + (1 − β) Σ_{i<k} β^i x_{b−i}        c = 1 for the plain form, 1 − β^(t+1) for the corrected

An offset is believed when this holds to rounding, or to a twentieth of the noise between batches, and twice as well as
at any other offset. Else the two logs did not see the same batches, and nothing is claimed.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, signal  # pyright: ignore[reportMissingTypeStubs]

from .files import write_atomic
from .interop.logs import ALIASES, SHAPES, Log, Series

_optimize: Any = optimize  # scipy comes without types
_signal: Any = signal
Floats = NDArray[np.float64]
Form = Literal["none", "plain", "corrected"]

LEAST_EQUATIONS = 8  # below this an offset is a guess
CANDIDATES = 5  # offsets that are tried for each form, beside the smallest ones
CLOSE = 0.05  # of the noise between batches: the residual at which batches are still taken to be the same
FEW_LAGS = 5000  # as many are all tried where the log holds every k-th step only
_BETAS = 1 - np.geomspace(1, 5e-4, 24)


def ema(values: Sequence[float] | Floats, beta: float, corrected: bool, *, late: int = 0) -> Floats:
    """The exponential average of (n,) values as logged; the two forms are those at the head of this file.

    late: k of the corrected form, by how much the exponent of the correction is off (F123). ValueError for β outside
    [0, 1).
    """
    raw = np.asarray(values, dtype=np.float64)
    _check_beta(beta)
    found = np.empty_like(raw)
    average = 0.0 if corrected or not len(raw) else float(raw[0])
    for t, value in enumerate(raw):
        average = beta * average + (1 - beta) * float(value)
        found[t] = average
    return found / _correction(np.arange(len(raw)) + late, beta) if corrected else found


def undo_ema(values: Sequence[float] | Floats, beta: float, corrected: bool, *, late: int = 0) -> Floats:
    """The raw (n,) values of an exponential average over every step from its first: the inverse of ``ema``.

    An error of the logged values, their rounding for instance, is amplified by at most ``amplification(beta)``.
    ValueError for β outside [0, 1).
    """
    logged = np.asarray(values, dtype=np.float64)
    _check_beta(beta)
    if not len(logged):
        return logged.copy()
    if corrected:
        weighted = logged * _correction(np.arange(len(logged)) + late, beta)
        before = np.concatenate([[0.0], weighted[:-1]])
    else:
        weighted, before = logged, np.concatenate([logged[:1], logged[:-1]])
    return (weighted - beta * before) / (1 - beta)


def amplification(beta: float) -> float:
    """By how much undoing the average with β can enlarge an error of the logged values: (1 + β)/(1 − β)."""
    _check_beta(beta)
    return (1 + beta) / (1 - beta)


def _check_beta(beta: float) -> None:
    if not 0 <= beta < 1:
        raise ValueError(f"beta = {beta}: must be at least 0 and below 1")


def _correction(t: NDArray[Any], beta: float) -> Floats:
    """1 − β^(t+1)"""
    return 1 - np.power(beta, np.asarray(t, dtype=np.float64) + 1)


@dataclass(frozen=True)
class Smoothing:
    """How a series was averaged, in steps of its log.

    first: the step of the run's first batch; None where the log does not reach back to it, and then its earliest raw
    value is unknown. origin: the step at which the exponent of the correction is 1; equal to ``first`` where the
    correction is right. every: steps from one update of the average to the next. since: the step before which the
    form, and so the raw values, are not known; None where they are known throughout.
    """

    beta: float = 0.0
    form: Form = "none"
    first: int | None = 0
    origin: int = 0
    every: int = 1
    since: int | None = None

    def __str__(self) -> str:
        if self.form == "none":
            return "not smoothed"
        words = "bias-corrected" if self.form == "corrected" else "started at the first value, not corrected"
        if self.form == "corrected" and self.first is not None and self.first != self.origin:
            exponent = (self.first - self.origin) // self.every + 1
            words += f" with an exponent that begins at {exponent} and not at 1"
        return f"exponential average, β = {self.beta:.9g}, {words}"


NANOCHAT = Smoothing(0.9, "corrected")
NANOCHAT_SFT = Smoothing(0.9, "corrected", first=1, origin=0)


def undo(series: Series, smoothing: Smoothing) -> Series:
    """The raw values where they can be known: at the first step, and at those whose step before was logged too.

    Raises ValueError for β outside [0, 1) and for steps before the average's own start.
    """
    if smoothing.form == "none" or not len(series):
        return series
    beta, steps, values = smoothing.beta, series.steps, series.values
    _check_beta(beta)
    if smoothing.form == "corrected":
        if steps[0] < smoothing.origin:
            raise ValueError(f"step {steps[0]} lies before the average's own start at step {smoothing.origin}")
        values = values * _correction((steps - smoothing.origin) // smoothing.every, beta)
    known = np.concatenate([[False], np.diff(steps) == smoothing.every])
    before = np.concatenate([[0.0], values[:-1]])
    if steps[0] == smoothing.first:
        known[0] = True
        before[0] = 0.0 if smoothing.form == "corrected" else values[0]
    if smoothing.since is not None:
        known &= steps >= smoothing.since
    return Series(steps[known], ((values - beta * before) / (1 - beta))[known])


@dataclass(frozen=True)
class Match:
    """What ``find_offset_and_smoothing`` found.

    offset: the log's number of a batch minus the reference's. residual: root mean square of what the equations leave,
    in units of the logged values. noise: the same of the logged values' own changes from step to step. runner_up: the
    smallest residual at another offset, None where no other could be tried. also: another form that explains the
    series as well, "" where none.
    """

    offset: int
    smoothing: Smoothing
    residual: float
    noise: float
    runner_up: float | None
    equations: int
    also: str = ""


def find_offset_and_smoothing(series: Series, reference: Series) -> Match:
    """How ``series`` came of ``reference``, the raw losses of the same batches: by which offset and which average.

    Raises ValueError where they share too few steps, where the series has no noise to be told by, and, naming the
    residual, where no offset and no β explains it: then they did not see the same batches.
    """
    if min(len(series), len(reference)) <= LEAST_EQUATIONS:
        raise ValueError(f"{len(series)} and {len(reference)} values: to find an offset at least {LEAST_EQUATIONS + 1}")
    unit = int(np.gcd.reduce(np.concatenate([np.diff(series.steps), np.diff(reference.steps)])))
    begin, shift = int(series.steps[0]), int(series.steps[0] - reference.steps[0])
    y, x = (Series((s.steps - s.steps[0]) // unit, s.values) for s in (series, reference))
    noise = math.sqrt(float((np.diff(y.values, 2) ** 2).mean()) / 3)
    rounding = _resolution(y.values) / 2
    if noise <= 4 * rounding:
        raise ValueError("the log changes so evenly from step to step that any offset fits: nothing to tell it by")
    equations: list[_Equations] = []
    for lag in _candidate_lags(y, x, [(aim - shift) // unit for aim in (0, unit, -unit)]):
        offset = shift + lag * unit
        origins = dict.fromkeys((offset, offset - unit, 0, 1, begin, begin - unit))
        starts = [(origin - begin) // unit for origin in origins if origin <= begin and (origin - begin) % unit == 0]
        if (found := _equations(y, x, lag, starts)).count >= LEAST_EQUATIONS:
            equations.append(found)
    if not equations:
        raise ValueError(f"fewer than {LEAST_EQUATIONS} steps in common at every offset: nothing to compare them by")
    equations.sort(key=lambda entry: entry.guess)
    fits = [(shift + entry.lag * unit, entry.solve()) for entry in equations[:3]]
    fits.sort(key=lambda entry: entry[1].residual)
    offset, fit = fits[0]
    runner_up = fits[1][1].residual if len(fits) > 1 else None
    bound = max(CLOSE * noise, 2 * rounding)
    if fit.residual > bound or (runner_up is not None and fit.residual > runner_up / 2):
        raise ValueError(
            f"not the same batches: residual {fit.residual:.2g} at the best offset {offset} and β = {fit.beta:.3g}; "
            f"the log changes by {noise:.2g} from step to step, and the same batches would leave at most {bound:.2g}"
        )
    since = None if fit.since is None else begin + fit.since * unit
    smoothing = Smoothing(fit.beta, fit.form, begin, begin + fit.start * unit, unit, since)
    raw, known = undo(series, smoothing), reference.at(begin - offset)
    close = (4 * fit.residual + 4 * rounding) * amplification(fit.beta)
    if since is not None or known is None or abs(raw.values[0] - known) > close:
        smoothing = replace(smoothing, first=None)  # the average did not begin where the log does, for all we know
    return Match(offset, smoothing, fit.residual, noise, runner_up, fit.equations, fit.also)


@dataclass(frozen=True)
class _Fit:
    """The best average at one offset. start: the origin of the correction, in units from the log's first step."""

    residual: float
    beta: float
    form: Form
    start: int
    equations: int
    also: str = ""
    since: int | None = None  # in units: the first step that the equations reach, where several forms satisfy them


@dataclass(frozen=True, eq=False)
class _Equations:
    """What must hold at one lag. groups: k; y_a; y_b; step of a; (m, k) batches b, b − 1, … of the reference."""

    lag: int
    groups: tuple[tuple[int, Floats, Floats, NDArray[Any], Floats], ...]
    starts: tuple[int, ...]
    count: int

    def left(self, beta: float, start: float | None) -> Floats:
        """What each equation leaves, in units of the logged values. start: origin of the correction; None: plain."""
        parts: list[Floats] = []
        for k, a, b, step, window in self.groups:
            mixed = (1 - beta) * (window @ np.power(beta, np.arange(k)))
            if start is None:
                parts.append(b - beta**k * a - mixed)
            else:
                before, after = (_correction(at - start, beta) for at in (step, step + k))
                parts.append(b - (beta**k * before * a + mixed) / after)
        return np.concatenate(parts)

    def size(self, beta: float, start: int | None) -> float:
        """Root mean square of ``left``."""
        return math.sqrt(float((self.left(beta, start) ** 2).mean()))

    @cached_property
    def guesses(self) -> dict[int | None, tuple[float, float]]:
        """Of each form, the best of a few β: (size, β)."""
        return {start: min((self.size(float(beta), start), float(beta)) for beta in _BETAS)
                for start in (None, *self.starts)}  # fmt: skip

    @property
    def guess(self) -> float:
        return min(self.guesses.values())[0]

    def solve(self) -> _Fit:
        """The β and the form that leave least."""
        found: list[tuple[float, float, Form, int]] = []
        for start, (_, beta) in self.guesses.items():
            beta = self._beta(start, beta)
            found.append((self.size(beta, start), beta, "plain" if start is None else "corrected", start or 0))
        largest = max(float(np.abs(b).max()) for _, _, b, _, _ in self.groups)
        changes = math.sqrt(float(np.mean(np.concatenate([b - a for _, a, b, _, _ in self.groups]) ** 2)))
        near = 1e-9 * largest < min(found)[0] < changes / 2  # not exact, and yet more than chance
        if near and (start := self._start(found[0][1])) is not None:
            beta = self._beta(start, found[0][1])
            found.append((self.size(beta, start), beta, "corrected", start))
        same = max(1.01 * min(found)[0], 1e-13 * largest)  # what lies below differs by rounding
        if (residual := self.size(0.0, None)) <= same:
            return _Fit(residual, 0.0, "none", 0, self.count)
        good = [entry for entry in found if entry[0] <= same]
        residual, beta, form, start = good[0]
        # 1 − c at the log's first step: where it is alike, or nothing, for all of them, so is what they undo.
        weights = [beta ** (1 - start) if form == "corrected" else 0.0 for _, beta, form, start in good]
        if max(weights) - min(weights) < 1e-9:
            return _Fit(residual, beta, form, start, self.count)
        since = min(int(step.min()) + k for k, _, _, step, _ in self.groups)
        also = "bias-corrected" if form == "plain" else "bias-corrected from another step"
        return _Fit(residual, beta, form, start, self.count, also, since)

    def _beta(self, start: int | None, guess: float) -> float:
        """The β that leaves least, near a guess."""
        solved = _optimize.least_squares(
            lambda b: self.left(float(b[0]), start), [max(guess, 1e-3)], bounds=([0.0], [1 - 1e-9]),
            xtol=1e-15, ftol=1e-15, gtol=1e-15, x_scale=1e-2,
        )  # fmt: skip
        return float(solved.x[0])

    def _start(self, guess: float) -> int | None:
        """The origin of a run that began before either log, found with β; None where there is none."""
        ends: list[Any] = []
        for start in (-3.0, -20.0, -100.0):
            ends.append(
                _optimize.least_squares(
                    lambda at: self.left(float(at[0]), float(at[1])), [min(max(guess, 0.1), 0.999), start],
                    bounds=([0.0, -1e4], [1 - 1e-9, 0.0]), x_scale=[1e-2, 1.0],
                )
            )  # fmt: skip
        best = min(ends, key=lambda end: end.cost)
        start = round(float(best.x[1]))
        return start if -1e4 < start < 0 and start not in self.starts else None


def _equations(y: Series, x: Series, lag: int, starts: Sequence[int]) -> _Equations:
    """The neighbours of y all of whose batches are in x.

    y, x: steps from 0 in units; the batch of y's step u is that of x's step u − lag. starts: origins to try.
    """
    dense = np.full(int(x.steps[-1]) + 1, np.nan)
    dense[x.steps] = x.values
    groups: list[tuple[int, Floats, Floats, NDArray[Any], Floats]] = []
    gaps = np.diff(y.steps)
    for k in np.unique(gaps):
        places = np.flatnonzero(gaps == k) + 1
        ends = y.steps[places] - lag
        places = places[(ends - k + 1 >= 0) & (ends < len(dense))]
        window = dense[(y.steps[places] - lag)[:, None] - np.arange(k)]
        whole = np.isfinite(window).all(axis=1)
        places, window = places[whole], window[whole]
        if len(places):
            groups.append((int(k), y.values[places - 1], y.values[places], y.steps[places - 1], window))
    return _Equations(lag, tuple(groups), tuple(starts), sum(len(group[1]) for group in groups))


def _candidate_lags(y: Series, x: Series, extra: Sequence[int]) -> list[int]:
    """Lags at which y's changes correlate best with x, their neighbours, and the ones in ``extra``.

    An average moves by a share of the distance to the new value, so the noise between batches is in its differences.
    Neighbours' means are taken off both, which leaves little of the curves' common fall, and the few large values cut.
    """
    lags = np.asarray(_signal.correlation_lags(int(y.steps[-1]) + 1, int(x.steps[-1]) + 1, mode="full"))
    if len(lags) <= FEW_LAGS and int(np.diff(y.steps).min()) > 1:  # each value is of many batches: little correlates
        every = [_equations(y, x, int(lag), (0,)) for lag in lags]
        every = [entry for entry in every if entry.count >= LEAST_EQUATIONS]
        best = [entry.lag for entry in sorted(every, key=lambda entry: entry.guess)[:CANDIDATES]]
    else:
        noise = _noise(y, np.diff(y.values)), _noise(x, x.values)
        strength = np.asarray(_signal.correlate(*noise, mode="full", method="fft"))
        best = [int(lag) for lag in lags[np.argsort(strength)[::-1][:CANDIDATES]]]
    return list(dict.fromkeys((*best, *(lag + side for lag in best[:1] for side in (1, -1)), *extra)))


def _noise(series: Series, values: Floats) -> Floats:
    """(last step + 1,) values of the last ``len(values)`` steps less the mean of both neighbours; 0 where unknown."""
    steps = series.steps[-len(values) :]
    stride = int(np.diff(series.steps).min())
    regular = (steps[1:-1] - steps[:-2] == stride) & (steps[2:] - steps[1:-1] == stride)
    if len(values) < len(series):  # differences: the step before them counts too
        regular &= steps[:-2] - series.steps[:-3] == stride
    found = np.where(regular, values[1:-1] - (values[:-2] + values[2:]) / 2, 0.0)
    most = 4 * float(np.median(np.abs(found[regular]))) if regular.any() else 0.0
    dense = np.zeros(int(series.steps[-1]) + 1)
    dense[steps[1:-1]] = np.clip(found, -most, most) if most else found
    return dense


def _resolution(values: Floats) -> float:
    """The spacing of the numbers as they were written: 10^−d for d decimals, or that of float32 or float64."""
    largest = float(np.abs(values).max())
    for digits in range(11):
        if np.allclose(np.round(values, digits), values, rtol=4e-16, atol=0):
            return 10.0**-digits
    if (values.astype(np.float32) == values).all():
        return largest * 2.0**-23
    return largest * 2.0**-52


@dataclass(frozen=True, eq=False)
class Alignment:
    """A log on xsalab's convention, with what is known of how it got there.

    logged: the metric at the log's own steps. train: raw, on the convention; None where that is unknown. val: the
    log's bits per byte, None where it has none. source: where the convention comes from: "format", "reference",
    "given" or "unknown". reference: the reference's own raw values, on the convention. statements: all of it in words.
    """

    log: Log
    metric: str
    logged: Series
    train: Series | None
    val: Series | None
    offset: int | None
    smoothing: Smoothing | None
    source: str
    statements: tuple[str, ...]
    match: Match | None = None
    reference: Series | None = None


def known_convention(log: Log, name: str) -> tuple[int, Smoothing] | None:
    """Offset and smoothing of a series of a format that is known; None where the log does not tell.

    offset: the step that the log gives to the first batch. Of nanochat: scripts base_train and chat_sft, July 2026,
    where the console's loss is averaged with β = 0.9; chat_sft counts the step before it corrects.
    """
    writer = log.facts.get("writer")
    if writer == "xsalab" or (log.kind == "nanochat" and name != "train/loss"):
        return 0, Smoothing()
    if writer == "nanochat base_train":
        return 0, NANOCHAT
    if writer == "nanochat chat_sft":
        return 1, NANOCHAT_SFT
    return None


def align(
    log: Log, *, reference: Log | None = None, beta: float | None = None, form: str = "", metric: str = "loss"
) -> Alignment:
    """One log on xsalab's convention: by its format, by a reference that saw the same batches, or by β and form given.

    Raises ValueError where the metric is not there, the reference did not see the same batches, or the average that
    was given cannot be undone from what is logged.
    """
    if form not in ("", "corrected", "plain") or (beta is None) != (form == ""):
        raise ValueError(f"--beta {beta} --form {form or None}: give both, the form as corrected or plain")
    if reference is not None and beta is not None:
        raise ValueError("--beta and --reference: the reference tells β; give one of the two")
    logged, name = log.pick(metric), str(log.name_of(metric))
    if not len(logged):
        raise ValueError(f"{log.path}: {name}: none of its values is finite")
    known = known_convention(log, name)
    said: list[str] = []
    match: Match | None = None
    raw_reference: Series | None = None
    offset: int | None = None
    smoothing: Smoothing | None = None
    if reference is not None:
        own = align(reference, metric=metric)
        raw_reference = own.train or own.logged
        if own.train is None:
            said.append(f"{reference.path}: taken as raw and on xsalab's convention, which it does not say itself")
        try:
            match = find_offset_and_smoothing(logged, raw_reference)
        except ValueError as error:
            raise ValueError(f"{log.path} against {reference.path}: {error}") from None
        source, offset, smoothing = "reference", match.offset, match.smoothing
        said += _of_match(match)
    elif beta is not None:
        source, offset = "given", 0
        smoothing = _given(log, logged, beta, "corrected" if form == "corrected" else "plain")
        said.append(f"smoothing as given: {smoothing}; steps as logged, the first is {logged.steps[0]}")
        if known is not None and known[1] != smoothing:
            said.append(f"the format says otherwise: {known[1]}")
    elif known is not None:
        source, (offset, smoothing) = "format", known
        said.append(f"known from the format ({log.facts['writer']}): {smoothing}; the first batch is step {offset}")
    else:
        source = "unknown"
        said.append("step convention and smoothing unknown: give --beta and --form, or --reference")
        if log.facts.get("writer") == "nanochat through a tracker" and name == "train/loss":
            said.append(
                "nanochat sends its loss to a tracker averaged with β = 0.9 and only every so many steps: "
                "the raw losses cannot be had from it; its console log has every step"
            )
    train: Series | None = None
    if smoothing is not None and offset is not None:
        raw = undo(logged, smoothing)
        train = Series(raw.steps - offset, raw.values)
        if lost := len(logged) - len(raw):
            said.append(f"{lost} of {len(logged)} raw values cannot be known: the step before was not logged")
        if smoothing.form != "none":
            rounding = _resolution(logged.values) / 2
            said.append(
                f"rounding: the logged values are exact to {rounding:.2g}; undone, to {rounding:.2g} × "
                f"(1 + β)/(1 − β) = {rounding * amplification(smoothing.beta):.2g}"
            )
    if name == "train/loss" and log.kind == "nanochat":
        micro = log.facts.get("micro_batches", "?")
        said.append(
            f"each loss is of the last of {micro} micro-batches of rank 0 of {log.facts.get('world_size', '?')}, "
            "not of the whole batch"
        )
    val, val_name = None, log.name_of("val_bpb")
    if val_name is not None and val_name != name and len(log.pick("val_bpb")):
        val = log.pick("val_bpb")
        sure = log.kind in ("nanochat", "xsalab")
        said.append(
            f"{val_name}: at step s with the weights after s updates"
            if sure
            else f"{val_name}: steps as logged; the log does not say after how many updates"
        )
    return Alignment(log, name, logged, train, val, offset, smoothing, source, tuple(said), match, raw_reference)


def _of_match(match: Match) -> list[str]:
    runner = "" if match.runner_up is None else f"; at the next best offset {match.runner_up:.2g}"
    said = [
        f"found from the reference: step s of the log is batch s {_signed(-match.offset)}; {match.smoothing}",
        f"residual {match.residual:.2g} over {match.equations} steps, where the log changes by {match.noise:.2g} "
        f"from step to step{runner}",
    ]
    if match.also:
        said.append(
            f"it could be {match.also} as well: the reference does not reach back to where these differ, "
            f"so nothing is undone before step {match.smoothing.since}"
        )
    return said


def _signed(number: int) -> str:
    return f"{'−' if number < 0 else '+'} {abs(number)}"


def _given(log: Log, logged: Series, beta: float, form: Form) -> Smoothing:
    """The average as the user says it is; a log that begins at step 0 or 1 is taken to begin with the run."""
    _check_beta(beta)
    stride = int(np.gcd.reduce(np.diff(logged.steps))) if len(logged) > 1 else 1
    if stride > 1:
        raise ValueError(
            f"{log.path}: logged every {stride} steps: an average over every step cannot be undone from these; "
            "give --reference, or the log of every step"
        )
    begin = int(logged.steps[0])
    if begin > 1:
        return Smoothing(beta, form, None, 0)
    return Smoothing(beta, form, begin, begin)


def table(alignment: Alignment) -> list[list[str]]:
    """The aligned series as rows of text, heading first; a cell is empty where there is no value."""
    log_name = f"{alignment.metric} as logged"
    columns: dict[str, Series] = {}
    if alignment.train is not None:
        loss = alignment.metric.lower() in ALIASES["loss"]
        columns["train/loss" if loss else alignment.metric] = alignment.train
    if alignment.val is not None:
        columns["val/bpb"] = alignment.val
    if alignment.reference is not None:
        columns["reference"] = alignment.reference
    shift = alignment.offset or 0
    columns[log_name] = replace(alignment.logged, steps=alignment.logged.steps - shift)
    steps = sorted({int(step) for series in columns.values() for step in series.steps})
    cells = {name: dict(zip(series.steps.tolist(), series.values.tolist(), strict=True))
             for name, series in columns.items()}  # fmt: skip
    rows = [["step", *columns]]
    for step in steps:
        rows.append([str(step), *(repr(of[step]) if step in of else "" for of in cells.values())])
    return rows


def write_table(alignment: Alignment, path: Path) -> None:
    """``table`` as a CSV file, whole or not at all."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(table(alignment))
    write_atomic(path, text.getvalue())


def as_json(alignment: Alignment) -> dict[str, Any]:
    """Everything as plain values; what is unknown is None."""

    def plain(series: Series | None) -> dict[str, list[Any]] | None:
        return None if series is None else {"steps": series.steps.tolist(), "values": series.values.tolist()}

    log, smoothing = alignment.log, alignment.smoothing
    return {
        "path": str(log.path), "kind": log.kind, "run": log.run, "facts": dict(log.facts), "notes": list(log.notes),
        "metric": alignment.metric, "source": alignment.source, "offset": alignment.offset,
        "smoothing": None if smoothing is None else vars(smoothing),
        "match": None if alignment.match is None else {
            name: value for name, value in vars(alignment.match).items() if name != "smoothing"
        },
        "statements": list(alignment.statements),
        "train": plain(alignment.train), "val": plain(alignment.val), "logged": plain(alignment.logged),
        "reference": plain(alignment.reference),
    }  # fmt: skip


def lines(alignment: Alignment) -> list[str]:
    """What ``xsalab align`` prints."""
    log = alignment.log
    shown = [name for name in ("writer", *SHAPES, "seed", "device", "world_size", "dtype") if name in log.facts]
    found = [
        f"{log.path}: {log.kind} log; {alignment.metric}: {len(alignment.logged):,} values, steps "
        f"{alignment.logged.steps[0]} to {alignment.logged.steps[-1]}"
    ]
    if shown:
        found.append("it says: " + ", ".join(f"{name} {log.facts[name]}" for name in dict.fromkeys(shown)))
    found += [f"note: {note}" for note in log.notes]
    return found + list(alignment.statements)
