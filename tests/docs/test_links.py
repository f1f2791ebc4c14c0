"""What the pages point to exists: files, headings, tests, fields, verbs, examples."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import typer

from xsalab.cli import app
from xsalab.experiment.design import expand
from xsalab.experiment.reading import load_experiment
from xsalab.model import ModelConfig
from xsalab.optim import OptimConfig

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), f"{page.name} links to {target}, which is not there"
        assert not anchor or anchor in anchors(file), f"{page.name}: {target}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_and_tests_exist(page: Path) -> None:
    for path, name in re.findall(r"`((?:src|tests|docs|experiments)/[\w./-]+)(?:::(\w+))?`", text_of(page)):
        assert (ROOT / path).exists(), f"{page.name} names {path}, which is not there"
        if name:
            assert f"def {name}(" in text_of(ROOT / path), f"{page.name}: {path} has no {name}"


@pytest.mark.parametrize("kind", [ModelConfig, OptimConfig], ids=["model", "optim"])
def test_the_model_page_names_every_field(kind: type) -> None:
    words = set(re.findall(r"`(\w+)`", text_of(ROOT / "docs" / "model.md")))
    words |= set(re.findall(r"`(\w+) =", text_of(ROOT / "docs" / "model.md")))
    fields = {field.name for field in dataclasses.fields(kind)}
    assert not fields - words


def test_the_readme_shows_every_verb_and_no_other() -> None:
    verbs = set(typer.main.get_command(app).commands)  # pyright: ignore
    text = text_of(ROOT / "README.md")
    assert set(re.findall(r"^\| `(\w+)` \| `xsalab ", text, re.MULTILINE)) == verbs
    assert set(re.findall(r"\bxsalab (\w+) [\w./]+\.toml", text)) <= verbs


def test_the_readme_s_experiment_loads(tmp_path: Path) -> None:
    block = re.search(r"```toml\n(.*?)```", text_of(ROOT / "README.md"), re.DOTALL)
    assert block
    path = tmp_path / "experiment.toml"
    path.write_text(block[1], encoding="utf-8")
    experiment = load_experiment(path)
    assert {"standard", "xsa", "xsa-adamw", "null", "positive", "twin"} == set(experiment.arms)
    assert experiment.arms["xsa-adamw"].factors == ("variant", "optim.kind")
    assert len(expand(experiment)) == 6 * 5 + 1
