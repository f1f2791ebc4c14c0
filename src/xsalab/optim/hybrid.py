"""THE OPTIMIZER: which parameter belongs to which group, and Muon + AdamW in one step.

    parameters                                       group             algorithm
    matrices of the blocks, value gates included     matrix            Muon
    output head                                      head              AdamW
    token embedding                                  embedding         AdamW
    value embeddings                                 value_embedding   AdamW
    r, the factor on the residual stream             residual          AdamW
    b, the factor on x⁰                              x0                AdamW
    smear (its gate matrix too), backout             smear             AdamW
    a variant's own parameters                       variant           AdamW, no decay

Two dimensions do not make a matrix: embeddings and the head look the same and fail silently under Muon.
``kind = "muon"`` puts plain Muon in Muon's place, ``"adamw"`` trains everything by AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..config import config
from ..model import native
from .adamw import adamw_
from .muon import (
    NEWTON_SCHULZ,
    PLAIN_START,
    POLAR_EXPRESS,
    START,
    cautious_decay_,
    flat,
    muon_update,
    nesterov_,
    plain_muon_update,
    rate_factor,
    stacks,
)
from .schedule import Schedule

GROUPS = ("matrix", "head", "embedding", "value_embedding", "residual", "x0", "smear", "variant")
KINDS = ("hybrid", "muon", "adamw")


@config
class OptimConfig:
    """Rates as nanochat states them, for width 768 and batches of 524,288 tokens, before scaling.

    ``scale_by_width``: head, embedding and value embedding times (width / 768)^−0.5. ``scale_by_batch``:
    all but the smear group times √(batch / 524288), Muon's decay times that and D_ref / D.
    """

    kind: str = "hybrid"
    lr_scale: float = 1.0  # on every rate, after all scaling
    matrix_lr: float = 0.02
    head_lr: float = 0.008
    embedding_lr: float = 0.3
    value_embedding_lr: float = 0.15
    residual_lr: float = 0.005
    x0_lr: float = 0.5
    smear_lr: float = 0.2
    variant_lr: float = 0.02
    scale_by_width: bool = True
    scale_by_batch: bool = True
    reference_width: int = 768
    reference_batch: int = 524_288

    weight_decay: float = 0.28  # Muon's, cautious, scaled and scheduled
    muon_beta2: float = 0.9
    polar_express: tuple[tuple[float, float, float], ...] = tuple(POLAR_EXPRESS)

    plain_muon_momentum: float = 0.95
    plain_muon_weight_decay: float = 0.1
    plain_muon_steps: int = 5
    plain_muon_coefficients: tuple[float, float, float] = NEWTON_SCHULZ

    adamw_lr: float = 1e-3  # kind = "adamw": one rate for everything, never scaled by width or batch
    adamw_betas: tuple[float, float] = (0.9, 0.95)
    adamw_weight_decay: float = 0.1  # of matrices and tables alone
    adam_eps: float = 1e-10

    schedule: str = "nanochat"
    warmup_steps: int = 40
    warmdown: float = 0.65
    final_lr: float = 0.05
    momentum_start: float = 0.85
    momentum_peak: float = 0.97
    momentum_end: float = 0.90
    momentum_steps: int = 400
    clip: float = 0.0  # global norm of the gradient; 0: no clipping

    def __post_init__(self) -> None:
        for name, legal in (("kind", KINDS), ("schedule", ("nanochat", "cosine"))):
            if getattr(self, name) not in legal:
                raise ValueError(f"{name} = {getattr(self, name)!r}: use one of {', '.join(legal)}")
        for name, value in vars(self).items():
            if (name.endswith("_lr") or name in ("lr_scale", "clip", "weight_decay")) and not 0 <= value < math.inf:
                raise ValueError(f"{name} = {value}: must be a finite number of at least 0")
        for name in ("reference_width", "reference_batch", "plain_muon_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")
        if not self.polar_express:
            raise ValueError("polar_express = []: at least one (a, b, c)")
        momenta = ("muon_beta2", "plain_muon_momentum", "momentum_start", "momentum_peak", "momentum_end")
        for name, beta in (*((m, getattr(self, m)) for m in momenta), *(("adamw_betas", b) for b in self.adamw_betas)):
            if not 0 <= beta < 1:
                raise ValueError(f"{name} = {beta}: must be at least 0 and below 1")
        if not 0 < self.adam_eps < math.inf:
            raise ValueError(f"adam_eps = {self.adam_eps}: must be a finite number above 0")
        if not 0 < self.warmdown <= 1:
            raise ValueError(f"warmdown = {self.warmdown}: a share of the steps, above 0 and at most 1")
        if self.warmup_steps < 0 or self.momentum_steps < 0:
            raise ValueError(f"warmup_steps = {self.warmup_steps}, momentum_steps = {self.momentum_steps}: at least 0")

    def schedule_over(self, steps: int) -> Schedule:
        """The schedule of a run of ``steps`` steps."""
        return Schedule(
            self.schedule, steps, self.warmup_steps, self.warmdown, self.final_lr,
            self.momentum_start, self.momentum_peak, self.momentum_end, self.momentum_steps,
        )  # fmt: skip


# betas and weight decay of nanochat's AdamW groups
ADAMW_GROUPS: dict[str, tuple[tuple[float, float], float]] = {
    "head": ((0.8, 0.96), 0.01),
    "embedding": ((0.8, 0.995), 0.001),
    "value_embedding": ((0.8, 0.995), 0.01),
    "residual": ((0.8, 0.95), 0.05),
    "x0": ((0.96, 0.95), 0.0),
    "smear": ((0.8, 0.95), 0.0),
    "variant": ((0.8, 0.95), 0.0),
}


@dataclass(frozen=True)
class Rates:
    """What the optimizer works with after scaling: a rate a group, and Muon's decay."""

    lr: Mapping[str, float]
    matrix_weight_decay: float


