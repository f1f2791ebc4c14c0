"""THE DESIGN: an experiment is a frozen value; expanding it gives cells; a cell resolves to one run's configuration.

cell = point × arm × seed. Two runs of one point and seed are a pair when their configurations differ in the
declared factors and nothing else. The controls are arms too: "null" (baseline with permuted rows), "positive"
(baseline with a change known to hurt) and "twin" (one cell of the baseline, run again).

What is compared is always a weighted sum over cells of one seed, Σ w · metric(point, arm) with Σ w = 0: an arm
against another (+1, −1), a main effect, an interaction, a mean over points, a slope over points.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import build, config, dump, flat, set_dotted
from ..data import DataConfig
from ..eval.validation import EvalConfig
from ..model import ModelConfig, VariantChoice
from ..optim import OptimConfig
from ..train import TrainConfig
from .factors import Factor

if TYPE_CHECKING:
    from .command import Command
    from .downstream import Downstream
    from .mechanism import DiagnoseConfig

CONTROLS = ("null", "positive", "twin")
SECTIONS: dict[str, type] = {
    "data": DataConfig, "model": ModelConfig, "optim": OptimConfig, "train": TrainConfig, "eval": EvalConfig,
}  # fmt: skip
DIVISION = ("train.processes", "train.shard")  # how a run's work is divided: the last digits of its numbers
SCALES = ("train.tokens", "model.depth", "model.context", "model.width")  # what a trend over points is taken along


@config
class RunConfig:
    """Everything that shapes one run."""

    seed: int
    data: DataConfig
    model: ModelConfig
    optim: OptimConfig
    train: TrainConfig
    eval: EvalConfig
    variant: VariantChoice


@config
class Primary:
    """The contrast that the experiment is about, declared before the runs.

    ``margin`` is relative to the baseline, or with ``absolute`` in units of the metric.
    """

    contrast: str = ""  # the name of one: "xsa - standard", "(xsa - standard) x (adamw - muon)", … ; empty: none
    metric: str = "val_bpb"
    margin: float = 0.001
    family: tuple[str, ...] = ()  # names of the contrasts that share the error of 5 % (Holm); empty: all of them
    absolute: bool = False

    def __post_init__(self) -> None:
        if self.absolute and not 0 < self.margin < math.inf:
            raise ValueError(f"margin = {self.margin}: a difference in units of the metric, above 0")
        if not self.absolute and not 0 < self.margin < 1:
            raise ValueError(f"margin = {self.margin}: a share of the baseline's value, above 0 and below 1")


@config
class Controls:
    """Which controls run beside the arms. ``also``: arms that get a null and a positive control besides the baseline,
    such as the standard arm under another optimizer; theirs are named "null@ARM" and "positive@ARM".
    """

    null: bool = True
    positive: Mapping[str, Any] = field(default_factory=dict[str, Any])  # dotted field -> value known to hurt
    twin: bool = True
    timing: bool = True
    rounds: int = 0  # of the timing, two steps of each arm a round; 0: timing.ROUNDS
    also: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.rounds < 0:
            raise ValueError(f"rounds = {self.rounds}: must be at least 0 (as many as usual)")


@config
class EqualTime:
    """Runs that make equal time a comparison of complete runs.

    rerun: the slower of an arm and the baseline is trained again, in as many steps as the faster one's time holds.
    slope: the baseline is trained again with ``share`` of the steps; its slope turns a step-time ratio into bpb.
    target: the metric whose time to reach is told; 0: the baseline's mean.
    """

    rerun: bool = False
    slope: bool = False
    share: float = 0.9
    target: float = 0.0

    def __post_init__(self) -> None:
        if not 0.5 <= self.share < 1:
            raise ValueError(f"share = {self.share}: of the baseline's steps, at least 0.5 and below 1")
        if not 0 <= self.target < math.inf:
            raise ValueError(f"target = {self.target}: a value of the metric, or 0 for the baseline's mean")


@dataclass(frozen=True)
class Metric:
    """What runs are judged by. A run's value is the sum of its items' values / (unit · sum of their weights)."""

    name: str = "bpb"  # as tables and sentences say it
    unit: float = math.log(2)
    lower_is_better: bool = True
    item_word: str = "documents"


@dataclass(frozen=True)
class Arm:
    """One setting under test: a variant and the fields that it sets by dotted name, its declared factors.

    steps: point -> number of steps, where this is another complete run of the arm ``of``; empty: as the point says.
    of: that arm, or the one that this is a control of; empty: the baseline.
    against: the arm that it is compared with at equal time.
    words: the arm in words, where its fields do not say it.
    """

    name: str
    variant: VariantChoice
    sets: tuple[tuple[str, Any], ...] = ()
    steps: Mapping[str, int] = field(default_factory=dict[str, int])
    of: str = ""
    against: str = ""
    words: str = ""

    @property
    def is_control(self) -> bool:
        return self.control != ""

    @property
    def control(self) -> str:
        """ "null", "positive" or "twin"; empty where the arm is under test."""
        kind = self.name.partition("@")[0]
        return kind if kind in CONTROLS else ""

    @property
    def factors(self) -> tuple[str, ...]:
        """Dotted names of the fields, or groups of fields, that this arm declares to be different."""
        return ("variant", *(name for name, _ in self.sets), *(("train.tokens",) if self.steps else ()))


@dataclass(frozen=True)
class Point:
    """One setting of what is not under test; its fields by dotted name."""

    name: str
    sets: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, order=True)
class Cell:
    """point × arm × seed."""

    point: str
    arm: str
    seed: int

    @property
    def name(self) -> str:
        """The run's folder name."""
        return f"{self.point}.{self.arm}.s{self.seed}"


