"""From TOML to an experiment: reads, checks every field, resolves every kind of cell once.

[smoke] holds what ``--smoke`` puts in the place of the file's values: dotted field -> value. The name then ends in
"-smoke", so that a trial of all stages has a folder of its own.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from ..config import apply_sets, build, flat, read_toml, unknown_field
from ..model import ModelConfig, VariantChoice
from ..model.variant import build_variant, check_choice
from .command import (
    Command,
    check_command,
    command_arm,
    command_controls,
    command_crossing,
    command_point,
    read_command,
)
from .design import (
    CONTROLS,
    SECTIONS,
    Arm,
    Controls,
    EqualTime,
    Experiment,
    Metric,
    Point,
    Primary,
    RunConfig,
    check_declared,
    expand,
    resolve,
    steps_of,
    tested_arms,
)
from .downstream import TABLES, read_downstream
from .factors import Crossing, cross
from .mechanism import DiagnoseConfig

SMOKE = "smoke"
LEAST_ROWS = 4  # of a batch, for the null control to have an order to change
TOP_LEVEL = (
    "name", "engine", "seeds", "baseline", "primary", "controls", "equal_time", "points", "arms", "factors", "plugins",
    "diagnose", SMOKE, *SECTIONS, *TABLES,
)  # fmt: skip
RESERVED = {"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(1, 10))}


def read_tables(path: Path, sets: Sequence[str] = (), smoke: bool = False) -> dict[str, Any]:
    """The file's tables without [smoke]: with its values in their places where ``smoke``, then with ``--set`` on top.

    Raises ValueError naming the file where it has no [smoke], or a value of it has no place.
    """
    tables = read_toml(path)
    values = _table(tables, SMOKE, path)
    tables.pop(SMOKE, None)
    if smoke and not values:
        raise ValueError(
            f"{path}: --smoke: the file has no [smoke]; add the table with the fields that make a trial of it small, "
            'such as "data.source" = "stdlib", "train.tokens" = 2048, seeds = [0]'
        )
    if smoke:
        for name, value in _leaves(values):
            _put(tables, name, value, f"{path}: smoke")
        tables["name"] = f"{tables.get('name', path.stem)}-{SMOKE}"
    apply_sets(tables, sets)
    return tables


def _leaves(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """As ``flat``, but an empty table is a value: it empties the file's."""
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        deeper = isinstance(value, dict) and value
        found += _leaves(cast(dict[str, Any], value), f"{prefix}{key}.") if deeper else [(f"{prefix}{key}", value)]
    return found


def _put(tables: dict[str, Any], name: str, value: Any, where: str) -> None:
    """Puts ``value`` in the place of the dotted ``name``: where a key is written with dots, and in [[points]] by name.

    "points.d12.train.tokens" is the field train.tokens of the point d12.
    """
    rest, place = name, tables
    while rest not in place and "." in rest:
        part, _, rest = rest.partition(".")
        below: Any = place.setdefault(part, {})
        if isinstance(below, list):
            point, _, rest = rest.partition(".")
            found = [item for item in cast(list[Any], below) if isinstance(item, dict) and item.get("name") == point]
            if not found or not rest:
                raise ValueError(f"{where}.{name}: no [[{part}]] of this name, or no field; write {part}.NAME.field")
            below = found[0]
        if not isinstance(below, dict):
            raise ValueError(f"{where}.{name}: {part!r} is a value, not a section")
        place = cast(dict[str, Any], below)
    place[rest] = value


