"""The stored diagnoses of an experiment's runs as arrays: of those that finished and were diagnosed at their end."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .design import Experiment, expand
from .store import RunStore, read_parquet

Floats = NDArray[np.float64]

# name -> label, unit, whether the sign is what matters; in the order in which they are shown
MEASURES: dict[str, tuple[str, str, bool]] = {
    "cos_before": ("cosine of the attention output and the own value, before the variant", "", True),
    "cos_after": ("cosine of the attention output and the own value, after the variant", "", True),
    "energy_before": ("share of the output's energy along the own value, before the variant", "", False),
    "energy_after": ("share of the output's energy along the own value, after the variant", "", False),
    "removed": ("share of the output's norm that the variant removes", "", False),
    "self_weight": ("attention weight of a token on itself", "", False),
    "self_over_uniform": ("weight of a token on itself, over that of uniform attention", "×", False),
    "first_weight": ("attention weight on the first token", "", False),
    "entropy": ("entropy of the attention weights", "nats", False),
    "reach": ("effective context: exp of the entropy", "tokens", False),
    "distance": ("mean distance that attention looks back", "tokens", False),
    "logit": ("largest attention logit", "", False),
    "norm_value": ("norm of the own value", "", False),
    "norm_after": ("norm of the output, after the variant", "", False),
    "rank_after": ("effective rank of the output over positions, after the variant", "", False),
    "alpha": ("α in use", "", False),
    "alpha_gradient": ("∂L/∂α: what removing more of the own value would do to the loss", "nats a token", True),
}
_READ = (
    "layer", "head", "start", "end", "tokens", "uniform", *(name for name in MEASURES if name != "self_over_uniform"),
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Grid:
    """One diagnosis. ``values``: name -> (layers, heads, ranges) float64, NaN where nothing could be measured."""

    path: Path
    tokens: int
    ranges: tuple[tuple[int, int], ...]  # of positions, the end exclusive; the whole context first
    values: Mapping[str, Floats]

    @property
    def rows(self) -> int:
        return self.tokens // self.ranges[0][1]

    @property
    def conditions(self) -> str:
        """What two diagnoses of an arm must agree in, in words."""
        layers, heads = self.values["alpha"].shape[:2]
        return f"{self.tokens} tokens in rows of {self.ranges[0][1]}, {layers} layers of {heads} heads"

    def whole(self, name: str) -> Floats:
        """(layers, heads) over the whole context."""
        return self.values[name][..., 0]


@dataclass(frozen=True, eq=False)
class Run:
    """A finished run: its diagnoses by the number of updates done, and the files that tell update N."""

    name: str
    seed: int
    steps: int
    grids: Mapping[int, Grid]
    geometry: Mapping[int, Path]

    @property
    def end(self) -> Grid:
        return self.grids[self.steps]


def finished_runs(experiment: Experiment, store: RunStore, point: str) -> tuple[dict[str, list[Run]], list[str]]:
    """arm -> its runs that finished and were diagnosed at their end, and the names of the others."""
    found: dict[str, list[Run]] = {}
    left_out: list[str] = []
    for cell in expand(experiment):
        if cell.point != point or experiment.arms[cell.arm].control == "twin":
            continue
        run = store.run(cell)
        files, status = _files(run.path, "mechanism"), run.status
        if status["state"] == "finished" and status.get("steps") in files:
            grids = {step: read_grid(path) for step, path in files.items()}
            geometry = _files(run.path, "geometry")
            found.setdefault(cell.arm, []).append(Run(cell.name, cell.seed, status["steps"], grids, geometry))
        elif files or status["state"] == "finished":
            left_out.append(cell.name)
    return {arm: found[arm] for arm in experiment.arms if arm in found}, left_out


def _files(folder: Path, kind: str) -> dict[int, Path]:
    """step -> file, in order."""
    return {int(path.stem.removeprefix("step-")): path for path in sorted((folder / kind).glob("step-*.parquet"))}


def read_grid(path: Path) -> Grid:
    """A stored diagnosis. ValueError naming the file where it is not one row a layer, head and range of positions."""
    table = read_parquet(path, _READ)
    columns: dict[str, Any] = {name: np.asarray(table[name].to_numpy()) for name in _READ}
    spans = list(zip(columns["start"].tolist(), columns["end"].tolist(), strict=True))
    places = {span: place for place, span in enumerate(dict.fromkeys(spans))}
    at = (columns["layer"], columns["head"], np.array([places[span] for span in spans], dtype=np.int64))
    shape = tuple(int(index.max(initial=-1)) + 1 for index in at)
    if not len(set(zip(*(index.tolist() for index in at), strict=True))) == len(spans) == math.prod(shape) > 0:
        raise ValueError(
            f"{path}: {len(spans)} rows are not one for each layer, head and range of positions; delete the file and "
            "diagnose the run again"
        )
    values: dict[str, Floats] = {}
    for name in ("uniform", *MEASURES):
        if name in columns:
            raw = columns[name].astype(np.float64)
            values[name] = np.full(shape, np.nan)
            values[name][at] = np.where(np.isfinite(raw), raw, np.nan)
    values["self_over_uniform"] = values["self_weight"] / values["uniform"]
    return Grid(path, int(columns["tokens"][0]), tuple(places), values)


def alike(arms: Mapping[str, Sequence[Run]]) -> tuple[dict[str, list[Run]], list[str]]:
    """The runs that can stand beside one another, and the names of the others.

    All read as many rows as most runs of the point, and those of an arm took as many steps as most of the arm: a run
    diagnosed again on other rows is left out, and costs the experiment nothing but itself.
    """
    of_one_kind = {
        arm: [run for run in runs if len({grid.conditions for grid in run.grids.values()}) == 1]
        for arm, runs in arms.items()
    }
    every = [run for runs in of_one_kind.values() for run in runs]
    rows = Counter(run.end.rows for run in every).most_common(1)[0][0] if every else 0
    kept: dict[str, list[Run]] = {}
    for arm, runs in of_one_kind.items():
        runs = [run for run in runs if run.end.rows == rows]
        if runs:
            usual = Counter((run.steps, run.end.conditions) for run in runs).most_common(1)[0][0]
            kept[arm] = [run for run in runs if (run.steps, run.end.conditions) == usual]
    names = [run.name for arm, runs in arms.items() for run in runs if run not in kept.get(arm, ())]
    return kept, names
