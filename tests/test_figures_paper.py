"""Figures for a paper: well-formed SVG that says what the content says, with text as text, the same bytes each time."""

from __future__ import annotations

import ast
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from fake_runs import fake
from paper_content import NASTY, renamed, rich
from xsalab import figures_paper
from xsalab.experiment.outcome import outcome
from xsalab.figures_paper import Picture, paper_figures, write_figures
from xsalab.paper import write_paper
from xsalab.report import losses

pytest.importorskip("matplotlib")
SVG = "{http://www.w3.org/2000/svg}"


def texts(picture: Picture) -> list[str]:
    return ["".join(found.itertext()) for found in ET.fromstring(picture.svg).iter(f"{SVG}text")]


def drop_but(content: dict[str, Any], *sections: str) -> dict[str, Any]:
    """Fewer figures, for a test of some."""
    empty = {"mechanism": [], "stability": [], "rates": [], "contrasts": []}
    return {**content, **{name: value for name, value in empty.items() if name not in sections}}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Any, dict[str, Picture]]:
    content, curves = rich(tmp_path_factory.mktemp("figures"))
    return content, curves, {picture.name: picture for picture in paper_figures(content, curves)}


@pytest.mark.slow
def test_all_that_the_content_has_is_drawn(made: Any) -> None:
    """One file a figure, in the order of the report; each names its arms, in the picture and in its alt text."""
    content, _, pictures = made
    assert list(pictures) == [
        "intervals", "losses", "differences", "map-cos_before", "map-reach", "map-alpha_gradient", "positions",
        "training", "geometry", "cosines", "stability", "rates",
    ]  # fmt: skip
    effects = [row for row in content["contrasts"] if row["kind"] == "effect"]
    assert effects
    for row in effects:
        name = f"{row['treatment']} − {row['baseline']}"
        for figure in ("intervals", "differences"):
            assert name in texts(pictures[figure])
            assert name in pictures[figure].alt
        assert name.replace(" ", "") in "".join(texts(pictures["map-reach"])).replace(" ", "")
    for arm in (arm for arm in content["arms"] if arm != "twin"):
        for figure in ("losses", "stability"):
            assert arm in texts(pictures[figure])
    for arm in ("standard-muon", "xsa-muon", "standard-adamw", "xsa-adamw"):
        for figure in ("map-reach", "training", "geometry"):
            assert arm in texts(pictures[figure])
    assert "standard" in texts(pictures["rates"])
    assert any("nats a token" in text for text in texts(pictures["map-alpha_gradient"]))


@pytest.mark.slow
def test_the_files_are_plain_svg_and_say_no_date(made: Any) -> None:
    """Well-formed, text as text (no glyph is a path), a title, no raster, no date and no address of a program."""
    for picture in made[2].values():
        svg = picture.svg.decode("utf-8")
        root = ET.fromstring(picture.svg)
        assert root.tag == f"{SVG}svg"
        assert texts(picture)
        assert root.find(f"{SVG}title") is not None
        assert "<image" not in svg
        assert "DejaVuSans-" not in svg
        assert "<dc:date>" not in svg
        assert "matplotlib.org" not in svg
        width = float(root.attrib["width"].removesuffix("pt"))
        assert 3.4 * 72 - 1 <= width <= 7.2 * 72
        sizes = [float(size) for size in re.findall(r"font-size: ([\d.]+)px", svg)]
        assert min(sizes) >= 6


@pytest.mark.slow
def test_made_twice_they_are_the_same_bytes(made: Any) -> None:
    """Ids are fixed, so that a committed figure changes only where its content does."""
    content, curves, pictures = made
    again = paper_figures(drop_but(content, "contrasts", "rates"), curves)
    assert {picture.name for picture in again} == {"intervals", "losses", "differences", "rates"}
    assert all(picture.svg == pictures[picture.name].svg for picture in again)


