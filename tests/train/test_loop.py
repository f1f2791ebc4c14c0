"""The loop: what a loss is, how many steps there are, and what happens where a number stops being finite."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from xsalab.data import Batch
from xsalab.optim import OptimConfig, Schedule
from xsalab.train import Diverged, Hook, StepMetrics, TrainConfig, TrainState, train, train_step
from xsalab.train.distributed import global_norm
from xsalab.train.loop import fast_bfloat16

SCHEDULE = Schedule("nanochat", steps=4, warmup=2)
State = Callable[..., TrainState]
BatchOf = Callable[..., Batch]


def gradients(state: TrainState) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in state.model.named_parameters() if p.grad is not None}


def weights(state: TrainState) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in state.model.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def unequal(batch: Batch) -> Batch:
    """1, 16, 3 and 16 counted targets in four rows."""
    targets = batch.targets.clone()
    targets[0, 1:], targets[2, 3:] = -1, -1
    return Batch(batch.inputs, targets, batch.row_ids)


@pytest.mark.parametrize("micro_rows", [1, 2], ids=lambda n: f"{n}-rows")
def test_accumulation_is_one_batch(micro_rows: int, fresh: State, batch_of: BatchOf) -> None:
    """F079: micro-batches with 1 and 16 counted tokens give the gradient of the mean over all of them."""
    batch, whole, split = unequal(batch_of(0)), fresh(), fresh()
    for state in (whole, split):  # W_o is zero at the start and would hide attention's gradients
        train_step(state, batch_of(7), SCHEDULE)
    one = train_step(whole, batch, SCHEDULE)
    many = train_step(split, batch, SCHEDULE, micro_rows=micro_rows)
    assert many.loss == pytest.approx(one.loss, rel=1e-6)
    assert many.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
    expected, found = gradients(whole), gradients(split)
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-7, msg=name)


@pytest.mark.parametrize("micro_rows", [0, 1], ids=["whole", "split"])
def test_the_loss_is_the_mean_over_all_counted_tokens(micro_rows: int, state: TrainState, batch_of: BatchOf) -> None:
    """F107, F131: sum over sum, of every micro-batch, with the weights before the update."""
    batch = unequal(batch_of(0))
    with torch.no_grad():
        nats = state.model.token_nats(batch.inputs, batch.targets)
    expected = nats[batch.targets >= 0].double().mean().item()
    of_means = torch.stack([row[kept >= 0].mean() for row, kept in zip(nats, batch.targets, strict=True)]).mean()
    metrics = train_step(state, batch, SCHEDULE, micro_rows=micro_rows)
    assert metrics.loss == pytest.approx(expected, rel=1e-6)
    assert metrics.loss != pytest.approx(of_means.item(), rel=1e-6), "the trigger must tell the two apart"


def test_tokens_are_those_of_the_global_batch(fresh: State, batch_of: BatchOf) -> None:
    """F128: accumulation changes no rate: the tokens of a step are those of all micro-batches."""
    counts = {train_step(fresh(), batch_of(0), SCHEDULE, micro_rows=rows).tokens for rows in (0, 1, 2)}
    assert counts == {4 * 16}


def test_exactly_n_updates(state: TrainState, batch_of: BatchOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """F121: N steps asked, N updates made, with the batches 0 to N − 1."""
    calls, asked = [], []
    step = state.optimizer.step
    monkeypatch.setattr(state.optimizer, "step", lambda: (calls.append(state.step), step())[1])
    train(state, lambda s: (asked.append(s), batch_of(s))[1], Schedule("nanochat", steps=3, warmup=1), micro_rows=1)
    assert (calls, asked, state.step) == ([0, 1, 2], [0, 1, 2], 3)


def test_the_schedule_counts_steps_and_not_micro_batches(state: TrainState, batch_of: BatchOf) -> None:
    """F120: with four micro-batches a step the factor on the rates is that of the step, and never negative."""
    seen: list[StepMetrics] = []

    class Watch(Hook):
        def after_step(self, state: TrainState, metrics: StepMetrics) -> None:
            seen.append(metrics)

    schedule = Schedule("nanochat", steps=8, warmup=2)
    train(state, batch_of, schedule, micro_rows=1, hooks=[Watch()])
    assert [metrics.lr_factor for metrics in seen] == [schedule.lr(step) for step in range(8)]
    assert all(schedule.final < metrics.lr_factor <= 1 for metrics in seen)


def test_hooks_see_the_weights_after_s_updates(state: TrainState, batch_of: BatchOf) -> None:
    """before_step(s) comes before update s, and once more after the last; close comes last."""
    seen: list[Any] = []

    class Watch(Hook):
        def before_step(self, state: TrainState) -> None:
            seen.append(("before", state.step))

        def after_step(self, state: TrainState, metrics: StepMetrics) -> None:
            assert state.step == metrics.step + 1
            seen.append(("after", metrics.step))

        def close(self) -> None:
            seen.append("closed")

    train(state, batch_of, Schedule("nanochat", steps=2, warmup=1), hooks=[Watch()])
    assert seen == [("before", 0), ("after", 0), ("before", 1), ("after", 1), ("before", 2), "closed"]


def test_a_hook_that_fails_closes_the_others(state: TrainState, batch_of: BatchOf) -> None:
    closed = []

    class Fails(Hook):
        def after_step(self, state: TrainState, metrics: StepMetrics) -> None:
            raise OSError("no")

    class Watch(Hook):
        def close(self) -> None:
            closed.append(True)

    with pytest.raises(OSError, match="no"):
        train(state, batch_of, SCHEDULE, hooks=[Fails(), Watch()])
    assert closed == [True]


def test_a_schedule_of_alpha_is_told_before_the_hooks(fresh: State, batch_of: BatchOf) -> None:
    """A validation at step s uses α of s / N: 0 at the start and 1 after the last update."""
    state, seen = fresh({"alpha": {"from": 0.0, "to": 1.0}}), []

    class Watch(Hook):
        def before_step(self, state: TrainState) -> None:
            seen.append(state.model.variants()[0].logged()["alpha"])

    train(state, batch_of, SCHEDULE, hooks=[Watch()])
    assert seen == pytest.approx([0, 0.25, 0.5, 0.75, 1])


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_what_is_not_finite_stops_the_run(where: str, fresh: State, batch_of: BatchOf) -> None:
    """The weights and the optimizer stay as they were before the step that failed; the message names it."""
    state = fresh()
    train(state, batch_of, Schedule("nanochat", steps=2, warmup=1))
    plain = state.model.token_nats

    def broken(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nats = plain(inputs, targets)
        if where == "loss":
            return nats * torch.tensor(math.inf)
        nats.register_hook(lambda gradient: gradient * math.nan)
        return nats

    state.token_nats, before, moments = broken, weights(state), state.optimizer.named_state()
    moments = {name: tensor.clone() for name, tensor in moments.items()}
    with pytest.raises(Diverged, match=r"step 2: loss .* gradient norm .* not finite") as raised:
        train(state, batch_of, SCHEDULE)
    assert raised.value.metrics.step == state.step == 2
    assert same(before, weights(state))
    assert same(moments, state.optimizer.named_state())


def test_clipping_bounds_the_global_norm(fresh: State, batch_of: BatchOf) -> None:
    """The reported norm is the one before; the gradient keeps its direction."""
    free, clipped = fresh(), fresh()
    plain = train_step(free, batch_of(0), SCHEDULE)
    limit = plain.grad_norm / 3
    assert train_step(clipped, batch_of(0), SCHEDULE, clip=limit).grad_norm == plain.grad_norm
    scaled = [p.grad for p in clipped.model.parameters() if p.grad is not None]
    assert float(global_norm(scaled)) == pytest.approx(limit, rel=1e-5)
    for name, gradient in gradients(free).items():
        torch.testing.assert_close(gradients(clipped)[name], gradient / 3, rtol=1e-4, atol=1e-9)


def test_training_repeats_to_the_bit_and_learns(fresh: State, batch_of: BatchOf) -> None:
    """F082: nothing but the step decides what a step does; five steps and five equal ten."""
    whole, parts = fresh(rate=0.02), fresh(rate=0.02)
    schedule = Schedule("nanochat", steps=10, warmup=2)
    losses: list[float] = []

    class Watch(Hook):
        def after_step(self, state: TrainState, metrics: StepMetrics) -> None:
            losses.append(metrics.loss)

    train(whole, lambda step: batch_of(step % 2), schedule, hooks=[Watch()])

    class Stop(Hook):
        def before_step(self, state: TrainState) -> None:
            if state.step == 5 and not stopped:
                stopped.append(True)
                raise KeyboardInterrupt

    stopped: list[bool] = []
    with pytest.raises(KeyboardInterrupt):
        train(parts, lambda step: batch_of(step % 2), schedule, hooks=[Stop()])
    train(parts, lambda step: batch_of(step % 2), schedule)
    assert same(weights(whole), weights(parts))
    assert losses[-1] < losses[0] - 0.1


# ------------------------------------------------------------------------------------------ TrainConfig


def test_tokens_are_rounded_up_to_whole_steps() -> None:
    assert [TrainConfig(tokens=n, batch_tokens=256).steps for n in (1, 256, 257, 1024)] == [1, 1, 2, 4]


def test_a_batch_that_does_not_divide_names_the_nearest() -> None:
    """F081: the message holds legal values, and they are legal."""
    with pytest.raises(ValueError, match="batch_tokens = 1000 is not a multiple of context = 64: use 960 or 1024"):
        TrainConfig(batch_tokens=1000).batch_rows(64)
    assert [TrainConfig(batch_tokens=n).batch_rows(64) for n in (960, 1024)] == [15, 16]
    with pytest.raises(ValueError, match=r"context = 64: use 64$"):
        TrainConfig(batch_tokens=10).batch_rows(64)
    with pytest.raises(
        ValueError, match=r"micro_rows = 3 does not divide the 16 rows .* use one of \[1, 2, 4, 8, 16\]"
    ):
        TrainConfig(batch_tokens=1024, micro_rows=3).batch_rows(64)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("tokens", 0, "tokens = 0: must be at least 1"),
        ("threads", -1, "threads = -1: must be at least 1"),
        ("checkpoint_steps", 0, "checkpoint_steps = 0: must be at least 1"),
        ("micro_rows", -2, "micro_rows = -2: must be 0"),
        ("dtype", "float16", "dtype = 'float16': use one of auto, float32, bfloat16"),
        ("device", "tpu", "device = 'tpu': use one of cpu, cuda"),
        ("attention", "flash", "attention = 'flash': use one of auto, sdpa, blocked, explicit"),
    ],
)
def test_a_wrong_value_is_named_with_what_would_do(field: str, value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TrainConfig(**{field: value})


def test_automatic_bfloat16_follows_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fast units are asked for, not the mere ability to compute."""
    for capabilities, expected in (({"amx_bf16": True}, True), ({"avx512_bf16": True}, True), ({"avx2": True}, False)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=capabilities: found, raising=False)
        assert fast_bfloat16("cpu") is expected


def test_the_schedule_is_of_the_runs_own_length() -> None:
    assert OptimConfig(warmup_steps=3).schedule_over(17).steps == 17


@pytest.mark.parametrize("ended", [False, True])
def test_a_schedule_stays_at_its_end_in_fine_tuning(ended: bool, fresh: State, batch_of: BatchOf) -> None:
    """α from 0 to 1 over four steps, and 1 throughout where the schedules have ended."""
    state = fresh({"alpha": {"from": 0.0, "to": 1.0}})
    state.schedules_ended = ended
    seen: list[float] = []

    class Watch(Hook):
        def before_step(self, state: TrainState) -> None:
            seen.append(state.model.variants()[0].logged()["alpha"])

        def after_step(self, state: TrainState, metrics: StepMetrics) -> None:
            seen.append(state.model.variants()[0].logged()["alpha"])

    train(state, batch_of, SCHEDULE, hooks=[Watch()])
    assert seen == ([1.0] * 9 if ended else [0, 0, 0.25, 0.25, 0.5, 0.5, 0.75, 0.75, 1])
