"""Loss spikes: found where they are, once each, on the way down as well, and few alarms where there are none."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from scipy import stats

from xsalab.stats import clopper_pearson
from xsalab.stats.stability import robust_z, spikes

STEPS = np.arange(160)
FALL = 3 + 4 * np.exp(-STEPS / 12)  # from 7 to 3, a third of a nat a step at first


def noisy(seed: int, sd: float = 0.05) -> np.ndarray:
    return FALL + sd * np.random.default_rng(seed).standard_normal(len(STEPS))


def plain_z(losses: list[float], step: int) -> float:
    """The definition, word by word, without numpy, for a step with a past."""

    def line_at(s: int) -> float:
        before = list(enumerate(losses[s - 10 : s], start=s - 10))
        slope = statistics.median(
            statistics.median((y - x) / (j - i) for j, y in before if j != i) for i, x in before
        )  # fmt: skip
        return statistics.median(x + slope * (s - i) for i, x in before)

    past = [losses[s] - line_at(s) for s in range(max(10, step - 32), step)]
    centre = statistics.median(past)
    usual = statistics.median(losses[step - 10 : step])
    scale = max(1.4826 * statistics.median(abs(r - centre) for r in past), 0.001 * usual)
    z = (losses[step] - line_at(step) - centre) / scale
    return z if losses[step] > usual else min(z, 0.0)


def test_z_is_its_definition() -> None:
    """Every step with a past against plain loops."""
    losses = noisy(0)[:70].tolist()
    expected = [plain_z(losses, step) for step in range(22, 70)]
    assert robust_z(losses)[22:] == pytest.approx(expected, rel=1e-9)
    assert max(expected) > 0


def test_z_by_hand() -> None:
    """On a straight line every residual is 0, so z is the rise over 0.1 % of the median of the 10 before."""
    losses = [4 - 0.01 * step for step in range(60)]
    losses[40] += 1.5
    z = robust_z(losses)
    assert z[40] == pytest.approx(1.5 / (0.001 * (4 - 0.01 * 34.5)), rel=1e-6)
    assert np.abs(np.delete(z[22:], 40 - 22)).max() < 1e-6, "and it casts no shadow"


def test_z_of_the_first_steps_by_hand() -> None:
    """The rise above the median of what came before, over 0.1 % of the loss where there is no noise."""
    losses = [4.0] * 40
    losses[5] = 6.0
    assert robust_z(losses)[:8] == pytest.approx([0, 0, 0, 0, 0, 2 / 0.004, 0, 0])
    assert robust_z(losses[:22]).tolist() == [0.0] * 22, "too short to know the noise"


@pytest.mark.parametrize("sd", [0.0, 0.01, 0.05, 0.2])
def test_a_fast_fall_is_no_spike(sd: float) -> None:
    """Neither the fall nor its end."""
    kink = np.maximum(7 - 0.1 * STEPS, 4.0)
    for shape in (FALL, kink):
        noise = np.random.default_rng(1).standard_normal(len(STEPS))
        assert spikes(shape + sd * noise) == []


@pytest.mark.parametrize("step", [24, 30, 60, 120])
@pytest.mark.parametrize("seed", range(4))
def test_a_spike_on_the_way_down_is_found(step: int, seed: int) -> None:
    """Of 1 nat, where the noise has 0.05 and the fall of the first steps was ten times that."""
    losses = noisy(seed)
    losses[step] += 1.0
    assert spikes(losses) == [step]


def test_a_spike_in_the_warm_up_is_found() -> None:
    """Before there are 22 steps to compare with, at the place and size of a run at too high a rate."""
    losses = np.concatenate([[6.93, 6.88, 6.73, 6.32], noisy(2)[4:]])
    losses[4] = 8.5
    assert spikes(losses) == [4]


def test_a_spike_that_recovers_counts_once() -> None:
    """Ten steps of coming back are one spike; two spikes with a calm step between are two."""
    losses = noisy(3)
    losses[60:70] += 2.0 * 0.7 ** np.arange(10)
    assert spikes(losses) == [60]
    losses = noisy(3)
    losses[[60, 62]] += 2.0
    assert spikes(losses) == [60, 62]


def test_a_slow_climb_and_a_new_level_count_once() -> None:
    """A loss that rises over five steps and stays there, and a later spike on top of that level."""
    losses = noisy(4)
    losses[60:] += np.minimum(np.arange(100) * 0.4, 2.0)
    assert len(spikes(losses)) == 1
    assert 60 < spikes(losses)[0] <= 62
    losses[120] += 2.0
    assert spikes(losses)[1:] == [120]


def test_a_lower_threshold_finds_smaller_spikes() -> None:
    """With sd 0.05 a rise of 0.3 lies between 3 and 8 robust standard deviations."""
    losses = noisy(5)
    losses[100] += 0.3
    assert 100 in spikes(losses, threshold=3)
    assert spikes(losses, threshold=8) == []


@pytest.mark.parametrize(("law", "most"), [("normal", 0.1), ("laplace", 1.0), ("t", 3.0)])
def test_a_calm_series_has_few_false_alarms(law: str, most: float) -> None:
    """In 1,000 steps of a fall with noise; Student's t with 3 degrees of freedom does have far outliers."""
    rng = np.random.default_rng(6)
    draw = {
        "normal": lambda: rng.standard_normal(len(STEPS)),
        "laplace": lambda: rng.laplace(size=len(STEPS)),
        "t": lambda: rng.standard_t(3, len(STEPS)),
    }[law]
    found = sum(len(spikes(FALL + 0.05 * draw())) for _ in range(80))
    assert 1000 * found / (80 * len(STEPS)) < most


