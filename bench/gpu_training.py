"""The parts of bench/gpu.py that train: steps at two depths, beside nanochat's, and the optimizer's share of one."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from gpu_bench import KERNEL, Bench, Size, extra_bytes, milliseconds
from measure import Ratio, interleave, ratio
from torch import Tensor


def optimizer(b: Bench) -> None:
    """Our step of Muon and AdamW; torch's fused AdamW, and torch.optim.Muon for the matrices. No target here."""
    state, _ = b.kept.get("d12") or _state(b, b.plan.d12, "standard")
    for p in state.model.parameters():
        p.grad = torch.randn_like(p) * 1e-3
    matrices = [p for name, p in state.model.named_parameters() if name.startswith("blocks.") and p.ndim == 2]
    chosen = set(map(id, matrices))
    copies = [p.detach().clone().requires_grad_() for p in matrices]
    others = [p.detach().clone().requires_grad_() for p in state.model.parameters() if id(p) not in chosen]
    for p in (*copies, *others):
        p.grad = torch.randn_like(p) * 1e-3
    muon = torch.optim.Muon(copies, lr=1e-4)
    adamw = torch.optim.AdamW(others, lr=1e-4, fused=True)
    b.figures["optimizer"] = {
        "ours_ms": milliseconds(b, state.optimizer.step),
        "torch_muon_ms": milliseconds(b, muon.step),
        "torch_fused_adamw_ms": milliseconds(b, adamw.step),
        "parameters": {"matrices": sum(p.numel() for p in copies), "others": sum(p.numel() for p in others)},
    }


def d12(b: Bench) -> None:
    """Depth 12: share of the peak, and what XSA costs in time and memory, step by step in turns."""
    _train(b, "d12", b.plan.d12, ("standard", "xsa"))


def d24(b: Bench) -> None:
    """Depth 24: share of the peak."""
    _train(b, "d24", b.plan.d24, ("standard",))


def against_nanochat(b: Bench) -> None:
    """Depth 12 against nanochat's model, optimizer and step, in turns. Its attention is ours."""
    assert b.nanochat is not None, "asked before"
    size = b.plan.d12
    state, step = b.kept.get("d12") or _state(b, size, "standard")
    theirs, parameters = _nanochat(b, size)
    mine = sum(p.numel() for p in state.model.parameters())
    if mine != parameters:
        raise ValueError(f"not the same model: {mine} parameters here, {parameters} in nanochat")
    times = interleave({"ours": b.waiting(step), "nanochat": b.waiting(theirs)}, b.plan.rounds, 2)
    tokens = size.rows * size.context
    speed = {name: tokens / statistics.median(times[name]) for name in times}
    b.figures["nanochat"] = {"tokens_s": speed, "parameters": parameters}
    b.judge(
        "training d12, against nanochat with the same kernels", ratio(times["nanochat"], times["ours"]),
        unit="tokens/s", ours=speed["ours"], peer=speed["nanochat"],
    )  # fmt: skip


def _state(b: Bench, size: Size, variant: str) -> tuple[Any, Callable[[], float]]:
    """A run's state, and one step of it on tokens drawn beforehand, which returns the loss."""
    from xsalab.data import Batch, DataConfig
    from xsalab.eval.validation import EvalConfig
    from xsalab.experiment.building import build_state
    from xsalab.experiment.design import RunConfig
    from xsalab.model import ModelConfig, VariantChoice
    from xsalab.optim import OptimConfig
    from xsalab.train import TrainConfig, train_step

    steps = 100_000
    tokens = size.rows * size.context
    config = RunConfig(
        seed=0,
        data=DataConfig(),
        model=ModelConfig(
            depth=size.depth, width=size.width, heads=size.heads, context=size.context, vocab_size=size.vocabulary
        ),
        optim=OptimConfig(),
        train=TrainConfig(
            batch_tokens=tokens, tokens=tokens * steps, micro_rows=size.micro, dtype="bfloat16", device=b.device,
            compile=b.compile, attention=KERNEL, threads=torch.get_num_threads(),
        ),
        eval=EvalConfig(),
        variant=VariantChoice(variant),
    )  # fmt: skip
    state, schedule = build_state(config), config.optim.schedule_over(steps)
    drawn = _tokens(size)
    batch = Batch(drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous(), torch.arange(size.rows))

    def step() -> float:
        metrics = train_step(state, batch, schedule, micro_rows=size.micro)
        if not metrics.finite:
            raise ArithmeticError(f"step {metrics.step}: loss {metrics.loss}, gradient norm {metrics.grad_norm}")
        return metrics.loss

    return state, step


def _tokens(size: Size) -> Tensor:
    """int64 (rows, context + 1): one batch, every step; what stands in it changes no time."""
    return torch.randint(size.vocabulary, (size.rows, size.context + 1), generator=torch.Generator().manual_seed(0))


