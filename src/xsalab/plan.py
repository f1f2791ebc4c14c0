"""THE PLAN: what an experiment will cost and what it can see, before anything is spent.

Nothing is trained to its end, nothing is written, and no plugin is imported: an arm with a variant from a file of the
user's own is reckoned as the baseline. Operations are exact for the model (``derived``; forward and backward), memory
is counted on the model's own step (plan_memory.py). Time is an estimate that names its source; of runs on GPUs there
is a table by type of device (plan_devices.py). The smallest effect is that of a t test over the planned seeds with 80 %
power.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .data import Batch
from .data.sources import climbmix_numbers
from .eval.throughput import busy_share, interleaved_step_times
from .experiment.building import build_state, derived
from .experiment.design import Cell, Experiment, RunConfig, combinations, contrasts, expand, resolve
from .experiment.fingerprint import machine
from .experiment.judging import in_family
from .experiment.pairing import pairs
from .experiment.store import RunStore
from .experiment.timing import BUSY, measured_costs
from .experiment.workers import default_jobs
from .model import ModelConfig, VariantChoice
from .model.variant import VARIANTS
from .plan_devices import DEVICES, ROOM, SHARE, device_of, on_devices
from .plan_memory import Memory, memory_of, rows_that_fit
from .stats import mean_difference, minimum_detectable, sd_interval
from .stats.decide import MANY_SEEDS
from .stats.looks import look_levels
from .stats.paired import LEAST_SEEDS
from .train.checkpoint import KEEP

POWER = 0.8
SECONDS = 10.0  # for all measured steps together
SMALL = ModelConfig(depth=2, width=128, heads=2, context=256, vocab_size=1024)  # tells the machine's speed at once
# A ClimbMix shard: bytes to download, and tokens in it; 250 million characters by nanochat's speedrun.sh, 4.5 a token.
SHARD_BYTES, SHARD_TOKENS = 1e8, 250e6 / 4.5
FACTS = ("steps", "tokens", "parameters", "flops_per_token", "flops")
Key = tuple[str, str]  # point, arm


@dataclass(frozen=True)
class Kind:
    """The runs of one arm at one point. ``facts`` of one run by the names in FACTS; of a command all are None."""

    key: Key
    cells: tuple[Cell, ...]
    config: RunConfig | None
    facts: Mapping[str, Any]
    memory: Memory | None = None


@dataclass(frozen=True)
class Clock:
    """Seconds of one run, and whether they were extended from something else than such a run."""

    seconds: float
    extended: bool = False


@dataclass(frozen=True)
class Amount:
    """A difference in units of the metric, or a share of the baseline's value where it was written with a %."""

    value: float
    relative: bool

    @classmethod
    def read(cls, text: str, option: str) -> Amount:
        """ "0.003" or "0.3%". ValueError unless it is a positive finite number."""
        number = text.strip().removesuffix("%")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > 0):
            raise ValueError(
                f"{option} {text!r}: a positive difference such as 0.003, or a share of the baseline's such as 0.3%"
            )
        return cls(value / 100, True) if number != text.strip() else cls(value, False)

    def __str__(self) -> str:
        return f"{100 * self.value:.2g} %" if self.relative else f"{self.value:.2g}"


@dataclass(frozen=True)
class Spread:
    """Standard deviation of the seeds' paired differences, in units of the metric or as a share of the baseline's.

    n: pairs that it was estimated from, 0 where it was stated. text: the standard error from the choice of documents,
    which no number of seeds lowers. baseline: the baseline's value, None where unknown.
    """

    of: str
    sd: float
    n: int = 0
    text: float = 0.0
    baseline: float | None = None
    relative: bool = False

    def in_its_unit(self, effect: Amount) -> float | None:
        """None where only the baseline's value, which is not known, could tell."""
        if effect.relative == self.relative:
            return effect.value
        if not self.baseline:
            return None
        return effect.value * abs(self.baseline) if effect.relative else effect.value / abs(self.baseline)


