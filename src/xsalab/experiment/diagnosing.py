"""Diagnostics of a finished run, with its weights at the end: what ``xsalab diagnose`` does to each folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from ..eval.diagnostics import Mechanism, diagnose, validation_rows
from .mechanism import DiagnoseConfig, stored, write_mechanism
from .run import load_run
from .store import RunFolder, read_parquet

MEANS = (
    "cos_before", "cos_after", "energy_before", "energy_after", "removed", "self_weight", "uniform", "first_weight",
    "reach", "alpha",
)  # fmt: skip


@dataclass(frozen=True)
class Diagnosed:
    """``steps`` of the run; ``path`` of the file; ``notes``: what the reader should know of what was measured."""

    run: Path
    steps: int
    path: Path
    found: Mechanism
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain values; ``layers``: as ``per_layer``."""
        content = {"run": str(self.run), "steps": self.steps, "file": str(self.path), "loss": self.found.loss}
        return {**content, "tokens": self.found.tokens, "layers": per_layer(self.found), "notes": list(self.notes)}


def usual_rows(folder: Path) -> int:
    """How many rows this run was diagnosed on before, or a run beside it; else the default of ``[diagnose]``."""
    for path in (*sorted(folder.glob("mechanism/step-*")), *sorted(folder.parent.glob("*/mechanism/step-*"))):
        (first, *_) = read_parquet(path, ("tokens", "end")).slice(0, 1).to_pylist()  # the whole context comes first
        return first["tokens"] // first["end"]
    return DiagnoseConfig.rows


def diagnose_run(folder: Path, rows: int = 0) -> Diagnosed:
    """Measures a finished run, or RUN/sft, on validation rows of its corpus into its folder's mechanism/step-N.parquet.

    rows: 0 for ``usual_rows``, so that runs can stand beside one another.

    Executes the plugins that are stored with the run. Raises ValueError where the run is not finished, diverged or is a
    command's, where its validation text fills fewer rows, and where its variant cannot be measured.
    """
    model, corpus, config = load_run(folder)
    rows = rows or usual_rows(folder)
    run = RunFolder(folder)
    steps, notes = run.status["steps"], []
    try:
        inputs, targets = validation_rows(corpus, config.eval, config.model.context, rows)
        found = diagnose(model, inputs, targets)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    if "sft" in run.read("config"):
        notes.append("fine-tuned: measured on the base run's validation text, not on conversations")
    old = stored(folder, "mechanism", ("step", "tokens"))
    if before := {row["tokens"] for row in old if row["step"] == steps} - {found.tokens}:
        notes.append(
            f"replaces a diagnosis of {max(before):,} tokens at this step by one of {found.tokens:,}; a report leaves "
            "out runs that were diagnosed on other rows than most"
        )
    return Diagnosed(folder, steps, write_mechanism(folder, steps, found), found, tuple(notes))


def per_layer(found: Mechanism) -> list[dict[str, Any]]:
    """One row a layer over the whole context: means over heads, the largest logit, and the sum of the heads' ∂L/∂α.

    None where a head has no finite number; a head without a logit has no part in the largest.
    """
    context = max(row["end"] for row in found.rows)
    whole = [row for row in found.rows if (row["start"], row["end"]) == (0, context)]
    layers: list[dict[str, Any]] = []
    for layer in dict.fromkeys(row["layer"] for row in whole):
        heads = [row for row in whole if row["layer"] == layer]
        logits = [row["logit"] for row in heads if row["logit"] is not None]
        slopes = _numbers(heads, "alpha_gradient")
        layers.append(
            {
                "layer": layer,
                **{name: fmean(values) if (values := _numbers(heads, name)) else None for name in MEANS},
                "logit": max(logits, default=None),
                "alpha_gradient": sum(slopes) if slopes else None,
            }
        )
    return layers


def _numbers(rows: list[dict[str, Any]], name: str) -> list[float]:
    """The rows' values, or [] where one has none."""
    values = [row[name] for row in rows]
    return [] if None in values else values
