"""How a training starts: the model on its device, in its type, and the same on every rank."""

import torch
from torch import Tensor, nn

from echelon.collectives import Group
from echelon.data_parallel import broadcast_packed
from echelon.data_parallel.text_agreement import Difference, check_same_text
from echelon.data_parallel.unit_agreement import describe
from echelon.huggingface import frequencies


def convert(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The model on the device, its real numbers in `dtype`; integers and complex numbers stay what they are,
    and so do frequencies of rotary positions: in bf16 they would be off by turns at the 1,000th token."""
    kept = {id(buffer) for buffer in frequencies(model)}

    def convert_tensor(t: Tensor) -> Tensor:
        return t.to(device, dtype) if t.is_floating_point() and id(t) not in kept else t.to(device)

    converted: nn.Module = model._apply(convert_tensor)
    return converted


def start_equal(model: nn.Module, group: Group) -> None:
    """Rank 0's parameters and buffers into everyone's: the only place where ranks are made equal."""
    if group.size > 1:
        _check_same_model(model, group)
        with group.ledger.about("parameters"):
            broadcast_packed([*model.parameters(), *model.buffers()], group)


def _check_same_model(model: nn.Module, group: Group) -> None:
    """Raise, on every rank, unless all have the same tensors, trained and frozen."""
    parameters = list(model.named_parameters())
    lines = [describe(name, p) + ("" if p.requires_grad else ", frozen") for name, p in parameters]
    lines += [describe(name, buffer) for name, buffer in model.named_buffers()]
    device = parameters[0][1].device if parameters else torch.device("cpu")
    check_same_text(lines, group, device, _difference_of_models)


def _difference_of_models(difference: Difference) -> str:
    rank, first, other = difference
    return (
        f"ranks 0 and {rank} have different models: rank 0 has {first}, and rank {rank} has {other}; give "
        "parallelize the same model on every rank"
    )