def _train(b: Bench, label: str, size: Size, variants: Sequence[str]) -> None:
    states, steps, memory, compiling = {}, {}, {}, {}
    for variant in variants:
        held = torch.cuda.memory_allocated() if b.device == "cuda" else 0
        states[variant], step = _state(b, size, variant)
        steps[variant] = b.waiting(step)
        begin = time.perf_counter()
        steps[variant]()  # compiles, and makes the optimizer's state
        compiling[variant] = time.perf_counter() - begin
        own = torch.cuda.memory_allocated() - held if b.device == "cuda" else 0
        extra = extra_bytes(b, step)
        memory[variant] = None if extra is None else own + extra
        if variant == "standard" and size == b.plan.d12:
            b.kept["d12"] = states[variant], step
    times = interleave(steps, b.plan.rounds, 1)
    tokens, per_token = size.rows * size.context, _flops(size)
    seconds = {variant: statistics.median(times[variant]) for variant in variants}
    b.figures[label] = {
        **asdict(size), "tokens_a_step": tokens, "flops_per_token": per_token, "seconds": seconds,
        "first_step_seconds": compiling, "peak_bytes": memory, "flash_attention_3": _fa3(), "times": times,
    }  # fmt: skip
    rate = per_token * tokens
    each = sorted(rate / t / b.peak for t in times["standard"])
    share = Ratio(statistics.median(each), each[0], each[-1], b.plan.rounds)  # from the least to the greatest
    b.judge(
        f"{label}: model FLOPs, share of the dense bfloat16 peak", share, unit="TFLOP/s",
        ours=rate / seconds["standard"] / 1e12, peer=b.peak / 1e12,
    )  # fmt: skip
    if "xsa" in variants:
        b.judge(
            "step time with XSA on all layers, over without", ratio(times["xsa"], times["standard"]), unit="s",
            ours=seconds["xsa"], peer=seconds["standard"],
        )  # fmt: skip
        if memory["xsa"] is not None:
            b.judge(
                "peak memory with XSA on all layers, over without", Ratio.exactly(memory["xsa"] / memory["standard"]),
                unit="GB", ours=memory["xsa"] / 1e9, peer=memory["standard"] / 1e9,
            )  # fmt: skip


def _fa3() -> str:
    from xsalab.model import cuda

    return "active" if cuda.fa3_active() else "not active"


def _flops(size: Size) -> float:
    """Of a token, forward and backward."""
    from xsalab.model import GPT, ModelConfig, count_parameters

    config = ModelConfig(
        depth=size.depth, width=size.width, heads=size.heads, context=size.context, vocab_size=size.vocabulary
    )
    seen = sum(min(config.window_of(layer), size.context) for layer in range(size.depth))
    with torch.device("meta"):
        scaling = count_parameters(GPT(config)).scaling
    return 6.0 * scaling + 12.0 * size.width * seen


def _nanochat(b: Bench, size: Size) -> tuple[Callable[[], float], int]:
    """nanochat's step as its training script has it, and its number of parameters."""
    from xsalab.model import attend

    sys.path.insert(0, str(b.nanochat))
    os.environ.setdefault("NANOCHAT_DTYPE", "bfloat16")
    os.environ["HF_HUB_OFFLINE"] = "1"  # its own kernels are not asked for: they are replaced below
    from nanochat import flash_attention as kernels  # pyright: ignore[reportMissingImports]
    from nanochat.gpt import GPT, GPTConfig  # pyright: ignore[reportMissingImports]

    def ours(q: Tensor, k: Tensor, v: Tensor, causal: bool = True, window_size: tuple[int, int] = (-1, -1)) -> Tensor:
        assert causal, "training is causal"
        return attend.KERNELS[KERNEL](q, k, v, window_size[0] if window_size[0] >= 0 else q.shape[1])

    kernels.flash_attn.flash_attn_func = ours
    shape = GPTConfig(
        sequence_len=size.context, vocab_size=size.vocabulary, n_layer=size.depth, n_head=size.heads,
        n_kv_head=size.heads, n_embd=size.width,
    )  # fmt: skip
    with torch.device("meta"):
        model = GPT(shape)
    model.to_empty(device=b.device)
    model.init_weights()
    optimizer = model.setup_optimizer()
    compiled = b.compiled(model)
    drawn, passes = _tokens(size), size.rows // size.micro

    def step() -> float:
        loss = torch.zeros(())
        for i in range(passes):
            rows = drawn[i * size.micro : (i + 1) * size.micro].to(b.device)
            loss = compiled(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
            (loss / passes).backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)
        return loss.item()

    return step, sum(p.numel() for p in model.parameters())
