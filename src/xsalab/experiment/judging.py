"""From the estimates of an experiment's contrasts to their words: who shares the error of 5 %, and who diverged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..stats import Estimate, Verdict, decide, equivalence_interval, holm
from ..stats.looks import Looks
from .design import Combination, Contrast, Experiment
from .pairing import PairSet


def in_family(experiment: Experiment, contrast: Contrast | Combination) -> bool:
    """Whether a contrast shares the error of 5 %: what ``primary.family`` names, or every effect. No controls."""
    if isinstance(contrast, Contrast) and contrast.kind != "effect":
        return False
    return not experiment.primary.family or contrast.name in experiment.primary.family


def is_exploratory(experiment: Experiment, contrast: Contrast | Combination) -> bool:
    """Whether a contrast is no control and outside the declared family: an interval, and no verdict."""
    return contrast.kind not in ("null", "positive", "equal time") and not in_family(experiment, contrast)


def adjusted_ps(
    experiment: Experiment, found: Sequence[PairSet], estimates: Sequence[Estimate | None]
) -> list[float | None]:
    """Holm's p of the declared family, and of the comparisons at equal time as a family of their own."""
    adjusted: list[float | None] = [None] * len(found)
    declared = [i for i, pair in enumerate(found) if in_family(experiment, pair.contrast)]
    at_equal_time = [i for i, pair in enumerate(found) if pair.contrast.kind == "equal time"]
    for family in (declared, at_equal_time):
        # what cannot be tested stays in the family, which would otherwise shrink when a run is lost
        values = [
            1.0 if estimate is None or estimate.p is None else estimate.p
            for estimate in map(estimates.__getitem__, family)
        ]
        for i, p in zip(family, holm(values), strict=True) if len(family) > 1 else ():
            adjusted[i] = float(p) if (estimate := estimates[i]) is not None and estimate.p is not None else None
    return adjusted


def margin_of(experiment: Experiment, estimate: Estimate) -> float:
    """The margin of equivalence in units of the metric. ValueError for a share of nothing."""
    primary = experiment.primary
    margin = primary.margin if primary.absolute else primary.margin * abs(estimate.baseline_mean)
    if not margin > 0:
        raise ValueError(
            f"{experiment.path}: primary.margin = {primary.margin}: a share of the baseline's {primary.metric}, which "
            f"is 0; give the margin in units of {primary.metric}, primary = {{ ..., margin = 0.01, absolute = true }}"
        )
    return margin


def judge(
    experiment: Experiment,
    pair: PairSet,
    estimate: Estimate | None,
    *,
    margin: float,
    lower_is_better: bool,
    adjusted_p: float | None,
    looks: Looks | None,
) -> Verdict | None:
    """The verdict of a contrast; None while it has no pair, and where it is outside the declared family.

    margin: absolute. looks: the levels of a sequential experiment, with which ``estimate`` was made.
    """
    lost, whose = len(pair.diverged_treatment), ""
    if not lost and pair.diverged_baseline:  # the right side is an arm too, and a mean over the rest flatters it
        lost, whose = len(pair.diverged_baseline), f" of {pair.contrast.terms[-1].arm}"
    diverged = lost, len(pair.seeds) + lost
    if estimate is None or pair.table is None:
        verdict = decide(None, margin=1.0, estimate90=None, diverged=diverged) if lost else None
    elif is_exploratory(experiment, pair.contrast):
        verdict = None
    else:
        level, one_sided = (looks.two_sided, looks.one_sided) if looks else (0.05, 0.05)
        verdict = decide(
            estimate,
            margin=margin,
            lower_is_better=lower_is_better,
            estimate90=equivalence_interval(pair.table, level=one_sided),
            adjusted_p=adjusted_p,
            diverged=diverged,
            level=level,
            equivalence_level=one_sided,
        )
    if verdict is not None and verdict.word == "diverged" and whose:
        verdict = replace(verdict, reason=verdict.reason.replace(" runs diverged", f" runs{whose} diverged"))
    return verdict
