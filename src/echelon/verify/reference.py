"""The reference: the same training on one device, written in plain torch and nothing of echelon's.

It must stay independent of what it judges, so it repeats in the plainest way what a step means.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Trained:
    """What a training left: weights, optimizer state by parameter name, and each step's numbers."""

    weights: dict[str, Tensor]
    optimizer: dict[str, dict[str, Tensor]]
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)


def train_on_one_device(
    model: nn.Module,
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    loss: Callable[[Any, Any], Any],
    batches: list[tuple[Any, Any]],
    clip: float | None,
) -> Trained:
    """Train in float64 on the whole of each batch at once."""
    model = model.double().train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = make_optimizer(parameters)
    losses, grad_norms = [], []
    for inputs, targets in batches:
        optimizer.zero_grad()
        result = loss(model(inputs), targets)
        mean = result[0] / result[1] if isinstance(result, tuple) else result
        mean.backward()
        norm = nn.utils.clip_grad_norm_(parameters, float("inf") if clip is None else clip)
        optimizer.step()
        losses.append(float(mean.detach()))
        grad_norms.append(float(norm))
    return Trained(dict(model.state_dict()), _state_by_name(model, optimizer), losses, grad_norms)


def _state_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    return {
        name: {
            key: value
            for key, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
