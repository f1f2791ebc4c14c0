"""An experiment file to cells and configurations: what it means, and what is refused before anything runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xsalab.experiment.design import (
    Cell,
    combinations,
    config_differences,
    contrasts,
    declared_factors,
    expand,
    resolve,
    undeclared,
)
from xsalab.experiment.reading import check_name, load_experiment

Write = Callable[..., Path]


def test_cells_are_point_by_arm_by_seed(write_experiment: Write) -> None:
    """Seed by seed, so that pairs are complete early; the twin once, at the first point and seed."""
    points = [{"name": "a"}, {"name": "b", "depth": 3}]
    controls = {"null": True, "twin": True, "positive": {"optim.lr_scale": 0.5}}
    cells = expand(load_experiment(write_experiment(points=points, controls=controls, seeds=[4, 2])))
    arms = ["standard", "xsa", "null", "positive"]
    assert cells[:-1] == [Cell(point, arm, seed) for seed in (4, 2) for point in "ab" for arm in arms]
    assert cells[-1] == Cell("a", "twin", 4)
    assert cells[-1].name == "a.twin.s4"
    assert len({cell.name for cell in cells}) == len(cells)


def test_a_cell_resolves_base_then_point_then_arm(write_experiment: Write) -> None:
    path = write_experiment(
        points=[{"name": "wide", "width": 48, "train.tokens": 512, "optim": {"kind": "muon"}}],
        arms__slow={"optim": {"lr_scale": 0.5, "kind": "adamw"}, "train.tokens": 768},
        arms__part={"variant": "xsa", "layers": [1], "alpha": 0.5},
    )
    experiment = load_experiment(path)
    standard, slow, part = (resolve(experiment, Cell("wide", arm, 1)) for arm in ("standard", "slow", "part"))
    assert (standard.model.width, standard.train.tokens, standard.optim.kind) == (48, 512, "muon")
    assert (slow.model.width, slow.train.tokens, slow.optim.kind, slow.optim.lr_scale) == (48, 768, "adamw", 0.5)
    assert (part.variant.name, part.variant.layers, part.variant.options) == ("xsa", "1", {"alpha": 0.5})
    assert (slow.seed, slow.model.depth) == (1, 2)
    assert experiment.arms["slow"].factors == ("variant", "optim.lr_scale", "optim.kind", "train.tokens")


def test_further_arms_get_controls_of_their_own(write_experiment: Write) -> None:
    """A null and a positive control under a second optimizer are compared with the standard arm under it."""
    experiment = load_experiment(
        write_experiment(
            arms__adamw={"optim": {"kind": "adamw"}},
            controls={"null": True, "twin": True, "positive": {"optim.lr_scale": 0.5}, "also": ["adamw"]},
        )
    )
    assert list(experiment.arms) == [
        "standard", "xsa", "adamw", "null", "positive", "twin", "null@adamw", "positive@adamw",
    ]  # fmt: skip
    null, positive = (resolve(experiment, Cell("base", f"{kind}@adamw", 0)) for kind in ("null", "positive"))
    assert (null.optim.kind, null.train.permute_rows, null.optim.lr_scale) == ("adamw", True, 1.0)
    assert (positive.optim.kind, positive.train.permute_rows, positive.optim.lr_scale) == ("adamw", False, 0.5)
    found = {(c.treatment, c.baseline): c.kind for c in contrasts(experiment)}
    assert found["null@adamw", "adamw"] == "null"
    assert found["positive@adamw", "adamw"] == "positive"
    assert found["null", "standard"] == "null"
    assert all(experiment.arms[arm].is_control for arm in ("null@adamw", "positive@adamw", "null", "twin"))


@pytest.mark.parametrize("arm", ["nobody", "standard", "null"])
def test_a_control_of_no_further_arm_is_refused(write_experiment: Write, arm: str) -> None:
    with pytest.raises(ValueError, match=rf"controls\.also = \['{arm}'\].*arms: xsa"):
        load_experiment(write_experiment(controls={"also": [arm]}))


def test_diagnose_is_read_and_checked(write_experiment: Write) -> None:
    """What is measured inside runs is no part of a run's configuration: asking for it changes no pair."""
    asked = load_experiment(write_experiment(diagnose={"every": 5, "rows": 2}))
    silent = load_experiment(write_experiment())
    assert asked.diagnose is not None
    assert (asked.diagnose.every, asked.diagnose.rows) == (5, 2)
    assert silent.diagnose is None
    cell = expand(asked)[0]
    assert resolve(asked, cell) == resolve(silent, cell)
    with pytest.raises(ValueError, match="rows = 0"):
        load_experiment(write_experiment(diagnose={"rows": 0}))
    with pytest.raises(ValueError, match=r"diagnose.*evry"):
        load_experiment(write_experiment(diagnose={"evry": 5}))


