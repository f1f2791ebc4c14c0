"""THE PLAN: what an experiment will cost and what it can see, before anything is spent.

Nothing is trained to its end and nothing is written. The plan reads the file and what runs of this experiment left in
OUT; where neither they nor timing.json tell the time, it times a few training steps on random tokens. Plugins are not
imported: an arm with a variant from a file of the user's own is reckoned as the baseline, and the plan says so.

Operations and sizes are exact for the model (``derived.flops_per_token``; forward and backward). Time is an estimate
and names its source. The smallest effect is that of a t test over the planned seeds with a power of 80 %.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from scipy import special  # pyright: ignore[reportMissingTypeStubs]

from .config import digest, dump
from .data import Batch
from .eval.throughput import busy_share, interleaved_step_times, saved_bytes
from .experiment.building import build_state, compute_dtype, derived
from .experiment.design import Cell, Combination, Contrast, Experiment, RunConfig, combinations, contrasts, resolve
from .experiment.design import expand as cells_of
from .experiment.fingerprint import machine
from .experiment.fleet import default_jobs
from .experiment.pairing import pairs
from .experiment.store import RunStore
from .experiment.timing import BUSY, measured_costs
from .model import GPT, VariantChoice
from .model.variant import VARIANTS
from .optim.hybrid import assign_groups
from .stats import mean_difference, minimum_detectable, sd_interval
from .stats.decide import MANY_SEEDS
from .stats.paired import LEAST_SEEDS
from .train import TrainState
from .train.checkpoint import KEEP
from .train.loop import DTYPES

ALPHA, POWER = 0.05, 0.8
SECONDS = 10.0  # for all measured steps together
LARGEST = 150_000_000  # parameters of a model that is built to be timed
EFFICIENCY = 0.2  # of a plain matrix product's speed: a cautious guess at a step's, before the first was timed
LOG_BYTES, FOLDER_BYTES = 60, 16_000  # of metrics a step, and of a run's records and scores: about
Key = tuple[str, str]  # point, arm


@dataclass(frozen=True)
class Amount:
    """A number of bits per byte, or a share of the baseline's where it was written with a percent sign."""

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
                f"{option} {text!r}: a positive number of bits per byte such as 0.003, or a share of the baseline's "
                "such as 0.3%"
            )
        relative = text.strip().endswith("%")
        return cls(value / 100 if relative else value, relative)


@dataclass(frozen=True)
class Sizes:
    """Of one model, in bytes: weights as they are stored, gradients, and the optimizer's state after the first step."""

    weights: int
    gradients: int
    optimizer: int


@dataclass(frozen=True)
class Kind:
    """The runs of one arm at one point."""

    key: Key
    config: RunConfig
    cells: tuple[Cell, ...]
    facts: Mapping[str, Any]  # ``derived``
    sizes: Sizes

    @property
    def flops(self) -> float:
        """Floating-point operations of a run's training."""
        return float(self.facts["flops_per_token"]) * self.tokens

    @property
    def tokens(self) -> int:
        """Of a run: whole steps."""
        return self.config.train.steps * self.config.train.batch_tokens


@dataclass(frozen=True)
class Times:
    """Seconds of one run of each kind, where they come from, and what is to be said of them."""

    seconds: Mapping[Key, float]
    source: str
    notes: tuple[str, ...] = ()
    saved: Mapping[Key, int] = dataclasses.field(default_factory=dict[Key, int])


