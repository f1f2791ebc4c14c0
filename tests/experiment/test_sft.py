"""Fine-tuning: it starts from the base model's very logits, runs by the same loop, and leaves a whole run."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from toml_tables import write_tables
from xsalab.config import build
from xsalab.data import Tokenizer
from xsalab.eval.bits_per_byte import answer_bits_per_byte, total_bpb
from xsalab.experiment import hooks, sft
from xsalab.experiment.design import Cell
from xsalab.experiment.fleet import begin_experiment, tasks
from xsalab.experiment.pairing import mismatch
from xsalab.experiment.reading import load_experiment
from xsalab.experiment.run import load_run, run_cell
from xsalab.experiment.sft import SftConfig, fine_tune, sft_config
from xsalab.experiment.store import RunFolder, read_parquet
from xsalab.model import GPT
from xsalab.train import StepMetrics, TrainState

TINY: dict[str, Any] = {
    "name": "tiny",
    "seeds": [0, 1],
    "model": {"depth": 2, "width": 32, "heads": 2, "context": 32, "vocab_size": 300, "window_block": 8},
    "optim": {"warmup_steps": 2},
    "train": {"tokens": 1024, "batch_tokens": 256, "dtype": "float32", "checkpoint_steps": 2},
    "controls": {"null": False, "twin": False, "timing": False},
}
ARMS: dict[str, Any] = {
    "standard": {},
    "fixed": {"variant": "xsa", "alpha": 0.5},
    "learned": {"variant": "xsa", "alpha": {"learned": "tanh", "start": 0.3}},
    "scheduled": {"variant": "xsa", "alpha": {"from": 0.0, "to": 0.9}},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, corpus_folder: Path) -> Path:
    """The folder of a tiny experiment with a finished run of each arm, and one of seed 1."""
    home = tmp_path_factory.mktemp("sft")
    tables = {**TINY, "data": {"source": str(corpus_folder), "validation_fraction": 0.15}, "arms": ARMS}
    experiment = load_experiment(write_tables(home / "tiny.toml", tables, {}))
    begin_experiment(experiment, home / "out")
    for task in tasks(experiment, home / "out"):
        if task.cell.seed == 0 or task.cell.arm == "standard":
            assert run_cell(task) == "finished"
    return home / "out"


@pytest.fixture
def out(trained: Path, tmp_path: Path) -> Path:
    """A copy that a test may fine-tune and damage."""
    return shutil.copytree(trained, tmp_path / "out")


def run_of(out: Path, arm: str = "standard", seed: int = 0) -> Path:
    return out / "experiments" / "tiny" / "runs" / Cell("base", arm, seed).name


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    """Eighty short conversations whose answers are easy to learn."""
    path = tmp_path / "talks.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number in range(80):
            turns = [{"role": "user", "content": f"n{number}?"}, {"role": "assistant", "content": f"yes {number}"}]
            file.write(json.dumps({"messages": turns}) + "\n")
    return path


@pytest.fixture
def config(talks: Path) -> SftConfig:
    return SftConfig((str(talks),), validation_fraction=0.1)


def numbers(run: RunFolder) -> dict[str, Any]:
    rows = [{key: value for key, value in row.items() if not key.endswith("seconds")} for row in run.metrics()]
    return {"weights": run.status["weights"], "rows": rows, "scores": run.scores()}


class Stop(Exception):
    """Ends a run where a test wants it."""


@pytest.fixture
def stop(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, SftConfig, int], None]:
    """Fine-tunes until ``step`` is done and stops it there, as an error would."""

    def until(run: Path, config: SftConfig, step: int) -> None:
        plain = hooks.Metrics.after_step

        def after_step(self: Any, state: TrainState, metrics: StepMetrics) -> None:
            plain(self, state, metrics)
            if metrics.step == step:
                raise Stop

        with monkeypatch.context() as patch:
            patch.setattr(hooks.Metrics, "after_step", after_step)
            with pytest.raises(Stop):
                fine_tune(run, config)

    return until


# ------------------------------------------------------------------------------------------- from where it starts


@pytest.mark.parametrize("arm", ARMS)
def test_step_0_has_the_base_model_s_logits(
    arm: str, out: Path, config: SftConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F026: to the bit, in short windows and for every form of α; a schedule stays at its end, to the last step."""
    tokens = torch.arange(60).reshape(2, 30)
    seen: list[torch.Tensor] = []
    alphas: list[dict[str, float]] = []
    plain = sft.answer_bits_per_byte

    def watch(model: GPT, *arguments: Any) -> Any:
        with torch.no_grad():
            seen.append(model(tokens))
        alphas.append(model.variants()[0].logged())
        return plain(model, *arguments)

    monkeypatch.setattr(sft, "answer_bits_per_byte", watch)
    model, _, base = load_run(run_of(out, arm))
    assert model.config.window_of(0) < tokens.shape[1], "the window must matter"
    tuned = fine_tune(run_of(out, arm), config)
    with torch.no_grad():
        expected = model(tokens)
    assert len(seen) == 2
    assert torch.equal(seen[0], expected)
    assert not torch.equal(seen[1], expected), "nothing was learned"
    assert alphas[0] == model.variants()[0].logged()
    if arm == "scheduled":
        assert [alpha["alpha"] for alpha in alphas] == pytest.approx([0.9, 0.9])
        assert {row["layer0.alpha"] for row in RunFolder(tuned).metrics() if "loss" in row} == {alphas[0]["alpha"]}
    last, _, own = load_run(tuned)
    with torch.no_grad():
        assert torch.equal(last(tokens), seen[1]), "what is loaded is what was scored last"
    assert (own.variant, own.model, own.seed, own.data) == (base.variant, base.model, base.seed, base.data)