def test_contrasts_are_the_effects_and_the_controls(write_experiment: Write) -> None:
    path = write_experiment(
        arms__half={"variant": "xsa", "alpha": 0.5},
        primary={"contrast": "xsa - half"},
        controls={"null": True, "positive": {"optim.lr_scale": 0.5}},
    )
    found = [(c.treatment, c.baseline, c.kind, c.primary) for c in contrasts(load_experiment(path))]
    assert found == [
        ("xsa", "half", "effect", True),
        ("xsa", "standard", "effect", False),
        ("half", "standard", "effect", False),
        ("null", "standard", "null", False),
        ("positive", "standard", "positive", False),
    ]


def test_a_declared_factor_covers_its_name_and_what_lies_below(write_experiment: Write) -> None:
    experiment = load_experiment(write_experiment(arms__slow={"optim.lr_scale": 0.5}))
    factors = declared_factors(experiment, "slow", "standard")
    assert factors == ("variant", "optim.lr_scale")
    a, b = (dataclasses.asdict(resolve(experiment, Cell("base", arm, 0))) for arm in ("slow", "standard"))
    found = config_differences(a, b)
    assert found == {"optim.lr_scale": (0.5, 1.0)}
    assert not undeclared(found, factors)
    assert undeclared({"optim.lr_scale2": 1, "variant.options.alpha": 2}, factors) == {"optim.lr_scale2": 1}


@pytest.mark.parametrize(
    "name", ["a/b", "x:y", "..", ".", "", "a b", "-a", "ä", "a\nb", "x" * 300, "CON", "nul", "Lpt1"]
)
def test_a_name_that_breaks_paths_is_refused(name: str, write_experiment: Write, tmp_path: Path) -> None:
    """F173: one rule for experiments, arms and points, checked at the start; nothing is written anywhere."""
    with pytest.raises(ValueError, match=r"e.toml: name = ") as raised:
        check_name(name, "e.toml: name")
    assert len(str(raised.value)) < 200
    for changes in (
        {"name": name},
        {"arms": {"standard": {}, name: {"variant": "xsa"}}},
        {"points": [{"name": name}]},
    ):
        path = write_experiment("good", **changes)
        with pytest.raises(ValueError, match=r"good.toml: (name|arm name|points.name) = "):
            load_experiment(path)
    assert list(tmp_path.rglob("*")) == [path]


def test_a_name_of_letters_digits_hyphens_and_underscores() -> None:
    assert [check_name(name, "") for name in ("d4", "a-b_c", "7", "x" * 64)] == ["d4", "a-b_c", "7", "x" * 64]


