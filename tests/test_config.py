"""TOML to frozen values: every mistake is named with its field, its value and what would do."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from xsalab.config import build, config, digest, dump, flat, parse_value, read_toml, set_dotted


@config
class Inner:
    """A section inside another."""

    size: int = 1
    rate: float = 0.5


@config
class Outer:
    """One field of every kind that a configuration has."""

    depth: int
    rate: float = 1.0
    name: str = "a"
    on: bool = False
    pair: tuple[float, float] = (0.1, 0.2)
    inner: Inner = dataclasses.field(default_factory=Inner)

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise ValueError(f"depth = {self.depth}: must be at least 1")


def test_values_become_a_frozen_dataclass() -> None:
    """A list becomes a tuple, a whole number a number, a table a section."""
    built = build(Outer, {"depth": 3, "rate": 2, "pair": [1, 2], "inner": {"size": 4}})
    assert built == Outer(3, 2.0, pair=(1.0, 2.0), inner=Inner(4))
    assert type(built.rate) is float
    with pytest.raises(dataclasses.FrozenInstanceError):
        built.depth = 4  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"depth": 1, "dept": 3}, "e.toml: model: unknown field dept = 3; did you mean 'depth'?"),
        ({"depth": 1, "zzz": "x"}, "unknown field zzz = 'x'; known fields: depth, rate, name, on, pair, inner"),
        ({"depth": 1, "inner": {"siez": 2}}, "unknown field inner.siez = 2; did you mean 'size'?"),
        ({}, "e.toml: model: field depth is missing"),
        ({"depth": "four"}, "e.toml: model: depth = 'four': input should be a valid integer"),
        ({"depth": "4"}, "depth = '4': input should be a valid integer"),
        ({"depth": 3.7}, "depth = 3.7: input should be a valid integer"),
        ({"depth": 4.0}, "depth = 4.0: input should be a valid integer"),
        ({"depth": True}, "depth = True: input should be a valid integer"),
        ({"depth": 1, "rate": "0.5"}, "rate = '0.5': input should be a valid number"),
        ({"depth": 1, "rate": False}, "rate = False: input should be a valid number"),
        ({"depth": 1, "on": "yes"}, "on = 'yes': input should be a valid boolean"),
        ({"depth": 1, "on": 1}, "on = 1: input should be a valid boolean"),
        ({"depth": 1, "name": 5}, "name = 5: input should be a valid string"),
        ({"depth": 1, "pair": [1.0]}, "pair.1 is missing"),
        ({"depth": 1, "pair": [1.0, "x"]}, "pair.1 = 'x': input should be a valid number"),
        ({"depth": 1, "inner": 3}, "inner = 3: "),
        ({"depth": 0}, "e.toml: model: depth = 0: must be at least 1"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_a_mistake_is_named(values: dict[str, Any], words: str) -> None:
    """No type is bent: 3.7, "4" and true are no whole numbers (a lax reader takes the last two)."""
    with pytest.raises(ValueError) as raised:
        build(Outer, values, "e.toml: model")
    assert words in str(raised.value)


def test_every_mistake_has_a_line() -> None:
    with pytest.raises(ValueError) as raised:
        build(Outer, {"depth": "x", "rate": "y", "nme": 1})
    assert len(str(raised.value).splitlines()) == 3


def test_what_was_built_can_be_built_again() -> None:
    """dump gives plain JSON; build of it gives the same value."""
    built = build(Outer, {"depth": 3, "inner": {"rate": 0.1}})
    plain = json.loads(json.dumps(dump(built)))
    assert plain["pair"] == [0.1, 0.2]
    assert build(Outer, plain) == built


def test_the_digest_is_of_the_values_alone() -> None:
    """The same for a dataclass and its plain values in any order, on every machine; another for another value."""
    value = Outer(3)
    plain = dump(value)
    assert digest(value) == digest(plain) == digest(dict(reversed(plain.items())))
    text = '{"depth":3,"inner":{"rate":0.5,"size":1},"name":"a","on":false,"pair":[0.1,0.2],"rate":1.0}'  # by hand
    assert digest(value) == hashlib.sha256(text.encode()).hexdigest()[:16]
    others = [Outer(4), Outer(3, rate=1.5), Outer(3, name="α"), Outer(3, inner=Inner(2))]
    assert len({digest(other) for other in [value, *others]}) == 5


def test_flat_names_the_leaves() -> None:
    assert list(flat({"a": {"b": {"c": 1}, "d": [2]}, "e": 3})) == [("a.b.c", 1), ("a.d", [2]), ("e", 3)]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3), ("0.5", 0.5), ("true", True), ("[1, 2]", [1, 2]), ('"x"', "x"), ("x", "x"), ("a b", "a b"), ("", ""),
        ("{ from = 0, to = 1 }", {"from": 0, "to": 1}), ("1e-3", 1e-3), ("0::2", "0::2"),
    ],
)  # fmt: skip
def test_a_value_of_the_command_line(text: str, value: Any) -> None:
    """A TOML value; quotes around a word may be left out."""
    assert parse_value(text) == value
    assert type(parse_value(text)) is type(value)


def test_set_makes_the_tables_on_its_way(tmp_path: Path) -> None:
    path = tmp_path / "e.toml"
    path.write_text('name = "α"\n[train]\ntokens = 1\n', encoding="utf-8")
    sets = ["train.tokens=2", "optim.kind = adamw", "arms.xsa.alpha=[0.5, 1]"]
    assert read_toml(path, sets) == {
        "name": "α", "train": {"tokens": 2}, "optim": {"kind": "adamw"}, "arms": {"xsa": {"alpha": [0.5, 1]}},
    }  # fmt: skip


@pytest.mark.parametrize("assignment", ["train.tokens", "=3", " = 3", ""])
def test_a_malformed_set_shows_its_form(assignment: str, tmp_path: Path) -> None:
    path = tmp_path / "e.toml"
    path.write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match=r"--set .*: write it as section.field=value"):
        read_toml(path, [assignment])


def test_a_value_is_no_section() -> None:
    with pytest.raises(ValueError, match=r"--set train.tokens.x: 'tokens' is a value, not a section"):
        set_dotted({"train": {"tokens": 3}}, "train.tokens.x", 1, "--set")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    broken, latin = tmp_path / "broken.toml", tmp_path / "latin.toml"
    broken.write_text("a = 1\nb = \n", encoding="utf-8")
    latin.write_bytes("a = 'é'".encode("latin-1"))
    for path, words in (
        (tmp_path / "none.toml", "none.toml: no such file"),
        (tmp_path, "is a folder; give the experiment's TOML file"),
        (broken, "broken.toml: not TOML: .*line 2"),
        (latin, r"latin.toml: not UTF-8 \(byte 5\)"),
    ):
        with pytest.raises(ValueError, match=words):
            read_toml(path)
