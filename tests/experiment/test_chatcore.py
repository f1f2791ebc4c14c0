from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval.chat_items import write_tasks
from xsalab.eval import chat_core as chat_core_module
from xsalab.eval.chat_prompts import ChatCoreConfig
from xsalab.experiment.answers import read_answers
from xsalab.experiment.chatcore import ask_chat_core
from xsalab.experiment.run import load_run

SMALL = ("--max-categorical", 3, "--max-generated", 2, "--max-new-tokens", 4)
FOUR = {"ARC-Easy", "ARC-Challenge", "MMLU", "GSM8K"}


@pytest.fixture
def base(lab: Callable[..., Any]) -> Path:
    return lab().run().path


def tuned(base: Path) -> Path:
    """RUN/sft as fine-tuning leaves it, with the base model's weights."""
    folder = base / "sft"
    folder.mkdir()
    for name in ("status.json", "model.safetensors"):
        shutil.copy(base / name, folder / name)
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "sft": {}}), encoding="utf-8")
    return folder


def small(data: Path, **changes: Any) -> ChatCoreConfig:
    return ChatCoreConfig(
        **{"data": str(data), "max_categorical": 3, "max_generated": 2, "max_new_tokens": 4, **changes}
    )


def refuse(*_: object, **__: object) -> Any:
    raise AssertionError("asked again")