def test_the_name_is_the_files_where_none_is_written(write_experiment: Write) -> None:
    path = write_experiment()
    path.write_text(path.read_text(encoding="utf-8").split("\n", 1)[1], encoding="utf-8")
    assert load_experiment(path).name == "tiny"


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "top level": ({"sedes": [1]}, r"tiny.toml: unknown field sedes = \[1\]; did you mean 'seeds'\?"),
    "section": ({"trian": {"tokens": 1}}, r"unknown field trian = .*did you mean 'train'\?"),
    "field": ({"train__tokns": 3}, r"tiny.toml: train: unknown field tokns = 3; did you mean 'tokens'\?"),
    "option": (
        {"arms__xsa__alhpa": 1.0},
        r"arms.xsa: variant 'xsa' has no option 'alhpa'; did you mean 'alpha'\? its options: alpha, against",
    ),
    "variant": ({"arms__xsa__variant": "xas"}, r"arms.xsa: variant = 'xas' is not known; did you mean 'xsa'\?"),
    "variant's type": ({"arms__xsa__variant": 3}, r"arms.xsa.variant = 3: the name of a variant"),
    "arm's field": ({"arms__xsa__optim.lr": 1.0}, r"arms.xsa: optim: unknown field lr = 1.0"),
    "arm's section": ({"arms__xsa": {"optin.kind": "adamw"}}, r"arms.xsa: optin.kind = 'adamw': .*sections: data"),
    "arm's section as value": ({"arms__xsa__model": "big"}, r"arms.xsa: model = 'big': name a field as section.field"),
    "arm as value": ({"arms__xsa": 3}, r"arms.xsa = 3: must be a table, \[arms.xsa\]"),
    "alpha": ({"arms__xsa__alpha": 1.5}, r"arms.xsa: alpha = 1.5: must be in \[0, 1\]; allow_any_alpha = true"),
    "alphas": ({"arms__xsa__alpha": [0.5]}, r"arms.xsa: alpha = \[0.5\]: 1 numbers for 2 layers; give one a layer"),
    "layers": ({"arms__xsa__layers": "last:99"}, r"layers = 'last:99': this model has 2 layers; a count from 1 to 2"),
    "width": ({"model__width": 33}, r"model: width = 33 is not divisible by heads = 2: use width 32 or 34"),
    "batch": ({"train__batch_tokens": 1000}, r"batch_tokens = 1000 is not a multiple of context = 32: use 992 or 1024"),
    "micro": ({"train__micro_rows": 3}, r"micro_rows = 3 does not divide the 8 rows of a batch: use one of \[1, 2"),
    "few rows": (
        {"train__batch_tokens": 64, "controls__null": True},
        r"batch_tokens = 64 is 2 rows .* too few to permute for the null control: use 128 or more, or controls.null",
    ),
    "stride": ({"eval__stride": 33}, r"eval.stride = 33: use 1 to context = 32, or 0 for half of it"),
    "depth": ({"model__depth": "four"}, r"model: depth = 'four': input should be a valid integer"),
    "depth of true": ({"model__depth": True}, r"model: depth = True: input should be a valid integer"),
    "tokens": ({"train__tokens": 3.7}, r"train: tokens = 3.7: input should be a valid integer"),
    "section as value": ({"train": 3}, r"tiny.toml: train = 3: must be a table, \[train\]"),
    "seeds": ({"seeds": [1.5]}, r"seeds = \[1.5\]: a list of whole numbers from 0"),
    "seeds of true": ({"seeds": [True]}, r"seeds = \[True\]: a list of whole numbers"),
    "one seed": ({"seeds": 3}, r"seeds = 3: a list of whole numbers"),
    "no seeds": ({"seeds": []}, r"seeds = \[\]: a list of whole numbers"),
    "negative seed": ({"seeds": [-1]}, r"seeds = \[-1\]: a list of whole numbers"),
    "huge seed": ({"seeds": [2**70]}, r"seeds = \[1180591620717411303424\]: a list of whole numbers from 0 to 429"),
    "seed twice": ({"seeds": [1, 1]}, r"seeds = \[1, 1\]: a seed is there twice"),
    "no arms": ({"arms": {}}, r"no arms; write at least \[arms.standard\]"),
    "control's name": ({"arms__null": {}}, r"arms.null: this name belongs to a control; choose another"),
    "control's name in capitals": ({"arms__Twin": {}}, r"arms.Twin: this name belongs to a control"),
    "case alone": ({"arms__XSA": {}}, r"arms.xsa: another arm's name differs in case alone"),
    "baseline": ({"baseline": "plain"}, r"baseline = 'plain' is not an arm; arms: standard, xsa"),
    "baseline's type": ({"baseline": ["standard"]}, r"baseline = \['standard'\] is not an arm; arms: standard, xsa"),
    "points": ({"points": 3}, r"points = 3: write each point as a table of its own, \[\[points\]\]"),
    "no points": ({"points": []}, r"points = \[\]: write each point"),
    "one point": ({"points": {"name": "a"}}, r"points = {'name': 'a'}: write each point as a table"),
    "point of a number": ({"points": [3]}, r"points: 3: each \[\[points\]\] needs a name"),
    "point's name": ({"points": [{"depth": 3}]}, r"points: {'depth': 3}: each \[\[points\]\] needs a name"),
    "points of a name": ({"points": [{"name": "a"}, {"name": "A"}]}, r"points: two have the same name"),
    "point's field": ({"points": [{"name": "a", "depht": 3}]}, r"model: unknown field depht = 3; did you mean 'dep"),
    "point's section": ({"points": [{"name": "a", "modle.depth": 3}]}, r"modle.depth = 3: name a field as section"),
    "plugins": ({"plugins": "mine.py"}, r"plugins = 'mine.py': a list of Python files"),
    "plugin's type": ({"plugins": [3]}, r"plugins = \[3\]: a list of Python files"),
    "contrast": ({"primary": {"contrast": "xsa"}}, r"'xsa' is no contrast.*write two arms as 'xsa - standard'"),
    "contrast's arm": ({"primary": {"contrast": "xsa - plain"}}, r"'xsa - plain' is no contrast.*one of: xsa - st"),
    "contrast with a control": ({"primary": {"contrast": "null - xsa"}}, r"primary.contrast = 'null - xsa'"),
    "metric": ({"primary": {"metric": "loss"}}, r"primary: metric = 'loss': use 'val_bpb'"),
    "margin": ({"primary": {"margin": 0}}, r"primary: margin = 0.0: a share of the baseline's value"),
    "control": ({"controls": {"nul": True}}, r"controls: unknown field nul = True; did you mean 'null'\?"),
    "positive": ({"controls__positive": {"optim.lr_scal": 0.5}}, r"arms.positive: optim: unknown field lr_scal"),
    "positive's section": ({"controls__positive": {"lr_scale": 0.5}}, r"arms.positive: lr_scale = 0.5: name a field"),
    "positive as value": ({"controls__positive": 0.5}, r"controls: positive = 0.5: "),
    "optimizer": ({"optim__kind": "sgd"}, r"optim: kind = 'sgd': use one of hybrid, muon, adamw"),
    "rate": ({"optim__lr_scale": -1.0}, r"optim: lr_scale = -1.0: must be a finite number of at least 0"),
    "bytes": ({"eval__max_bytes": 0}, r"eval: max_bytes = 0: must be at least 1"),
    "packing": ({"eval__packing": "rows"}, r"eval: packing = 'rows': use 'documents' or 'nanochat'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_mistake_is_refused_with_file_field_value_and_remedy(name: str, write_experiment: Write) -> None:
    changes, words = BAD[name]
    path = write_experiment(**changes)
    with pytest.raises(ValueError, match=words) as raised:
        load_experiment(path)
    assert str(path) in str(raised.value)


def test_set_goes_over_the_file(write_experiment: Write) -> None:
    sets = ["train.tokens=512", "arms.xsa.alpha=0.5", "seeds=[7]", "controls.null=true"]
    experiment = load_experiment(write_experiment(), sets)
    run = resolve(experiment, Cell("base", "xsa", 7))
    assert (run.train.tokens, run.variant.options, experiment.seeds) == (512, {"alpha": 0.5}, (7,))
    assert "null" in experiment.arms


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("train.tokns=3", r"tiny.toml: train: unknown field tokns = 3; did you mean 'tokens'\?"),
        ("trian.tokens=3", r"unknown field trian = .*did you mean 'train'\?"),
        ("tokens=3", r"unknown field tokens = 3"),
        ("arms.xas.alpha=0.5", r"--set arms.xas: no such arm in .*tiny.toml; arms: standard, xsa"),
        ("arms.xsa.alhpa=0.5", r"variant 'xsa' has no option 'alhpa'; did you mean 'alpha'"),
        ("model=3", r"model = 3: must be a table"),
        ("train.tokens.x=3", r"--set train.tokens.x: 'tokens' is a value, not a section"),
        ("train.tokens=many", r"train: tokens = 'many': input should be a valid integer"),
        ("points.name=3", r"points = {'name': 3}: write each point"),
    ],
)
def test_a_set_of_a_bad_name_is_refused(assignment: str, words: str, write_experiment: Write) -> None:
    with pytest.raises(ValueError, match=words):
        load_experiment(write_experiment(), [assignment])


