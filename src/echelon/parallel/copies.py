"""The tensors that several ranks hold alike: copies of replicas, of ranks along `tensor`, of tied weights."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from echelon.collectives import Group
from echelon.collectives.mesh import Mesh
from echelon.parallel.data.sharing import Sharing
from echelon.parallel.data.zero.zero import Zero
from echelon.parallel.stage import LocalStages
from echelon.parallel.tensor.split import Sharded

Named = list[tuple[str, Tensor]]

_REPLICAS = (
    "replicas update their copies by the same numbers: something changes weights or buffers on one rank "
    "alone (a forward, a hook, or code between steps that runs on some ranks)"
)
_TENSOR = (
    "ranks along tensor compute their gradients alike: a forward draws at random by itself (torch.rand, "
    "F.dropout, a DropPath that is seeded by rank), or its input differs; let nn.Dropout draw, whose masks "
    "are the same on every rank, or draw from a torch.Generator with the same seed on all ranks"
)
_TIED = "stages update their copies of a tied weight by the same sums: something changes one of them alone"


class Copies(NamedTuple):
    """Tensors that the ranks of `group` hold alike, in one order; `cause`: what a difference comes from.

    `exact`: in every bit. Gradients that are computed twice on a CUDA device may differ by rounding, where
    threads add in any order.
    """

    named: Callable[[], Named]
    group: Group
    cause: str
    exact: bool = True


def find_copies(local: LocalStages, sharded: Sharded | None, mesh: Mesh) -> list[Copies]:
    """List what this rank holds a copy of. `sharded`: what ranks along `tensor` share, if there are any."""
    if mesh.plan.sync == "async":
        return []  # workers update at times of their own
    # Each rank along `tensor` has all of these.
    whole = set() if sharded is None else {*sharded.partial, *sharded.replicated}
    sharings = local.sharings
    replicas = [Copies(partial(_trained, sharing), _copies_of(sharing), _REPLICAS) for sharing in sharings]
    buffers = Copies(partial(_buffers, local.modules), mesh.group("weights"), _REPLICAS)
    is_exact = mesh.device.type == "cpu"
    tensor = Copies(partial(_whole, sharings, whole), mesh.group("tensor"), _TENSOR, exact=is_exact)
    return [*replicas, buffers, tensor, *_tied(sharings)]


def _held(sharing: Sharing) -> list[tuple[str, nn.Parameter, Tensor]]:
    """List what this rank updates of each trained parameter: all of it, or its part."""
    local = sharing.local_parameters()
    sharing.wait_for_weights(local)
    if isinstance(sharing, Zero):
        return [(each.name, each.parameter, sharing.stored_values(each)) for each in local]
    return [(name, parameter, parameter) for name, parameter in sharing.parameter_set.trained]


def _copies_of(sharing: Sharing) -> Group:
    """Return the ranks that hold what this one holds."""
    held = sharing.parameter_set
    return held.shard_groups.copies if isinstance(sharing, Zero) else held.group


def _trained(sharing: Sharing) -> Named:
    return [(name, tensor) for name, _, tensor in _held(sharing)]


def _whole(sharings: Sequence[Sharing], whole: Collection[nn.Parameter]) -> Named:
    held = [each for sharing in sharings for each in _held(sharing)]
    return [(name, tensor) for name, parameter, tensor in held if parameter in whole]


def _buffers(modules: Sequence[nn.Module]) -> Named:
    return [(name, buffer) for module in modules for name, buffer in module.named_buffers()]


def _tied(sharings: Sequence[Sharing]) -> list[Copies]:
    """List the weights that other stages hold too. All ranks go through them in one order."""
    shared = [(each, sharing) for sharing in sharings for each in sharing.parameter_set.shared_gradients]
    ties = sorted((pair for pair in shared if pair[0].tie is not None), key=lambda pair: pair[0].tie or 0)
    return [Copies(partial(_whole, [sharing], {tie.parameter}), tie.group, _TIED) for tie, sharing in ties]
