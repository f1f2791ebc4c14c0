"""Two sets of runs that exist, compared: the same table as a report, and under it what it cannot vouch for.

A side is an experiment's arm (``OUT/experiments/NAME:ARM``), a run folder or a folder of them, a log of another tool,
or a folder with one log a seed. Runs are paired by seed where both sides state seeds and nothing that is known of them
contradicts it; the runs of xsalab are then compared over seeds × documents, others over seeds alone. Without pairs the
interval is Welch's. One run a side decides nothing.

No statistics of its own; verdicts and sentences are those of ``stats``.
"""

from __future__ import annotations

import errno
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from .align import align
from .config import flat
from .experiment.analyses import estimate_row
from .experiment.command import UNIT
from .experiment.design import config_differences
from .experiment.outcome import plus_minus
from .experiment.pairing import describe, differences, mismatch
from .experiment.store import RunFolder
from .figures import plain_number
from .interop.logs import ALIASES, SHAPES, Log, Series, event_files, is_run_folder, read_logs, seed_in_name
from .stats import PairTable, Verdict, decide, equivalence_interval, mean_difference, sentence
from .stats.paired import LEAST_SEEDS
from .stats.welch import welch

SUFFIXES = (".log", ".txt", ".out", ".csv", ".tsv", ".json", ".jsonl")
MARGIN = 0.001  # of the baseline's value, as experiments have it by default
SURROUNDINGS = ("machine", "device", "world_size", "system", "instructions", "python", "torch", "numpy",
                "kernel", "threads", "code")  # fmt: skip
ORDER = ("batch_tokens", "context", "vocab_size")  # of logs: where these differ, one seed is not one order of the data
Differences = dict[str, tuple[Any, Any]]


@dataclass(frozen=True, eq=False)
class Run:
    """One run of a side. seed: as stated, or as its file's name says (``named``); None where nothing does."""

    log: Log

    @property
    def seed(self) -> int | None:
        return seed_in_name(self.log.run) if self.named else self.log.facts["seed"]

    @property
    def named(self) -> bool:
        return not isinstance(self.log.facts.get("seed"), int)

    @property
    def name(self) -> str:
        return self.log.path.name if self.log.kind == "xsalab" else self.log.run

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Of a run in a folder of xsalab's; {} for other logs, and where it is not there."""
        folder = RunFolder(self.log.path)
        there = self.log.kind == "xsalab" and (self.log.path / "fingerprint.json").is_file()
        return folder.fingerprint() if there else {}

    @property
    def command(self) -> Mapping[str, Any]:
        """``[command]`` of a run that a user's own trainer made; {} of others."""
        return self.fingerprint.get("config", {}).get("command", {})

    def gives(self, metric: str) -> bool:
        """Whether the metric is the result of a command's run."""
        return bool(self.command) and self.log.name_of(metric) == self.command["metric"]

    def unit(self, metric: str) -> float | None:
        """Of the scores of items that the metric is the mean of; None where there are none."""
        if not (self.log.path / "scores.parquet").is_file():
            return None
        if self.command:
            return UNIT[self.command["unit"]] if self.command["scores"] and self.gives(metric) else None
        return math.log(2) if "rows" in self.fingerprint and metric == "val_bpb" else None


@dataclass(frozen=True, eq=False)
class Side:
    """The runs of one arm, all of one configuration as far as they tell."""

    name: str
    runs: tuple[Run, ...]
    notes: tuple[str, ...] = ()

    def facts(self, name: str) -> list[Any]:
        """What its runs say of one thing, each value once."""
        return list(dict.fromkeys(run.log.facts[name] for run in self.runs if name in run.log.facts))


# Reading a side


