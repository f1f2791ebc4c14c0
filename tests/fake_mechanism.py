"""What ``outcome`` says of mechanism, stability, rates and published figures, made up: for tests of the page."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

MEASURES = {
    "cos_before": ("cosine of attention output and own value", "", True),
    "cos_after": ("the same after the variant", "", True),
    "self_weight": ("weight on the own token", "", False),
    "first_weight": ("weight on the first token", "", False),
    "reach": ("tokens that attention effectively reads", "tokens", False),
    "entropy": ("entropy of the weights", "nats", False),
    "energy_before": ("share of the output along the own value", "", False),
    "removed": ("norm removed", "", False),
    "logit": ("largest attention logit", "", True),
    "norm_value": ("norm of the values", "", False),
    "rank_before": ("effective rank of the output", "", False),
    "alpha": ("α in use", "", True),
    "alpha_gradient": ("∂ loss / ∂ α", "nats", True),
}
GEOMETRY = {
    "stable_rank": ("stable rank of the matrices", ""),
    "update_stable_rank": ("stable rank of the updates", ""),
    "update_spread": ("spread of the updates’ singular values", ""),
    "update_ratio": ("update against weight", ""),
}
STEPS = [0, 48, 96, 144, 192]
RANGES = [[0, 1], [1, 2], [2, 4], [4, 8], [8, 16], [16, 32], [32, 64], [64, 128], [128, 256]]


def mechanism(
    point: str, pairs: dict[str, str], seeds: Sequence[int], layers: int = 6, heads: int = 6
) -> dict[str, Any]:
    """pairs: every treated arm -> its baseline."""
    arms = list(dict.fromkeys([*pairs.values(), *pairs]))
    draw = random.Random(f"{point} {arms}")

    def value(name: str, arm: str, depth: float = 0.5) -> float:
        size = {"reach": 40.0, "logit": 9.0, "norm_value": 12.0, "rank_before": 20.0, "alpha_gradient": 3e-4}.get(
            name, 0.5
        )
        shift = -0.6 * ("xsa" in arm) * (name in ("cos_after", "self_weight"))
        return size * (0.4 + depth + shift + draw.gauss(0, 0.08))

    def series(name: str, arm: str) -> dict[str, Any]:
        values = [[value(name, arm, math.log1p(step) / 9) for step in STEPS] for _ in seeds]
        return {"steps": STEPS, "seeds": list(seeds), "values": values}

    def final(name: str, arm: str) -> dict[str, Any]:
        mean = [[value(name, arm, layer / layers) for _ in range(heads)] for layer in range(layers)]
        return {"mean": mean, "sd": [[0.02] * heads for _ in range(layers)]}

    return {
        "point": point, "layers": layers, "heads": heads, "context": 256, "steps": STEPS[-1],
        "measures": {k: {"label": label, "unit": unit, "signed": s} for k, (label, unit, s) in MEASURES.items()},
        "arms": {
            arm: {
                "seeds": list(seeds),
                "final": {name: final(name, arm) for name in MEASURES},
                "curves": {name: series(name, arm) for name in MEASURES},
                "positions": {
                    "ranges": RANGES,
                    "values": {
                        name: [[value(name, arm, 1 / (1 + i)) for i in range(len(RANGES))] for _ in seeds]
                        for name in MEASURES
                    },
                },
                "geometry": {name: series(name, arm) for name in GEOMETRY},
            }
            for arm in arms
        },
        "cosines": [
            {"arm": arm, "baseline": base, "steps": STEPS[:-1], "seeds": list(seeds),
             "values": [[math.exp(-step / 60) + draw.gauss(0, 0.03) for step in STEPS[:-1]] for _ in seeds]}
            for arm, base in pairs.items()
        ],
        "geometry_measures": {name: {"label": label, "unit": unit} for name, (label, unit) in GEOMETRY.items()},
        "sentences": [f"{arm} against {base}: the cosine falls in every head." for arm, base in pairs.items()],
        "prediction": {
            "words": "The gradient at α = 0 ranks the arms as they came out in 3 of 3 cases.",
            "spearman": 1.0, "pearson": 0.9, "n": len(pairs),
            "rows": [{"arm": arm, "predicted": -0.002 * i, "measured": -0.001 * i} for i, arm in enumerate(pairs)],
        },
    }  # fmt: skip


def stability(points: Sequence[str], arms: Sequence[str], runs: int) -> list[dict[str, Any]]:
    return [
        {"point": point, "arm": arm, "runs": runs, "finished": runs - (arm == "xsa"), "diverged": int(arm == "xsa"),
         "low": 0.0, "high": 0.37, "spikes": 2, "runs_with_spikes": 1, "largest_z": 7.25, "largest_grad_norm": 3.5,
         "nonfinite": None, "largest_logit": 11.5, "logit_growth": 1.75}
        for point in points for arm in arms
    ]  # fmt: skip


def run_stability(names: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {"name": name, "point": name.split(".")[0], "arm": name.split(".")[1], "seed": 0, "spikes": 1,
         "largest_z": 7.25, "spike_steps": [31], "grad_norm_median": 0.4, "largest_grad_norm": 3.5, "nonfinite": None,
         "first_logit": None, "last_logit": 11.5, "largest_logit": 12.0}
        for name in names
    ]  # fmt: skip


PUBLISHED: dict[str, Any] = {
    "points": ["base"],
    "rows": [
        {"point": "base", "metric": "bpb", "published_standard": 0.8484, "published_xsa": 0.8457,
         "published_difference": -0.0027, "ours": None},
    ],
    "sentence": "One run an arm cannot tell a difference of this size from the luck of a seed.",
    "core_error": {}, "sources": ["the published study"],
}  # fmt: skip


def rates(
    point: str, factor: str, rates: Sequence[float], levels: dict[str, list[str]], value: dict[str, float]
) -> dict[str, Any]:
    """levels: words -> the arm of each rate. value: the mean of each arm."""
    rows = [
        {"levels": words, "arms": arms, "means": [value.get(arm) for arm in arms], "sds": [0.002] * len(arms),
         "finished": [4] * len(arms), "diverged": [0] * (len(arms) - 1) + [2],
         "best": min((value[arm], rate) for arm, rate in zip(arms, rates, strict=True) if arm in value)[1],
         "edge": words == "xsa", "widest": [rates[0], rates[-2]]}
        for words, arms in levels.items()
    ]  # fmt: skip
    estimate = {"mean": -0.004, "low": -0.006, "high": -0.002, "half_width": 0.002, "n": 4}
    verdict = {"word": "better", "text": "better"}
    row = {
        "name": "xsa - standard",
        "estimate": estimate,
        "verdict": verdict,
        "sentence": "best xsa against best standard",
    }
    return {"point": point, "factor": factor, "rates": list(rates), "rows": rows, "equal_rate": [row],
            "best_against_best": {**row, "words": "Choosing the best of three widens nothing here."}}  # fmt: skip
