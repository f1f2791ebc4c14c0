"""A USER'S OWN TRAINER: ``engine = "command"``. What the TOML says of it, and one run's command line.

    [command]
    run = ["{python}", "train.py", "--seed", "{seed}", "--out", "{out}", "{options}"]
    metrics = { jsonl = "metrics.jsonl" }      # or { pattern = 'step (?P<step>\\d+).*loss (?P<loss>\\S+)' }

    [arms.plain]
    options = ["--momentum", "0"]

Texts are filled where they hold ``{name}``: seed, arm, point, run (its name), out (the folder for its files), here
(the TOML's folder), python (this interpreter), and every value that [command.values], an arm or a point sets.
``{{name}}`` stands for ``{name}`` itself; other braces are left as they are. ``{options}``, a word of its own, becomes
the point's options and then the arm's.

An arm declares what it sets: its name, its options, each value and each variable of the environment. Everything else
of the command is the same for all runs, and is compared as our own engine's configuration is.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Literal, cast

from ..config import build, config, dump, unknown_field
from ..model import VariantChoice
from .design import Arm, Cell, Controls, Experiment, Metric, Point, expand, point_of
from .factors import Crossing, cross

TOP_LEVEL = (
    "name", "engine", "seeds", "baseline", "primary", "command", "arms", "points", "factors", "controls",
)  # fmt: skip
GIVEN = ("seed", "arm", "point", "run", "out", "here", "python")  # placeholders that are filled for every run
OPTIONS = "{options}"
PLACEHOLDER = re.compile(r"\{\{([A-Za-z_]\w*)\}\}|\{([A-Za-z_]\w*)\}")
STEP = "step"
Plain = str | int | float | bool
UNIT = {"bits": Metric().unit, "": 1.0}


def _check_inside(name: str, file: str) -> None:
    """ValueError for a file that is not in {out}: two runs would read one file, or what an older run left."""
    for path in (PurePosixPath(file), PureWindowsPath(file)):
        if file and (path.anchor or ".." in path.parts or not path.name):
            raise ValueError(f"{name} = {file!r}: a file in {{out}}, which is each run's own; give its name there")


@config
class Source:
    """Where a run's metrics are read: JSON lines in {out}, or patterns with named groups over the output's lines."""

    jsonl: str = ""
    pattern: tuple[str, ...] = ()
    step: str = STEP  # the name of the step in a row, or of its group

    def __post_init__(self) -> None:
        if bool(self.jsonl) == bool(self.pattern):
            raise ValueError("give either jsonl, a file in {out}, or pattern, with named groups")
        _check_inside("jsonl", self.jsonl)
        for text in self.pattern:
            try:
                groups = re.compile(text).groupindex
            except re.error as error:
                raise ValueError(f"pattern = {text!r}: no regular expression ({error})") from None
            if not set(groups) - {self.step}:
                raise ValueError(f"pattern = {text!r}: names no metric; write a group such as (?P<loss>\\S+)")


@config
class Command:
    """``[command]``: what is run for each arm and seed, and how its result is read."""

    run: tuple[str, ...]
    folder: str = "."  # the working folder, beside the TOML
    env: Mapping[str, Plain] | None = None  # added to the environment
    values: Mapping[str, Plain] | None = None  # placeholders, for arms and points that set none
    metrics: Source | None = None
    scores: str = ""  # a file in {out} with one JSON line an item: item, value, weight
    unit: Literal["", "bits"] = ""  # "bits": scores are nats over bytes, the metric bits per byte
    lower_is_better: bool = True
    minutes: float = 0  # a run that takes longer is ended; 0: no limit

    def __post_init__(self) -> None:
        if not self.run:
            raise ValueError("run = []: write the program and its arguments as a list of words")
        if self.metrics is None and not self.scores:
            raise ValueError("nothing says where the result is: set metrics, scores or both")
        _check_inside("scores", self.scores)
        if self.unit and not self.scores:
            raise ValueError(f"unit = {self.unit!r}: is that of scores; leave it out, or set scores")
        if not 0 <= self.minutes < float("inf"):
            raise ValueError(f"minutes = {self.minutes}: a time limit, or 0 for none")
        for word in self.run:
            if OPTIONS in word and word != OPTIONS:
                raise ValueError(f"run: {word!r}: {OPTIONS} becomes several words; write it as a word of its own")

    def metric_of(self, name: str) -> Metric:
        """The metric ``primary.metric`` in tables and sentences."""
        return Metric(name, UNIT[self.unit], self.lower_is_better, "items" if self.scores else "values")

    def resolve(self, experiment: Experiment, cell: Cell) -> CommandRun:
        """One run: the command's settings, then the point's, then the arm's."""
        values: dict[str, Plain] = dict(self.values or {})
        env: dict[str, str] = {name: str(_text(value)) for name, value in (self.env or {}).items()}
        options: tuple[str, ...] = ()
        named: dict[str, str] = {}
        for name, value in (*point_of(experiment, cell).sets, *experiment.arms[cell.arm].sets):
            if name == "options":
                options += tuple(value)
            elif name in ("arm", "point"):
                named[name] = value
            elif name.startswith("env."):
                env[name.removeprefix("env.")] = _text(value)
            else:
                values[name] = value
        return CommandRun(
            cell.seed, named["arm"], named["point"], self.run, options, values, env, self.folder, self.metrics,
            self.scores, self.unit, experiment.primary.metric,
        )  # fmt: skip


