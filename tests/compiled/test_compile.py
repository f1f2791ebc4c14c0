"""torch.compile: one graph without breaks, no recompilation by a schedule, and the numbers of eager mode.

Run in a pytest call of their own: dynamo's caches and counters are of the process. All but the last test
need no C++ compiler: they trace, and run the traced graph without generating code.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from xsalab.model import GPT, ModelConfig, VariantChoice, native
from xsalab.model.variant import VARIANTS

pytestmark = pytest.mark.slow

RAMP = {"alpha": {"from": 0, "to": 1, "between": [0.1, 0.9]}}
CHOICES = {name: VariantChoice(name) for name in sorted(VARIANTS)} | {
    "xsa-last-2": VariantChoice("xsa", "last:2"),
    "xsa-ramp-last-2": VariantChoice("xsa", "last:2", RAMP),
    "xsa-ramp-last-1": VariantChoice("xsa", "last:1", RAMP),
    "xsa-learned": VariantChoice("xsa", options={"alpha": {"learned": "tanh", "start": 0.5}}),
    "xsa-projected": VariantChoice("xsa", options={"against": "projected"}),
}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, 50, (2, 17), generator=torch.Generator().manual_seed(0))


def build(choice: VariantChoice, depth: int = 4, dtype: torch.dtype = torch.float32, **changes: Any) -> GPT:
    small: dict[str, Any] = {
        "depth": depth, "width": 32, "heads": 4, "kv_heads": 2, "context": 16, "vocab_size": 50, "window_block": 4,
        "value_gate_channels": 4, "smear_channels": 8,
    }  # fmt: skip
    model = GPT(ModelConfig(**small | changes), choice, kernel="blocked", dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".strength." not in name:
                random = torch.Generator().manual_seed(sum(name.encode()))
                parameter.copy_(torch.empty(parameter.shape).normal_(0, 0.3, generator=random))
    return model


def step(model: GPT, hidden, tokens: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    """Losses and gradients, with ``hidden`` in the place of the model's own."""
    model.zero_grad()
    nats = model.nats_of_hidden(hidden(tokens[:, :-1]), tokens[:, 1:])
    nats.mean().backward()
    return nats.detach(), [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("name", [name for name in CHOICES if name != "xsa-ramp-last-1"])
def test_a_model_is_one_graph(tokens: Tensor, name: str) -> None:
    """F025: XSA on some layers, and every variant, under fullgraph; the traced graph gives the same numbers."""
    model = build(CHOICES[name])
    model.set_progress(0.5)
    hidden = torch.compile(model.hidden, fullgraph=True, backend="aot_eager", dynamic=False)
    want, got = step(model, model.hidden, tokens), step(model, hidden, tokens)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


@pytest.mark.skipif(bool(native.reason()), reason=native.reason() or "-")
@pytest.mark.parametrize("name", ["standard", "xsa-projected"])
def test_a_model_with_kernels_is_one_graph(name: str) -> None:
    """F025: the C++ kernels tell their shapes; the traced graph calls the same ones and gives the same bits."""
    model = build(CHOICES[name], depth=2, dtype=torch.bfloat16, width=64, head_dim=32)
    tokens = torch.randint(0, 50, (20, 17), generator=torch.Generator().manual_seed(0))
    hidden = torch.compile(model.hidden, fullgraph=True, backend="aot_eager", dynamic=False)
    want, got = step(model, model.hidden, tokens), step(model, hidden, tokens)
    torch.testing.assert_close(got, want, atol=0, rtol=0)


def test_a_schedule_recompiles_nothing(tokens: Tensor) -> None:
    """F023: 20 steps of a ramp, through 0 and 1; the strength is a buffer and no Python number."""
    model = build(CHOICES["xsa-ramp-last-2"])
    counter = CompileCounterWithBackend("aot_eager")
    hidden = torch.compile(model.hidden, fullgraph=True, backend=counter, dynamic=False)
    losses = []
    for number in range(20):
        model.set_progress(number / 19)
        got, want = step(model, hidden, tokens), step(model, model.hidden, tokens)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
        losses.append(got[0].mean().item())
    assert counter.frame_count == 1
    assert losses[0] == losses[1] != losses[10] != losses[19]


def test_the_counter_sees_a_python_number() -> None:
    """Shows that the test above asks for something."""
    counter = CompileCounterWithBackend("eager")
    x, settings = torch.ones(3), {"alpha": 0.0}
    compiled = torch.compile(lambda x: x * settings["alpha"], fullgraph=True, backend=counter, dynamic=False)
    for number in range(4):
        settings["alpha"] = number / 3
        compiled(x)
    assert counter.frame_count > 1


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler")
def test_compiled_code_gives_the_numbers_of_eager_mode(tokens: Tensor) -> None:
    """Generated code, XSA with a schedule on the last layer, one compilation for both strengths.

    At a live α = 0 it is standard attention by tolerance (in eager mode by the bit): fused code rounds elsewhere.
    """
    model, standard = build(CHOICES["xsa-ramp-last-1"], depth=2), build(VariantChoice(), depth=2)
    hidden = torch.compile(model.hidden, fullgraph=True, dynamic=False)
    model.set_progress(0.5)
    torch.testing.assert_close(step(model, hidden, tokens), step(model, model.hidden, tokens), atol=1e-5, rtol=1e-4)
    model.set_progress(0.0)
    got, want = step(model, hidden, tokens), step(standard, standard.hidden, tokens)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