def plan(
    experiment: Experiment, store: RunStore, *, effect: str = "", sd: str = "", measure: bool = True
) -> dict[str, Any]:
    """Everything that the plan says, JSON-ready.

    experiment: as ``as_run`` gives it, its plugins not imported. effect: the difference that is worth finding; sd: a
    stated standard deviation of the paired differences; both as ``Amount`` reads them. measure: whether steps may be
    timed where nothing stored tells the time.
    Raises ValueError for amounts that are no positive numbers or need a baseline's value that is not known, and where
    runs in OUT are of another configuration.
    """
    wanted = Amount.read(effect, "--effect") if effect else None
    stated = Amount.read(sd, "--sd") if sd else None
    notes: list[str] = []
    kinds = _kinds(experiment, notes)
    states = {cell: store.run(cell).state for kind in kinds for cell in kind.cells}
    pending = [cell for cell in cells_of(experiment) if states[cell] not in ("finished", "diverged")]
    power = _power(experiment, store, wanted, stated)
    times = _times(experiment, store, kinds, measure)
    notes += times.notes
    if experiment.looks:
        notes.append(
            f"sequential, up to {experiment.looks[-1]} seeds: the plan is for the look at {len(experiment.seeds)}, and "
            "the smallest effects are those without looks"
        )
    if experiment.equal_time.rerun and not any(arm.against for arm in experiment.arms.values()):
        notes.append("the further runs of equal time follow from measured step times and are not in the plan")
    rows = [
        {
            "point": kind.key[0], "arm": kind.key[1],
            "control": experiment.arms[kind.key[1]].is_control,
            "runs": len(kind.cells),
            "finished": sum(states[cell] in ("finished", "diverged") for cell in kind.cells),
            "steps": kind.config.train.steps,
            "tokens": kind.tokens,
            "parameters": kind.facts["parameters"]["total"],
            "scaling_parameters": kind.facts["parameters"]["scaling"],
            "flops_per_token": kind.facts["flops_per_token"],
            "flops": kind.flops,
            "seconds": times.seconds.get(kind.key),
        }
        for kind in kinds
    ]  # fmt: skip
    jobs = _jobs(kinds, len(pending))
    by_key = {kind.key: kind for kind in kinds}
    seconds = [times.seconds.get((cell.point, cell.arm)) for cell in pending]
    known = [value for value in seconds if value is not None]
    return {
        "name": experiment.name,
        "rows": rows,
        "runs": len(states),
        "pending": len(pending),
        "states": {state: list(states.values()).count(state) for state in dict.fromkeys(states.values())},
        "seeds": len(experiment.seeds),
        "tokens": sum(kind.tokens * len(kind.cells) for kind in kinds),
        "flops": sum(kind.flops * len(kind.cells) for kind in kinds),
        "flops_pending": sum(by_key[cell.point, cell.arm].flops for cell in pending),
        "time": {
            "source": times.source,
            "jobs": jobs,
            "run_seconds": sum(known) if len(known) == len(seconds) else None,
            "wall_seconds": makespan(known, jobs) if jobs and len(known) == len(seconds) else None,
        },
        "disk": _disk(store, kinds, pending, jobs or 1),
        "memory": _memory(kinds, times.saved, jobs or 1),
        "power": power,
        "notes": notes,
    }


# Runs and sizes


def _kinds(experiment: Experiment, notes: list[str]) -> list[Kind]:
    """The runs by point and arm, in the order of the file, with what follows from their configuration."""
    cells: dict[Key, list[Cell]] = {}
    for cell in cells_of(experiment):
        cells.setdefault((cell.point, cell.arm), []).append(cell)
    order = {name: index for index, name in enumerate(point.name for point in experiment.points)}
    facts: dict[str, tuple[dict[str, Any], Sizes]] = {}
    found: list[Kind] = []
    unknown: dict[str, str] = {}
    for key in sorted(cells, key=lambda key: order[key[0]]):
        config = resolve(experiment, cells[key][0])
        if config.variant.name not in VARIANTS:
            unknown[key[1]] = config.variant.name
            base = experiment.arms[experiment.baseline].variant
            config = dataclasses.replace(config, variant=base if base.name in VARIANTS else VariantChoice())
        same = digest([dump(config.model), dump(config.variant), dump(config.optim), dump(config.train)])
        if same not in facts:
            facts[same] = derived(config), sizes_of(config)
        found.append(Kind(key, config, tuple(cells[key]), *facts[same]))
    if unknown:
        listed = ", ".join(f"{arm} ({variant})" for arm, variant in unknown.items())
        notes.append(f"a variant from a plugin is not run here, so it is reckoned as the baseline: {listed}")
    return found


def sizes_of(config: RunConfig) -> Sizes:
    """Bytes of a model and what its optimizer keeps of it. The model is never filled: its memory is not touched."""
    model = GPT(config.model, config.variant, dtype=DTYPES[compute_dtype(config)])
    groups = assign_groups(model)
    kept = 0
    for name, parameter in model.named_parameters():
        if groups[name] == "matrix" and config.optim.kind != "adamw":
            kept += 4 * parameter.numel() + (4 * max(parameter.shape) if config.optim.kind == "hybrid" else 0)
        else:
            kept += 2 * 4 * parameter.numel() + 8  # mean and square in float32, and a count of steps
    return Sizes(
        weights=sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values()),
        gradients=sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()),
        optimizer=kept,
    )