@dataclass(frozen=True)
class Term:
    """``weight`` times the metric of an arm at a point."""

    point: str
    arm: str
    weight: float


@dataclass(frozen=True)
class Contrast:
    """``treatment`` minus ``baseline`` at one point. kind: "effect", "null", "positive" or "equal time"."""

    point: str
    treatment: str
    baseline: str
    kind: str
    primary: bool = False

    @property
    def name(self) -> str:
        """ "xsa - standard", as ``primary`` writes it."""
        return f"{self.treatment} - {self.baseline}"

    @property
    def terms(self) -> tuple[Term, ...]:
        """+1 treatment, −1 baseline."""
        return Term(self.point, self.treatment, 1.0), Term(self.point, self.baseline, -1.0)


@dataclass(frozen=True)
class Combination:
    """A contrast of more than two cells of a seed. kind: "main", "interaction", "mean" or "trend" over points.

    ``words`` is what it compares, for a sentence. ``point``: empty where it goes over several. ``scale``: the field
    that a trend goes along; its unit is then the metric's for each doubling of that field.
    """

    name: str
    kind: str
    words: str
    terms: tuple[Term, ...]
    point: str = ""
    scale: str = ""
    primary: bool = False


@dataclass(frozen=True)
class Experiment:
    """One TOML file, and everything that is run and said from it."""

    name: str
    seeds: tuple[int, ...]
    baseline: str
    primary: Primary
    controls: Controls
    base: Mapping[str, Mapping[str, Any]]  # the sections as written
    points: tuple[Point, ...]
    arms: Mapping[str, Arm]  # controls included
    plugins: tuple[str, ...]
    path: Path
    text: str
    factors: tuple[Factor, ...] = ()
    levels: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])  # crossed arm -> levels
    equal_time: EqualTime = field(default_factory=EqualTime)
    looks: tuple[int, ...] = ()  # numbers of seeds at which a sequential experiment looks; empty: it is none
    command: Command | None = None  # of ``engine = "command"``: what is run; None: our own engine
    metric: Metric = field(default_factory=Metric)
    downstream: Downstream | None = None  # what is asked of the runs after training; None: nothing
    diagnose: DiagnoseConfig | None = None  # what is measured inside the runs; None: nothing

    @property
    def engine(self) -> str:
        """Who trains: "xsalab", or "command" for a user's own trainer."""
        return "command" if self.command else "xsalab"


