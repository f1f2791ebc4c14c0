"""THE DESIGN: an experiment is a frozen value; expanding it gives cells; a cell resolves to one run's configuration.

cell = point × arm × seed. Two runs of one point and seed are a pair when their configurations differ in the
declared factors and nothing else. The controls are arms too: "null" (baseline with permuted rows), "positive"
(baseline with a change known to hurt) and "twin" (one cell of the baseline, run again).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from ..config import build, config, dump, flat, read_toml, set_dotted, unknown_field
from ..data import DataConfig
from ..eval.validation import EvalConfig
from ..model import ModelConfig, VariantChoice
from ..model.variant import check_choice
from ..optim import OptimConfig
from ..train import TrainConfig

CONTROLS = ("null", "positive", "twin")
SECTIONS: dict[str, type] = {
    "data": DataConfig, "model": ModelConfig, "optim": OptimConfig, "train": TrainConfig, "eval": EvalConfig,
}  # fmt: skip
LEAST_ROWS = 4  # of a batch, for the null control to have an order to change
TOP_LEVEL = ("name", "seeds", "baseline", "primary", "controls", "points", "arms", "plugins", *SECTIONS)
RESERVED = {"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(1, 10))}


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
    """The contrast that the experiment is about, declared before the runs; ``margin`` is relative to the baseline."""

    contrast: str = ""  # "xsa - standard"; empty: every arm against the baseline
    metric: str = "val_bpb"
    margin: float = 0.001

    def __post_init__(self) -> None:
        if self.metric != "val_bpb":
            raise ValueError(f"metric = {self.metric!r}: use 'val_bpb'")
        if not 0 < self.margin < 1:
            raise ValueError(f"margin = {self.margin}: a share of the baseline's value, above 0 and below 1")


@config
class Controls:
    """Which controls run beside the arms."""

    null: bool = True
    positive: Mapping[str, Any] = field(default_factory=dict[str, Any])  # dotted field -> value known to hurt
    twin: bool = True
    timing: bool = True


@dataclass(frozen=True)
class Arm:
    """One setting under test: a variant and the fields that it sets by dotted name, its declared factors."""

    name: str
    variant: VariantChoice
    sets: tuple[tuple[str, Any], ...] = ()

    @property
    def is_control(self) -> bool:
        return self.name in CONTROLS

    @property
    def factors(self) -> tuple[str, ...]:
        """Dotted names of the fields, or groups of fields, that this arm declares to be different."""
        return ("variant", *(name for name, _ in self.sets))


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
class Contrast:
    """``treatment`` minus ``baseline`` at one point. kind: "effect", "null" or "positive"."""

    point: str
    treatment: str
    baseline: str
    kind: str
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


def load_experiment(path: Path, sets: Sequence[str] = (), known_variants: bool = True) -> Experiment:
    """Reads and checks an experiment; every cell is resolved once, so that nothing fails later.

    Raises ValueError naming file, field, value and remedy. Plugins must have been imported before, or
    ``known_variants`` be False (status and report run no code of others).
    """
    tables = read_toml(path, sets)
    if unknown := [key for key in tables if key not in TOP_LEVEL]:
        raise ValueError("\n".join(f"{path}: {unknown_field(key, tables[key], TOP_LEVEL)}" for key in unknown))
    name = check_name(tables.get("name", path.stem), f"{path}: name")
    seeds = _seeds(tables.get("seeds", [0, 1, 2, 3]), path)
    arms = {key: _arm(key, value, path) for key, value in _table(tables, "arms", path).items()}
    if not arms:
        raise ValueError(f'{path}: no arms; write at least [arms.standard] with variant = "standard"')
    if strange := [arm for arm in arms if arm not in _table(read_toml(path), "arms", path)]:
        written = ", ".join(arm for arm in arms if arm not in strange) or "none"
        raise ValueError(f"--set arms.{strange[0]}: no such arm in {path}; arms: {written}")
    lower = [arm.lower() for arm in arms]  # folders of runs: names that differ in case alone are one on some systems
    for arm in arms:
        if arm.lower() in CONTROLS:
            raise ValueError(f"{path}: arms.{arm}: this name belongs to a control; choose another")
        if lower.count(arm.lower()) > 1:
            raise ValueError(f"{path}: arms.{arm}: another arm's name differs in case alone; choose another")
    baseline = tables.get("baseline", next(iter(arms)))
    if not isinstance(baseline, str) or baseline not in arms:
        raise ValueError(f"{path}: baseline = {baseline!r} is not an arm; arms: {', '.join(arms)}")
    controls = build(Controls, _table(tables, "controls", path), f"{path}: controls")
    arms |= _control_arms(controls, arms[baseline])
    primary = build(Primary, _table(tables, "primary", path), f"{path}: primary")
    given = tables.get("points", [{"name": "base"}])
    if not isinstance(given, list) or not given:
        raise ValueError(f"{path}: points = {given!r}: write each point as a table of its own, [[points]]")
    points = tuple(_point(value, path) for value in cast(list[Any], given))
    if len({point.name.lower() for point in points}) < len(points):
        raise ValueError(f"{path}: points: two have the same name")
    plugins = tables.get("plugins", [])
    if not isinstance(plugins, list) or not all(isinstance(plugin, str) for plugin in cast(list[Any], plugins)):
        raise ValueError(f"{path}: plugins = {plugins!r}: a list of Python files")
    experiment = Experiment(
        name, seeds, baseline, primary, controls,
        {section: _table(tables, section, path) for section in SECTIONS},
        points, arms, tuple(cast(list[str], plugins)), path, _with_sets(path.read_text(encoding="utf-8"), sets),
    )  # fmt: skip
    contrasts(experiment)
    for cell in expand(experiment):
        if cell.seed == seeds[0]:
            run = resolve(experiment, cell)
            _check_sizes(run, f"{path}: arms.{cell.arm}", controls.null)
            if known_variants:
                _check_variant(run, f"{path}: arms.{cell.arm}")
    return experiment


def _check_sizes(run: RunConfig, where: str, null: bool) -> None:
    """What involves two sections, so that nothing fails after hours of training."""
    try:
        rows = run.train.batch_rows(run.model.context)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if null and rows < LEAST_ROWS:
        raise ValueError(
            f"{where}: train.batch_tokens = {run.train.batch_tokens} is {rows} rows of context = {run.model.context}, "
            f"too few to permute for the null control: use {LEAST_ROWS * run.model.context} or more, "
            "or controls.null = false"
        )
    if run.eval.stride > run.model.context:
        raise ValueError(
            f"{where}: eval.stride = {run.eval.stride}: use 1 to context = {run.model.context}, or 0 for half of it"
        )


def _with_sets(text: str, sets: Sequence[str]) -> str:
    """The file's text, and what the command line set on top of it as comments."""
    return text + "".join(f"\n# with --set {assignment!r}" for assignment in sets)