def _jobs(kinds: Sequence[Kind], pending: int) -> int | None:
    """Runs side by side, as ``run`` would choose; None where the device asked for is not here."""
    if _no_device(kinds):
        return None
    return default_jobs(max(kind.config.train.threads for kind in kinds), max(1, pending))


def _no_device(kinds: Sequence[Kind]) -> str:
    if any(kind.config.train.device == "cuda" for kind in kinds) and not torch.cuda.is_available():
        return "train.device = 'cuda', and torch finds no CUDA device here"
    return ""


# Time


def makespan(seconds: Sequence[float], jobs: int) -> float:
    """When the last of these runs ends: each, in this order, goes to the worker that is free first."""
    free = [0.0] * jobs
    for value in seconds:
        heapq.heapreplace(free, free[0] + value)
    return max(free)


def _times(experiment: Experiment, store: RunStore, kinds: Sequence[Kind], measure: bool) -> Times:
    """From finished runs; else from timing.json; else measured; else none, with the reason."""
    costs = measured_costs(experiment, store)
    saved = _saved(experiment, costs)
    if own := _of_finished_runs(store, kinds):
        seconds, by_flops = _fill(own, kinds)
        return Times(seconds, "finished runs of this experiment", (*_lent(by_flops), *_elsewhere(store, kinds)), saved)
    rest = "start and evaluation are not in the time"
    if costs:
        own = {
            kind.key: kind.config.train.steps * median(costs["points"][kind.key[0]]["seconds"][kind.key[1]])
            for kind in kinds
            if kind.key[1] in costs["points"][kind.key[0]]["seconds"]
        }
        seconds, by_flops = _fill(own, kinds)
        return Times(seconds, "timing.json, arms in turns in one process", (*_lent(by_flops), rest), saved)
    if reason := _no_device(kinds):
        return Times({}, "none", (f"no time: {reason}",))
    if not measure:
        return Times({}, "none", ("no time: nothing stored tells it, and --no-measure was given",))
    return _measured(kinds, rest)


def _of_finished_runs(store: RunStore, kinds: Sequence[Kind]) -> dict[Key, float]:
    """Mean seconds of the finished runs of each kind that were made on this machine."""
    found: dict[Key, float] = {}
    for kind in kinds:
        runs = [store.run(cell) for cell in kind.cells]
        spent = [
            sum(run.status["seconds"].values())
            for run in runs
            if run.state == "finished"
            and "seconds" in run.status
            and run.read("fingerprint").get("machine") == machine()
        ]
        if spent:
            found[kind.key] = sum(spent) / len(spent)
    return found


def _elsewhere(store: RunStore, kinds: Sequence[Kind]) -> tuple[str, ...]:
    places = {
        store.run(cell).read("fingerprint").get("machine")
        for kind in kinds
        for cell in kind.cells
        if store.run(cell).state == "finished"
    }
    return ("some runs were made on another machine: their time is not used",) if places - {machine()} else ()


def _saved(experiment: Experiment, costs: Mapping[str, Any]) -> dict[Key, int]:
    """Activations kept for backward, as timing.json has them."""
    found = {(cost["point"], cost["arm"]): int(cost["saved_bytes"]) for cost in costs.get("costs", [])}
    for point, row in costs.get("points", {}).items():
        found[point, experiment.baseline] = int(row["baseline_saved_bytes"])
    return found


def _fill(own: Mapping[Key, float], kinds: Sequence[Kind]) -> tuple[dict[Key, float], list[Kind]]:
    """Seconds of every kind: its own, else in proportion to its operations, from its point where that is known."""
    by_key = {kind.key: kind for kind in kinds}
    found, lent = dict(own), list[Kind]()
    for kind in kinds:
        if kind.key not in found:
            near = [key for key in own if key[0] == kind.key[0]] or list(own)
            rate = sum(own[key] for key in near) / sum(by_key[key].flops for key in near)
            found[kind.key] = rate * kind.flops
            lent.append(kind)
    return found, lent