def test_answers_are_kept_beside_the_base_run_and_not_asked_again(
    base: Path, tmp_path: Path, xsalab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command says that nothing was fine-tuned and why ChatCORE is not given; the second call asks nothing."""
    data = write_tasks(tmp_path / "chat")
    ran = xsalab("chatcore", base, "--data", data, *SMALL, "--json")
    assert ran.code == 0, ran.err
    content = json.loads(ran.out)
    assert content["folder"] == str(base / "chatcore")
    assert not content["fine_tuned"]
    assert content["ChatCORE"] is None
    assert set(content["tasks"]) == FOUR
    assert {name: row["items"] for name, row in content["tasks"].items()} == {
        "ARC-Easy": 3, "ARC-Challenge": 3, "MMLU": 3, "GSM8K": 2,
    }  # fmt: skip
    centred = [content["tasks"][name]["centred"] for name in ("ARC-Easy", "ARC-Challenge", "MMLU")]
    assert content["ChatCORE_cat"] == pytest.approx(sum(centred) / 3)
    assert "--run-code" in content["left_out"]["HumanEval"]
    assert any("not fine-tuned" in text for text in content["notes"])
    assert any("not given without HumanEval" in text for text in content["notes"])
    stored = {name: found.answers for name, found in read_answers(base / "chatcore").items()}
    assert {name: found.accuracy for name, found in stored.items()} == {
        name: row["accuracy"] for name, row in content["tasks"].items()
    }

    monkeypatch.setattr(chat_core_module, "letter_likelihoods", refuse)
    monkeypatch.setattr(chat_core_module, "generate_batch", refuse)
    again = xsalab("chatcore", base, "--data", data, *SMALL)
    assert again.code == 0
    first = [line.split()[0] for line in again.out.splitlines() if line.strip()]
    assert first[:5] == ["task", "ARC-Easy", "ARC-Challenge", "MMLU", "GSM8K"]
    assert "ChatCORE_cat" in again.out
    assert "not run" in again.out
    (base / "chatcore" / "MMLU.parquet").unlink()
    with pytest.raises(AssertionError, match="asked again"):
        ask_chat_core(base, small(data))


def test_the_fine_tuned_model_is_asked_where_it_is_there(base: Path, tmp_path: Path) -> None:
    """RUN and RUN/sft are the same request; nothing is said of a missing fine-tuning."""
    data, sft = write_tasks(tmp_path / "chat"), tuned(base)
    for folder in (base, sft):
        result = ask_chat_core(folder, small(data, tasks=("ARC-Easy",)))
        assert result.folder.resolve() == (sft / "chatcore").resolve()
        assert result.fine_tuned
        assert not any("fine-tuned" in note for note in result.notes())
    assert not (base / "chatcore").exists()


def test_an_interrupted_call_goes_on_where_it_stopped(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was complete is there, whole, and is taken as it is."""
    data = write_tasks(tmp_path / "chat")

    def interrupt(done: float, total: float, task: str) -> None:
        if task == "MMLU":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask_chat_core(base, small(data), progress=interrupt)
    kept = {name: found.answers for name, found in read_answers(base / "chatcore").items()}
    assert set(kept) == {"ARC-Easy", "ARC-Challenge"}
    asked: list[int] = []
    plain = chat_core_module.letter_likelihoods
    monkeypatch.setattr(
        chat_core_module, "letter_likelihoods", lambda *a, **b: asked.append(len(a[1])) or plain(*a, **b)
    )
    result = ask_chat_core(base, small(data))
    assert asked == [3]
    assert {name: result.answers[name] for name in kept} == kept
    assert set(result.answers) == FOUR


def test_samples_are_told_as_pass_at_k(base: Path, tmp_path: Path, xsalab: Any) -> None:
    """F152: k beyond the samples is told as not available."""
    data = write_tasks(tmp_path / "chat")
    arguments = ("chatcore", base, "--data", data, *SMALL, "--tasks", "GSM8K")
    ran = xsalab(*arguments, "--samples", 2, "--temperature", 0.8, "--k", 1, "--k", 10)
    assert ran.code == 0, ran.err
    assert "GSM8K pass@1: 0.0 %" in ran.out
    assert "GSM8K pass@10: not available" in ran.out
    assert "without ARC-Easy, ARC-Challenge, MMLU, HumanEval" in ran.out


def test_mistakes_are_told_in_one_message(base: Path, tmp_path: Path, xsalab: Any) -> None:
    xsalab("chatcore", base, "--data", tmp_path / "none").refused("no such folder", "none")
    xsalab("chatcore", base, "--samples", 3).refused("samples = 3 at temperature 0")
    xsalab("chatcore", base, "--tasks", "ARC").refused("ARC-Easy", "HumanEval")
    (tmp_path / "empty").mkdir()
    xsalab("chatcore", base, "--data", tmp_path / "empty", "--tasks", "MMLU").refused("mmlu_test.jsonl: no such file")
    xsalab("chatcore", tmp_path, "--data", tmp_path).refused("no run here")
    assert not (base / "chatcore").exists()


@pytest.mark.slow
def test_programs_are_run_where_that_is_allowed(
    base: Path, tmp_path: Path, xsalab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All five tasks: solutions put in place of generation pass in the real sandbox, and ChatCORE is given."""
    data = write_tasks(tmp_path / "chat")
    _, corpus, _ = load_run(base)
    tokenizer = corpus.tokenizer

    def solve(model: Any, prompts: Any, **settings: Any) -> list[list[int]]:
        texts = []
        for prompt in map(tokenizer.decode, prompts):
            number = prompt.split("Adds ")[1].split(".")[0] if "Adds " in prompt else ""
            texts.append(f"```python\ndef add_{number}(x):\n    return x + {number}\n```" if number else "no")
        return tokenizer.encode(texts)

    monkeypatch.setattr(chat_core_module, "generate_batch", solve)
    ran = xsalab("chatcore", base, "--data", data, *SMALL, "--run-code", "--json")
    if ran.code == 2 and "cannot be run safely here" in ran.err:
        pytest.skip("no isolation on this machine")
    assert ran.code == 0, ran.err
    content = json.loads(ran.out)
    assert content["tasks"]["HumanEval"]["accuracy"] == 1.0
    assert content["ChatCORE"] == pytest.approx(sum(row["centred"] for row in content["tasks"].values()) / 5)
    assert "programs are run with" in ran.err