def check_name(name: Any, where: str) -> str:
    """One rule for every name that becomes part of a path: nothing is written outside the experiment's folder."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", name):
        shown = repr(name if not isinstance(name, str) or len(name) < 40 else name[:40] + "…")
        raise ValueError(f"{where} = {shown}: 1 to 64 letters, digits, hyphens or underscores, the first no sign")
    if name.lower() in RESERVED:
        raise ValueError(f"{where} = {name!r}: reserved on Windows; choose another name")
    return name


def _seeds(seeds: Any, path: Path) -> tuple[int, ...]:
    given = cast(list[Any], seeds) if isinstance(seeds, list) else []
    if not given or not all(type(seed) is int and 0 <= seed < 2**32 for seed in given):
        raise ValueError(
            f"{path}: seeds = {seeds!r}: a list of whole numbers from 0 to {2**32 - 1}, such as [0, 1, 2, 3]"
        )
    if len(set(given)) < len(given):
        raise ValueError(f"{path}: seeds = {seeds!r}: a seed is there twice")
    return tuple(given)


def _table(tables: Mapping[str, Any], key: str, path: Path) -> dict[str, Any]:
    value = tables.get(key, {})
    if not isinstance(value, dict):
        raise ValueError(f"{path}: {key} = {value!r}: must be a table, [{key}]")
    return cast(dict[str, Any], value)


def _arm(name: str, table: Any, path: Path) -> Arm:
    where = f"{path}: arms.{name}"
    check_name(name, f"{path}: arm name")
    if not isinstance(table, dict):
        raise ValueError(f"{where} = {table!r}: must be a table, [arms.{name}]")
    sets: list[tuple[str, Any]] = []
    options: dict[str, Any] = {}
    values = cast(dict[str, Any], table)
    for key, value in values.items():
        if key in SECTIONS and isinstance(value, dict):
            sets += flat(cast(dict[str, Any], value), f"{key}.")
        elif "." in key or key in SECTIONS:
            sets.append((key, value))
        elif key not in ("variant", "layers"):
            options[key] = value
    variant, layers = values.get("variant", "standard"), values.get("layers", "all")
    if not isinstance(variant, str):
        raise ValueError(f"{where}.variant = {variant!r}: the name of a variant")
    if isinstance(layers, list):
        layers = ",".join(str(layer) for layer in cast(list[Any], layers))
    for field_name, value in sets:
        if field_name.startswith(("data.", "eval.")) or field_name == "model.vocab_size":
            raise ValueError(
                f"{where}: {field_name} = {value!r}: arms are scored on the same text in the same way; "
                f"set it in the section or in a [[points]] entry"
            )
    return Arm(name, VariantChoice(variant, str(layers), options), tuple(sets))


def _control_arms(controls: Controls, baseline: Arm) -> dict[str, Arm]:
    found: dict[str, Arm] = {}
    if controls.null:
        found["null"] = Arm("null", baseline.variant, (*baseline.sets, ("train.permute_rows", True)))
    if controls.positive:
        found["positive"] = Arm("positive", baseline.variant, (*baseline.sets, *flat(controls.positive)))
    if controls.twin:
        found["twin"] = Arm("twin", baseline.variant, baseline.sets)
    return found


def _point(table: Any, path: Path) -> Point:
    if not isinstance(table, dict) or "name" not in table:
        raise ValueError(f"{path}: points: {table!r}: each [[points]] needs a name, and the fields that it sets")
    values = cast(dict[str, Any], table)
    name = check_name(values["name"], f"{path}: points.name")
    model = {item.name for item in dataclasses.fields(ModelConfig)}
    sets: list[tuple[str, Any]] = []
    for key, value in values.items():
        if key == "name":
            continue
        if key in SECTIONS and isinstance(value, dict):
            sets += flat(cast(dict[str, Any], value), f"{key}.")
        else:
            sets.append((f"model.{key}" if key in model or "." not in key else key, value))
    return Point(name, tuple(sets))


def resolve(experiment: Experiment, cell: Cell) -> RunConfig:
    """The configuration of one run: the base, then the point's fields, then the arm's."""
    arm = experiment.arms[cell.arm]
    point = next(point for point in experiment.points if point.name == cell.point)
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
    return RunConfig(seed=cell.seed, variant=arm.variant, **built)


def _check_variant(run: RunConfig, where: str) -> None:
    from ..model.variant import build_variant

    try:
        for layer in check_choice(run.variant, run.model):
            build_variant(run.variant, run.model, layer)
    except Exception as error:  # a constructor may be a user's own
        words = str(error) if isinstance(error, (ValueError, TypeError)) else f"{type(error).__name__}: {error}"
        raise ValueError(f"{where}: {words}") from None


def expand(experiment: Experiment) -> list[Cell]:
    """All cells, seed by seed, so that pairs are complete as early as possible."""
    cells = [
        Cell(point.name, arm, seed)
        for seed in experiment.seeds
        for point in experiment.points
        for arm in experiment.arms
        if arm != "twin"
    ]
    if "twin" in experiment.arms:
        cells.append(Cell(experiment.points[0].name, "twin", experiment.seeds[0]))
    return cells


def contrasts(experiment: Experiment) -> list[Contrast]:
    """The declared primary contrast, every other arm against the baseline, and the controls; for each point."""
    found: list[Contrast] = []
    declared: tuple[str, str] | None = None
    if experiment.primary.contrast:
        sides = [side.strip() for side in experiment.primary.contrast.split(" - ")]
        if len(sides) != 2 or any(side not in experiment.arms or side in CONTROLS for side in sides):
            arms = ", ".join(arm for arm in experiment.arms if arm not in CONTROLS)
            raise ValueError(
                f"{experiment.path}: primary.contrast = {experiment.primary.contrast!r}: "
                f"write two arms as 'xsa - standard'; arms: {arms}"
            )
        declared = (sides[0], sides[1])
        if sides[0] == sides[1]:
            raise ValueError(
                f"{experiment.path}: primary.contrast = {experiment.primary.contrast!r}: two different arms"
            )
    for point in experiment.points:
        pairs = [(arm, experiment.baseline) for arm in experiment.arms if arm not in CONTROLS]
        pairs = [pair for pair in pairs if pair[0] != pair[1]]
        if declared:
            pairs = [declared, *(pair for pair in pairs if pair != declared)]
        found += [Contrast(point.name, arm, base, "effect", (arm, base) == declared) for arm, base in pairs]
        for control in ("null", "positive"):
            if control in experiment.arms:
                found.append(Contrast(point.name, control, experiment.baseline, control))
    return found


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


def config_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted name -> (value in a, value in b), for nested tables of plain values."""
    left, right = dict(flat(a)), dict(flat(b))
    return {
        name: (left.get(name), right.get(name))
        for name in sorted(left.keys() | right.keys())
        if left.get(name) != right.get(name)
    }


def as_tables(run: RunConfig) -> dict[str, Any]:
    """The configuration as plain nested tables, as stored with the run."""
    return dump(run)