def _lent(kinds: Sequence[Kind]) -> tuple[str, ...]:
    if not kinds:
        return ()
    arms = ", ".join(dict.fromkeys(kind.key[1] for kind in kinds))
    return (f"time by operations, from other arms: {arms}",)


class _Step(NamedTuple):
    """A timed step: seconds, activations kept for backward (None: not seen), what it was extended from ("": none)."""

    seconds: float
    saved: int | None
    extended: str


def _measured(kinds: Sequence[Kind], rest: str) -> Times:
    """A few steps of each distinct configuration on random tokens, the smallest first, within ``SECONDS`` in all."""
    busy = busy_share()
    deadline = time.monotonic() + SECONDS
    threads = torch.get_num_threads()
    steps: dict[str, _Step] = {}
    own: dict[Key, float] = {}
    saved: dict[Key, int] = {}
    try:
        torch.set_num_threads(kinds[0].config.train.threads)
        speed = EFFICIENCY * _matrix_speed(kinds[0].config.train.device)
        shapes = {_shape_of_step(kind.config) for kind in kinds}
        for kind in sorted(kinds, key=_step_flops):
            same = _shape_of_step(kind.config)
            left = (deadline - time.monotonic()) / max(1, len(shapes - steps.keys()))
            if same not in steps and (step := _time_step(kind, speed, left)):
                steps[same] = step
                speed = _step_flops(kind) / step.seconds
            if same in steps:
                own[kind.key] = steps[same].seconds * kind.config.train.steps
                if (kept := steps[same].saved) is not None:
                    saved[kind.key] = kept
    finally:
        torch.set_num_threads(threads)
    if not own:
        reason = f"no time: not even a small part of a step is done in the {SECONDS:.0f} s that are taken to measure"
        return Times({}, "none", (reason,))
    seconds, by_flops = _fill(own, kinds)
    notes = [rest, *_lent(by_flops)]
    extended = ", ".join(dict.fromkeys(step.extended for step in steps.values() if step.extended))
    if extended:
        notes.append(f"the time is an extrapolation, by operations, from {extended}")
    if any(kind.config.train.compile for kind in kinds):
        notes.append("measured without torch.compile")
    if busy is not None and busy > BUSY:
        notes.append(f"other work held {100 * busy:.0f} % of the machine while this was measured")
    return Times(seconds, "a few steps on random tokens now, one run at a time", tuple(notes), saved)


def _step_flops(kind: Kind) -> float:
    return float(kind.facts["flops_per_token"]) * kind.config.train.batch_tokens


def _shape_of_step(config: RunConfig) -> str:
    """Equal for configurations whose steps take the same time: rates, seeds and lengths do not matter."""
    train = config.train
    shape = [train.batch_tokens, train.micro_rows, train.dtype, train.device, train.threads, train.attention]
    return digest([dump(config.model), dump(config.variant), config.optim.kind, shape])


def _matrix_speed(device: str, size: int = 512) -> float:
    """Operations a second of a plain product of float32 matrices."""
    a = torch.ones(size, size, device=device)
    best = math.inf
    for _ in range(5):
        begin = time.perf_counter()
        (a @ a)[0, 0].item()  # waits for the device
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best


def _time_step(kind: Kind, speed: float, left: float) -> _Step | None:
    """The step of a configuration, or as much of it as ``left`` seconds hold; ``speed``: a guess, operations a second.

    What was timed corrects the guess, and more of the step is tried then.
    """
    deadline, found = time.monotonic() + left, None
    ladder = list(_smaller(kind.config))
    flops = [derived(part)["flops_per_token"] * part.train.batch_tokens for part, _ in ladder]
    small = [derived(part)["parameters"]["total"] <= LARGEST for part, _ in ladder]
    rung = len(ladder)
    while True:
        room = speed * (deadline - time.monotonic()) / 4  # forward for the activations, and three steps
        higher = next((i for i in range(rung) if small[i] and flops[i] <= room), None)
        if higher is None:
            return found
        rung = higher
        found = _time_part(kind, ladder[rung][0], ladder[rung][1])
        speed = _step_flops(kind) / found.seconds


