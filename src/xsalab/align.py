"""Two logs on one convention: which step a value belongs to, and an exponential average undone exactly.

The convention (docs/statistics.md): train/loss[s] is the loss of batch s with the weights after s updates, s from 0;
a validation value at s is of the weights after s updates.

An average of raw values x with β in [0, 1) is logged plain, m_t with m_0 = x_0, or corrected for its start at 0,

    m_t = β m_{t−1} + (1 − β) x_t        y_t = m_t / c_t        c_t = 1 (plain), 1 − β^(t+1) (corrected)

so that two neighbouring logged values give the raw one, x_t = (c_t y_t − β c_{t−1} y_{t−1}) / (1 − β). A rounding of
the logged values by ε comes back as at most ε (1 + β)/(1 − β): 19 ε for β = 0.9.

Where two logs saw the same batches, offset, form and β are found from them. The offsets come from the cross-correlation
of the log's differences with the reference; at each, β and the form are sought that satisfy this equation at all steps.
The result is believed where it holds to rounding, or to a twentieth of the noise between batches, and twice as well as
at any other offset. Else the two logs did not see the same batches, and nothing is claimed.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, signal  # pyright: ignore[reportMissingTypeStubs]

from .files import write_atomic
from .interop.logs import ALIASES, SHAPES, Log, Series

_optimize: Any = optimize  # scipy comes without types
_signal: Any = signal
Floats = NDArray[np.float64]

MOST_STEPS = 10_000_000
LEAST_EQUATIONS = 8  # below this an offset is a guess
CANDIDATES = 6  # offsets of the best correlation that are tried
CLOSE = 0.05  # of the noise between batches: the residual at which batches are still taken to be the same
_BETAS = 1 - np.geomspace(1, 5e-4, 24)


@dataclass(frozen=True)
class Smoothing:
    """How a series was averaged, in steps of its log; not at all where β is 0. ValueError for β outside [0, 1).

    origin: the step at which the correction's exponent is 1; None for the plain form. first: the step of the run's
    first batch; None where the log does not reach back to it, and then its earliest raw value is unknown. since: the
    step before which no raw value is known.
    """

    beta: float = 0.0
    origin: int | None = None
    first: int | None = 0
    since: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.beta < 1:
            raise ValueError(f"beta = {self.beta}: must be at least 0 and below 1")

    @property
    def amplification(self) -> float:
        """By how much undoing the average can enlarge an error of the logged values."""
        return (1 + self.beta) / (1 - self.beta)

    def __str__(self) -> str:
        if self.beta == 0:
            return "not smoothed"
        words = "started at the first value, not corrected" if self.origin is None else "bias-corrected"
        if self.origin is not None and self.first is not None and self.first != self.origin:
            words += f" with an exponent that begins at {self.first - self.origin + 1} and not at 1"
        return f"exponential average, β = {self.beta:.9g}, {words}"


def undo(series: Series, smoothing: Smoothing) -> Series:
    """The raw values where they can be known: at the first step, and at those whose step before was logged too."""
    beta, steps, origin = smoothing.beta, series.steps, smoothing.origin
    if beta == 0:
        return series
    average = series.values if origin is None else series.values * (1 - np.power(beta, steps - origin + 1.0))
    known = np.diff(steps, prepend=steps[0]) == 1
    before = np.concatenate([[series.values[0] if origin is None else 0.0], average[:-1]])
    known[0] = steps[0] == smoothing.first
    if smoothing.since is not None:
        known &= steps >= smoothing.since
    return Series(steps[known], ((average - beta * before) / (1 - beta))[known])


@dataclass(frozen=True)
class Match:
    """What ``find_offset_and_smoothing`` found.

    offset: the log's number of a batch minus the reference's. residual: root mean square of what the equations leave,
    in units of the logged values. runner_up: the same at the next best offset, None where no other could be tried.
    """

    offset: int
    smoothing: Smoothing
    residual: float
    runner_up: float | None


def find_offset_and_smoothing(series: Series, reference: Series) -> Match:
    """How ``series`` came of ``reference``, the raw losses of the same batches: by which offset and which average.

    Raises ValueError where they share too few steps, where the series has no noise to be told by, and, naming the
    residual, where no offset and no β explains it: then they did not see the same batches.
    """
    if min(len(series), len(reference)) <= LEAST_EQUATIONS:
        raise ValueError(f"{len(series)} and {len(reference)} values: to find an offset at least {LEAST_EQUATIONS + 1}")
    if max(np.ptp(series.steps), np.ptp(reference.steps)) > MOST_STEPS:
        raise ValueError(f"over {MOST_STEPS:,} steps: give steps, not tokens or seconds")
    noise = math.sqrt(float((np.diff(series.values, 2) ** 2).mean()) / 3)
    rounding = resolution(series.values) / 2
    if noise <= 4 * rounding:
        raise ValueError("the log changes so evenly from step to step that any offset fits: nothing to tell it by")
    found = {offset: _pairs(series, reference, offset) for offset in _offsets(series, reference)}
    guesses = sorted((*_guess(p), offset) for offset, p in found.items() if len(p.x) >= LEAST_EQUATIONS)
    if not guesses:
        raise ValueError(f"fewer than {LEAST_EQUATIONS} steps in common at every offset: nothing to compare them by")
    fits = sorted((*_fit(found[offset], beta, w), offset) for _, beta, w, offset in guesses[:3])
    residual, beta, exponent, offset = fits[0]
    runner_up = fits[1][0] if len(fits) > 1 else None
    bound = max(CLOSE * noise, 2 * rounding)
    pairs, begin = found[offset], int(series.steps[0])
    if residual > bound or (runner_up is not None and residual > runner_up / 2) or (pairs.every > 1 and beta > 0):
        other = "" if pairs.every == 1 else f", or averaged over more than the log's every {pairs.every} steps"
        raise ValueError(
            f"not the same batches{other}: residual {residual:.2g} at the best offset {offset} and β = {beta:.3g}; "
            f"the log changes by {noise:.2g} from step to step, and the same batches would leave at most {bound:.2g}"
        )
    smoothing = Smoothing(beta, begin + 1 - int(exponent) if exponent < math.inf else None, begin)
    # What the reference confirms is undone: from the first value on if that comes out right, else from its own start.
    known, close = reference.at(begin - offset), 4 * (residual + rounding) * smoothing.amplification
    if known is None or abs(undo(series, smoothing).values[0] - known) > close:
        smoothing = replace(smoothing, first=None, since=begin + int(pairs.u[0]) + 1)
    return Match(offset, smoothing, residual, runner_up)


def _offsets(y: Series, x: Series) -> list[int]:
    """Where y's changes correlate best with x, the neighbours of the best, and none at all.

    An average moves by a share of the distance to the new value, so the noise between batches is in its differences.
    """
    changes = _noise(y.steps[1:], np.diff(y.values)), _noise(x.steps, x.values)
    strength = np.asarray(_signal.correlate(*changes, mode="full", method="fft"))
    lags = np.asarray(_signal.correlation_lags(*(len(side) for side in changes), mode="full"))
    best = [int(lag + y.steps[1] - x.steps[0]) for lag in lags[np.argsort(-strength)[:CANDIDATES]]]
    return list(dict.fromkeys((*best, best[0] - 1, best[0] + 1, 0, 1, -1)))


def _noise(steps: NDArray[np.int64], values: Floats) -> Floats:
    """(last − first step + 1,) the values less the mean of their neighbours, 0 where unknown.

    That takes off most of the curves' common fall; the few large values that are left of it are cut.
    """
    found = values[1:-1] - (values[:-2] + values[2:]) / 2
    most = 4 * float(np.median(np.abs(found)))
    dense = np.zeros(int(steps[-1] - steps[0]) + 1)
    dense[steps[1:-1] - steps[0]] = np.clip(found, -most, most)
    return dense


@dataclass(frozen=True, eq=False)
class _Pairs:
    """At one offset, the neighbours a, b of the log whose batch b is in the reference, all (n,).

    every: the log's stride, and their distance. u: how many strides a lies from the log's first step.
    """

    every: int
    u: NDArray[np.int64]
    y_a: Floats
    y_b: Floats
    x: Floats

    def left(self, beta: float, w: float) -> Floats:
        """What each equation leaves, in units of the logged values. w: β^(n − 1), n the exponent at the log's start."""
        c_a, c_b = (1 - w * np.power(beta, at) for at in (self.u + 1.0, self.u + 2.0))
        return self.y_b - (beta * c_a * self.y_a + (1 - beta) * self.x) / c_b

    def size(self, beta: float, w: float) -> float:
        """Root mean square of ``left``."""
        return math.sqrt(float((self.left(beta, w) ** 2).mean()))