def plan(
    experiment: Experiment,
    store: RunStore,
    *,
    effect: str = "",
    sd: str = "",
    measure: bool = True,
    prices: Mapping[str, float] | None = None,
    gpus: int = 8,
) -> dict[str, Any]:
    """Everything that the plan says, JSON-ready.

    experiment: as ``as_run`` gives it, its plugins not imported. effect: the difference that is worth finding, by
    default the declared margin; sd: a stated standard deviation of the paired differences; both as ``Amount`` reads
    them. measure: whether steps may be timed where nothing stored tells the time. prices: device -> dollars an hour;
    gpus: how many there are for the hours of the table by type of device.
    Raises ValueError for amounts that are no positive numbers, and where runs in OUT are of another configuration.
    """
    notes: list[str] = []
    power = _power(experiment, store, effect, sd)
    kinds = _kinds(experiment, notes)
    states = {cell: store.run(cell).state for cell in expand(experiment)}
    ended = {cell for cell, state in states.items() if state in ("finished", "diverged")}
    by_key = {kind.key: kind for kind in kinds}
    pending = [by_key[cell.point, cell.arm] for cell in states if cell not in ended]
    ours = experiment.command is None
    threads = max((kind.config.train.threads for kind in kinds if kind.config), default=1)
    trains = [kind.config.train for kind in kinds if kind.config]
    device = "cuda" if any(train.device == "cuda" for train in trains) else "cpu"
    processes = max((train.processes for train in trains), default=1)
    # what a command needs of the machine is not known
    jobs = default_jobs(threads, len(pending), device, processes) if ours else 1
    clocks, source = _clocks(experiment, store, kinds, measure, notes)
    left = [clocks[kind.key].seconds for kind in pending if clocks]
    if experiment.looks:
        notes.append(f"sequential: at most {experiment.looks[-1]} seeds; the plan is for {len(experiment.seeds)}")
    if experiment.equal_time.rerun and not any(arm.against for arm in experiment.arms.values()):
        notes.append("the further runs of equal time follow from measured step times and are not in the plan")
    return {
        "name": experiment.name,
        "engine": experiment.engine,
        "rows": [
            {
                "point": kind.key[0], "arm": kind.key[1], "control": experiment.arms[kind.key[1]].is_control,
                "runs": len(kind.cells), "finished": sum(cell in ended for cell in kind.cells), **kind.facts,
                "seconds": clocks[kind.key].seconds if clocks else None,
                "extended": clocks[kind.key].extended if clocks else None,
                "memory": {**vars(kind.memory), "peak": kind.memory.peak} if kind.memory else None,
            }
            for kind in kinds
        ],
        "runs": len(states),
        "states": {state: list(states.values()).count(state) for state in dict.fromkeys(states.values())},
        "pending": len(pending),
        "tokens": sum(len(kind.cells) * kind.facts["tokens"] for kind in kinds) if ours else None,
        "flops": sum(len(kind.cells) * kind.facts["flops"] for kind in kinds) if ours else None,
        "flops_pending": sum(kind.facts["flops"] for kind in pending) if ours else None,
        "time": {"source": source, "jobs": jobs, "wall_seconds": max([sum(left) / jobs, *left]) if clocks else None},
        "devices": _devices(experiment, store, kinds, pending, prices or {}, gpus, notes) if device == "cuda" else [],
        "disk": _disk(experiment, pending, jobs) if ours else None,
        "power": power,
        "notes": notes,
    }  # fmt: skip