def _time_part(kind: Kind, config: RunConfig, words: str) -> _Step:
    """``words``: what part of the step of ``kind`` this configuration is; empty where it is the whole."""
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, compile=False))
    state, batch = build_state(config), _random_batch(config)
    kept = saved_bytes(state, batch, config.train.micro_rows)
    if not words:
        times = interleaved_step_times(
            {"it": state}, lambda step: batch, rounds=1, warmup=1, micro_rows=config.train.micro_rows
        )  # fmt: skip
        return _Step(min(times["it"]), kept, "")
    # Without the update: it costs the same whatever the number of rows, and next to nothing in a large batch.
    seconds = min(_forward_backward(state, batch) for _ in range(2))
    flops = derived(config)["flops_per_token"] * config.train.batch_tokens
    rows = kind.config.train.micro_rows or kind.config.train.batch_rows(kind.config.model.context)
    same_model = config.model == kind.config.model
    return _Step(
        seconds * _step_flops(kind) / flops, kept * rows // len(batch.inputs) if same_model else None, words
    )  # fmt: skip


def _smaller(config: RunConfig) -> Iterator[tuple[RunConfig, str]]:
    """The configuration, then with ever fewer rows, then with two layers and a short context; each with its words."""
    yield config, ""
    whole = rows = config.train.batch_rows(config.model.context)
    while rows > 1:
        rows = max(1, rows // 8)
        yield _with_rows(config, rows), f"{rows} of the {whole} rows of a batch"
    depth = min(config.model.depth, 2)
    for context in (min(config.model.context, most) for most in (256, 32)):
        model = dataclasses.replace(config.model, depth=depth, context=context)
        part = dataclasses.replace(config, model=model, variant=VariantChoice())
        yield _with_rows(part, 1), f"one row of {context} tokens through {depth} of {config.model.depth} layers"


def _with_rows(config: RunConfig, rows: int) -> RunConfig:
    train = dataclasses.replace(config.train, batch_tokens=rows * config.model.context, micro_rows=0)
    return dataclasses.replace(config, train=train)


def _random_batch(config: RunConfig) -> Batch:
    rows, context = config.train.batch_rows(config.model.context), config.model.context
    tokens = torch.randint(config.model.vocab_size, (rows, context + 1), generator=torch.Generator().manual_seed(0))
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), torch.arange(rows))


def _forward_backward(state: TrainState, batch: Batch) -> float:
    device = state.model.head.weight.device
    begin = time.perf_counter()
    state.model.token_nats(batch.inputs.to(device), batch.targets.to(device)).mean().backward()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


# Disk and memory


def _disk(store: RunStore, kinds: Sequence[Kind], pending: Sequence[Cell], jobs: int) -> dict[str, Any]:
    """Bytes that are still to be written, about: what stays, and what is there only while runs live."""
    by_key = {kind.key: kind for kind in kinds}
    todo = [by_key[cell.point, cell.arm] for cell in pending]
    largest = max((kind.sizes.weights + kind.sizes.optimizer for kind in kinds), default=0)
    return {
        "weights": sum(kind.sizes.weights for kind in todo),
        "logs": sum(LOG_BYTES * kind.config.train.steps + FOLDER_BYTES for kind in todo),
        "checkpoints": (KEEP + 1) * largest * min(jobs, len(todo)),  # the kept ones and the one being written
        "packed_rows": _packed_rows(store, kinds),
    }


