"""The report says what the outcome says, of any experiment: whole, half done, broken, hostile.

The experiments here are written to disk as runs would leave them, without training; ``outcome`` reads them as it
reads real ones.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import fake_mechanism
from fake_runs import (
    CROSSED,
    DOSES,
    HEAD,
    HOSTILE,
    TASKS,
    TOML,
    Change,
    fake,
    fake_answers,
    fake_run,
    fake_tuned,
    looked_at,
    timed,
)
from xsalab.drawing import plain_number
from xsalab.experiment import outcome as outcome_module
from xsalab.experiment.design import Cell, Experiment, expand
from xsalab.experiment.outcome import outcome, plus_minus
from xsalab.experiment.reading import load_experiment
from xsalab.experiment.store import RunStore
from xsalab.report import (
    SPELLED,
    benchmark_figure,
    benchmark_lines,
    embed,
    guessing,
    print_outcome,
    render,
    script,
    write_report,
)


class Page(HTMLParser):
    """The elements and the visible text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.data = ""
        self.script = ""
        self.inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = dict(attrs).get("type") or tag

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside == "application/json":
            self.data += data
        elif self.inside == "script":
            self.script += data
        elif self.inside != "style":
            self.text.append(data)

    @property
    def visible(self) -> str:
        return " ".join("".join(f"{part} " for part in self.text).split())


def page_of(experiment: Experiment, store: RunStore) -> Page:
    return Page(write_report(experiment, store, outcome(experiment, store)).read_text(encoding="utf-8"))


def diverge(arm: str, *seeds: int) -> Change:
    message = "step 30: loss nan, gradient norm inf: not finite, stopped"
    return lambda cell: (
        {"state": "diverged", "step": 30, "message": message} if cell.arm == arm and cell.seed in seeds else {}
    )


def wait(*seeds: int) -> Change:
    return lambda cell: {"state": "waiting"} if cell.seed in seeds or cell.arm == "twin" else {}


def run_half(cell: Cell) -> dict[str, Any]:
    return {"state": "running", "step": 7} if cell.seed == 1 else {"state": "waiting"}


SEEDS = "seeds = [0, 1, 2, 3, 4, 5]"
POINTS = '[[points]]\nname = "d2"\n[[points]]\nname = "d3"\ndepth = 3\n'
CASES: dict[str, tuple[str, Change]] = {
    "whole": (TOML, lambda cell: {}),
    "one seed": (TOML.replace(SEEDS, "seeds = [0]"), lambda cell: {}),
    "two seeds": (TOML.replace(SEEDS, "seeds = [0, 1]"), lambda cell: {}),
    "some runs missing": (TOML, wait(3, 4, 5)),
    "nothing run": (TOML, lambda cell: {"state": "waiting"}),
    "running": (TOML, run_half),
    "one run diverged": (TOML, diverge("xsa", 2)),
    "every run of an arm diverged": (TOML, diverge("xsa", *range(6))),
    "baseline diverged": (TOML, diverge("standard", *range(6))),
    "positive control diverged": (TOML, diverge("positive", 0, 1)),
    "no controls": (TOML.split("[controls]")[0] + "[controls]\nnull = false\ntwin = false\n", lambda cell: {}),
    "several points": (TOML.replace(SEEDS, SEEDS + "\n" + POINTS.split("[[")[0]) + POINTS, lambda cell: {}),
    "declared contrast of two arms": (
        TOML.replace("[model]", '[primary]\ncontrast = "half - xsa"\n[model]'),
        lambda cell: {},
    ),
    "crossed": (HEAD + CROSSED, lambda cell: {}),
    "crossed, runs missing": (HEAD + CROSSED, wait(1, 3)),
    "crossed, an arm diverged": (HEAD + CROSSED, diverge("xsa-adamw", 0, 4)),
    "crossed, one seed": ((HEAD + CROSSED).replace(SEEDS, "seeds = [0]"), lambda cell: {}),
    "crossed, with a family": (
        HEAD + '[primary]\nfamily = ["(xsa - standard) x (adamw - muon)"]\n' + CROSSED,
        lambda cell: {},
    ),
    "doses": (HEAD + DOSES, lambda cell: {}),
    "doses, nothing run": (HEAD + DOSES, lambda cell: {"state": "waiting"}),
    "doses, two seeds": ((HEAD + DOSES).replace(SEEDS, "seeds = [0, 1]"), lambda cell: {}),
    "baseline alone": (TOML.split("[arms.xsa]")[0], lambda cell: {}),
}


