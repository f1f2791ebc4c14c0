"""What the arms cost, side by side: stored with what it was measured for, and measured again when that changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from xsalab.experiment import timing
from xsalab.experiment.timing import CONTROL, measure_costs, measured_costs


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "ROUNDS", 3)


def test_every_arm_and_the_timing_control_is_measured(short: None, lab: Any) -> None:
    """The baseline against itself stands beside every ratio; controls of the statistics are not timed."""
    home = lab(controls={"null": True, "positive": {"optim.lr_scale": 0.5}})
    told: list[tuple[int, int]] = []
    threads = torch.get_num_threads()
    found = measure_costs(home.experiment, home.store, home.out, lambda *done: told.append(done))
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert [cost["arm"] for cost in found["costs"]] == ["xsa", CONTROL]
    for cost in found["costs"]:
        assert 0 < cost["low"] <= cost["ratio"] <= cost["high"]
        assert cost["seconds"] > 0
    saved = {cost["arm"]: cost["saved_ratio"] for cost in found["costs"]}
    assert saved[CONTROL] == 1.0
    assert saved["xsa"] >= 1.0
    assert len(found["points"]["base"]["seconds"]["standard"]) == 6, "raw times are kept"
    assert torch.get_num_threads() == threads
    assert measured_costs(home.experiment, home.store) == found


def test_seeds_keep_the_times_and_another_model_does_not(short: None, lab: Any) -> None:
    """Times of another configuration are none: they are measured again."""
    home = lab()
    assert measured_costs(home.experiment, home.store) == {}
    measure_costs(home.experiment, home.store, home.out)
    for changes, kept in (({"seeds": [0, 1, 2]}, True), ({"model__depth": 3}, False), ({"arms__half": {}}, False)):
        other = lab(**changes)
        assert bool(measured_costs(other.experiment, other.store)) is kept, changes


def test_a_busy_machine_is_told(short: None, lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    home = lab()
    for share, busy in ((0.01, False), (0.5, True), (None, False)):
        monkeypatch.setattr(timing, "busy_share", lambda share=share: share)
        assert measure_costs(home.experiment, home.store, home.out)["busy"] is busy


def test_a_damaged_file_is_named(lab: Any) -> None:
    home = lab()
    Path(home.store.folder / "timing.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"timing.json: damaged .* delete it to measure again"):
        measured_costs(home.experiment, home.store)
