"""GPUs as their makers describe them, and what an experiment takes on each: rows a pass, hours, cost. Reckoned.

    hours of one run = operations / (devices of the run · peak · share)

``peak`` is that of dense bfloat16 products. ``share`` of it is an assumption, 40 %, until finished runs or the timing
of this experiment on such a device tell another. Evaluation, benchmarks and fine-tuning come on top.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SHARE = 0.4  # of the peak that training reaches; bench/gpu.py measures it
ROOM = 0.9  # of a device's memory that a plan fills: a CUDA context and what an allocator keeps take the rest


@dataclass(frozen=True)
class Device:
    """``gigabytes`` of memory (10⁹ bytes), ``teraflops`` in dense bfloat16; ``price``: US dollars an hour, assumed."""

    name: str
    gigabytes: float
    teraflops: float
    price: float | None = None


# From NVIDIA's data sheets of the A100 (40 and 80 GB), H100 SXM, H200, L40S and DGX B200 and the white paper of the Ada
# architecture (RTX 4090, products of 16 bits summed in 32); where these give figures with sparsity, half of them. The
# price is that of nanochat's README (92d63d4): about 24 dollars an hour for 8 H100.
DEVICES = (
    Device("RTX 4090", 24, 165),
    Device("L40S", 48, 362),
    Device("A100-40", 40, 312),
    Device("A100-80", 80, 312),
    Device("H100", 80, 989, 3.0),
    Device("H200", 141, 989),
    Device("B200", 180, 2250),
)


def read_prices(texts: Sequence[str]) -> dict[str, float]:
    """From "H100=2.5". ValueError for a device that is not in the table, or no positive number."""
    found = {}
    for text in texts:
        name, _, number = text.partition("=")
        known = {device.name.lower(): device.name for device in DEVICES}
        if name.strip().lower() not in known:
            raise ValueError(
                f"--price {text!r}: write NAME=DOLLARS, such as H100=2.5; names: {', '.join(known.values())}"
            )
        try:
            price = float(number)
        except ValueError:
            price = 0.0
        if not 0 < price < float("inf"):
            raise ValueError(f"--price {text!r}: dollars a device and hour, a positive number, such as H100=2.5")
        found[known[name.strip().lower()]] = price
    return found


def device_of(description: str) -> Device | None:
    """The device of the table that a driver's name belongs to ("NVIDIA H100 80GB HBM3"); None where none does."""
    text = description.lower().replace("geforce ", "")
    if "a100" in text:
        return next(device for device in DEVICES if device.name == ("A100-40" if "40gb" in text else "A100-80"))
    if "pcie" in text or "nvl" in text:  # slower kinds of the same name
        return None
    return next((device for device in DEVICES if device.name.lower() in text), None)


def wall_hours(runs: Sequence[tuple[float, int]], gpus: int) -> float | None:
    """Hours until all runs (hours, devices each) are done on ``gpus`` devices, the longest first; None: too few."""
    each = max((devices for _, devices in runs), default=1)
    if gpus < each:
        return None
    free = [0.0] * (gpus // each)
    for hours, _ in sorted(runs, reverse=True):
        heapq.heappush(free, heapq.heappop(free) + hours)
    return max(free)


def on_devices(
    work: Sequence[tuple[float, int]],
    rows_that_fit: Mapping[str, Mapping[str, int]],
    shares: Mapping[str, float],
    prices: Mapping[str, float],
    gpus: int,
) -> list[dict[str, object]]:
    """A row a device, JSON-ready.

    work: (operations, devices) of each run that is left. rows_that_fit: device -> point -> rows a pass. shares: device
    -> share of its peak as measured.
    """
    found: list[dict[str, object]] = []
    for device in DEVICES:
        share = shares.get(device.name, SHARE)
        rate = device.teraflops * 1e12 * share * 3600
        runs = [(flops / rate / devices, devices) for flops, devices in work]
        hours = sum(flops for flops, _ in work) / rate
        price = prices.get(device.name, device.price)
        found.append(
            {
                "device": device.name, "gigabytes": device.gigabytes, "teraflops": device.teraflops,
                "share": share, "measured": device.name in shares, "rows": dict(rows_that_fit[device.name]),
                "device_hours": hours, "gpus": gpus, "wall_hours": wall_hours(runs, gpus),
                "price": price, "cost": None if price is None else price * hours,
            }
        )  # fmt: skip
    return found