def read_side(spec: str) -> Side:
    """The runs that ``spec`` names: PATH, or PATH:NAME for those in it that are called so (an arm, a run of a table).

    NAME is a part of their names between dots, with * for any text. Runs that are not finished are left out and noted.
    Raises ValueError where there are none, where a seed is there twice, or where two configurations would be pooled
    (F167); OSError where the path is not there.
    """
    path, which = Path(spec), ""
    if not path.exists() and ":" in spec:
        path, which = Path(spec.rpartition(":")[0]), spec.rpartition(":")[2]
    if not path.exists():
        raise FileNotFoundError(errno.ENOENT, "no such file or folder; give a log, a folder, or FOLDER:ARM", str(path))

    def called(name: str) -> bool:
        return not which or fnmatch(f".{name}.", f"*.{which}.*")

    known = _inside(path)
    one = known == [path]
    chosen = [child for child in known if one or called(child.name)]
    waiting = [run for run in chosen if is_run_folder(run) and RunFolder(run).state not in ("finished", "diverged")]
    logs = [log for child in chosen if child not in waiting for log in _read(child)]
    runs = [Run(log) for log in logs if not one or called(log.run)]
    notes = f"left out, as not finished: {', '.join(child.name for child in waiting)}" if waiting else ""
    if not runs:
        names = [log.run for log in logs] if one else [re.sub(r"\.s\d+$", "", child.name) for child in known]
        shown = ", ".join(dict.fromkeys(names))[:300] or f"neither run folders, event files nor {' '.join(SUFFIXES)}"
        raise ValueError(f"{path}: {notes or f'no run called {which!r}' if names else 'no logs'}; it holds: {shown}")
    _refuse_mixture(spec, runs)
    runs.sort(key=lambda run: -1 if run.seed is None else run.seed)
    return Side(which or path.name or str(path), tuple(runs), (notes,) if notes else ())


def _read(path: Path) -> tuple[Log, ...]:
    """The logs of a place. Of a command's run its result is the last value of its metric, whatever it logged."""
    run = RunFolder(path)
    stored = run.read("fingerprint").get("config") if is_run_folder(path) else None
    command = stored.get("command", {}) if isinstance(stored, dict) else {}
    if not command and not (is_run_folder(path) and run.state == "diverged" and not _has_values(run)):
        return read_logs(path)
    if _has_values(run):
        (log,) = read_logs(path)
    else:  # scores alone, or broken down before the first value
        content, status = run.fingerprint(), run.status
        facts = {name.rpartition(".")[2]: value for name, value in flat(content["config"])}
        facts |= {"writer": "xsalab", **content["environment"], "machine": content["machine"], "code": content["code"]}
        facts |= {name: status[name] for name in ("steps", "state") if name in status}
        log = Log(path, "xsalab", {}, facts, run=path.name)
    if command and run.state == "finished":
        name, held = command["metric"], log.series.get(command["metric"])
        points = dict(zip(held.steps.tolist(), held.values.tolist(), strict=True)) if held else {}
        points = dict(sorted((points | {run.status["step"]: run.status["value"]}).items()))
        series = Series(np.array(list(points), np.int64), np.array(list(points.values()), np.float64))
        log = replace(log, series={**log.series, name: series})
    return (log,)


def _has_values(run: RunFolder) -> bool:
    return any(isinstance(value, float) for row in run.metrics() for value in row.values())


def _inside(path: Path) -> list[Path]:
    """The run folders of a folder, else its event folders and log files; the path itself where it is a log."""
    if not path.is_dir() or is_run_folder(path) or event_files(path):
        return [path]
    place = path / "runs" if (path / "runs").is_dir() else path
    children = [child for child in sorted(place.iterdir()) if not child.name.startswith(".")]
    own = [child for child in children if is_run_folder(child)]
    return own or [p for p in children if (event_files(p) if p.is_dir() else p.suffix.lower() in SUFFIXES)]


def _refuse_mixture(spec: str, runs: Sequence[Run]) -> None:
    """F167: a mean over two configurations is the mean of nothing."""
    for run in runs[1:]:
        if run.fingerprint:
            a, b = ({**print_["config"], "seed": 0, "plugin": print_["plugins"]}
                    for print_ in (runs[0].fingerprint, run.fingerprint))  # fmt: skip
            found = config_differences(a, b)
        else:
            found = _stated(runs[0].log.facts, run.log.facts, (*SHAPES, "dtype"))
        if found:
            raise ValueError(
                f"{spec}: two configurations on one side: {runs[0].name} and {run.name} differ in {describe(found)}. "
                "A mean over both says nothing; give one of them, as FOLDER:ARM"
            )
    seeds = [run.seed for run in runs if run.seed is not None]
    if twice := [run.name for run in runs if run.seed is not None and seeds.count(run.seed) > 1]:
        raise ValueError(f"{spec}: one seed, several runs: {', '.join(twice)}: one run would count twice; leave it out")


