"""The optimizer of a Trainer, of the parameters that a rank holds; what its loop sees of it and the model."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from echelon.engine import Engine
from echelon.errors import UserError


def optimizer_maker(
    model: nn.Module, kind: Any, options: Mapping[str, Any], decayed: Iterable[str], weight_decay: float
) -> Callable[[Iterable[nn.Parameter]], Optimizer]:
    """Return the function that `parallelize` takes. Parameters decay by their names: no biases, no norms."""
    own = {"params", "model", "optimizer_dict"} & options.keys()
    if own or not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise UserError(
            f"optim: {getattr(kind, '__name__', kind)} makes groups of whole parameters itself, and a rank "
            "may hold a part of them; use an optimizer of torch (optim='adamw_torch'), or one of "
            "echelon.optim by optimizer_cls_and_kwargs=(echelon.optim.Muon, {…})"
        )
    names = frozenset(decayed)

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        given = list(parameters)
        decays = {parameter for name, parameter in model.named_parameters() if name in names}
        groups = [
            {"params": [each for each in given if each in decays], "weight_decay": weight_decay},
            {"params": [each for each in given if each not in decays], "weight_decay": 0.0},
        ]
        return kind([group for group in groups if group["params"]], **options)

    return make


@final
class EngineOptimizer:
    """What a Trainer, its callbacks and its schedules see as the optimizer. The engine has made the update,
    with the sums over ranks and the clipping that belong to it, when `step` is called."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._engine.optimizer.param_groups

    def step(self, closure: None = None) -> None:
        if closure is not None:
            raise UserError("optimizer.step(closure): the engine calls the model; leave the closure out")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing waits: the update has taken the gradients."""


@final
class ModelInLoop:
    """What the loop of a Trainer sees as the wrapped model: it counts parameters, and drops gradients. Those
    of the model itself may be a part, on this rank."""

    def __init__(self, model: nn.Module) -> None:
        self._shapes = [
            nn.Parameter(torch.empty_like(each, device="meta"), requires_grad=each.requires_grad)
            for each in model.parameters()
        ]

    def parameters(self) -> list[nn.Parameter]:
        """Whole ones, without values."""
        return self._shapes

    def count(self) -> int:
        return sum(each.numel() for each in self._shapes)

    def zero_grad(self) -> None:
        """See `EngineOptimizer.zero_grad`."""
