from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eval.bundles import MC, TASKS, write_bundle
from xsalab.eval import core as core_module
from xsalab.eval.core import CoreConfig
from xsalab.experiment.answers import read_answers
from xsalab.experiment.core import ask_core
from xsalab.experiment.outcome import outcome


@pytest.fixture
def run(lab: Callable[..., Any]) -> Path:
    return lab().run().path


def test_answers_are_kept_and_asked_again_only_where_the_question_changed(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an interrupted call left is not asked twice; another file of one task asks that task alone."""
    bundle = write_bundle(tmp_path / "b")
    asked: list[str] = []
    original = core_module.answer_task

    def watched(model: Any, tokenizer: Any, task: Any, *rest: Any) -> Any:
        if task.name == "next" and len(asked) == 2:
            asked.append("killed")
            raise KeyboardInterrupt
        asked.append(task.name)
        return original(model, tokenizer, task, *rest)

    monkeypatch.setattr(core_module, "answer_task", watched)
    config = CoreConfig(bundle=str(bundle))
    with pytest.raises(KeyboardInterrupt):
        ask_core(run, config)
    assert set(read_answers(run / "core")) == {"choose", "which"}
    result = ask_core(run, config)
    assert asked == ["choose", "which", "killed", "next"]
    assert {name: stored.answers for name, stored in read_answers(run / "core").items()} == result.answers
    write_bundle(bundle, {**TASKS, "choose": {**TASKS["choose"], "items": MC[:5]}})
    again = ask_core(run, config)
    assert asked[4:] == ["choose"]
    assert len(again.answers["choose"].scores) == 5
    assert again.answers["next"] == result.answers["next"]


def test_answers_of_two_bundles_are_not_mixed(run: Path, tmp_path: Path, xsalab: Any) -> None:
    """Else a task of one would count in the figure of the other; a choice of tasks of one bundle goes on."""
    whole = write_bundle(tmp_path / "b")
    ask_core(run, CoreConfig(bundle=str(whole), tasks=("choose",)))
    ask_core(run, CoreConfig(bundle=str(whole), tasks=("next",)))
    other = write_bundle(tmp_path / "other", {"next": TASKS["next"]})
    ran = xsalab("core", run, "--bundle", other)
    assert ran.code == 2
    assert "holds answers to choose, which this bundle has not" in ran.err
    assert set(read_answers(run / "core")) == {"choose", "next"}


def test_answers_belong_to_the_weights_that_gave_them(shared_data: Path, tmp_path: Path) -> None:
    """Two checkpoints in folders of one name: the second is asked, not told what the first has answered."""
    bundle = CoreConfig(bundle=str(write_bundle(tmp_path / "b")))
    found = []
    for place, scale in (("a", 1.0), ("b", 0.0)):
        folder = tmp_path / place / "d4"
        folder.mkdir(parents=True)
        for name in ("meta_000120.json", "tokenizer.pkl"):
            shutil.copyfile(shared_data / "nanochat_d4" / name, folder / name)
        tensors = torch.load(shared_data / "nanochat_d4" / "model_000120.pt", weights_only=True)
        torch.save({name: tensor * scale for name, tensor in tensors.items()}, folder / "model_000120.pt")
        found.append(ask_core(folder, bundle, out=tmp_path / "out").answers["choose"].scores[0].options)
    assert found[0] != found[1]


def test_a_figure_is_asked_in_one_way(lab: Callable[..., Any], tmp_path: Path) -> None:
    """Tasks of different numbers of items, or answers of weights that are gone, are no figure: said by the outcome."""
    found = lab()
    run = found.run().path
    bundle = str(write_bundle(tmp_path / "b"))
    ask_core(run, CoreConfig(bundle=bundle))
    ask_core(run, CoreConfig(bundle=bundle, tasks=("next",), max_per_task=2))
    with pytest.raises(ValueError, match=r"choose was asked with max_per_task = 0, next with max_per_task = 2"):
        outcome(found.experiment, found.store)
    ask_core(run, CoreConfig(bundle=bundle))
    outcome(found.experiment, found.store)
    status = json.loads((run / "status.json").read_text(encoding="utf-8"))
    (run / "status.json").write_text(json.dumps({**status, "weights": "others"}), encoding="utf-8")
    with pytest.raises(ValueError, match="of other weights than the run has now"):
        outcome(found.experiment, found.store)


def test_a_row_holds_what_the_answer_followed_from(run: Path, tmp_path: Path) -> None:
    """Options' log-likelihoods and lengths give the choice, and with gold the value, for every item."""
    ask_core(run, CoreConfig(bundle=str(write_bundle(tmp_path / "b"))))
    for score in read_answers(run / "core")["choose"].answers.scores:
        means = [total / length for total, length in zip(score.options, score.lengths, strict=True)]
        assert len(means) == 3
        assert all(total < 0 for total in score.options)
        assert score.value == (means.index(max(means)) == MC[int(score.item) - 1]["gold"])


def test_what_cannot_be_asked_is_said_and_the_rest_is_scored(run: Path, tmp_path: Path, xsalab: Any) -> None:
    """A missing file, too many examples, a broken line and a gold out of range: named and counted, by the command."""
    tasks = {
        "choose": {**TASKS["choose"], "items": [*MC[:4], "{", {**MC[5], "gold": 7}], "num_fewshot": [0]},
        "which": {**TASKS["which"], "num_fewshot": [9]},
        "next": TASKS["next"],
        "gone": {**TASKS["next"], "dataset_uri": "own/nowhere.jsonl"},
    }
    ran = xsalab("core", run, "--bundle", write_bundle(tmp_path / "b", tasks), "--json")
    assert ran.code == 0, ran.err
    content = json.loads(ran.out)
    assert set(content["tasks"]) == {"choose", "next"}
    assert content["tasks"]["choose"]["counts"]["skipped"] == 2
    assert "9 examples are asked for, and 3 other items" in content["left_out"]["which"]
    assert "nowhere.jsonl: missing from the bundle" in content["left_out"]["gone"]
    assert "the figure is over 2 of the bundle's 4 tasks" in content["notes"][-1]
    assert "choose: 2 items cannot be read and are left out" in ran.err
    assert "line 5: broken JSON" in ran.err or "line 6: gold = 7" in ran.err


def test_the_command_prints_tasks_and_figure(run: Path, tmp_path: Path, xsalab: Any) -> None:
    """With a choice of tasks it says that this is not CORE."""
    bundle = write_bundle(tmp_path / "b")
    ran = xsalab("core", run, "--bundle", bundle, "--tasks", "choose", "--max-per-task", 4)
    assert ran.code == 0, ran.err
    assert "33.3 %" in ran.out
    assert "the figure is over 1 of the bundle's 3 tasks: it is not CORE" in ran.out
    assert "a model that guesses at random" in ran.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "no bundle is given"),
        (("--bundle", "nowhere"), "no such folder or zip"),
        (("--bundle", "B", "--tasks", "essay"), "task 'essay' is not in"),
        (("--bundle", "B", "--max-per-task", "-1"), "max_per_task = -1"),
    ],
)
def test_a_mistake_is_one_line(run: Path, tmp_path: Path, xsalab: Any, words: tuple[str, ...], message: str) -> None:
    bundle = str(write_bundle(tmp_path / "b"))
    ran = xsalab("core", run, *(bundle if word == "B" else word for word in words))
    assert ran.code == 2
    assert message in ran.err
    assert "Traceback" not in ran.err


def test_a_run_that_is_not_there_is_said(tmp_path: Path, xsalab: Any) -> None:
    ran = xsalab("core", tmp_path / "gone", "--bundle", write_bundle(tmp_path / "b"))
    assert ran.code == 2
    assert "no run here" in ran.err


def test_a_nanochat_checkpoint_is_asked_as_it_is(shared_data: Path, tmp_path: Path, xsalab: Any) -> None:
    """Its answers lie under --out, and the checkpoint's folder is left alone."""
    checkpoint = shared_data / "nanochat_d4"
    before = sorted(path.name for path in checkpoint.iterdir())
    ran = xsalab("core", checkpoint, "--bundle", write_bundle(tmp_path / "b"), "--out", tmp_path / "out", "--json")
    assert ran.code == 0, ran.err
    folder = Path(json.loads(ran.out)["folder"])
    assert folder == tmp_path / "out" / "nanochat" / "nanochat_d4-000120" / "core"
    assert len(read_answers(folder)) == 3
    assert "standard attention" in ran.err, "what it is taken as is said"
    assert sorted(path.name for path in checkpoint.iterdir()) == before
