"""What the tables of report.md and report.tex are made of: cells in words, and a table that grows row by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .drawing import plain_number
from .paper_format import Block, Heading, Table
from .report import NAMES

Row = Mapping[str, Any]


def titled(title: str, blocks: Sequence[Block]) -> list[Block]:
    return [Heading(2, title), *blocks] if blocks else []


class Growing:
    """A table that grows: the column of points stands in it where there are several."""

    def __init__(self, content: Row, label: str, caption: str, texts: Sequence[str], numbers: Sequence[str]) -> None:
        self.many = len(content["points"]) > 1
        self.label, self.caption, self.rows = f"{content['name']}-{label}", caption, list[tuple[str, ...]]()
        self.columns = (*(["point"] if self.many else []), *texts, *numbers)
        self.fixed = len(self.columns) - len(numbers)

    def add(self, point: str, *cells: str) -> None:
        self.rows.append((*([point] if self.many else []), *cells))

    def blocks(self) -> list[Block]:
        """The table; nothing where it has no row."""
        if not self.rows:
            return []
        return [Table(self.label, self.caption, self.columns, tuple(self.rows), self.fixed)]


def arm_name(name: str) -> str:
    kind, at, of = name.partition("@")
    return f"{NAMES[kind]}{f' of {of}' if at else ''}" if kind in NAMES else name


def pair_name(row: Row) -> str:
    return f"{arm_name(row['treatment'])} − {row['baseline']}" if row["treatment"] else row["name"]


def number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else plain_number(value, digits)


def ends(low: float | None, high: float | None) -> str:
    return "none" if low is None or high is None else f"{plain_number(low, 2)} to {plain_number(high, 2)}"


def verdict_word(row: Row) -> str:
    """The null control is a picture of the noise, not a gate: it has no verdict."""
    if row.get("verdict") is None:
        return "exploratory" if row.get("exploratory") and row.get("estimate") else "no finished pair"
    return "noise" if row.get("kind") == "null" else row["verdict"]["text"]


def confidence(content: Row) -> str:
    return f"{100 * content['confidence']:.3g} %"


def valued(content: Row) -> str:
    return f"val {content['metric']}" if content["engine"] == "xsalab" else content["metric"]