def _packed_rows(store: RunStore, kinds: Sequence[Kind]) -> int | None:
    """Bytes of the packed training rows, there or not, where the corpora are prepared; None where one is not."""
    path = store.folder / "corpora.json"
    manifests = [entry["manifest"] for entry in json.loads(path.read_text(encoding="utf-8"))] if path.is_file() else []
    total = 0
    wanted = {digest([dump(k.config.data), k.config.model.vocab_size, k.config.model.context]): k for k in kinds}
    for kind in wanted.values():
        asked = {**dump(kind.config.data), "vocab_size": kind.config.model.vocab_size}
        manifest = next((m for m in manifests if asked.items() <= m["config"].items()), None)
        if manifest is None:
            return None
        context = kind.config.model.context
        tokens = manifest["train"]["tokens"] + manifest["train"]["documents"]
        total += (tokens // context + 1) * (context + 1) * (2 if manifest["dtype"] == "uint16" else 4)
    return total


def _memory(kinds: Sequence[Kind], saved: Mapping[Key, int], jobs: int) -> dict[str, Any]:
    """Bytes of the largest run while it trains; activations as autograd keeps them for one forward pass."""
    largest = max(kinds, key=lambda kind: sum(dataclasses.astuple(kind.sizes)) + saved.get(kind.key, 0))
    parts = dataclasses.asdict(largest.sizes)
    activations = saved.get(largest.key)
    return {
        "point": largest.key[0], "arm": largest.key[1], **parts, "activations": activations,
        "run": sum(parts.values()) + (activations or 0), "jobs": jobs,
    }  # fmt: skip


# What can be seen


@dataclass(frozen=True)
class Spread:
    """Standard deviation of the seeds' paired differences in bits per byte, or as a share of the baseline's.

    n: pairs that it was estimated from, 0 where it was stated. text: the standard error from the choice of documents,
    which no number of seeds lowers. baseline: its bits per byte, None where unknown. relative: all are shares of it.
    """

    of: str
    point: str
    sd: float
    n: int
    text: float
    baseline: float | None
    relative: bool = False


def _power(experiment: Experiment, store: RunStore, effect: Amount | None, stated: Amount | None) -> dict[str, Any]:
    """What the planned seeds see, and the seeds that an effect needs, for each spread that is known."""
    spreads = _stored_spreads(experiment, store)
    baseline = next((spread.baseline for spread in spreads if spread.baseline is not None), None)
    if stated is not None:
        relative = stated.relative and baseline is None
        value = stated.value * baseline if stated.relative and baseline is not None else stated.value
        spreads.append(Spread("stated", "", value, 0, 0.0, baseline, relative))
        if effect is not None and baseline is None and effect.relative != stated.relative:
            raise ValueError(
                "--effect and --sd: one is a share of the baseline, the other is not, and no finished pairs tell the "
                "baseline's bits per byte; write both with % or both without"
            )
    seeds, family, margin = len(experiment.seeds), family_size(experiment), experiment.primary.margin
    factor = minimum_detectable(1.0, seeds, alpha=ALPHA, power=POWER) if seeds >= LEAST_SEEDS else None
    return {
        "seeds": seeds,
        "alpha": ALPHA,
        "power": POWER,
        "family": family,
        "effect": dataclasses.asdict(effect) if effect else None,
        "margin": margin,  # a share of the baseline, as the next one
        "sd_for_margin": margin / factor if factor else None,
        "sd_for_effect": effect.value / factor if effect and factor else None,  # a share where the effect is one
        "spreads": [_seen(spread, seeds, family, effect, baseline) for spread in spreads],
    }


def _stored_spreads(experiment: Experiment, store: RunStore) -> list[Spread]:
    """Of the primary contrast, or each point's first, and of the null control, from at least 3 finished pairs."""
    every: list[Contrast | Combination] = [*contrasts(experiment), *combinations(experiment)]
    effects = [contrast for contrast in every if contrast.primary]
    for point in experiment.points if not effects else ():
        effects += [c for c in every if c.kind == "effect" and c.point == point.name][:1]
    found: list[Spread] = []
    for contrast in (*effects, *(c for c in every if c.kind == "null")):
        table = pairs(experiment, store, contrast).table
        if table is None or len(table.seeds) < LEAST_SEEDS:
            continue
        estimate = mean_difference(table)
        assert estimate.sd is not None, "three seeds have a spread"
        base = estimate.baseline_mean if isinstance(contrast, Contrast) else None
        name = "null control" if contrast.kind == "null" else contrast.name
        found.append(Spread(name, contrast.point, estimate.sd, estimate.n, estimate.document_error, base))
    return found


def family_size(experiment: Experiment) -> int:
    """Contrasts that share the error of 5 %: what ``primary.family`` names, or every effect; no controls."""
    every: list[Contrast | Combination] = [*contrasts(experiment), *combinations(experiment)]
    effects = [c for c in every if isinstance(c, Combination) or c.kind == "effect"]
    names = experiment.primary.family
    return sum(not names or contrast.name in names for contrast in effects)


def _seen(spread: Spread, seeds: int, family: int, effect: Amount | None, baseline: float | None) -> dict[str, Any]:
    """For one spread: the smallest effect of the planned seeds, and the seeds for ``effect``.

    Each for the primary contrast alone (5 %) and as one of the family (5 % / m, Holm's first step): [best guess], with
    the ends of the spread's own 95 % interval where it was estimated. floor: the smallest effect of endless seeds.
    """
    sds = [spread.sd, *(sd_interval(spread.sd, spread.n) if spread.n else ())]
    wanted = None
    if effect is not None:
        base = spread.baseline or baseline
        wanted = effect.value * base if effect.relative and base and not spread.relative else effect.value
    row: dict[str, Any] = {**dataclasses.asdict(spread), "sds": sds, "effect": wanted}
    for name, alpha in (("alone", ALPHA), ("family", ALPHA / max(1, family))):
        row[name] = {
            "smallest": [smallest_effect(sd, spread.text, seeds, alpha) for sd in sds] if seeds >= LEAST_SEEDS else [],
            "seeds": [] if wanted is None else [seeds_for(sd, spread.text, wanted, alpha) for sd in sds],
            "floor": spread.text * float(special.ndtri(1 - alpha / 2) + special.ndtri(POWER)),
        }
    return row


def smallest_effect(sd: float, text: float, seeds: int, alpha: float = ALPHA) -> float:
    """``minimum_detectable`` of Var Δ = sd² / seeds + text²: the text's part does not shrink with seeds."""
    return minimum_detectable(math.sqrt(sd**2 + seeds * text**2), seeds, alpha=alpha, power=POWER)


def seeds_for(sd: float, text: float, effect: float, alpha: float = ALPHA) -> int | None:
    """The smallest number of seeds, at least 3, that finds ``effect``; None where it is above 1,000."""
    every = range(LEAST_SEEDS, MANY_SEEDS + 1)
    index = bisect.bisect_left(every, True, key=lambda n: smallest_effect(sd, text, n, alpha) <= effect)
    return every[index] if index < len(every) else None


# Printing


def print_plan(content: Mapping[str, Any], console: Console) -> None:
    """Tables within the console's width, 80 columns where it is none, and in ASCII."""
    states = ", ".join(f"{count} {state}" for state, count in content["states"].items())
    console.print(Text(f"experiment {content['name']}: {content['runs']} runs ({states})"))
    console.print(_table(content))
    console.print()
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True)
    facts.add_column()
    for name, text in _facts(content):
        facts.add_row(name, Text(text))
    console.print(facts)
    if content["power"]["spreads"]:
        console.print()
        console.print(_power_table(content["power"]))
        console.print(Text(_power_words(content["power"])))


