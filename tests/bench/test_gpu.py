"""bench/gpu.py on the CPU at tiny sizes: all of its parts run, and what it writes is whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "bench" / "gpu.py"
# Refuses what an image of PyTorch may lack, as if it were not installed.
BARE = """
import importlib.abc, os, runpy, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"pydantic", "zstandard", "jaxtyping", "tokenizers", "pyarrow", "safetensors"}:
            return next(f for f in sys.meta_path if type(f).__name__ == "StandIns").find_spec(name, path, target)
sys.meta_path.insert(0, Absent())
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))  # as Python does for a program
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def started(*words: str, bare: bool = False) -> subprocess.CompletedProcess[str]:
    begin = [sys.executable, "-c", BARE] if bare else [sys.executable]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*begin, str(PROGRAM), *words], env=env, capture_output=True, text=True, check=False, timeout=300
    )


@pytest.mark.slow
def test_every_part_runs_with_torch_and_this_repository_alone(tmp_path: Path) -> None:
    """Packages that an image of PyTorch may lack are stood in for; each part leaves its figures, each target a row."""
    out = tmp_path / "gpu.json"
    ran = started("--device", "cpu", "--smoke", "--out", str(out), bare=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["left_out"] == {"nanochat": "needs --nanochat DIR", "ranks": "needs --processes N"}
    assert {"pydantic", "jaxtyping", "pyarrow"} <= set(found["stood_in_for"])
    assert set(found["figures"]) == {"machine", "exclude", "d12", "d24", "optimizer", "head", "attention"}
    judged = {row["name"]: row for row in found["results"]}
    assert len(judged) == 4, "memory is counted on a GPU alone, nanochat was not given"
    for row in judged.values():
        assert row["verdict"] == "not judged: sizes that say nothing"
        assert 0 < row["low"] <= row["ratio"] <= row["high"]
    # 6 for each weight of a matrix; attention by hand: 12 · width · keys, full windows of 64 at this context
    d12 = found["figures"]["d12"]
    matrices = 2 * (4 * 64 * 64 + 8 * 64 * 64) + 2 * 12 + 256 * 64  # one gate of 12 channels a head, on the last layer
    assert d12["flops_per_token"] == 6 * matrices + 12 * 64 * 64 * 2
    assert len(d12["times"]["xsa"]) == len(d12["times"]["standard"]) == 4


@pytest.mark.slow
def test_one_run_on_two_processes(tmp_path: Path) -> None:
    """The mode for several GPUs: what a step hands over, by hand."""
    out = tmp_path / "gpu.json"
    ran = started("--device", "cpu", "--smoke", "--processes", "2", "--only", "ranks", "--out", str(out))
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(out.read_text(encoding="utf-8"))["figures"]["ranks"]
    assert set(found) == {"d12"}
    whole = found["d12"]
    # to its owner and back goes every parameter: 2 bytes a number of the tables in bfloat16, 4 of the rest
    tables = 256 * 64 * 2  # the embedding, and the value embedding of the last layer
    less = 2 * tables if whole["dtype"] == "torch.bfloat16" else 0
    assert whole["bytes"]["reduce"] == whole["bytes"]["broadcast"] == 4 * whole["parameters"] - less
    assert len(whole["times"]["many"]) == 4
    assert whole["efficiency"] == pytest.approx(whole["faster"]["median"] / 2)


def test_a_wrong_call_is_told_in_one_line(tmp_path: Path) -> None:
    """Without a GPU, without a checkout, with a part that is not there: exit code 2."""
    ran = started("--device", "cpu", "--smoke", "--nanochat", str(tmp_path))
    assert ran.returncode == 2
    assert "give a checkout of nanochat" in ran.stderr
    ran = started("--only", "d13")
    assert ran.returncode == 2
    assert "'d13' is not one of machine" in ran.stderr
