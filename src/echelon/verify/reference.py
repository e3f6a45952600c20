"""The reference: the same training on one device, written in plain torch.

It must stay independent of what it judges, so it repeats in the plainest way what a step means. Of echelon's
code it shares only the masks of dropout, where it says itself which step and samples they are for.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from echelon.data_parallel.asynchronous import Push
from echelon.dropout import key_dropout, scope
from echelon.wrapping import Wrapping


@dataclass
class Trained:
    """What a training left: weights, optimizer state by parameter name, and each step's numbers."""

    weights: dict[str, Tensor]
    optimizer: dict[str, dict[str, Tensor]]
    losses: list[float]
    grad_norms: list[float]
    evaluation: float  # the loss of the last batch once more, after training, in evaluation mode
    log: list[Push] = field(default_factory=list)  # of asynchronous training: what happened in which order
    plan: str = ""  # as it was run
    boundaries: list[int] = field(default_factory=list)  # of its stages

    @property
    def numbers(self) -> tuple[list[float], list[float], float]:
        return self.losses, self.grad_norms, self.evaluation


def train_on_one_device(
    model: nn.Module,
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    loss: Callable[[Any, Any], Any],
    batches: list[tuple[Any, Any]],
    clip: float | None,
    seed: int = 0,
) -> Trained:
    """Train in float64 on the whole of each batch at once; `seed` is dropout's."""
    model = model.double().train()
    key_dropout(model, Wrapping())
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = make_optimizer(parameters)
    losses, grad_norms = [], []
    for step, (inputs, targets) in enumerate(batches):
        optimizer.zero_grad()
        with scope(seed=seed, step=step, first_sample=0):
            mean = _mean(loss(model(inputs), targets))
        mean.backward()
        norm = nn.utils.clip_grad_norm_(parameters, float("inf") if clip is None else clip)
        optimizer.step()
        losses.append(float(mean.detach()))
        grad_norms.append(float(norm))
    weights, state = weights_of(model), state_by_name(model, optimizer)
    evaluation = evaluate(model, loss, batches[-1])
    return Trained(weights, state, losses, grad_norms, evaluation)


def evaluate(model: nn.Module, loss: Callable[[Any, Any], Any], batch: tuple[Any, Any]) -> float:
    """The mean loss of a batch in evaluation mode."""
    inputs, targets = batch
    with torch.no_grad():
        return float(_mean(loss(model.eval()(inputs), targets)))


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _mean(result: Any) -> Tensor:
    mean: Tensor = result[0] / result[1] if isinstance(result, tuple) else result
    return mean


def state_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    return {
        name: {
            key: value
            for key, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
