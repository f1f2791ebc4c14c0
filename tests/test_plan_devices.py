"""Hours, cost and room by type of device, by hand."""

from __future__ import annotations

import pytest

from xsalab.plan_devices import DEVICES, device_of, on_devices, read_prices, wall_hours

NAMES = [device.name for device in DEVICES]
FITS = {name: {"base": 4} for name in NAMES}


def test_hours_and_cost_by_hand() -> None:
    """Two runs of 3.6e18 operations on an H100 at 40 % of 989 TFLOP/s: 2.528 h each; 3 dollars an hour."""
    rows = {row["device"]: row for row in on_devices([(3.6e18, 1)] * 2, FITS, {}, {}, 8)}
    each = 3.6e18 / (0.4 * 989e12) / 3600
    assert rows["H100"]["device_hours"] == pytest.approx(2 * each)
    assert rows["H100"]["wall_hours"] == pytest.approx(each)
    assert rows["H100"]["cost"] == pytest.approx(6 * each)
    assert rows["A100-80"]["device_hours"] == pytest.approx(2 * each * 989 / 312)
    assert rows["A100-80"]["cost"] is None


def test_a_measured_share_and_a_stated_price_come_first() -> None:
    rows = {row["device"]: row for row in on_devices([(3.6e18, 2)], FITS, {"H200": 0.8}, {"H200": 5.0}, 8)}
    hours = 3.6e18 / (0.8 * 989e12) / 3600
    assert rows["H200"]["measured"] is True
    assert rows["H200"]["device_hours"] == pytest.approx(hours)
    assert rows["H200"]["wall_hours"] == pytest.approx(hours / 2), "two devices share the run"
    assert rows["H200"]["cost"] == pytest.approx(5 * hours)
    assert rows["H100"]["measured"] is False


def test_the_longest_runs_begin_first() -> None:
    assert wall_hours([(1, 1)] * 4 + [(4, 1)], 2) == 4
    assert wall_hours([(2, 4), (2, 4), (2, 4)], 8) == 4
    assert wall_hours([(1, 4)], 2) is None
    assert wall_hours([], 8) == 0


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H100 PCIe", None), ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA A100-SXM4-80GB", "A100-80"), ("NVIDIA GeForce RTX 4090", "RTX 4090"), ("NVIDIA H200", "H200"),
        ("AMD EPYC", None),
    ],
)  # fmt: skip
def test_a_drivers_name_finds_its_device(said: str, name: str | None) -> None:
    found = device_of(said)
    assert (found.name if found else None) == name


def test_prices_are_read_and_refused() -> None:
    assert read_prices(["h100=2.5", "RTX 4090=0.4"]) == {"H100": 2.5, "RTX 4090": 0.4}
    for text in ("H100", "H100=free", "H100=-1", "H900=1", "H100=inf"):
        with pytest.raises(ValueError, match=r"--price .*H100=2.5"):
            read_prices([text])
