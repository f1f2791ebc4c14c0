"""pass@k: the chance that at least one of k answers to a problem is right, from n ≥ k answers of which c are right.

The unbiased estimator of Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1:

    pass@k = E over problems of 1 − C(n − c, k) / C(n, k)

C(n − c, k) / C(n, k) is the share of the k-subsets of the n answers that hold no right one. The plug-in estimate
1 − (1 − c/n)^k is too low.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


def pass_at_k(samples: int, correct: int, k: int) -> float | None:
    """The estimate for one problem; None where k is larger than the number of samples: it is not available then.

    Whole numbers are divided once at the end, so that the result is correctly rounded for every size.
    Raises ValueError where the numbers do not fit together.
    """
    if not 0 <= correct <= samples or samples < 1:
        raise ValueError(f"{correct} right of {samples} samples: needs 0 ≤ right ≤ samples and at least one sample")
    if k < 1:
        raise ValueError(f"k = {k}: must be at least 1")
    if k > samples:
        return None
    subsets = math.comb(samples, k)
    return (subsets - math.comb(samples - correct, k)) / subsets


def mean_pass_at_k(counts: Iterable[tuple[int, int]], ks: Sequence[int]) -> dict[int, float | None]:
    """k -> the mean over problems, given each problem's (samples, correct); any set of problems will do.

    Every k that was asked for is in the result: None where a problem has fewer than k samples. Raises ValueError
    where there is no problem.
    """
    problems = list(counts)
    if not problems:
        raise ValueError("no problem: pass@k is a mean over problems")
    result: dict[int, float | None] = {}
    for k in ks:
        estimates = [pass_at_k(samples, correct, k) for samples, correct in problems]
        known = [estimate for estimate in estimates if estimate is not None]
        result[k] = math.fsum(known) / len(known) if len(known) == len(problems) else None
    return result