def resolve(experiment: Experiment, cell: Cell) -> RunConfig:
    """The configuration of one run of our own engine: the base, then the point's fields, then the arm's.

    Raises ValueError for a run of another engine, whose configuration nobody here knows.
    """
    if experiment.command:
        raise ValueError(f'{experiment.path}: engine = "command": only the command knows model, data and steps')
    arm = experiment.arms[cell.arm]
    point = point_of(experiment, cell)
    tables = {section: dict(values) for section, values in experiment.base.items()}
    where = f"{experiment.path}: arms.{cell.arm}" if arm.sets else str(experiment.path)
    for name, value in (*point.sets, *arm.sets):
        if name.split(".")[0] not in SECTIONS or "." not in name:
            raise ValueError(
                f"{where}: {name} = {value!r}: name a field as section.field; sections: {', '.join(SECTIONS)}"
            )
        set_dotted(tables, name, value, where)
    built: dict[str, Any] = {
        section: build(kind, tables[section], f"{where}: {section}") for section, kind in SECTIONS.items()
    }
    if arm.steps:
        train: TrainConfig = built["train"]
        built["train"] = dataclasses.replace(train, tokens=arm.steps[cell.point] * train.batch_tokens)
    return RunConfig(seed=cell.seed, variant=arm.variant, **built)


def steps_of(experiment: Experiment, point: str, arm: str) -> int:
    """Steps of an arm's runs at a point, the same for every seed."""
    return resolve(experiment, Cell(point, arm, experiment.seeds[0])).train.steps


def point_of(experiment: Experiment, cell: Cell) -> Point:
    """The point of a cell."""
    return next(point for point in experiment.points if point.name == cell.point)


def expand(experiment: Experiment) -> list[Cell]:
    """All cells, seed by seed, so that pairs are complete as early as possible."""
    cells = [
        Cell(point.name, arm, seed)
        for seed in experiment.seeds
        for point in experiment.points
        for arm in experiment.arms
        if arm != "twin" and (point.name in experiment.arms[arm].steps or not experiment.arms[arm].steps)
    ]
    if "twin" in experiment.arms:
        cells.append(Cell(experiment.points[0].name, "twin", experiment.seeds[0]))
    return cells


def contrasts(experiment: Experiment) -> list[Contrast]:
    """Arm against arm at each point: the declared one first, then the others, then the controls.

    Every arm against the baseline; of crossed factors every level against its factor's first at each setting of the
    others (simple effects), and where the baseline is one of the crossed arms these alone.
    """
    plain = [arm for arm in tested_arms(experiment) if arm != experiment.baseline]
    if experiment.baseline in experiment.levels:
        plain = [arm for arm in plain if arm not in experiment.levels]
    wanted = [(arm, experiment.baseline) for arm in plain] + _simple_effects(experiment)
    declared = _two_arms(experiment, experiment.primary.contrast)
    for name in (experiment.primary.contrast, *experiment.primary.family):
        wanted += [pair] if (pair := _two_arms(experiment, name)) else []
    wanted = list(dict.fromkeys([declared, *wanted] if declared else wanted))
    found: list[Contrast] = []
    for point in experiment.points:
        found += [Contrast(point.name, arm, base, "effect", (arm, base) == declared) for arm, base in wanted]
        found += [
            Contrast(point.name, arm.name, arm.of or experiment.baseline, arm.control)
            for arm in experiment.arms.values()
            if arm.control in ("null", "positive")
        ]
        for arm in experiment.arms.values():
            if (
                arm.against and point.name in arm.steps
            ):  # the baseline is the right side, whichever of the two is slower
                sides = (arm.name, arm.against) if arm.of != experiment.baseline else (arm.against, arm.name)
                found.append(Contrast(point.name, *sides, "equal time"))
    return found


def tested_arms(experiment: Experiment) -> list[str]:
    """The arms of the file: without controls and without further runs of an arm for equal time."""
    return [name for name, arm in experiment.arms.items() if not arm.is_control and not arm.steps]


def _two_arms(experiment: Experiment, name: str) -> tuple[str, str] | None:
    treatment, separator, baseline = name.partition(" - ")
    arms = tested_arms(experiment)
    if separator and treatment != baseline and treatment in arms and baseline in arms:
        return treatment, baseline
    return None