def _kinds(experiment: Experiment, notes: list[str]) -> list[Kind]:
    """The runs by point and arm, in the order in which they start."""
    cells: dict[Key, list[Cell]] = {}
    for cell in expand(experiment):
        cells.setdefault((cell.point, cell.arm), []).append(cell)
    if experiment.command:
        notes.append("a command's steps, tokens, parameters, operations and files are not known")
        return [Kind(key, tuple(of), None, dict.fromkeys(FACTS)) for key, of in cells.items()]
    baseline = experiment.arms[experiment.baseline].variant
    found: list[Kind] = []
    for key, of in cells.items():
        config = resolve(experiment, of[0])
        if (name := config.variant.name) not in VARIANTS:
            stand_in = baseline if baseline.name in VARIANTS else VariantChoice()
            config = dataclasses.replace(config, variant=stand_in)
            notes.append(f"{key[1]}: {name} is from a plugin, which is not run here: reckoned as the baseline")
        numbers = derived(config)
        tokens = config.train.steps * config.train.batch_tokens
        flops = float(numbers["flops_per_token"])
        facts = (config.train.steps, tokens, numbers["parameters"]["total"], flops, flops * tokens)
        found.append(Kind(key, tuple(of), config, dict(zip(FACTS, facts, strict=True)), memory_of(config)))
    notes[:] = dict.fromkeys(notes)  # of several points the same
    return found


def _disk(experiment: Experiment, pending: Sequence[Kind], jobs: int) -> dict[str, int]:
    """Bytes still to be written, at most: weights that stay, checkpoints of the runs that live at one time, and of
    ClimbMix what is downloaded and prepared.
    """
    sizes = [kind.memory for kind in pending if kind.memory]
    times = 2 if experiment.downstream and experiment.downstream.sft else 1  # the fine-tuned model besides
    alive = (KEEP + 1) * min(jobs, len(pending))  # the kept ones, and one that is being written
    # of sharded and divided runs the whole is written
    whole = [
        kind.config.train.processes * memory.state for kind, memory in zip(pending, sizes, strict=True) if kind.config
    ]
    return {
        "weights": times * sum(_weight_bytes(kind) for kind in pending),
        "checkpoints": max((_weight_bytes(kind) + state for kind, state in zip(pending, whole, strict=True)), default=0)
        * alive,
        **_corpora(pending),
    }  # fmt: skip


def _weight_bytes(kind: Kind) -> int:
    """As stored: masters in float32, the tables in the compute dtype."""
    assert kind.config is not None, "only our own engine's weights are known"
    numbers = derived(kind.config)
    counts = numbers["parameters"]
    tables = counts["embedding"] + counts["value_embeddings"]
    return 4 * (counts["total"] - tables) + (2 if numbers["dtype"] == "bfloat16" else 4) * tables


def _corpora(pending: Sequence[Kind]) -> dict[str, int]:
    """Of ClimbMix's shards, training and validation; 0 where the text is another."""
    shards, prepared = 0.0, 0.0
    for source, windowed in {(k.config.data.source, k.config.data.window > 0) for k in pending if k.config}:
        if source.startswith("climbmix:"):
            count = len(climbmix_numbers(source)) + 1
            shards = max(shards, count)  # of several sources the smaller is a part of the larger
            prepared += count * SHARD_TOKENS * 2 * (1 if windowed else 2)  # 2 bytes a token; whole texts and rows
    return {"downloads": round(shards * SHARD_BYTES), "corpora": round(prepared)}


# GPUs


def _devices(
    experiment: Experiment,
    store: RunStore,
    kinds: Sequence[Kind],
    pending: Sequence[Kind],
    prices: Mapping[str, float],
    gpus: int,
    notes: list[str],
) -> list[dict[str, Any]]:
    """Rows a pass, hours and cost of what is left, by type of device."""
    fits: dict[str, dict[str, int]] = {device.name: {} for device in DEVICES}
    for device in DEVICES:
        for kind in kinds:
            assert kind.config is not None, "our own engine"
            rows = rows_that_fit(kind.config, ROOM * device.gigabytes * 1e9)
            fits[device.name][kind.key[0]] = min(rows, fits[device.name].get(kind.key[0], rows))
    work = [(kind.facts["flops"], kind.config.train.processes) for kind in pending if kind.config]
    shares = _measured_shares(experiment, store, kinds)
    if len(shares) < len(DEVICES):
        notes.append(f"GPU hours: operations at {100 * SHARE:.0f} % of the peak, assumed; no evaluation, no benchmarks")
    if any(device.price and device.name not in prices for device in DEVICES):
        notes.append("the price of an H100, 3 dollars an hour, is nanochat's; state yours: --price H100=2.5")
    return on_devices(work, fits, shares, prices, gpus)


