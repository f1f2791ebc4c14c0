"""The examples that ship: they load, the toy comes to a verdict, and nanochat's does what it says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from nanochat_standin import write_standin
from xsalab.data.chat import messages_of
from xsalab.eval.bundle import read_bundle
from xsalab.eval.chat_tasks import CHAT_TASKS, read_items
from xsalab.experiment.reading import load_experiment

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


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


def test_every_question_of_the_downstream_example_can_be_asked() -> None:
    """No line of its bundle, chat tasks or conversations is skipped, and chance is as its table says."""
    folder = EXAMPLES / "downstream"
    experiment = load_experiment(folder / "experiment.toml")
    assert experiment.downstream is not None
    assert experiment.downstream.parts == ("tasks", "sft", "chatcore")
    bundle = read_bundle(folder / "bundle")
    assert not bundle.faults
    assert [len(task.items) for task in bundle.tasks] == [40, 42, 40]
    for task in bundle.tasks:
        assert not [item for item in task.items if item.fault]
        options = {len(item.options) for item in task.items}
        assert task.baseline == (0 if task.kind == "language_modeling" else 1 / options.pop())
    for task in CHAT_TASKS.values():
        items, faults = read_items(folder / "chat", task)
        assert items
        assert not faults
    for line in (folder / "chat" / "conversations.jsonl").read_text(encoding="utf-8").splitlines():
        messages_of(json.loads(line))


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


@pytest.mark.slow
def test_nanochat_s_experiment_runs_with_its_seed_and_its_strength(xsalab: Any, tmp_path: Path) -> None:
    """On a stand-in whose "val_bpb" is the largest |⟨y, v⟩|: seeds differ, XSA's is 0, the other arm's is not."""
    checkout = write_standin(tmp_path / "checkout")
    sets = [
        "--set", f"command.folder={checkout}", "--set", "seeds=[0, 1]", "--set", "controls.null=false",
        "--set", "controls.positive=false", "--set", "controls.twin=false",
    ]  # fmt: skip
    ran = xsalab("run", EXAMPLES / "nanochat" / "experiment.toml", "--out", tmp_path / "out", *sets, "--json")
    assert ran.code == 0, ran.err
    values = {run["name"]: run["value"] for run in json.loads(ran.out)["runs"]}
    assert len({values["base.standard.s0"], values["base.standard.s1"]}) == 2
    assert min(values["base.standard.s0"], values["base.standard.s1"]) > 0.1
    assert max(values["base.xsa.s0"], values["base.xsa.s1"]) < 1e-5
