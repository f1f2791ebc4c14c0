"""What an experiment says: the statistics of every contrast, controls, costs and conditions, as plain values.

The terminal table, the report and summary.json print this and compute nothing.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config import dump
from ..data.shards import Pieces, described
from ..stats import (
    Estimate,
    PairTable,
    SignFlip,
    correlation,
    document_interval,
    mean_difference,
    minimum_detectable,
    sentence,
    sign_flip,
)
from ..stats.looks import Looks, look_levels
from ..stats.paired import LEAST_SEEDS
from .analyses import dose_responses, equal_times, estimate_row, remembered_scores
from .benchmarks import benchmarks
from .command import unchecked
from .design import Arm, Cell, Combination, Contrast, Experiment, combinations, contrasts, expand, resolve
from .judging import adjusted_ps, in_family, is_exploratory, judge, margin_of
from .mechanism_tables import mechanism_tables
from .pairing import PairSet, Scores, pairs, twin_agrees
from .published import published
from .rates import rate_sweeps
from .stability import stability
from .stages import changed_since, runs_before_looks
from .store import RunFolder, RunStore
from .timing import measured_costs

FORMAT = 1
FEW = 8  # contrasts that lack runs are named one by one up to this many
OPTIMIZERS = {"hybrid": "Muon + AdamW", "muon": "plain Muon + AdamW", "adamw": "AdamW"}


def describe_arm(arm: Arm) -> str:
    """An arm in words: "xsa (alpha = 1, all layers)"."""
    if arm.words:
        return arm.words
    parts = [f"{'α' if name == 'alpha' else name} = {_plain(value)}" for name, value in arm.variant.options.items()]
    if arm.variant.name != "standard":
        parts.append(f"{arm.variant.layers} layers" if arm.variant.layers == "all" else f"layers {arm.variant.layers}")
        if arm.variant.name != arm.name:
            parts.insert(0, arm.variant.name)
    parts += [f"{name} = {_plain(value)}" for name, value in arm.sets]
    if arm.steps:
        parts.append(f"{' or '.join(str(steps) for steps in dict.fromkeys(arm.steps.values()))} steps")
    return f"{arm.name} ({', '.join(parts)})" if parts else arm.name


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        parts = [f"{key} = {_plain(item)}" for key, item in value.items()]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        return f"({', '.join(parts)})"
    return f"{value:g}" if isinstance(value, float) else str(value)


def outcome(experiment: Experiment, store: RunStore) -> dict[str, Any]:
    """Everything that is said of an experiment, JSON-ready. Works while runs are missing: it says how many.

    experiment: as ``as_run`` gives it. Raises ValueError where two runs that stand as partners are no pair.
    """
    scores = remembered_scores()
    two_arms, combined = contrasts(experiment), combinations(experiment)
    found = [pairs(experiment, store, contrast, scores=scores) for contrast in (*two_arms, *combined)]
    levels = look_levels(experiment.looks) if experiment.looks else None
    confidence = 1 - levels.two_sided if levels else 0.95
    estimates = [mean_difference(pair.table, confidence=confidence) if pair.table else None for pair in found]
    adjusted = adjusted_ps(experiment, found, estimates)
    rows = [_contrast(experiment, *entry, levels) for entry in zip(found, estimates, adjusted, strict=True)]
    costs = measured_costs(experiment, store)
    cells = expand(experiment)
    runs = [_run(store, cell) for cell in cells]
    steady, steady_runs = stability(experiment, store)
    content: dict[str, Any] = {
        "format": FORMAT,
        "name": experiment.name,
        "engine": experiment.engine,
        "metric": experiment.metric.name,
        "lower_is_better": experiment.metric.lower_is_better,
        "baseline": experiment.baseline,
        "arms": {name: describe_arm(arm) for name, arm in experiment.arms.items()},
        "points": [point.name for point in experiment.points],
        "seeds": list(experiment.seeds),
        "primary": dump(experiment.primary),
        "family": [pair.contrast.name for pair in found if in_family(experiment, pair.contrast)],
        "confidence": confidence,
        "sequential": _sequential(experiment, levels),
        "factors": [vars(factor) for factor in experiment.factors],
        "crossed": {arm: list(levels) for arm, levels in experiment.levels.items()},
        "complete": all(run["state"] in ("finished", "diverged") for run in runs),
        "levels": _levels(runs),
        "contrasts": rows[: len(two_arms)],
        "combinations": rows[len(two_arms) :],
        # the curve's minimum is what is looked for, so a metric whose maximum is best has no curve
        "doses": dose_responses(experiment, store, scores, confidence) if experiment.metric.lower_is_better else [],
        "benchmarks": benchmarks(experiment, store, levels),
        "mechanism": mechanism_tables(experiment, store),
        "equal_time": equal_times(experiment, store, costs, scores, confidence),
        "twin": twin_agrees(experiment, store) if "twin" in experiment.arms else None,
        "costs": costs,
        "runs": runs,
        "stability": steady,
        "run_stability": steady_runs,
        "rates": rate_sweeps(experiment, store, rows[: len(two_arms)], scores, levels),
        "environments": _environments(store, cells),
        "corpora": _corpora(store),
        "unchecked": unchecked(experiment),
        "changed": {name: list(values) for name, values in changed_since(experiment, store).items()},
        "left_out": _left_out(store, cells),
        "runs_before_looks": runs_before_looks(store),
        "toml": experiment.text,
    }
    shares = all(level["mean"] > 0 for level in content["levels"])
    for row, pair in zip(rows, found, strict=True):
        trend = pair.contrast
        if isinstance(trend, Combination) and trend.kind == "trend" and pair.table is not None and shares:
            row["relative_trend"] = _relative_trend(experiment, store, trend, content["levels"], scores, confidence)
    content["published"] = published(experiment, content["contrasts"], content["benchmarks"])
    content["headline"] = headline(content)
    content["warnings"] = _warnings(content)
    return content


def _left_out(store: RunStore, cells: Sequence[Cell]) -> list[str]:
    """Names of runs that ended and that the experiment no longer names: another seed, arm or point."""
    named = {cell.name for cell in cells}
    folders = sorted(path for path in (store.folder / "runs").glob("*") if path.is_dir() and path.name not in named)
    return [path.name for path in folders if RunFolder(path).state in ("finished", "diverged")]


def _sequential(experiment: Experiment, levels: Looks | None) -> dict[str, Any] | None:
    """The looks of a sequential experiment and the levels that its verdicts use; None for one of fixed seeds."""
    if levels is None:
        return None
    return {
        "looks": list(levels.seeds), "at": len(experiment.seeds),
        "two_sided": levels.two_sided, "one_sided": levels.one_sided,
    }  # fmt: skip


def _contrast(
    experiment: Experiment, pair: PairSet, estimate: Estimate | None, adjusted: float | None, levels: Looks | None
) -> dict[str, Any]:
    contrast, table = pair.contrast, pair.table
    row: dict[str, Any] = {
        **vars(contrast),
        "name": contrast.name,
        "metric": experiment.metric.name,
        "lower_is_better": experiment.metric.lower_is_better,
        "terms": [vars(term) for term in contrast.terms],
        "seeds": list(pair.seeds),
        "unfinished": list(pair.unfinished),
        "diverged_treatment": list(pair.diverged_treatment),
        "diverged_baseline": list(pair.diverged_baseline),
        "differs": {name: [repr(a), repr(b)] for name, (a, b) in pair.differs.items()},
    }
    if isinstance(contrast, Contrast):
        row["label"] = describe_arm(experiment.arms[contrast.treatment])
        sides = row["label"], _under(experiment, contrast)
    else:
        left, _, right = contrast.words.partition(" against ")
        sides = left, right
    margin = margin_of(experiment, estimate) if estimate is not None else 1.0
    verdict = judge(
        experiment, pair, estimate, margin=margin, lower_is_better=experiment.metric.lower_is_better,
        adjusted_p=adjusted, looks=levels,
    )  # fmt: skip
    if estimate is not None and table is not None:
        flip: SignFlip = sign_flip(table)
        moved = correlation(table) if isinstance(contrast, Contrast) else None
        row |= {
            "estimate": estimate_row(estimate),
            "margin": margin,
            "adjusted_p": adjusted,
            "over_documents": _over_documents(table),
            "sign_flip": vars(flip),
            "correlation": vars(moved) if moved else None,
            "differences": table.differences.tolist(),
            "baseline_values": table.baseline_means.tolist(),
            "treatment_values": table.treatment_means.tolist(),
            "smallest_detectable": (
                minimum_detectable(estimate.standard_error * estimate.n**0.5, estimate.n)
                if estimate.n >= 2 and estimate.standard_error is not None
                else None
            ),
        }
    row["exploratory"] = is_exploratory(experiment, contrast)
    if verdict is not None:
        row["verdict"] = {**vars(verdict), "text": str(verdict)}
        metric = experiment.metric.name + (" for each doubling" if contrast.kind == "trend" else "")
        row["sentence"] = sentence(*sides, estimate, verdict, metric=metric)
    return row


def _relative_trend(
    experiment: Experiment,
    store: RunStore,
    trend: Combination,
    levels: Sequence[Mapping[str, Any]],
    scores: Callable[[RunFolder], Scores],
    confidence: float,
) -> dict[str, float | None]:
    """The slope of the relative difference, a share of the baseline's metric for each doubling.

    Each point's difference is divided by the mean of its baseline, taken as known: its error is small beside that of
    a difference. For a metric that itself falls with the scale, an effect of constant share has slope 0 here alone.
    """
    baseline = trend.terms[-1].arm
    shares = {level["point"]: 1 / level["mean"] for level in levels if level["arm"] == baseline}
    table = pairs(experiment, store, trend, scores=scores, scale=shares).table
    assert table is not None, "the trend has an estimate"
    estimate = mean_difference(table, confidence=confidence)
    return {"mean": estimate.mean, "low": estimate.low, "high": estimate.high}


def _under(experiment: Experiment, contrast: Contrast) -> str:
    """The baseline in words, with the optimizer where both arms have the same: "standard under Muon + AdamW"."""
    if experiment.command:
        return contrast.baseline
    kinds = {
        resolve(experiment, Cell(contrast.point, arm, experiment.seeds[0])).optim.kind
        for arm in (contrast.treatment, contrast.baseline)
    }
    return f"{contrast.baseline} under {OPTIMIZERS[kinds.pop()]}" if len(kinds) == 1 else contrast.baseline


def _over_documents(table: PairTable) -> dict[str, float | None] | None:
    """The interval over documents alone, shown as what it is where there are too few seeds to decide."""
    if len(table.seeds) >= LEAST_SEEDS or len(table.items) < 2:
        return None
    estimate = document_interval(table)
    return {"low": estimate.low, "high": estimate.high}


def _run(store: RunStore, cell: Cell) -> dict[str, Any]:
    status = store.run(cell).status
    kept = ("state", "step", "steps", "val_bpb", "value", "seconds", "message", "note", "resumes")
    found = {"value": status["val_bpb"]} if "val_bpb" in status else {}
    return {**vars(cell), "name": cell.name, **found, **{key: status[key] for key in kept if key in status}}


def _levels(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of each arm at each point: the mean over its finished seeds, and their standard deviation."""
    found: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        if run["state"] == "finished":
            found.setdefault((run["point"], run["arm"]), []).append(run["value"])
    return [
        {
            "point": point,
            "arm": arm,
            "n": len(values),
            "mean": statistics.fmean(values),
            "sd": statistics.stdev(values) if len(values) > 1 else None,
        }
        for (point, arm), values in found.items()
    ]