def _measured_shares(experiment: Experiment, store: RunStore, kinds: Sequence[Kind]) -> dict[str, float]:
    """Device -> share of its peak that training reached: in finished runs, else in the timing of this experiment."""
    reached: dict[str, list[float]] = {}
    for kind in kinds:
        for run in map(store.run, kind.cells):
            if run.state == "finished" and kind.config and kind.config.train.device == "cuda":
                device = device_of(run.fingerprint()["environment"]["device"])
                if device:
                    rate = kind.facts["flops"] / run.status["seconds"]["training"] / kind.config.train.processes
                    reached.setdefault(device.name, []).append(rate / device.teraflops / 1e12)
    costs = measured_costs(experiment, store)
    device = device_of(costs["environment"]["device"]) if costs else None
    if device and device.name not in reached:
        for kind in kinds:
            if times := costs["points"][kind.key[0]]["seconds"].get(kind.key[1]):
                rate = kind.facts["flops"] / kind.facts["steps"] / median(times)
                reached.setdefault(device.name, []).append(rate / device.teraflops / 1e12)
    return {name: fmean(shares) for name, shares in reached.items()}


# Time


def _clocks(
    experiment: Experiment, store: RunStore, kinds: Sequence[Kind], measure: bool, notes: list[str]
) -> tuple[dict[Key, Clock], str]:
    """A run's time for every kind and where it is from: finished runs, timing.json, steps now; {} with the reason."""
    if own := _of_finished_runs(store, kinds):
        return _for_all(own, kinds), "finished runs on this machine"
    if experiment.command:
        return {}, "no run has finished on this machine, and a command is not tried"
    if costs := measured_costs(experiment, store):
        if costs["busy"]:
            notes.append("the step times were taken while other work held a part of the machine")
        for kind in kinds:
            if times := costs["points"][kind.key[0]]["seconds"].get(kind.key[1]):
                own[kind.key] = kind.facts["steps"] * median(times)
        return _for_all(own, kinds), "the step times of timing.json, without start and evaluation"
    if any(kind.config.train.device == "cuda" for kind in kinds if kind.config) and not torch.cuda.is_available():
        return {}, "train.device = 'cuda', and torch finds no CUDA device here"
    if not measure:
        return {}, "nothing stored tells it, and --no-measure was given"
    if (busy := busy_share()) is not None and busy > BUSY:
        notes.append(f"other work held {100 * busy:.0f} % of the machine while steps were timed")
    return _measured(kinds), "a few steps on random tokens, without start and evaluation"


def _of_finished_runs(store: RunStore, kinds: Sequence[Kind]) -> dict[Key, float]:
    """Mean seconds of the finished runs of each kind that were made on this machine."""
    found: dict[Key, list[float]] = {}
    for kind in kinds:
        for run in map(store.run, kind.cells):
            status = run.status
            if status["state"] == "finished" and run.read("fingerprint").get("machine") == machine():
                found.setdefault(kind.key, []).append(sum(status["seconds"].values()))
    return {key: fmean(spent) for key, spent in found.items()}


def _for_all(own: Mapping[Key, float], kinds: Sequence[Kind]) -> dict[Key, Clock]:
    """A kind without a time of its own gets one by operations (a command's: the mean), from its point if possible."""
    work = {kind.key: kind.facts["flops"] or 1.0 for kind in kinds}
    found: dict[Key, Clock] = {}
    for key in work:
        near = [other for other in own if other[0] == key[0]] or list(own)
        rate = sum(own[other] for other in near) / sum(work[other] for other in near)
        found[key] = Clock(own[key]) if key in own else Clock(rate * work[key], extended=True)
    return found


