"""A parameter set: named parameters that are replicated over the same ranks.

A stage of dense layers has one set, over its replicas. A stage with experts has two: the dense parameters
over `data`, and the experts over the ranks that hold the same ones. What strategies must know of a parameter
beyond its replicas is data of the set: which gradients are summed with other ranks too, whose norm others
count, and what other stages hold too. A `Claim` says which engine trains the parameters.
"""

from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence, Set
from dataclasses import InitVar, dataclass, field
from functools import cached_property
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from echelon.collectives import Group, RecordingGroup
from echelon.errors import UserError


class Unit(NamedTuple):
    """Parameters that are gathered, reduced and freed together. `module` runs while they are whole, and may
    need other units of the same set too: `needs` has their places, that of the unit itself included."""

    name: str
    module: nn.Module
    parameters: list[tuple[str, nn.Parameter]]
    needs: list[int]


class SharedGradient(NamedTuple):
    """A gradient that is summed over `group` too, after the sum over replicas.

    The first and the last stage of a language model share the embedding; tensor ranks sum the gradients of
    parameters that each used on a part of the work.
    `contributes`: whether this rank brings in its gradient; its replicas would bring the same again.
    `counts_norm`: whether this rank's stage counts it in the gradient norm.
    `tie`: between stages, the number of the tie, in which all ranks go through them; None within a stage.
    """

    parameter: nn.Parameter
    group: Group
    contributes: bool = True
    counts_norm: bool = True
    tie: int | None = None


class ShardGroups(NamedTuple):
    """The groups that divide a set among its ranks, if they do; named as the axes of the mesh.

    `shard`: the ranks that hold the parts of one copy, this rank among them; `copies`: the ranks that hold
    the same part as this one, each of another copy.
    """

    shard: Group
    copies: Group

    @classmethod
    def over_all(cls, group: Group) -> "ShardGroups":
        """One copy, over all ranks of a group."""
        return cls(group, RecordingGroup("copies", ledger=group.ledger))


@dataclass(frozen=True)
class ParameterSet:
    """Parameters by name, frozen ones too, and the ranks that hold copies of them."""

    name: str
    parameters: Mapping[str, nn.Parameter]
    group: Group
    units: Sequence[Unit] = ()
    shared_gradients: Sequence[SharedGradient] = ()
    norm_elsewhere: Set[nn.Parameter] = frozenset()  # whose gradients other ranks count
    sum_in_float32: bool = True  # gradients of weights below float32; else in the type of the weights
    shards: InitVar[ShardGroups | None] = None  # None: all ranks of `group` shard one copy
    # What other stages hold too, frozen or not: all of them must cut it into the same parts.
    separate_shards: Set[nn.Parameter] = frozenset()
    shard_groups: ShardGroups = field(init=False)  # the ranks among which the set is divided, if it is

    def __post_init__(self, shards: ShardGroups | None) -> None:
        object.__setattr__(self, "shard_groups", shards or ShardGroups.over_all(self.group))

    @cached_property
    def trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.parameters.items() if p.requires_grad]

    @cached_property
    def uncounted(self) -> Set[nn.Parameter]:
        """The parameters whose gradients this rank leaves out of the norm."""
        return {g.parameter for g in self.shared_gradients if not g.counts_norm} | self.norm_elsewhere

    @cached_property
    def summed_later(self) -> Set[nn.Parameter]:
        """The parameters whose gradients are summed over other ranks too, after the backward passes."""
        return {shared.parameter for shared in self.shared_gradients}

    @property
    def device(self) -> torch.device:
        """The device of the parameters; the CPU if there are none."""
        return next((parameter.device for parameter in self.parameters.values()), torch.device("cpu"))

    @property
    def numel(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters.values())

    def describe(self) -> str:
        """'dense 1,234,567 parameters over data (8), sharded over 4'."""
        shard, copies = self.shard_groups
        sharded = f", sharded over {shard.size}" if copies.size > 1 and shard.size > 1 else ""
        return f"{self.name} {self.numel:,} parameters over {self.group.axis} ({self.group.size}){sharded}"


def named_subset(module: nn.Module, only: Collection[nn.Parameter] | None = None) -> dict[str, nn.Parameter]:
    """The parameters of a module by their first name; those of `only`, if given."""
    return {name: p for name, p in module.named_parameters() if only is None or p in only}


# Claims: which engine trains a parameter, and which parameters it does not train.
#
# A later engine takes the parameters over, and the earlier one may not train them any more: its buckets, its
# shards and its optimizer would go on with weights of their own. Parameters that were frozen at the start are
# in no bucket and no optimizer, so they must stay frozen; one that is frozen later just gets no gradients.


class Claim:
    """The parameters of one set, by name; asked once per step."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._names = {parameter: name for name, parameter in parameters.items()}
        self._frozen = [(name, p) for name, p in parameters.items() if not p.requires_grad]
        self._lost: str | None = None  # the first parameter that a later engine has taken
        for parameter in parameters.values():
            previous = _holder(parameter)
            if previous is not None:
                previous._lost = previous._lost or previous._names[parameter]
            _holders[parameter] = ref(self)

    def check(self) -> None:
        """Raise if this engine cannot train its parameters as it began."""
        if self._lost is not None:
            raise UserError(
                f"{self._lost} is trained by a later engine over the same model, and this one would go on "
                "with weights of its own; use the later one, and close an engine with engine.close() before "
                "parallelize makes another"
            )

    def unfrozen_error(self) -> UserError | None:
        """Return what to tell users of parameters that were frozen at the start, and are no more. Only ranks
        that hold them see it."""
        with torch._C.DisableTorchFunctionSubclass():  # a freed parameter need not be asked
            trained = [name for name, parameter in self._frozen if parameter.requires_grad]
        if trained:
            return UserError(
                f"{_listed(trained)} had requires_grad=False when parallelize was called, and this engine's "
                "optimizer has no state for it; to train it, call engine.close(), set requires_grad, and "
                "make another engine with parallelize"
            )
        return None

    def holds(self, parameter: nn.Parameter) -> bool:
        return _holder(parameter) is self

    def release(self) -> None:
        for parameter in self._names:
            if self.holds(parameter):
                del _holders[parameter]


def is_claimed(parameters: Iterable[nn.Parameter]) -> bool:
    """Return whether an engine that is not closed trains any of these."""
    return any(_holder(parameter) is not None for parameter in parameters)


# The claim that holds each parameter.
_holders: MutableMapping[Tensor, "ref[Claim]"] = WeakIdKeyDictionary()


def _holder(parameter: nn.Parameter) -> Claim | None:
    reference = _holders.get(parameter)
    return None if reference is None else reference()


def _listed(names: list[str]) -> str:
    """'a, b, c and 9 more'."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