@dataclass(frozen=True, eq=False)
class Curve:
    """A run's metric on xsalab's steps."""

    run: Run
    series: Series
    diverged: bool

    @property
    def last(self) -> int:
        return int(self.series.steps[-1])

    def at(self, step: int | None) -> float:
        """The value at a step that it has; None: the last."""
        value = float(self.series.values[-1]) if step is None else self.series.at(step)
        assert value is not None, "the step is common to all"
        return value


def _curve(run: Run, metric: str, said: list[str]) -> Curve:
    """said: what a reader must know of it is added there."""
    log = run.log
    if log.facts.get("state") == "diverged" and log.name_of(metric) is None:  # it broke down before its first value
        series, name = Series(np.empty(0, np.int64), np.empty(0)), metric
    else:
        series, name = log.pick(metric), str(log.name_of(metric))  # names those that are there where this one is not
    if len(series) and _is_loss(name) and not run.gives(metric):
        aligned = align(log, metric=metric)
        series = aligned.logged if aligned.train is None else aligned.train
        if aligned.smoothing is None:
            said.append(f"{run.name}: {name}: smoothing and step convention unknown, taken as logged")
        elif aligned.smoothing.beta:
            said.append(f"{run.name}: {name} was {aligned.smoothing}; compared un-smoothed")
    broken = log.facts.get("state") == "diverged" or not len(series)
    for watched in (name, log.name_of("loss")):
        if watched and watched in log.not_finite:
            broken |= watched not in log.series or log.not_finite[watched][-1] > log.series[watched].steps[-1]
    said += [f"{run.name}: {note}" for note in log.notes]
    planned = log.facts.get("steps")
    if broken:
        said.append(f"{run.name} diverged and is in no mean")
    elif run.gives(metric):
        pass  # it has ended, and this is its result
    elif not isinstance(planned, int):
        said.append(f"{run.name} does not say how many steps were planned: its last value may not be of its end")
    elif series.steps[-1] < planned - 1:
        said.append(f"{run.name}: the last value is at step {series.steps[-1]} of {planned}, where the learning rate "
                    "is still high: a comparison there is unfair")  # fmt: skip
    return Curve(run, series, broken)


def _is_loss(name: str) -> bool:
    return name.lower() in ALIASES["loss"]


# The comparison


def compare(
    a: str, b: str, *, metric: str = "val_bpb", lower_is_better: bool = True, margin: float = MARGIN
) -> dict[str, Any]:
    """A against B, the baseline, JSON-ready. margin: relative to B's mean.

    Raises ValueError for what cannot be read or must not be pooled, and where a run is on both sides.
    """
    if not 0 < margin < 1:
        raise ValueError(f"--margin {margin}: a share of the baseline's value, above 0 and below 1")
    sides = read_side(a), read_side(b)
    if sides[0].name == sides[1].name:
        sides = replace(sides[0], name=a), replace(sides[1], name=b)
    own = [{(run.log.path.resolve(), run.log.run) for run in side.runs} for side in sides]
    if both := own[0] & own[1]:
        raise ValueError(f"{next(iter(both))[0]}: the same run on both sides; there is nothing to compare")
    said = [f"{side.name}: {note}" for side in sides for note in side.notes]
    curves = [[_curve(run, metric, said) for run in side.runs] for side in sides]
    metric = next((name for name, known in ALIASES.items() if metric.lower() in (name, *known)), metric)
    seeds, why, differs = _pairing(sides)
    blocked = _blocked(sides, metric, differs)
    result = all(run.gives(metric) for side in sides for run in side.runs)
    row = partial(_row, sides, curves, seeds, blocked, metric, lower_is_better, margin)
    rows = [row(None)]
    whole = [curve for column in curves for curve in column if not curve.diverged]
    if len({curve.last for curve in whole}) > 1:
        if shared := set[int].intersection(*(set(curve.series.steps.tolist()) for curve in whole)):
            rows.append(row(max(shared)))
        ends = (f"{curve.run.name} at step {curve.last}" for curve in whole)
        said.append(f"runs of unequal length, no comparison of them is fair: {', '.join(ends)}")
    return {
        "metric": metric, "lower_is_better": lower_is_better, "margin": margin,
        "sides": [{"name": side.name, "runs": [run.name for run in side.runs]} for side in sides],
        "comparisons": rows,
        "differs": {name: [repr(left), repr(right)] for name, (left, right) in differs.items()},
        "cannot_vouch": [*_vouch(sides, seeds, why, metric, rows[0]["estimate"], differs, result),
                         *dict.fromkeys(said)],
    }  # fmt: skip