def test_scale_and_shift_of_time_do_not_matter() -> None:
    """Another unit of the loss gives the same z."""
    losses = noisy(7)
    assert robust_z(3 * losses) == pytest.approx(robust_z(losses), rel=1e-9)


def test_a_loss_of_zero_has_no_spike() -> None:
    """No noise and no level: nothing is divided by 0, and nothing is NaN."""
    assert robust_z([0.0] * 50).tolist() == [0.0] * 50
    assert spikes([]) == []


def test_what_cannot_be_judged_is_refused() -> None:
    """By index and value."""
    with pytest.raises(ValueError, match="nan at index 3"):
        spikes([1.0, 1.0, 1.0, math.nan])
    with pytest.raises(ValueError, match="threshold = 0"):
        spikes([1.0] * 40, threshold=0)


@pytest.mark.parametrize(
    ("k", "n", "low", "high"),
    [
        (0, 5, 0.0, 1 - 0.025 ** (1 / 5)),  # (1 − p)^5 = 0.025
        (5, 5, 0.025 ** (1 / 5), 1.0),  # p^5 = 0.025
        (1, 6, 1 - 0.975 ** (1 / 6), 0.6412),  # 1 − (1 − p)^6 = 0.025; (1 − p)^5 (1 + 5p) = 0.025
    ],
)
def test_the_exact_interval_by_hand(k: int, n: int, low: float, high: float) -> None:
    """Clopper–Pearson where its equations can be solved, and scipy's own."""
    assert clopper_pearson(k, n) == pytest.approx((low, high), abs=5e-5)
    peer = stats.binomtest(k, n).proportion_ci(0.95, method="exact")
    assert clopper_pearson(k, n) == (peer.low, peer.high)


def test_a_spike_within_the_first_fall_is_seen() -> None:
    """The losses of a real run: a fall from 7.6, and 7.70 after 6.54 at step 14. Ten losses back it stood as high."""
    start = [7.62, 7.62, 7.61, 7.6, 7.59, 7.56, 7.52, 7.45, 7.36, 7.25, 7.12, 6.89, 6.71, 6.54, 7.7, 6.44, 6.35, 6.28]
    then = [6.21, 6.13, 6.03, 5.96, 5.83, 5.94, 5.86, 5.75, 5.74, 5.65, 5.62, 5.65, 5.6, 5.55, 5.57, 5.5, 5.48, 5.45]
    losses = [*start, *then, *(5.4 - 0.01 * step + 0.02 * (-1) ** step for step in range(30))]
    assert spikes(losses) == [14]
    assert robust_z(losses)[14] > 6
    calm = [6.5 if step == 14 else loss for step, loss in enumerate(losses)]
    assert spikes(calm) == []
