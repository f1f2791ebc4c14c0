"""Factors cross into arms: every combination once, named by its levels, setting what its levels set."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from xsalab.experiment.factors import cross

SECTIONS = ("data", "model", "optim", "train", "eval")
ATTENTION = {"standard": {"variant": "standard"}, "xsa": {"variant": "xsa", "alpha": 1.0}}


def crossed(table: dict[str, Any], depth: int | None = 4) -> Any:
    return cross(table, SECTIONS, depth, "file.toml: factors")


def test_every_combination_is_an_arm_once() -> None:
    """2 × 3 × 2 levels are 12 arms, whose names and levels are those of the product."""
    found = crossed(
        {"attention": ATTENTION, "optim": {"kind": ["hybrid", "muon", "adamw"]}, "train": {"tokens": [1024, 2048]}}
    )
    levels = [("standard", "xsa"), ("hybrid", "muon", "adamw"), ("tokens-1024", "tokens-2048")]
    assert [factor.levels for factor in found.factors] == levels
    assert list(found.levels.values()) == list(itertools.product(*levels))
    assert list(found.arms)[:2] == ["standard-hybrid-tokens-1024", "standard-hybrid-tokens-2048"]
    assert found.arms["xsa-adamw-tokens-2048"] == {
        "variant": "xsa", "alpha": 1.0, "optim.kind": "adamw", "train.tokens": 2048,
    }  # fmt: skip


def test_numbers_are_doses_and_words_are_not() -> None:
    found = crossed({"alpha": [0, 0.25, 1], "layers": ["all", "first:2"]})
    assert [factor.values for factor in found.factors] == [(0.0, 0.25, 1.0), None]
    assert found.factors[0].levels == ("alpha-0", "alpha-0_25", "alpha-1")
    assert found.factors[1].levels == ("all", "first-2")


def test_numbers_that_six_digits_do_not_tell_apart_have_all_of_theirs() -> None:
    """Each is a level of its own; the names of others stay short."""
    found = crossed({"alpha": [0.5, 0.5000001, 0.25], "train": {"tokens": [1_000_000, 1_000_001, 2_000_000]}})
    assert found.factors[0].levels == ("alpha-0_5", "alpha-0_5000001", "alpha-0_25")
    assert found.factors[1].levels == ("tokens-1000000", "tokens-1000001", "tokens-2e06")
    assert len(found.arms) == 9


def test_a_switch_is_no_number() -> None:
    assert crossed({"on": [True, 1]}).factors[0].levels == ("on-on", "on-1")


def test_a_factor_of_one_level_is_in_every_arm_and_in_no_name() -> None:
    found = crossed({"attention": {"xsa": {"variant": "xsa"}}, "alpha": [0.0, 1.0]})
    assert found.arms == {"alpha-0": {"variant": "xsa", "alpha": 0.0}, "alpha-1": {"variant": "xsa", "alpha": 1.0}}


def test_no_factors_are_no_arms() -> None:
    assert not crossed({}).arms


def test_a_strength_that_is_a_table_stays_one() -> None:
    """A learned α is one option, not fields of a section."""
    found = crossed({"attention": {"xsa": {"variant": "xsa", "alpha": {"learned": "tanh", "start": 0.0}}}})
    assert found.arms["xsa"]["alpha"] == {"learned": "tanh", "start": 0.0}


@pytest.mark.parametrize(
    ("study", "expected"),
    [
        ("leave-one-out", {"all": "all", "but-0": "1,2", "but-1": "0,2", "but-2": "0,1"}),
        ("first-k", {"all": "all", "first-1": "first:1", "first-2": "first:2"}),
        ("last-k", {"all": "all", "last-1": "last:1", "last-2": "last:2"}),
        ("value-embeddings", {"all": "all", "with-ve": "with-ve", "without-ve": "without-ve"}),
    ],
)
def test_layer_studies(study: str, expected: dict[str, str]) -> None:
    """Written out by hand for three layers."""
    found = crossed({"attention": {"xsa": {"variant": "xsa"}}, "layers": study}, depth=3)
    assert {arm: sets["layers"] for arm, sets in found.arms.items()} == expected


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"alpha": 0.5}, r"factors.alpha = 0.5: a factor is a list of values"),
        ({"layers": "some"}, r"factors.layers = 'some': .*leave-one-out"),
        ({"alpha": [0.5, 0.5]}, r"factors.alpha = .*a level is there twice"),
        ({"alpha": [0.0, -0.0, 1.0]}, r"a level is there twice: 0.0 and -0.0 are one number"),
        ({"alpha": [1, 0.5, 1.0]}, r"a level is there twice: 1 and 1.0 are one number"),
        ({"layers": ["a b", "a-b"]}, r"'a b' and 'a-b' would have one name, a-b; write a table of levels"),
        ({"alpha": []}, r"factors.alpha = \[\]: a factor is a list"),
        ({"a": {"x": {"alpha": 1.0}, "y": {"alpha": 0.5}}, "alpha": [0, 1]}, r"level alpha-0 sets alpha, as another"),
        ({"a": {"p": {}, "p-q": {}}, "b": {"q-r": {}, "r": {}}}, "two combinations have the name 'p-q-r'"),
    ],
)
def test_a_factor_that_cannot_be_crossed_is_refused(table: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        crossed(table)


def test_a_layer_study_needs_one_depth() -> None:
    with pytest.raises(ValueError, match="the points differ in depth; list the layers"):
        crossed({"layers": "first-k"}, depth=None)
