"""LOSS SPIKES: steps at which the loss stands far above where it was going.

    r[s] = loss[s] − the line through the 10 losses before it, read off at s       (a repeated median, Siegel 1982)
    z[s] = (r[s] − median of r) / max(1.4826 · MAD of r, 0.001 · loss)             over the 32 r before s, at least 12
    z[s] is at most 0 unless loss[s] is above the median of the 10 before as well
    of the first 22 steps: z[s] = (loss[s] − median of the 3 before) / the scale of the first 32 r

The line follows the fall at the start, so the fall neither hides a spike nor looks like one; where the fall ends, the
loss is above the line and yet no higher than before, which is what the third rule is for. Up to 5 outliers among 10
losses move the line little, so a spike casts no shadow on the steps after it. The first steps have no past to be
measured against: there a spike is a loss far above the last three, in units of what comes after; ten would reach back
to where a steep fall began, and hide a spike below that.

The forecast by a repeated median in a moving window is that of Davies, Fried & Gather (2004, J. Stat. Plan. Inference
122:65), the median and MAD of what remains are Hampel's (1974, JASA 69:383), and 1.4826 makes the MAD of a normal law
its standard deviation. The windows, the floor (a rise below 0.6 % of the loss is none), the rule of the first steps and
the threshold are ours: docs/statistics.md has their rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .paired import Floats

LINE = 10  # losses that the line goes through
PAST = 32  # residuals that a step is measured against
LEAST = 12  # of them, before a step is measured against its past
FIRST = LINE + LEAST  # index of the first step that is; a shorter series is not judged
EARLY = 3  # losses before one of the first steps; index of the first that is judged at all
FLOOR = 0.001  # of the loss: a scale below it is rounding, or a series without noise
SIGMAS = 1.4826
THRESHOLD = 6.0


class Judged(NamedTuple):
    """A series, judged step by step; (n,) float64 each.

    ``z`` as the head of this file says; ``expected`` is the loss at which it would be 0, and ``scale`` its unit. Of a
    step that is not judged they are 0, +inf and 0.
    """

    losses: Floats
    z: Floats
    expected: Floats
    scale: Floats

    def spikes(self, threshold: float = THRESHOLD) -> list[int]:
        """As the function of this name."""
        if not threshold > 0:
            raise ValueError(f"threshold = {threshold}: a number of robust standard deviations above 0, for instance 6")
        limit = self.expected + threshold * self.scale
        found: list[int] = []
        over = True  # the last spike
        for step, loss in enumerate(self.losses):
            if not over:
                over = loss <= limit[found[-1]] or step - found[-1] >= PAST
            if over and self.z[step] > threshold:
                found.append(step)
                over = False
        return found


def robust_z(losses: Sequence[float] | Floats) -> Floats:
    """(n,) float64: z of every loss as the head of this file says; 0 for the first 3, and for all of fewer than 23.

    Raises ValueError for a loss that is not finite: leave out the step where a run broke.
    """
    return judge(losses).z


def spikes(losses: Sequence[float] | Floats, threshold: float = THRESHOLD) -> list[int]:
    """Indices of the steps at which a spike begins: z above the threshold.

    It ends when the loss is back below the limit that it broke, or after 32 steps, when its level is the new one; until
    then no other is counted. Raises ValueError for a loss that is not finite and a threshold that is not positive.
    """
    return judge(losses).spikes(threshold)


def judge(losses: Sequence[float] | Floats) -> Judged:
    """What ``robust_z`` and ``spikes`` are read from. Raises ValueError for a loss that is not finite."""
    series = np.asarray(losses, dtype=np.float64)
    if not np.isfinite(series).all():
        step = int(np.argmin(np.isfinite(series)))
        raise ValueError(f"loss {series[step]} at index {step}: not finite; give the losses before the run broke")
    z, expected, scale = np.zeros(len(series)), np.full(len(series), np.inf), np.zeros(len(series))
    if len(series) <= FIRST:
        return Judged(series, z, expected, scale)
    before = np.lib.stride_tricks.sliding_window_view(series[:-1], LINE)  # (n − LINE, LINE): row i is before LINE + i
    level = np.median(before, axis=1)
    line = _forecast(before)
    residuals = series[LINE:] - line
    _, early = _centre_and_scale(residuals[:PAST], float(level[0]))
    for step in range(EARLY, FIRST):
        expected[step], scale[step] = float(np.median(series[step - EARLY : step])), early
        z[step] = _z(series[step] - expected[step], early)
    for i in range(LEAST, len(residuals)):
        centre, unit = _centre_and_scale(residuals[max(0, i - PAST) : i], float(level[i]))
        step = LINE + i
        expected[step], scale[step] = line[i] + centre, unit
        z[step] = _z(residuals[i] - centre, unit)
        if series[step] <= level[i]:
            z[step] = min(z[step], 0.0)
    return Judged(series, z, expected, scale)


def _centre_and_scale(residuals: Floats, level: float) -> tuple[float, float]:
    centre = float(np.median(residuals))
    return centre, max(SIGMAS * float(np.median(np.abs(residuals - centre))), FLOOR * abs(level))


def _z(rise: float, scale: float) -> float:
    return float(rise / scale) if scale > 0 else 0.0  # no scale: every loss was 0 so far


def _forecast(windows: Floats) -> Floats:
    """(m,): the repeated-median line of each row of ``windows`` (m, w), one place beyond its end.

    slope = median over i of the median over j ≠ i of (y_j − y_i)/(j − i); level = median of y_i − slope · i.
    """
    width = windows.shape[1]
    places: Floats = np.arange(-width, 0, dtype=np.float64)  # the place that is asked for is 0
    others = ~np.eye(width, dtype=bool)
    runs: Floats = (places[None, :] - places[:, None])[others].reshape(width, width - 1)
    rises: Floats = (windows[:, None, :] - windows[:, :, None])[:, others].reshape(-1, width, width - 1)
    slopes: Floats = np.median(np.median(rises / runs, axis=2), axis=1)
    return np.median(windows - slopes[:, None] * places, axis=1)
