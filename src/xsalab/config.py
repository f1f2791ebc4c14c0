"""Reads TOML into frozen dataclasses, writes them back, digests them. Knows no field by name.

A section of a configuration is a plain frozen dataclass marked with ``@config`` beside the code that it
configures; pydantic checks types and unknown keys at the border and never appears behind it.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast, dataclass_transform, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def config(cls: type[T]) -> type[T]:
    """A frozen dataclass that refuses unknown keys (pydantic ignores them on plain dataclasses)."""
    cls.__pydantic_config__ = {"extra": "forbid"}  # type: ignore[attr-defined]
    return dataclasses.dataclass(frozen=True)(cls)


def read_toml(path: Path, sets: Sequence[str] = ()) -> dict[str, Any]:
    """The tables of a TOML file, with ``--set a.b=VALUE`` assignments applied on top.

    Raises ValueError naming the file and the place where it is not TOML.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise ValueError(f"{path}: is a folder; give the experiment's TOML file") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 (byte {error.start}); TOML files are UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: not TOML: {error}") from None
    apply_sets(tables, sets)
    return tables


def apply_sets(tables: dict[str, Any], sets: Sequence[str]) -> None:
    """Puts ``--set a.b=VALUE`` assignments on top of the tables, in place. ValueError for one that is none."""
    for assignment in sets:
        name, equals, text = assignment.partition("=")
        if not equals or not name.strip():
            raise ValueError(f"--set {assignment!r}: write it as section.field=value")
        set_dotted(tables, name.strip(), parse_value(text.strip()), where="--set")


def parse_value(text: str) -> Any:
    """A TOML value; what is not one is taken as a string, so that quotes may be left out."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def set_dotted(tables: dict[str, Any], name: str, value: Any, where: str) -> None:
    """Assigns ``tables[a][b] = value`` for the dotted ``name`` "a.b", in place."""
    *path, last = name.split(".")
    for part in path:
        tables = tables.setdefault(part, {})
        if not isinstance(tables, dict):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"{where} {name}: {part!r} is a value, not a section")
    tables[last] = value


def build(cls: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """``values`` checked and turned into the dataclass ``cls``.

    Types are strict: neither "4" nor true nor 4.0 is a whole number; a whole number is a number as well.
    Raises ValueError with one line a fault: where it stands, the field, the value and what would do.
    """
    text = json.dumps(dict(values), default=str)  # strict, and yet a list becomes a tuple: so pydantic reads JSON
    try:
        return _adapter(cls).validate_json(text, strict=True)
    except ValidationError as error:
        lines = [_explain(cls, fault, where) for fault in error.errors()]
        raise ValueError("\n".join(lines)) from None


@lru_cache
def _adapter(cls: type) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


def _explain(cls: type, fault: Any, where: str) -> str:
    place = [str(part) for part in fault["loc"] if not str(part).startswith(("function-", "tagged-"))]
    prefix = f"{where}: " if where else ""
    if fault["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return prefix + unknown_field(".".join(place), fault["input"], _fields_at(cls, place[:-1]))
    if fault["type"] in ("missing", "missing_argument"):
        return f"{prefix}field {'.'.join(place)} is missing"
    message = fault["msg"].removeprefix("Value error, ")
    name = ".".join(place)
    if fault["type"] == "value_error":  # raised by a __post_init__, which names field and value itself
        return f"{prefix}{name + ': ' if name else ''}{message}"
    return f"{prefix}{name} = {fault['input']!r}: {message[0].lower()}{message[1:]}"


def unknown_field(name: str, value: Any, known: Sequence[str]) -> str:
    """The message for a field that is not there: with the nearest that is, else with all of them."""
    near = difflib.get_close_matches(name.rsplit(".", 1)[-1], known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known fields: {', '.join(known)}"
    return f"unknown field {name} = {value!r}; {hint}"


def _fields_at(cls: Any, path: Sequence[str]) -> list[str]:
    for part in path:
        hints = get_type_hints(cls) if dataclasses.is_dataclass(cls) else {}
        cls = hints.get(part, cls)
        for option in get_args(cls):  # a tuple of sections: [[points]]
            cls = option if dataclasses.is_dataclass(option) else cls
    return [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []


def dump(value: Any) -> Any:
    """The dataclass as plain JSON values."""
    return _adapter(cast(Any, type(value))).dump_python(value, mode="json")


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested tables by dotted name: ``("optim.lr_scale", 1.0)``."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flat(cast(Mapping[str, Any], value), name + ".")
        else:
            yield name, value


def digest(value: Any) -> str:
    """Sixteen hexadecimal digits of SHA-256 over the canonical JSON of a dataclass or of plain values."""
    plain = dump(value) if dataclasses.is_dataclass(value) else value
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
