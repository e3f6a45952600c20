"""parallelize(): composes the strategies of a plan around a model. Read top to bottom; each line one axis."""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from echelon.data_parallel import AllReduce, Alone, Sync
from echelon.engine.batch import Loss
from echelon.engine.engine import Engine
from echelon.engine.support import refuse_unsupported
from echelon.errors import UserError
from echelon.mesh import Mesh
from echelon.plan import Plan

_DTYPES = {"fp64": torch.float64, "fp32": torch.float32}


def parallelize(
    model: nn.Module,
    plan: Plan | str,
    *,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    loss: Loss,
    clip: float | None = None,
    schedule: Callable[[int], float] | None = None,
) -> Engine:
    """An engine that trains `model` as `plan` says, equal to training on one device.

    `optimizer` is given the parameters of this rank; `loss(output, target)` returns a mean over samples, or
    (total, count) for an exact mean over tokens; `clip` bounds the global gradient norm; `schedule` maps the
    step to a factor of the learning rate.
    """
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    refuse_unsupported(plan)
    mesh = Mesh.join(plan)
    model = model.to(mesh.device, _DTYPES[plan.precision])
    sync = _replicate(model, mesh)
    parameters = [parameter for _, parameter in sync.parameters()]
    if not parameters:
        raise UserError("the model has no parameter that requires a gradient; there is nothing to train")
    return Engine(model, mesh, sync, optimizer(parameters), loss, clip, schedule)


def _replicate(model: nn.Module, mesh: Mesh) -> Sync:
    """How replicas along `data` agree."""
    group = mesh.group("data")
    return Alone(model) if group.size == 1 else AllReduce(model, group)