def _pairs(y: Series, x: Series, offset: int) -> _Pairs:
    gaps = np.diff(y.steps)
    every = int(gaps.min())
    wanted = y.steps[1:] - offset
    place = np.searchsorted(x.steps, wanted).clip(max=len(x) - 1)
    b = 1 + np.flatnonzero((gaps == every) & (x.steps[place] == wanted))
    u = (y.steps[b - 1] - y.steps[0]) // every
    return _Pairs(every, u, y.values[b - 1], y.values[b], x.values[place[b - 1]])


def _guess(pairs: _Pairs) -> tuple[float, float, float]:
    """(size, β, w) of the best of a few β. For each the equation, times c, is linear in w: e = w q."""
    found: list[tuple[float, float, float]] = []
    for beta in _BETAS.tolist():
        e = pairs.y_b - beta * pairs.y_a - (1 - beta) * pairs.x
        q = np.power(beta, pairs.u + 2.0) * (pairs.y_b - pairs.y_a)
        square = float(q @ q)
        w = min(max(float(e @ q) / square, 0.0), 1.0) if square > 0 else 0.0
        found.append((pairs.size(beta, w), beta, w))
    return min(found)


def _fit(pairs: _Pairs, beta: float, w: float) -> tuple[float, float, float]:
    """(size, β, n) of the form that leaves least, the simplest of equals. n: the correction's exponent at the log's
    first step; infinite, as if that were long ago, for the plain form."""

    def solve(left: Callable[[Floats], Floats], start: list[float]) -> list[float]:
        limits: Any = {"xtol": 1e-15, "ftol": 1e-15, "gtol": 1e-15, "x_scale": 1e-2}
        inside = np.clip(start, 1e-3, 0.999)
        return _optimize.least_squares(left, inside, bounds=(0, 1 - 1e-9), **limits).x.tolist()

    beta, w = solve(lambda p: pairs.left(p[0], p[1]), [beta, w])
    found = [(pairs.size(0.0, 0.0), 0.0, math.inf)]
    for n in dict.fromkeys((math.inf, 1, 2, 1 + round(math.log(w + 1e-300) / math.log(beta + 1e-12)))):
        (b,) = solve(lambda p, n=n: pairs.left(p[0], p[0] ** (n - 1)), [beta])
        found.append((pairs.size(b, b ** (n - 1)), b, n))
    same = max(1.01 * min(found)[0], 1e-13 * float(np.abs(pairs.y_b).max()))  # what lies below differs by rounding
    return next(fit for fit in found if fit[0] <= same)


