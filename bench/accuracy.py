"""Is accuracy lost to the kernels? The quick experiment with them and without, compared run by run.

    python bench/accuracy.py [FILE.toml] [--out out] [--set section.field=value] [--margin 0.003]

Carries out the experiment's arms twice in bfloat16, with kernels and with XSALAB_PLAIN=1, and pairs the runs of a seed:
the same first weights, batches and text, other arithmetic. Prints one JSON value with a verdict for each arm and exits
with 1 unless all lie within the margin, 0.3 % of the plain runs' val_bpb: "equivalent" by the 90 % interval, or
different beyond doubt but "below the margin". --set may repeat, and comes after what is set here. About 15 minutes on
two cores; runs that are there are not made again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from xsalab.experiment.design import Cell, tested_arms
from xsalab.experiment.pairing import describe, differences
from xsalab.experiment.reading import load_experiment
from xsalab.experiment.store import RunFolder, RunStore
from xsalab.model import native
from xsalab.stats import PairTable, decide, equivalence_interval, mean_difference, sentence

EXPERIMENT = Path(__file__).parent.parent / "experiments" / "quick.toml"
SETTINGS = (
    "train.dtype=bfloat16", "controls.null=false", "controls.positive={}", "controls.twin=false",
    "controls.timing=false",
)  # fmt: skip
SIDES = {"kernels": {"XSALAB_PLAIN": ""}, "plain": {"XSALAB_PLAIN": "1"}}
METRIC = "val_bpb"
MAY_DIFFER = ("environment.",)  # how it was computed: what this is about


def carry_out(path: Path, settings: list[str], out: Path, variables: dict[str, str]) -> None:
    """`xsalab run`, its output on stderr. CalledProcessError where it fails."""
    words = ["xsalab", "run", str(path), "--out", str(out), *(f"--set={setting}" for setting in settings)]
    code = "import sys; from xsalab import cli; sys.argv = sys.argv[1:]; cli.main()"
    subprocess.run(
        [sys.executable, "-c", code, *words], stdout=sys.stderr, check=True, env={**os.environ, **variables}
    )  # fmt: skip


def paired(kernels: dict[int, RunFolder], plain: dict[int, RunFolder]) -> PairTable:
    """Nats of each seed and document. Raises ValueError where partners differ in more than how they were computed."""
    seeds = tuple(sorted(plain))
    for seed in seeds:
        for side, run in (("kernels", kernels[seed]), ("plain", plain[seed])):
            if run.state != "finished":
                raise ValueError(f"{side}: the run of seed {seed} is {run.state}, not finished")
        found = differences(kernels[seed].fingerprint(), plain[seed].fingerprint())
        if other := {name: pair for name, pair in found.items() if not name.startswith(MAY_DIFFER)}:
            raise ValueError(f"the runs of seed {seed} differ in {describe(other)}")
    scores = {side: [runs[seed].scores() for seed in seeds] for side, runs in (("kernels", kernels), ("plain", plain))}
    weights = {item: weight for item, (_, weight) in scores["plain"][0].items()}
    treatment, baseline = (
        np.array([[of_run[item][0] for item in weights] for of_run in scores[side]]) for side in ("kernels", "plain")
    )
    sizes = np.array(list(weights.values()))
    return PairTable(seeds, tuple(weights), baseline, treatment, sizes, METRIC, math.log(2))


def judged(arm: str, table: PairTable, margin: float) -> dict[str, Any]:
    """An arm's verdict, JSON-ready. margin: relative to the plain runs."""
    estimate, estimate90 = mean_difference(table), equivalence_interval(table)
    verdict = decide(estimate, margin=margin * abs(estimate.baseline_mean), estimate90=estimate90)
    text = sentence(f"{arm} with kernels", f"{arm} in PyTorch", estimate, verdict, metric=METRIC)
    return {
        "arm": arm, "seeds": list(table.seeds), "difference": estimate.mean, "low": estimate.low, "high": estimate.high,
        "plain": estimate.baseline_mean, "relative": estimate.relative, "differences": table.differences.tolist(),
        "verdict": str(verdict), "within_margin": verdict.word == "equivalent" or verdict.below_margin,
        "sentence": text,
    }  # fmt: skip


def main() -> int:
    """Runs, compares, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", nargs="?", type=Path, default=EXPERIMENT, metavar="FILE.toml")
    parser.add_argument("--out", type=Path, default=Path("out"), help="runs go to OUT/experiments/accuracy-…")
    parser.add_argument("--set", action="append", default=[], metavar="section.field=value", help="over the file's")
    parser.add_argument("--margin", type=float, default=0.003, help="a share of the plain runs' value")
    given = parser.parse_args()
    if why := native.reason():
        raise SystemExit(f"there are no kernels to compare: {why}")
    settings = [*SETTINGS, *given.set]
    stores: dict[str, RunStore] = {}
    for side, variables in SIDES.items():
        named = [*settings, f'name="accuracy-{side}"']  # beside each other: they share the corpus
        carry_out(given.experiment, named, given.out, variables)
        stores[side] = RunStore.of(load_experiment(given.experiment, named), given.out)
    experiment, found = load_experiment(given.experiment, settings), []
    point = experiment.points[0].name
    for arm in tested_arms(experiment):
        kernels, plain = (
            {seed: stores[side].run(Cell(point, arm, seed)) for seed in experiment.seeds} for side in SIDES
        )
        found.append(judged(arm, paired(kernels, plain), given.margin))
        print(found[-1]["sentence"], file=sys.stderr, flush=True)
    content = {"margin": given.margin, "instructions": native.instructions(), "arms": found}
    print(json.dumps(content, indent=1, ensure_ascii=False))
    return int(not all(row["within_margin"] for row in found))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
