"""Whether all ranks of a set have the same units, asked once, before they gather and reduce them together."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from echelon.collectives import Group
from echelon.collectives.agreement import Difference, check_same_text
from echelon.parallel.data.parameter_set import Unit


def check_same_units(units: Sequence[Unit], prefetch: int, group: Group, device: torch.device) -> None:
    """Raise, on every rank of the group, unless all have these units and gather as many ahead."""

    def message(difference: Difference) -> str:
        rank, first, other = difference
        return (
            f"ranks 0 and {rank} along {group.axis} have different units of parameters, and with zero=1 or "
            f"more ranks gather and reduce units together: rank 0 has {first}, and rank {rank} has {other}; "
            "give parallelize the same model, smallest_unit and prefetch on every rank"
        )

    check_same_text([f"prefetch={prefetch}", *_lines(units)], group, device, message)


def describe(name: str, tensor: Tensor) -> str:
    """A tensor of a model in words: all that its messages depend on."""
    return f"{name} of shape {tuple(tensor.shape)} and type {tensor.dtype}"


def _lines(units: Sequence[Unit]) -> Iterator[str]:
    for unit in units:
        place = f"unit '{unit.name}'" if unit.name else "the unit of the model itself"
        if not unit.parameters:
            yield f"nothing in {place}"
        for name, parameter in unit.parameters:
            frozen = "" if parameter.requires_grad else ", frozen,"
            yield f"{describe(name, parameter)}{frozen} in {place}"
