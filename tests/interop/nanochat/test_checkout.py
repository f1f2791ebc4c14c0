"""XSA inside a real nanochat: the variable XSALAB_NANOCHAT names a checkout, else this is skipped.

Its own model with the variant put in gives the stored logits, in training and through its key/value cache. The stored
ones were computed apart from this code.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from xsalab.interop.nanochat import VARIANT_FILE, insert_exclusion, read_checkpoint, record_strengths
from xsalab.model import VariantChoice

Arrays = dict[str, np.ndarray]
TOLERANCE = 2e-5  # float32; sums in another order were measured to move these logits by 3e-6


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    given = os.environ.get("XSALAB_NANOCHAT")
    if not given:
        pytest.skip("no nanochat: set XSALAB_NANOCHAT to the folder of a checkout")
    folder = Path(given)
    assert (folder / "nanochat" / "gpt.py").is_file(), f"XSALAB_NANOCHAT = {given}: no nanochat checkout"
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("NANOCHAT_DTYPE", "float32")
    for name in ("rustbpe", "tiktoken"):  # imported with the engine, and not used here
        if importlib.util.find_spec(name) is None:
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == "nanochat"]:
        del sys.modules[name]


def load(run: Path) -> Any:
    """nanochat's own model with the weights of the stored run, made as nanochat makes it."""
    gpt = importlib.import_module("nanochat.gpt")
    with torch.device("meta"):
        model = gpt.GPT(gpt.GPTConfig(512, 2048, 4, 4, 4, 128, "SSSL"))
    model.to_empty(device="cpu")
    model.init_weights()
    model.load_state_dict(torch.load(run / "model_000120.pt", weights_only=True))
    return model.eval()


@pytest.mark.parametrize("alpha", ["0", "0.5", "1"])
def test_training_gives_the_stored_logits_and_losses(
    real: Path, nanochat_d4: Path, expected: Arrays, alpha: str
) -> None:
    insert_exclusion(float(alpha))
    model, tokens = load(nanochat_d4), torch.from_numpy(expected["tokens"])
    with torch.no_grad():
        logits = model(tokens)[:, expected["positions"]]
        losses = model(tokens[:, :-1], tokens[:, 1:].contiguous(), loss_reduction="none").view(2, -1)
    np.testing.assert_allclose(logits, expected[f"logits_alpha_{alpha}"], atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(losses, expected[f"loss_alpha_{alpha}"], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("alpha", ["0", "0.5", "1"])
def test_its_cache_gives_the_stored_logits(real: Path, nanochat_d4: Path, expected: Arrays, alpha: str) -> None:
    """F003, F011: a prompt beyond the short window of 128, then token by token."""
    insert_exclusion(float(alpha))
    model, engine = load(nanochat_d4), importlib.import_module("nanochat.engine")
    tokens, start = torch.from_numpy(expected["tokens"]), 370
    cache = engine.KVCache(2, 4, tokens.shape[1], 32, 4, "cpu", torch.float32)
    with torch.no_grad():
        parts = [model(part, kv_cache=cache) for part in tokens.split([start, *[1] * (tokens.shape[1] - start)], dim=1)]
    logits = torch.cat(parts, dim=1)[:, expected["positions"]]
    assert (expected["positions"] > start).sum() > 3
    np.testing.assert_allclose(logits, expected[f"logits_alpha_{alpha}"], atol=TOLERANCE, rtol=0)


def test_strength_0_changes_no_bit(real: Path, nanochat_d4: Path, expected: Arrays) -> None:
    """Logits and gradients of a model that nothing was inserted into."""
    tokens = torch.from_numpy(expected["tokens"])

    def loss_and_gradients() -> list[torch.Tensor]:
        model = load(nanochat_d4)
        loss = model(tokens[:, :-1], tokens[:, 1:].contiguous())
        loss.backward()
        return [loss, *(parameter.grad for parameter in model.parameters())]

    plain = loss_and_gradients()
    insert_exclusion(0.0)
    assert all(map(torch.equal, plain, loss_and_gradients()))


@pytest.mark.parametrize("layers", ["with-ve", "full-window", "0,1", "-3:"])
def test_layers_are_those_of_our_own_model(real: Path, nanochat_d4: Path, expected: Arrays, layers: str) -> None:
    insert_exclusion(0.75, layers)
    tokens = torch.from_numpy(expected["tokens"])
    ours, _ = read_checkpoint(nanochat_d4, choice=VariantChoice("xsa", layers, {"alpha": 0.75}))
    with torch.no_grad():
        theirs, ours = load(nanochat_d4)(tokens), ours(tokens)
    torch.testing.assert_close(theirs, ours, atol=TOLERANCE, rtol=0)


def test_its_own_checkpoint_is_read_as_the_model_that_saved_it(
    real: Path, nanochat_d4: Path, expected: Arrays, tmp_path: Path
) -> None:
    """Saved by its own code and loaded by it again; our model takes the strength from the file beside it."""
    insert_exclusion(1.0)
    record_strengths(1.0, "all")
    manager, model = importlib.import_module("nanochat.checkpoint_manager"), load(nanochat_d4)
    meta = json.loads((nanochat_d4 / "meta_000120.json").read_text(encoding="utf-8"))
    manager.save_checkpoint(str(tmp_path), 7, model.state_dict(), None, meta, rank=0)
    assert json.loads((tmp_path / VARIANT_FILE).read_text(encoding="utf-8")) == {"steps": {"7": [1.0] * 4}}
    manager.load_checkpoint(str(tmp_path), 7, torch.device("cpu"))
    shutil.copy(nanochat_d4 / "tokenizer.pkl", tmp_path)
    ours, _ = read_checkpoint(tmp_path)
    with torch.no_grad():
        logits = ours(torch.from_numpy(expected["tokens"]))[:, expected["positions"]]
    np.testing.assert_allclose(logits, expected["logits_alpha_1"], atol=TOLERANCE, rtol=0)


@pytest.mark.slow
def test_the_compiled_model_is_one_graph(real: Path, nanochat_d4: Path, expected: Arrays) -> None:
    """F025: as base_train compiles it, exclusion on two of four layers."""
    torch._dynamo.reset()
    insert_exclusion(1.0, "last:2")
    model, tokens = load(nanochat_d4), torch.from_numpy(expected["tokens"])
    compiled = torch.compile(model, backend="eager", dynamic=False, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(tokens), model(tokens), atol=TOLERANCE, rtol=0)
    torch._dynamo.reset()
