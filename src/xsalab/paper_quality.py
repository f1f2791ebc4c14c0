"""Sections of report.md and report.tex: quality, contrasts, seeds, factors, cost, and the published figures."""

from __future__ import annotations

from collections.abc import Iterator

from .experiment.outcome import plus_minus
from .paper_cells import Growing, Row, arm_name, confidence, ends, number, pair_name, titled, valued, verdict_word
from .paper_format import Block, Bullets, Heading, Paragraph
from .report import (
    benchmark_figure,
    benchmark_lines,
    bpb,
    byte_count,
    clock,
    confidence90,
    further_lines,
    p_value,
    percent,
    ratio,
)


def first_table(content: Row) -> Iterator[Block]:
    yield Heading(2, "Quality and cost")
    metric, own = content["metric"], content["engine"] == "xsalab"
    side = "lower" if content["lower_is_better"] else "higher"
    caption = (
        f"{content['name']}: {valued(content)} of each arm, mean over seeds ({side} is better), and Δ, the mean of "
        f"the differences seed by seed, ± half of its {confidence(content)} interval."
    )
    timed = bool(content["costs"].get("costs"))
    caption += " Step time: its ratio to the baseline's." if timed else ""
    numbers = [valued(content), "sd", "seeds", f"Δ {metric}", "Δ relative", *(["step time"] if timed else [])]
    table = Growing(content, "quality", caption, ["arm", "against", "verdict"], numbers)
    levels = {(level["point"], level["arm"]): level for level in content["levels"]}
    costs = {(cost["point"], cost["arm"]): cost for cost in content["costs"].get("costs", [])}

    def add(point: str, arm: str, row: Row | None) -> None:
        level, cost = levels.get((point, arm)), costs.get((point, arm))
        estimate = (row or {}).get("estimate")
        spread = estimate["half_width"] if estimate else None
        cells = ["", "", ""]
        if level:
            value = bpb(level["mean"], spread or level["sd"]) if own else f"{level['mean']:.5g}".replace("-", "−")
            cells = [value, number(level["sd"], 2), str(level["n"])]
        cells.append(plus_minus(estimate["mean"], estimate["half_width"]) if estimate else "")
        cells.append(percent(estimate["relative"]) if estimate and estimate["relative"] is not None else "")
        if timed:
            cells.append(ratio(cost["ratio"]) if cost else "")
        against, verdict = (row["baseline"], verdict_word(row)) if row else ("", "baseline")
        table.add(point, arm_name(arm), against, verdict, *cells)

    for point in content["points"]:
        add(point, content["baseline"], None)
        rows = [row for row in content["contrasts"] if row["point"] == point]
        for row in sorted(rows, key=lambda row: row["kind"] != "effect"):
            add(point, row["treatment"], row)
    yield from table.blocks()
    if content["twin"] is not None:
        yield Paragraph(
            "The twin, one cell run again: " + ("identical to the bit." if content["twin"] else "it differs.")
        )
    controls = [row for row in content["contrasts"] if row["kind"] == "positive" and "verdict" in row]
    if controls:
        found = sum(row["verdict"]["word"] == "worse" for row in controls)
        yield Paragraph(f"Positive controls, known to hurt: {found} of {len(controls)} were found to be worse.")


def benchmark_table(content: Row) -> Iterator[Block]:
    if not content["benchmarks"]:
        return
    caption = f"{content['name']}: benchmarks, mean over seeds, with Δ ± half of its {confidence(content)} interval."
    table = Growing(content, "benchmarks", caption, ["benchmark", "arm", "against", "verdict"], ["figure", "sd", "Δ"])
    for bench in content["benchmarks"]:
        for level in bench["levels"]:
            figure = benchmark_figure(level["mean"]) if bench["tasks"] else bpb(level["mean"], level["sd"])
            own = [c for c in bench["contrasts"] if (c["point"], c["treatment"]) == (level["point"], level["arm"])]
            for row in own or [None]:
                estimate = row.get("estimate") if row else None
                delta = plus_minus(estimate["mean"], estimate["half_width"]) if estimate else ""
                words = (row["baseline"], verdict_word(row)) if row else ("", "")
                table.add(
                    level["point"], bench["name"], arm_name(level["arm"]), *words, figure, number(level["sd"], 2), delta
                )
    yield from titled("Benchmarks", table.blocks())
    if lines := benchmark_lines(content):
        yield Bullets(tuple(lines))


