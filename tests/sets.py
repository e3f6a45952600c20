"""Parameter sets for tests of single strategies."""

from collections.abc import Collection, Sequence

from torch import nn

from echelon.collectives import Group
from echelon.parallel.data.parameter_set import ParameterSet, ShardGroups, SharedGradient, named_subset
from echelon.parallel.data.zero.units import divide_units


def set_of(
    module: nn.Module,
    group: Group,
    only: Collection[nn.Parameter] | None = None,
    shared_gradients: Sequence[SharedGradient] = (),
    shards: ShardGroups | None = None,
    separate_shards: Collection[nn.Parameter] = (),
) -> ParameterSet:
    """All parameters of a module, or `only` some, over a group."""
    units = divide_units(module, smallest=0, only=only)
    parameters = named_subset(module, only)
    separate = frozenset(separate_shards)
    return ParameterSet(
        "dense", parameters, group, units, shared_gradients, shards=shards, separate_shards=separate
    )


def padded_bytes(module: nn.Module, itemsize: int = 4) -> int:
    """What the trained parameters of a module take in flat memory: blocks of 256 bytes for each."""
    return sum(-(-p.numel() * itemsize // 256) * 256 for p in module.parameters() if p.requires_grad)
