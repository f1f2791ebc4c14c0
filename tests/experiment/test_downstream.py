from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval.bundles import TASKS, write_bundle
from eval.chat_items import write_tasks
from xsalab.experiment.answers import read_answers
from xsalab.experiment.downstream import carry_out, downstream_tasks, read_downstream
from xsalab.experiment.store import RunFolder

TALK = [
    [{"role": "user", "content": f"token{n} and layer{n}?"}, {"role": "assistant", "content": f"value{n} of head{n}."}]
    for n in range(30)
]


@pytest.fixture
def tables(tmp_path: Path) -> dict[str, Any]:
    """What is asked after training, in files beside the experiment's."""
    write_bundle(tmp_path / "b")
    write_bundle(tmp_path / "own", {"mine": TASKS["which"]})
    write_tasks(tmp_path / "chat")
    text = "".join(json.dumps({"messages": messages}) + "\n" for messages in TALK)
    (tmp_path / "talk.jsonl").write_text(text, encoding="utf-8")
    return {
        "core": {"bundle": "b"},
        "tasks": {"bundle": "own", "max_per_task": 2},
        "sft": {"sources": ["talk.jsonl x 2"], "batch_tokens": 64, "steps": 2},
        "chatcore": {"data": "chat", "max_categorical": 3, "max_generated": 2, "max_new_tokens": 4},
    }


def test_paths_are_relative_to_the_file(tmp_path: Path, tables: dict[str, Any]) -> None:
    """Addresses and the hub stay as they are; the repetition behind a source too."""
    found = read_downstream(tables, tmp_path / "e.toml")
    assert found is not None
    assert found.core is not None
    assert found.core.bundle == str(tmp_path / "b")
    assert found.sft is not None
    assert found.sft.sources == (f"{tmp_path / 'talk.jsonl'} x 2",)
    assert found.chatcore is not None
    assert found.chatcore.data == str(tmp_path / "chat")
    hub = read_downstream({"sft": {"sources": ["hub:gsm8k x 4"]}, "chatcore": {}}, tmp_path / "e.toml")
    assert hub is not None
    assert hub.sft is not None
    assert hub.sft.sources == ("hub:gsm8k x 4",)
    assert hub.chatcore is not None
    assert hub.chatcore.data == "hub"
    assert read_downstream({}, tmp_path / "e.toml") is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"core__bundel": "b"}, "unknown field bundel"),
        ({"core": {}}, "core.bundle is missing"),
        ({"core": "b"}, r"must be a table, \[core\]"),
        ({"core": {"bundle": "nowhere"}}, "no such folder or zip"),
        ({"sft__sources": ["nowhere.jsonl"]}, "nowhere.jsonl"),
        ({"chatcore__data": "nowhere"}, "chatcore.data = .*: no such folder"),
    ],
)
def test_a_mistake_is_found_before_anything_is_trained(
    write_experiment: Callable[..., Path], tables: dict[str, Any], changes: dict[str, Any], message: str, xsalab: Any,
    tmp_path: Path,
) -> None:  # fmt: skip
    path = write_experiment(**{**tables, **changes})
    ran = xsalab("run", path, "--out", tmp_path / "out")
    assert ran.code == 2
    assert not list((tmp_path / "out").rglob("metrics*"))
    import re

    assert re.search(message, ran.err), ran.err


def test_a_run_is_asked_all_of_it_once(lab: Callable[..., Any], tables: dict[str, Any]) -> None:
    """CORE of the base model, fine-tuning, ChatCORE of the fine-tuned one; then nothing is left to ask."""
    found = lab(**tables)
    run = found.run("xsa")
    (task,) = downstream_tasks(found.experiment, found.store)
    assert task.folder == run.path
    events: list[dict[str, Any]] = []
    assert carry_out(task, lambda cell, content: events.append(content)) == "asked"
    assert set(read_answers(run.path / "core")) == {"choose", "which", "next"}
    assert len(read_answers(run.path / "tasks")["mine"].answers.scores) == 2
    assert RunFolder(run.path / "sft").state == "finished"
    assert len(read_answers(run.path / "sft" / "chatcore")) == 4  # code is not run unless asked for
    done = {event["part"]: event["done"] / event["total"] for event in events if event["kind"] == "part"}
    assert done == {"core": 1.0, "tasks": 1.0, "sft": 1.0, "chatcore": 1.0}
    assert any("HumanEval" in event.get("text", "") for event in events)
    assert downstream_tasks(found.experiment, found.store) == []


def test_another_question_asks_again_and_the_twin_is_never_asked(
    lab: Callable[..., Any], tables: dict[str, Any], tmp_path: Path
) -> None:
    found = lab(core=tables["core"], controls__twin=True)
    found.run("standard")
    found.run("twin")
    tasks = downstream_tasks(found.experiment, found.store)
    assert [task.cell.arm for task in tasks] == ["standard"]
    carry_out(tasks[0])
    assert downstream_tasks(found.experiment, found.store) == []
    write_bundle(tmp_path / "b", {"next": {"icl_task_type": "language_modeling", "items": [{"context": "a"}] * 2}})
    with pytest.raises(ValueError, match="no item can be asked"):
        downstream_tasks(found.experiment, found.store)
    write_bundle(tmp_path / "b")
    assert len(downstream_tasks(found.experiment, found.store)) == 1


@pytest.mark.slow
def test_one_command_ends_with_everything_in_one_report(
    write_experiment: Callable[..., Path], tables: dict[str, Any], tmp_path: Path, xsalab: Any
) -> None:
    """bpb, CORE, the loss of fine-tuning and ChatCORE; the second call asks nothing and says the same."""
    path = write_experiment(**tables)
    first = xsalab("run", path, "--out", tmp_path / "out", "--jobs", 1, "--json")
    assert first.code == 0, first.err
    content = json.loads(first.out)
    names = " ".join(row["name"] for row in content["benchmarks"])
    assert "CORE" in names
    assert "ChatCORE" in names
    assert "task score" in names
    assert "chat bpb" in names
    page = Path(content["report"]).read_text(encoding="utf-8")
    assert "CORE" in page
    second = xsalab("run", path, "--out", tmp_path / "out", "--jobs", 1, "--json")
    assert "to ask" not in second.err
    assert json.loads(second.out)["benchmarks"] == content["benchmarks"]