def _table(content: Mapping[str, Any]) -> Table:
    points = len({row["point"] for row in content["rows"]}) > 1
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in (*(["point"] if points else []), "arm"):
        table.add_column(heading, overflow="fold")
    for heading in ("runs", "done", "steps", "params", "FLOP/token", "FLOP/run", "time/run"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in content["rows"]:
        table.add_row(
            *([row["point"]] if points else []), row["arm"], str(row["runs"]), str(row["finished"]),
            f"{row['steps']:,}", short(row["parameters"]), f"{row['flops_per_token']:.2e}", f"{row['flops']:.1e}",
            "" if row["seconds"] is None else duration(row["seconds"]),
        )  # fmt: skip
    return table


def _facts(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What stands under the table: names and texts."""
    clock, disk, memory = content["time"], content["disk"], content["memory"]
    yield "tokens", f"{short(content['tokens'])} in all"
    yield "FLOP", f"{content['flops']:.2e} in all, {content['flops_pending']:.2e} in the {content['pending']} runs left"
    if clock["wall_seconds"] is None:
        yield "time", "not known"
    else:
        yield "time", f"{duration(clock['wall_seconds'])} left, {clock['jobs']} side by side; from {clock['source']}"
    rows = "not known before xsalab data" if disk["packed_rows"] is None else size(disk["packed_rows"])
    stays = size(disk["weights"] + disk["logs"])
    yield "disk", f"{stays} of runs to write, checkpoints up to {size(disk['checkpoints'])}; packed rows: {rows}"
    kept = "not measured" if memory["activations"] is None else size(memory["activations"])
    yield (
        "memory",
        (
            f"{size(memory['run'])} a run, beside the program: weights {size(memory['weights'])}, "
            f"gradients {size(memory['gradients'])}, optimizer {size(memory['optimizer'])}, saved activations {kept}"
        ),
    )
    for text in _power_facts(content["power"]):
        yield "power", text
    for text in content["notes"]:
        yield "note", text


def _power_facts(power: Mapping[str, Any]) -> Iterator[str]:
    """What there is to say without a spread."""
    seeds, effect = power["seeds"], power["effect"]
    if seeds < LEAST_SEEDS:
        yield f"{seeds} seeds decide nothing: plan at least {LEAST_SEEDS}"
    if power["spreads"]:
        return
    yield "how much the differences vary between seeds is not known: run 3 seeds, or state --sd"
    if power["sd_for_margin"] is not None:
        yield (
            f"{seeds} seeds see the margin of {percent(power['margin'])} where that sd is at most "
            f"{percent(power['sd_for_margin'])} of the baseline's bits per byte"
        )
    if power["sd_for_effect"] is not None:
        unit = _unit(effect["relative"])
        most = unit(power["sd_for_effect"])
        yield f"{seeds} seeds see an effect of {unit(effect['value'])} where it is at most {most}"


def _power_table(power: Mapping[str, Any]) -> Table:
    several = power["family"] > 1
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("paired differences", overflow="fold")
    headings = ["sd"]
    for name in (["sees"] if power["seeds"] >= LEAST_SEEDS else []) + (["seeds"] if power["effect"] else []):
        headings += [name, f"1 of {power['family']}"] if several else [name]
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in power["spreads"]:
        unit = _unit(row["relative"])
        cells = [unit(row["sd"])]
        for name, show in (("smallest", unit), ("seeds", _seeds)):
            alone, shared = row["alone"][name], row["family"][name]
            if alone:
                ends = f"\n{show(alone[1])} to {show(alone[2])}" if alone[1:] else ""
                cells += [show(alone[0]) + ends, *([show(shared[0])] if several else [])]
        place = f", {row['point']}" if row["point"] else ""
        table.add_row(f"{row['of']}{place} ({row['n']} pairs)" if row["n"] else row["of"], *cells)
    return table


def _power_words(power: Mapping[str, Any]) -> str:
    """What the columns mean, and where seeds do not help."""
    text = ""
    if power["seeds"] >= LEAST_SEEDS:
        text += (
            f"sees: the smallest true effect that {power['seeds']} seeds find with {percent(power['power'])} power. "
        )
    if power["effect"]:
        text += (
            f"seeds: as many as find {_unit(power['effect']['relative'])(power['effect']['value'])} with that power. "
        )
    if any(row["n"] for row in power["spreads"]):
        text += "Below it: what the sd's own 95 % interval makes of it. "
    if power["family"] > 1:
        text += f"1 of {power['family']}: not as the primary contrast alone, but adjusted for the family. "
    for row in power["spreads"]:
        if row["effect"] is not None and row["alone"]["floor"] >= row["effect"]:
            text += (
                f"{row['of']}{', ' + row['point'] if row['point'] else ''}: no number of seeds sees less than "
                f"{_unit(False)(row['alone']['floor'])} with this validation text; raise eval.max_bytes. "
            )
    return text.rstrip()


def _unit(relative: bool) -> Callable[[float], str]:
    return percent if relative else lambda value: f"{value:.2g}"


def _seeds(count: int | None) -> str:
    return f">{MANY_SEEDS}" if count is None else str(count)


def percent(share: float) -> str:
    """ "0.32 %": two significant digits."""
    return f"{100 * share:.2g} %"


def short(count: float) -> str:
    """ "836 k", "1.32 G": three significant digits with a letter of thousands."""
    for letter in ("", " k", " M", " G"):
        if count < 999.5:
            return f"{count:.3g}{letter}"
        count /= 1000
    return f"{count:,.3g} T"


def size(count: float) -> str:
    """ "3.35 MB": bytes in thousands."""
    number = short(count)
    return f"{number}B" if number[-1].isalpha() else f"{number} B"


def duration(seconds: float) -> str:
    """ "49 s", "3.2 min", "5.1 h", "2.3 days"."""
    for limit, unit, name in ((90, 1, "s"), (5400, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.2g} {name}"
    return f"{seconds / 86_400:,.0f} days"
