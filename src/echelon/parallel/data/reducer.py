"""The reducer: which gradients are complete, and when each group of them may be reduced.

Parameters are in groups (buckets, units). A group is reduced as soon as the backward pass has completed it,
but always in one order, the same on every rank: a message that overtakes another on one rank alone would
meet the wrong one on its peers. The order is a guess at first, then what replica 0 saw in the first step.

Which parameters any replica has used is a flag for each, exchanged beside the gradients (`FlagExchange`).
"""

from collections.abc import Callable, Sequence, Set
from typing import final

import torch
from torch import Tensor, nn

from echelon.collectives import Group
from echelon.collectives.agreement import FlagExchange
from echelon.errors import UserError
from echelon.parallel.data.grad_accumulation import Accumulation, hook_gradient


class Engines:
    """How many calls of engines run in this process: a backward pass outside of them is the user's own."""

    num_at_work = 0


engines = Engines()

BARE_BACKWARD = (
    "loss.backward() of a model that an engine trains: gradients of this rank alone would be added, which no "
    "other rank sums; write engine.backward(loss) of what engine(x) returned, or engine.step(batch). For "
    "gradients of inputs, torch.autograd.grad adds to none. See docs/loops.md"
)


class Reducer:
    """Calls `reduce(index)` once for each group and backward pass, in the order of the groups."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        accumulate: Callable[[nn.Parameter], None],
        reduce: Callable[[int], None],
        *,
        ordered: bool = True,
    ) -> None:
        """`accumulate` is called for each gradient that a backward pass has made, before it is reduced.
        `ordered`: nothing is reduced before its turn; else a group is as soon as it is complete."""
        self._ordered = ordered
        self._parameters = list(parameters)
        self._accumulate, self._reduce = accumulate, reduce
        self._groups: list[set[nn.Parameter]] = []
        self._place: dict[nn.Parameter, int] = {}
        self.used: set[nn.Parameter] = set()  # in this step
        self._arrivals: list[nn.Parameter] = []
        self._in_step = False
        self._in_backward = False  # else it is a backward pass of the user's own, on this rank alone
        self.is_alone = False  # whether the gradients of no other stage follow
        self._previous: Reducer | None = None
        self._following: Reducer | None = None
        self.accumulation = Accumulation()
        self.start_backward(reducing=False)
        self._hooks = [hook_gradient(parameter, self._arrived) for parameter in self._parameters]

    def follow(self, previous: "Reducer") -> None:
        """Reduce nothing in a backward pass before `previous` is through with it.

        The sets of one stage talk over groups of their own, or over the same one: only one order over all of
        them is the same on every rank, whichever parameters each rank has used.
        """
        self._previous, previous._following = previous, self

    def regroup(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        """From the next backward pass on, reduce these groups, in this order."""
        self._groups = [set(group) for group in groups]
        self._place = {p: index for index, group in enumerate(groups) for p in group}

    def start_step(self) -> None:
        self._in_step = True
        self.used = set()
        self._arrivals = []
        self.start_backward(reducing=False)
        self._in_backward = False

    def start_backward(self, *, reducing: bool) -> None:
        """Gradients of this backward pass complete their groups, if `reducing`; else they only add up."""
        self._reducing, self._in_backward = reducing, self._in_step
        self.accumulation.is_open = self._in_step and not reducing
        self._next = 0
        self._early: set[int] = set()  # groups that were reduced before their turn
        self._missing = [set(group) for group in self._groups] if reducing else []

    def flush(self) -> None:
        """Reduce what is left: parameters that the backward pass did not reach leave their groups open."""
        self._in_backward = False
        while self._reducing and self._next < len(self._groups):
            self._reduce_next()
        if self._following is not None and self._following._reducing:
            self._following._reduce_complete()

    def finish_step(self) -> None:
        """Gradients that come before the next step are not ours."""
        self._in_step = self._in_backward = self.accumulation.is_open = False

    def overlaps(self, index: int) -> bool:
        """Return whether a backward pass goes on while a group is reduced: it is not the last one."""
        return not self.is_alone or self._following is not None or index < len(self._groups) - 1

    @property
    def all_reduced(self) -> bool:
        return self._reducing and self._next == len(self._groups)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _arrived(self, parameter: Tensor) -> None:
        """The backward pass has added to this parameter's gradient."""
        assert isinstance(parameter, nn.Parameter)
        if not self._in_backward:
            if engines.num_at_work:
                return  # a loss of another engine goes through this model, and only asks for its weights
            raise UserError(BARE_BACKWARD)
        self._refuse_late(parameter)
        if parameter.grad is not None:  # torch calls the hook also when a function has no gradient for it
            self._accumulate(parameter)
            self.used.add(parameter)
        self._arrivals.append(parameter)
        if not self._reducing:
            return
        place = self._place[parameter]
        self._missing[place].discard(parameter)
        if not self._ordered and not self._missing[place]:
            self._early.add(place)
            self._reduce(place)
        self._reduce_complete()

    def _reduce_complete(self) -> None:
        """Reduce the groups that are complete, as far as it is their turn."""
        if self._previous is not None and not self._previous._is_through:
            return
        while self._next < len(self._groups) and not self._missing[self._next]:
            self._reduce_next()
        if self._following is not None and self._following._reducing and self._is_through:
            self._following._reduce_complete()

    @property
    def _is_through(self) -> bool:
        """Return whether nothing of this backward pass is left to reduce here."""
        return not self._reducing or self._next == len(self._groups)

    def _refuse_late(self, parameter: nn.Parameter) -> None:
        if not self._reducing:
            return
        place = self._place[parameter]
        if place < self._next or place in self._early:
            raise UserError(
                f"a parameter of shape {tuple(parameter.shape)} got a gradient again after it was reduced: "
                "its module runs inside a reentrant checkpoint, or backward ran twice; use "
                "checkpoint(…, use_reentrant=False), and one backward pass per microbatch"
            )

    def _reduce_next(self) -> None:
        index = self._next
        self._next += 1
        if index not in self._early:
            self._reduce(index)

    def exchange_used(
        self, group: Group, parameters: Sequence[nn.Parameter] | None = None
    ) -> "UsedParameters":
        """Begin to tell the other replicas which of `parameters` were used here in this step: behind the
        gradients of a unit, while a backward pass goes on; or of all, at its end."""
        if parameters is None:
            return UsedParameters(self._parameters, self.used, group, overlaps=False)
        return UsedParameters(parameters, self.used, group, overlaps=True)

    def agreed_order(self, group: Group) -> list[nn.Parameter]:
        """All parameters, in the order in which replica 0 saw their gradients arrive in this step."""
        seen = dict.fromkeys([*self._arrivals, *reversed(self._parameters)])
        number = {p: index for index, p in enumerate(self._parameters)}
        order = torch.tensor([number[p] for p in seen], dtype=torch.int64)
        order = order.to(self._parameters[0].device)
        with group.ledger.about("order"):
            group.broadcast(order, source=0)
        return [self._parameters[index] for index in order.tolist()]

    def agreed_group_order(self, group: Group) -> list[int]:
        """The places of all groups, in the order in which replica 0 saw the last of their gradients."""
        last_first = [self._place[p] for p in reversed(self.agreed_order(group))]
        return list(reversed(dict.fromkeys(last_first)))


@final
class UsedParameters:
    """The parameters that were used: what each replica knows is on its way to the others."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], used: Set[nn.Parameter], group: Group, *, overlaps: bool
    ) -> None:
        self._parameters, self._exchange = parameters, None
        if parameters:
            flags = [parameter in used for parameter in parameters]
            with group.ledger.about("used parameters"):
                self._exchange = FlagExchange(flags, group, parameters[0].device, overlaps=overlaps)

    def wait(self) -> set[nn.Parameter]:
        used = [] if self._exchange is None else self._exchange.wait()
        return {p for p, is_used in zip(self._parameters, used, strict=True) if is_used}