@dataclass(frozen=True)
class CommandRun:
    """Everything that shapes one run of a command, before placeholders are filled."""

    seed: int
    arm: str  # a control's is the baseline's: it is the baseline, run with a change
    point: str
    run: tuple[str, ...]
    options: tuple[str, ...]
    values: Mapping[str, Plain]
    env: Mapping[str, str]
    folder: str
    metrics: Source | None
    scores: str
    unit: str
    metric: str

    def tables(self) -> dict[str, Any]:
        """As stored with the run, and compared with its partner's. Values stand at the top, where factors name them."""
        source = dump(self.metrics) if self.metrics else {}
        command = {
            "run": list(self.run), "folder": self.folder, "metrics": source, "scores": self.scores, "unit": self.unit,
            "metric": self.metric,
        }  # fmt: skip
        return {
            "seed": self.seed, "arm": self.arm, "point": self.point, "options": list(self.options),
            "env": dict(self.env), "command": command, **self.values,
        }  # fmt: skip

    def filled(self, name: str, out: Path, here: Path) -> tuple[list[str], dict[str, str]]:
        """The command line and the variables. name: the run's; out: the folder for its files; here: the TOML's.

        Raises ValueError for a placeholder that nothing sets.
        """
        known = {
            **{key: _text(value) for key, value in self.values.items()},
            "seed": str(self.seed), "arm": self.arm, "point": self.point, "run": name, "out": str(out),
            "here": str(here), "python": sys.executable,
        }  # fmt: skip
        words = [word for given in self.run for word in (self.options if given == OPTIONS else (given,))]
        return [_fill(word, known) for word in words], {key: _fill(value, known) for key, value in self.env.items()}

    def placeholders(self) -> set[str]:
        """The names in braces, of all texts."""
        return {name for text in (*self.run, *self.options, *self.env.values()) for name in _names(text)}


def _names(text: str) -> Iterator[str]:
    return (found[2] for found in PLACEHOLDER.finditer(text) if found[2])


def _fill(text: str, known: Mapping[str, str]) -> str:
    def value(found: re.Match[str]) -> str:
        if found[1]:
            return f"{{{found[1]}}}"
        if found[2] not in known:
            raise ValueError(
                f"{{{found[2]}}} is no placeholder; known: {', '.join(known)}; write {{{{{found[2]}}}}} for the text"
            )
        return known[found[2]]

    return PLACEHOLDER.sub(value, text)


def _text(value: Plain) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# Reading