def test_variants_of_plugins_are_not_asked_for_where_none_is_imported(write_experiment: Write) -> None:
    """status and report read an experiment without running its plugins."""
    path = write_experiment(plugins=["mine.py"], arms__mine={"variant": "mine"})
    with pytest.raises(ValueError, match="variant = 'mine' is not known"):
        load_experiment(path)
    assert "mine" in load_experiment(path, known_variants=False).arms


@pytest.mark.parametrize("name", ["eval.max_bytes", "eval.packing", "data.source", "model.vocab_size"])
def test_an_arm_cannot_change_what_it_is_scored_on(name: str, write_experiment: Write) -> None:
    with pytest.raises(ValueError, match=rf"arms.xsa: {name} = 'x': arms are scored on the same text"):
        load_experiment(write_experiment(arms__xsa={"variant": "xsa", name: "x"}))


def test_a_contrast_needs_two_arms(write_experiment: Write) -> None:
    with pytest.raises(ValueError, match=r"primary.contrast = 'xsa - xsa' is no contrast"):
        load_experiment(write_experiment(primary={"contrast": "xsa - xsa"}))


CROSSED = {
    "arms": None,
    "factors": {
        "attention": {"standard": {"variant": "standard"}, "xsa": {"variant": "xsa"}},
        "optimizer": {"muon": {"optim.kind": "hybrid"}, "adamw": {"optim.kind": "adamw"}},
    },
}


