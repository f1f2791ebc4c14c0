"""The examples that ship: they load, the toy comes to a verdict, and nanochat's launcher does what it says."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from xsalab.experiment.reading import load_experiment

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"

ATTENTION = """
from types import SimpleNamespace
flash_attn = SimpleNamespace(
    flash_attn_func=lambda q, k, v, causal=False, window_size=(-1, -1): q + k,
    flash_attn_with_kvcache=lambda q, k_cache, v_cache, k=None, v=None, **settings: q + k,
)
"""
TRAINER = """
import argparse
import torch
import wandb
from nanochat.flash_attention import flash_attn
parser = argparse.ArgumentParser()
parser.add_argument("--depth", type=int)
args, _ = parser.parse_known_args()
assert __name__ == "__main__" and args.depth == 2
torch.manual_seed(42)
q, k, v = torch.randn(3, 1, 5, 4, 8).unbind(0)
y = flash_attn.flash_attn_func(q, k, v[:, :, :2], causal=True, window_size=(-1, 0))
aligned = (y * v[:, :, :2].repeat_interleave(2, 2)).sum(-1).abs().max().item()
print(f"step 00019/00020 (95.00%) | loss: {torch.rand(()).item():.6f} | lrm: 0.05")
print(f"Step 00020 | Validation bpb: {aligned:.6f}")
"""


@pytest.mark.parametrize("name", ["toy", "nanochat"])
def test_an_example_loads(name: str) -> None:
    experiment = load_experiment(EXAMPLES / name / "experiment.toml")
    assert (experiment.engine, experiment.name) == ("command", name)
    assert {"null", "positive", "twin"} < set(experiment.arms)


def test_the_page_shows_the_toy_s_experiment(tmp_path: Path) -> None:
    """What docs/any-trainer.md prints loads, and declares what the file that ships declares."""
    text = (ROOT / "docs" / "any-trainer.md").read_text(encoding="utf-8")
    block = re.search(r"```toml\n(name = .*?)```", text, re.DOTALL)
    assert block
    (tmp_path / "toy.toml").write_text(block[1], encoding="utf-8")
    printed, shipped = load_experiment(tmp_path / "toy.toml"), load_experiment(EXAMPLES / "toy" / "experiment.toml")
    for name in ("name", "seeds", "primary", "arms", "points"):
        assert getattr(printed, name) == getattr(shipped, name)


@pytest.mark.slow
def test_the_toy_comes_to_a_verdict(xsalab: Any, tmp_path: Path) -> None:
    """Momentum helps this trainer, a fifth of the rate hurts it, and a run repeats to the bit."""
    path = EXAMPLES / "toy" / "experiment.toml"
    ran = xsalab("run", path, "--out", tmp_path, "--set", "seeds=[0, 1, 2]", "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    words = {row["treatment"]: row["verdict"]["word"] for row in found["contrasts"]}
    assert (words["momentum"], words["positive"], found["twin"]) == ("better", "worse", True)
    assert (found["contrasts"][0]["estimate"]["item_word"], found["metric"]) == ("items", "loss")
    assert len(found["unchecked"]) == 6


@pytest.fixture
def launch() -> Any:
    spec = importlib.util.spec_from_file_location("launch", EXAMPLES / "nanochat" / "launch.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_both_of_nanochat_s_attention_calls_lose_their_part_along_the_value(launch: Any) -> None:
    """By the formula, with one value head for two query heads; the key/value cache is not touched."""
    draw = torch.Generator().manual_seed(0)
    y, v = torch.randn(2, 3, 4, 8, generator=draw), torch.randn(2, 3, 2, 8, generator=draw)
    attention = SimpleNamespace(
        flash_attn_func=lambda q, k, v, causal, window_size: y,
        flash_attn_with_kvcache=lambda q, k_cache, v_cache, *, k, v, cache_seqlens: y,
    )
    launch.exclude_self_in(attention, 0.5)
    own = v.repeat_interleave(2, dim=2)
    expected = y - 0.5 * ((y * own).sum(-1) / (own * own).sum(-1)).unsqueeze(-1) * own
    trained = attention.flash_attn_func(None, None, v, causal=True, window_size=(-1, 0))
    cached = attention.flash_attn_with_kvcache(None, None, None, k=None, v=v, cache_seqlens=None)
    torch.testing.assert_close(trained, expected)
    torch.testing.assert_close(cached, expected)


@pytest.mark.slow
def test_a_checkout_is_run_with_its_seed_and_its_attention_from_the_environment(xsalab: Any, tmp_path: Path) -> None:
    """A stand-in with nanochat's module names, its fixed seed and its console: seeds differ, XSA's output is orthogonal
    to the value, the other arm's is not, wandb is not needed, and no file of it changes."""
    checkout = tmp_path / "checkout"
    for name, text in (("nanochat/flash_attention", ATTENTION), ("scripts/base_train", TRAINER)):
        file = checkout / f"{name}.py"
        file.parent.mkdir(parents=True)
        file.write_text(text, encoding="utf-8")
    before = {file: file.read_bytes() for file in checkout.rglob("*.py")}
    sets = [
        "--set", f"command.folder={checkout}", "--set", "seeds=[0, 1]", "--set", "controls.null=false",
        "--set", "controls.positive=false", "--set", "controls.twin=false",
        "--set", "command.env.PYTHONDONTWRITEBYTECODE=1",
    ]  # fmt: skip
    ran = xsalab("run", EXAMPLES / "nanochat" / "experiment.toml", "--out", tmp_path / "out", *sets, "--json")
    assert ran.code == 0, ran.err
    values = {run["name"]: run["value"] for run in json.loads(ran.out)["runs"]}
    assert len({values["base.standard.s0"], values["base.standard.s1"]}) == 2
    assert min(values["base.standard.s0"], values["base.standard.s1"]) > 0.1
    assert max(values["base.xsa.s0"], values["base.xsa.s1"]) < 1e-5
    assert before == {file: file.read_bytes() for file in checkout.rglob("*.py")}
