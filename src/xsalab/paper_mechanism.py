"""Sections of report.md and report.tex: the mechanism, stability, and learning rates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .drawing import plain_number
from .paper_cells import Growing, Row, arm_name, ends, number, titled
from .paper_format import Block, Bullets, Heading, Paragraph, Table
from .report import bpb, percent

# Of the measures of the mechanism, those in the table by layer; the page shows all.
COMPACT = (
    "cos_before", "cos_after", "removed", "self_over_uniform", "first_weight", "reach", "logit", "norm_after",
    "rank_after", "alpha", "alpha_gradient",
)  # fmt: skip


def mechanism(content: Row, pictures: Sequence[Block]) -> Iterator[Block]:
    found = content.get("mechanism") or []
    if found:
        yield Heading(2, "Mechanism")
    for entry in found:
        where = f" at {entry['point']}" if len(content["points"]) > 1 else ""
        yield Bullets(tuple(f"{entry['point']}: {s}" if where else s for s in entry["sentences"]))
        caption = (
            f"{content['name']}: mechanism{where} by layer after {entry['steps']:,} steps, mean over heads and seeds. "
            "The controls and the other measures are on the page."
        )
        layers = [f"layer {layer}" for layer in range(entry["layers"])]
        arms = [arm for arm in entry["arms"] if arm_name(arm) == arm]
        rows: list[tuple[str, ...]] = []
        for name, measure in entry["measures"].items():
            if name not in COMPACT:
                continue
            unit = f" [{measure['unit']}]" if measure["unit"] else ""
            for arm in arms:
                table = entry["arms"][arm]["final"].get(name, {}).get("mean")
                if table and any(value is not None for line in table for value in line):
                    rows.append((measure["label"] + unit, arm, *(number(_mean(line)) for line in table)))
        if rows:
            label = f"{content['name']}-mechanism-{entry['point']}"
            yield Table(label, caption, ("measure", "arm", *layers), tuple(rows), 2)
        yield from _geometry(content, entry, arms, where)
        if prediction := entry.get("prediction"):
            yield from _prediction(content, entry, prediction, where)
        if left_out := entry.get("left_out"):
            yield Paragraph(f"Not in the mechanism's tables{where}: {', '.join(left_out)}.")
    yield from pictures if found else ()


def _mean(values: Sequence[float | None]) -> float | None:
    """Of a layer's heads; None where one is missing."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _last(curve: Row | None) -> float | None:
    """Mean over seeds at the last step."""
    return _mean([values[-1] for values in curve["values"]]) if curve and curve["steps"] else None


def _geometry(content: Row, entry: Row, arms: Sequence[str], where: str) -> Iterator[Block]:
    measures = entry.get("geometry_measures") or {}
    steps = [c["steps"][-1] for arm in arms for c in entry["arms"][arm].get("geometry", {}).values() if c["steps"]]
    rows = [
        (arm, *(number(_last(entry["arms"][arm].get("geometry", {}).get(name))) for name in measures)) for arm in arms
    ]
    rows = [row for row in rows if any(row[1:])]
    if rows:
        labels = [f"{m['label']}{' [' + m['unit'] + ']' if m['unit'] else ''}" for m in measures.values()]
        caption = (
            f"{content['name']}: geometry of the update{where} at step {max(steps):,}, mean over matrices and seeds."
        )
        yield Table(f"{content['name']}-geometry-{entry['point']}", caption, ("arm", *labels), tuple(rows), 1)
    lines = []
    for cosine in entry.get("cosines") or ():
        value = _last(cosine)
        if value is not None:
            words = cosine.get("words") or f"cosine of the updates of {cosine['arm']} and {cosine['baseline']}"
            lines.append(f"{words}: {number(value)} at step {cosine['steps'][-1]:,}")
    if lines:
        yield Bullets(tuple(lines))


