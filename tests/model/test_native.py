"""Building, keeping and switching off the C++ kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from xsalab.model import native

needs_kernels = pytest.mark.skipif(bool(native.reason()), reason=native.reason() or "kernels are there")
supported = "AVX512-BF16" not in native.reason() and "Linux" not in native.reason()
PROGRAM = """
import torch
from xsalab.model import GPT, ModelConfig, init_weights, native
model = GPT(ModelConfig(depth=1, width=32, heads=1, context=8, vocab_size=40), dtype=torch.bfloat16)
init_weights(model, 0)
print(float(model(torch.arange(8)[None])[0, 0, 0].isfinite()), native.describe())
"""


def in_new_process(cache: Path, **environment: str) -> str:
    """What a program that uses a bfloat16 model prints, with a cache of its own."""
    env = {**os.environ, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1", "XSALAB_PLAIN": "", **environment}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_environment_switches_them_off(tmp_path: Path) -> None:
    """XSALAB_PLAIN=1: nothing is built, the model works, and the reason names the switch."""
    assert in_new_process(tmp_path, XSALAB_PLAIN="1").startswith("1.0 XSALAB_PLAIN is set")
    assert not (tmp_path / "xsalab").exists()


@pytest.mark.slow
@pytest.mark.skipif(not supported, reason="no kernels for this processor")
def test_without_a_compiler_pytorch_does_the_work(tmp_path: Path) -> None:
    """One line says why, what is kept is that line and no half-built library, and it is not tried again each time."""
    first = in_new_process(tmp_path, CXX="/nonexistent/compiler")
    assert first.startswith("1.0 the C++ kernels could not be built")
    assert not list(tmp_path.rglob("*.so"))
    (told,) = tmp_path.rglob("*.failed")
    again = in_new_process(tmp_path)  # a compiler is there now, but the failure is remembered, with the remedy
    assert again == f"{first} (remove {told} to try again)"


@needs_kernels
def test_a_context_switches_them_off_and_on() -> None:
    """Within ``plain`` nothing is taken, behind it everything is, after an error too."""
    x = torch.empty(0, dtype=torch.bfloat16)
    assert native.takes(x)
    with pytest.raises(KeyError), native.plain():  # noqa: PT012
        assert not native.takes(x)
        assert native.instructions() == "plain"
        raise KeyError
    assert native.takes(x)


@needs_kernels
def test_what_is_taken() -> None:
    """bfloat16 on the CPU, all of them."""
    low, high = torch.empty(0, dtype=torch.bfloat16), torch.empty(0)
    assert native.takes(low, low)
    assert not native.takes(low, high)
    assert not native.takes(low.to("meta"))


@needs_kernels
def test_other_sources_are_another_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed kernel, or other flags, never meet an old library."""
    before = native.cache_folder()
    monkeypatch.setattr(native, "SOURCES", tmp_path)
    (tmp_path / "one.cpp").write_text("int a;", encoding="utf-8")
    first = native.cache_folder()
    (tmp_path / "one.cpp").write_text("int b;", encoding="utf-8")
    assert len({before, first, native.cache_folder()}) == 3
    monkeypatch.setattr(native, "FLAGS", ("-O0",))
    assert native.cache_folder() != first
