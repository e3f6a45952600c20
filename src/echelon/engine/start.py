"""How a training starts: the model on its device, in its type, and the same on every rank.

A model without memory is split first, and filled part by part: see deferred_start.py.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from echelon.collectives import Group
from echelon.collectives.agreement import Difference, check_same_text
from echelon.collectives.mesh import this_device
from echelon.engine.deferred_start import forget_values, give_buffers, weight_source
from echelon.engine.saving.restore import mark_empty
from echelon.engine.watch.aliases import check_aliases
from echelon.hardware import ignore_torch_warnings
from echelon.launching import join
from echelon.nn.batch import DTYPES
from echelon.nn.huggingface.families import frequencies
from echelon.nn.initialization import WeightSource
from echelon.parallel.data import broadcast_packed
from echelon.parallel.data.zero.unit_agreement import describe
from echelon.parallel.data.zero.weight_access import end_idle
from echelon.plan import Plan


def prepare(
    model: nn.Module, plan: Plan, weights: str | Path | None
) -> tuple[nn.Module, WeightSource | None]:
    """The model on this rank's device, in the plan's type; or without memory, and where its weights are.
    The ranks have joined then."""
    ignore_torch_warnings()
    join()
    device = this_device()
    source = weight_source(model, plan, weights, device)
    end_idle(model.parameters())
    check_aliases(model, plan, device if source is None else None, DTYPES[plan.precision])
    if source is not None:
        mark_empty(model, plan)
    return convert(model, device, DTYPES[plan.precision], has_values=source is None), source


def convert(
    model: nn.Module, device: torch.device, dtype: torch.dtype, *, has_values: bool = True
) -> nn.Module:
    """The model on the device, its real numbers in `dtype`; integers and complex numbers stay what they are,
    and so do frequencies of rotary positions: in bf16 they would be off by turns at the 1,000th token.

    A model that gets its values later loses those that it has; it gets the types alone."""
    kept = {id(buffer) for buffer in frequencies(model)}
    target = device if has_values else torch.device("meta")
    if not has_values:
        forget_values(model)

    def convert_tensor(t: Tensor) -> Tensor:
        return t.to(target, dtype) if t.is_floating_point() and id(t) not in kept else t.to(target)

    converted: nn.Module = model._apply(convert_tensor)
    return converted


def start_equal(
    model: nn.Module, group: Group, device: torch.device, source: WeightSource | None = None
) -> None:
    """Rank 0's parameters and buffers into everyone's: the only place where ranks are made equal.

    Of a deferred model: the seed of the parameters, which are filled later, and the buffers.
    """
    _check_same_model(model, group, device, source)
    if source is None:
        _broadcast([*model.parameters(), *model.buffers()], group)
        return
    source.seed = _agreed(source.seed, group, device)
    for tensor in source.constants() if group.size > 1 else []:
        values = tensor.to(device, copy=True)
        _broadcast([values], group)
        tensor.copy_(values)
    give_buffers(model, source, device)
    _broadcast(list(model.buffers()), group)


def _broadcast(tensors: list[Tensor], group: Group) -> None:
    if group.size > 1:
        with group.ledger.about("parameters"):
            broadcast_packed(tensors, group)


def _agreed(seed: int, group: Group, device: torch.device) -> int:
    """Rank 0's."""
    number = torch.tensor(seed % 2**63, device=device)
    if group.size > 1:
        group.broadcast(number)
    return int(number)


def _check_same_model(
    model: nn.Module, group: Group, device: torch.device, source: WeightSource | None
) -> None:
    """Raise, on every rank, unless all have the same tensors, trained and frozen, with or without values."""
    if group.size == 1:
        return
    parameters = list(model.named_parameters())
    lines = [describe(name, p) + ("" if p.requires_grad else ", frozen") for name, p in parameters]
    lines += [describe(name, buffer) for name, buffer in model.named_buffers()]
    lines += ["a model with values"] if source is None else ["a model without values", *source.describe()]
    check_same_text(lines, group, device, _difference_of_models)


def _difference_of_models(difference: Difference) -> str:
    rank, first, other = difference
    return (
        f"ranks 0 and {rank} have different models: rank 0 has {first}, and rank {rank} has {other}; give "
        "parallelize the same model on every rank"
    )
