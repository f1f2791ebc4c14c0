"""THE CALIBRATION: the verdicts tried on thousands of experiments whose truth is known, and a table of their errors.

What is simulated, counted and judged is in stats/calibration.py. Here: the bank of real runs that plasmode experiments
are drawn from, the work spread over processes, and the table. The bank that ships with the package is
`bank.parquet`: the scores of the runs of experiments/bank.toml, put together by bench/bank.py.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from .experiment.design import Experiment, Metric, contrasts
from .experiment.pairing import pairs
from .experiment.store import RunStore
from .stats import calibration as cal

BANK = "bank.parquet"
LEAST_RUNS = 12  # pairs of each kind in a bank: fewer make the same experiment again and again
CHUNK = 50  # experiments that a process does at a time
LONG_TAIL = 4.0  # kurtosis; 3 for a normal distribution, less where none is far from the rest
Nats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, eq=False)
class Bank:
    """(S, D) nats of each point and arm, row s of all arms is the pair's seed; (D,) bytes of each point."""

    name: str
    baseline: str
    treatment: str
    nats: Mapping[tuple[str, str], Mapping[int, Nats]]  # (point, arm) -> seed -> (D,)
    size: Mapping[str, Nats]

    @property
    def points(self) -> list[str]:
        return list(self.size)

    def pairs(self, point: str, arm: str) -> tuple[Nats, Nats]:
        """(S, D) nats of the baseline and of ``arm`` for the seeds that both have. ValueError where they are few."""
        base, other = self.nats.get((point, self.baseline), {}), self.nats.get((point, arm), {})
        seeds = [seed for seed in base if seed in other]
        if len(seeds) < LEAST_RUNS:
            raise ValueError(
                f"bank {self.name}: {len(seeds)} pairs {arm} - {self.baseline} at point {point}; "
                f"{LEAST_RUNS} or more are needed: give the experiment more seeds, controls.null = true, "
                "controls.positive and an arm beside the baseline, and run it"
            )
        return np.array([base[seed] for seed in seeds]), np.array([other[seed] for seed in seeds])


def collect(experiment: Experiment, store: RunStore) -> pa.Table:
    """One row for each finished run and document: point, arm, seed, item, nats, bytes. For `read_bank` and its file.

    Every run is checked as for a report: its configuration, and that partners are pairs. Diverged runs are left out.
    Raises ValueError while runs are missing, and for a metric that is not bits per byte.
    """
    if experiment.metric != Metric():
        raise ValueError(
            f"{experiment.path}: a bank holds nats of documents, this experiment measures {experiment.metric.name}"
        )
    found: dict[tuple[str, str, int], Nats] = {}
    documents: dict[str, tuple[tuple[str, ...], Nats]] = {}
    every = contrasts(experiment)
    for contrast in every:
        pair = pairs(experiment, store, contrast)
        if pair.unfinished or pair.table is None:
            missing = f"{len(pair.unfinished)} of {len(experiment.seeds)} pairs"
            raise ValueError(
                f"{store.folder}: {contrast.point}, {contrast.treatment} - {contrast.baseline}: {missing} are not "
                f"finished; a bank is a finished experiment: xsalab run {experiment.path}"
            )
        table = pair.table
        documents[contrast.point] = table.items, table.weights
        for row, seed in enumerate(pair.seeds):
            found[contrast.point, contrast.baseline, seed] = table.baseline[row]
            found[contrast.point, contrast.treatment, seed] = table.treatment[row]
    effect = next((c for c in every if c.kind == "effect" and c.primary), None)
    effect = effect or next((c for c in every if c.kind == "effect"), None)
    if effect is None:
        raise ValueError(f"{experiment.path}: no arm beside the baseline; a bank needs the profile of an effect")
    counts = [len(values) for values in found.values()]
    points, arms, seeds = zip(*found, strict=True)
    repeated = {"point": points, "arm": arms, "seed": seeds}
    columns: dict[str, Any] = {
        name: pa.array(np.repeat(np.array(values), counts)).dictionary_encode() for name, values in repeated.items()
    }
    columns["seed"] = pa.array(np.repeat(np.array(seeds, dtype=np.int64), counts))
    columns["item"] = pa.array([item for point in points for item in documents[point][0]]).dictionary_encode()
    columns["nats"] = np.concatenate(list(found.values()))
    columns["bytes"] = np.concatenate([documents[point][1] for point in points]).astype(np.int64)
    about = {"name": experiment.name, "baseline": effect.baseline, "treatment": effect.treatment}
    return pa.table(columns).replace_schema_metadata({"xsalab": json.dumps(about)})


