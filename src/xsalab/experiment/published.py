"""The published figures of XSA beside ours, where an experiment has the published sizes, and what they can support.

Source: Dayapule 2026, "Exclusive Self-Attention Beyond AdamW", CC BY 4.0: one run an arm, eight GPUs, ClimbMix-400B,
Muon for matrices and AdamW for the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..stats.core_error import CORE_TASKS, CoreError, core_errors
from .analyses import plain
from .design import Cell, Experiment, resolve

SOURCE = "Dayapule 2026, “Exclusive Self-Attention Beyond AdamW”, CC BY 4.0; one run an arm"
SOURCE_OF_COUNTS = "DCLM (arXiv 2406.11794): item counts and baselines of the 22 tasks of CORE"
Row = Mapping[str, Any]


class Study(NamedTuple):
    """One depth of the published study: metric -> (standard, XSA)."""

    name: str
    depth: int
    width: int
    heads: int
    figures: Mapping[str, tuple[float, float]]


STUDIES = (
    Study("d12", 12, 768, 12, {"bpb": (0.8484, 0.8457), "CORE": (0.1602, 0.1508)}),
    Study("d24", 24, 1024, 16, {"bpb": (0.7193, 0.7171), "CORE": (0.2593, 0.2606), "ChatCORE": (0.3638, 0.3682)}),
)
FOLDERS = {"CORE": "core", "ChatCORE": "sft/chatcore"}  # of the answers that a published benchmark compares with
KEPT = ("name", "treatment", "baseline", "seeds", "estimate", "verdict", "sentence")  # of a contrast of ours


def published(experiment: Experiment, contrasts: Sequence[Row], benchmarks: Sequence[Row]) -> dict[str, Any] | None:
    """The published rows of the points that have a published size; None where no point has one.

    contrasts, benchmarks: as ``outcome`` gives them. ``ours`` of a row is the contrast of XSA with α = 1 at all layers
    against standard attention under Muon + AdamW, None where there is no estimate of it; a benchmark over some of its
    tasks alone does not compare and is left out. Differences are XSA − standard.
    """
    sizes = {point.name: _study(experiment, point.name) for point in experiment.points}
    found = {point: study for point, study in sizes.items() if study is not None}
    if not found:
        return None
    rows: list[dict[str, Any]] = []
    for point, study in found.items():
        for metric, (standard, xsa) in study.figures.items():
            rows.append(
                {
                    "point": point, "study": study.name, "metric": metric, "published_standard": standard,
                    "published_xsa": xsa, "published_difference": round(xsa - standard, 6),
                    "ours": _ours(experiment, point, metric, contrasts, benchmarks),
                }
            )  # fmt: skip
    studies = [study for study in STUDIES if study in found.values()]
    errors = {study.name: core_errors(sum(study.figures["CORE"]) / 2) for study in studies}
    return {
        "points": list(found),
        "rows": rows,
        "sentence": _sentence(studies, errors),
        "core_error": {name: plain(error) for name, error in errors.items()},
        "sources": [SOURCE, SOURCE_OF_COUNTS],
    }


def _study(experiment: Experiment, point: str) -> Study | None:
    if experiment.command:  # nobody here knows its model
        return None
    model = resolve(experiment, Cell(point, experiment.baseline, experiment.seeds[0])).model
    size = model.depth, model.width, model.heads
    return next((study for study in STUDIES if (study.depth, study.width, study.heads) == size), None)


def _ours(
    experiment: Experiment, point: str, metric: str, contrasts: Sequence[Row], benchmarks: Sequence[Row]
) -> dict[str, Any] | None:
    rows = contrasts
    if metric in FOLDERS:
        of = [bench for bench in benchmarks if bench["folder"] == FOLDERS[metric] and not bench["partial"]]
        rows = of[0]["contrasts"] if of else []
    for row in rows:
        if row["point"] == point and row["kind"] == "effect" and "estimate" in row and _is_published(experiment, row):
            return {key: row[key] for key in KEPT if key in row}
    return None


def _is_published(experiment: Experiment, row: Row) -> bool:
    """Whether a contrast compares what the published study compared."""
    cells = (Cell(row["point"], row[side], experiment.seeds[0]) for side in ("treatment", "baseline"))
    xsa, standard = (resolve(experiment, cell) for cell in cells)
    options = {"alpha": 1.0, "against": "mixed", "allow_any_alpha": False, **xsa.variant.options}
    return (
        (xsa.variant.name, xsa.variant.layers, standard.variant.name) == ("xsa", "all", "standard")
        and (options["alpha"], options["against"]) == (1.0, "mixed")
        and xsa.optim == standard.optim
        and xsa.optim.kind == "hybrid"
    )


def _sentence(studies: Sequence[Study], errors: Mapping[str, CoreError]) -> str:
    """What one run an arm can support, in numbers from item counts alone."""
    first = errors[studies[0].name]
    r_high, r_low = first.correlations
    words = [
        "The published figures are of one run an arm, so nothing says how much another seed would change them. "
        f"How far the choice of items alone lets CORE stray can be reckoned: {len(CORE_TASKS)} tasks, "
        f"{sum(task.items for task in CORE_TASKS):,} items, accuracies from guessing to {first.lift:g} above it, "
        f"and for a pair right answers that correlate by {r_low:g} to {r_high:g}."
    ]
    for study in studies:
        error = errors[study.name]
        standard, xsa = study.figures["CORE"]
        size = abs(xsa - standard)
        least, most = size / error.unpaired[2], size / min(error.paired[0][0], error.paired[-1][0])
        if most < 1.96:
            says = "the items' luck alone makes such a difference, whatever is assumed"
        elif least > 1.96:
            says = "more than the items' luck alone makes, and still of one seed"
        else:
            says = "the items' luck alone can make such a difference unless the two models answer very much alike"
        words.append(
            f"At {study.name} one model's CORE has a standard error of {_four(error.single[1])} "
            f"({_range(error.single)}), and a difference of two models one of {_four(error.unpaired[1])} "
            f"({_range(error.unpaired)}) taken as unpaired, {_four(error.paired[0][1])} to "
            f"{_four(error.paired[-1][1])} paired. The published difference of {_signed(xsa - standard)} is "
            f"{least:.1f} to {most:.1f} of these: {says}."
        )
    words.append("A difference of one run an arm in bits per byte has no standard error at all.")
    return " ".join(words)


def _four(value: float) -> str:
    return f"{value:.4f}"


def _range(values: tuple[float, float, float]) -> str:
    return f"{values[0]:.4f} to {values[2]:.4f}"


def _signed(value: float) -> str:
    return f"{value:+.4f}".replace("-", "−")
