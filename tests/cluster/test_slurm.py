"""cluster/slurm.sh with stand-ins for Slurm's commands: what it would start, and that it queues itself again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "cluster" / "slurm.sh"
BASH = shutil.which("bash")
pytestmark = pytest.mark.skipif(BASH is None, reason="no bash here")


@pytest.fixture
def allocation(tmp_path: Path) -> dict[str, str]:
    """A folder with .venv, and srun, scontrol, xsalab and ray that write down how they were called."""
    recorded, tools, bin_ = tmp_path / "calls", tmp_path / "tools", tmp_path / ".venv" / "bin"
    for folder in (tools, bin_):
        folder.mkdir(parents=True)
    for place, name, more in (
        (tools, "srun", '[[ "$*" == *" start "* ]] || sleep "${TAKES:-0}"'),
        (tools, "scontrol", '[ "$1" = show ] && printf "n1\\nn2\\nn3\\n" || true'),
        # on Ray it lasts until the workers were started, which happens beside it
        (
            bin_,
            "xsalab",
            f"""
for _ in $(seq 100); do [[ "$*" != *ray* ]] || grep -q -- --address=n1 {recorded} && break; sleep 0.05; done
exit "${{CODE:-0}}\"""",
        ),
        (bin_, "ray", ""),
    ):
        file = place / name
        file.write_text(f'#!/usr/bin/env bash\necho {name} "$@" >> {recorded}\n{more}\n', encoding="utf-8")
        file.chmod(0o755)
    return {
        **os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path), "RAY_WAIT": "0",
        "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_ID": "17",
    }  # fmt: skip


def calls(allocation: dict[str, str]) -> list[str]:
    return (Path(allocation["SLURM_SUBMIT_DIR"]) / "calls").read_text(encoding="utf-8").splitlines()


def script(*arguments: str) -> list[str]:
    assert BASH
    return [BASH, str(SCRIPT), *arguments]


def test_one_node_runs_on_its_own_gpus(allocation: dict[str, str]) -> None:
    subprocess.run(script("study.toml", "--out", "big"), env={**allocation, "SLURM_JOB_NUM_NODES": "1"}, check=True)
    assert calls(allocation) == ["srun --ntasks=1 .venv/bin/xsalab run study.toml --devices 0,1,2,3 --out big"]


def test_several_nodes_make_a_ray_cluster_first(allocation: dict[str, str]) -> None:
    ended = subprocess.run(
        script("study.toml"), env={**allocation, "SLURM_JOB_NUM_NODES": "3", "CODE": "1"}, check=False
    )
    assert ended.returncode == 1, "the experiment's own code"
    made = calls(allocation)
    assert "srun --nodes=1 --ntasks=1 --nodelist=n1 .venv/bin/ray start --head --port=6379 --block" in made
    assert "srun --nodes=2 --ntasks=2 --exclude=n1 .venv/bin/ray start --address=n1:6379 --block" in made
    assert "xsalab run study.toml --on ray --address n1:6379" in made
    assert made.index("ray health-check --address n1:6379") < made.index(
        "xsalab run study.toml --on ray --address n1:6379"
    )


def test_before_its_time_is_over_it_is_queued_again(allocation: dict[str, str]) -> None:
    env = {**allocation, "SLURM_JOB_NUM_NODES": "1", "TAKES": "30"}
    with subprocess.Popen(script("study.toml"), env=env, start_new_session=True) as job:
        deadline = time.monotonic() + 20
        while not (Path(allocation["SLURM_SUBMIT_DIR"]) / "calls").is_file() and time.monotonic() < deadline:
            time.sleep(0.05)
        job.send_signal(signal.SIGTERM)
        assert job.wait(20) == 0
        os.killpg(job.pid, signal.SIGKILL)
    assert calls(allocation)[-1] == "scontrol requeue 17"


def test_without_slurm_or_a_file_it_says_so(allocation: dict[str, str]) -> None:
    bare = {name: value for name, value in allocation.items() if not name.startswith("SLURM")}
    for arguments, env, words in ((("study.toml",), bare, "start it with sbatch"), ((), allocation, "usage: sbatch")):
        ended = subprocess.run(script(*arguments), env=env, capture_output=True, text=True, check=False)
        assert ended.returncode != 0
        assert words in ended.stderr
