"""What a run's experiment says, as Markdown for a model card: arms, figures and verdicts out of summary.json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .outcome import plus_minus
from .store import RunFolder


def experiment_card(run: Path) -> str:
    """Of OUT/experiments/NAME/runs/RUN, or RUN/sft. "" where the experiment has no report yet, or lies elsewhere.

    Reads what the last report said and computes nothing. Raises ValueError naming the file where it is damaged.
    """
    folder = run.resolve()
    base = folder.parent if "sft" in RunFolder(folder).read("config") else folder
    content = RunFolder(base.parents[1]).read("summary")
    if not content:
        return ""
    try:
        return "\n".join(_lines(content, base.name, tuned=base != folder)) + "\n"
    except KeyError as error:
        path = base.parents[1] / "summary.json"
        raise ValueError(f"{path}: has no {error}, from another version; xsalab report writes it again") from None


def _lines(content: Mapping[str, Any], run: str, *, tuned: bool) -> list[str]:
    several = len(content["points"]) > 1
    lines = [f"## The experiment: {content['name']}", ""]
    lines += [f"{text}." for text in content["headline"]] or ["Nothing is decided yet."]
    own = next((entry for entry in content["runs"] if entry["name"] == run), None)
    if own is not None:
        place = f", point {own['point']}" if several else ""
        value = f", {content['metric']} {own['value']:.4f}" if "value" in own else ""
        after = ", then fine-tuned" if tuned else ""
        lines += ["", f"This model: arm {own['arm']}{place}, seed {own['seed']}{value}{after}."]
    lines += ["", *_levels(content["arms"], content["levels"], content["metric"], several)]
    rows = [row for row in (*content["contrasts"], *content["combinations"]) if "estimate" in row]
    lines += ["", *_contrasts(rows, several)] if rows else []
    for benchmark in content.get("benchmarks", []):
        found = benchmark["levels"]
        lines += ["", f"### {benchmark['name']}", "", *_levels(content["arms"], found, benchmark["name"], several)]
        lines += ["", *(f"- {row['sentence']}" for row in benchmark["contrasts"] if row["sentence"])]
    if content["warnings"]:
        lines += ["", "To know before believing this:", "", *(f"- {text}" for text in content["warnings"])]
    return lines


def _levels(arms: Mapping[str, str], levels: Sequence[Mapping[str, Any]], metric: str, several: bool) -> list[str]:
    rows = [
        [
            *([level["point"]] if several else []),
            arms.get(level["arm"], level["arm"]),
            f"{level['mean']:.4f}",
            "" if level["sd"] is None else f"{level['sd']:.4f}",
            str(level["n"]),
        ]
        for level in levels
    ]
    return _table([*(["point"] if several else []), "arm", f"mean {metric}", "sd over seeds", "seeds"], rows)


def _contrasts(rows: Sequence[Mapping[str, Any]], several: bool) -> list[str]:
    told = [
        [
            *([str(row.get("point", ""))] if several else []),
            row["name"],
            plus_minus(row["estimate"]["mean"], row["estimate"]["half_width"]),
            str(row["estimate"]["n"]),
            row["verdict"]["text"] if "verdict" in row else "exploratory",
        ]
        for row in rows
    ]
    confidence = rows[0]["estimate"]["confidence"]
    heads = ["contrast", f"difference, {100 * confidence:.3g} % interval", "seeds", "verdict"]
    return _table([*(["point"] if several else []), *heads], told)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Markdown's lines; a bar within a cell is escaped."""
    cells = [heads, ["---"] * len(heads), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]
