"""Residency: which units are gathered when the weights themselves are sharded, by all ranks alike.

A unit is gathered while something uses it, and for a while before: on entering a unit, the next `prefetch`
ones are gathered too, in the order of the last forward pass, or its reverse on the way back. So at most
prefetch + 1 units are gathered at a time, beside units that surround others or are tied to them.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn, final

import torch
from torch import Tensor

from echelon.collectives import Group, Ledger, MismatchError
from echelon.collectives.agreement import Difference, check_same_text, gather_values, is_same
from echelon.collectives.group import check_not_alone
from echelon.errors import UserError
from echelon.parallel.data.parameter_set import Unit
from echelon.parallel.data.sharing import Problem
from echelon.parallel.data.zero.flat import FlatUnit

# Checks that all ranks have the same units, and gather and reduce them in the same order.
#
# Before the first step, ranks compare their units (`check_same_units`). In the first step they compare before
# each message (`GatherAgreement`): a rank that runs other modules than its peers (experts chosen by data,
# layers that are left out at random) is found before a message meets the wrong one. Later steps compare
# nothing in between: a message that meets the wrong one is an error of the group, and ranks that got each
# other's weights refuse the step (`Residency.compare`).


@final
class GatherAgreement:
    """Compares what the ranks that shard one copy are about to do, until it is closed. `replicas`: all ranks
    of the set, which are told at the end of each pass: else other groups would wait."""

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


# Which units are gathered.


class Residency:
    """Gathers and frees units as they are entered and left. A unit may be memory of several kinds."""

    def __init__(
        self,
        units: Sequence[list[FlatUnit]],
        needs: list[list[int]],
        prefetch: int,
        ledger: Ledger,
        root: int | None,
        agreement: GatherAgreement | None = None,
        *,
        stores: bool = False,
    ) -> None:
        """`root`: the unit that surrounds the others, if there is one. `stores`: units are updated in the
        backward pass, and new weights go to host memory."""
        self._agreement = agreement
        self._units, self._needs, self._prefetch, self._ledger = units, needs, prefetch, ledger
        self._root = root
        self._gathered = 0  # a number made from all that was gathered in this step, in order
        self._users = [0] * len(units)  # a tied weight, or the root's, has several at a time
        self._held: set[int] = set()  # units that are read outside of their modules: until the step is over
        # With updates in the backward pass one of prefetch + 1 places is for what is being stored: its memory
        # is free only when the copy to the host is done.
        self._behind = 1 if stores and prefetch > 1 else 0
        self._leaving: deque[FlatUnit] = deque()  # units on their way to host memory, not in use any more
        self._trace: list[int] = []  # what this step's forward passes have entered
        self._set_sequence(list(range(len(units))))

    def _set_sequence(self, sequence: list[int]) -> None:
        """From now on, expect passes to enter units in this order, or its reverse on the way back."""
        self._sequence = sequence
        self._orders = {False: sequence, True: sequence[::-1]}  # by `backward`
        # Made once: each unit asks for it in each pass.
        self._following = {
            backward: {index: self._units_after(index, order, backward) for index in order}
            for backward, order in self._orders.items()
        }

    def _units_after(self, index: int, order: list[int], backward: bool) -> list[int]:
        number = self._num_ahead(backward)
        if index == self._root:  # it is entered first, whichever way
            return [unit for unit in order if unit != index][:number]
        place = order.index(index)
        return order[place + 1 : place + 1 + number]

    @property
    def num_gathered(self) -> int:
        """The number of units that have memory for their whole weights now."""
        return sum(any(flat.is_gathered for flat in unit) for unit in self._units)

    def reset(self) -> None:
        """Free everything: between steps, and after one that failed."""
        if self._trace:
            entered = list(dict.fromkeys(self._trace))
            if entered != self._sequence:
                self._set_sequence(entered)
            self._trace = []
        self._users = [0] * len(self._units)
        self._held.clear()
        self._gathered = 0
        for index in range(len(self._units)):
            self._free(index)
        while self._leaving:
            self._leaving.popleft().drop()

    def abandon(self) -> None:
        """A pass has raised: nothing is in use. What is gathered stays so until the next step. To free it
        would wait for its messages, which peers that have raised too may never send."""
        self._users = [0] * len(self._units)
        self._held.clear()

    def enter(self, index: int, *, backward: bool) -> None:
        """Return when all that unit `index` needs is gathered; the next units are on their way."""
        if not backward:
            self._trace.append(index)
        for need in self._needs[index]:
            self._users[need] += 1
            self._gather(need)
        # The next units' messages are issued before the host waits for this unit's: they overlap its module.
        for following in self._following[backward].get(index, ()):
            self._gather(following)
        for need in self._needs[index]:
            self._synchronize(need)

    def enter_again(self, index: int) -> None:
        """Return when all that unit `index` needs is gathered, for a second run in the backward pass. It is,
        if its own backward pass has begun; else what was gathered ahead makes room for it."""
        needs = self._needs[index]
        if not all(self._users[need] for need in needs):
            self.free_unused()
        for need in needs:
            self._users[need] += 1
            self._gather(need)
        for need in needs:
            self._synchronize(need)

    def hold(self, index: int) -> None:
        """Return when unit `index` is gathered, for a read outside of its module: no hook tells its end."""
        if index not in self._held:
            self._held.add(index)
            self._users[index] += 1
        self._gather(index)
        self._synchronize(index)

    def release(self) -> None:
        """Nothing that was held is needed any more: no backward pass follows."""
        for index in self._held:
            self._users[index] -= 1
        self._held.clear()
        self.free_unused()

    @property
    def in_use(self) -> bool:
        return any(users > (index in self._held) for index, users in enumerate(self._users))

    def ahead(self, *, backward: bool) -> None:
        """Begin to gather what a pass enters first."""
        for index in self._orders[backward][: self._num_ahead(backward) + 1]:
            self._gather(index)

    def free_unused(self) -> None:
        """Free what was gathered ahead and has no user."""
        for index, users in enumerate(self._users):
            if users == 0:
                self._free(index)

    def leave(self, index: int) -> None:
        for need in self._needs[index]:
            self._users[need] -= 1
            if self._users[need] == 0:
                self._free(need)

    def _num_ahead(self, backward: bool) -> int:
        return self._prefetch - (self._behind if backward else 0)

    def store(self, flat: FlatUnit) -> None:
        """A unit is being copied to the host, and drops its memory when the next one is."""
        self._leaving.append(flat)
        while len(self._leaving) > self._behind:
            self._leaving.popleft().drop()

    def compare(self, group: Group) -> dict[Problem, Tensor]:
        """Return whether ranks gathered different units in this step: they have got each other's weights."""
        moving = [flat for unit in self._units for flat in unit if not flat.resident]
        if not moving:
            return {}
        device = moving[0].flat.device
        # The largest of x and of −x over all ranks: each the other's negative if and only if all have one x.
        # The answer stays on the device: to read it would stall every step.
        extremes = torch.full((2,), self._gathered, dtype=torch.int64, device=device)
        extremes[1].neg_()
        with self._ledger.about("agreement"):
            group.all_reduce(extremes, "max")
        return {Problem.DIFFERENT_UNITS: extremes[0] != -extremes[1]}

    def _gather(self, index: int) -> None:
        flats = self._units[index]
        missing = [flat for flat in flats if not flat.is_gathered]
        if missing:
            if any(flat.sharded for flat in missing):
                check_not_alone("all_gather", "data")
            if self._agreement is not None:
                self._agreement.gather(index)
            # A hash of the order: ranks that gathered the same units in another order have other numbers.
            for _ in missing:
                self._gathered = (self._gathered * 1_000_003 + index + 1) % 2**61
        elif not any(flat.offloaded for flat in flats):
            return  # most calls, since units are gathered ahead
        with self._ledger.about("parameters"):
            for flat in flats:
                flat.gather()

    def _synchronize(self, index: int) -> None:
        for flat in self._units[index]:
            flat.synchronize()

    def _free(self, index: int) -> None:
        for flat in self._units[index]:
            flat.free()