def _simple_effects(experiment: Experiment) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    by_levels = {levels: arm for arm, levels in experiment.levels.items()}
    for index, factor in enumerate(experiment.factors):
        for levels, arm in by_levels.items():
            if levels[index] != factor.levels[0]:
                found.append((arm, by_levels[_with(levels, index, factor.levels[0])]))
    return found


def _with(levels: tuple[str, ...], index: int, level: str) -> tuple[str, ...]:
    return (*levels[:index], level, *levels[index + 1 :])


def combinations(experiment: Experiment) -> list[Combination]:
    """Main effects and interactions of crossed factors at each point, then means and trends over the points."""
    found: list[Combination] = []
    crossed = [index for index, factor in enumerate(experiment.factors) if len(factor.levels) > 1]
    for point in experiment.points if len(crossed) > 1 else ():
        for index in crossed:
            found += _main_effects(experiment, point.name, index)
        for first, second in itertools.combinations(crossed, 2):
            found += _interactions(experiment, point.name, first, second)
    if len(experiment.points) > 1:
        pairs = dict.fromkeys(c.name for c in contrasts(experiment) if c.kind == "effect")
        found += [_mean_over_points(experiment, name) for name in pairs]
        declared = [name.rpartition(" over ") for name in (experiment.primary.contrast, *experiment.primary.family)]
        scales = scales_of(experiment)
        for name in pairs:
            wanted = [scale for pair, _, scale in declared if pair == name and scale != "points"] or list(scales)[:1]
            found += [_trend(experiment, name, scale, scales[scale]) for scale in wanted if scale in scales]
    return [dataclasses.replace(c, primary=c.name == experiment.primary.contrast) for c in found]


def _main_effects(experiment: Experiment, point: str, index: int) -> list[Combination]:
    """Each level of a factor against its first, mean over the settings of the other factors."""
    factor, found = experiment.factors[index], list[Combination]()
    others = [other for i, other in enumerate(experiment.factors) if i != index and len(other.levels) > 1]
    for level in factor.levels[1:]:
        at = {"+": _arms_at(experiment, {index: level}), "-": _arms_at(experiment, {index: factor.levels[0]})}
        terms = [Term(point, arm, 1 / len(at["+"])) for arm in at["+"]]
        terms += [Term(point, arm, -1 / len(at["-"])) for arm in at["-"]]
        words = f"{level} against {factor.levels[0]}, mean over {' and '.join(other.name for other in others)}"
        found.append(Combination(f"{level} - {factor.levels[0]}", "main", words, tuple(terms), point))
    return found


def _interactions(experiment: Experiment, point: str, first: int, second: int) -> list[Combination]:
    """How the effect of a level of one factor differs between levels of another, mean over the remaining factors."""
    a, b = experiment.factors[first], experiment.factors[second]
    found: list[Combination] = []
    for level, other in itertools.product(a.levels[1:], b.levels[1:]):
        terms: list[Term] = []
        for la, lb, sign in (
            (level, other, 1),
            (a.levels[0], other, -1),
            (level, b.levels[0], -1),
            (a.levels[0], b.levels[0], 1),
        ):
            arms = _arms_at(experiment, {first: la, second: lb})
            terms += [Term(point, arm, sign / len(arms)) for arm in arms]
        name = f"({level} - {a.levels[0]}) x ({other} - {b.levels[0]})"
        words = f"{level} − {a.levels[0]} under {other} against the same under {b.levels[0]}"
        found.append(Combination(name, "interaction", words, tuple(terms), point))
    return found


def _arms_at(experiment: Experiment, fixed: Mapping[int, str]) -> list[str]:
    return [arm for arm, levels in experiment.levels.items() if all(levels[i] == level for i, level in fixed.items())]


def _mean_over_points(experiment: Experiment, pair: str) -> Combination:
    treatment, baseline = pair.split(" - ")
    share = 1 / len(experiment.points)
    terms = [
        Term(p.name, arm, sign * share) for p in experiment.points for arm, sign in ((treatment, 1), (baseline, -1))
    ]
    words = f"{treatment} against {baseline}, mean over {len(experiment.points)} points"
    return Combination(f"{pair} over points", "mean", words, tuple(terms))