def test_rates_are_a_fraction_of_the_base_s(out: Path, config: SftConfig) -> None:
    """0.8 of every rate, no warm-up, half of it warm-down to nothing, no decay: nanochat's chat_sft.py."""
    run = run_of(out)
    tuned = RunFolder(fine_tune(run, config))
    before, after = (folder.read("config")["derived"] for folder in (RunFolder(run), tuned))
    assert after["lr"] == pytest.approx({group: 0.8 * rate for group, rate in before["lr"].items()})
    assert after["matrix_weight_decay"] == 0
    factors = [row["lr_factor"] for row in tuned.metrics() if "loss" in row]
    steps = len(factors)
    assert factors == pytest.approx([min(1.0, 2 * (1 - step / steps)) for step in range(steps)])  # F120
    optim = tuned.read("config")["config"]["optim"]
    assert (optim["momentum_start"], optim["momentum_peak"], optim["momentum_steps"]) == (0.85, 0.95, 300)
    assert optim["adamw_weight_decay"] == optim["plain_muon_weight_decay"] == 0


def test_epochs_steps_and_batches(out: Path, config: SftConfig) -> None:
    """F121: as many updates as passes over the rows need, rounded up; or as many steps as asked."""
    run = run_of(out)
    tuned = RunFolder(fine_tune(run, dataclasses.replace(config, epochs=2.4, batch_tokens=96)))
    rows = json.loads(next((out / "chat").glob("*/manifest.json")).read_text(encoding="utf-8"))["packing"]["rows"]
    losses = [row for row in tuned.metrics() if "loss" in row]
    assert len(losses) == tuned.status["steps"] == -(-12 * rows // (5 * 3))
    assert {row["tokens"] for row in losses} == {96}
    shutil.rmtree(tuned.path)
    tuned = RunFolder(fine_tune(run, dataclasses.replace(config, steps=3, eval_every=2)))
    assert [row["step"] for row in tuned.metrics() if "loss" in row] == [0, 1, 2]
    assert [row["step"] for row in tuned.metrics() if "val_bpb" in row] == [0, 2, 3]


# ---------------------------------------------------------------------------------------------- what it leaves


def test_fine_tuning_leaves_a_whole_run(out: Path, config: SftConfig) -> None:
    """The files of a run, a row a held-out conversation, and better answers than before."""
    run = run_of(out, "fixed")
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    events: list[dict[str, Any]] = []
    tuned = RunFolder(fine_tune(run, config, event=events.append))
    assert tuned.path == run / "sft"
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()} == before
    assert sorted(path.name for path in tuned.path.iterdir() if path.name != ".lock") == [
        "config.json", "fingerprint.json", "metrics.parquet", "model.safetensors", "scores.parquet", "status.json",
    ]  # fmt: skip
    assert tuned.read("config")["sft"]["sources"] == list(config.sources)
    table = read_parquet(tuned.path / "scores.parquet").to_pylist()
    assert {row["task"] for row in table} == {"sft"}
    assert len(table) == 8
    numbers = [int(row["item"].rpartition(":")[2]) - 1 for row in table]
    assert [row["weight"] for row in table] == [len(f"yes {number}") for number in numbers]
    values = [row["val_bpb"] for row in tuned.metrics() if "val_bpb" in row]
    assert tuned.status["val_bpb"] == values[1] < values[0]
    assert next(event["kind"] for event in events if event["kind"] != "prepare") == "data"
    assert events[-1] == {**events[-1], "kind": "step", "step": tuned.status["steps"]}