def weights(terms: Any) -> dict[str, float]:
    return {term.arm: term.weight for term in terms}


def test_a_two_by_two_has_simple_effects_main_effects_and_one_interaction(write_experiment: Write) -> None:
    """The weights of a 2 × 2 as any textbook of factorial experiments writes them."""
    experiment = load_experiment(write_experiment(**CROSSED))
    assert experiment.baseline == "standard-muon"
    assert [c.name for c in contrasts(experiment)] == [
        "xsa-muon - standard-muon",
        "xsa-adamw - standard-adamw",
        "standard-adamw - standard-muon",
        "xsa-adamw - xsa-muon",
    ]
    found = {c.name: (c.kind, weights(c.terms)) for c in combinations(experiment)}
    half = {"xsa-muon": 0.5, "xsa-adamw": 0.5, "standard-muon": -0.5, "standard-adamw": -0.5}
    assert found["xsa - standard"] == ("main", half)
    assert found["adamw - muon"] == (
        "main", {"xsa-adamw": 0.5, "standard-adamw": 0.5, "xsa-muon": -0.5, "standard-muon": -0.5},
    )  # fmt: skip
    assert found["(xsa - standard) x (adamw - muon)"] == (
        "interaction", {"xsa-adamw": 1.0, "standard-adamw": -1.0, "xsa-muon": -1.0, "standard-muon": 1.0},
    )  # fmt: skip
    assert len(found) == 3


def test_crossed_arms_beside_a_baseline_of_their_own(write_experiment: Write) -> None:
    """A layer study against standard attention: every arm against it, and against the whole."""
    path = write_experiment(
        arms={"standard": {}}, factors={"attention": {"xsa": {"variant": "xsa"}}, "layers": "first-k"}
    )
    names = [c.name for c in contrasts(load_experiment(path))]
    assert names == ["all - standard", "first-1 - standard", "first-1 - all"]


def test_every_contrast_of_any_crossing_adds_up_to_nothing(write_experiment: Write) -> None:
    """Weights that add up to 0: a level that all cells share is no effect. 2 × 2 × 3 arms at two points."""
    factors = {**CROSSED["factors"], "layers": ["all", "first:1", "last:1"]}
    factors["attention"] = {"xsa": {"variant": "xsa"}, "self": {"variant": "self-masked"}}
    points = [{"name": "a", "depth": 2}, {"name": "b", "depth": 3}]
    experiment = load_experiment(write_experiment(arms=None, factors=factors, points=points))
    every = [*contrasts(experiment), *combinations(experiment)]
    assert len({(c.name, c.point) for c in every}) == len(every)
    for contrast in every:
        assert sum(term.weight for term in contrast.terms) == pytest.approx(0, abs=1e-12)
        assert sum(abs(term.weight) for term in contrast.terms) > 0.5


def test_a_trend_is_the_slope_over_doublings(write_experiment: Write) -> None:
    """Against numpy's straight line through differences at 1024, 2048 and 8192 tokens."""
    points = [{"name": f"t{n}", "train.tokens": n} for n in (1024, 2048, 8192)]
    experiment = load_experiment(write_experiment(points=points))
    trend = next(c for c in combinations(experiment) if c.kind == "trend")
    assert (trend.name, trend.scale) == ("xsa - standard over train.tokens", "train.tokens")
    differences = [0.3, -0.1, 0.05]
    of = {point["name"]: value for point, value in zip(points, differences, strict=True)}
    slope = sum(term.weight * of[term.point] for term in trend.terms if term.arm == "xsa")
    assert slope == pytest.approx(np.polyfit([10, 11, 13], differences, 1)[0])
    mean = next(c for c in combinations(experiment) if c.kind == "mean")
    assert [term.weight for term in mean.terms] == pytest.approx([1 / 3, -1 / 3] * 3)


def test_points_without_a_number_that_grows_have_no_trend(write_experiment: Write) -> None:
    points = [{"name": "a", "optim.kind": "muon"}, {"name": "b", "optim.kind": "adamw"}]
    assert [c.kind for c in combinations(load_experiment(write_experiment(points=points)))] == ["mean"]