def resolution(values: Floats) -> float:
    """The spacing of the numbers as they were written: 10^−d for d decimals, or that of float32 or float64."""
    for digits in range(11):
        if np.allclose(np.round(values, digits), values, rtol=4e-16, atol=0):
            return 10.0**-digits
    bits = 23 if (values.astype(np.float32) == values).all() else 52
    return float(np.abs(values).max()) * 2.0**-bits


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
    reference: Series | None = None


def known_convention(log: Log, name: str) -> tuple[int, Smoothing] | None:
    """Offset and smoothing of a series of a format that is known; None where the log does not tell.

    offset: the step that the log gives to the first batch. Of nanochat: scripts base_train and chat_sft, July 2026,
    where the console's loss is averaged with β = 0.9; chat_sft counts the step before it corrects (F123).
    """
    writer = log.facts.get("writer")
    if writer == "xsalab" or (log.kind == "nanochat" and name != "train/loss"):
        return 0, Smoothing()
    if writer == "nanochat base_train":
        return 0, Smoothing(0.9, origin=0)
    return (1, Smoothing(0.9, origin=0, first=1)) if writer == "nanochat chat_sft" else None


def align(
    log: Log, *, reference: Log | None = None, beta: float | None = None, form: str = "", metric: str = "loss"
) -> Alignment:
    """One log on xsalab's convention: by its format, by a reference that saw the same batches, or by β and form given.

    Raises ValueError where the metric is not there, the reference did not see the same batches, or the average cannot
    be undone from what is logged.
    """
    if form not in ("", "corrected", "plain") or (beta is None) != (form == ""):
        raise ValueError(f"--beta {beta} --form {form or None}: give both, the form as corrected or plain")
    if reference is not None and beta is not None:
        raise ValueError("--beta and --reference: the reference tells β; give one of the two")
    logged, name = log.pick(metric), str(log.name_of(metric))
    if not len(logged):
        raise ValueError(f"{log.path}: {name}: none of its values is finite")
    said: list[str] = []
    raw_reference, found = None, known_convention(log, name)
    source = "unknown" if found is None else "format"
    if reference is not None:
        own = align(reference, metric=metric)
        raw_reference = own.train or own.logged
        if own.train is None:
            said.append(f"{reference.path}: taken as raw and on xsalab's convention, which it does not say itself")
        try:
            match = find_offset_and_smoothing(logged, raw_reference)
        except ValueError as error:
            raise ValueError(f"{log.path} against {reference.path}: {error}") from None
        source, found = "reference", (match.offset, match.smoothing)
        other = "" if match.runner_up is None else f", at the next best offset {match.runner_up:.2g}"
        said.append(f"residual of the average's equation {match.residual:.2g}{other}")
    elif beta is not None:  # a log that begins at step 0 or 1 is taken to begin with the run
        first = int(logged.steps[0]) if logged.steps[0] <= 1 else None
        source, found = "given", (first or 0, Smoothing(beta, (first or 0) if form == "corrected" else None, first))
    offset, smoothing = found or (None, None)
    train = None
    if offset is None or smoothing is None:
        said.append("step convention and smoothing unknown: give --beta and --form, or --reference")
    else:
        shift = f" {offset:+d}" if offset else ""
        said.append(f"known from the {source}: batch s is step s{shift} of the log; {smoothing}")
        if smoothing.beta and not (np.diff(logged.steps) == 1).any():
            raise ValueError(f"{log.path}: no two steps that follow each other; give a log of every step to undo this")
        raw = undo(logged, smoothing)
        train = Series(raw.steps - offset, raw.values)
        if smoothing.beta and smoothing.since is not None:
            said.append(f"nothing is undone before step {smoothing.since}, where the reference confirms it")
        if lost := len(logged) - len(raw):
            said.append(f"{lost} of {len(logged)} raw values cannot be known: the step before was not logged")
        if smoothing.beta:
            step = resolution(logged.values) / 2
            worst = f"{step:.2g} × (1 + β)/(1 − β) = {step * smoothing.amplification:.2g}"
            said.append(f"rounding: the logged values are exact to {step:.2g}; undone, to {worst}")
    if name == "train/loss" and log.kind == "nanochat":
        micro, ranks = (log.facts.get(fact, "?") for fact in ("micro_batches", "world_size"))
        said.append(f"each loss is of the last of {micro} micro-batches of rank 0 of {ranks}, not of the whole batch")
    val_name = log.name_of("val_bpb")
    val = log.series.get(val_name or "") if val_name != name else None
    if val is not None and log.kind not in ("nanochat", "xsalab"):
        said.append(f"{val_name}: steps as logged; the log does not say after how many updates")
    return Alignment(log, name, logged, train, val, offset, smoothing, source, tuple(said), raw_reference)