def _pairing(sides: tuple[Side, Side]) -> tuple[tuple[int, ...], str, Differences]:
    """The seeds of the pairs; none, and why, where the runs are no pairs; and what differs between partners.

    Of xsalab's runs the rule of ``pairing``; whatever their configurations differ in counts as declared.
    """
    other = _differences(sides[0].runs[0], sides[1].runs[0])
    other = {name: pair for name, pair in other.items() if name not in ("seed", "rows")}  # another seed has others
    by_seed = [{run.seed: run for run in side.runs} for side in sides]
    if silent := [side.name for side, runs in zip(sides, by_seed, strict=True) if None in runs]:
        return (), f"{silent[0]} does not state its seeds", other
    common = tuple(sorted(seed for seed in by_seed[0] if seed is not None and seed in by_seed[1]))
    if len(common) < min(*(len(runs) for runs in by_seed), LEAST_SEEDS):
        return (), f"{len(common) or 'no'} seed{'s' * (len(common) > 1)} in common", other
    differs: Differences = {}
    for seed in common:
        a, b = (runs[seed] for runs in by_seed)
        if a.fingerprint and b.fingerprint:
            factors = list(config_differences(a.fingerprint["config"], b.fingerprint["config"]))
            found = mismatch(a.fingerprint, b.fingerprint, factors)
        else:
            found = _stated(a.log.facts, b.log.facts, ORDER)
        differs |= _differences(a, b)
        if found:
            return (), f"the runs of seed {seed} differ in {describe(found)}", differs
    return common, "", differs


def _differences(a: Run, b: Run) -> Differences:
    """Of two runs of xsalab, but for their starts; {} for logs."""
    found = differences(a.fingerprint, b.fingerprint) if a.fingerprint and b.fingerprint else {}
    return {name: pair for name, pair in found.items() if not name.startswith("start.")}


def _stated(a: Mapping[str, Any], b: Mapping[str, Any], names: Sequence[str]) -> Differences:
    """What two logs say otherwise; one that does not say is not one that says otherwise."""
    return {name: (a[name], b[name]) for name in names if name in a and name in b and a[name] != b[name]}


def _blocked(sides: tuple[Side, Side], metric: str, differs: Mapping[str, Any]) -> str:
    """Why no verdict can be given whatever the numbers; "" where one can."""
    if "evaluation" in differs and not _is_loss(metric):
        return "they were scored on other validation text"
    runs = [run for side in sides for run in side.runs if run.command and run.unit(metric)]
    if runs and any(_weights(run) != _weights(runs[0]) for run in runs):
        return "they were scored on other items"
    words = [side.facts("vocab_size") for side in sides]
    if "loss" in metric and all(words) and words[0] != words[1]:
        return f"a loss for each token of vocabularies of {words[0][0]} and {words[1][0]} tokens"
    return ""


