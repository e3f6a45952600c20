"""Checks that all ranks have the same units, and gather and reduce them in the same order.

Before the first step, ranks compare their units (`check_same_units`). In the first step they compare before
each message (`GatherAgreement`): a rank that runs other modules than its peers (experts chosen by data,
layers that are left out at random) is found before a message meets the wrong one. Later steps compare nothing
in between: a message that meets the wrong one is an error of the group, and ranks that got each other's
weights refuse the step (`Residency.compare`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn, final

import torch
from torch import Tensor

from echelon.collectives import Group, MismatchError
from echelon.collectives.agreement import Difference, check_same_text, gather_values, is_same
from echelon.errors import UserError
from echelon.parallel.data.parameter_set import Unit
from echelon.parallel.data.sharing import Problem


@final
class GatherAgreement:
    """Compares what the ranks that shard one copy are about to do, until it is closed.

    `replicas`: all ranks of the set, which are told at the end of each pass: else other groups would wait.
    """

    def __init__(self, group: Group, replicas: Group, units: Sequence[str], device: torch.device) -> None:
        self._group, self._replicas, self._device = group, replicas, device
        names = [f"module '{unit}'" if unit else "the model itself" for unit in units]
        self._actions = ["has finished a pass"]
        self._actions += [f"gathers the weights of {name}" for name in names]
        self._actions += [f"reduces the gradients of {name}" for name in names]
        self._num_units = len(units)
        self._is_open = True
        self._error: UserError | None = None  # is raised again: the code around a pass may have caught it

    def close(self) -> None:
        """All ranks agree: compare no more."""
        self._is_open = False

    def gather(self, unit: int) -> None:
        self._compare(1 + unit)

    def reduce(self, unit: int) -> None:
        self._compare(1 + self._num_units + unit)

    def finish_pass(self) -> None:
        self._compare(0)
        if self._is_open and self._is_told(False):
            self._fail(Problem.DIFFERENT_UNITS.value)

    def _compare(self, action: int) -> None:
        """Raise, on every rank of the group, unless all are about to do the same."""
        if not self._is_open:
            return
        if self._error is not None:
            raise self._error
        if not is_same([action], self._group, self._device):
            actions = gather_values(action, self._group, self._device)
            self._is_told(True)
            self._fail(self._difference(actions))

    def _is_told(self, has_difference: bool) -> bool:
        """Return whether any group has found a difference; once per pass on each rank."""
        if self._replicas.size == self._group.size:
            return False
        flag = torch.tensor([has_difference], dtype=torch.uint8, device=self._device)
        with self._replicas.ledger.about("agreement"):
            self._replicas.all_reduce(flag, "max")
        return bool(flag.item())

    def _fail(self, message: str) -> NoReturn:
        self._error = UserError(message)
        raise self._error

    def _difference(self, numbers: Sequence[int]) -> str:
        other = next(rank for rank, number in enumerate(numbers) if number != numbers[0])
        first, second = self._actions[numbers[0]], self._actions[numbers[other]]
        axis = self._group.axis
        return f"{Problem.DIFFERENT_UNITS.value} (rank 0 along {axis} {first}, and rank {other} {second})"


@contextmanager
def explain_mismatch() -> Iterator[None]:
    """A message that meets another one comes from ranks that run different modules."""
    try:
        yield
    except MismatchError as error:
        raise UserError(f"{Problem.DIFFERENT_UNITS.value} ({error})") from error


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