def write_table(alignment: Alignment, path: Path) -> None:
    """The aligned series as a CSV file, whole or not at all; a cell is empty where there is no value."""
    shifted = replace(alignment.logged, steps=alignment.logged.steps - (alignment.offset or 0))
    name = "train/loss" if alignment.metric.lower() in ALIASES["loss"] else alignment.metric
    columns = {name: alignment.train, "val/bpb": alignment.val, "reference": alignment.reference,
               f"{alignment.metric} as logged": shifted}  # fmt: skip
    cells = {name: dict(zip(series.steps.tolist(), series.values.tolist(), strict=True))
             for name, series in columns.items() if series is not None}  # fmt: skip
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["step", *cells])
    for step in sorted({step for column in cells.values() for step in column}):
        rows.writerow([step, *(repr(column[step]) if step in column else "" for column in cells.values())])
    write_atomic(path, text.getvalue())


def as_json(alignment: Alignment) -> dict[str, Any]:
    """Everything as plain values; what is unknown is None."""

    def plain(value: Any) -> Any:
        if isinstance(value, Series):
            return {"steps": value.steps.tolist(), "values": value.values.tolist()}
        return {name: plain(item) for name, item in vars(value).items()} if is_dataclass(value) else value

    log = alignment.log
    said = {"path": str(log.path), "kind": log.kind, "run": log.run, "facts": dict(log.facts), "notes": log.notes}
    return said | {name: plain(value) for name, value in vars(alignment).items() if name != "log"}


def lines(alignment: Alignment) -> list[str]:
    """What ``xsalab align`` prints."""
    log = alignment.log
    names = [name for name in ("writer", *SHAPES, "seed", "device", "world_size", "dtype") if name in log.facts]
    found = [
        f"{log.path}: {log.kind} log; {alignment.metric}: {len(alignment.logged):,} values, steps "
        f"{alignment.logged.steps[0]} to {alignment.logged.steps[-1]}"
    ]
    if names:
        found.append("it says: " + ", ".join(f"{name} {log.facts[name]}" for name in names))
    return [*found, *(f"note: {note}" for note in log.notes), *alignment.statements]
