"""Compare what ranks must have in common, once, in the first step, by a few numbers of each.

The ranks of a replica (along `tensor`, `context` and `pipeline`) are given the same batch. Those along
`tensor` compute the same gradients of parameters that all of them have whole. Where that is not so, they
would train something that no device would, and nothing else would show it.
"""

import zlib
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from echelon.collectives import Group
from echelon.collectives.agreement import fingerprint, gather_rows, measures, near, wrapped
from echelon.collectives.mesh import Mesh
from echelon.errors import UserError
from echelon.nn.batch import Batch
from echelon.state.ownership import LocalParameter

_SUBJECT = "checks"


def check_same_batch(batch: Batch, mesh: Mesh) -> None:
    """Raise, on every rank, unless all ranks of each replica are given the same."""
    if mesh.plan.ranks == mesh.plan.data:
        return
    local = torch.tensor(_fingerprint(batch), device=mesh.device)
    fingerprints = gather_rows(local, mesh.group("all"), _SUBJECT).tolist()
    first: dict[int, int] = {}
    for rank, position in enumerate(mesh.layout.positions):
        other = first.setdefault(position.replica, rank)
        if fingerprints[rank] != fingerprints[other]:
            raise UserError(
                f"ranks {other} and {rank} are given different batches: both are of replica "
                f"{position.replica} of the plan '{mesh.plan}', so they share one; give each "
                "engine.local(batch) of a batch that is the same on all ranks, or a sampler with "
                "num_replicas=engine.replicas, rank=engine.replica"
            )


def _fingerprint(structure: object) -> list[int]:
    """Two integers over all bits of a structure."""
    plain = placed = 0
    for leaf in tree_leaves(structure):
        pair = _of_tensor(leaf) if isinstance(leaf, Tensor) else (zlib.crc32(repr(leaf).encode()), 0)
        plain, placed = plain * 31 + pair[0], placed * 31 + pair[1]
    return [wrapped(plain), wrapped(placed)]


def _of_tensor(tensor: Tensor) -> tuple[int, int]:
    plain, placed = fingerprint(tensor)
    return plain + zlib.crc32(f"{tuple(tensor.shape)}{tensor.dtype}".encode()), placed


def check_same_gradients(
    local: Iterable[LocalParameter],
    replicated: Collection[nn.Parameter],
    group: Group,
    measured: Mapping[nn.Parameter, Tensor] = MappingProxyType({}),
) -> None:
    """Raise on all ranks of `group` unless their gradients of parameters that each has whole are the same.

    `measured`: by `measure_gradient`, of gradients that are gone.
    """
    whole = set(replicated)
    compared = sorted((each for each in local if each.parameter in whole), key=lambda e: (e.name, e.begin))
    if not compared:
        return
    local_measures = torch.stack(
        [measured.get(each.tensor, measure_gradient(each.tensor)) for each in compared]
    )
    gathered = gather_rows(local_measures, group, _SUBJECT)
    is_near = near(gathered, max(torch.finfo(each.tensor.dtype).eps for each in compared)).tolist()
    names = [each.name for each, is_same in zip(compared, is_near, strict=True) if not is_same]
    if names:
        raise UserError(
            f"tensor={group.size}: ranks have different gradients of {', '.join(dict.fromkeys(names))}, "
            "which are 'replicated': the input of these modules is not the same on every rank. If it is a "
            "part of the heads or features, make them 'heads' or 'inner' in the table that "
            "parallelize(tensor_table=…) takes; if a forward draws at random by itself, let nn.Dropout do it"
        )


def measure_gradient(parameter: nn.Parameter) -> Tensor:
    """A few numbers of its gradient; no gradient is one of zeros."""
    gradient = parameter.grad
    like = torch.zeros((), device=parameter.device)
    return measures(like if gradient is None else gradient)