def _environments(store: RunStore, cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """The distinct records of software, our own code included, and device; threads and kernels aside."""
    found: dict[str, dict[str, Any]] = {}
    for cell in cells:
        run = store.run(cell)
        if not (run.path / "fingerprint.json").is_file():
            continue
        fingerprint = run.fingerprint()
        record = {**fingerprint["environment"], "code": fingerprint["code"], "machine": fingerprint["machine"]}
        key = {name: value for name, value in record.items() if name not in ("threads", "kernel")}
        found.setdefault(repr(sorted(key.items())), record)
    return list(found.values())


def _corpora(store: RunStore) -> list[dict[str, Any]]:
    """What ``begin_experiment`` stored, with the packing of each context where the packed rows are still there."""
    path = store.folder / "corpora.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    for corpus in found:
        if "shards" in corpus["manifest"]:
            _describe_shards(corpus, store.folder.parents[1] / "corpora" / corpus["folder"])
            continue
        rows = [store.folder.parents[1] / "corpora" / corpus["folder"] / f"rows-{n}.json" for n in corpus["contexts"]]
        corpus["packing"] = [json.loads(file.read_text(encoding="utf-8")) for file in rows if file.is_file()]
    return found


def _describe_shards(corpus: dict[str, Any], folder: Path) -> None:
    """The counts of the shards that are prepared by now; of those at the beginning where they are not there."""
    packed = [Pieces(folder, corpus["manifest"], context) for context in corpus["contexts"]]
    if packed[0].prepared():
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        corpus["manifest"] = described(folder, manifest, packed[0].context)
    corpus["packing"] = [pieces.summary() for pieces in packed if pieces.prepared()]


def headline(content: Mapping[str, Any]) -> list[str]:
    """The primary contrast with its verdict, one sentence a point, with its cost and the null control beside it."""
    many = len(content["points"]) > 1
    lines = [
        f"{row['point']}: {row['sentence']}" if many and row["point"] else row["sentence"]
        for row in content["combinations"]
        if row["primary"] and "sentence" in row
    ]
    for point in content["points"] if not lines else ():
        rows = [row for row in content["contrasts"] if row["point"] == point]
        effects = [row for row in rows if row["kind"] == "effect" and "sentence" in row]
        main = next((row for row in effects if row["primary"]), effects[0] if effects else None)
        if main is None:
            continue
        text = f"{point}: {main['sentence']}" if many else main["sentence"]
        for cost in content["costs"].get("costs", []):
            if (cost["point"], cost["arm"]) == (point, main["treatment"]) and main["baseline"] == content["baseline"]:
                text += f"; step time × {cost['ratio']:.3f}"
        null = next((row for row in rows if row["kind"] == "null" and "estimate" in row), None)
        if null is not None and null["estimate"]["half_width"] is not None:
            text += f"; null control {plus_minus(null['estimate']['mean'], null['estimate']['half_width'])}"
        lines.append(text)
    if not lines:  # a declared family of combinations alone
        lines = [row["sentence"] for row in content["combinations"] if "sentence" in row][:1]
    if looks := content["sequential"]:
        lines = [f"{line} ({_look_in_words(looks)})" for line in lines]
    return lines


def _look_in_words(looks: Mapping[str, Any]) -> str:
    return (
        f"sequential: the look at {looks['at']} of at most {looks['looks'][-1]} seeds, "
        f"{100 * (1 - looks['two_sided']):.3g} % intervals"
    )


def plus_minus(mean: float, half_width: float | None) -> str:
    """ "−0.0031 ± 0.0012": the half width's two significant digits decide the digits of the mean, with a true minus."""
    if not half_width:
        return f"{mean:+.4g}".replace("-", "−") + ("" if half_width is None else " ± 0")
    places = max(0, 1 - int(f"{half_width:.1e}".partition("e")[2]))
    return f"{mean:+.{places}f} ± {half_width:.{places}f}".replace("-", "−")


def _of(row: Mapping[str, Any], content: Mapping[str, Any]) -> str:
    """ "of ARM ", where a control is not that of the baseline."""
    return "" if row["baseline"] == content["baseline"] else f"of {row['baseline']} "


def _warnings(content: Mapping[str, Any]) -> list[str]:
    """What a reader must know before believing the table."""
    found: list[str] = []
    lacking = [row for row in (*content["contrasts"], *content["combinations"]) if row["unfinished"]]
    if len(lacking) > FEW:
        found.append(f"{len(lacking)} contrasts lack runs that are not finished; their numbers are of fewer seeds")
        lacking = []
    for row in content["contrasts"]:
        where = f"{row['point']}: " if len(content["points"]) > 1 else ""
        verdict = row.get("verdict", {}).get("word")
        if row["kind"] == "positive" and verdict is not None and verdict != "worse":
            found.append(
                f"{where}the positive control {_of(row, content)}came out {verdict}, not worse: this experiment is too "
                "small to find a change that is known to hurt, and its other verdicts say little"
            )
        if row in lacking:
            found.append(f"{where}{row['name']}: seeds {row['unfinished']} are not finished")
        if row["diverged_baseline"]:
            found.append(f"{where}the baseline {row['baseline']} diverged at seeds {row['diverged_baseline']}")
    for row in content["combinations"]:
        if row in lacking:
            found.append(f"{row['name']}: of seeds {row['unfinished']} a run is not finished")
    for name, (before, now) in content["changed"].items():
        found.append(f"{name} = {now!r} was not declared before the runs: they began with {before!r}")
    if names := content["left_out"]:
        shown = ", ".join(names[:6]) + (", …" if len(names) > 6 else "")
        found.append(f"{len(names)} runs are there that the file no longer names, and are left out: {shown}")
    if content["runs_before_looks"]:
        found.append(
            f"the looks were declared when {content['runs_before_looks']} runs had ended: the error of 5 % over all "
            "looks holds only if nobody had seen them"
        )
    if content["twin"] is False:
        found.append(
            "the twin differs: one cell run twice does not agree to the bit, this machine is not deterministic"
        )
    if len(content["environments"]) > 1:
        found.append("the runs were made on different machines or software: no claim is made about time")
    for run in content["runs"]:
        if "note" in run:
            found.append(f"{run['name']}: {run['note']}")
    if content["costs"].get("busy"):
        share = 100 * content["costs"]["others"]
        found.append(f"step times were taken while other work held {share:.0f} % of the machine: do not rely on them")
    return found
