"""Optimizers that look at whole parameters, for ranks to import."""

from typing import Any

import torch
from torch import Tensor

from echelon.update.optim import CombinedOptimizer


class Lamb(torch.optim.Optimizer):
    """Adam without corrections, whose step of a parameter is as long as the parameter is (You and others)."""

    needs = "whole"

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group["lr"])

    def _update(self, parameter: Tensor, lr: float) -> None:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        for key in ("first", "second"):
            state.setdefault(key, torch.zeros_like(parameter))
        state["first"].lerp_(gradient, 0.1)
        state["second"].lerp_(gradient**2, 0.01)
        step = state["first"] / (state["second"].sqrt() + 1e-6)
        parameter.sub_(lr * (parameter.norm() + 1e-3) / (step.norm() + 1e-3) * step)


def lamb(parameters: Any) -> torch.optim.Optimizer:
    return Lamb(parameters, lr=1e-2)


def torch_adafactor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=1e-2, eps=(1e-8, 1e-3))


def muon(parameters: Any) -> torch.optim.Optimizer:
    """As users combine it: matrices by Muon, the rest by AdamW."""
    every = list(parameters)
    matrices = [p for p in every if p.dim() == 2]
    others = [p for p in every if p.dim() != 2]
    return CombinedOptimizer(
        [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-2, weight_decay=0.1)]
    )


OPTIMIZERS = {"lamb": lamb, "torch-adafactor": torch_adafactor, "muon": muon}


def make_optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    return OPTIMIZERS[name](parameters)