def _row(
    sides: tuple[Side, Side], curves: Sequence[Sequence[Curve]], seeds: Sequence[int], blocked: str, metric: str,
    lower_is_better: bool, margin: float, step: int | None,
) -> dict[str, Any]:  # fmt: skip
    """The comparison at a step, or at the end of each run."""
    columns = [[curve for curve in column if not curve.diverged] for column in curves]
    if seeds:
        whole = [{curve.run.seed for curve in column} for column in columns]
        seeds = [seed for seed in seeds if seed in whole[0] & whole[1]]
        columns = [[next(c for c in column if c.run.seed == seed) for seed in seeds] for column in columns]
    values = [[curve.at(step) for curve in column] for column in columns]
    table = _table(columns, values, seeds, metric, step) if seeds else None
    diverged = sum(curve.diverged for curve in curves[0]), len(curves[0])

    estimate = estimate90 = None
    if table is not None:
        estimate, estimate90 = mean_difference(table), equivalence_interval(table)
    elif all(values):
        estimate, estimate90 = (welch(*values, metric=metric, confidence=share) for share in (0.95, 0.90))
    names = [side.name for side in sides]
    absolute = margin * abs(estimate.baseline_mean) if estimate else 1.0
    if not absolute > 0:
        raise ValueError(f"{names[1]}: its {metric} is 0, and the margin is a share of it: compare another metric")
    if estimate is None and not diverged[0]:
        verdict = Verdict("not decidable", f"every run of {names[1]} diverged", "a baseline that finishes")
        words = f"{names[0]} against {names[1]}: {verdict.reason}, {verdict}"
    else:
        verdict = decide(estimate, margin=absolute, estimate90=estimate90, lower_is_better=lower_is_better,
                         diverged=diverged)  # fmt: skip
        if blocked and estimate:
            verdict = Verdict("not decidable", blocked, "runs that are scored in one way")
        words = sentence(names[0], names[1], estimate, verdict, metric=metric)
    return {
        "at": "the end of each run" if step is None else f"step {step}, the last common one",
        "step": step, "paired": table is not None, "seeds": list(seeds), "treatment_values": values[0],
        "baseline_values": values[1], "margin": absolute if estimate else None,
        "differences": None if table is None else table.differences.tolist(),
        "estimate": estimate_row(estimate) if estimate else None,
        "verdict": {**vars(verdict), "text": str(verdict)}, "sentence": words,
    }  # fmt: skip


def _table(
    columns: Sequence[Sequence[Curve]], values: Sequence[Sequence[float]], seeds: Sequence[int], metric: str,
    step: int | None,
) -> PairTable:  # fmt: skip
    """Documents where all runs have their scores of the same ones, else one value a run."""
    runs = [[curve.run for curve in column] for column in columns]
    units = {run.unit(metric) for column in runs for run in column}
    if step is None and len(units) == 1 and (unit := units.pop()):
        weights, word = _weights(runs[0][0]), "items" if runs[0][0].command else "documents"
        if all(_weights(run) == weights for column in runs for run in column):
            scores = [[RunFolder(run.log.path).scores() for run in column] for column in runs]
            treatment, baseline = (np.array([[run[i][0] for i in weights] for run in column]) for column in scores)
            sizes = np.array(list(weights.values()))
            return PairTable(tuple(seeds), tuple(weights), baseline, treatment, sizes, metric, unit, word)
    treatment, baseline = (np.array(column)[:, None] for column in values)
    return PairTable(tuple(seeds), ("run",), baseline, treatment, np.ones(1), metric, 1.0, item_word="logged values")


def _weights(run: Run) -> dict[str, float]:
    """Item -> weight, of a run with scores."""
    return {item: weight for item, (_, weight) in RunFolder(run.log.path).scores().items()}


# What it cannot vouch for