def test_names_from_outside_are_escaped() -> None:
    """F170: markup, mathematics and control characters in names stay text, and no path leaves the folder."""
    rows = [{"point": "../p", "arm": NASTY + "x$", "low": 0.0, "high": 0.5, "finished": 2, "diverged": 0}]
    content = {
        "points": ["../p", "q"], "arms": {NASTY + "x$": ""}, "baseline": "b", "crossed": {}, "contrasts": [],
        "stability": [{**rows[0], "arm": NASTY + "x$\x00"}], "engine": "xsalab", "metric": "bpb",
        "rates": [
            {
                "point": "../p", "factor": "optim.<r>", "rates": [1.0],
                "rows": [{"levels": "<l> $l$", "means": [2.0], "sds": [None]}],
            }
        ],
    }  # fmt: skip
    stability, rates = paper_figures(content, {})
    assert NASTY + "x$\N{REPLACEMENT CHARACTER}, ../p" in texts(stability)
    assert "optim.<r>" in texts(rates)
    assert "<l> $l$" in texts(rates)
    assert rates.name == "rates-..-p"
    assert re.fullmatch(r"[A-Za-z0-9._-]+", rates.name)


def test_what_is_missing_is_left_out(tmp_path: Path) -> None:
    """No run at all: no figure. One step of diagnosis: no curve, but the maps."""
    assert paper_figures(outcome(*fake(tmp_path, change=lambda cell: {"state": "waiting"})), {}) == []


@pytest.mark.slow
def test_a_map_shows_the_values_and_their_difference(made: Any) -> None:
    """As many cells as layers × heads in every map, less the head without a value; differences of the effects."""
    content, _, pictures = made
    effects = [row for row in content["contrasts"] if row["kind"] == "effect"]
    cells = re.findall(
        r'<path d="[^"]*"[^>]*style="fill: #[0-9a-f]{6}; stroke: #ffffff', pictures["map-cos_before"].svg.decode()
    )
    assert len(cells) == 12 * (4 + len(effects))
    cells = re.findall(
        r'<path d="[^"]*"[^>]*style="fill: #[0-9a-f]{6}; stroke: #ffffff', pictures["map-reach"].svg.decode()
    )
    second = next(iter(list(content["mechanism"][0]["arms"])[1:]))
    touched = sum(second in (row["treatment"], row["baseline"]) for row in effects)
    assert len(cells) == 12 * (4 + len(effects)) - 1 - touched


def test_the_folder_is_written_whole_or_refused(tmp_path: Path, made: Any) -> None:
    """A file in the folder's place is named with its remedy; what is there is what was drawn."""
    pictures = list(made[2].values())[:2]
    paths = write_figures(tmp_path / "new" / "figures", pictures)
    assert [path.read_bytes() for path in paths] == [picture.svg for picture in pictures]
    assert sorted(path.name for path in paths[0].parent.iterdir()) == ["intervals.svg", "losses.svg"]
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(ValueError, match=r"--figures .*file: cannot write there .*choose another folder"):
        write_figures(tmp_path / "file", pictures)
    with pytest.raises(ValueError, match=r"--figures .*sub: cannot write there"):
        write_figures(tmp_path / "file" / "sub", pictures)


def test_the_markdown_links_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Any) -> None:
    """By relative paths that lead from report.md to the files, blanks in them escaped, with the alt text."""
    pictures = [made[2]["intervals"], made[2]["map-reach"]]
    monkeypatch.setattr("xsalab.paper.paper_figures", lambda *_: pictures)
    experiment, store = fake(tmp_path)
    content = {**outcome(experiment, store), "mechanism": made[0]["mechanism"]}
    folder = tmp_path / "my figures"
    text, *files = write_paper(experiment, store, content, losses(experiment, store), "md", folder)
    links = re.findall(r"!\[(.*)\]\(<(.*)>\)", text.read_text(encoding="utf-8"))
    assert [(text.parent / address.replace("%20", " ")).resolve() for _, address in links] == [
        f.resolve() for f in files
    ]
    assert all(" " not in address and not address.startswith("/") for _, address in links)
    assert all(len(alt) > 20 for alt, _ in links)


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"pip install 'xsalab\[paper\]'"):
        paper_figures({}, {})


def test_matplotlib_is_imported_where_it_draws_and_without_pyplot() -> None:
    """Starting the command does not wait for it, and no figure stays in a global state."""
    assert figures_paper.__file__ is not None
    tree = ast.parse(Path(figures_paper.__file__).read_text(encoding="utf-8"))
    top = [ast.unparse(node) for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert not any("matplotlib" in line for line in top)
    every = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert any("matplotlib" in line for line in every)
    assert not any("pyplot" in line for line in every)


def test_renaming_changes_every_place() -> None:
    """The helper of these tests."""
    assert renamed({"a": ["a-b", {"x": 1}]}, "a", "c") == {"c": ["c-b", {"x": 1}]}