def load_experiment(
    path: Path, sets: Sequence[str] = (), known_variants: bool = True, smoke: bool = False
) -> Experiment:
    """Reads and checks an experiment; every cell is resolved once, so that nothing fails later.

    Raises ValueError naming file, field, value and remedy. Plugins must have been imported before, or
    ``known_variants`` be False (status and report run no code of others). ``smoke``: with the values of [smoke].
    """
    tables = read_tables(path, sets, smoke)
    command = read_command(tables, path)
    if unknown := [key for key in tables if not command and key not in TOP_LEVEL]:
        raise ValueError("\n".join(f"{path}: {unknown_field(key, tables[key], TOP_LEVEL)}" for key in unknown))
    name = check_name(tables.get("name", path.stem), f"{path}: name")
    seeds = _seeds(tables.get("seeds", [0, 1, 2, 3]), path)
    given = tables.get("points", [{"name": "base"}])
    if not isinstance(given, list) or not given:
        raise ValueError(f"{path}: points = {given!r}: write each point as a table of its own, [[points]]")
    points = tuple(_point(value, path, command) for value in cast(list[Any], given))
    if len({point.name.lower() for point in points}) < len(points):
        raise ValueError(f"{path}: points: two have the same name")
    written = _table(tables, "arms", path)
    if strange := [arm for arm in written if arm not in _table(read_tables(path, smoke=smoke), "arms", path)]:
        known = ", ".join(arm for arm in written if arm not in strange) or "none"
        raise ValueError(f"--set arms.{strange[0]}: no such arm in {path}; arms: {known}")
    crossing = _crossing(tables, points, path, command)
    if twice := [arm for arm in crossing.arms if arm in written]:
        raise ValueError(f"{path}: arms.{twice[0]}: [factors] makes an arm of this name; rename one of them")
    arms = {key: _arm(key, value, path, command) for key, value in {**written, **crossing.arms}.items()}
    if not arms:
        raise ValueError(f'{path}: no arms; write at least [arms.standard] with variant = "standard"')
    lower = [arm.lower() for arm in arms]  # folders of runs: names that differ in case alone are one on some systems
    for arm in arms:
        if arm.lower() in CONTROLS:
            raise ValueError(f"{path}: arms.{arm}: this name belongs to a control; choose another")
        if lower.count(arm.lower()) > 1:
            raise ValueError(f"{path}: arms.{arm}: another arm's name differs in case alone; choose another")
    baseline = tables.get("baseline", next(iter(arms)))
    if not isinstance(baseline, str) or baseline not in arms:
        raise ValueError(f"{path}: baseline = {baseline!r} is not an arm; arms: {', '.join(arms)}")
    if command:
        controls, further = command_controls(_table(tables, "controls", path), arms[baseline], f"{path}: controls")
    else:
        controls = build(Controls, _table(tables, "controls", path), f"{path}: controls")
        if unknown := [arm for arm in controls.also if arm not in arms or arm == baseline]:
            others = ", ".join(arm for arm in arms if arm != baseline) or "none"
            raise ValueError(
                f"{path}: controls.also = {list(controls.also)}: {unknown[0]!r} is no other arm than the baseline; "
                f"arms: {others}"
            )
        further = _control_arms(controls, arms[baseline])
        for arm in controls.also:
            further |= _control_arms(dataclasses.replace(controls, twin=False), arms[arm], arm)
    arms |= further
    primary = _primary(tables, path, command)
    plugins = tables.get("plugins", [])
    if not isinstance(plugins, list) or not all(isinstance(plugin, str) for plugin in cast(list[Any], plugins)):
        raise ValueError(f"{path}: plugins = {plugins!r}: a list of Python files")
    experiment = Experiment(
        name, seeds, baseline, primary, controls,
        {section: _table(tables, section, path) for section in SECTIONS},
        points, arms, tuple(cast(list[str], plugins)), path, _with_sets(path.read_text(encoding="utf-8"), sets, smoke),
        crossing.factors, crossing.levels, build(EqualTime, _table(tables, "equal_time", path), f"{path}: equal_time"),
        command=command, metric=command.metric_of(primary.metric) if command else Metric(),
        downstream=None if command else read_downstream(tables, path),
        diagnose=None if command else _diagnose(tables, path),
    )  # fmt: skip
    if experiment.equal_time.rerun and not controls.timing:
        raise ValueError(f"{path}: equal_time.rerun = true needs the step times: set controls.timing = true")
    if command:
        check_command(experiment)
        check_declared(experiment)
        return experiment
    check_declared(experiment)
    _check_equal_time(experiment)
    for cell in expand(experiment):
        if cell.seed == seeds[0]:
            run = resolve(experiment, cell)
            _check_sizes(run, f"{path}: arms.{cell.arm}", controls.null)
            if known_variants:
                _check_variant(run, f"{path}: arms.{cell.arm}")
    return experiment