def _trend(experiment: Experiment, pair: str, scale: str, values: Sequence[float]) -> Combination:
    """The least-squares slope of the difference over log2 of a field of the points."""
    treatment, baseline = pair.split(" - ")
    doublings = [math.log2(value) for value in values]
    centre = sum(doublings) / len(doublings)
    spread = sum((x - centre) ** 2 for x in doublings)
    terms = [
        Term(point.name, arm, sign * (x - centre) / spread)
        for point, x in zip(experiment.points, doublings, strict=True)
        for arm, sign in ((treatment, 1), (baseline, -1))
    ]
    words = f"{treatment} against {baseline}, change with each doubling of {scale}"
    return Combination(f"{pair} over {scale}", "trend", words, tuple(terms), scale=scale)


def scales_of(experiment: Experiment) -> dict[str, list[float]]:
    """Fields with another positive number at each point -> their values. The usual scales first."""
    arm, seed = experiment.baseline, experiment.seeds[0]
    runs = [dict(flat(tables_of(experiment, Cell(point.name, arm, seed)))) for point in experiment.points]
    names = [*SCALES, *(name for name in runs[0] if name not in SCALES)]
    found: dict[str, list[float]] = {}
    for name in names:
        values = [run.get(name) for run in runs]
        numbers = [v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool) and v > 0]
        if len(numbers) == len(runs) == len(set(numbers)):
            found[name] = [float(v) for v in numbers]
    return found


def check_declared(experiment: Experiment) -> None:
    """ValueError where ``primary`` names a contrast that the experiment does not have."""
    every = [(c.name, c.point) for c in (*contrasts(experiment), *combinations(experiment))]
    if twice := [name for name, count in Counter(every).items() if count > 1]:
        raise ValueError(f"{experiment.path}: two contrasts have the name {twice[0][0]!r}; rename a level or an arm")
    known = list(dict.fromkeys(name for name, _ in every))
    for field_name, names in (("contrast", [experiment.primary.contrast]), ("family", experiment.primary.family)):
        for name in names:
            if name and name not in known:
                raise ValueError(
                    f"{experiment.path}: primary.{field_name} = {name!r} is no contrast of this experiment; "
                    f"write two arms as 'xsa - standard', or one of: {'; '.join(known) or 'none'}"
                )
    if experiment.primary.family and experiment.primary.contrast not in ("", *experiment.primary.family):
        raise ValueError(
            f"{experiment.path}: primary.family = {list(experiment.primary.family)!r} "
            f"leaves out the primary contrast {experiment.primary.contrast!r}; add it"
        )


def declared_factors(experiment: Experiment, a: str, b: str) -> tuple[str, ...]:
    """The dotted names in which a pair of these two arms may differ."""
    return tuple(dict.fromkeys((*experiment.arms[a].factors, *experiment.arms[b].factors)))


def undeclared(differences: Mapping[str, Any], factors: Sequence[str]) -> dict[str, Any]:
    """The differences that no declared factor covers: a factor covers its own name and the names below it."""
    return {
        name: values
        for name, values in differences.items()
        if not any(name == factor or name.startswith(factor + ".") for factor in factors)
    }


def ours(differences: Mapping[str, tuple[Any, Any]]) -> dict[str, tuple[Any, Any]]:
    """Those that make another run of it: not by how many processes it is carried out, which may change on the way."""
    return {name: values for name, values in differences.items() if name not in DIVISION}


def config_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted name -> (value in a, value in b), for nested tables of plain values."""
    left, right = dict(flat(a)), dict(flat(b))
    return {
        name: (left.get(name), right.get(name))
        for name in sorted(left.keys() | right.keys())
        if left.get(name) != right.get(name)
    }


def tables_of(experiment: Experiment, cell: Cell) -> dict[str, Any]:
    """A run's configuration as plain nested tables, as stored with it, whatever the engine."""
    if experiment.command:
        return experiment.command.resolve(experiment, cell).tables()
    return dump(resolve(experiment, cell))