def _prediction(content: Row, entry: Row, found: Row, where: str) -> Iterator[Block]:
    rows = [(row["arm"], number(row["predicted"]), number(row["measured"])) for row in found["rows"]]
    known = [
        f"{name} {number(found[name.lower()], 2)}"
        for name in ("Pearson", "Spearman")
        if found[name.lower()] is not None
    ]
    caption = f"{content['name']}: ∂L/∂α as a prediction{where}. Correlation: {', '.join(known) or 'none'}."
    label = f"{content['name']}-prediction-{entry['point']}"
    yield Table(label, caption, ("arm", "predicted", "measured"), tuple(rows), 1)
    yield Paragraph(found["words"])


def stability(content: Row, pictures: Sequence[Block]) -> Iterator[Block]:
    caption = (
        f"{content['name']}: stability. Interval: exact, 95 %, of the share of runs that diverged. A run that recovers "
        "from a spike stays in the means; a diverged one does not."
    )
    numbers = [
        "runs",
        "finished",
        "diverged",
        "interval",
        "spikes",
        "largest z",
        "largest gradient norm",
        "largest logit",
    ]
    table = Growing(content, "stability", caption, ["arm"], numbers)
    for row in content["stability"]:
        shares = row.get("low"), row.get("high")
        interval = "" if None in shares else f"{percent(shares[0], signed=False)} to {percent(shares[1], signed=False)}"
        counts = [str(row[name]) for name in ("runs", "finished", "diverged")]
        values = [number(row.get(name)) for name in ("largest_z", "largest_grad_norm", "largest_logit")]
        spikes = "" if row.get("spikes") is None else str(row["spikes"])
        table.add(row.get("point", ""), arm_name(row["arm"]), *counts, interval, spikes, *values)
    runs = [run for run in content.get("run_stability") or () if run["spikes"] or run["nonfinite"] is not None]
    lines = []
    for run in runs:
        steps = ", ".join(f"{step:,}" for step in run["spike_steps"][:6])
        more = f" and {len(run['spike_steps']) - 6} more" if len(run["spike_steps"]) > 6 else ""
        said = [f"spikes at steps {steps}{more}"] if run["spikes"] else []
        said += [f"not finite at step {run['nonfinite']:,}"] if run["nonfinite"] is not None else []
        lines.append(f"{run['name']}: {', '.join(said)}")
    more = [Bullets(tuple(lines))] if lines else []
    yield from titled("Stability", [*table.blocks(), *more, *pictures] if table.rows else [])


def rates(content: Row, pictures: Sequence[Block]) -> Iterator[Block]:
    found = content.get("rates") or []
    if found:
        yield Heading(2, "Learning rates")
    for sweep in found:
        yield from _sweep(content, sweep)
    yield from pictures if found else ()


def _sweep(content: Row, sweep: Row) -> Iterator[Block]:
    where = f" at {sweep['point']}" if len(content["points"]) > 1 else ""
    caption = f"{content['name']}: mean {content['metric']} by {sweep['factor']}{where}, and how many runs diverged."
    caption += f" {sweep['rule']}" if sweep.get("rule") else ""
    rows: list[tuple[str, ...]] = []
    for row in sweep["rows"]:
        cells = ["" if mean is None else bpb(mean) for mean in row["means"]]
        lost = [f" ({count} diverged)" if count else "" for count in row["diverged"]]
        best = number(row["best"]) + (" (the last one tried)" if row["edge"] else "")
        cells = [(cell + words).strip() for cell, words in zip(cells, lost, strict=True)]
        rows.append((row["levels"], *cells, best, ends(*(row["widest"] or (None, None)))))
    label = f"{content['name']}-rates-{sweep['point']}-{sweep['factor']}"
    names = (plain_number(rate) for rate in sweep["rates"])
    yield Table(label, caption, ("setting", *names, "best", "widest range"), tuple(rows), 1)
    best = sweep.get("best_against_best")
    compared = [row for row in ([best, *best.get("further", ())] if best else []) if row.get("sentence")]
    equal = [row for row in sweep.get("equal_rate") or () if row.get("sentence")]
    lines = [
        f"best against best: {row['sentence']}" + (f"; {row['words']}" if row.get("words") else "") for row in compared
    ]
    lines += [f"at {plain_number(row['rate'])}: {row['sentence']}" for row in equal]
    if lines:
        yield Bullets(tuple(lines))