def contrast_table(content: Row) -> Iterator[Block]:
    caption = (
        f"{content['name']}: every contrast, with its {confidence(content)} interval. p adjusted: by Holm's rule in "
        "the declared family. Sign flip: its p, and the smallest that it can reach. Smallest detectable: the true "
        f"difference found four times out of five. Equivalent: the {confidence90(content)} interval lies inside the "
        "margin."
    )
    numbers = [f"Δ {content['metric']}", "interval", "pairs", "p", "p adjusted", "sign flip", "smallest detectable"]
    table = Growing(content, "contrasts", caption, ["contrast", "verdict"], numbers)
    for row in content["contrasts"]:
        if "estimate" not in row:
            table.add(row["point"], pair_name(row), verdict_word(row), *[""] * len(numbers))
            continue
        e, flip = row["estimate"], row["sign_flip"]
        flips = "" if e["n"] < 2 else f"{p_value(flip['p'])} (least {p_value(flip['smallest'])})"
        adjusted = "" if row["adjusted_p"] is None else p_value(row["adjusted_p"])
        table.add(
            row["point"], pair_name(row), verdict_word(row), number(e["mean"]), ends(e["low"], e["high"]), str(e["n"]),
            p_value(e["p"]), adjusted, flips, number(row["smallest_detectable"], 2),
        )  # fmt: skip
    yield from titled("Contrasts", table.blocks())


def seed_table(content: Row) -> Iterator[Block]:
    """Every run's value: no seed is chosen and none is left out."""
    caption = f"{content['name']}: {valued(content)} of every run."
    table = Growing(content, "seeds", caption, ["arm"], [f"seed {seed}" for seed in content["seeds"]])
    runs = {(run["point"], run["arm"], run["seed"]): run for run in content["runs"]}
    for point in content["points"]:
        for arm in content["arms"]:
            found = [runs.get((point, arm, seed)) for seed in content["seeds"]]
            if any(found) and arm != "twin":
                table.add(point, arm_name(arm), *(_value(run) for run in found))
    yield from titled("All seeds", table.blocks())


def _value(run: Row | None) -> str:
    if run is None:
        return ""
    return f"{run['value']:.6f}".replace("-", "−") if run["state"] == "finished" else run["state"]


def equal_time(content: Row) -> Iterator[Block]:
    if content["equal_time"] or content["doses"]:
        yield from titled("Equal time, dose and response", [Bullets(tuple(further_lines(content)))])


def factor_table(content: Row) -> Iterator[Block]:
    side = "Below" if content["lower_is_better"] else "Above"
    caption = f"{content['name']}: main effects, interactions, means and trends over points. {side} zero is better."
    table = Growing(
        content, "factors", caption, ["contrast", "kind", "verdict"], [f"Δ {content['metric']}", "interval", "p"]
    )
    for row in content["combinations"]:
        e = row.get("estimate")
        numbers = (
            [plus_minus(e["mean"], e["half_width"]), ends(e["low"], e["high"]), p_value(e["p"])] if e else [""] * 3
        )
        kind = row["kind"] + (f", for each doubling of {row['scale']}" if row["scale"] else "")
        table.add(row["point"] or "all", row["words"], kind, verdict_word(row), *numbers)
    yield from titled("Factors, and points", table.blocks())


def cost_table(content: Row) -> Iterator[Block]:
    costs = content["costs"]
    caption = (
        f"{content['name']}: cost beside the baseline, measured side by side: median ratio with its 95 % interval."
    )
    table = Growing(content, "cost", caption, ["arm"], ["step time", "interval", "saved for backward", "bytes"])
    for point in content["points"]:
        base = costs.get("points", {}).get(point)
        if base:
            table.add(
                point,
                content["baseline"],
                clock(base["baseline_seconds"]),
                "",
                "",
                byte_count(base["baseline_saved_bytes"]),
            )
        for cost in costs.get("costs", []):
            if cost["point"] == point:
                ends = f"{cost['low']:.3f} to {cost['high']:.3f}"
                saved = ratio(cost["saved_ratio"]), byte_count(cost["saved_bytes"])
                table.add(point, arm_name(cost["arm"]), ratio(cost["ratio"]), ends, *saved)
    yield from titled("Cost", table.blocks())


def published_table(content: Row) -> Iterator[Block]:
    found = content.get("published")
    if not found:
        return
    yield Heading(2, "Beside the published figures")
    caption = f"{content['name']}: published figures, one run an arm, and our difference of XSA and standard attention."
    table = Growing(
        content,
        "published",
        caption,
        ["metric"],
        ["standard", "XSA", "published difference", "our difference", "pairs"],
    )
    for row in found["rows"]:
        estimate = (row["ours"] or {}).get("estimate")
        ours = [plus_minus(estimate["mean"], estimate["half_width"]), str(estimate["n"])] if estimate else ["", ""]
        values = [f"{row[f'published_{side}']:.4f}" for side in ("standard", "xsa")]
        table.add(row["point"], row["metric"], *values, benchmark_figure(row["published_difference"]), *ours)
    yield from table.blocks()
    yield Paragraph(found["sentence"])
    yield Bullets(tuple(found["sources"]))