def read_bank(table: pa.Table) -> Bank:
    """The bank in a table made by `collect`. ValueError where it was made by something else."""
    metadata = table.schema.metadata or {}
    if b"xsalab" not in metadata:
        raise ValueError("not a bank: a table of scores says in its metadata which arms it compares")
    about = json.loads(metadata[b"xsalab"])
    keys = list(zip(*(table[name].to_pylist() for name in ("point", "arm", "seed")), strict=True))
    values, size = np.asarray(table["nats"], dtype=np.float64), np.asarray(table["bytes"], dtype=np.float64)
    starts = [i for i, key in enumerate(keys) if i == 0 or key != keys[i - 1]]
    nats: dict[tuple[str, str], dict[int, Nats]] = {}
    sizes: dict[str, Nats] = {}
    for start, end in zip(starts, [*starts[1:], len(keys)], strict=True):
        point, arm, seed = keys[start]
        nats.setdefault((point, arm), {})[seed] = values[start:end]
        sizes.setdefault(point, size[start:end])
    return Bank(about["name"], about["baseline"], about["treatment"], nats, sizes)


def shipped_bank() -> Bank:
    """The bank that comes with the package."""
    data = resources.files("xsalab").joinpath(BANK).read_bytes()
    return read_bank(pq.read_table(pa.BufferReader(data)))


def bank_settings(bank: Bank) -> tuple[list[cal.Setting], list[cal.BankContrast]]:
    """Plasmode settings: null with planted effects, and the real contrast, at each point; and the positive controls.

    The planted profile is that of the point where the effect is clearest. Errors are judged from both sides where the
    seeds' differences are about normal. With a longer tail a t interval is wider than it need be: judged from above.
    """
    settings: list[cal.Setting] = []
    controls: list[cal.BankContrast] = []
    effects = {point: bank.pairs(point, bank.treatment) for point in bank.points}
    clearest = max(effects, key=lambda point: _clarity(*effects[point]))
    for point in bank.points:
        size, effect = bank.size[point], effects[point]
        planted = effects[clearest] if effects[clearest][0].shape[1] == len(size) else effect
        profile = (planted[1] - planted[0]).mean(axis=0)
        baseline, null = bank.pairs(point, "null")
        name = f"bank, {point}: null, planted"
        settings.append(cal.Resampled(name, _rule(_differences(baseline, null)), baseline, null, profile, size))
        name = f"bank, {point}: {bank.treatment} - {bank.baseline}"
        differences = _differences(*effect)
        settings.append(cal.BankContrast(name, _rule(differences - differences.mean()), *effect, size))
        controls.append(cal.BankContrast(f"bank, {point}", "counted", *bank.pairs(point, "positive"), size))
    return settings, controls


def _differences(baseline: Nats, treatment: Nats) -> Nats:
    """(S,) nats of all documents."""
    return (treatment - baseline).sum(axis=1)


def _clarity(baseline: Nats, treatment: Nats) -> float:
    differences = _differences(baseline, treatment)
    return abs(float(differences.mean())) / float(differences.std(ddof=1))


def _rule(deviations: Nats) -> cal.Rule:
    kurtosis = float((deviations**4).mean() / (deviations**2).mean() ** 2)
    return "two-sided" if kurtosis < LONG_TAIL else "one-sided"


# --- the work ---------------------------------------------------------------------------------------------------------


def calibrate(
    bank: Bank, *, experiments: int = 2000, jobs: int = 0, progress: Callable[[float], None] = lambda share: None
) -> dict[str, Any]:
    """Errors of every setting with their bands, and the coverage of the methods that are not used. JSON-ready.

    jobs: processes side by side, 0 for one a core; the numbers are the same for any, as each chunk of experiments has
    a stream of its own. progress: called with the share that is done.
    """
    begin = time.perf_counter()
    drawn, controls = bank_settings(bank)
    settings: list[cal.Setting] = [*cal.SIMULATED, *drawn]
    compared = [s for s in settings if s.rule == "two-sided" or isinstance(s, cal.BankContrast)]
    work: list[tuple[cal.Tally, cal.Setting]] = [
        *((cal.tally, setting) for setting in settings),
        *((cal.tally_control, setting) for setting in controls),
        *((cal.tally_methods, setting) for setting in compared),
    ]
    tasks: list[cal.Task] = []
    owner: list[int] = []
    for number, (count, setting) in enumerate(work):
        for chunk, start in enumerate(range(0, experiments, CHUNK)):
            tasks.append((count, setting, min(CHUNK, experiments - start), (number, chunk)))
            owner.append(number)
    counts = [Counter[cal.Key]() for _ in work]
    for done, (index, counted) in enumerate(_carry_out(tasks, jobs or _cores()), 1):
        counts[owner[index]].update(counted)
        progress(done / len(tasks))
    rows: list[cal.Row] = []
    methods: list[dict[str, Any]] = []
    for (count, setting), found in zip(work, counts, strict=True):
        if count is cal.tally:
            rows += cal.rows(setting, found, experiments)
        elif count is cal.tally_control:
            rows.append(cal.control_row(setting, found, experiments))
        else:
            for method in cal.METHODS:
                hits = {str(seeds): found[method, seeds] / experiments for seeds in cal.SEEDS}
                methods.append(
                    {"setting": setting.name, "documents": setting.documents, "method": method, "coverage": hits}
                )
    judged = cal.judge(rows)
    return {
        "experiments": experiments,
        "bank": bank.name,
        "seconds": time.perf_counter() - begin,
        "judged": sum(row.rule != "shown" for row in judged),
        "failed": sum(not row.passed for row in judged),
        "rows": [{**vars(row), "rate": row.rate, "passed": row.passed} for row in judged],
        "methods": methods,
    }