def read_command(tables: Mapping[str, Any], path: Path) -> Command | None:
    """``[command]`` of an experiment whose engine it is; None for our own engine. ValueError naming the field."""
    engine = tables.get("engine", "xsalab")
    if engine not in ("xsalab", "command"):
        raise ValueError(f"{path}: engine = {engine!r}: use 'xsalab' or 'command'")
    if engine == "xsalab":
        if "command" in tables:
            raise ValueError(f'{path}: [command] is there, and engine is not "command": add engine = "command"')
        return None
    if unknown := [key for key in tables if key not in TOP_LEVEL]:
        raise ValueError(
            "\n".join(
                f'{path}: {unknown_field(key, tables[key], TOP_LEVEL)} (of engine = "command")' for key in unknown
            )
        )
    table = tables.get("command")
    if not isinstance(table, dict):
        raise ValueError(f'{path}: engine = "command" needs a table [command] with run and metrics or scores')
    values = dict(cast(dict[str, Any], table))
    if isinstance(values.get("run"), str):
        words = ", ".join(f'"{word}"' for word in values["run"].split())
        raise ValueError(
            f"{path}: command.run = {values['run']!r}: no shell reads it; write a list of words, [{words}], "
            'or ["sh", "-c", "..."] where a shell is wanted'
        )
    source = values.get("metrics")
    if isinstance(source, dict) and isinstance(cast(dict[str, Any], source).get("pattern"), str):
        values["metrics"] = {**source, "pattern": [source["pattern"]]}
    return build(Command, values, f"{path}: command")


def settings(values: Mapping[str, Any], where: str) -> tuple[tuple[str, Any], ...]:
    """What an arm, a point, a level or a control sets: options, ``env.NAME``, and values for placeholders.

    Raises ValueError naming what is neither.
    """
    found: list[tuple[str, Any]] = []
    options: tuple[str, ...] = ()
    for key, value in values.items():
        if key == "options" or key.startswith("options."):  # of crossed factors each has its own
            if not isinstance(value, list) or not all(isinstance(item, str) for item in cast(list[Any], value)):
                raise ValueError(f'{where}: options = {value!r}: a list of words, ["--rate", "0.1"]')
            options += tuple(cast(list[str], value))
        elif key == "env" and isinstance(value, dict):
            found += [(f"env.{name}", inner) for name, inner in cast(dict[str, Any], value).items()]
        elif key in GIVEN or key in ("env", "command"):
            raise ValueError(f"{where}: {key} = {value!r}: this name is taken; choose another")
        elif not key.startswith("env.") and not re.fullmatch(r"[A-Za-z_]\w*", key):
            raise ValueError(f"{where}: {key} = {value!r}: a value's name has letters, digits and _ only")
        else:
            found.append((key, value))
    for name, value in found:
        if not isinstance(value, (str, int, float)):
            raise ValueError(f"{where}: {name} = {value!r}: a text or a number, or a list of words named options")
    return (*((("options", options),) if options else ()), *found)


def command_arm(name: str, values: Mapping[str, Any], where: str) -> Arm:
    """An arm: it declares its name, and what it sets."""
    sets = (("arm", name), *settings(values, where))
    return Arm(name, VariantChoice(), sets, words=_in_words(name, sets))


def command_point(name: str, values: Mapping[str, Any], where: str) -> Point:
    """A point, likewise."""
    return Point(name, (("point", name), *settings(values, where)))


def _in_words(name: str, sets: Sequence[tuple[str, Any]]) -> str:
    """ "fast (--rate 0.1, THREADS = 2)" """
    parts = [
        " ".join(value) if key == "options" else f"{key.removeprefix('env.')} = {_text(value)}"
        for key, value in sets
        if key != "arm"
    ]
    return f"{name} ({', '.join(parts)})" if parts else name


def command_crossing(table: Mapping[str, Any], where: str) -> Crossing:
    """The arms of [factors]. Where levels of several factors have options, all are taken, in the factors' order."""
    given: dict[str, Any] = {}
    for name, levels in table.items():
        if isinstance(levels, str):
            raise ValueError(f"{where}.{name} = {levels!r}: a list of values, or a table of levels")
        if isinstance(levels, dict) and name != "env":
            levels = {
                level: {f"options.{name}" if key == "options" else key: value for key, value in inner.items()}
                if isinstance(inner, dict)
                else inner
                for level, inner in cast(dict[str, Any], levels).items()
            }
        given[name] = levels
    return cross(given, ("env",), None, where)


