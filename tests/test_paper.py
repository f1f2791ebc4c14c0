"""report.md and report.tex say what the content says, and nothing in it is read as markup."""

from __future__ import annotations

import itertools
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fake_runs import fake
from paper_content import NASTY, renamed, rich
from xsalab.experiment.outcome import outcome
from xsalab.figures_paper import Picture
from xsalab.paper import check_format, document, write_paper
from xsalab.paper_format import Bullets, Code, Paragraph, Table, latex, latex_text, markdown, markdown_text
from xsalab.report import losses

Tables = dict[str, tuple[list[str], list[list[str]]]]


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return rich(tmp_path_factory.mktemp("paper"))[0]


# What a reader of Markdown sees, by its own rules and not by our writer's.


def unescaped(text: str) -> str:
    for entity, character in (("&lt;", "<"), ("&gt;", ">"), ("&amp;", "&")):
        text = text.replace(entity, character)
    return re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", text)


def tables_of(text: str) -> Tables:
    """Caption -> (columns, rows) of every pipe table."""
    found: Tables = {}
    blocks = re.sub(r"(?ms)^(`{3,})\w*$.*?^\1$", "", text).split("\n\n")
    for caption, block in itertools.pairwise(blocks):
        lines = block.splitlines()
        if len(lines) > 1 and re.fullmatch(r"\|( :?-+:? \|)+", lines[1]):
            rows = [[unescaped(c.strip()) for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
            assert len({len(row) for row in rows}) == 1
            found[unescaped(caption)] = rows[0], rows[2:]
    return found


def table(text: str, word: str) -> list[dict[str, str]]:
    ((columns, rows),) = [value for caption, value in tables_of(text).items() if word in caption]
    return [dict(zip(columns, row, strict=True)) for row in rows]


def as_float(cell: str) -> float:
    return float(cell.replace("−", "-").split(" ")[0])


def near(cell: str, value: float, digits: int) -> bool:
    """Whether the cell is the value, rounded to so many significant digits."""
    return math.isclose(as_float(cell), value, rel_tol=0.6 * 10 ** (1 - digits), abs_tol=1e-12)


def test_the_markdown_tables_hold_the_numbers(content: dict[str, Any]) -> None:
    """Read back: every contrast's difference, interval and p, every seed's value, shares, rates, published figures."""
    text = markdown(document(content, "x.toml"))
    rows = table(text, "every contrast")
    assert len(rows) == len(content["contrasts"])
    for row, contrast in zip(rows, content["contrasts"], strict=True):
        estimate = contrast["estimate"]
        assert near(row["Δ bpb"], estimate["mean"], 3)
        low, high = row["interval"].split(" to ")
        assert near(low, estimate["low"], 2)
        assert near(high, estimate["high"], 2)
        assert row["p"] == "below 0.0001" or near(row["p"], estimate["p"], 2)
        assert row["verdict"] == ("noise" if contrast["kind"] == "null" else contrast["verdict"]["text"])
    values = {(run["arm"], run["seed"]): run["value"] for run in content["runs"]}
    seeds = table(text, "of every run")
    assert len(seeds) == len(content["arms"])
    for row in seeds:
        arm = {"null control": "null", "positive control": "positive"}.get(row["arm"], row["arm"])
        assert [as_float(row[f"seed {s}"]) for s in (0, 1, 2)] == [round(values[arm, s], 6) for s in (0, 1, 2)]
    levels = {level["arm"]: level["mean"] for level in content["levels"]}
    for row in table(text, "mean over seeds (lower is better)"):
        if row["arm"] in levels:
            assert as_float(row["val bpb"]) == pytest.approx(levels[row["arm"]], abs=6e-5)
    for row, combined in zip(table(text, "main effects"), content["combinations"], strict=True):
        assert row["contrast"] == combined["words"]
        assert as_float(row["Δ bpb"]) == pytest.approx(combined["estimate"]["mean"], abs=6e-4)
    stable = table(text, "stability. Interval")[0]
    assert (stable["runs"], stable["diverged"], stable["interval"]) == ("3", "1", "0.84 % to 91 %")
    assert (stable["largest z"], stable["largest logit"]) == ("7.25", "21.5")
    (rates,) = table(text, "by optim.lr_scale")
    assert (rates["0.500"], rates["1.00"], rates["2.00"]) == ("2.3456", "2.1234", "(3 diverged)")
    (ours,) = table(text, "published figures")
    assert [ours[name] for name in ("standard", "XSA", "published difference")] == ["0.8484", "0.8457", "−0.0027"]
    assert as_float(ours["our difference"]) == pytest.approx(content["contrasts"][0]["estimate"]["mean"], abs=1e-3)


def test_the_mechanism_by_layer_is_the_mean_over_heads(content: dict[str, Any]) -> None:
    """A layer with a head that has no value has none either; controls are left out and the caption says so."""
    (entry,) = content["mechanism"]
    text = markdown(document(content, "x.toml"))
    rows = {(row["measure"], row["arm"]): row for row in table(text, "by layer")}
    first, second = list(entry["arms"])[:2]
    for layer in range(3):
        cells = entry["arms"][first]["final"]["cos_before"]["mean"][layer]
        assert near(rows["cosine of output and own value", first][f"layer {layer}"], sum(cells) / 4, 3)
    assert rows["effective context [tokens]", second]["layer 0"] == ""
    assert rows["effective context [tokens]", second]["layer 1"] != ""
    assert not any("control" in arm for _, arm in rows)
    assert any("controls and the other measures are on the page" in caption for caption in tables_of(text))
    (geometry,) = [row for row in table(text, "geometry of the update") if row["arm"] == first]
    last = [values[-1] for values in entry["arms"][first]["geometry"]["update_spread"]["values"]]
    assert near(geometry["spread of singular values"], sum(last) / 3, 3)
    (predicted,) = table(text, "as a prediction")
    assert (predicted["predicted"], predicted["measured"]) == ("−0.0123", "−0.00456")


def test_the_order_is_the_pages_and_all_is_there(content: dict[str, Any]) -> None:
    """Verdict first, how to repeat last; the TOML as it is."""
    pictures = [Picture(name, name, f"alt {name}", b"") for name in ("intervals", "curves", "mechanism", "stability")]
    text = markdown(document(content, "x.toml", pictures, lambda picture: f"f/{picture.name}.svg"))
    words = [
        content["headline"][0].split(" (")[0],
        "## Quality and cost",
        "## Contrasts",
        "## All seeds",
        "intervals.svg",
    ]
    words += [
        "## Training loss",
        "## Factors",
        "## Mechanism",
        "a sentence of the maps",
        "mechanism.svg",
        "## Stability",
    ]
    words += ["spikes at steps 10, 11, 12, 13, 14, 15 and 2 more, not finite at step 31", "## Learning rates"]
    words += ["best words; chosen on other seeds", "## Beside the published figures", "One run an arm."]
    words += ["## What was equal", "## Data and machine", "## Run it again", content["toml"].strip()]
    places = [text.find(word) for word in words]
    assert -1 not in places, words[places.index(-1)]
    assert places == sorted(places)
    assert "![alt mechanism](<f/mechanism.svg>)" in text
    assert "nan" not in text.lower().replace("nanochat", "")
    assert "None" not in text


def test_several_points_stand_in_a_column(tmp_path: Path) -> None:
    """Every table of two points says which point a row is of."""
    content, _ = rich(tmp_path, points=True)
    text = markdown(document(content, "x.toml"))
    for word in ("every contrast", "of every run", "stability. Interval", "mean over seeds (lower"):
        assert {row["point"] for row in table(text, word)} == {"d2", "d3"}
    assert {row["point"] for row in table(text, "main effects")} == {"d2", "d3", "all"}
    assert len([caption for caption in tables_of(text) if "by layer" in caption]) == 2


def test_an_older_or_empty_content_leaves_sections_out(tmp_path: Path) -> None:
    """No diagnosis, no rates, no published sizes, no finished run: no heading, no empty table, nothing invented."""
    content = outcome(*fake(tmp_path, change=lambda cell: {"state": "waiting"}))
    for name in ("mechanism", "stability", "run_stability", "rates", "published"):
        content.pop(name, None)
    content["stability"] = []
    text = markdown(document(content, "x.toml"))
    assert "No verdict yet" in text
    for word in ("## Mechanism", "## Stability", "## Learning rates", "published", "## Cost", "## Factors"):
        assert word not in text
    assert all(rows for _, rows in tables_of(text).values())
    check_latex(latex(document(content, "x.toml"), "t"))


def test_markdown_escapes_what_comes_from_outside(content: dict[str, Any]) -> None:
    """F170: a name of special characters comes back whole from every table, and opens no markup."""
    nasty = renamed(content, "xsa-muon", NASTY)
    text = markdown(document(nasty, "x.toml"))
    assert any(row["contrast"] == f"{NASTY} − standard-muon" for row in table(text, "every contrast"))
    outside = re.sub(r"(?ms)^(`{3,})\w*$.*?^\1$", "", text)
    assert not set("<>") & set(outside)
    assert not re.search(r"(?<!\\)`", outside)


def test_a_line_of_text_begins_no_list_and_a_fence_holds_its_text() -> None:
    """F170: what begins like a list, a heading or a rule stays text; a text with fences in it gets longer ones."""
    text = markdown([Paragraph("# a"), Paragraph("1. b"), Bullets(("- c", "=== d")), Paragraph("+ e\n- f")])
    assert text == "\\# a\n\n1\\. b\n\n- \\- c\n- \\=== d\n\n\\+ e - f\n"
    fenced = markdown([Code("a\n```\n</b>\n````x\n\x00", "toml")])
    assert fenced.startswith("`````toml\n")
    assert fenced.count("`````") == 2
    assert "\x00" not in fenced
    assert markdown_text("a\x1b[1m|b\n|c") == "a\N{REPLACEMENT CHARACTER}\\[1m\\|b \\|c"


# LaTeX, by a small reader of its own: what pdfTeX makes of each sequence, in the OT1 encoding of an article

MEANING = {
    r"\textbackslash{}": "\\", r"\{": "{", r"\}": "}", r"\$": "$", r"\&": "&", r"\#": "#", r"\_": "_", r"\%": "%",
    r"\textasciicircum{}": "^", r"\textasciitilde{}": "~", r"\textless{}": "<", r"\textgreater{}": ">",
    r"\textbar{}": "|", "{[}": "[", "{]}": "]", "{*}": "*", "-{}": "-", r"\textasciigrave{}": "`", "$-$": "−",
    r"$\pm$": "±", r"$\alpha$": "α", r"$\times$": "×", r"$\Delta$": "Δ", r"$\partial$": "∂", r"\ldots{}": "…",
    "``": "“", "''": "”", "---": "—", "--": "–",
}  # fmt: skip
_TOKEN = re.compile("|".join(re.escape(key) for key in sorted(MEANING, key=len, reverse=True)) + r"|(.)", re.DOTALL)


def read_latex(text: str) -> str:
    def one(match: re.Match[str]) -> str:
        if match[1] is None:
            return MEANING[match[0]]
        assert match[1] not in "\\{}$&#_%^~<>|[]*", f"unescaped {match[1]!r} in {text!r}"
        assert match[1].isascii() or match[1] in "éüß’", f"{match[1]!r} is no letter of pdfLaTeX"
        return match[1]

    return _TOKEN.sub(one, text)


def check_latex(text: str) -> list[dict[str, Any]]:
    """The tables of the file: caption, label, rows of cells as read. Fails where TeX would."""
    found: list[dict[str, Any]] = []
    body = "\n".join(line for line in text.splitlines() if not line.startswith("%"))
    pieces = re.findall(r"(?s)\\begin\{table\}(.*?)\\end\{table\}", body)
    assert not re.sub(r"(?s)\\begin\{table\}.*?\\end\{table\}", "", body).strip(), "text outside of the tables"
    for piece in pieces:
        shape = re.fullmatch(
            r"(?s)\n\\centering\n\\(?:small|footnotesize)\n\\setlength\{\\tabcolsep\}\{4pt\}\n\\caption\{(?P<caption>[^\n]*)\}"
            r"\n\\label\{tab:(?P<label>[A-Za-z0-9-]+)\}\n\\begin\{tabular\}\{@\{\}(?P<sides>.*?)@\{\}\}\n\\toprule\n(?P<rows>.*)"
            r"\\bottomrule\n\\end\{tabular\}\n",
            piece,
        )
        assert shape, piece
        head, rest = shape["rows"].split("\\midrule\n")
        lines = (head + rest).splitlines()
        assert all(line.endswith(r" \\") for line in lines)
        rows = [[read_latex(cell) for cell in re.split(r"(?<!\\) & ", line[:-3])] for line in lines]
        sides = re.sub(r"p\{[0-9.]+\\linewidth\}", "p", shape["sides"])
        assert set(sides) <= set("lrp")
        assert {len(row) for row in rows} == {len(sides)}, piece
        found.append({"caption": read_latex(shape["caption"]), "label": shape["label"], "rows": rows})
    labels = [entry["label"] for entry in found]
    assert len(set(labels)) == len(labels)
    return found


def test_latex_tables_are_whole_and_escaped(content: dict[str, Any]) -> None:
    """F170: every row has its columns, every special character is escaped, one caption and label a table."""
    nasty = renamed(content, "xsa-muon", NASTY)
    nasty["points"] = content["points"]
    found = check_latex(latex(document(nasty, "x.toml"), "title\n\\evil"))
    cells = {cell for entry in found for row in entry["rows"] for cell in row}
    assert f"{NASTY} − standard-muon" in cells
    assert "−0.0027" in cells
    captions = [entry["caption"] for entry in found]
    assert any("± half of its 95 % interval" in caption for caption in captions)
    assert len(found) >= 12


def test_every_special_character_is_read_back() -> None:
    """F170: all of ASCII, the signs of our tables; a letter that pdfLaTeX has not is told by its number."""
    ascii_text = "".join(chr(code) for code in range(33, 127) if chr(code) not in "\"'")
    for text in (ascii_text, NASTY, "−0.0031 ± 0.0012 × α Δ", "é", "a---b", "?`!`", "[*] & \\\\"):
        assert read_latex(latex_text(text)) == text
    assert latex_text("中") == "U+4E2D"
    assert latex_text('"') == "''"


def test_a_table_too_large_for_a_page_is_told_in_parts() -> None:
    """20 columns and 100 rows: every cell once, the names repeated, each part with its own label and number."""
    rows = tuple((f"arm{i}", *(f"{i}.{j}" for j in range(20))) for i in range(100))
    wide = Table("t", "Caption.", ("arm", *(f"seed {j}" for j in range(20))), rows)
    found = check_latex(latex([wide], "t"))
    assert [entry["caption"] for entry in found] == [f"Caption. Part {i} of 9." for i in range(1, 10)]
    cells = [cell for entry in found for row in entry["rows"][1:] for cell in row[1:]]
    assert sorted(cells) == sorted(f"{i}.{j}" for i in range(100) for j in range(20))
    assert all(row[0].startswith("arm") for entry in found for row in entry["rows"])


def test_it_compiles(tmp_path: Path, content: dict[str, Any]) -> None:
    """In an article with booktabs alone."""
    program = shutil.which("pdflatex")
    if program is None:
        pytest.skip("no pdflatex here")
    (tmp_path / "t.tex").write_text(
        latex(document(renamed(content, "xsa-muon", NASTY), "x.toml"), "t"), encoding="utf-8"
    )
    article = "\\documentclass{article}\\usepackage{booktabs}\\begin{document}x\\input{t}\\end{document}\n"
    (tmp_path / "a.tex").write_text(article, encoding="utf-8")
    subprocess.run([program, "-interaction=batchmode", "-halt-on-error", "a.tex"], cwd=tmp_path, check=True)


# The files


def test_the_texts_come_from_the_runs_alone(tmp_path: Path) -> None:
    """A changed summary.json changes nothing, and the same store gives the same bytes."""
    experiment, store = fake(tmp_path)
    content = outcome(experiment, store)
    (path,) = write_paper(experiment, store, content, losses(experiment, store), "md")
    first = path.read_bytes()
    (store.folder / "summary.json").write_text('{"headline": ["better"]}', encoding="utf-8")
    write_paper(experiment, store, outcome(experiment, store), losses(experiment, store), "md")
    assert path.read_bytes() == first
    assert path.name == "report.md"
    (tex,) = write_paper(experiment, store, content, {}, "latex")
    assert tex.name == "report.tex"
    check_latex(tex.read_text(encoding="utf-8"))


def test_no_half_written_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full leaves the former report as it was."""
    experiment, store = fake(tmp_path)
    content = outcome(experiment, store)
    (path,) = write_paper(experiment, store, content, {}, "md")
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="disk full"):
        write_paper(experiment, store, content, {}, "md")
    assert path.read_bytes() == before
    assert not list(path.parent.glob(".*tmp"))


def test_another_format_is_refused() -> None:
    with pytest.raises(ValueError, match="--format pdf: no such format; use one of html, md, latex"):
        check_format("pdf")
