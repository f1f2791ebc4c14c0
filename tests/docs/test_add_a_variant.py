"""docs/add-a-variant.md is run as it stands: its files, its experiment, its refusal."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from xsalab.cli import app
from xsalab.experiment.plugins import _import_plugin
from xsalab.model.variant import VARIANTS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "add-a-variant.md").read_text(encoding="utf-8")


def named_files() -> dict[str, str]:
    """The page's code blocks by the file name on the line before them."""
    return dict(re.findall(r"^`([\w.]+)`:\n```\w+\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the page's files and a few texts; the variants that it registers are forgotten afterwards."""
    for name, text in named_files().items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    words = re.findall(r"\w+", PAGE)
    draw = random.Random(0)
    (tmp_path / "texts").mkdir()
    for i in range(30):
        text = " ".join(draw.choice(words) for _ in range(300))
        (tmp_path / "texts" / f"{i}.txt").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    before = dict(VARIANTS)
    yield tmp_path
    VARIANTS.clear()
    VARIANTS.update(before)
    _import_plugin.cache_clear()


def test_the_variant_is_short() -> None:
    code = [line for line in named_files()["my_variants.py"].splitlines() if line.strip()]
    assert len(code) <= 22, "about 20 lines is what the page promises"


@pytest.mark.slow
def test_the_variant_trains_pairs_and_is_reported(page: Path) -> None:
    result = CliRunner().invoke(app, ["run", "mine.toml", "--jobs", "1", "--json"])
    assert result.exit_code == 0, result.exception
    told = json.loads(result.stdout)
    assert {run["state"] for run in told["runs"]} == {"finished"}
    assert len(told["runs"]) == 9  # standard, gated and null, three seeds each
    row = next(row for row in told["contrasts"] if row["treatment"] == "gated")
    assert row["seeds"] == [0, 1, 2]
    assert row["primary"]
    assert any(row["differences"]), "the variant changed nothing"
    assert all(name.split(".")[0] in ("config", "variant") for name in row["differs"]), row["differs"]
    assert row["verdict"]["word"] in ("better", "worse", "equivalent", "inconclusive")
    assert told["headline"][0].startswith(
        "gated (token-gated, start = 0.25, layers last:1) against standard under Muon + AdamW: Δ bpb"
    )
    assert told["costs"]["costs"][0]["arm"] == "gated"
    html = Path(told["report"]).read_text(encoding="utf-8")
    assert "token-gated" in html
    folder = page / "out" / "experiments" / "mine" / "runs" / "base.gated.s0"
    stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert stored["plugins"] == {"my_variants.py": named_files()["my_variants.py"]}
    assert stored["derived"]["layers"] == [1]


def test_a_misspelt_option_is_refused_by_name(page: Path) -> None:
    text = named_files()["mine.toml"].replace("start = 0.25", "strat = 0.25")
    (page / "mine.toml").write_text(text, encoding="utf-8")
    result = CliRunner().invoke(app, ["run", "mine.toml"])
    assert re.search(r"no option 'strat'; did you mean 'start'\?", str(result.exception))


def test_the_leaking_variant_is_refused_before_training(page: Path) -> None:
    """F008: a mean over all positions leaks later tokens; the message on the page is the program's."""
    text = named_files()["mine.toml"].replace('"my_variants.py"', '"leaky.py"').replace("token-gated", "centred")
    text = text.replace("start = 0.25\n", "")
    (page / "mine.toml").write_text(text, encoding="utf-8")
    result = CliRunner().invoke(app, ["train", "mine.toml", "--arm", "gated", "--seed", "0"])
    assert isinstance(result.exception, ValueError)
    assert f"error: {result.exception}\n" in PAGE
    folder = page / "out" / "experiments" / "mine" / "runs" / "base.gated.s0"
    assert not (folder / "status.json").exists(), "it began to train"