def _measured(kinds: Sequence[Kind]) -> dict[Key, Clock]:
    """Steps of the smallest kinds first, while ``SECONDS`` last; the others by operations from the one before.

    Kinds of equal operations and optimizer are timed once. A small model tells what fits.
    """
    threads = torch.get_num_threads()
    configs = {kind.key: kind.config for kind in kinds if kind.config}
    found: dict[Key, Clock] = {}
    timed: dict[tuple[float, str], float] = {}
    try:
        first = configs[kinds[0].key]
        torch.set_num_threads(first.train.threads)
        train = dataclasses.replace(first.train, batch_tokens=4 * SMALL.context, micro_rows=0)
        small = dataclasses.replace(first, model=SMALL, variant=VariantChoice(), train=train)
        speed = derived(small)["flops_per_token"] * train.batch_tokens / _step_seconds(small)
        deadline = time.monotonic() + SECONDS
        for kind in sorted(kinds, key=lambda kind: kind.facts["flops"] / kind.facts["steps"]):
            config, flops = configs[kind.key], kind.facts["flops"] / kind.facts["steps"]
            same = flops, config.optim.kind
            if same not in timed and 3 * flops / speed <= deadline - time.monotonic():
                timed[same] = _step_seconds(config)
                speed = flops / timed[same]
            step = timed.get(same, flops / speed)
            found[kind.key] = Clock(kind.facts["steps"] * step, extended=same not in timed)
    finally:
        torch.set_num_threads(threads)
    return found


def _step_seconds(config: RunConfig) -> float:
    """The faster of two uncompiled training steps on random tokens, after one that is not counted."""
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, compile=False))
    rows, context = config.train.batch_rows(config.model.context), config.model.context
    tokens = torch.randint(config.model.vocab_size, (rows, context + 1), generator=torch.Generator().manual_seed(0))
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), torch.arange(rows))
    times = interleaved_step_times(
        {"it": build_state(config)}, lambda step: batch, rounds=1, warmup=1, micro_rows=config.train.micro_rows
    )
    return min(times["it"])


# What can be seen


def _power(experiment: Experiment, store: RunStore, effect: str, sd: str) -> dict[str, Any]:
    """For each spread that is known: the smallest effect that the planned seeds see, and the seeds for ``effect``.

    Each for one contrast alone, and as one of the declared family of m (level / m, Holm's first step).
    """
    margin = Amount(experiment.primary.margin, not experiment.primary.absolute)
    wanted = Amount.read(effect, "--effect") if effect else margin
    stated = Amount.read(sd, "--sd") if sd else None
    spreads = _stored_spreads(experiment, store)
    if stated is not None:
        baseline = spreads[0].baseline if spreads else None
        spreads.append(Spread("stated", stated.value, baseline=baseline, relative=stated.relative))
    seeds, level = len(experiment.seeds), look_levels(experiment.looks).two_sided if experiment.looks else 0.05
    family = sum(in_family(experiment, contrast) for contrast in (*contrasts(experiment), *combinations(experiment)))
    levels = [level, level / family] if family > 1 else [level]
    return {
        "seeds": seeds,
        "power": POWER,
        "metric": experiment.metric.name,
        "effect": dataclasses.asdict(wanted),
        "family": family,
        "spreads": [
            {**dataclasses.asdict(spread), "levels": [_seen(spread, seeds, level, wanted) for level in levels]}
            for spread in spreads
        ],
    }