@pytest.fixture(params=CASES, ids=lambda name: name.replace(" ", "-"), scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Experiment, RunStore]:
    toml, change = CASES[request.param]
    return fake(tmp_path_factory.mktemp("case"), toml, change)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Experiment, RunStore]:
    return fake(tmp_path_factory.mktemp("whole"))


def test_any_experiment_makes_a_page_without_nan(case: tuple[Experiment, RunStore]) -> None:
    """F164: p without spread, one pair, diverged runs: words, never NaN, and never Python's None."""
    experiment, store = case
    page = page_of(experiment, store)
    assert not re.search(r"\b(nan|NaN|None|Undefined|inf)\b", page.visible.replace("gradient norm inf", ""))
    svg = store.folder.glob("*.svg")
    assert all(not re.search(r"\bnan\b|\binf\b|var\(", file.read_text(encoding="utf-8")) for file in svg)
    json.loads((store.folder / "summary.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)


def test_any_experiment_prints_in_80_columns(case: tuple[Experiment, RunStore]) -> None:
    content = outcome(*case)
    for encoding in ("utf-8", "ascii"):
        raw = io.BytesIO()
        file = io.TextIOWrapper(raw, encoding=encoding, errors="strict", newline="")
        print_outcome(content, Console(file=file, width=80, force_terminal=True, color_system=None))
        file.flush()
        text = raw.getvalue().decode(encoding)
        assert max(len(line) for line in text.splitlines()) <= 80
        assert "…" not in text.split("\n\n")[0], "a number of the table was cut"
        for row in content["contrasts"]:
            if "estimate" in row:
                shown = plus_minus(row["estimate"]["mean"], row["estimate"]["half_width"])
                assert (shown if encoding == "utf-8" else shown.translate(SPELLED)) in text


def test_every_seed_is_on_the_page_and_none_is_best(whole: tuple[Experiment, RunStore]) -> None:
    """F053: mean, spread and all values; no best one."""
    experiment, store = whole
    page, content = page_of(experiment, store), outcome(experiment, store)
    for run in content["runs"]:
        assert f"{run['val_bpb']:.6f}" in page.visible
    for row in content["contrasts"]:
        for seed, value in zip(row["seeds"], row["differences"], strict=True):
            assert f"{value:+.6f}".replace("-", "−") in page.visible
            assert page.visible.count(f"seed {seed}:") >= len(content["contrasts"])  # the dots' tooltips
    assert sum(tag == "circle" for tag, _ in page.tags) == sum(len(row["seeds"]) for row in content["contrasts"])
    assert not re.search(r"\bbest\b", page.visible)


def test_the_page_says_what_the_outcome_says(
    whole: tuple[Experiment, RunStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    cost = {"point": "base", "arm": "xsa", "ratio": 1.0234, "low": 1.011, "high": 1.0345, "seconds": 0.06,
            "saved_bytes": 15220012, "saved_ratio": 1.0357}  # fmt: skip
    base = {"baseline_seconds": 0.0655, "baseline_saved_bytes": 14695724}
    control = {**cost, "arm": "timing control", "ratio": 0.987}
    costs = {"rounds": 8, "others": 0.4, "busy": True, "costs": [cost, control], "points": {"base": base}}
    monkeypatch.setattr(outcome_module, "measured_costs", lambda experiment, store: costs)
    experiment, store = whole
    page, content = page_of(experiment, store), outcome(experiment, store)
    for text in (*content["headline"], *content["warnings"], "× 1.023", "1.011 to 1.034", "× 1.036", "× 0.987"):
        assert text in page.visible
    for row in content["contrasts"]:
        estimate = row["estimate"]
        shown = f"{estimate['mean']:+.4f} ± {estimate['half_width']:.4f}".replace("-", "−")
        assert shown in page.visible
        assert f"{estimate['treatment_mean']:.4f}" in page.visible
        assert f"smallest: {row['sign_flip']['smallest']:.2g}" in page.visible
        assert f"{100 * estimate['parts']['seeds']:.0f} / {100 * estimate['parts']['documents']:.0f} /" in page.visible
    assert {row["verdict"]["text"] for row in content["contrasts"] if row["kind"] == "positive"} == {"worse"}
    assert "identical to the bit" in page.visible
    assert json.loads((store.folder / "summary.json").read_text(encoding="utf-8")) == json.loads(json.dumps(content))
    assert json.loads(page.data) == json.loads(json.dumps(content))


def test_a_script_in_a_name_or_comment_is_shown_literally(tmp_path: Path) -> None:
    """F170: text in the page and in its JSON ends no element and begins none."""
    toml = TOML.replace(
        'variant = "xsa"\nalpha = 0.5', f'variant = "xsa"\nalpha = 0.5\nnote = "{HOSTILE}\\u0001\\u2028"'
    )
    path = tmp_path / "paired.toml"
    path.write_text(toml, encoding="utf-8")
    experiment = load_experiment(path, known_variants=False)
    store = RunStore.of(experiment, tmp_path)
    store.folder.mkdir(parents=True)
    for cell in expand(experiment):
        fake_run(experiment, store, cell, {"state": "finished", "step": 9, "steps": 9})
    page = page_of(experiment, store)
    scripts = [attributes for tag, attributes in page.tags if tag == "script"]
    assert scripts == [{"type": "application/json", "id": "summary"}, {}]
    assert page.script == script(), "the page's own script, to the letter: nothing of the experiment is in it"
    assert HOSTILE in page.visible
    assert json.loads(page.data)["toml"] == toml
    raw = (store.folder / "report.html").read_text(encoding="utf-8")
    assert "<script>alert" not in raw
    assert "\u2028" not in raw.split('id="summary">')[1]
    assert not any(name.startswith("on") or (name in ("src", "href") and not str(value).startswith("#"))
                   for _, attributes in page.tags for name, value in attributes.items())  # fmt: skip
    from xml.etree import ElementTree

    ElementTree.fromstring((store.folder / "intervals.svg").read_text(encoding="utf-8").partition("\n")[2])


def test_embedded_json_escapes_what_html_and_javascript_read() -> None:
    """F170"""
    text = str(embed({"a": "<>&\u2028\u2029</script>"}))
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == {"a": "<>&\u2028\u2029</script>"}


def test_the_page_needs_nothing_from_outside(whole: tuple[Experiment, RunStore]) -> None:
    """One file, UTF-8 declared first (F159), and a policy under which no request and no script but its own runs."""
    page = page_of(*whole)
    metas = [attributes for tag, attributes in page.tags if tag == "meta"]
    assert metas[0] == {"charset": "utf-8"}
    policy = next(meta["content"] for meta in metas if meta.get("http-equiv") == "Content-Security-Policy")
    own = base64.b64encode(hashlib.sha256(page.script.encode()).digest()).decode()
    assert policy == (
        f"default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'unsafe-inline'; script-src 'sha256-{own}'"
    )
    assert not {tag for tag, _ in page.tags} & {"link", "img", "iframe", "object", "embed"}
    raw = (whole[1].folder / "report.html").read_text(encoding="utf-8")
    assert "\r" not in raw, "a carriage return in the script would change its hash"
    assert "innerHTML" not in page.script


def test_a_failed_write_leaves_the_old_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    experiment, store = fake(tmp_path, TOML.replace(SEEDS, "seeds = [0]"))
    path = write_report(experiment, store, outcome(experiment, store))
    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "no space")))
    with pytest.raises(OSError, match="disk full"):
        write_report(experiment, store, outcome(experiment, store))
    assert path.read_bytes() == before
    assert not list(store.folder.glob("*.tmp")) + list(store.folder.glob(".*.tmp"))


def test_warnings_stand_before_the_first_table(tmp_path: Path) -> None:
    experiment, store = fake(tmp_path, change=diverge("standard", 1))
    page, content = page_of(experiment, store), outcome(experiment, store)
    assert content["warnings"]
    for warning in content["warnings"]:
        assert page.visible.index(warning) < page.visible.index("Quality and cost")


def test_an_inconclusive_verdict_comes_with_advice(tmp_path: Path) -> None:
    experiment, store = fake(tmp_path, TOML.replace(SEEDS, "seeds = [0, 1, 2]"))
    content = outcome(experiment, store)
    effects = [row["verdict"] for row in content["contrasts"] if row["kind"] == "effect"]
    undecided = [verdict for verdict in effects if verdict["word"] == "inconclusive"]
    assert undecided, "the small example is meant to be undecided"
    page = page_of(experiment, store)
    assert all(verdict["advice"] in page.visible for verdict in undecided if verdict["advice"])
    assert "not the same as “no difference”" in page.visible


def test_an_interval_that_the_family_overrules_is_called_a_hint(tmp_path: Path) -> None:
    """An interval beside zero with the word inconclusive must not be said to hold zero."""
    experiment, store = fake(tmp_path)
    content = outcome(experiment, store)
    row = next(row for row in content["contrasts"] if row["kind"] == "effect")
    row["verdict"] = {**row["verdict"], "word": "inconclusive", "text": "inconclusive", "below_margin": False}
    said = {}
    for low, high in ((-0.02, -0.01), (-0.02, 0.01)):
        row["estimate"] |= {"low": low, "high": high}
        said[high] = Page(render(content, {}, {}, "x.toml")).visible
    assert "a hint, not a verdict" in said[-0.01].lower()
    assert "interval holds zero and" not in said[-0.01]
    assert "interval holds zero and" in said[0.01]
    assert "a hint, not a verdict" not in said[0.01].lower()


@pytest.mark.parametrize(
    ("mean", "half", "text"),
    [
        (-0.00312, 0.0012, "−0.0031 ± 0.0012"),
        (0.0148, 0.0099999, "+0.015 ± 0.010"),
        (-2.23e-6, 2.03e-5, "−0.000002 ± 0.000020"),
        (12.3, 4.56, "+12.3 ± 4.6"),
        (0.5, 0.0, "+0.5 ± 0"),
        (-0.5, None, "−0.5"),
    ],
)
def test_two_digits_of_the_half_width_decide_the_digits(mean: float, half: float | None, text: str) -> None:
    assert plus_minus(mean, half) == text


def test_a_script_reads_one_line_a_sentence(whole: tuple[Experiment, RunStore]) -> None:
    content = outcome(*whole)
    file = io.StringIO()
    print_outcome(content, Console(file=file, width=80))
    lines = file.getvalue().splitlines()
    assert content["headline"][0] in lines
    assert "\x1b" not in file.getvalue()


def test_factors_stand_beside_their_sentence(tmp_path: Path) -> None:
    """Main effects and the interaction in the page and on the terminal, with the verdict that ``outcome`` gave."""
    experiment, store = fake(tmp_path, HEAD + CROSSED)
    content = outcome(experiment, store)
    page = page_of(experiment, store)
    console = Console(file=io.StringIO(), width=80)
    print_outcome(content, console)
    printed = " ".join(console.file.getvalue().split())  # pyright: ignore[reportAttributeAccessIssue]
    for row in content["combinations"]:
        assert row["words"] in page.visible
        shown = plus_minus(row["estimate"]["mean"], row["estimate"]["half_width"])
        assert shown in page.visible
        assert shown in printed
        assert row["verdict"]["text"] in page.visible


def test_a_dose_curve_says_where_its_minimum_can_lie(tmp_path: Path) -> None:
    experiment, store = fake(tmp_path, HEAD + DOSES)
    (row,) = outcome(experiment, store)["doses"]
    page = page_of(experiment, store)
    assert row["minimum"]["words"][1:] in page.visible
    dots = [dict(attributes) for tag, attributes in page.tags if tag == "circle"]
    assert (
        len([dot for dot in dots if dot["class"] == "dot f-c1" and dot["r"] == "3.5"]) == 4 * 6
    )  # doses but the first


def test_a_sequential_experiment_says_its_looks_and_its_confidence(tmp_path: Path) -> None:
    """No place says 95 % where the interval has another confidence."""
    experiment, store, content = looked_at(tmp_path, lambda cell: 0.0, 6)
    page = page_of(experiment, store)
    confidence = f"{100 * content['confidence']:.3g} %"
    assert confidence != "95 %"
    assert "looks at 4, 6 seeds were declared, this is the look at 6" in page.visible
    assert f"± half of its {confidence} interval" in page.visible
    console = Console(file=io.StringIO(), width=80)
    print_outcome(content, console)
    assert f"± {confidence}" in console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def test_equal_time_is_told_all_three_ways(tmp_path: Path) -> None:
    experiment, store = timed(tmp_path, 1.25)
    content = outcome(experiment, store)
    page = page_of(experiment, store)
    (row,) = content["equal_time"]
    assert row["slope"]["words"] in page.visible
    assert row["target"]["ratio"]["words"] in page.visible
    assert "xsa@equal-time - standard, 6 seeds" in page.visible
    console = Console(file=io.StringIO(), width=200)
    print_outcome(content, console)
    printed = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "trained again: xsa@equal-time" in printed
    assert "time to" in printed


# Benchmarks


def with_answers(folder: Path, toml: str = TOML) -> tuple[Experiment, RunStore]:
    """CORE of every run but one, ChatCORE of some, held-out losses, a task with a hostile name."""
    experiment, store = fake(folder, toml)
    tasks = {**TASKS, "<b>&task": (0.25, 0.5, 0.5, 30)}
    for cell in expand(experiment):
        gain = 0.15 if "xsa" in cell.arm else 0.0
        if cell.seed != 5:
            fake_answers(store, cell, gain=gain, tasks=tasks, counts={"cut": 2, "tied": cell.seed})
        if cell.arm.startswith(("standard", "xsa")):
            fake_answers(store, cell, "sft/chatcore", gain=gain)
        fake_tuned(store, cell, shift=-gain / 10)
    return experiment, store


@pytest.mark.parametrize("name", ["whole", "two seeds", "several points", "crossed, one seed"])
def test_benchmarks_are_on_the_page_and_in_the_terminal(tmp_path: Path, name: str) -> None:
    """Every figure, difference, sentence and count; whatever the experiment, no NaN, and 80 columns."""
    toml = CASES[name][0]
    experiment, store = with_answers(tmp_path, toml if name == "whole" else toml.replace(SEEDS, "seeds = [0, 1]"))
    content = outcome(experiment, store)
    page = Page(write_report(experiment, store, content).read_text(encoding="utf-8"))
    assert not re.search(r"\b(nan|NaN|None|Undefined|inf)\b", page.visible)
    assert "CORE and ChatCORE (accuracies on tasks): not measured" not in page.visible
    text = io.StringIO()
    print_outcome(content, Console(file=text, width=80, force_terminal=True, color_system=None))
    assert max(len(line) for line in text.getvalue().splitlines()) <= 80
    terminal = " ".join(text.getvalue().split())
    for line in benchmark_lines(content):
        assert line in terminal
    names = [found["name"] for found in content["benchmarks"]]
    assert names == ["CORE (4 of 22 tasks)", "ChatCORE after fine-tuning (3 of 5 tasks)", "chat bpb"]
    for found in content["benchmarks"]:
        assert found["name"] in page.visible
        for level in found["levels"]:
            shown = benchmark_figure(level["mean"]) if found["tasks"] else f"{level['mean']:.3f}"[:-1]
            assert shown in page.visible
        for row in (*found["contrasts"], *found["combinations"]):
            assert plus_minus(row["estimate"]["mean"], row["estimate"]["half_width"]) in page.visible
            if row["kind"] not in ("null", "positive"):
                assert row["sentence"] in page.visible
        for task in found["tasks"]:
            assert f"{task['chance']:.3f}" in page.visible
            for arm, level in task["arms"].items():
                assert arm in ("null", "positive") or f"{level['mean']:.3f}" in page.visible
    whole = content["benchmarks"][0]
    if name == "whole":
        touched = "items with equally likely best options, the first taken: <b>&task 0 to 4, arc_easy 0 to 4"
        assert touched in page.visible
        assert "finished runs without answers: standard 1 of 6, xsa 1 of 6, half 1 of 6" in page.visible
        compared = whole["contrasts"][0]["tasks"][1]["mcnemar"]
        assert f"{compared['treatment']} : {compared['baseline']}" in page.visible


# Mechanism, stability, rates, published figures


def made_up(content: dict[str, Any]) -> dict[str, Any]:
    """The content with all that further analyses may add to it."""
    pairs = {row["treatment"]: row["baseline"] for row in content["contrasts"]}
    arms = [arm for arm in content["arms"] if arm != "twin"]
    means = {level["arm"]: level["mean"] for level in content["levels"]}
    levels = {"standard": ["positive", "standard", "null"], "xsa": ["half", "xsa", "none"]}
    return content | {
        "mechanism": [fake_mechanism.mechanism("base", pairs, content["seeds"], 2, 3)],
        "stability": fake_mechanism.stability(["base"], arms, 6),
        "run_stability": fake_mechanism.run_stability([run["name"] for run in content["runs"]]),
        "rates": [fake_mechanism.rates("base", "optim.lr_scale", [0.5, 1.0, 2.0], levels, means)],
        "published": fake_mechanism.PUBLISHED,
    }


def sections(page: Page) -> list[str | None]:
    return [attributes["id"] for tag, attributes in page.tags if tag == "section"]


def test_the_sections_stand_in_the_order_of_their_weight(whole: tuple[Experiment, RunStore]) -> None:
    """The verdict's sentence first of all; then what supports it; then why, and at what cost; then the proofs."""
    page = Page(write_report(*whole, made_up(outcome(*whole))).read_text(encoding="utf-8"))
    assert sections(page) == [
        "table", "intervals", "time", "curves", "rates", "mechanism", "stability", "cost", "published", "matched",
        "data", "again", "words",
    ]  # fmt: skip
    links = [str(attributes["href"]).removeprefix("#") for tag, attributes in page.tags if tag == "a"]
    assert links == ["verdict", *sections(page)]
    assert page.visible.index(outcome(*whole)["headline"][0]) < page.visible.index("Quality and cost")
    assert not re.search(r"\b(nan|NaN|None|Undefined)\b", page.visible)


def test_what_was_not_analysed_has_no_section(whole: tuple[Experiment, RunStore]) -> None:
    content = outcome(*whole)
    for key in ("mechanism", "stability", "run_stability", "rates", "published"):
        content.pop(key, None)
    page = Page(write_report(*whole, content).read_text(encoding="utf-8"))
    assert not {"rates", "mechanism", "stability", "published"} & set(sections(page))


def test_the_mechanism_is_told_in_words_pictures_and_numbers(whole: tuple[Experiment, RunStore]) -> None:
    content = made_up(outcome(*whole))
    page = Page(write_report(*whole, content).read_text(encoding="utf-8"))
    (entry,) = content["mechanism"]
    for sentence in (*entry["sentences"], entry["prediction"]["words"]):
        assert sentence in page.visible
    figures = [attributes for tag, attributes in page.tags if tag == "figure" and "data-measure" in attributes]
    assert {figure["data-measure"] for figure in figures} == set(entry["measures"])
    assert sum("more" not in str(figure["class"]) for figure in figures) == 5
    cells = page.visible
    for arm, found in entry["arms"].items():
        for layer, row in enumerate(found["final"]["self_weight"]["mean"]):
            for head, value in enumerate(row):
                assert f"layer {layer}, head {head}: {plain_number(value)}" in cells, arm


def test_stability_gives_the_exact_interval_of_what_broke_down(whole: tuple[Experiment, RunStore]) -> None:
    page = Page(write_report(*whole, made_up(outcome(*whole))).read_text(encoding="utf-8"))
    assert "xsa 6 5 1 0 % to 37 %" in page.visible
    assert "base.xsa.s0 1 31 7.25" in page.visible


def test_rates_show_every_seed_the_best_and_what_diverged(whole: tuple[Experiment, RunStore]) -> None:
    content = made_up(outcome(*whole))
    page = Page(write_report(*whole, content).read_text(encoding="utf-8"))
    values = [run for run in content["runs"] if run["arm"] in ("standard", "xsa", "half", "positive", "null")]
    for run in values:
        shown = f"seed {run['seed']}: {plain_number(run['value'], 5)}"
        assert page.visible.count(shown) >= 1
    assert "xsa, optim.lr_scale 2: 2 runs diverged" in page.visible
    assert "best at optim.lr_scale" in page.visible
    assert content["rates"][0]["best_against_best"]["words"] in page.visible


def test_a_published_figure_stands_beside_ours(whole: tuple[Experiment, RunStore]) -> None:
    page = Page(write_report(*whole, made_up(outcome(*whole))).read_text(encoding="utf-8"))
    assert "bpb base 0.8484 0.8457 −0.0027 not measured" in page.visible
    assert fake_mechanism.PUBLISHED["sentence"] in page.visible


def test_a_changed_summary_changes_nothing(tmp_path: Path) -> None:
    """Words and numbers come from the runs' own files: what an earlier report left behind is not read."""
    experiment, store = fake(tmp_path, TOML.replace(SEEDS, "seeds = [0, 1, 2]"))
    path = write_report(experiment, store, outcome(experiment, store))
    before = path.read_bytes()
    summary = json.loads((store.folder / "summary.json").read_text(encoding="utf-8"))
    summary["headline"] = ["xsa is better by a mile"]
    for row in summary["contrasts"]:
        row["estimate"]["mean"] = -1.0
    (store.folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    assert write_report(experiment, store, outcome(experiment, store)).read_bytes() == before


def test_core_stands_in_the_first_table(tmp_path: Path) -> None:
    """Loss, time and accuracies are what is asked for first."""
    experiment, store = with_answers(tmp_path, TOML.replace(SEEDS, "seeds = [0, 1, 2]"))
    content = outcome(experiment, store)
    text = write_report(experiment, store, content).read_text(encoding="utf-8")
    first = Page(text.split('<section id="table">')[1].split("</section>")[0]).visible
    core = content["benchmarks"][0]
    assert core["name"] in first
    for level in core["levels"]:
        assert benchmark_figure(level["mean"]) in first
    row = core["contrasts"][0]["estimate"]
    assert plus_minus(row["mean"], row["half_width"]) in first


def test_an_effect_is_drawn_against_the_null_control_of_its_own_baseline(tmp_path: Path) -> None:
    """Two optimizers have two kinds of noise."""
    toml = (HEAD + CROSSED).replace("twin = false", 'twin = false\nalso = ["standard-adamw"]')
    experiment, store = fake(tmp_path, toml)
    page = page_of(experiment, store)
    for pair, base in (("xsa-muon − standard-muon", "standard-muon"), ("xsa-adamw − standard-adamw", "standard-adamw")):
        drawn = page.visible.split(f" {pair} Δ training loss")[1]
        assert re.search(r"Grey: the null control of ([\w-]+)", drawn)[1] == base  # pyright: ignore[reportOptionalSubscript]


def test_benchmarks_come_right_after_the_first_table(tmp_path: Path) -> None:
    """What is asked for first stands together: loss, time, then accuracies."""
    page = page_of(*with_answers(tmp_path, TOML.replace(SEEDS, "seeds = [0]")))
    assert sections(page)[:2] == ["table", "benchmarks"]


def test_a_report_without_answers_says_so(whole: tuple[Experiment, RunStore]) -> None:
    page = page_of(*whole)
    assert "CORE and ChatCORE (accuracies on tasks): not measured" in page.visible
    assert "benchmarks" not in [attributes.get("id") for tag, attributes in page.tags]


def test_the_figure_of_guessing_is_not_always_zero() -> None:
    """boolq's convention is 0.62 where a coin has 0.5; and a figure that rounds to 0 has no sign."""
    tasks = [{"chance": 0.5, "baseline": 0.62}, {"chance": 0.25, "baseline": 0.25}]
    assert guessing(tasks) == pytest.approx(-0.12 / 0.38 / 2)
    assert (benchmark_figure(-0.00001), benchmark_figure(-0.0123)) == ("0.0000", "−0.0123")
