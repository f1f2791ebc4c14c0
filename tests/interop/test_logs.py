"""Logs of other tools as they really look: what is read, what is refused, and what is noted."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from xsalab.interop import logs
from xsalab.interop.logs import read_log, read_logs, seed_in_name

HEAD = """\x1b[32m[INFO]\x1b[0m Distributed world size: 2
Autodetected device type: cuda
GPU: Some GPU | Peak FLOPS (BF16): 1.00e+15
COMPUTE_DTYPE: torch.bfloat16 (auto)
Vocab size: 2,048
Model config:
{
  "sequence_len": 512,
  "n_layer": 4,
  "n_embd": 128
}
total                   : 1,835,138
Total number of training tokens: 40,960
Total batch size 4,096 => gradient accumulation steps: 2
"""


def train_line(step: int, loss: float, steps: int = 10) -> str:
    share = 100 * step / steps
    return (
        f"step {step:05d}/{steps:05d} ({share:.2f}%) | loss: {loss:.6f} | lrm: 0.10 | dt: 52473.44ms | "
        f"tok/sec: 1,216 | bf16_mfu: 0.00 | epoch: 1 pq: 1 rg: 3 | total time: 0.03m | eta: 1.5m\n"
    )


def val_line(step: int, bpb: float) -> str:
    return f"Step {step:05d} | Validation bpb: {bpb:.6f}\n"


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str | bytes], Path]:
    def put(name: str, content: str | bytes) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return put


def has(notes: Sequence[str], *words: str) -> bool:
    return any(all(word in note for word in words) for note in notes)


# ---------------------------------------------------------------------------------------------- nanochat


def test_nanochats_console_gives_losses_validation_and_facts(write: Any) -> None:
    text = HEAD + val_line(0, 3.25) + "".join(train_line(s, 7.5 - s / 8) for s in range(10)) + val_line(10, 2.5)
    text += "Step 00010 | CORE metric: 0.1602\nTotal training time: 2.00m\n"
    log = read_log(write("console.log", text))
    assert log.kind == "nanochat"
    assert log.series["train/loss"].steps.tolist() == list(range(10))
    assert log.series["train/loss"].values.tolist() == [7.5 - s / 8 for s in range(10)]
    assert log.series["val/bpb"].steps.tolist() == [0, 10]
    assert log.series["core_metric"].at(10) == 0.1602
    expected = {
        "device": "Some GPU", "world_size": 2, "dtype": "bfloat16", "vocab_size": 2048, "context": 512, "depth": 4,
        "width": 128, "parameters": 1_835_138, "tokens": 40_960, "batch_tokens": 4096, "micro_batches": 2, "steps": 10,
    }  # fmt: skip
    assert {name: log.facts.get(name) for name in expected} == expected
    assert log.notes == ()


def test_the_real_console_is_read_whole(nanochat_d4: Path) -> None:
    log = read_log(nanochat_d4 / "console.log")
    assert log.kind == "nanochat"
    assert log.notes == ()
    assert log.series["train/loss"].steps.tolist() == list(range(60))
    assert log.series["train/loss"].at(59) == 5.658979
    assert log.series["val/bpb"].steps.tolist() == [0, 20, 40, 60]
    assert log.series["val/bpb"].at(60) == 2.38998
    assert (log.facts["steps"], log.facts["parameters"], log.facts["world_size"]) == (60, 1_835_138, 1)


def test_after_a_resume_the_last_block_stands_and_what_it_overtook_is_gone(write: Any) -> None:
    """F132: a crash at step 8 and a resume from 5; the validation at 7 was of the lost block and goes too."""
    first = val_line(0, 3.0) + "".join(train_line(s, 7.0) for s in range(7)) + val_line(7, 9.9) + train_line(7, 7.0)
    second = "".join(train_line(s, 6.0) for s in (5, 6))
    log = read_log(write("console.log", HEAD + first + HEAD + second))
    assert log.series["train/loss"].steps.tolist() == list(range(7))
    assert log.series["train/loss"].values.tolist() == [7.0] * 5 + [6.0] * 2
    assert log.series["val/bpb"].steps.tolist() == [0]
    assert has(log.notes, "goes back 1 time", "from step 7 to 5")


def test_missing_and_damaged_lines_are_counted(write: Any) -> None:
    lines = [train_line(s, 7.0) for s in range(10) if s not in (3, 4)]
    lines[6] = lines[6][:20] + "\n"  # step 8
    log = read_log(write("console.log", HEAD + "".join(lines)))
    assert log.series["train/loss"].steps.tolist() == [0, 1, 2, 5, 6, 7, 9]
    assert has(log.notes, "train/loss: 3 values missing", "after step 2")
    assert has(log.notes, "1 line of steps that could not be read")


def test_half_a_number_at_the_end_of_a_live_log_is_not_read(write: Any) -> None:
    log = read_log(write("console.log", train_line(0, 7.0) + train_line(1, 7.0) + "Step 00002 | Validation bpb: 2"))
    assert "val/bpb" not in log.series
    assert has(log.notes, "last line has no end")


def test_two_runs_of_other_settings_in_one_console_are_refused(write: Any) -> None:
    """F167: appended to one file, they would be one curve."""
    other = HEAD.replace("4,096 =>", "8,192 =>")
    with pytest.raises(ValueError, match="batch_tokens = 4096, then 8192: two runs in one file"):
        read_log(write("console.log", HEAD + train_line(0, 7.0) + other + train_line(0, 7.0)))


def test_a_resume_on_other_devices_is_noted(write: Any) -> None:
    other = HEAD.replace("world size: 2", "world size: 4")
    log = read_log(write("console.log", HEAD + train_line(0, 7.0) + other + train_line(1, 7.0)))
    assert has(log.notes, "world_size = 2, then 4")


def test_values_that_are_not_finite_are_set_apart(write: Any) -> None:
    log = read_log(write("console.log", train_line(0, 7.0) + train_line(1, math.nan) + train_line(2, math.inf)))
    assert log.series["train/loss"].steps.tolist() == [0]
    assert log.not_finite["train/loss"] == (1, 2)
    assert has(log.notes, "train/loss: 2 values not finite", "first at step 1")


def test_fine_tunings_console_has_no_number_of_steps(write: Any) -> None:
    line = train_line(1, 4.0).replace("/00010", "")
    assert read_log(write("sft.log", line)).facts["writer"] == "nanochat chat_sft"


# ---------------------------------------------------------------------------------------------- tables


def test_a_table_with_any_usual_name_of_the_step(write: Any) -> None:
    for name in ("step", "Step", "global_step", "iteration", "_step"):
        log = read_log(write("a.csv", f"{name},loss,val_bpb\n0,7.5,\n1,7.25,3.0\n"))
        assert log.pick("loss").values.tolist() == [7.5, 7.25]
        assert log.pick("val/bpb").steps.tolist() == [1]


def test_tabs_semicolons_and_a_mark_at_the_head_are_read(write: Any) -> None:
    for text in ("\ufeffstep;loss\n0;7.5\n", "step\tloss\r\n0\t7.5\r\n"):
        assert read_log(write("a.csv", text)).pick("loss").at(0) == 7.5


def test_a_decimal_comma_is_never_read_as_another_number(write: Any) -> None:
    """Read as thousands, "7,623" would be 7623."""
    with pytest.raises(ValueError, match="no values by step"):
        read_log(write("a.csv", "step;loss\n0;7,623\n1;7,511\n"))


def test_bad_cells_and_lines_are_counted(write: Any) -> None:
    text = "step,loss,val_bpb\n0,7.5,\nx,7.4,\n2,oops,\n3,nan,\n4,7.2,3.0\n5,7."
    log = read_log(write("a.csv", text))
    assert log.pick("loss").steps.tolist() == [0, 4]
    assert has(log.notes, "1 line cut off")
    assert has(log.notes, "1 line whose step is no whole number")
    assert has(log.notes, "loss: 1 value left out, as no number")
    assert has(log.notes, "loss: 1 value not finite")


def test_repeated_steps_keep_the_last_value(write: Any) -> None:
    log = read_log(write("a.csv", "step,loss\n0,7.5\n1,7.0\n1,6.5\n2,6.0\n"))
    assert log.pick("loss").values.tolist() == [7.5, 6.5, 6.0]
    assert has(log.notes, "loss: 1 step repeated", "last value stands")


def test_wandbs_page_exports_several_runs_in_one_table(write: Any) -> None:
    text = '"Step","run a - val/bpb","run a - val/bpb__MIN","run a - val/bpb__MAX","b - val/bpb"\n0,3.0,3.0,3.0,3.1\n'
    path = write("wandb.csv", text + "10,2.5,2.4,2.6,\n20,,,,2.0\n")
    a, b = read_logs(path)
    assert (a.kind, a.run, b.run) == ("wandb", "run a", "b")
    assert a.series["val/bpb"].values.tolist() == [3.0, 2.5]
    assert b.series["val/bpb"].steps.tolist() == [0, 20]
    assert has(a.notes, "bins of several steps", "1 value")
    with pytest.raises(ValueError, match="several runs; it holds: run a, b; name one"):
        read_log(path)
    assert read_log(path, "b").run == "b"
    with pytest.raises(ValueError, match="no run 'c'; it holds: run a, b"):
        read_log(path, "c")


def test_tensorboards_page_exports_a_plain_table(write: Any) -> None:
    text = "Wall time,Step,Value\n1.7e9,0,7.5\n1.7e9,1,7.25\n"
    log = read_log(write("run-xsa_0-tag-loss.csv", text))
    assert log.pick("value").values.tolist() == [7.5, 7.25]


def test_seeds_in_one_table_are_several_runs(write: Any) -> None:
    """F167: one curve over all of them would go back at each seed."""
    path = write("a.csv", "seed,step,loss\n" + "".join(f"{s},{t},{s + t / 10}\n" for s in (3, 5) for t in range(3)))
    first, second = read_logs(path)
    assert (first.facts["seed"], second.facts["seed"]) == (3, 5)
    assert second.pick("loss").values.tolist() == [5.0, 5.1, 5.2]
    assert first.notes == second.notes == ()


# ---------------------------------------------------------------------------------------------- JSON lines


def test_json_lines_with_nested_fields_and_settings_at_the_head(write: Any) -> None:
    rows = [{"seed": 4, "batch_tokens": 4096}, *({"step": s, "train": {"loss": 7.0 - s}} for s in range(3))]
    log = read_log(write("a.jsonl", "\n".join(json.dumps(row) for row in rows)))
    assert log.kind == "jsonl"
    assert log.facts == {"seed": 4, "batch_tokens": 4096}
    assert log.series["train.loss"].values.tolist() == [7.0, 6.0, 5.0]


def test_wandbs_history_prefers_the_trainers_own_step(write: Any) -> None:
    """nanochat calls the tracker several times a step, so its _step is another count."""
    rows = [
        {"_step": 0, "step": 0, "val/bpb": 3.0, "_runtime": 1},
        {"_step": 1, "step": 0, "train/loss": 7.0, "train/lrm": 0.1},
        {"_step": 2, "step": 100, "train/loss": "NaN", "train/lrm": 0.1},
    ]
    log = read_log(write("history.jsonl", "".join(json.dumps(row) + "\n" for row in rows)))
    assert log.kind == "wandb"
    assert log.series["train/loss"].steps.tolist() == [0]
    assert log.not_finite["train/loss"] == (100,)
    assert "_runtime" not in log.series


def test_a_line_cut_off_is_counted(write: Any) -> None:
    log = read_log(write("a.jsonl", '{"step": 0, "loss": 7.0}\n{"step": 1, "lo'))
    assert has(log.notes, "1 line that could not be read")


# ---------------------------------------------------------------------------------------------- TensorBoard


def test_event_files_are_read_and_a_resume_cuts_them_back(tmp_path: Path) -> None:
    """F132: what the first writer wrote from the step on at which the second one begins does not count."""
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    for first, last, purge, value in ((0, 8, None, 7.0), (5, 7, 5, 6.0)):
        with SummaryWriter(str(tmp_path), purge_step=purge, filename_suffix=f".{first}") as writer:
            for step in range(first, last):
                writer.add_scalar("train/loss", value, step)
    log = read_log(tmp_path)
    assert log.kind == "tensorboard"
    assert log.series["train/loss"].values.tolist() == [7.0] * 5 + [6.0] * 2
    assert has(log.notes, "goes back 1 time", "from step 7 to 5")
    assert has(log.notes, "float32")
    one = read_log(next(path for path in tmp_path.iterdir() if path.name.endswith(".0")))
    assert len(one.series["train/loss"]) == 8


def test_without_tensorboard_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    (tmp_path / "events.out.tfevents.1").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_file_loader", None)
    with pytest.raises(ValueError, match=r"xsalab\[tensorboard\]"):
        read_log(tmp_path)


# ---------------------------------------------------------------------------------------------- xsalab's own


def write_run(folder: Path, parquet: bool) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"config": {"seed": 3, "train": {"tokens": 8}}}), encoding="utf-8")
    (folder / "status.json").write_text(json.dumps({"steps": 2, "state": "finished"}), encoding="utf-8")
    rows: list[dict[str, Any]] = [{"step": 0, "loss": 7.0}, {"step": 1, "loss": 6.5}, {"step": 2, "val_bpb": 2.5}]
    if parquet:
        columns = {name: [row.get(name) for row in rows] for name in ("step", "loss", "val_bpb")}
        pq.write_table(pa.table(columns), folder / "metrics.parquet")
    else:
        text = "".join(json.dumps(row) + "\n" for row in rows) + '{"step": 3, "lo'
        (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize("parquet", [True, False])
def test_a_run_folder_of_our_own(tmp_path: Path, parquet: bool) -> None:
    folder = write_run(tmp_path / "run", parquet)
    log = read_log(folder)
    assert (log.kind, log.facts["seed"], log.facts["steps"], log.facts["tokens"]) == ("xsalab", 3, 2, 8)
    assert log.pick("loss").values.tolist() == [7.0, 6.5]
    assert log.pick("val_bpb").steps.tolist() == [2]


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.log", b"", "empty"),
        ("blank.csv", b" \n\n", "empty"),
        ("weights.bin", b"\x00\x01\x02" * 50, "not a text file"),
        ("prose.txt", b"nothing to see here\n", "no column or field of steps"),
        ("a.csv", b"time,loss\n1,2\n", "no column or field of steps"),
        ("b.csv", b"step,loss,loss\n1,2,3\n", "two columns have the same name: loss"),
        ("c.csv", b"step,loss\n", "no values by step"),
        ("d.jsonl", b'{"time": 1, "loss": 2}\n', "no column or field of steps"),
        ("utf16.csv", "step,loss\n1,2\n".encode("utf-16"), "not a text file"),
        ("events.out.tfevents.1", b"not an event file at all", "no scalars"),
        ("events.out.tfevents.2", b"", "no scalars"),
    ],
)
def test_what_holds_no_log_is_refused_by_name(write: Any, name: str, content: bytes, words: str) -> None:
    path = write(name, content)
    with pytest.raises(ValueError, match=words) as error:
        read_log(path)
    assert str(path) in str(error.value)


def test_a_folder_without_logs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no log in this folder"):
        read_log(tmp_path)


def test_a_metric_that_is_not_there_names_those_that_are(write: Any) -> None:
    log = read_log(write("a.csv", "step,loss,accuracy\n0,7.5,0.1\n"))
    with pytest.raises(ValueError, match="no metric 'val_bpb'; it holds: accuracy, loss"):
        log.pick("val_bpb")


@pytest.mark.parametrize(
    ("name", "seed"),
    [("xsa_seed3.csv", 3), ("run.s12.log", 12), ("seed=4-x.csv", 4), ("s0", 0), ("losses.csv", None), ("s1_s2", None)],
)
def test_the_seed_in_a_files_name(name: str, seed: int | None) -> None:
    assert seed_in_name(name) == seed


def test_every_series_rises_whatever_the_order_of_the_lines() -> None:
    """Random steps: the result is what a log that was cut back at each return would hold."""
    draw = np.random.default_rng(0)
    for _ in range(50):
        steps = draw.integers(0, 12, size=20).tolist()
        log = logs._log(Path("x"), "csv", [(step, "a", float(i)) for i, step in enumerate(steps)], {}, [])
        held: list[tuple[int, float]] = []
        for i, step in enumerate(steps):
            held = [*((s, v) for s, v in held if s < step), (step, float(i))]
        assert list(zip(log.series["a"].steps.tolist(), log.series["a"].values.tolist(), strict=True)) == held
