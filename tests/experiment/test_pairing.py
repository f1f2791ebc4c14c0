"""What a pair is: the same in everything but its declared factors, and the experiment's own runs."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from xsalab.experiment.design import contrasts
from xsalab.experiment.outcome import outcome
from xsalab.experiment.pairing import describe, mismatch, pairs
from xsalab.experiment.store import RunFolder, write_rows

FINGERPRINT: dict[str, Any] = {
    "config": {"seed": 0, "optim": {"lr_scale": 1.0}, "variant": {"name": "standard", "options": {}}},
    "start": {"embedding.weight": "aa", "head.weight": "bb"},
    "rows": "r", "corpus": "c", "evaluation": "e", "code": "k", "machine": "m",
    "environment": {"torch": "2.13.0", "threads": 1, "kernel": "sdpa, eager, float32"},
    "plugins": {},
}  # fmt: skip


def changed(**parts: Any) -> dict[str, Any]:
    """The fingerprint with tables merged one level deep."""
    return {
        key: {**value, **parts[key]} if isinstance(value, dict) and key in parts else parts.get(key, value)
        for key, value in FINGERPRINT.items()
    }


@pytest.mark.parametrize(
    ("other", "factors", "undeclared"),
    [
        ({}, (), []),
        ({"config": {"variant": {"name": "xsa", "options": {"alpha": 1.0}}}}, ("variant",), []),
        ({"config": {"optim": {"lr_scale": 0.5}}}, ("variant",), ["optim.lr_scale"]),
        ({"config": {"optim": {"lr_scale": 0.5}}}, ("variant", "optim.lr_scale"), []),
        ({"start": {"embedding.weight": "zz"}}, ("variant",), ["start.embedding.weight"]),
        ({"start": {"blocks.0.attention.variant.raw": "zz"}}, ("variant",), []),  # a parameter of one alone
        ({"start": {"embedding.weight": "zz"}}, ("model.width",), []),
        ({"start": {"embedding.weight": "zz"}}, ("train.dtype",), []),
        ({"rows": "s"}, ("optim.lr_scale",), ["rows"]),
        ({"rows": "s"}, ("train.batch_tokens",), []),
        ({"environment": {"kernel": "blocked"}}, ("train.attention",), []),
        ({"environment": {"kernel": "blocked"}}, ("optim.kind",), ["environment.kernel"]),
        ({"environment": {"torch": "1.0"}}, ("train.attention", "train.device"), ["environment.torch"]),
        ({"code": "l"}, ("variant",), ["code"]),
    ],
)
def test_a_factor_explains_what_follows_from_it_alone(
    other: dict[str, Any], factors: tuple[str, ...], undeclared: list[str]
) -> None:
    """F048: shared weights, rows, software and code agree, unless a declared factor changes them by its nature."""
    assert list(mismatch(FINGERPRINT, changed(**other), factors)) == undeclared


def test_a_plugin_of_one_side_is_no_difference_and_two_texts_are() -> None:
    plain, one, two = (changed(plugins=found) for found in ({}, {"a.py": "1"}, {"a.py": "2"}))
    assert not mismatch(plain, one, ("variant",))
    assert list(mismatch(one, two, ("variant",))) == ["plugins.a.py"]


def test_the_first_differences_in_words() -> None:
    found = {f"field{n}": (n, "x" * 99) for n in range(6)}
    text = describe(found)
    assert text.startswith("field0: 0 against 'xxx")
    assert text.endswith("…; and 2 more")
    assert len(text) < 400


@pytest.fixture
def done(lab: Any) -> Any:
    """Standard and xsa at three seeds, finished."""
    home = lab(seeds=[0, 1, 2])
    home.run_all()
    return home


def edit(run: RunFolder, change: Callable[[dict[str, Any]], Any], file: str = "fingerprint") -> None:
    content = run.read(file)
    change(content)
    run.write(file, content)


def test_pairs_join_seeds_and_documents(done: Any) -> None:
    """The table holds every document of every run, nats and bytes as they were stored."""
    found = pairs(done.experiment, done.store, contrasts(done.experiment)[0])
    assert found.table is not None
    assert (found.seeds, found.unfinished, found.diverged_treatment) == ((0, 1, 2), (), ())
    for row, seed in enumerate(found.seeds):
        for side, arm in ((found.table.treatment, "xsa"), (found.table.baseline, "standard")):
            scores = done.folder(arm, seed).scores()
            assert side[row].tolist() == [scores[item][0] for item in found.table.items]
            assert found.table.weights.tolist() == [scores[item][1] for item in found.table.items]
    assert list(found.differs) == ["variant.name"]


def test_a_pair_that_differs_in_an_undeclared_field_is_refused(done: Any) -> None:
    """Whatever was changed on the disk after the runs: the field and both values are named."""
    run = done.folder("xsa", 1)
    edit(run, lambda content: content["environment"].update(torch="1.13.0"))
    words = r"base.xsa.s1 and base.standard.s1 are no pair: environment.torch: '1.13.0' against .*Declare the field"
    with pytest.raises(ValueError, match=words):
        outcome(done.experiment, done.store)


def test_a_run_of_another_configuration_is_not_pooled(done: Any) -> None:
    """F167: a mean over three seeds, of which one pair trained other layers: refused with the run and the field."""
    for arm in ("xsa", "standard"):
        edit(done.folder(arm, 2), lambda content: content["config"]["variant"].update(layers="last:1"))
    with pytest.raises(
        ValueError, match=r"base.xsa.s2: holds a run of another configuration: variant.layers: 'last:1'"
    ):
        outcome(done.experiment, done.store)


def test_an_edited_experiment_does_not_rename_its_runs(done: Any, lab: Any) -> None:
    """F167: alpha = 0.5 written into the file after the runs is not what the runs were."""
    other = lab(seeds=[0, 1, 2], arms__xsa__alpha=0.5)
    with pytest.raises(
        ValueError, match=r"another configuration: variant.options.alpha: None against 0.5\. .*--set too"
    ):
        outcome(other.experiment, other.store)


def test_seeds_of_two_plugin_texts_are_not_pooled(done: Any) -> None:
    """F167: the code of a variant belongs to its configuration."""
    edit(done.folder("xsa", 0), lambda content: content.update(plugins={"mine.py": "1"}))
    edit(done.folder("xsa", 1), lambda content: content.update(plugins={"mine.py": "2"}))
    with pytest.raises(ValueError, match=r"base.xsa.s1: trained with another text of plugin mine.py"):
        outcome(done.experiment, done.store)


def test_scores_of_other_documents_are_refused(done: Any) -> None:
    run = done.folder("xsa", 1)
    scores = [{"task": "bpb", "item": item, "value": v, "weight": w} for item, (v, w) in run.scores().items()]
    first = re.escape(repr(scores[0]["item"]))
    write_rows(run.path / "scores.parquet", scores[1:])
    with pytest.raises(ValueError, match=f"xsa, seed 1: scored on other documents: {first} is in seed 0 alone"):
        outcome(done.experiment, done.store)
    scores[1]["weight"] += 1
    write_rows(run.path / "scores.parquet", scores)
    second = re.escape(repr(scores[1]["item"]))
    with pytest.raises(ValueError, match=f"xsa, seed 1: scored on other documents: {second} has weight .* in seed 1, "):
        outcome(done.experiment, done.store)


def test_arms_scored_on_other_documents_are_refused(done: Any) -> None:
    """Every seed of one arm alike: the message names the arms, the seed and the first document."""
    for seed in (0, 1, 2):
        run = done.folder("xsa", seed)
        scores = [{"task": "bpb", "item": item, "value": v, "weight": w} for item, (v, w) in run.scores().items()]
        write_rows(run.path / "scores.parquet", scores[1:])
    item = re.escape(repr(scores[0]["item"]))
    words = f"xsa and standard, seed 0: scored on different documents: {item} is in standard alone"
    with pytest.raises(ValueError, match=words):
        outcome(done.experiment, done.store)


@pytest.mark.parametrize("content", ["", "{}", '{"config": 3}'], ids=["missing", "empty", "damaged"])
def test_a_fingerprint_that_is_not_whole_is_one_message(content: str, done: Any) -> None:
    path = done.folder("xsa", 1).path / "fingerprint.json"
    if content:
        path.write_text(content, encoding="utf-8")
    else:
        path.unlink()
    with pytest.raises(ValueError, match=r"base.xsa.s1/fingerprint.json: .*; delete the run's folder to run it again"):
        outcome(done.experiment, done.store)


def test_a_status_without_its_value_is_one_message(done: Any) -> None:
    done.folder("xsa", 1).write("status", {"state": "finished"})
    with pytest.raises(ValueError, match=r"base.xsa.s1/status.json: a finished run without its value; delete"):
        outcome(done.experiment, done.store)


def test_missing_scores_are_one_message(done: Any) -> None:
    (done.folder("xsa", 1).path / "scores.parquet").unlink()
    with pytest.raises(ValueError, match=r"base.xsa.s1/scores.parquet: missing: .*; delete the run's folder"):
        outcome(done.experiment, done.store)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.update(machine="other"),
        lambda content: content["environment"].update(torch="2.12.0"),
        lambda content: content.update(code="other"),
    ],
    ids=["machine", "software", "code"],
)
def test_seeds_made_elsewhere_are_flagged(change: Callable[[dict[str, Any]], None], done: Any) -> None:
    """F168, F169: whole pairs made elsewhere may stand beside the others, with a warning: no claim about time."""
    for arm in ("xsa", "standard"):
        edit(done.folder(arm, 2), change)
    said = outcome(done.experiment, done.store)
    assert len(said["environments"]) == 2
    assert any("different machines or software" in line for line in said["warnings"])


@pytest.mark.parametrize(
    ("arm", "state", "counted"),
    [
        ("xsa", "diverged", "diverged_treatment"),
        ("standard", "diverged", "diverged_baseline"),
        ("xsa", "running", "unfinished"),
        ("standard", "failed", "unfinished"),
    ],
)
def test_a_pair_that_lacks_a_run_is_counted(arm: str, state: str, counted: str, done: Any) -> None:
    edit(done.folder(arm, 1), lambda content: content.update(state=state), "status")
    found = pairs(done.experiment, done.store, contrasts(done.experiment)[0])
    assert found.seeds == (0, 2)
    for name in ("diverged_treatment", "diverged_baseline", "unfinished"):
        assert getattr(found, name) == ((1,) if name == counted else ())


@pytest.mark.parametrize(("seeds", "words"), [([0], "not decidable"), ([0, 1], "not decidable")], ids=["one", "two"])
def test_few_or_equal_pairs_give_no_number_that_is_none(seeds: list[int], words: str, done: Any) -> None:
    """F164: one pair, and pairs without any spread: said, and never NaN."""
    for seed in seeds:  # the arms score alike: every difference is 0
        source, target = (done.folder(arm, seed).path / "scores.parquet" for arm in ("standard", "xsa"))
        shutil.copy(source, target)
    few = dataclasses.replace(done.experiment, seeds=tuple(seeds))
    said = outcome(few, done.store)
    json.dumps(said, allow_nan=False)
    assert said["contrasts"][0]["verdict"]["word"] == words


def test_the_mean_is_the_headline_and_no_best_is_offered(done: Any) -> None:
    """F053: three seeds: the mean, its interval and all three values; no key tells of a best one."""
    said = outcome(done.experiment, done.store)
    row = said["contrasts"][0]
    table = pairs(done.experiment, done.store, contrasts(done.experiment)[0]).table
    assert table is not None
    bytes_ = table.weights.sum() * np.log(2)
    expected = (table.treatment.sum(1) - table.baseline.sum(1)) / bytes_
    assert row["differences"] == pytest.approx(expected.tolist())
    assert row["estimate"]["mean"] == pytest.approx(expected.mean())
    assert "best" not in repr(sorted(row)) + repr(sorted(said))
