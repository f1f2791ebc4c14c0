"""What a start does not import: seconds that nobody asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

import xsalab


def imported(program: str, *names: str) -> set[str]:
    """Those of ``names`` that a process of its own has imported after ``program``."""
    code = f"{program}\nimport sys\nprint(*(name for name in {names!r} if name in sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(ran.stdout.split())


def test_the_command_begins_without_torch() -> None:
    """--help and a wrong word are answered at once."""
    assert imported("import xsalab.cli", "torch", "numpy", "pyarrow", "scipy", "typer") == {"typer"}


@pytest.mark.slow
def test_a_run_begins_without_what_it_does_not_use_yet() -> None:
    """scipy's parts when statistics are asked for, pandas and transformers never."""
    program = "import xsalab.experiment.fleet, xsalab.experiment.outcome, xsalab.report"
    unwanted = ("scipy.stats", "scipy.special", "scipy.optimize", "pandas", "transformers", "tiktoken", "torch._dynamo")
    assert imported(program, "torch", *unwanted) == {"torch"}


def test_the_short_names_are_there_when_asked_for() -> None:
    assert xsalab.exclude_self is xsalab.model.exclude_self
    assert {"GPT", "ModelConfig", "Variant", "VariantChoice", "exclude_self", "variant"} == set(xsalab.__all__)
    with pytest.raises(AttributeError, match="'nonsense'"):
        _ = xsalab.nonsense