def command_controls(table: Mapping[str, Any], baseline: Arm, where: str) -> tuple[Controls, dict[str, Arm]]:
    """The controls: what null and positive write is added to what the baseline sets."""
    known = ("null", "positive", "twin")
    for key, value in table.items():
        if key == "timing":
            raise ValueError(f"{where}: timing = {value!r}: step times of a command are not measured; leave it out")
        if key not in known:
            raise ValueError(f"{where}: {unknown_field(key, value, known)}")
    twin = table.get("twin", True)
    if not isinstance(twin, bool):
        raise ValueError(f"{where}: twin = {twin!r}: true or false")
    arms: dict[str, Arm] = {}
    for name in ("null", "positive"):
        given = table.get(name, False)
        if isinstance(given, dict) and given:
            arms[name] = _added(name, baseline, settings(cast(dict[str, Any], given), f"{where}.{name}"))
        elif given is not False and given != {}:
            raise ValueError(
                f"{where}: {name} = {given!r}: only your trainer can be asked for it; write what an arm writes, "
                f'{name} = {{ options = ["--shuffle-seed", "1"] }}, or false'
            )
    if twin:
        arms["twin"] = Arm("twin", baseline.variant, baseline.sets, words="twin")
    positive = cast(dict[str, Any], table.get("positive") or {})
    return Controls("null" in arms, positive, twin, timing=False), arms


def _added(name: str, baseline: Arm, change: Sequence[tuple[str, Any]]) -> Arm:
    """The baseline with a change: its options come after the baseline's, its values instead of them."""
    sets = dict(baseline.sets)
    for key, value in change:
        sets[key] = (*sets.get(key, ()), *value) if key == "options" else value
    return Arm(name, baseline.variant, tuple(sets.items()), words=_in_words(name, change))


def check_command(experiment: Experiment) -> None:
    """ValueError for what would fail, or have no effect, after hours: placeholders, values, seeds, options."""
    command, path = experiment.command, experiment.path
    assert command is not None, "an experiment of this engine"
    used: set[str] = set()
    for cell in expand(experiment):
        run = command.resolve(experiment, cell)
        if taken := [name for name in run.values if name in (*GIVEN, "options", "env", "command")]:
            raise ValueError(f"{path}: command.values.{taken[0]}: this name is taken; choose another")
        used |= run.placeholders()
        try:
            run.filled(cell.name, path, path)
        except ValueError as error:
            raise ValueError(f"{path}: arms.{cell.arm}: command: {error}") from None
        if run.options and OPTIONS not in command.run:
            raise ValueError(
                f'{path}: arms.{cell.arm}: options = {list(run.options)}: command.run has no word "{OPTIONS}" for them'
            )
        own = {name for name, _ in (*point_of(experiment, cell).sets, *experiment.arms[cell.arm].sets)}
        for name in (name for name in run.values if name in own and name not in run.placeholders()):
            raise ValueError(
                f"{path}: arms.{cell.arm}: {name} = {run.values[name]!r} has no effect: "
                f"no {{{name}}} in command.run, in env or in options"
            )
    if idle := [name for name in command.values or () if name not in used]:
        raise ValueError(f"{path}: command.values.{idle[0]} has no effect: no text holds {{{idle[0]}}}")
    if "seed" not in used and len(experiment.seeds) > 1:
        raise ValueError(
            f"{path}: command: nothing holds {{seed}}, so every run would be the same; pass it on, "
            'run = [..., "--seed", "{seed}"] or env = { SEED = "{seed}" }'
        )


def unchecked(experiment: Experiment) -> list[str]:
    """What no program can vouch for when another one trains; empty for our own engine."""
    command = experiment.command
    if command is None:
        return []
    same_items = (
        "what the scores mean: that all runs scored the same items with the same weights was checked, and not how"
        if command.scores
        else "evaluation on the same items: one number a run is all that is known, so the interval counts the luck of "
        "the seeds and not that of the choice of items"
    )
    return [
        "the first weights: whether two runs of one seed begin alike, and whether the seed is used at all",
        "the data: which rows, in which order, and whether training saw what the evaluation asks",
        same_items,
        "software and precision inside the command: its libraries, its kernels, its threads",
        "state between runs: caches, files and variables that the command reads and [command] does not name",
        "time: step times are not measured, and no claim is made about cost",
    ]