def _primary(tables: Mapping[str, Any], path: Path, command: Command | None) -> Primary:
    """``primary``. Our own engine has one metric, which is never 0; of a command the metric must be named."""
    table = _table(tables, "primary", path)
    primary = build(Primary, table, f"{path}: primary")
    if command and "metric" not in table:
        raise ValueError(
            f'{path}: primary.metric is missing: name the metric that decides, primary = {{ metric = "…" }}'
        )
    if not command and primary.metric != "val_bpb":
        raise ValueError(f"{path}: primary: metric = {primary.metric!r}: use 'val_bpb'")
    if not command and primary.absolute:
        raise ValueError(f'{path}: primary: absolute = true: for engine = "command" alone; give a share of the bpb')
    return primary


def _diagnose(tables: Mapping[str, Any], path: Path) -> DiagnoseConfig | None:
    """``[diagnose]``: what is measured inside the runs; None where it is not there."""
    if "diagnose" not in tables:
        return None
    return build(DiagnoseConfig, _table(tables, "diagnose", path), f"{path}: diagnose")


def _crossing(tables: Mapping[str, Any], points: Sequence[Point], path: Path, command: Command | None) -> Crossing:
    """The arms of [factors]. The depth that a layer study needs is the model's, or that of all points."""
    if command:
        return command_crossing(_table(tables, "factors", path), f"{path}: factors")
    model = build(ModelConfig, _table(tables, "model", path), f"{path}: model")
    depths = {dict(point.sets).get("model.depth", model.depth) for point in points}
    depth = depths.pop() if len(depths) == 1 else None
    return cross(_table(tables, "factors", path), tuple(SECTIONS), depth, f"{path}: factors")


def _check_equal_time(experiment: Experiment) -> None:
    """Equal time compares arms of equal steps, and needs fewer of them to compare with."""
    wanted = experiment.equal_time
    if not (wanted.rerun or wanted.slope):
        return
    for point in experiment.points:
        steps = {arm: steps_of(experiment, point.name, arm) for arm in tested_arms(experiment)}
        base = steps[experiment.baseline]
        if other := [arm for arm, count in steps.items() if count != base]:
            raise ValueError(
                f"{experiment.path}: equal_time: arms.{other[0]} trains {steps[other[0]]} steps and the baseline "
                f"{base}; equal time is reckoned from equal steps: leave out equal_time, or that arm"
            )
        if wanted.slope and round(wanted.share * base) >= base:
            raise ValueError(
                f"{experiment.path}: equal_time.share = {wanted.share:g} of {base} steps is no step fewer: "
                "use a smaller share, or train longer"
            )


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


def _with_sets(text: str, sets: Sequence[str], smoke: bool) -> str:
    """The file's text, and what the command line set on top of it as comments."""
    return text + ("\n# with --smoke" if smoke else "") + "".join(f"\n# with --set {one!r}" for one in sets)


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


def _arm(name: str, table: Any, path: Path, command: Command | None) -> Arm:
    where = f"{path}: arms.{name}"
    check_name(name, f"{path}: arm name")
    if not isinstance(table, dict):
        raise ValueError(f"{where} = {table!r}: must be a table, [arms.{name}]")
    if command:
        return command_arm(name, cast(dict[str, Any], table), where)
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


def _control_arms(controls: Controls, baseline: Arm, of: str = "") -> dict[str, Arm]:
    found: dict[str, Arm] = {}
    at = f"@{of}" if of else ""
    for name, sets in (("null", [("train.permute_rows", True)]), ("positive", flat(controls.positive))):
        if getattr(controls, name):
            found[name + at] = Arm(name + at, baseline.variant, (*baseline.sets, *sets), of=of)
    if controls.twin:
        found["twin"] = Arm("twin", baseline.variant, baseline.sets)
    return found


def _point(table: Any, path: Path, command: Command | None) -> Point:
    if not isinstance(table, dict) or "name" not in table:
        raise ValueError(f"{path}: points: {table!r}: each [[points]] needs a name, and the fields that it sets")
    values = cast(dict[str, Any], table)
    name = check_name(values["name"], f"{path}: points.name")
    if command:
        others = {key: value for key, value in values.items() if key != "name"}
        return command_point(name, others, f"{path}: points: {name}")
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


def _check_variant(run: RunConfig, where: str) -> None:
    try:
        for layer in check_choice(run.variant, run.model):
            build_variant(run.variant, run.model, layer)
    except Exception as error:  # a constructor may be a user's own
        words = str(error) if isinstance(error, (ValueError, TypeError)) else f"{type(error).__name__}: {error}"
        raise ValueError(f"{where}: {words}") from None