def test_the_stored_weights_give_the_stored_scores(out: Path, config: SftConfig) -> None:
    """RUN/sft is loaded from its folder alone, with its tokenizer, and scores as it did."""
    tuned = fine_tune(run_of(out, "learned"), config)
    model, corpus, _ = load_run(tuned)
    assert corpus.folder.parent == (out / "corpora").resolve()
    chat = next((out / "chat").glob("*/manifest.json")).parent
    data = sft.ChatData(chat, json.loads((chat / "manifest.json").read_text(encoding="utf-8")))
    scores = answer_bits_per_byte(model, data.held_out(), corpus.tokenizer.bytes_per_token())
    assert {s.item: (s.value, s.weight) for s in scores} == RunFolder(tuned).scores()
    assert total_bpb(scores) == RunFolder(tuned).status["val_bpb"]


def test_the_arms_of_a_pair_see_the_same_batches(out: Path, config: SftConfig) -> None:
    """Everything but the variant agrees; another seed reads the same rows in another order."""
    found = [
        RunFolder(fine_tune(run_of(out, *which), config)).fingerprint()
        for which in (("standard", 0), ("fixed", 0), ("standard", 1))
    ]
    assert mismatch(found[0], found[1], ("variant",)) == {}
    assert set(mismatch(found[0], found[2], ("variant",))) == {"seed", "rows"}
    assert len(list((out / "chat").glob("*/rows.bin"))) == 1, "prepared once for all of them"


# ---------------------------------------------------------------------------------------------- stop and go on


