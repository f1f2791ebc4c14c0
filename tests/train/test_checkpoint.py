"""A checkpoint is complete or not there, holds everything that a run carries, and is never a pickle."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from xsalab.data import Batch
from xsalab.eval.generate import generate
from xsalab.files import make_folder, write_atomic
from xsalab.optim import Schedule
from xsalab.train import TrainState, checkpoint, train, train_step
from xsalab.train.checkpoint import load_checkpoint, load_model, save_checkpoint, save_tensors

SCHEDULE = Schedule("nanochat", steps=20, warmup=2)
State = Callable[..., TrainState]
BatchOf = Callable[..., Batch]


def digests(state: TrainState) -> dict[str, bytes]:
    """Weights, buffers and optimizer state to the bit."""
    tensors = {**state.model.state_dict(), **state.optimizer.named_state()}
    return {
        name: tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()
    }


@pytest.fixture
def save_steps(state: TrainState, batch_of: BatchOf, tmp_path: Path) -> Callable[..., Path]:
    """Saves the given steps of one training run; returns the folder."""

    def save(*steps: int) -> Path:
        for step in steps:
            while state.step < step:
                train_step(state, batch_of(state.step), SCHEDULE)
            save_checkpoint(tmp_path / "checkpoints", state, {})
        return tmp_path / "checkpoints"

    return save


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_five_and_five_steps_are_ten(dtype: torch.dtype, fresh: State, batch_of: BatchOf, tmp_path: Path) -> None:
    """F082, F089: what is loaded continues to the bit, whatever the weights' dtype; nothing else is state."""
    options = {"alpha": {"learned": "tanh", "per": "head", "start": 0.2}}
    whole = fresh(options, dtype)
    train(whole, batch_of, Schedule("nanochat", steps=10, warmup=2))
    first, second = fresh(options, dtype), fresh(options, dtype)
    while first.step < 5:
        train_step(first, batch_of(first.step), Schedule("nanochat", steps=10, warmup=2))
    save_checkpoint(tmp_path, first, {"note": "kept"})
    assert load_checkpoint(tmp_path, second) == {**json_of(tmp_path, 5), "note": "kept"}
    assert (second.step, digests(second)) == (5, digests(first))
    train(second, batch_of, Schedule("nanochat", steps=10, warmup=2))
    assert digests(second) == digests(whole)


def json_of(folder: Path, step: int) -> dict[str, Any]:
    return json.loads((folder / f"step-{step:09d}" / "state.json").read_text(encoding="utf-8"))


def test_nothing_there_is_no_checkpoint(state: TrainState, tmp_path: Path) -> None:
    assert load_checkpoint(tmp_path / "none", state) is None


def test_the_newest_two_are_kept(save_steps: Callable[..., Path]) -> None:
    folder = save_steps(1, 2, 3)
    assert sorted(path.name for path in folder.iterdir()) == ["step-000000002", "step-000000003"]


def test_steps_are_numbers_and_strays_are_ignored(
    save_steps: Callable[..., Path], fresh: State, batch_of: BatchOf
) -> None:
    """F096: 1000000 comes after 999999, and a stray name is nothing."""
    folder = save_steps(1, 2)
    for old, new in ((1, "step-999999"), (2, "step-1000000")):
        path = folder / f"step-{old:09d}"
        content = {**json_of(folder, old), "step": int(new[5:])}
        (path / "state.json").write_text(json.dumps(content), encoding="utf-8")
        path.rename(folder / new)
    for stray in ("step-9999999.bak", "step-x", "step-", "notes.txt", "last"):
        (folder / stray).write_text("", encoding="utf-8")
    state = fresh()
    assert load_checkpoint(folder, state)
    assert state.step == 1_000_000