def effective_rates(
    config: OptimConfig, *, width: int, batch_tokens: int, scaling_parameters: int, reference_parameters: int
) -> Rates:
    """The rates after scaling by width and batch and ``lr_scale``.

    scaling_parameters and reference_parameters are those of this model and of depth 12 at the same width
    per layer, head size and vocabulary; D = 12 tokens for each, so D_ref / D is their ratio.
    """
    if config.kind == "adamw":
        return Rates(dict.fromkeys(GROUPS, config.adamw_lr * config.lr_scale), config.adamw_weight_decay)
    by_width = (width / config.reference_width) ** -0.5 if config.scale_by_width else 1.0
    by_batch = math.sqrt(batch_tokens / config.reference_batch) if config.scale_by_batch else 1.0
    lr = {}
    for group in GROUPS:
        rate = getattr(config, f"{group}_lr") * config.lr_scale
        if group in ("head", "embedding", "value_embedding"):
            rate *= by_width
        lr[group] = rate if group == "smear" else rate * by_batch
    if config.kind == "muon":
        return Rates(lr, config.plain_muon_weight_decay)
    to_reference = reference_parameters / scaling_parameters if config.scale_by_batch else 1.0
    return Rates(lr, config.weight_decay * by_batch * to_reference)


def named_parameters(model: nn.Module | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """A model's parameters by name."""
    return dict(model.named_parameters()) if isinstance(model, nn.Module) else model


def assign_groups(model: nn.Module | Mapping[str, Tensor]) -> dict[str, str]:
    """Parameter name -> group, for every parameter exactly once.

    Raises ValueError naming a parameter that no rule claims, or that is no matrix and would reach Muon.
    """
    groups: dict[str, str] = {}
    for name, parameter in named_parameters(model).items():
        if ".variant." in name:
            group = "variant"
        elif name.startswith("blocks."):
            group = "matrix"
        elif name.startswith("value_embeddings."):
            group = "value_embedding"
        elif name in ("smear_gate.weight", "smear", "backout"):
            group = "smear"
        elif name.removesuffix(".weight") in ("head", "embedding", "residual", "x0"):
            group = name.removesuffix(".weight")
        else:
            raise ValueError(f"no group of the optimizer claims parameter {name} {tuple(parameter.shape)}")
        if group == "matrix" and parameter.ndim != 2:
            raise ValueError(f"parameter {name} {tuple(parameter.shape)} is not a matrix and cannot go to Muon")
        groups[name] = group
    return groups


class Hybrid(torch.optim.Optimizer):
    """Muon for the matrices and AdamW for the rest; a parameter without gradient does not move.

    State lives by parameter: "momentum" and "variance" under Muon, "mean", "square" and "steps" under AdamW,
    in float32 whatever the parameter's dtype.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, Tensor],
        config: OptimConfig,
        rates: Rates,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """model: or its parameters by name; slices of them where a run is divided among processes."""
        assignment = assign_groups(model)
        self.names = {parameter: name for name, parameter in named_parameters(model).items()}
        self.config, self.dtype = config, dtype
        groups: list[dict[str, Any]] = []
        for role in GROUPS:
            members = [parameter for parameter, name in self.names.items() if assignment[name] == role]
            if not members:
                continue
            muon = role == "matrix" and config.kind != "adamw"
            betas, decay = ADAMW_GROUPS.get(role, ((0.0, 0.0), rates.matrix_weight_decay))
            if config.kind == "adamw":
                betas = config.adamw_betas
                decay = config.adamw_weight_decay if role in ("matrix", "head", "embedding", "value_embedding") else 0.0
            groups.append(
                {
                    "params": members, "role": role, "algorithm": config.kind if muon else "adamw",
                    "base_lr": rates.lr[role], "lr": rates.lr[role], "betas": betas,
                    "base_weight_decay": decay, "weight_decay": decay, "momentum": config.plain_muon_momentum,
                }
            )  # fmt: skip
        super().__init__(groups, {})

    # torch keeps these two out of compiled graphs by a decorator whose first call imports its compiler: a second of
    # every process, for an optimizer that is never compiled.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        method = torch.optim.Optimizer.add_param_group
        getattr(method, "__wrapped__", method)(self, param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        method = torch.optim.Optimizer.zero_grad
        getattr(method, "__wrapped__", method)(self, set_to_none)

    def set_step(self, schedule: Schedule, step: int) -> None:
        """Sets every group's rate, momentum and decay to those of ``step``."""
        for group in self.param_groups:
            group["lr"] = group["base_lr"] * schedule.lr(step)
            if group["algorithm"] == "hybrid":
                group["momentum"] = schedule.momentum(step)
                group["weight_decay"] = group["base_weight_decay"] * schedule.weight_decay(step)

    @torch.no_grad()
    def step(self, closure: None = None, *, only: Iterable[Tensor] | None = None) -> None:  # pyright: ignore
        """One update from the gradients that are there, of all parameters or ``only`` these."""
        wanted = None if only is None else set(only)
        for group in self.param_groups:
            members = [p for p in group["params"] if p.grad is not None and (wanted is None or p in wanted)]
            if not members:
                continue
            if group["algorithm"] == "adamw":
                self._adamw(members, group)
            elif self._served(members):
                self._muon_natively(members, group)
            else:
                for stack in stacks(members):
                    self._muon(stack, group)

    def _muon_state(self, members: list[Tensor], group: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
        """Momenta and variances (none for plain Muon), zero before the first step."""
        hybrid = group["algorithm"] == "hybrid"
        for parameter in members:
            if not self.state[parameter]:
                rows, columns = parameter.shape
                self.state[parameter]["momentum"] = torch.zeros_like(parameter, dtype=torch.float32)
                if hybrid:
                    shape = (rows, 1) if rows >= columns else (1, columns)
                    self.state[parameter]["variance"] = torch.zeros(shape, device=parameter.device)
        states = [self.state[parameter] for parameter in members]
        return [state["momentum"] for state in states], [state["variance"] for state in states] if hybrid else []

    def _served(self, members: list[Tensor]) -> bool:
        """Whether csrc/muon.cpp takes the step."""
        here = all(p.device.type == "cpu" and p.dtype == torch.float32 and p.is_contiguous() for p in members)
        return here and self.dtype == torch.bfloat16 and native.takes()

    def _muon_natively(self, members: list[Tensor], group: dict[str, Any]) -> None:
        momenta, variances = self._muon_state(members, group)
        config, hybrid = self.config, group["algorithm"] == "hybrid"
        coefficients = config.polar_express if hybrid else [config.plain_muon_coefficients] * config.plain_muon_steps
        gradients = [parameter.grad.float().contiguous() for parameter in members]  # pyright: ignore
        torch.ops.xsalab.muon_(
            members, gradients, momenta, variances, group["lr"], group["weight_decay"], group["momentum"],
            config.muon_beta2, flat(coefficients), *(START if hybrid else PLAIN_START),
        )  # fmt: skip

    def _muon(self, members: list[Tensor], group: dict[str, Any]) -> None:
        """The same in PyTorch, for matrices of one shape."""
        momenta, variances = self._muon_state(members, group)
        config, rate = self.config, group["lr"] * rate_factor(*members[0].shape)
        g = nesterov_([parameter.grad.float() for parameter in members], momenta, group["momentum"])  # pyright: ignore
        if group["algorithm"] == "hybrid":
            variance = torch.stack(variances)
            update = muon_update(
                g, variance, beta2=config.muon_beta2, coefficients=config.polar_express, dtype=self.dtype
            )
            torch._foreach_copy_(variances, variance.unbind())
            cautious_decay_(members, update, rate, group["weight_decay"])
        else:  # as torch.optim.Muon: decay by the unscaled rate, before the update
            update = plain_muon_update(
                g, coefficients=config.plain_muon_coefficients, steps=config.plain_muon_steps, dtype=self.dtype
            )
            torch._foreach_mul_(members, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_sub_(members, update.unbind(), alpha=rate)

    def _adamw(self, members: list[Tensor], group: dict[str, Any]) -> None:
        for parameter in members:
            state = self.state[parameter]
            if not state:
                state["steps"] = 0
                state["mean"] = torch.zeros_like(parameter, dtype=torch.float32)
                state["square"] = torch.zeros_like(parameter, dtype=torch.float32)
            state["steps"] += 1
        means, squares, steps = ([self.state[p][key] for p in members] for key in ("mean", "square", "steps"))
        adamw_(
            members, [parameter.grad for parameter in members], means, squares, steps,  # pyright: ignore
            lr=group["lr"], betas=group["betas"], eps=self.config.adam_eps, decay=group["weight_decay"],
            kernel=self.dtype == torch.bfloat16,
        )  # fmt: skip

    def named_state(self) -> dict[str, Tensor]:
        """The whole state as tensors by "parameter name:key", for a checkpoint."""
        return {
            f"{self.names[parameter]}:{key}": torch.as_tensor(value)  # pyright: ignore[reportArgumentType]
            for parameter, state in self.state.items()
            for key, value in state.items()
        }

    def load_named_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Puts back what ``named_state`` gave. Raises ValueError for a parameter that is not here."""
        parameters = {name: parameter for parameter, name in self.names.items()}
        self.state.clear()
        for label, tensor in tensors.items():
            name, key = label.rsplit(":", 1)
            if name not in parameters:
                raise ValueError(f"optimizer state for {name!r}, which this model does not have")
            self.state[parameters[name]][key] = (
                int(tensor) if key == "steps" else tensor.to(parameters[name].device, copy=True)
            )
