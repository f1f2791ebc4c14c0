"""Factors crossed freely: ``[factors]`` of an experiment becomes one arm for each combination of levels.

    [factors]
    attention = { standard = { variant = "standard" }, xsa = { variant = "xsa", alpha = 1.0 } }   # levels by name
    optim.kind = ["hybrid", "adamw"]                                # or the values of one field or option
    layers = "leave-one-out"                                        # or a layer study by name

A level sets what an arm may set. The first level of a factor is its reference. A factor of one level is in every arm
and in no name.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

LAYER_STUDIES = ("leave-one-out", "first-k", "last-k", "value-embeddings")


@dataclass(frozen=True)
class Factor:
    """``levels`` by name, the first is the reference. ``values``: the numbers that they stand for, where all are."""

    name: str
    levels: tuple[str, ...]
    values: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Crossing:
    """``arms``: name -> what it sets, as an arm's table writes it. ``levels``: name -> its level of each factor."""

    factors: tuple[Factor, ...] = ()
    arms: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    levels: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])


def cross(table: Mapping[str, Any], sections: Sequence[str], depth: int | None, where: str) -> Crossing:
    """Every combination of the levels in ``table``.

    sections: names of the configuration's sections, whose fields are named by dots. depth: of the model, for a layer
    study; None where the points differ in it. Raises ValueError naming the factor.
    """
    written: list[tuple[str, Any]] = []
    for key, value in table.items():
        if key in sections and isinstance(value, dict):
            written += [(f"{key}.{item}", values) for item, values in cast(dict[str, Any], value).items()]
        else:
            written.append((key, value))
    factors: list[Factor] = []
    settings: list[dict[str, dict[str, Any]]] = []
    for name, value in written:
        levels, numbers = _levels(name, value, depth, f"{where}.{name}")
        factors.append(Factor(name, tuple(levels), numbers))
        settings.append(levels)
    several = [len(factor.levels) > 1 for factor in factors]
    arms: dict[str, dict[str, Any]] = {}
    chosen: dict[str, tuple[str, ...]] = {}
    for combination in itertools.product(*(factor.levels for factor in factors)) if factors else ():
        shown = [level for level, many in zip(combination, several, strict=True) if many] or list(combination)
        arm: dict[str, Any] = {}
        for factor, level, values in zip(factors, combination, settings, strict=True):
            for key, value in _flat(values[level], sections):
                if key in arm:
                    raise ValueError(f"{where}.{factor.name}: level {level} sets {key}, as another factor does")
                arm[key] = value
        name = "-".join(shown)
        if name in arms:
            raise ValueError(f"{where}: two combinations have the name {name!r}; rename a level")
        arms[name], chosen[name] = arm, combination
    return Crossing(tuple(factors), arms, chosen)


def _levels(
    name: str, value: Any, depth: int | None, where: str
) -> tuple[dict[str, dict[str, Any]], tuple[float, ...] | None]:
    """Level name -> what it sets, and the numbers that the levels stand for."""
    if name == "layers" and isinstance(value, str) and value in LAYER_STUDIES:
        return {level: {"layers": layers} for level, layers in _layer_study(value, depth, where).items()}, None
    if isinstance(value, dict) and value and all(isinstance(v, dict) for v in cast(dict[str, Any], value).values()):
        levels = cast(dict[str, dict[str, Any]], value)
        return {level: dict(sets) for level, sets in levels.items()}, None
    if isinstance(value, list) and value:
        values = cast(list[Any], value)
        for before, item in itertools.combinations(values, 2):
            if item == before and isinstance(item, bool) == isinstance(before, bool):  # 0.0 and -0.0 too; True is no 1
                same = "" if repr(item) == repr(before) else f": {before!r} and {item!r} are one number"
                raise ValueError(f"{where} = {value!r}: a level is there twice{same}")
        names = _level_names(name, values)
        for (before, one), (item, other) in itertools.combinations(zip(values, names, strict=True), 2):
            if one == other:
                raise ValueError(
                    f"{where} = {value!r}: {before!r} and {item!r} would have one name, {one}; write a table of "
                    f"levels, which names them: {{ a = {{ {name} = ... }}, b = {{ {name} = ... }} }}"
                )
        found = {level: {name: item} for level, item in zip(names, values, strict=True)}
        numbers = all(_is_number(item) for item in values)
        return found, tuple(float(item) for item in values) if numbers else None
    studies = f", or one of {', '.join(LAYER_STUDIES)}" if name == "layers" else ""
    raise ValueError(
        f"{where} = {value!r}: a factor is a list of values, [0.0, 0.5, 1.0], or a table of levels, "
        f'{{ a = {{ variant = "standard" }}, b = {{ variant = "xsa" }} }}{studies}'
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _level_names(factor: str, values: Sequence[Any]) -> list[str]:
    """Of each level. Numbers that six digits do not tell apart have all of theirs."""
    short = [_level_name(factor, item) for item in values]
    return [
        _level_name(factor, item, whole=True) if _is_number(item) and short.count(name) > 1 else name
        for item, name in zip(values, short, strict=True)
    ]


def _level_name(factor: str, value: Any, whole: bool = False) -> str:
    """ "alpha-0_25", "lr_scale-2", "adamw", "first-2": as it may stand in a folder's name."""
    if isinstance(value, str):
        return re.sub(r"[^A-Za-z0-9_]+", "-", value).strip("-") or "none"
    if isinstance(value, bool):
        value = "on" if value else "off"
    elif isinstance(value, (int, float)):
        text = str(value) if whole else f"{value:g}"  # str: the fewest digits that are this number and no other
        value = text.replace(".", "_").replace("+", "")
    else:
        value = re.sub(r"[^A-Za-z0-9_]+", "-", str(value)).strip("-")
    return f"{factor.rpartition('.')[2]}-{value}"


def _layer_study(study: str, depth: int | None, where: str) -> dict[str, str]:
    """Level name -> layers, as a variant's ``layers`` writes them."""
    if depth is None:
        raise ValueError(f"{where} = {study!r}: the points differ in depth; list the layers instead")
    if study == "value-embeddings":
        return {"all": "all", "with-ve": "with-ve", "without-ve": "without-ve"}
    if study == "leave-one-out":
        kept = {f"but-{i}": ",".join(str(j) for j in range(depth) if j != i) or "none" for i in range(depth)}
        return {"all": "all", **kept}
    side = study.removesuffix("-k")
    return {"all": "all", **{f"{side}-{k}": f"{side}:{k}" for k in range(1, depth)}}


def _flat(settings: Mapping[str, Any], sections: Sequence[str]) -> list[tuple[str, Any]]:
    """What a level sets, nested tables by dotted name: ``optim.kind = "adamw"`` of TOML is a table in a table.

    An option of a variant may be a table itself (a learned or scheduled strength) and stays one.
    """
    found: list[tuple[str, Any]] = []
    for key, value in settings.items():
        if isinstance(value, dict) and key in sections:
            found += [(f"{key}.{name}", inner) for name, inner in _flat(cast(dict[str, Any], value), ())]
        else:
            found.append((key, value))
    return found
