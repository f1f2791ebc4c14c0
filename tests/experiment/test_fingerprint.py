"""The record that partners compare: what it names, and what it must not tell."""

from __future__ import annotations

import json
import platform
import shutil
from pathlib import Path

import pytest
import torch

from xsalab.experiment import fingerprint as module
from xsalab.experiment.fingerprint import code_digest, environment, machine
from xsalab.model import native
from xsalab.train import TrainConfig


def test_software_device_threads_and_kernel_are_named() -> None:
    """F169: each of them, by itself, makes another record."""
    native.load()
    record = environment(TrainConfig(threads=2), "bfloat16", compiled=False)
    assert record["torch"] == torch.__version__
    assert record["python"] == platform.python_version()
    assert (record["threads"], record["kernel"]) == (2, f"auto, eager, bfloat16, {native.instructions()}")
    compiled = environment(TrainConfig(attention="explicit"), "float32", True)
    assert compiled["kernel"] == "explicit, compiled, float32, plain", "whatever else the process has loaded"
    with native.plain():
        assert environment(TrainConfig(), "bfloat16", False)["kernel"] == "auto, eager, bfloat16, plain"
    json.dumps(record)


def test_the_machine_is_told_apart_and_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """F168: another host is another machine; its name stays at home."""
    found = []
    for name in ("a-host", "another-host"):
        monkeypatch.setattr(platform, "node", lambda name=name: name)
        found.append(machine())
        assert name not in found[-1]
        assert environment(TrainConfig(), "float32", False) == environment(TrainConfig(), "float32", False)
    assert found[0] != found[1]


def test_the_code_that_shapes_a_run_has_a_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One changed character in the model's code changes it; a test or a page does not."""
    source = Path(module.__file__).parents[1]
    copy = tmp_path / "xsalab"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(module, "__file__", str(copy / "experiment" / "fingerprint.py"))

    def now() -> str:
        code_digest.cache_clear()
        return code_digest()

    before = now()
    (copy / "report.py").write_text("", encoding="utf-8")
    assert now() == before
    path = copy / "model" / "xsa.py"
    path.write_text(path.read_text(encoding="utf-8") + "#", encoding="utf-8")
    assert now() != before
    code_digest.cache_clear()