@pytest.mark.parametrize("name", ["state.json", "model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("fault", ["missing", "cut", "flipped", "empty"])
def test_an_incomplete_set_gives_way_to_the_one_before(
    name: str, fault: str, save_steps: Callable[..., Path], fresh: State, batch_of: BatchOf
) -> None:
    """F095: only whole sets count; the warning names the set and the file."""
    folder = save_steps(1, 2)
    path = folder / "step-000000002" / name
    data = path.read_bytes()
    changed = {"cut": data[: len(data) // 2], "empty": b"", "flipped": data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]}
    path.unlink() if fault == "missing" else path.write_bytes(changed[fault])
    state = fresh()
    if name == "state.json" and fault == "flipped":  # one changed hash, or a changed sign of JSON
        with pytest.warns(UserWarning, match=r"step-000000002: .* (damaged|missing)"):
            load_checkpoint(folder, state)
    else:
        with pytest.warns(UserWarning, match=rf"step-000000002: {name} is .*the checkpoint before it is used"):
            load_checkpoint(folder, state)
    expected = fresh()
    train_step(expected, batch_of(0), SCHEDULE)
    assert (state.step, digests(state)) == (1, digests(expected))


@pytest.mark.parametrize("content", ["[]", "3", '{"files": [1]}', '{"files": {}}', "{}"], ids=repr)
def test_a_state_file_of_any_other_shape_is_damaged(
    content: str, save_steps: Callable[..., Path], fresh: State
) -> None:
    folder, state = save_steps(1), fresh()
    (folder / "step-000000001" / "state.json").write_text(content, encoding="utf-8")
    with pytest.warns(UserWarning, match="step-000000001"):
        assert load_checkpoint(folder, state) is None


def test_a_damaged_later_set_costs_no_good_one(
    save_steps: Callable[..., Path], fresh: State, batch_of: BatchOf
) -> None:
    """Two good sets stay, whatever lies at later steps; and the damaged one is replaced at its step."""
    folder = save_steps(1, 2, 5)
    (folder / "step-000000005" / "model.safetensors").write_bytes(b"")
    state = fresh()
    with pytest.warns(UserWarning, match="damaged"):
        load_checkpoint(folder, state)
    for step in (3, 4, 5):
        train_step(state, batch_of(state.step), SCHEDULE)
        save_checkpoint(folder, state, {})
        whole = [int(path.name[5:]) for path in sorted(folder.iterdir()) if not checkpoint._fault(path)]
        assert whole == [step - 1, step]


# ---------------------------------------------------------------------------------------- killed and full


class Marker:
    """Unpickled, this makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_a_pickle_is_refused_and_not_executed(
    name: str, save_steps: Callable[..., Path], fresh: State, tmp_path: Path
) -> None:
    """F102: even with its hash in state.json nothing of a pickle runs; the message says what is wrong."""
    folder, marker = save_steps(1), tmp_path / "marker"
    path = folder / "step-000000001" / name
    path.write_bytes(pickle.dumps(Marker(marker)))
    content = json_of(folder, 1)
    content["files"][name] = checkpoint._sha256(path)
    (path.parent / "state.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ValueError, match=rf"{name}: not a safetensors file"):
        load_checkpoint(folder, fresh())
    assert not marker.exists()
    pickle.loads(path.read_bytes())  # the trap works
    assert marker.exists()


def test_a_killed_save_leaves_the_sets_before_it(fresh: State, batch_of: BatchOf, tmp_path: Path) -> None:
    """F093: SIGKILL at 20 random moments of saving in a loop; each time a whole set is found, no older than known."""
    folder, draw, known = tmp_path / "checkpoints", random.Random(0), 0
    state = fresh()
    for _ in range(20):
        child = os.fork()
        if child == 0:  # saves step after step until it is killed
            while True:
                state.step += 1
                save_checkpoint(folder, state, {})
        time.sleep(draw.uniform(0.01, 0.06))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        steps = [path for path in folder.glob("step-*") if not checkpoint._fault(path)]
        load_checkpoint(folder, state)  # a warning is an error here: no damaged set may be seen
        assert state.step == max([known, *(int(path.name[5:]) for path in steps)])
        known = state.step
    assert known > 0
    assert not list(folder.glob(".*")), "what a killed save left is removed"


@pytest.mark.parametrize("after", [0, 1, 1000, 20_000], ids=lambda n: f"after-{n}-bytes")
def test_a_writer_that_fails_leaves_the_set_before_it(
    after: int, save_steps: Callable[..., Path], state: TrainState, fresh: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F093, F174: "no space" after so many bytes; needed and free bytes are told and the last good set stays."""
    folder = save_steps(1, 2)
    written = 0

    def full(tensors: Any, path: Path) -> None:
        nonlocal written
        save_file(tensors, path)
        written += path.stat().st_size
        if written > after:
            path.write_bytes(path.read_bytes()[: max(0, after)])
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    state.step = 3
    with pytest.raises(OSError, match=r"disk full: [\d,]+ bytes needed, [\d,]+ free") as raised:
        save_checkpoint(folder, state, {})
    assert str(raised.value.filename).endswith(".safetensors")
    assert sorted(path.name for path in folder.iterdir()) == ["step-000000001", "step-000000002"]
    monkeypatch.undo()
    again = fresh()
    load_checkpoint(folder, again)
    assert again.step == 2


FILL = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
import torch
from xsalab.files import write_atomic
from xsalab.train.checkpoint import save_tensors
folder = Path({folder!r})
write_atomic(folder / "good", b"x" * 1000)
for write in (lambda: save_tensors({{"w": torch.zeros(200_000)}}, folder / "model.safetensors"),
              lambda: write_atomic(folder / "rows", b"x" * 800_000)):
    try:
        write()
    except OSError as error:
        print(error.strerror)
print(sorted(path.name for path in folder.iterdir()), (folder / "good").stat().st_size)
"""


@pytest.mark.slow
def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    """F174: a file system of 256 kB: 800,000 bytes do not fit, the message says so, and nothing half is left."""
    folder = tmp_path / "small"
    folder.mkdir()
    script = FILL.format(path=sys.path, folder=str(folder))
    mount = f'mount -t tmpfs -o size=256k tmpfs {folder} && exec {sys.executable} -c "$SCRIPT"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mount] if shutil.which("unshare") else ["false"],
        env={**os.environ, "SCRIPT": script}, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()[:80]}")
    model, rows, left = done.stdout.splitlines()
    assert model.startswith("disk full: 800,000 bytes needed, 2"), model
    assert rows.startswith("disk full: 800,000 bytes needed, 2"), rows
    assert left == "['good'] 1000"


@pytest.mark.slow
def test_a_limit_on_a_files_size(tmp_path: Path) -> None:
    """F174: a quota of 100 kB a file, in a child, as the limit stays with the process."""
    done = subprocess.run(
        [sys.executable, "-c", FILL.format(path=sys.path, folder=str(tmp_path))], capture_output=True, text=True,
        check=True, timeout=120, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
    )  # fmt: skip
    model, rows, left = done.stdout.splitlines()
    assert model.startswith("disk full: 800,000 bytes needed")
    assert rows.startswith("disk full: 800,000 bytes needed")
    assert left == "['good'] 1000"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.EROFS, "cannot write here .*--out"),
        (errno.EACCES, "cannot write here .*--out"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_a_folder_that_takes_no_file(code: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only folder is named with a remedy; the old file stays whole."""
    path = tmp_path / "status.json"
    write_atomic(path, "old")

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match=words):
        write_atomic(path, "new")
    assert [entry.name for entry in tmp_path.iterdir()] == ["status.json"]
    assert path.read_text(encoding="utf-8") == "old"


def test_a_file_in_the_place_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("", encoding="utf-8")
    with pytest.raises(OSError, match="a file stands where a folder is needed") as raised:
        make_folder(tmp_path / "out" / "runs")
    assert raised.value.filename == str(tmp_path / "out" / "runs")


# ------------------------------------------------------------------------------------------------ models


def test_bfloat16_weights_load_into_a_float32_model(fresh: State, tmp_path: Path) -> None:
    """F104: weights are converted to the model's dtypes, on load, and the model generates; and the other way."""
    for source, target in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        saved, loaded = fresh(dtype=source), fresh(dtype=target)
        with torch.no_grad():
            for parameter in saved.model.parameters():
                parameter.fill_(0.25)
        path = tmp_path / "model.safetensors"
        save_tensors({name: t.to(source) for name, t in saved.model.state_dict().items()}, path)
        dtypes = {name: tensor.dtype for name, tensor in loaded.model.state_dict().items()}
        load_model(path, loaded)
        assert {name: tensor.dtype for name, tensor in loaded.model.state_dict().items()} == dtypes
        assert all(bool((parameter == 0.25).all()) for parameter in loaded.model.parameters())
        assert len(list(generate(loaded.model, [1, 2, 3], 4, temperature=0))) == 4


def test_weights_of_another_model_are_named(fresh: State, tmp_path: Path) -> None:
    state, path = fresh(), tmp_path / "model.safetensors"
    tensors = dict(state.model.state_dict())
    save_file({name: t for name, t in tensors.items() if name != "smear"}, path)
    with pytest.raises(ValueError, match=r"model.safetensors: parameters differ from the model's: smear"):
        load_model(path, state)
    save_file({**tensors, "backout": torch.zeros(3)}, path)
    with pytest.raises(ValueError, match=r"model.safetensors: backout is \(3,\), the model's \(1,\)"):
        load_model(path, state)


def test_a_file_is_written_whole_and_plain(fresh: State, tmp_path: Path) -> None:
    """Safetensors and JSON: the set is read without our code."""
    state = fresh()
    path = save_checkpoint(tmp_path, state, {"about": "α"})
    assert sorted(entry.name for entry in path.iterdir()) == [
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]
    assert load_file(path / "model.safetensors").keys() == state.model.state_dict().keys()
    assert json_of(tmp_path, 0)["about"] == "α"


def test_a_folder_that_vanishes_is_not_made_anew(tmp_path: Path, fresh: State) -> None:
    """What was a shared folder would else come back on the machine's own disk, and the run would be in two places."""
    run, state = tmp_path / "shared" / "run", fresh()
    run.mkdir(parents=True)
    save_checkpoint(run / "checkpoints", state, {})
    shutil.rmtree(tmp_path / "shared")
    with pytest.raises(OSError, match="the folder is gone") as told:
        save_checkpoint(run / "checkpoints", state, {})
    assert told.value.errno == errno.ENOENT
    assert told.value.filename == str(run)
    with pytest.raises(OSError, match="the same command continues"):
        write_atomic(run / "status.json", "{}")
    assert not (tmp_path / "shared").exists()
