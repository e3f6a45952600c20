"""Several optimizers as one (Muon for matrices, AdamW for the rest), and optimizers by name for job files."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

import torch
from torch import nn

from echelon.errors import UserError
from echelon.update.optim.adafactor import Adafactor
from echelon.update.optim.needs import Need, need_of
from echelon.update.optim.sm3 import SM3
from echelon.update.optim.sum_optimizer import Exchange, SumOptimizer


@final
class CombinedOptimizer(torch.optim.Optimizer):
    """Optimizers of different parameters, which are called one after the other.

        def make(parameters):
            matrices = [p for p in parameters if p.dim() == 2]
            others = [p for p in parameters if p.dim() != 2]
            return CombinedOptimizer([Muon(matrices, lr=2e-2), AdamW(others, lr=3e-4)])

    Its groups are theirs, and so is its state: a learning-rate schedule sets the rate of each.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = list(optimizers)
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        parameters = [p for group in groups for p in group["params"]]
        if len(set(parameters)) < len(parameters):
            raise UserError(
                f"CombinedOptimizer: {len(parameters) - len(set(parameters))} parameters are in several of "
                "the optimizers; give each parameter to one of them"
            )
        super().__init__([{"params": []}], {})
        self.param_groups = groups
        for optimizer in self.optimizers:
            self.state.update(optimizer.state)
        self._connect()

    def _connect(self) -> None:
        """Groups and state are the same objects here and there."""
        rest = iter(self.param_groups)
        for optimizer in self.optimizers:
            optimizer.param_groups = [next(rest) for _ in optimizer.param_groups]
            optimizer.state = self.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: it is unknown which of the optimizers is to update them."""
        if self.param_groups:
            raise UserError(
                f"CombinedOptimizer.add_param_group: it is unknown which of its {len(self.optimizers)} "
                "optimizers is to update the new parameters; give them to one of those before "
                "CombinedOptimizer is made"
            )
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "optimizers": self.optimizers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, whose groups and state are its own."""
        super().__setstate__(state)
        self._connect()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._connect()

    @property
    def needs(self) -> Need | None:
        """The most that one of the optimizers needs."""
        known = [need for optimizer in self.optimizers if (need := need_of(optimizer)) is not None]
        most = max(known, key=lambda need: list(Need).index(need), default=None)
        return most if len(known) == len(self.optimizers) else None

    @property
    def whole_state(self) -> frozenset[str]:
        shared = [each.whole_state for each in self.optimizers if isinstance(each, SumOptimizer)]
        return frozenset[str]().union(*shared)

    def share(self, exchange: Exchange) -> None:
        """For those that add up sums over ranks."""
        for optimizer in self.optimizers:
            if isinstance(optimizer, SumOptimizer):
                optimizer.share(exchange)


def make_optimizer(settings: Any, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that the `settings` of a job name. Vectors (biases, norms) are not decayed."""
    trained = list(parameters)
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    rate = settings.learning_rate
    if settings.name == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=settings.momentum, fused=True)
    if settings.name == "sm3":
        return SM3(groups, lr=rate, momentum=settings.momentum)
    if settings.name == "adafactor":
        # What torch takes for float32. In float64, where plans are verified, it would be below rounding.
        return Adafactor(groups, lr=rate, eps=(torch.finfo(torch.float32).eps, 1e-3))
    assert settings.name == "adamw", settings.name
    return torch.optim.AdamW(groups, lr=rate, betas=settings.betas, fused=True)
