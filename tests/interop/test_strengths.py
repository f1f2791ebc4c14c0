"""α by layer, for models of other programs."""

from __future__ import annotations

import pytest

from xsalab.interop.strengths import strengths
from xsalab.model import ModelConfig


@pytest.mark.parametrize(
    ("alpha", "layers", "expected"),
    [
        (1.0, "all", (1, 1, 1, 1)),
        (0.5, "last:2", (0, 0, 0.5, 0.5)),
        ([0.1, 0.2, 0.3, 0.4], "0::2", (0.1, 0, 0.3, 0)),
        ((0, 1, 0, 1), "all", (0, 1, 0, 1)),
        (1.0, "none", (0, 0, 0, 0)),
        (1.0, "with-ve", (0, 1, 0, 1)),
    ],
)
def test_every_layer_has_its_number_and_the_others_0(alpha, layers: str, expected: tuple[float, ...]) -> None:
    assert strengths(alpha, layers, ModelConfig(depth=4)) == expected


@pytest.mark.parametrize(
    ("alpha", "layers", "message"),
    [
        (1.5, "all", "alpha = 1.5: must be in"),
        (float("nan"), "all", "alpha = nan: must be a number"),
        ([1.0, 1.0], "all", "2 numbers for 4 layers"),
        ([1.0, 1.0, -1.0, 1.0], "all", r"alpha\[2\] = -1.0: must be in"),
        (1.0, "last:5", "a count from 1 to 4"),
        (1.0, "4", "layers 0 to 3"),
        (1.0, "some", "layers = 'some' is not understood"),
    ],
)
def test_what_is_out_of_range_is_named(alpha, layers: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        strengths(alpha, layers, ModelConfig(depth=4))
