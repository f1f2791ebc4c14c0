"""The numbers that shape a model, derived and refused."""

from __future__ import annotations

import pytest

from xsalab.model import ModelConfig


def test_zeros_are_derived() -> None:
    config = ModelConfig(width=96, heads=6)
    assert (config.head_size, config.groups) == (16, 6)
    stated = ModelConfig(width=96, heads=6, head_dim=32, kv_heads=2)
    assert (stated.head_size, stated.groups) == (32, 2)


def test_a_stated_head_size_frees_the_width() -> None:
    assert ModelConfig(width=100, heads=6, head_dim=16).head_size == 16


@pytest.mark.parametrize(("vocabulary", "rows"), [(1000, 1024), (1024, 1024), (1001, 1024), (1, 64)])
def test_the_vocabulary_is_padded(vocabulary: int, rows: int) -> None:
    """F045."""
    assert ModelConfig(vocab_size=vocabulary).vocab_rows == rows


@pytest.mark.parametrize(
    ("context", "short"), [(512, 128), (2048, 512), (256, 128), (1000, 256), (513, 256), (64, 128)]
)
def test_a_short_window_is_a_quarter_rounded_up(context: int, short: int) -> None:
    config = ModelConfig(depth=4, context=context, window="SSSL")
    assert [config.window_of(layer) for layer in range(4)] == [short, short, short, context]


@pytest.mark.parametrize(
    ("window", "depth", "full"),
    [("SSSL", 4, [3]), ("SSSL", 6, [3, 5]), ("S", 3, [2]), ("L", 3, [0, 1, 2]), ("LS", 4, [0, 2, 3])],
)
def test_letters_are_tiled_and_the_last_layer_is_full(window: str, depth: int, full: list[int]) -> None:
    config = ModelConfig(depth=depth, window=window)
    assert [layer for layer in range(depth) if config.is_full_window(layer)] == full


@pytest.mark.parametrize(("depth", "layers"), [(1, [0]), (4, [1, 3]), (5, [0, 2, 4])])
def test_value_embeddings_are_on_every_second_layer_and_the_last(depth: int, layers: list[int]) -> None:
    config = ModelConfig(depth=depth)
    assert [layer for layer in range(depth) if config.has_value_embedding(layer)] == layers
    assert not ModelConfig(depth=depth, value_embeddings=False).has_value_embedding(depth - 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 100, "heads": 6}, "width = 100 is not divisible by heads = 6: use width 96 or 102"),
        ({"width": 4, "heads": 6, "smear": False, "value_embeddings": False}, "use width 6, another"),
        ({"width": 60, "heads": 4}, "head_dim = 15 is odd: .* use 16"),
        ({"head_dim": 33}, "head_dim = 33 is odd"),
        ({"heads": 4, "kv_heads": 3}, r"kv_heads = 3 does not divide heads = 4: use one of \[1, 2, 4\]"),
        ({"heads": 4, "kv_heads": 8}, "kv_heads = 8 does not divide"),
        ({"kv_heads": -1}, "kv_heads = -1: must be 0"),
        ({"head_dim": -2}, "head_dim = -2: must be 0"),
        ({"depth": 0}, "depth = 0: must be at least 1"),
        ({"width": -64}, "width = -64: must be at least 1"),
        ({"heads": 0}, "heads = 0: must be at least 1"),
        ({"context": 0}, "context = 0: must be at least 1"),
        ({"vocab_size": 0}, "vocab_size = 0: must be at least 1"),
        ({"mlp_ratio": 0}, "mlp_ratio = 0: must be at least 1"),
        ({"window_block": 0}, "window_block = 0: must be at least 1"),
        ({"window": ""}, "window = '': one letter a layer"),
        ({"window": "SSX"}, "window = 'SSX': one letter a layer, S .* L"),
        ({"window": "ssl"}, "window = 'ssl'"),
        ({"soft_cap": -1.0}, "soft_cap = -1.0: must be positive, or 0"),
        ({"soft_cap": float("nan")}, "soft_cap = nan"),
        ({"width": 8, "heads": 2}, "value_gate_channels = 12: must be from 1 to width = 8"),
        ({"smear_channels": 0}, "smear_channels = 0: must be from 1 to width"),
    ],
    ids=str,
)
def test_a_wrong_number_is_named_with_what_would_do(change: dict, message: str) -> None:
    """F013, F019: one spelling of a full window; head sizes that cannot be turned in pairs."""
    with pytest.raises(ValueError, match=message):
        ModelConfig(**change)


def test_channels_of_a_part_that_is_off_do_not_matter() -> None:
    ModelConfig(width=8, heads=2, value_embeddings=False, smear=False)


@pytest.mark.parametrize(
    ("field", "value"),
    [("context", 1), ("embedding_std", -1.0), ("matrix_bound", float("nan")), ("norm_eps", float("nan")),
     ("rotary_base", 0.0), ("soft_cap", float("inf"))],
)  # fmt: skip
def test_constants_that_cannot_work_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{field} = "):
        ModelConfig(**{field: value})  # pyright: ignore[reportArgumentType]