def _stored_spreads(experiment: Experiment, store: RunStore) -> list[Spread]:
    """Of the primary contrast, else of the first, and of the null control: from at least 3 finished pairs each."""
    every = [*contrasts(experiment), *combinations(experiment)]
    main = experiment.primary.contrast or next((c.name for c in every if c.kind == "effect"), "")
    found: list[Spread] = []
    for contrast in sorted((c for c in every if c.name == main or c.kind == "null"), key=lambda c: c.kind == "null"):
        table = pairs(experiment, store, contrast).table
        if table is None or len(table.seeds) < LEAST_SEEDS:
            continue
        estimate = mean_difference(table)
        if not estimate.sd:  # one difference at every seed: no spread to plan with
            continue
        where = f", {contrast.point}" if contrast.point and len(experiment.points) > 1 else ""
        found.append(
            Spread(contrast.name + where, estimate.sd, estimate.n, estimate.document_error, estimate.baseline_mean)
        )
    return found


def _seen(spread: Spread, seeds: int, level: float, effect: Amount) -> dict[str, Any]:
    """[best guess], and from the ends of the sd's own 95 % interval where it was estimated; [] where nothing is known.

    seeds: None where it is above 1,000.
    """
    sds = [spread.sd, *(sd_interval(spread.sd, spread.n) if spread.n else ())]
    wanted = spread.in_its_unit(effect)
    return {
        "level": level,
        "smallest": [smallest_effect(sd, spread.text, seeds, level) for sd in sds] if seeds >= LEAST_SEEDS else [],
        "seeds": [] if wanted is None else [seeds_for(sd, spread.text, wanted, level) for sd in sds],
    }


def smallest_effect(sd: float, text: float, seeds: int, level: float = 0.05) -> float:
    """``minimum_detectable`` of Var Δ = sd² / seeds + text²: the text's part does not shrink with seeds."""
    return minimum_detectable(math.sqrt(sd**2 + seeds * text**2), seeds, alpha=level, power=POWER)


def seeds_for(sd: float, text: float, effect: float, level: float = 0.05) -> int | None:
    """The smallest number of seeds, at least 3, that finds ``effect``; None where it is above 1,000."""
    every = range(LEAST_SEEDS, MANY_SEEDS + 1)
    index = bisect.bisect_left(every, True, key=lambda n: smallest_effect(sd, text, n, level) <= effect)
    return every[index] if index < len(every) else None


# Printing


def print_plan(content: Mapping[str, Any], console: Console) -> None:
    """Tables within the console's width, 80 columns where it is none, and in ASCII."""
    states = ", ".join(f"{count} {state}" for state, count in content["states"].items())
    console.print(Text(f"experiment {content['name']}: {content['runs']} runs ({states})"))
    runs = _table(["point", "arm"], ["runs", "steps", "params", "FLOP/run", "time/run"])
    for row in content["rows"]:
        clock = "-" if row["seconds"] is None else ("~" if row["extended"] else "") + _duration(row["seconds"])
        numbers = [f"{row['steps']:,}", f"{row['parameters']:,}", f"{row['flops']:.2e}"] if row["steps"] else ["-"] * 3
        runs.add_row(row["point"], row["arm"], str(row["runs"]), *numbers, clock)
    console.print(runs)
    console.print()
    if content["devices"]:
        console.print(_device_table(content["devices"]))
        console.print()
    facts = Table.grid(padding=(0, 2))
    for name, text in _lines(content):
        facts.add_row(name, Text(text))
    console.print(facts)
    power = content["power"]
    if power["spreads"]:
        console.print()
        console.print(_power_table(power))