@pytest.mark.parametrize(
    "declared", ["(xsa - standard) x (adamw - muon)", "xsa - standard", "xsa-adamw - standard-adamw"]
)
def test_any_contrast_may_be_the_primary_one(write_experiment: Write, declared: str) -> None:
    """An interaction, a main effect and a simple effect, declared by name before the runs."""
    experiment = load_experiment(write_experiment(**CROSSED, primary={"contrast": declared}))
    flagged = [c.name for c in (*contrasts(experiment), *combinations(experiment)) if c.primary]
    assert flagged == [declared]


def test_a_trend_may_be_declared_along_another_field(write_experiment: Write) -> None:
    points = [{"name": "a", "depth": 2, "width": 32}, {"name": "b", "depth": 3, "width": 64}]
    name = "xsa - standard over model.width"
    experiment = load_experiment(write_experiment(points=points, primary={"contrast": name}))
    assert [c.name for c in combinations(experiment) if c.kind == "trend"] == [name]


@pytest.mark.parametrize(
    ("primary", "words"),
    [
        ({"contrast": "(xsa - standard) x (muon - adamw)"}, r"is no contrast.*\(xsa - standard\) x \(adamw - muon\)"),
        ({"family": ["xsa - nothing"]}, r"primary.family = 'xsa - nothing' is no contrast"),
        (
            {"contrast": "xsa - standard", "family": ["adamw - muon"]},
            r"primary.family = .* leaves out the primary contrast 'xsa - standard'; add it",
        ),
    ],
)
def test_a_declaration_that_names_nothing_is_refused(
    write_experiment: Write, primary: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        load_experiment(write_experiment(**CROSSED, primary=primary))


def test_an_arm_of_the_name_of_a_crossed_one_is_refused(write_experiment: Write) -> None:
    path = write_experiment(arms={"xsa-muon": {}}, factors=CROSSED["factors"])
    with pytest.raises(ValueError, match=r"arms.xsa-muon: \[factors\] makes an arm of this name"):
        load_experiment(path)


def test_equal_time_needs_step_times(write_experiment: Write) -> None:
    with pytest.raises(ValueError, match=r"equal_time.rerun = true needs the step times: set controls.timing = true"):
        load_experiment(write_experiment(equal_time={"rerun": True}))


def test_a_precision_that_does_not_work_is_told_at_the_start(write_experiment: Write) -> None:
    """F052: 8-bit floats with compilation are refused with what works, before anything trains; what works is taken."""
    with pytest.raises(ValueError, match=r"train: dtype = 'float8_e4m3fn': use one of .*float32.*bfloat16"):
        load_experiment(write_experiment(train__dtype="float8_e4m3fn", train__compile=True))
    for dtype in ("auto", "float32", "bfloat16"):
        experiment = load_experiment(write_experiment(train__dtype=dtype, train__compile=True))
        assert resolve(experiment, expand(experiment)[0]).train.dtype == dtype


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"arms__long": {"train.tokens": 2048}},
            r"arms.long trains 8 steps and the baseline 4; .*leave out",
        ),
        ({"arms__wide": {"train.batch_tokens": 128}}, r"equal_time: arms.wide trains 8 steps and the baseline 4"),
        ({"equal_time": {"slope": True}}, r"equal_time.share = 0.9 of 4 steps is no step fewer: use a smaller share"),
    ],
)
def test_equal_time_is_reckoned_from_equal_steps(write_experiment: Write, changes: dict[str, Any], words: str) -> None:
    path = write_experiment(**{"equal_time": {"rerun": True}, "controls__timing": True, **changes})
    with pytest.raises(ValueError, match=words):
        load_experiment(path)


@pytest.mark.parametrize(
    "changes",
    [
        {
            "arms": None,
            "factors": {"a": {"off": {}, "on": {"variant": "xsa"}}, "b": {"off": {}, "on": {"layers": "none"}}},
        },
        {"factors": {"a": {"standard": {}, "xsa": {"variant": "xsa"}}, "b": {"p": {}, "q": {"optim.kind": "adamw"}}}},
    ],
)
def test_two_contrasts_of_one_name_are_refused(write_experiment: Write, changes: dict[str, Any]) -> None:
    """Two factors with the same levels, and arms beside a factor with levels of their names."""
    with pytest.raises(ValueError, match=r"two contrasts have the name '(on - off|xsa - standard)'; rename"):
        load_experiment(write_experiment(**changes))