def _vouch(
    sides: tuple[Side, Side], seeds: Sequence[int], why: str, metric: str, estimate: Mapping[str, Any] | None,
    differs: Mapping[str, Any], result: bool,
) -> list[str]:  # fmt: skip
    said = [] if seeds else [f"not paired: {why}"]
    for side in sides:
        left = [run.seed for run in side.runs if seeds and run.seed not in seeds]
        if left:
            said.append(f"{side.name}: seeds without a partner are left out: {left}")
        if len(side.runs) == 1:
            said.append(f"one run of {side.name}: nothing is known of the spread between its seeds")
        if any(run.named and run.seed is not None for run in side.runs):
            said.append(f"{side.name}: seeds are those of the files' names, which the logs do not confirm")
    for name in (*SURROUNDINGS, *SHAPES):
        values = [side.facts(name) for side in sides]
        if all(values) and (values[0] != values[1] or len(values[0]) > 1):
            shown = " against ".join(", ".join(str(value) for value in column) for column in values)
            if name in SURROUNDINGS:
                shown += " (another machine or software: run the baseline again beside it; no claim about time)"
            said.append(f"{name}: {shown}")
    if not all("rows" in run.fingerprint for side in sides for run in side.runs):
        silent = [name for name in ("tokens", *ORDER, "machine", "torch") if not all(s.facts(name) for s in sides)]
        said.append(f"not stated by both sides: {', '.join(silent)}, shared first weights, the order of the data, the "
                    "validation text and how it was scored, and that there is but one change")  # fmt: skip
    changes = dict.fromkeys("variant" if name.startswith("variant.") else name for name in differs
                            if "." in name and not name.startswith(("environment.", "plugins.")))  # fmt: skip
    if len(changes) > 1:
        said.append(f"one change: the sides differ in {', '.join(changes)}, and Δ is of all of these together")
    if estimate is not None and estimate["items"] == 1:
        said.append("no scores of single documents: the interval is over runs only, another text may say otherwise")
    if _is_loss(metric) and not result:
        said.append("a training loss is of one batch: it says less than a validation value")
    return said


# The terminal


def terminal_table(content: Mapping[str, Any], say: Callable[[str], str] = str) -> Table:
    """Baseline and treatment for each comparison, as a report has it. say: applied to every text."""
    found = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    found.add_column("arm", min_width=8, max_width=24, overflow="fold")
    for name in ("runs", content["metric"], f"Δ {content['metric']} ± 95 %", "Δ %"):
        found.add_column(say(name), justify="right", no_wrap=True)
    found.add_column("verdict", min_width=12)
    treatment, baseline = (side["name"] for side in content["sides"])
    for row in content["comparisons"]:
        estimate: Mapping[str, Any] = row["estimate"] or {}
        if len(content["comparisons"]) > 1:
            found.add_row(Text(say(f"at {row['at']}"), style="bold"))
        relative = estimate.get("relative")
        shown = [
            plus_minus(estimate["mean"], estimate["half_width"]) if estimate else "",
            "" if relative is None else f"{'+' * (relative > 0)}{plain_number(100 * relative, 2)} %",
            row["verdict"]["text"],
        ]
        for name, side, rest in ((baseline, "baseline", ["", "", "baseline"]), (treatment, "treatment", shown)):
            level = f"{estimate[f'{side}_mean']:.4f}" if estimate else ""
            cells = [name, str(len(row[f"{side}_values"])), level, *rest]
            found.add_row(*(Text(say(cell)) for cell in cells))
    return found


def lines(content: Mapping[str, Any]) -> list[str]:
    """What stands under the table: the sentences with their reasons, what differs, and what cannot be vouched for."""
    found: list[str] = []
    for row in content["comparisons"]:
        found.append(f"{row['at']}: {row['sentence']}")
        verdict, estimate = row["verdict"], row["estimate"]
        if estimate is not None:
            found.append(f"  {verdict['reason']} ({estimate['method']})")
        if verdict["advice"]:
            found.append(f"  what would help: {verdict['advice']}")
        if row["differences"] is not None:
            pairs = zip(row["seeds"], row["differences"], strict=True)
            shown = ", ".join(f"{seed}: {value:+.6f}".replace("-", "−") for seed, value in pairs)
            found.append(f"  difference of each seed: {shown}")
        else:
            for side, values in zip(content["sides"], (row["treatment_values"], row["baseline_values"]), strict=True):
                found.append(f"  {side['name']}: {', '.join(f'{value:.6f}' for value in values) or 'no value'}")
    if content["differs"]:
        found.append("the sides differ in:")
        found += [f"  {name}: {a} against {b}" for name, (a, b) in content["differs"].items()]
    found.append(
        "what this cannot vouch for:" if content["cannot_vouch"] else "the runs of each seed agree in all else"
    )
    return found + [f"  - {text}" for text in content["cannot_vouch"]]
