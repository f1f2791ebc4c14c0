"""Experiments of the tests as TOML: plain tables, with changes by dotted name."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xsalab.config import set_dotted


def toml_of(value: Any) -> str:
    """An inline TOML value."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(key)} = {toml_of(item)}" for key, item in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_of(item) for item in value) + "]"
    return repr(value) if isinstance(value, (int, float)) else json.dumps(str(value), ensure_ascii=False)


def write_tables(path: Path, tables: Mapping[str, Any], changes: Mapping[str, Any]) -> Path:
    """Writes ``tables`` with ``changes`` by dotted name, double underscores for the dots; None takes a name out.

    Tables of plain values are written inline: what counts is what is read.
    """
    changed: dict[str, Any] = copy.deepcopy(dict(tables))
    for dotted, value in changes.items():
        if value is None:
            parent = changed
            *names, last = dotted.split("__")
            for name in names:
                parent = parent[name]
            del parent[last]
        else:
            set_dotted(changed, dotted.replace("__", "."), value, "test")
    path.write_text("".join(f"{key} = {toml_of(value)}\n" for key, value in changed.items()), encoding="utf-8")
    return path