def _carry_out(tasks: Sequence[cal.Task], jobs: int) -> Iterator[tuple[int, Counter[cal.Key]]]:
    """Index and counts of each task as they end."""
    if jobs == 1:
        yield from ((index, cal.do(task)) for index, task in enumerate(tasks))
        return
    context = multiprocessing.get_context("spawn")
    with _one_thread(), ProcessPoolExecutor(jobs, context, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
        futures = {pool.submit(cal.do, task): index for index, task in enumerate(tasks)}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _one_thread() -> Iterator[None]:
    """Processes started meanwhile multiply matrices on one thread: these are tiny, and the cores are taken."""
    saved = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if saved is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = saved


# --- the table --------------------------------------------------------------------------------------------------------


def markdown(result: Mapping[str, Any]) -> str:
    """The tables, and what failed."""
    n, seeds = result["experiments"], [str(s) for s in cal.SEEDS]
    lines = [
        f"{n:,} experiments a setting; errors in %, nominal {100 * cal.NOMINAL:g}. "
        f"{result['judged']} figures are judged at once.",
        "",
        "| setting | documents | error | " + " | ".join(f"{s} seeds" for s in seeds) + " | allowed |",
        "|---|---|---|" + "---|" * (len(seeds) + 1),
    ]
    for (setting, documents, what), rows in _grouped(result["rows"], "setting", "documents", "what").items():
        by_seeds = {str(row["seeds"]): row for row in rows}
        cells = [_cell(by_seeds[s]) if s in by_seeds else "" for s in seeds]
        lines.append(f"| {setting} | {documents} | {what} | {' | '.join(cells)} | {_bands(rows)} |")
    lines += ["", "Coverage of 95 % intervals, in %:", ""]
    lines += [
        "| setting | documents | method | " + " | ".join(f"{s} seeds" for s in seeds) + " |",
        "|---|---|---|" + "---|" * len(seeds),
    ]
    for row in result["methods"]:
        cells = [f"{100 * row['coverage'][s]:.1f}" for s in seeds]
        lines.append(f"| {row['setting']} | {row['documents']} | {row['method']} | {' | '.join(cells)} |")
    lines.append("")
    for row in result["rows"]:
        if not row["passed"]:
            lines.append(
                f"FAIL {row['setting']}, {row['documents']} documents, {row['seeds']} seeds: {row['what']}: "
                f"{row['errors']} of {n:,}, allowed {_allowed(row)}"
            )
    lines.append(f"{result['judged'] - result['failed']} passed, {result['failed']} failed")
    return "\n".join(lines)


def _grouped(rows: Sequence[Mapping[str, Any]], *names: str) -> dict[tuple[Any, ...], list[Mapping[str, Any]]]:
    found: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return found


def _cell(row: Mapping[str, Any]) -> str:
    return f"{100 * row['rate']:.1f}" + ("" if row["passed"] else " FAIL")


def _bands(rows: Sequence[Mapping[str, Any]]) -> str:
    """The band of a line, or with the seeds of each where they are not the same."""
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(_allowed(row), []).append(str(row["seeds"]))
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{', '.join(seeds)} seeds: {band}" for band, seeds in found.items())


def _allowed(row: Mapping[str, Any]) -> str:
    if row["rule"] == "shown":
        return "not judged"
    most = f"{100 * row['most'] / row['experiments']:.1f}"
    return f"{100 * row['least'] / row['experiments']:.1f} to {most}" if row["least"] is not None else f"up to {most}"
