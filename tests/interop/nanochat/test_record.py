"""The file beside nanochat's checkpoints that says which strengths they were trained with."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from xsalab.interop.nanochat import VARIANT_FILE, record_strengths, variant_note
from xsalab.interop.nanochat.exclusion import NotThisModel

META = {"model_config": {"sequence_len": 16, "vocab_size": 40, "n_layer": 3, "n_head": 4, "n_kv_head": 2, "n_embd": 32}}


def manager_with(alpha: Any, layers: str = "all") -> Any:
    """nanochat's module as a new process that asks for this strength has it."""
    sys.modules.pop("nanochat.checkpoint_manager", None)
    record_strengths(alpha, layers)
    return importlib.import_module("nanochat.checkpoint_manager")


def read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / VARIANT_FILE).read_text(encoding="utf-8"))


def test_each_saved_step_has_the_strengths_of_its_own_run(checkout: Path, tmp_path: Path) -> None:
    """Steps of two runs that share a folder, as nanochat names it by depth alone; 0 is written too."""
    manager_with([0.25, 0.0, 1.0]).save_checkpoint(str(tmp_path), 20, {}, None, META, rank=0)
    assert read(tmp_path) == {"steps": {"20": [0.25, 0.0, 1.0]}}
    manager_with(1.0, "last:1").save_checkpoint(str(tmp_path), 40, {}, None, META)
    manager_with(0.0).save_checkpoint(str(tmp_path), 10, {}, None, META)
    assert read(tmp_path) == {"steps": {"20": [0.25, 0.0, 1.0], "40": [0.0, 0.0, 1.0], "10": [0.0, 0.0, 0.0]}}
    assert variant_note(tmp_path, 20) == f"XSA α = 0.25, 0, 1 as {VARIANT_FILE} says"
    assert variant_note(tmp_path) == f"XSA α = 0, 0, 1 as {VARIANT_FILE} says"
    assert variant_note(tmp_path, 10) == f"standard attention, XSA α = 0 as {VARIANT_FILE} says"
    assert f"standard attention, as {VARIANT_FILE} does not name step 30: " in variant_note(tmp_path, 30)


def test_the_first_rank_alone_writes(checkout: Path, tmp_path: Path) -> None:
    manager_with(1.0).save_checkpoint(str(tmp_path), 20, {}, None, META, rank=1)
    assert not (tmp_path / VARIANT_FILE).exists()


def test_loading_with_another_strength_is_refused(checkout: Path, tmp_path: Path) -> None:
    manager_with(1.0, "last:1").save_checkpoint(str(tmp_path), 20, {}, None, META)
    assert manager_with([0.0, 0.0, 1.0]).load_checkpoint(str(tmp_path), 20, "cpu")[2] == META
    for alpha in (0.0, 1.0):
        with pytest.raises(NotThisModel, match=r"step 20 was trained with alpha 0,0,1 by layer, .* give --alpha 0,0,1"):
            manager_with(alpha).load_checkpoint(str(tmp_path), 20, "cpu")
    (tmp_path / VARIANT_FILE).unlink()  # nothing is known
    assert manager_with(0.5).load_checkpoint(str(tmp_path), 20, "cpu")[2] == META


def test_another_nanochat_is_named(checkout: Path) -> None:
    file = checkout / "nanochat" / "checkpoint_manager.py"
    file.write_text(file.read_text(encoding="utf-8").replace("checkpoint_dir", "where"), encoding="utf-8")
    with pytest.raises(ValueError, match="this nanochat is not understood: no checkpoint_dir"):
        manager_with(1.0)


def launch(checkout: Path, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "xsalab.interop.nanochat", "--nanochat", checkout, *words]
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, encoding="utf-8", cwd=checkout.parent,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.slow
def test_a_whole_run_leaves_the_file_and_goes_on_with_its_own_strength_alone(checkout: Path, tmp_path: Path) -> None:
    script = ["--", "scripts.base_train", "--depth=2", "--num-iterations=1", "--checkpoints", tmp_path / "saved"]
    done = launch(checkout, "--alpha", "0.5", "--layers", "last:1", *script)
    assert done.returncode == 0, done.stderr
    assert read(tmp_path / "saved") == {"steps": {"1": [0.0, 0.5]}}
    other = launch(checkout, *script, "--resume-from-step=1")
    assert other.returncode == 2
    assert "step 1 was trained with alpha 0,0.5 by layer, and 1,1 is asked for" in other.stderr
    assert "Traceback" not in other.stderr