def _table(texts: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in texts:
        table.add_column(heading, overflow="fold")
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _lines(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What stands under the first table: names and texts."""
    clock, disk, power = content["time"], content["disk"], content["power"]
    if content["flops"] is not None:
        yield "tokens", f"{content['tokens']:,}"
        yield "FLOP", f"{content['flops']:.2e}, of which {content['flops_pending']:.2e} are left"
    if clock["wall_seconds"] is None:
        yield "time", f"not known: {clock['source']}"
    else:
        yield "time", f"{_duration(clock['wall_seconds'])} left, {clock['jobs']} side by side; from {clock['source']}"
        if any(row["extended"] for row in content["rows"]):
            by = "operations" if disk else "the mean of other runs"
            yield "", f"~: no time of its own, an extrapolation by {by}"
    peaks = [row["memory"]["peak"] for row in content["rows"] if row["memory"]]
    if peaks and not content["devices"]:
        yield "memory", f"{_size(max(peaks))} of a run at its peak, {clock['jobs']} side by side; the process besides"
    if disk:
        stay, live = disk["weights"], disk["checkpoints"]
        yield "disk", f"up to {_size(stay)} of weights to write, and {_size(live)} of checkpoints while runs live"
        if disk["corpora"]:
            yield "", f"about {_size(disk['downloads'])} to download and {_size(disk['corpora'])} of prepared text"
    for text in content["notes"]:
        yield "note", text
    if power["seeds"] < LEAST_SEEDS:
        yield "sees", f"nothing: fewer than {LEAST_SEEDS} seeds do not tell a difference from their spread"
    elif power["spreads"]:
        yield "sees", f"the smallest true effect that {power['seeds']} seeds find with {100 * POWER:.0f} % power"
    if power["spreads"]:
        effect = Amount(**power["effect"])
        yield "seeds", f"as many as find an effect of {effect} (-: not known before pairs tell the baseline's value)"
        yield "to", "from the ends of the sd's own 95 % interval"
    else:
        yield "seeds", "how much the differences vary between seeds is not known: run 3 seeds, or state --sd"


def _device_table(devices: Sequence[Mapping[str, Any]]) -> Table:
    points = list(devices[0]["rows"])
    heads = ["rows a pass"] if len(points) == 1 else [f"rows {point}" for point in points]
    table = _table(["device"], ["GB", "TFLOP/s", "share", *heads, "GPU hours", f"on {devices[0]['gpus']}", "dollars"])
    for row in devices:
        share = f"{100 * row['share']:.0f} %" + ("" if row["measured"] else "?")
        rows = [str(row["rows"][point] or "none") for point in points]
        wall = "-" if row["wall_hours"] is None else f"{row['wall_hours']:,.1f} h"
        cost = "-" if row["cost"] is None else f"{row['cost']:,.0f}"
        table.add_row(
            row["device"], f"{row['gigabytes']:g}", f"{row['teraflops']:,.0f}", share, *rows,
            f"{row['device_hours']:,.1f}", wall, cost,
        )  # fmt: skip
    return table


def _size(count: float) -> str:
    """ "3.2 MB", "1.9 GB" """
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def _power_table(power: Mapping[str, Any]) -> Table:
    table = _table([f"paired differences in {power['metric']}"], ["level", "sd", "sees", "seeds"])
    for row in power["spreads"]:
        for index, level in enumerate(row["levels"]):
            name = f"{row['of']} ({row['n']} pairs)" if row["n"] else row["of"]
            name = f"  as 1 of {power['family']} contrasts" if index else name
            smallest = [str(Amount(value, row["relative"])) for value in level["smallest"]]
            seeds = [f">{MANY_SEEDS}" if count is None else str(count) for count in level["seeds"]]
            sd = "" if index else str(Amount(row["sd"], row["relative"]))
            table.add_row(name, f"{100 * level['level']:.2g} %", sd, _ends(smallest), _ends(seeds))
    return table


def _ends(values: Sequence[str]) -> str:
    """The best guess, and below it the two ends."""
    return "\n".join([*values[:1], *([f"{values[1]} to {values[2]}"] if values[1:] else [])]) or "-"


def _duration(seconds: float) -> str:
    """ "49 s", "3.2 min", "5.1 h", "12 days" """
    for limit, unit, name in ((90, 1, "s"), (5400, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.2g} {name}"
    return f"{seconds / 86_400:,.0f} days"
