"""What the heat maps say in sentences, and how well ∂L/∂α predicted a layer study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import scipy  # pyright: ignore[reportMissingTypeStubs]
from numpy.typing import NDArray

from ..model.variant import select_layers
from .design import Arm, Cell, Contrast, Experiment, contrasts, resolve, tested_arms
from .store import RunStore

Floats = NDArray[np.float64]
Ends = Mapping[str, Mapping[int, Mapping[str, Floats]]]  # arm -> seed -> measure -> (layers, heads), at the end
LEAST_ARMS = 3  # of a prediction
FEW_ARMS = 10  # below, the words say that a correlation says little
_scipy: Any = scipy  # without types; its parts are imported where they are first used, as that takes a second

# measure -> what is said of it, with the number's places
_SAID: dict[str, tuple[str, int]] = {
    "self_over_uniform": ("a token's weight on itself is {} × uniform", 2),
    "first_weight": ("its weight on the first token is {}", 3),
    "reach": ("attention reads {} tokens in effect", 1),
    "logit": ("the largest logit of a head is {}", 1),
    "norm_after": ("the output's norm is {}", 2),
}


def sentences(experiment: Experiment, point: str, ends: Ends) -> list[str]:
    """One for each tested arm against the arm it is compared with, then one for each of those about ∂L/∂α.

    Values are means over layers, heads and the seeds that both arms have; the differences' signs are counted by seed.
    """
    pairs = [
        contrast for contrast in contrasts(experiment)
        if contrast.point == point and contrast.kind == "effect"
        and contrast.treatment in ends and contrast.baseline in ends
    ]  # fmt: skip
    at = f" at {point}" if len(experiment.points) > 1 else ""
    compared = [_compared(experiment, pair, at, ends) for pair in pairs]
    baselines = dict.fromkeys(pair.baseline for pair in pairs)
    return [text for text in (*compared, *(_slopes(arm, at, ends[arm]) for arm in baselines)) if text]


def _compared(experiment: Experiment, pair: Contrast, at: str, ends: Ends) -> str:
    seeds = [seed for seed in ends[pair.treatment] if seed in ends[pair.baseline]]
    treated, base = (
        {
            name: np.array([ends[arm][seed][name].mean() for seed in seeds])
            for name in ("cos_before", "cos_after", *_SAID)
        }
        for arm in (pair.treatment, pair.baseline)
    )
    variant = experiment.arms[pair.treatment].variant.name
    before = {"standard": "", "xsa": " before the exclusion"}.get(variant, " before the variant")
    said: list[str] = []
    for name, (text, places) in {
        "cos_before": (f"the cosine of output and own value is {{}}{before}", 2),
        **_SAID,
    }.items():
        if not (seeds and np.isfinite(treated[name]).all() and np.isfinite(base[name]).all()):
            continue
        level = f"{pair.baseline}: {number(base[name].mean(), places)}{' ×' if '×' in text else ''}"
        line = (
            f"{text.format(number(treated[name].mean(), places))} ({level}, {_agreement(treated[name] - base[name])})"
        )
        if name == "cos_before" and before and np.isfinite(treated["cos_after"]).all():
            line += f" and {number(treated['cos_after'].mean(), places)} after"
        said.append(line)
    if not said:
        return ""
    return f"{pair.treatment} against {pair.baseline}{at}, mean over layers and heads: {'; '.join(said)}"


def _agreement(differences: Floats) -> str:
    up, down, n = int((differences > 0).sum()), int((differences < 0).sum()), len(differences)
    word, count = ("higher", up) if up >= down else ("lower", down)
    return f"{word} in {count} of {_count(n, 'seed')}" if up or down else f"equal in {_count(n, 'seed')}"


def _slopes(arm: str, at: str, ends: Mapping[int, Mapping[str, Floats]]) -> str:
    """In which layers every seed says that removing more, or less, of the own value would lower the loss first."""
    slopes = np.array([of["alpha_gradient"].sum(axis=1) for of in ends.values()])  # (seeds, layers)
    alphas = np.array([of["alpha"] for of in ends.values()])
    if not np.isfinite(slopes).all():
        return ""
    every = range(slopes.shape[1])
    falls = [layer for layer in every if (slopes[:, layer] < 0).all()]
    rises = [layer for layer in every if (slopes[:, layer] > 0).all()]
    mixed = [layer for layer in every if layer not in falls and layer not in rises]
    where = "at α = 0" if not alphas.any() else "at the α in use"
    seeds, removing = f"in {len(ends)} of {_count(len(ends), 'seed')}", "by removing more of the own value "
    said: list[str] = []
    if falls:
        said.append(f"would fall first {removing}in {_layers(falls)} (∂L/∂α < 0 {seeds})")
    if rises:
        said.append(f"would rise {'' if falls else removing}in {_layers(rises)} (∂L/∂α > 0 {seeds})")
    text = f"{arm}{at}: {where} the loss {' and '.join(said)}" if said else f"{arm}{at}: {where}"
    if mixed:
        text += f"{';' if said else ''} in {_layers(mixed)} the seeds do not agree in the sign of ∂L/∂α"
    return text


def _layers(numbers: Sequence[int]) -> str:
    return f"layer{'s' if len(numbers) != 1 else ''} {', '.join(str(layer) for layer in numbers)}"


def _count(n: int, word: str) -> str:
    return f"{n} {word}{'s' if n != 1 else ''}"


def number(value: float, places: int) -> str:
    """Fixed places, a true minus, and no minus before a zero."""
    text = f"{value:.{places}f}"
    return text.replace("-", "−") if float(text) else text.removeprefix("-")


# The prediction


def prediction(experiment: Experiment, store: RunStore, point: str, ends: Ends) -> dict[str, Any] | None:
    """Δ of the arms of a layer study as the baseline's ∂L/∂α predicts it, beside Δ as measured.

    Of arms of the variant xsa that share a fixed α and differ from the baseline in the variant alone, one for each
    selection of layers; None where there are fewer than three, or where the baseline's α is not 0.
    """
    baseline = experiment.baseline
    base = ends.get(baseline, {})
    if not base or any(of["alpha"].any() or np.isnan(of["alpha_gradient"]).any() for of in base.values()):
        return None
    rows: list[dict[str, Any]] = []
    for arm, layers in _layer_study(experiment, point).items():
        seeds = [seed for seed in base if store.run(Cell(point, arm, seed)).state == "finished"]
        if not seeds:
            continue
        alpha = experiment.arms[arm].variant.options.get("alpha", 1.0)
        slopes = [base[seed]["alpha_gradient"][list(layers)].sum() * alpha for seed in seeds]
        moved = [_metric(store, Cell(point, arm, seed)) - _metric(store, Cell(point, baseline, seed)) for seed in seeds]
        rows.append({"arm": arm, "predicted": float(np.mean(slopes)), "measured": float(np.mean(moved))})
    if len(rows) < LEAST_ARMS:
        return None
    pearson, spearman = _correlations([row["predicted"] for row in rows], [row["measured"] for row in rows])
    few = "; a correlation over so few says little" if len(rows) < FEW_ARMS else ""
    words = (
        f"Predicted: ∂L/∂α of {baseline} at α = 0, summed over an arm's layers and heads, times its α, mean over "
        f"seeds, in nats a token of the diagnosed rows. Measured: Δ {experiment.metric.name} against {baseline} over "
        "the same seeds. The prediction is of the first order: it takes a model that was trained without the "
        "exclusion and the loss as a straight line in α, while the arms were trained with it from the start and could "
        "adapt to it. A correlation of 1 would be a prediction of every difference between arms, up to scale. "
        f"{len(rows)} arms{few}."
    )
    return {"words": words, "spearman": spearman, "pearson": pearson, "n": len(rows), "rows": rows}


def _layer_study(experiment: Experiment, point: str) -> dict[str, tuple[int, ...]]:
    """arm -> its layers: the largest set of arms that differ in their layers alone."""
    model = resolve(experiment, Cell(point, experiment.baseline, experiment.seeds[0])).model
    baseline = experiment.arms[experiment.baseline]
    studies: dict[str, dict[tuple[int, ...], str]] = {}
    for arm in (experiment.arms[name] for name in tested_arms(experiment)):
        if arm.sets == baseline.sets and _is_fixed(arm):
            options = {"alpha": 1.0, **arm.variant.options}
            studies.setdefault(repr(sorted(options.items())), {}).setdefault(
                select_layers(arm.variant.layers, model), arm.name
            )
    largest = max(studies.values(), key=len, default={})
    return {arm: layers for layers, arm in largest.items()}


def _is_fixed(arm: Arm) -> bool:
    """XSA of one fixed α, against the value that ∂L/∂α of a standard model is about."""
    options = arm.variant.options
    alpha = options.get("alpha", 1.0)
    number_ = isinstance(alpha, (int, float)) and not isinstance(alpha, bool)
    return arm.variant.name == "xsa" and number_ and options.get("against", "mixed") == "mixed"


def _metric(store: RunStore, cell: Cell) -> float:
    status = store.run(cell).status
    return float(status["val_bpb"] if "val_bpb" in status else status["value"])


def _correlations(a: Sequence[float], b: Sequence[float]) -> tuple[float | None, float | None]:
    """Pearson's and Spearman's; None where a side does not vary."""
    if any(np.ptp(side) <= 1e-12 * np.abs(side).max() for side in (a, b)):
        return None, None
    return float(_scipy.stats.pearsonr(a, b).statistic), float(_scipy.stats.spearmanr(a, b).statistic)
