"""What a variant must not do is found before it trains, however far it reaches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import Tensor

from xsalab.model import QKV, Attend, ModelConfig, Site, Variant, VariantChoice
from xsalab.model.causality import check_causality
from xsalab.model.variant import VARIANTS

CONFIG = ModelConfig(depth=2, width=32, heads=2, context=96, vocab_size=100)


class Ahead(Variant):
    """Adds the value ``far`` positions later, where there is one."""

    def __init__(self, site: Site, far: int) -> None:
        super().__init__(site)
        self.far = far

    def forward(self, t: QKV, attend: Attend) -> Tensor:
        y = attend(t.q, t.k, t.v).clone()
        y[:, : -self.far] += t.v[:, self.far :]
        return y


@pytest.fixture
def ahead() -> Iterator[None]:
    VARIANTS["ahead"] = Ahead
    yield
    del VARIANTS["ahead"]


@pytest.mark.parametrize("far", [1, 24, 50, 95])
def test_a_look_ahead_of_any_length_is_found(far: int, ahead: None) -> None:
    """F008: also one that reaches nearly over the whole context."""
    with pytest.raises(ValueError, match="'ahead' looks at future tokens"):
        check_causality(CONFIG, VariantChoice("ahead", options={"far": far}))


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_what_we_ship_is_causal(name: str) -> None:
    check_causality(CONFIG, VariantChoice(name))