@pytest.mark.parametrize(("step", "left"), [(1, 5), (2, 3), (4, 1)])
def test_a_stopped_fine_tuning_goes_on_to_the_bit(
    step: int, left: int, out: Path, config: SftConfig, stop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped before and behind a checkpoint (every two steps), it goes on from there; its record is whole."""
    config = dataclasses.replace(config, steps=5)
    one, two = run_of(out, "scheduled"), run_of(shutil.copytree(out, out.parent / "other"), "scheduled")
    whole = numbers(RunFolder(fine_tune(one, config)))
    stop(two, config, step)
    assert RunFolder(two / "sft").state == "failed"
    with pytest.raises(ValueError, match=r"sft: not finished \(failed\)"):
        load_run(two / "sft")
    plain, made = hooks.Metrics.after_step, []
    monkeypatch.setattr(hooks.Metrics, "after_step", lambda *given: made.append(given) or plain(*given))
    tuned = RunFolder(fine_tune(two, config))
    assert len(made) == left
    assert numbers(tuned) == whole
    assert tuned.status["resumes"] == 1


def test_a_second_call_does_nothing(out: Path, config: SftConfig, talks: Path) -> None:
    """Nothing is read or written, the conversations may even be gone."""
    run = run_of(out)
    tuned = fine_tune(run, config)
    before = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in tuned.iterdir()}
    talks.unlink()
    shutil.rmtree(out / "chat")
    assert fine_tune(run, config) == tuned
    assert {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in tuned.iterdir()} == before


def test_another_configuration_is_named(out: Path, config: SftConfig) -> None:
    """F099: nothing is trained, nothing is lost."""
    run = run_of(out)
    fine_tune(run, config)
    with pytest.raises(
        ValueError, match=r"sft: fine-tuned with another configuration: epochs: 1\.0 against 2\.0\. Give"
    ):
        fine_tune(run, dataclasses.replace(config, epochs=2.0))


def test_the_same_files_in_another_place_are_the_same(out: Path, config: SftConfig, talks: Path) -> None:
    """An experiment that was moved with its data goes on; a file of the same name with other text is another."""
    run = run_of(out)
    tuned = fine_tune(run, config)
    moved = talks.parent / "moved" / talks.name
    moved.parent.mkdir()
    talks.rename(moved)
    elsewhere = dataclasses.replace(config, sources=(str(moved),))
    assert fine_tune(run, elsewhere) == tuned
    other = RunFolder(fine_tune(run_of(out, "fixed"), elsewhere)).fingerprint()
    assert mismatch(RunFolder(tuned).fingerprint(), other, ("variant",)) == {}
    moved.write_text(moved.read_text(encoding="utf-8").replace("yes", "nay"), encoding="utf-8")
    with pytest.raises(ValueError, match=r"another configuration: sources: "):
        fine_tune(run, elsewhere)


def test_a_base_run_that_was_trained_again_is_noticed(out: Path, config: SftConfig) -> None:
    run = run_of(out)
    fine_tune(run, config)
    folder = RunFolder(run)
    folder.write("status", {**folder.status, "weights": "other"})
    with pytest.raises(ValueError, match=r"began from other weights than .* has now; delete that folder"):
        fine_tune(run, config)


@pytest.mark.parametrize("finished", [False, True])
def test_conversations_that_changed_under_the_same_name_are_refused(
    finished: bool, out: Path, config: SftConfig, talks: Path, stop: Any
) -> None:
    """The same command would give the old figures for new text. With the old text back it is the same run again."""
    run, before = run_of(out), talks.read_text(encoding="utf-8")
    if finished:
        fine_tune(run, config)
    else:
        stop(run, config, 1)
    talks.write_text(before.replace("yes", "nay"), encoding="utf-8")
    message = (
        rf"^{talks}: other contents \(SHA-256\) than {run}/sft .*; delete {run}/sft to fine-tune on the file as it is"
    )
    with pytest.raises(ValueError, match=message):
        fine_tune(run, config)
    talks.write_text(before, encoding="utf-8")
    assert RunFolder(fine_tune(run, config)).state == "finished"


def test_a_folder_of_conversations_that_changed_is_refused(out: Path, config: SftConfig, talks: Path) -> None:
    """A file more or a file less is another text too; one of the held-out sources as well."""
    one, two = talks.parent / "one", talks.parent / "two"
    for folder in (one, two):
        folder.mkdir()
        shutil.copy(talks, folder / "a.jsonl")
    lines = talks.read_text(encoding="utf-8").splitlines(keepends=True)
    (two / "a.jsonl").write_text("".join(lines[:8]).replace("yes", "no"), encoding="utf-8")
    shutil.copy(talks, one / "b.jsonl")
    run, config = run_of(out), dataclasses.replace(config, sources=(str(one),), validation=(str(two),))
    tuned = fine_tune(run, config)
    assert fine_tune(run, config) == tuned
    (one / "c.jsonl").write_text(lines[0], encoding="utf-8")
    with pytest.raises(ValueError, match=r"one/c\.jsonl: other contents"):
        fine_tune(run, config)
    (one / "c.jsonl").unlink()
    (one / "b.jsonl").unlink()
    with pytest.raises(ValueError, match=r"one, b\.jsonl: other contents"):
        fine_tune(run, config)
    shutil.copy(talks, one / "b.jsonl")
    (two / "a.jsonl").write_text("".join(lines[:9]), encoding="utf-8")
    with pytest.raises(ValueError, match=r"two/a\.jsonl: other contents"):
        fine_tune(run, config)


# ------------------------------------------------------------------------------------------------ refusals


def test_what_cannot_be_fine_tuned_is_named(out: Path, config: SftConfig, tmp_path: Path) -> None:
    run = run_of(out)
    tuned = fine_tune(run, config)
    with pytest.raises(ValueError, match=r"sft: is fine-tuned already; give the base run, .*base\.standard\.s0$"):
        fine_tune(tuned, config)
    with pytest.raises(ValueError, match=r"runs: no run here \(config\.json is missing\); give a folder"):
        fine_tune(run.parent, config)
    folder = RunFolder(run_of(out, "fixed"))
    folder.write("status", {"state": "running", "step": 2, "steps": 4})
    with pytest.raises(ValueError, match=r"base\.fixed\.s0: running, not finished: only a whole run"):
        fine_tune(folder.path, config)
    assert not (folder.path / "sft").exists()
    folder.write("config", {"config": {"command": {}}})
    with pytest.raises(ValueError, match=r"a command's run: its model is the command's own"):
        fine_tune(folder.path, config)


def test_a_tokenizer_without_chat_tokens_is_named(out: Path, config: SftConfig, monkeypatch: Any) -> None:
    """Before any conversation is read."""
    plain = sft.open_corpus

    def bare(*arguments: Any) -> Any:
        corpus = plain(*arguments)
        content = json.loads(json.dumps(corpus.tokenizer._json))
        content["added_tokens"] = content["added_tokens"][:2]  # <|bos|> and <|pad|>
        return dataclasses.replace(corpus, tokenizer=Tokenizer(json.dumps(content)))

    monkeypatch.setattr(sft, "open_corpus", bare)
    with pytest.raises(ValueError, match=r"tokenizer\.json: no special token <\|user_start\|>, "):
        fine_tune(run_of(out), config)


def test_too_few_conversations_for_a_batch(out: Path, config: SftConfig) -> None:
    with pytest.raises(
        ValueError, match=r"sft\.batch_tokens = 256: 8 rows a batch, but .* fill (\d); use at most \d+,"
    ):
        fine_tune(run_of(out), dataclasses.replace(config, max_conversations=10))
    with pytest.raises(
        ValueError,
        match=r"sft\.batch_tokens = 100: train\.batch_tokens = 100 is not a multiple of context = 32: use 96 or 128",
    ):
        fine_tune(run_of(out), dataclasses.replace(config, batch_tokens=100))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sources", []), ("sources", ["hub:nothing"]), ("validation", ["a.jsonl x 2"]), ("validation_fraction", 0.0),
        ("validation_conversations", 0), ("max_conversations", -1), ("epochs", 0.0), ("steps", -1),
        ("batch_tokens", -1), ("lr_fraction", 0.0), ("warmup", 1.0), ("warmdown", 0.0), ("final_lr", -0.1),
        ("weight_decay", -1.0), ("eval_every", -1),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"sft: {field}"):
        build(SftConfig, {"sources": ["a.jsonl"], field: value}, "sft")


def test_a_table_without_sources_says_so() -> None:
    with pytest.raises(ValueError, match="sft: field sources is missing"):
        build(SftConfig, {}, "sft")


def test_assignments_of_the_command_line() -> None:
    config = sft_config(["a.jsonl", "hub:mmlu x 3"], ["sft.epochs=2", 'sft.validation=["b.jsonl"]'])
    assert config == SftConfig(("a.jsonl", "hub:mmlu x 3"), ("b.jsonl",), epochs=2)
    for wrong in ("epochs=2", "sft.epochs", "train.tokens=3"):
        with pytest.raises(ValueError, match=r"--set '.*': write it as sft\.field=value"):
            sft_config(["a.jsonl"], [wrong])
    with pytest.raises(ValueError, match=r"sft: unknown field epoch = 2; did you mean 'epochs'\?"):
        sft_config(["a.jsonl"], ["sft.epoch=2"])


# ------------------------------------------------------------------------------------------------ the command


def test_the_command_tells_what_changed(out: Path, talks: Path, xsalab: Any) -> None:
    """Before and after in one line, what was read on stderr; as JSON one value; the model then samples."""
    run = run_of(out)
    command = ("sft", run, "--data", talks, "--epochs", 2, "--set", "sft.validation_fraction=0.1")
    first = xsalab(*command)
    values = [row["val_bpb"] for row in RunFolder(run / "sft").metrics() if "val_bpb" in row]
    steps = RunFolder(run / "sft").status["steps"]
    assert first.out.splitlines() == [
        f"held-out answers: {values[0]:.4f} bits per byte before, {values[1]:.4f} after {steps} steps",
        str(run / "sft"),
    ]
    assert "80 conversations: 72 to train on, 8 held out; " in first.err
    content = json.loads(xsalab(*command, "--json").out)
    assert (content["state"], content["val_bpb_before"], content["val_bpb"]) == ("finished", *values)
    assert xsalab("sample", run / "sft", "a", "--tokens", 3, "--json").code == 0


def test_the_command_refuses_in_one_message(out: Path, talks: Path, xsalab: Any) -> None:
    xsalab("sft", run_of(out) / "nowhere", "--data", talks).refused("no run here")
    xsalab("sft", run_of(out), "--data", "nowhere.jsonl").refused("nowhere.jsonl: no such file or folder")
    xsalab("sft", run_of(out), "--data", talks, "--set", "sft.epoch=3").refused("did you mean 'epochs'?")
    assert xsalab("sft", run_of(out)).code == 2


def test_a_fine_tuning_that_breaks_down_is_told(out: Path, talks: Path, xsalab: Any, monkeypatch: Any) -> None:
    """Exit code 1, the state and the step; the base run stays as it is."""
    from xsalab.experiment import run as runs
    from xsalab.train import Diverged

    def breaks(state: TrainState, *_: Any, **__: Any) -> None:
        raise Diverged(StepMetrics(0, float("nan"), 1.0, 1.0, 256, 0.0, 0.0))

    monkeypatch.setattr(runs, "train", breaks)
    found = xsalab("sft", run_of(out), "--data", talks)
    assert found.code == 1
    assert "sft: diverged, step 0: loss nan" in found.out
    assert RunFolder(run_of(out)).state == "finished"
