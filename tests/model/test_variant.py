"""The registry and the grammar of layers."""

from __future__ import annotations

import pytest
from torch import Tensor

from xsalab.model import QKV, ModelConfig, Variant, VariantChoice, build_variant, variant
from xsalab.model.variant import VARIANTS, Standard, check_choice, select_layers

CONFIG = ModelConfig(depth=8, width=64, heads=4, window="SSSL")  # value embeddings on 1, 3, 5, 7; full windows 3, 7


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("all", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("none", []),
        ("first:3", [0, 1, 2]),
        ("last:3", [5, 6, 7]),
        ("last:8", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("0::2", [0, 2, 4, 6]),
        ("::3", [0, 3, 6]),
        ("3:6", [3, 4, 5]),
        (":2", [0, 1]),
        ("-3:", [5, 6, 7]),
        (":-6", [0, 1]),
        ("2:8", [2, 3, 4, 5, 6, 7]),
        ("1,3,4,7", [1, 3, 4, 7]),
        ("7, 0", [0, 7]),
        ("5", [5]),
        (" last:1 ", [7]),
        ("with-ve", [1, 3, 5, 7]),
        ("without-ve", [0, 2, 4, 6]),
        ("full-window", [3, 7]),
        ("sliding-window", [0, 1, 2, 4, 5, 6]),
    ],
)
def test_a_selection_names_its_layers(text: str, layers: list[int]) -> None:
    assert list(select_layers(text, CONFIG)) == layers


@pytest.mark.parametrize("text", ["1:7:2", "-5:-1", "::1", "6:", "0:8:3"])
def test_slices_are_pythons(text: str) -> None:
    parts = [int(part) if part else None for part in text.split(":")]
    assert list(select_layers(text, CONFIG)) == list(range(8))[slice(*parts)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("last:99", "this model has 8 layers; a count from 1 to 8"),
        ("first:0", "a count from 1 to 8"),
        ("8", "layer 8 is out of range; this model has layers 0 to 7"),
        ("1,9", "layer 9 is out of range"),
        ("1,1", "names a layer twice"),
        ("0:9", "bounds from -8 to 8"),
        ("-9:", "bounds from -8 to 8"),
        ("::0", "the step must be positive, as in 0::2"),
        ("::-1", "the step must be positive"),
        ("5:5", "selects no layer of 0 to 7; write none"),
        ("last4", "is not understood; write all, none, first:N"),
        ("last:-1", "is not understood"),
        ("-1", "is not understood"),
        ("1;3", "is not understood"),
        ("", "is not understood"),
        ("1:2:3:4", "is not understood"),
        ("everything", r"is not understood; .*\(layers 0 to 7\)"),
    ],
)
def test_a_wrong_selection_says_what_is_valid(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        select_layers(text, CONFIG)
    assert repr(text.strip()) in str(caught.value)


def test_named_sets_follow_the_switches() -> None:
    plain = ModelConfig(depth=3, width=64, heads=4, value_embeddings=False, window="L")
    assert select_layers("with-ve", plain) == ()
    assert select_layers("without-ve", plain) == select_layers("full-window", plain) == (0, 1, 2)


@pytest.mark.parametrize("layers", ["last:2", "without-ve", "none"])
def test_the_variant_stands_on_its_layers_and_standard_on_the_rest(layers: str) -> None:
    """F005: exactly the layers that were asked for."""
    choice = VariantChoice("xsa", layers)
    chosen = select_layers(layers, CONFIG)
    for layer in range(8):
        built = build_variant(choice, CONFIG, layer)
        assert type(built) is (VARIANTS["xsa"] if layer in chosen else Standard)
        assert (built.site.layer, built.site.has_value_embedding) == (layer, layer % 2 == 1)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (VariantChoice("xas"), r"variant = 'xas' is not known; did you mean 'xsa'\? known: .*self-masked.*, standard"),
        (VariantChoice("zzz"), "variant = 'zzz' is not known; known: head-gate"),
        (VariantChoice("xsa", options={"alhpa": 1.0}), r"no option 'alhpa'; did you mean 'alpha'\?"),
        (VariantChoice("standard", options={"alpha": 1.0}), "no option 'alpha'; its options: none"),
        (VariantChoice("xsa", "last:99"), "this model has 8 layers"),
    ],
    ids=["near", "far", "option", "standard-option", "layers"],
)
def test_a_wrong_choice_is_named(choice: VariantChoice, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_choice(choice, CONFIG)


@pytest.fixture
def registry():
    before = dict(VARIANTS)
    yield
    VARIANTS.clear()
    VARIANTS.update(before)


@pytest.mark.usefixtures("registry")
def test_a_new_variant_is_one_class() -> None:
    @variant("doubled")
    class Doubled(Variant):
        def forward(self, t: QKV, attend) -> Tensor:
            return 2 * attend(t.q, t.k, t.v)

    assert isinstance(build_variant(VariantChoice("doubled"), CONFIG, 0), Doubled)
    with pytest.raises(ValueError, match="'doubled' is already taken by"):

        @variant("doubled")
        class Other(Doubled):
            pass


@pytest.mark.parametrize("name", ["", "Mine", "a b", "-x", "a/b"])
def test_a_variant_has_a_plain_name(name: str) -> None:
    with pytest.raises(ValueError, match="use lower-case letters"):
        variant(name)


def test_a_variant_must_say_what_it_does() -> None:
    class Silent(Variant):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Silent(build_variant(VariantChoice(), CONFIG, 0).site)  # pyright: ignore
