"""The content of an outcome with everything in it that the texts and figures for a paper show."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from fake_runs import CROSSED, HEAD, fake
from xsalab.experiment.outcome import outcome
from xsalab.experiment.published import SOURCE
from xsalab.report import losses

NASTY = r"a_b%&#$~^\{c}|<d>`e`*f*[1]α−±-- \input"
SEEDS = "seeds = [0, 1, 2, 3, 4, 5]"
MEASURES = {
    "cos_before": {"label": "cosine of output and own value", "unit": "", "signed": True},
    "reach": {"label": "effective context", "unit": "tokens", "signed": False},
    "alpha_gradient": {"label": "∂L/∂α", "unit": "nats a token", "signed": True},
}


def rich(folder: Path, points: bool = False) -> tuple[dict[str, Any], Any]:
    """(content, curves) of a crossed experiment of three seeds; mechanism, stability and rates are made up."""
    toml = HEAD.replace(SEEDS, "seeds = [0, 1, 2]") + CROSSED + 'positive = { "optim.lr_scale" = 0.5 }\n'
    if points:
        toml += '[[points]]\nname = "d2"\ndepth = 2\n[[points]]\nname = "d3"\ndepth = 3\n'
    experiment, store = fake(folder, toml, steps=40)
    content = json.loads(json.dumps(outcome(experiment, store)))
    arms = [arm for arm in content["arms"] if arm != "twin"]
    content["mechanism"] = [_mechanism(point, arms, content) for point in content["points"]]
    content["stability"] = [
        {
            "point": point, "arm": arm, "runs": 3, "finished": 2, "diverged": 1, "low": 0.0084, "high": 0.9057,
            "spikes": 4, "runs_with_spikes": 1, "largest_z": 7.25, "largest_grad_norm": 1.5, "nonfinite": 1,
            "largest_logit": 21.5, "logit_growth": 1.1,
        }
        for point in content["points"] for arm in arms
    ]  # fmt: skip
    content["run_stability"] = [
        {
            "name": "p.standard.s0", "point": content["points"][0], "arm": arms[0], "seed": 0, "spikes": 8,
            "largest_z": 7.25, "spike_steps": [*range(10, 18)], "grad_norm_median": 0.4, "largest_grad_norm": 1.5,
            "nonfinite": 31, "first_logit": 1.0, "last_logit": 2.0, "largest_logit": 21.5,
        }
    ]  # fmt: skip
    content["rates"] = [
        {
            "point": content["points"][0], "factor": "optim.lr_scale", "rates": [0.5, 1.0, 2.0], "rule": "The rule.",
            "rows": [
                {
                    "levels": "standard", "arms": ["a", "b", "c"], "means": [2.3456, 2.1234, None],
                    "sds": [0.01, 0.02, None], "finished": [3, 3, 0], "diverged": [0, 0, 3], "best": 1.0, "edge": False,
                    "widest": [0.5, 1.0],
                }
            ],
            "equal_rate": [{"rate": 0.5, "sentence": "xsa against standard: Δ 0.1"}],
            "best_against_best": {"sentence": "best words", "words": "chosen on other seeds", "estimate": None},
        }
    ]  # fmt: skip
    content["published"] = {
        "points": content["points"], "sentence": "One run an arm.", "sources": [SOURCE], "core_error": {},
        "rows": [
            {
                "point": content["points"][0], "study": "d12", "metric": "bpb", "published_standard": 0.8484,
                "published_xsa": 0.8457, "published_difference": -0.0027, "ours": content["contrasts"][0],
            }
        ],
    }  # fmt: skip
    return content, losses(experiment, store)


def _mechanism(point: str, arms: list[str], content: dict[str, Any]) -> dict[str, Any]:
    def curve(name: str, k: int) -> dict[str, Any]:
        values = [[round(math.sin(len(name) + k + seed / 7 + step), 4) for step in range(3)] for seed in range(3)]
        return {"steps": [0, 20, 40], "seeds": [0, 1, 2], "values": values}

    def arm(k: int) -> dict[str, Any]:
        grid = [[round(0.1 * k + 0.3 * layer - 0.01 * head, 4) for head in range(4)] for layer in range(3)]
        final = {name: {"mean": grid, "sd": None} for name in MEASURES}
        if k == 1:  # a head without a value
            final["reach"] = {"mean": [[None, *grid[0][1:]], *grid[1:]], "sd": None}
        return {
            "seeds": [0, 1, 2],
            "final": final,
            "curves": {name: curve(name, k) for name in MEASURES},
            "positions": {
                "ranges": [[0, 1], [1, 8], [8, 64]],
                "values": {"reach": [[1.0 + k, 2.0, None], [1.1, 2.1, 3.0], [1.2, 2.2, 3.1]]},
            },
            "geometry": {"update_spread": curve("geometry", k)},
        }

    return {
        "point": point, "layers": 3, "heads": 4, "context": 64, "steps": 40, "measures": MEASURES,
        "arms": {name: arm(k) for k, name in enumerate(arms)},
        "cosines": [{"arm": arms[1], "baseline": arms[0], "words": "cosine words", **curve("cosine", 0)}],
        "geometry_measures": {"update_spread": {"label": "spread of singular values", "unit": ""}},
        "sentences": ["a sentence of the maps"],
        "prediction": {
            "words": "what it is", "spearman": 0.5, "pearson": None, "n": 2,
            "rows": [{"arm": arms[1], "predicted": -0.0123, "measured": -0.00456}],
        },
        "left_out": [],
    }  # fmt: skip


def renamed(content: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    """The same content with another name for an arm, wherever it stands."""

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            return {walk(key): walk(item) for key, item in value.items()}
        if isinstance(value, list):
            return [walk(item) for item in value]
        return value.replace(old, new) if isinstance(value, str) else value

    return walk(content)
